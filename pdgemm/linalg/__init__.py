"""Linear algebra that stands on the product: factorisations, solves and functions of matrices."""

from pdgemm.linalg.cholesky import cholesky as cholesky
from pdgemm.linalg.lstsq import lstsq as lstsq
from pdgemm.linalg.qr import qr as qr

__all__ = ["cholesky", "lstsq", "qr"]
