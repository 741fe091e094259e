"""Linear algebra that stands on the product: factorisations, solves and functions of matrices."""

from pdgemm.linalg.cholesky import cho_solve as cho_solve
from pdgemm.linalg.cholesky import cholesky as cholesky
from pdgemm.linalg.lstsq import lstsq as lstsq
from pdgemm.linalg.qr import qr as qr
from pdgemm.linalg.triangular import inv_triangular as inv_triangular
from pdgemm.linalg.triangular import solve_triangular as solve_triangular
from pdgemm.linalg.triangular import trmm as trmm

__all__ = ["cho_solve", "cholesky", "inv_triangular", "lstsq", "qr", "solve_triangular", "trmm"]
