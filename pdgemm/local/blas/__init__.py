"""The BLAS and LAPACK of a rank: which library multiplies, its threads, and all calls of it.

`library`, `processors` and `threads` choose and describe the library; `local_gemm` is the only caller of its product,
`local_lapack`, `local_qr` and `compact_qr` of its factorisations.
"""
