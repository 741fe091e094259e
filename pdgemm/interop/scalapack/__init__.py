"""ScaLAPACK's routines with ScaLAPACK's arguments; `pdgemm.scalapack` is the public module, and lists the routines.

`blacs` and `descriptors` describe grids and layouts as ScaLAPACK does.  `argument_lists` makes routines of functions
that declare their arguments, checks these, and numbers illegal ones as INFO does; `submatrices` and `tied_vectors` are
arguments of several entries.  `pblas` has the products, `copies` the copies between contexts, `lapack` eliminations and
solves, `orthogonal` QR factorisations, and `eigen` eigenproblems and singular values.
"""
