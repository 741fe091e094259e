"""Eigenvalues and eigenvectors of Hermitian matrices: reductions to tridiagonal form, divide and conquer, iterations.

Imports `linalg.functions`.
"""
