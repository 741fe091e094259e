"""The local product: the choice of a BLAS, its threads, and all calls of it."""
