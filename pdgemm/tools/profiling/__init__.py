"""Traces of all ranks in one file, profiles of how ranks spend their time, and reports of the installed software."""
