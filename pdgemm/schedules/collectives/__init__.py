"""All-reduce, reduce, reduce-scatter, all-gather, all-to-all, broadcast, scatter and gather, by several algorithms.

A collective yields its messages step by step: source rank, target rank, range of parts, and whether the target adds
these parts; so the order of sums is fixed.  `vectors` reduces a matrix to a vector.
"""
