"""Linear algebra that stands on the product: factorisations, solves and functions of matrices."""

from pdgemm.linalg.cholesky import cho_solve as cho_solve
from pdgemm.linalg.cholesky import cholesky as cholesky
from pdgemm.linalg.eigh import eigh as eigh
from pdgemm.linalg.kronecker import kron as kron
from pdgemm.linalg.kronecker import matvec as matvec
from pdgemm.linalg.kronecker import outer as outer
from pdgemm.linalg.lstsq import lstsq as lstsq
from pdgemm.linalg.lu import LU as LU
from pdgemm.linalg.lu import det as det
from pdgemm.linalg.lu import lu as lu
from pdgemm.linalg.lu import lu_factor as lu_factor
from pdgemm.linalg.lu import lu_solve as lu_solve
from pdgemm.linalg.lu import slogdet as slogdet
from pdgemm.linalg.matrix_functions import expm as expm
from pdgemm.linalg.matrix_functions import matrix_power as matrix_power
from pdgemm.linalg.matrix_functions import newton_schulz as newton_schulz
from pdgemm.linalg.matrix_functions import sqrtm as sqrtm
from pdgemm.linalg.norms import cond as cond
from pdgemm.linalg.norms import norm as norm
from pdgemm.linalg.plans import plan as plan
from pdgemm.linalg.polar import matrix_sign as matrix_sign
from pdgemm.linalg.polar import polar as polar
from pdgemm.linalg.qr import qr as qr
from pdgemm.linalg.rank_k import gram as gram
from pdgemm.linalg.rank_k import her2k as her2k
from pdgemm.linalg.rank_k import herk as herk
from pdgemm.linalg.rank_k import syr2k as syr2k
from pdgemm.linalg.rank_k import syrk as syrk
from pdgemm.linalg.solve import inv as inv
from pdgemm.linalg.solve import solve as solve
from pdgemm.linalg.svd import svd as svd
from pdgemm.linalg.triangular import inv_triangular as inv_triangular
from pdgemm.linalg.triangular import solve_triangular as solve_triangular
from pdgemm.linalg.triangular import trmm as trmm

__all__ = [
    "LU",
    "cho_solve",
    "cholesky",
    "cond",
    "det",
    "eigh",
    "expm",
    "gram",
    "her2k",
    "herk",
    "inv",
    "inv_triangular",
    "kron",
    "lstsq",
    "lu",
    "lu_factor",
    "lu_solve",
    "matrix_power",
    "matrix_sign",
    "matvec",
    "newton_schulz",
    "norm",
    "outer",
    "plan",
    "polar",
    "qr",
    "slogdet",
    "solve",
    "solve_triangular",
    "sqrtm",
    "svd",
    "syr2k",
    "syrk",
    "trmm",
]
