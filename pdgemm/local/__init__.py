"""What one rank computes alone: arrays and their elements, and the BLAS and LAPACK that multiply and factor them.

Knows no grid and no message, and imports `errors` alone.
"""
