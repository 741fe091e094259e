"""Linear algebra that stands on the product: factorisations, solves and functions of matrices."""

from pdgemm.linalg.cholesky import cho_solve as cho_solve
from pdgemm.linalg.cholesky import cholesky as cholesky
from pdgemm.linalg.householder import householder_qr as householder_qr
from pdgemm.linalg.triangular import inv_triangular as inv_triangular
from pdgemm.linalg.triangular import solve_triangular as solve_triangular
from pdgemm.linalg.triangular import trmm as trmm

__all__ = ["cho_solve", "cholesky", "householder_qr", "inv_triangular", "solve_triangular", "trmm"]
