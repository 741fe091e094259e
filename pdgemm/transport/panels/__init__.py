"""The transport of the panels of factorisations: read in place, sent, gathered to one rank, or reduced up a tree."""
