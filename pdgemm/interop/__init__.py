"""Data and calls of other libraries: ScaLAPACK's routines with its arguments, and dask's arrays.

The public names are in `pdgemm.scalapack` and `pdgemm.interchange`.  Imports `linalg`, `gemm`, `algorithms`.
"""
