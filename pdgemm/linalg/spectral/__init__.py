"""Singular values, eigenvalues, polar factors, norms and functions of matrices, by products and factorisations.

`iterations.Work` counts the words and flops of the steps of an iteration.  Imports `linalg.factors`.
"""
