"""Scaling studies: their cases, measurements and file of results, and the figures and pages drawn from it."""
