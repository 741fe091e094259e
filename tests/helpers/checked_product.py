"""Run one product, by an algorithm or by SUMMA with given blocks; check elements, counts and guard zones."""

from __future__ import annotations

from typing import Any

import numpy as np
from problems import SHAPES, TOLERANCE, gemm_error

from pdgemm import DistMatrix, pdgemm
from pdgemm.local.arrays.device import to_host
from pdgemm.matrix.local_arrays import new_array

MIXED: list[tuple[int, int, int]] = [
    *SHAPES["empty"][1:4],
    *SHAPES["ragged"][:3],
    *SHAPES["even"][:1],
    *SHAPES["larger"][:1],
]
GUARD = 7.25


def check(
    grid: Any,
    mnk: tuple[int, int, int],
    algorithm: str,
    shape: tuple[int, int],
    layers: int,
    *,
    block: Any = None,
    dtype: str = "float64",
    orders: str = "CCC",
    ops: str = "NN",
    alpha: complex = 1,
    beta: complex = 0,
    device: str = "host",
    **options: Any,
) -> Any:
    """Compare one product of windows of larger matrices with NumPy; return its report."""
    m, n, k = mnk
    made: dict[str, Any] = {"grid": grid, "dtype": dtype, "kind": "normal", "block": block, "device": device}
    sides = [(m, k) if ops[0] == "N" else (k, m), (k, n) if ops[1] == "N" else (n, k), (m, n)]
    wholes = [
        DistMatrix.random((r + 3, c + 2), seed=seed, order=order, **made)
        for seed, ((r, c), order) in enumerate(zip(sides, orders), 1)
    ]
    A, B, C = (x[1 : r + 1, 2 : c + 2] for x, (r, c) in zip(wholes, sides))
    a, b, c = A.allgather(), B.allgather(), C.allgather()
    before = [to_host(x.local).copy() for x in wholes]
    if beta == 0:
        C.local[...] = np.nan
    seen = {"N": lambda x: x, "T": lambda x: x.T, "C": lambda x: x.conj().T}
    result = pdgemm(
        alpha, A, B, beta, C, transa=ops[0], transb=ops[1], algorithm=algorithm, shape=shape, layers=layers, **options
    )
    assert result is C
    assert gemm_error(C.allgather(), alpha, seen[ops[0]](a), seen[ops[1]](b), beta, c) <= TOLERANCE, C.report
    assert all(np.array_equal(to_host(x.local), old) for x, old in zip(wholes[:2], before))
    mask = np.ones(wholes[2].shape, bool)
    mask[1 : m + 1, 2 : n + 2] = False
    here = mask[np.ix_(*wholes[2].indices())]
    assert np.array_equal(to_host(wholes[2].local)[here], before[2][here])
    report = C.report
    assert report.counted == report.predicted, str(report)
    assert report.extra_bytes == report.predicted_extra_bytes, str(report)
    if k and alpha:
        names = {"row": ("summa", "cannon"), "column": ("summa", "cannon")}.get(algorithm, (algorithm,))
        assert report.algorithm in names
        assert (report.grid, report.layers) == (shape, layers)
    return report


def framed(matrix: Any) -> tuple[Any, np.ndarray]:
    """Return a matrix whose local arrays are windows of larger ones filled with GUARD; and this rank's larger array."""
    rows, cols = matrix.local.shape
    frame = new_array((rows + 2, cols + 3), matrix.dtype, matrix.order, matrix.grid)
    frame[...] = GUARD
    frame[1 : rows + 1, 2 : cols + 2] = matrix.local
    layout = {"grid": matrix.grid, "block": matrix.block, "source": matrix.distribution.source}
    return DistMatrix.from_local(frame[1 : rows + 1, 2 : cols + 2], matrix.shape, **layout), frame


def check_summa(
    grid: Any,
    mnk: tuple[int, int, int],
    blocks: tuple[Any, ...],
    source: tuple[int, int],
    dtype: str,
    *,
    orders: str = "CCC",
    alpha: complex = 1,
    beta: complex = 0,
    seed: int = 0,
    **options: Any,
) -> Any:
    """Compare one product with NumPy; check guard zones, unchanged inputs, and exact counters; return its report."""
    (m, n, k), (mb, nb, ka, kb) = mnk, blocks
    pair = lambda r, c: None if r is None else (r, c)  # noqa: E731
    made: dict[str, Any] = {"grid": grid, "source": source, "dtype": dtype, "kind": "normal"}
    A = DistMatrix.random((m, k), block=pair(mb, ka), seed=seed + 1, order=orders[0], **made)
    B = DistMatrix.random((k, n), block=pair(kb, nb), seed=seed + 2, order=orders[1], **made)
    C = DistMatrix.random((m, n), block=pair(mb, nb), seed=seed + 3, order=orders[2], **made)
    a, b, c = A.allgather(), B.allgather(), C.allgather()
    if beta == 0:
        C.local[...] = np.nan
    (A, *frames), (B, *more), (C, *last) = framed(A), framed(B), framed(C)
    frames += more + last
    before = [frame.copy() for frame in frames[:2]]

    result = pdgemm(alpha, A, B, beta, C, algorithm="summa", shape=grid.shape, **options)

    assert result is C
    assert gemm_error(C.allgather(), alpha, a, b, beta, c) <= TOLERANCE
    for frame, old in zip(frames, before):
        assert np.array_equal(frame, old)  # inputs and their guard zones are unchanged
    C.local[...] = GUARD
    assert (frames[2] == GUARD).all()  # nothing was written around C
    report = C.report
    assert report.counted == report.predicted, str(report)
    assert report.extra_bytes == report.predicted_extra_bytes
    return report
