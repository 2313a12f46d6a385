"""Readers: one file for each family of formats. Only that file imports the library of its format.

A reader is a function from an open, seekable file to its parts. It may raise Unreadable, also after some parts.
"""
