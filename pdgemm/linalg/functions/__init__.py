"""Polar factors, functions of matrices, and products with small factors, by products and factorisations.

Imports `linalg.factors` and `linalg.work`.
"""
