"""Traces of all ranks in one file, profiles of how ranks spend their time, reports of the installed software, and
short texts of exceptions.
"""
