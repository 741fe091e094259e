"""ScaLAPACK's routines with its arguments; `pdgemm.scalapack` has them for users.

`blacs` and `descriptors` describe grids and layouts as ScaLAPACK does, `arguments` numbers what is wrong as INFO
does, `pblas` has the products and `lapack` the solves and factorisations.
"""
