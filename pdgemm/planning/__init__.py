"""The choice of an algorithm, its grid and its layouts within a memory limit, without MPI.

`problem` and `question` say what is asked, `algorithm_registry` which grids and layouts each algorithm takes,
`search` lists candidates, `planner` costs and chooses; the results are a `ProductPlan`, a `Program` of several
schedules, or the costs of a collective (`collective_plan`).  Imports `schedules` and what stands below it.
"""
