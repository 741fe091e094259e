"""Linear algebra that stands on the product: factorisations, solves and functions of matrices."""

from pdgemm.linalg.matrix_functions import expm, matrix_power, newton_schulz

__all__ = ["expm", "matrix_power", "newton_schulz"]
