"""Linear algebra that stands on the product: factorisations, solves and functions of matrices."""

from pdgemm.linalg.cholesky import cholesky as cholesky
from pdgemm.linalg.rank_k import gram as gram
from pdgemm.linalg.rank_k import her2k as her2k
from pdgemm.linalg.rank_k import herk as herk
from pdgemm.linalg.rank_k import syr2k as syr2k
from pdgemm.linalg.rank_k import syrk as syrk

__all__ = ["cholesky", "gram", "her2k", "herk", "syr2k", "syrk"]
