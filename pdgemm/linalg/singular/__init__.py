"""Singular values, the largest or all, with their vectors or without; least squares, and norms.

Imports `linalg.eigen`.
"""
