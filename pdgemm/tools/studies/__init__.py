"""Scaling studies: their cases, the measurements, the file of results, and the figures drawn from it."""
