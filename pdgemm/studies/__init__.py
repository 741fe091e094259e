"""Scaling studies: what is measured, measuring it, the file of measurements, and figures drawn from it."""
