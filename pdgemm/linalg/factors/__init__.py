"""Cholesky, LU, QR, least squares and solves: arguments are checked, matrices laid out, and panel algorithms run."""
