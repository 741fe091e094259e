"""Linear algebra that stands on the product: factorisations, solves and functions of matrices."""

from pdgemm.linalg.cholesky import cholesky as cholesky
from pdgemm.linalg.householder import householder_qr as householder_qr

__all__ = ["cholesky", "householder_qr"]
