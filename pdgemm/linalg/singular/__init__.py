"""Singular values, the largest or all, with their vectors or without, and norms.

Imports `linalg.eigen`.
"""
