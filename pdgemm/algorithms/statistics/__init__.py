"""Sorted elements, percentiles, histograms and reductions without NaN; `pdgemm.statistics` exports them to users.

`sorting` gathers whole columns on ranks, to sort them there.  It also finds elements by their position in the sorted
order of all elements: ranks count elements, and send none.  Imports `matrix` and `algorithms.blocks`.
"""
