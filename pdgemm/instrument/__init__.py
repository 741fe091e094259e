"""Measurements of a run: seconds, words and messages, as totals, as spans of a trace, and as reports.

`recorder` counts, `spans` keeps the times of phases while a trace is recorded, the reports join counted and predicted
figures, `observer` receives the progress of long functions, and `log` is the logger.  Loads no MPI; imports `grids` and
the folders and modules below it.
"""
