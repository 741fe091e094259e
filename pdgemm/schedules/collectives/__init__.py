"""All-reduce, reduce-scatter, all-gather, all-to-all, broadcast, scatter and gather, by several algorithms each.

A collective says step by step which rank sends which range of parts to whom, and whether it is added; the order of
sums is part of it.  `vectors` says how a matrix is reduced to a vector.
"""
