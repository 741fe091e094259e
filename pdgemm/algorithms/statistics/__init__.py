"""Sorted elements, percentiles, histograms and reductions without NaN; `pdgemm.statistics` has them for users.

`columns` brings whole columns to ranks and lets NumPy compute; `ranked` finds elements by their place in the order of
all elements, by counting.  Imports `matrix` and `algorithms.blocks`.
"""
