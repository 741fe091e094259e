"""Linear algebra that stands on the product: factorisations, solves and functions of matrices."""

from pdgemm.linalg.cholesky import cholesky as cholesky

__all__ = ["cholesky"]
