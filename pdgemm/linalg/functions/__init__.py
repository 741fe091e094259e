"""Polar factors, functions of matrices, and products with small factors, by products and factorisations.

`iterations.Work` counts the words and flops of the steps of an iteration.  Imports `linalg.factors`.
"""
