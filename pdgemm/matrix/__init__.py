"""`DistMatrix`: a matrix that is distributed over a process grid, its views, and what NumPy's functions do with it.

`matrix_base` has layout and views, `constructors`, `reductions`, `numpy_functions`, `numpy_linalg` and
`array_functions` the methods and protocols; `batch` many small matrices, `gather` a matrix on one rank, `residual`
the check of a product, and `argument_checks` what one rank can see is wrong with arguments.  Imports `transport` and
what stands below it.
"""
