"""Algorithms as values: the messages, reads, products and buffers of every rank, round by round, without MPI or arrays.

A `Schedule` defines rounds and buffers.  Words, messages, work and bytes are sums over these, or closed formulas that
tests compare with the sums.  All numbers are computed for any rank without communication; the buffers for rank None are
the maximum over all ranks.  A schedule contains no seconds: `pdgemm.planning.machines` times it on a machine.  The
folder imports `errors`, `grids`, `instrument`, `local` and `support`.
"""
