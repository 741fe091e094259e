"""Quantization of matrices to 8 bits: error bounds, largest numbers, and numbers that overflow."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from problems import NASTY, nasty
from tiers import in_turn

from pdgemm import DistMatrix, ProcessGrid, quantize
from pdgemm.errors import LayoutError

pytestmark = pytest.mark.mpi
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
# unit roundoff, and the least positive number (Micikevicius et al. 2022, table 1)
BOUNDS = {"float8_e4m3fn": (2.0**-4, 2.0**-9), "float8_e5m2": (2.0**-3, 2.0**-16), "int8": (0.0, 1.0)}
SHARING: list[tuple[str, tuple[int, int]]] = [
    ("tensor", (33, 40)), ("row", (1, 40)), ("column", (33, 1)), ("block", (1, 8)), ("block", (4, 8)),
]  # fmt: skip


def largest_of_blocks(x: np.ndarray, mb: int, nb: int) -> np.ndarray:
    m, n = (-(-size // side) for size, side in zip(x.shape, (mb, nb)))
    blocks = [[np.abs(x[i * mb : (i + 1) * mb, j * nb : (j + 1) * nb]).max() for j in range(n)] for i in range(m)]
    return np.array(blocks, np.float64)


def test_each_element_is_within_the_bound(comm: Any, grid: Any) -> None:
    kinds = [(kind, dtype) for kind in NASTY for dtype in LARGEST]
    for number, ((kind, dtype), (scales, (mb, nb))) in enumerate(in_turn(kinds, SHARING)):
        x = nasty(kind, (33, 40), ("float32", "float64")[number % 2], number)
        A = DistMatrix.from_global(x, grid=grid, block=8)
        powers = number % 3 == 0
        Q = quantize(
            A, dtype, scales, block=(mb, nb), scale_dtype="float8_e8m0fnu" if powers else "float32", saturate=True
        )
        assert Q.block == (mb, nb) and np.array_equal(A.allgather(), x)
        s, largest = Q.scales.allgather().astype(float), largest_of_blocks(x.astype(float), mb, nb)
        exact = largest / LARGEST[dtype]
        some = exact > 2.0**-126  # smaller scales underflow float32
        assert (s[largest == 0] == 1).all()
        if powers:
            assert np.array_equal(s, 2.0 ** np.rint(np.log2(s)))
            assert ((s >= exact * (1 - 2.0**-50)) & (s < 2 * exact * (1 + 2.0**-50)))[some & (exact < 2.0**127)].all()
        else:
            assert np.allclose(s[some], exact[some], rtol=2.0**-23, atol=0)
        u, least = BOUNDS[dtype]
        each = np.repeat(np.repeat(s, mb, 0), nb, 1)[:33, :40]
        error = np.abs(Q.decode("float64").allgather() - x)
        assert (error <= (u + 2.0**-22) * np.abs(x) + each * least * (0.5 + 2.0**-16)).all(), (kind, dtype, scales)


def test_too_large_elements_saturate_or_overflow(comm: Any, grid: Any) -> None:
    """Both overflow modes of OCP's 8-bit floating point 1.0: saturating, and to NaN or infinity."""
    x = np.array([[1.0, -3, 1e9, -1e9, np.inf, -np.inf, np.nan, 0.5]], np.float32)
    A = DistMatrix.from_global(x, grid=grid)
    for dtype, top in LARGEST.items():
        there = x[:, x[0] == x[0]] if dtype == "int8" else x
        Q = quantize(DistMatrix.from_global(there, grid=grid), dtype, 0.5)
        expected = np.clip(there / 0.5, -top, top)
        assert np.array_equal(Q.values.allgather().astype(float), expected, equal_nan=True)
    for dtype, beyond in (("float8_e4m3fn", np.nan), ("float8_e5m2", np.inf)):
        Q = quantize(A, dtype, 0.5, saturate=False)
        expected = x / 0.5
        expected[0, 2:6] = beyond * np.array([1, -1, 1, -1])
        assert np.array_equal(Q.values.allgather().astype(float), expected, equal_nan=True)
    Q = quantize(A, "float8_e5m2", "row")  # infinities and NaN do not count for the scale
    assert Q.scales.allgather()[0, 0] == np.float32(1e9 / 57344)


def test_ties_are_rounded_to_even(comm: Any, grid: Any) -> None:
    every = np.arange(256, dtype=np.uint8)
    for dtype, top in LARGEST.items():
        known = every.view(dtype).astype(np.float64)
        known = np.unique(known[np.isfinite(known) & (np.abs(known) <= top)])
        middle = (known[1:] + known[:-1]) / 2
        x = np.concatenate([known, middle, middle * (1 + 1e-7), middle * (1 - 1e-7)])[None, :].astype(np.float32)
        Q = quantize(DistMatrix.from_global(x, grid=grid), dtype, 1.0)
        expected = np.rint(x).clip(-top, top) if dtype == "int8" else x.astype(getattr(ml_dtypes, dtype)).astype("f4")
        assert np.array_equal(Q.values.allgather().astype(np.float32), expected)
        assert np.array_equal(Q.decode().allgather(), expected)


def test_blocks_that_cross_ranks_are_refused(comm: Any) -> None:
    with ProcessGrid(comm, (1, comm.size)) as grid:
        A = DistMatrix.random((8, 160), grid=grid, block=48, kind="normal")
        if comm.size > 1:
            with pytest.raises(LayoutError, match="blocks of 32 columns that share a scale must not cross ranks"):
                quantize(A, "int8", "block")
            with pytest.raises(LayoutError, match="the first block has 16"):
                quantize(A[:, 32:], "int8", "block", block=(1, 32))
        whole = quantize(A.redistribute(block=(8, 64)), "int8", "block")
        part = quantize(A[:, 32:], "int8", "block", block=(3, 16))
        assert whole.scales.shape == (8, 5) and part.scales.shape == (3, 8)
        x = A.allgather()
        assert np.allclose(whole.decode().allgather(), x, atol=np.abs(x).max() / 250)
        assert np.allclose(part.decode().allgather(), x[:, 32:], atol=np.abs(x).max() / 250)
