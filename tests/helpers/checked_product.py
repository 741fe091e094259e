"""One product by one algorithm, checked in every respect."""

from __future__ import annotations

from typing import Any

import numpy as np
from problems import SHAPES, TOLERANCE, gemm_error

MIXED: list[tuple[int, int, int]] = [
    *SHAPES["empty"][1:4],
    *SHAPES["ragged"][:3],
    *SHAPES["even"][:1],
    *SHAPES["larger"][:1],
]


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
    """One product against NumPy, in the middle of larger matrices; its report."""
    from pdgemm import DistMatrix, pdgemm
    from pdgemm.local.arrays.device import to_host

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
