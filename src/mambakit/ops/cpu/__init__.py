"""CPU kernels: numba for loops along time or rows, matrix products for SSD.

Imported at the first call that needs them, since numba takes a moment to load.
"""
