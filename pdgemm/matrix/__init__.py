"""`DistMatrix`: a matrix that is distributed over a process grid, its views, and NumPy's functions of it.

`matrix_base` has the layout and the views; `constructors`, `reductions`, `numpy_functions` and `array_functions` have
the methods and NumPy's protocols; `local_arrays` allocates, `gather` moves whole matrices to one rank or to all,
`batch` has many small matrices, `residual` checks a product, and `argument_checks` has the checks that a rank makes by
itself.  The folder imports `transport` and the folders below it.
"""
