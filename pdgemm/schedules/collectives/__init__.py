"""All-reduce, reduce, reduce-scatter, all-gather, all-to-all, broadcast, scatter and gather, by several algorithms.

A collective yields its messages step by step.  A step states the source rank, target rank and range of parts of each
message, and whether the targets add the parts that they receive.  These steps fix the order of all additions.
`vectors` reduces a matrix to a vector.
"""
