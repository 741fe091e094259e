"""The work of one rank alone: arrays and their elements, and the BLAS and LAPACK that multiply and factor them.

The folder knows no grid and no message, and imports only `errors` and `names`.
"""
