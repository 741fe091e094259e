"""ScaLAPACK's routines with ScaLAPACK's arguments; `pdgemm.scalapack` is the public module.

`blacs` and `descriptors` describe grids and layouts as ScaLAPACK does, `arguments` and `tied_vectors` check arguments
and number illegal ones as INFO does, `pblas` has the products, `lapack` eliminations and solves, `orthogonal` QR
factorisations, and `eigen` eigenproblems and singular values.
"""
