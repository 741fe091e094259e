"""Singular values, eigenvalues, polar factors, norms and functions of matrices, by products and factorisations.

`iterations.Work` counts what the steps of an iteration send and multiply.  Imports `linalg.factors`.
"""
