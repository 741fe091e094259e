"""Factorisations and solves as values: the local factorisations, messages and products of every rank for each panel.

`panel_schedule` has the panels along a diagonal, `tsqr_schedule` the tree of triangles in the QR factorisation of a
tall matrix, `row_moves` the row exchanges of pivots.
"""
