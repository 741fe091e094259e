"""Sorted elements, percentiles, histograms and reductions without NaN; `pdgemm.statistics` exports them to users.

`sorting` gathers whole columns on ranks, where NumPy computes with them, and finds elements by their position in the
sorted order of all elements, by counting.  Imports `matrix` and `algorithms.blocks`.
"""
