"""Traces of all ranks in one file, and profiles made from them."""
