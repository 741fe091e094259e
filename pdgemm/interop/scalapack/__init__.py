"""ScaLAPACK's routines with ScaLAPACK's arguments; `pdgemm.scalapack` is the public module, and lists the routines.

`blacs` and `descriptors` describe grids and layouts as ScaLAPACK does.  `argument_lists` makes a routine from
a Python function that declares the arguments, checks them, and numbers illegal ones as INFO does; `submatrices` and
`tied_vectors` check arguments that are matrices and vectors.  `pblas` has the products, `copies` the copies between
contexts, `lapack` eliminations and solves, `orthogonal` QR factorisations, and `eigen` eigenproblems and singular
values.
"""
