"""Traces of all ranks as one file, and where their time went."""
