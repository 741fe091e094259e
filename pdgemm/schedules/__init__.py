"""Algorithms as values: what every rank sends, reads, multiplies and allocates, in rounds, without MPI or arrays.

A `Schedule` says its rounds and buffers; words, messages, work and bytes follow from these, or are formulas that tests
compare with them.  Figures are computed for any rank without communication; for rank None they are the maximum over all
ranks.  Seconds are not a schedule's: `pdgemm.planning.machines` times it on a machine.  The folder imports `grids`,
`local`, `instrument` and `support`.
"""
