"""Measurements of a run: seconds, words and messages, as totals, as spans of a trace, and as reports.

`recorder` counts, `spans` keeps the times of phases while a trace is taken, the reports join counted and predicted
figures, `observer` is told of the progress of long functions, and `log` is the logger.  Loads no MPI; imports
`support`, `grids`.
"""
