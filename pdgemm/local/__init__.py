"""Work on one rank: arrays and their elements, and the BLAS and LAPACK that multiply and factor them.

The folder does not depend on grids or messages, and imports only `errors` and `names`.
"""
