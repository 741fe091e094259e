"""Linear algebra that stands on the product: factorisations, solves and functions of matrices."""

from pdgemm.linalg.eigh import eigh
from pdgemm.linalg.kronecker import kron, matvec, outer
from pdgemm.linalg.matrix_functions import expm, matrix_power, newton_schulz, sqrtm
from pdgemm.linalg.norms import norm
from pdgemm.linalg.polar import matrix_sign, polar
from pdgemm.linalg.svd import svd

__all__ = [
    "eigh", "expm", "kron", "matrix_power", "matrix_sign", "matvec", "newton_schulz", "norm", "outer", "polar", "sqrtm", "svd",
]  # fmt: skip
