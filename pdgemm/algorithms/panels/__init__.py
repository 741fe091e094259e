"""Cholesky, triangular solves, LU, Householder and tall QR as loops over panels, which read like their papers.

A panel is factored, travels, and updates what is left of the matrix; `panel_run` allocates, runs and reports one
loop.  Imports `schedules.panels`, `transport.panels`, `local` and `matrix`.
"""
