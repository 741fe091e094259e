"""The choice of an algorithm, its grid and its layouts within a memory limit, without MPI.

`problem` and `question` hold the input of the planner, `algorithm_registry` the grids and layouts of each algorithm.
`search` lists candidates; `planner` computes their costs and chooses one.  The results are a `ProductPlan`, a `Program`
of several stages, or the costs of a collective (`collective_plan`).  Imports `schedules` and the folders below it.
"""
