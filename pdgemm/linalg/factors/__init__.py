"""Cholesky, LU, QR, solves, rank-k updates: arguments are checked, matrices redistributed, and panel algorithms run."""
