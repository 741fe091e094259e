"""Cholesky, LU, QR, least squares, solves: arguments are checked, matrices redistributed, and panel algorithms run."""
