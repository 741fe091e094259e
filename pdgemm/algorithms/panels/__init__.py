"""Cholesky, triangular solves, LU, QR and the reduction to tridiagonal form as loops that read like their papers.

Each step of a loop factors a panel, transfers it to the other ranks, and updates the trailing matrix.  `panel_run`
allocates the buffers of a loop, runs the loop and reports on it.
Imports `schedules.panels`, `transport.panels`, `local` and `matrix`.
"""
