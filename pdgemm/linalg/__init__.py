"""Linear algebra that stands on the product: factorisations, solves and functions of matrices."""

from pdgemm.linalg.lstsq import lstsq
from pdgemm.linalg.qr import qr

__all__ = ["lstsq", "qr"]
