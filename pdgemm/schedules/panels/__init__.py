"""Factorisations and solves as values: what every rank factors, sends and multiplies for each panel.

`panel_schedule` has the panels along a diagonal, `tsqr_schedule` the tree of triangles of a tall QR, `row_moves` the
rows that pivots exchange.
"""
