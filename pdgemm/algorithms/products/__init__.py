"""SUMMA, Cannon, stationary A or B and 2.5D as loops, each of which reads like its paper.

An executor is constructed once from a `Call` and called any number of times; an `Accumulator` hands panels to BLAS.
Imports `schedules.products`, `transport` and `local`.
"""
