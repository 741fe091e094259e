"""Singular values, eigenvalues, polar factors, norms and functions of matrices, by products and factorisations."""
