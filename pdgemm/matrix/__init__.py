"""Matrices that are spread over a process grid."""
