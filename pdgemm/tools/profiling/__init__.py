"""Traces of all ranks in one file, profiles of where their time went, and reports of what is installed."""
