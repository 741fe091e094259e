"""`DistMatrix`: a matrix that is distributed over a process grid, its views, and NumPy's functions of it.

`matrix_base` has the layout and the views; `constructors`, `reductions`, `numpy_functions` and `array_functions` have
the methods and NumPy's protocols; `local_arrays` allocates, `gather` collects whole matrices on one rank or on all,
`batch` has many small matrices, `residual` checks a product, and `argument_checks` has the checks that need no
communication.  The folder imports `transport` and the folders below it.
"""
