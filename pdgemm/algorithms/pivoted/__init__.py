"""Factorisations whose panels are known only when the panels before them are factored: QR with column pivoting, Aasen.

Imports what `algorithms.panels` imports, and its Householder reflections.
"""
