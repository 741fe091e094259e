"""The BLAS and LAPACK of a rank: the choice of the library, its threads, and all calls of the library.

`library`, `processors` and `threads` choose and describe the library; only `local_gemm` calls its matrix product, and
only `local_lapack`, `local_qr` and `secular` call its LAPACK.
"""
