"""Matrices that are distributed over a process grid."""
