"""Ranks: everything that knows that a run is more than one process."""
