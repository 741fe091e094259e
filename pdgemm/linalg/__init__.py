"""Linear algebra that stands on the product: factorisations, solves and functions of matrices."""

from pdgemm.linalg.cholesky import cho_solve as cho_solve
from pdgemm.linalg.cholesky import cholesky as cholesky
from pdgemm.linalg.lu import LU as LU
from pdgemm.linalg.lu import det as det
from pdgemm.linalg.lu import lu as lu
from pdgemm.linalg.lu import lu_factor as lu_factor
from pdgemm.linalg.lu import lu_solve as lu_solve
from pdgemm.linalg.lu import slogdet as slogdet
from pdgemm.linalg.solve import inv as inv
from pdgemm.linalg.solve import solve as solve
from pdgemm.linalg.triangular import inv_triangular as inv_triangular
from pdgemm.linalg.triangular import solve_triangular as solve_triangular
from pdgemm.linalg.triangular import trmm as trmm

__all__ = [
    "LU",
    "cho_solve",
    "cholesky",
    "det",
    "inv",
    "inv_triangular",
    "lu",
    "lu_factor",
    "lu_solve",
    "slogdet",
    "solve",
    "solve_triangular",
    "trmm",
]
