"""The transport of the panels of factorisations: read in place, sent, gathered to one rank, or reduced up a tree.

`swap` exchanges parts of vectors among all ranks of a grid, again and again.
"""
