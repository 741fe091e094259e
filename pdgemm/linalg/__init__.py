"""Linear algebra that stands on the product: factorisations, solves and functions of matrices."""

from pdgemm.linalg.cholesky import cho_solve as cho_solve
from pdgemm.linalg.cholesky import cholesky as cholesky
from pdgemm.linalg.lstsq import lstsq as lstsq
from pdgemm.linalg.plans import plan as plan
from pdgemm.linalg.qr import qr as qr
from pdgemm.linalg.rank_k import gram as gram
from pdgemm.linalg.rank_k import her2k as her2k
from pdgemm.linalg.rank_k import herk as herk
from pdgemm.linalg.rank_k import syr2k as syr2k
from pdgemm.linalg.rank_k import syrk as syrk
from pdgemm.linalg.triangular import inv_triangular as inv_triangular
from pdgemm.linalg.triangular import solve_triangular as solve_triangular
from pdgemm.linalg.triangular import trmm as trmm

__all__ = [
    "cho_solve",
    "cholesky",
    "gram",
    "her2k",
    "herk",
    "inv_triangular",
    "lstsq",
    "plan",
    "qr",
    "solve_triangular",
    "syr2k",
    "syrk",
    "trmm",
]
