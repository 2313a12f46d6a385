"""Readers: one file for each family of formats, which alone imports the library that it needs."""
