"""Linear algebra that stands on the product: factorisations, solves and functions of matrices."""

from pdgemm.linalg.kronecker import kron, matvec, outer
from pdgemm.linalg.matrix_functions import expm, matrix_power, newton_schulz
from pdgemm.linalg.norms import norm
from pdgemm.linalg.svd import svd

__all__ = ["expm", "kron", "matrix_power", "matvec", "newton_schulz", "norm", "outer", "svd"]
