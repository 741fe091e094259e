"""Products of integers of 8 to 64 bits are exact, modulo two to the number of bits of C."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import tiers
from drawn_tensors import tensor_of
from problems import accepted

from pdgemm import Batch, DistMatrix, DistTensor, matmul_batched, pdgemm
from pdgemm.errors import DTypeError
from pdgemm.local.arrays import dtypes

pytestmark = [pytest.mark.mpi, tiers.every_grid]
KINDS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def whole(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    """Return integers of the whole range of a type."""
    ends = np.iinfo(dtype)
    return np.random.default_rng(seed).integers(ends.min, ends.max, shape, dtype=dtype, endpoint=True)


def modulo(x: np.ndarray, dtype: Any) -> np.ndarray:
    """Return Python's integers in a type, modulo two to the number of its bits."""
    kind = np.dtype(dtype)
    bits = np.array([int(v) % (1 << 8 * kind.itemsize) for v in x.ravel()], np.uint64).reshape(x.shape)
    return bits.astype(f"u{kind.itemsize}").view(kind)


def exact(alpha: int, a: np.ndarray, b: np.ndarray, beta: int = 0, c: Any = 0) -> np.ndarray:
    """Return alpha a b + beta c in Python's integers."""
    product = np.zeros((*a.shape[:-1], b.shape[-1]), object)
    for j in range(a.shape[-1]):
        product = product + a[..., j : j + 1].astype(object) * b[..., j : j + 1, :].astype(object)
    return np.asarray(alpha * product + beta * np.asarray(c).astype(object))


@pytest.mark.parametrize("kind", KINDS)
def test_products_of_all_algorithms(grids: list[Any], kind: str) -> None:
    """A of one type, with B and C of drawn types, and panels of two inner indices."""
    draw, comm = random.Random(kind), grids[0].comm
    for name, shape, layers in draw.sample(accepted(comm.size), 12 if tiers.everything() else min(4, comm.size + 1)):
        of_b, of_c, grid = draw.choice(KINDS), draw.choice([x for x in KINDS if x != "int8"]), draw.choice(grids)
        m, n, k = (draw.choice((1, 5, 9)) for _ in range(3))
        if "u" in of_c + of_b + kind and dtypes.common(*map(np.dtype, (kind, of_b, of_c))).kind == "f":
            of_b = of_c = kind if kind != "int8" else "int16"  # NumPy's common type of int64 and uint64 is float64
        a, b, c = whole((m, k), kind, 1), whole((k, n), of_b, 2), whole((m, n), of_c, 3)
        A, B, C = (
            DistMatrix.from_global(x, grid=grid, order=draw.choice("CF"), block=draw.choice((None, (2, 3))))
            for x in (a, b, c)
        )
        alpha, beta = draw.choice((1, -3, 7 << 40)), draw.choice((0, 1, -2))
        pdgemm(alpha, A, B, beta, C, algorithm=name, shape=shape, layers=layers, panel_width=2)
        assert np.array_equal(C.allgather(), modulo(exact(alpha, a, b, beta, c), of_c)), (name, kind, of_b, of_c)
        assert C.report.counted == C.report.predicted


def test_new_results_have_the_common_type_and_words_of_the_plan(grids: list[Any]) -> None:
    for at, kind in enumerate(KINDS[1:]):
        grid = grids[at % len(grids)]
        A, B = (DistMatrix.from_global(whole((6, 6), kind, seed), grid=grid, block=2) for seed in (1, 2))
        C = A @ B
        assert C.dtype == kind
        assert np.array_equal(C.allgather(), A.allgather() @ B.allgather())
        assert C.report.counted == C.report.predicted


@pytest.mark.parametrize("kind", KINDS)
def test_stacks_and_tensors(grids: list[Any], kind: str) -> None:
    draw, grid = random.Random(kind), grids[-1]
    dtype = dtypes.product(np.dtype(kind), np.dtype(kind))
    a, b = whole((3, 4, 5), kind, 1), whole((3, 5, 2), kind, 2)
    A, B = (Batch.from_global(x, grid.comm) for x in (a, b))
    C = matmul_batched(A, B, alpha=-2)
    for at, item in zip(np.flatnonzero(C.owner == grid.comm.rank), C.items):
        assert np.array_equal(item, modulo(exact(-2, a[at], b[at]), dtype))
    X, Y = (tensor_of(x, grid, draw) for x in (a, b))
    for e in ("bij,bjk->bik", "bij,ejk->ebik", "bij,bij->ji", "bij->j", "bij,bij->bij", "bij,ejk->"):
        pair = (X,) if "," not in e else (X, X) if "k" not in e else (X, Y)
        arrays = [(a if x is X else b).astype(dtype) for x in pair]
        result = np.einsum(e, *pair)
        whole_result = result.allgather() if isinstance(result, DistTensor) else result
        assert whole_result.dtype == dtype
        assert np.array_equal(whole_result, np.einsum(e, *arrays)), (e, kind)


def test_what_is_not_multiplied(grid: Any) -> None:
    A, B = (DistMatrix.from_global(whole((4, 4), kind, 1), grid=grid) for kind in ("int32", "int64"))
    with pytest.raises(DTypeError, match="bool"):
        pdgemm(1, A, A < 0)
    with pytest.raises(DTypeError, match="checksums of integers are those of int8, not of int32"):
        pdgemm(1, A, B, protect="detect")
