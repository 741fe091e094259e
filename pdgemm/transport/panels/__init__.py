"""The transport of the panels of factorisations: read in place, sent, gathered to one rank, or reduced up a tree.

`Task.swap` prepares a repeated exchange of parts of vectors among all ranks of a grid.
"""
