"""Linear algebra that stands on the product: factorisations, solves and functions of matrices."""

from pdgemm.factors.cholesky import cho_factor as cho_factor
from pdgemm.factors.cholesky import cho_solve as cho_solve
from pdgemm.factors.cholesky import cholesky as cholesky
from pdgemm.factors.householder import householder_qr as householder_qr
from pdgemm.factors.lstsq import lstsq as lstsq
from pdgemm.factors.lu import LU as LU
from pdgemm.factors.lu import det as det
from pdgemm.factors.lu import lu as lu
from pdgemm.factors.lu import lu_factor as lu_factor
from pdgemm.factors.lu import lu_solve as lu_solve
from pdgemm.factors.lu import slogdet as slogdet
from pdgemm.factors.qr import qr as qr
from pdgemm.factors.rank_k import gram as gram
from pdgemm.factors.rank_k import her2k as her2k
from pdgemm.factors.rank_k import herk as herk
from pdgemm.factors.rank_k import syr2k as syr2k
from pdgemm.factors.rank_k import syrk as syrk
from pdgemm.factors.solve import inv as inv
from pdgemm.factors.solve import solve as solve
from pdgemm.factors.triangular import inv_triangular as inv_triangular
from pdgemm.factors.triangular import solve_triangular as solve_triangular
from pdgemm.factors.triangular import trmm as trmm
from pdgemm.spectral.eigh import eigh as eigh
from pdgemm.spectral.eigh import eigvalsh as eigvalsh
from pdgemm.spectral.kronecker import kron as kron
from pdgemm.spectral.kronecker import matvec as matvec
from pdgemm.spectral.kronecker import outer as outer
from pdgemm.spectral.matrix_functions import expm as expm
from pdgemm.spectral.matrix_functions import matrix_power as matrix_power
from pdgemm.spectral.matrix_functions import newton_schulz as newton_schulz
from pdgemm.spectral.matrix_functions import sqrtm as sqrtm
from pdgemm.spectral.norms import cond as cond
from pdgemm.spectral.norms import norm as norm
from pdgemm.spectral.plans import plan as plan
from pdgemm.spectral.polar import matrix_sign as matrix_sign
from pdgemm.spectral.polar import polar as polar
from pdgemm.spectral.singular_values import matrix_rank as matrix_rank
from pdgemm.spectral.singular_values import pinv as pinv
from pdgemm.spectral.singular_values import svdvals as svdvals
from pdgemm.spectral.svd import svd as svd

__all__ = [
    "LU",
    "cho_factor",
    "cho_solve",
    "cholesky",
    "cond",
    "det",
    "eigh",
    "eigvalsh",
    "expm",
    "gram",
    "her2k",
    "herk",
    "householder_qr",
    "inv",
    "inv_triangular",
    "kron",
    "lstsq",
    "lu",
    "lu_factor",
    "lu_solve",
    "matrix_power",
    "matrix_rank",
    "matrix_sign",
    "matvec",
    "newton_schulz",
    "norm",
    "outer",
    "pinv",
    "plan",
    "polar",
    "qr",
    "slogdet",
    "solve",
    "solve_triangular",
    "sqrtm",
    "svd",
    "svdvals",
    "syr2k",
    "syrk",
    "trmm",
]
