"""Data and calls of other libraries: ScaLAPACK's routines with ScaLAPACK's arguments, and dask arrays.

The public names are in `pdgemm.scalapack` and `pdgemm.interchange`.  The folder imports `linalg`, `gemm`, `algorithms`.
"""
