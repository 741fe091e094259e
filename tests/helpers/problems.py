"""Problems and tolerances shared by the tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from pdgemm.local.arrays import dtypes
from pdgemm.planning.algorithm_registry import ALGORITHMS, families

# Named groups: (m, n, k)
SHAPES = {
    "empty": [(0, 0, 0), (0, 5, 3), (4, 0, 3), (4, 5, 0), (0, 0, 7)],
    "ragged": [(1, 1, 1), (1, 9, 4), (7, 5, 11), (13, 8, 3), (5, 1, 17), (3, 3, 3)],
    "even": [(12, 12, 12), (24, 36, 12)],
    "larger": [(64, 31, 50), (29, 61, 83)],
}
# Block sizes (mb, nb, kb of A, kb of B); None is one block per rank
BLOCKS: list[tuple[Any, Any, Any, Any]] = [
    (None, None, None, None),
    (1, 1, 1, 1),
    (2, 3, 4, 5),
    (3, 2, 3, 3),
    (100, 100, 100, 100),
]
DTYPES = tuple(x.name for x in dtypes.BLAS)
NAMES = [*families(), "row", "column"]  # all algorithms; policies such as "auto" choose among them
FLOATS = [x.name for x in dtypes.FLOATS if x in dtypes.RESULTS]
NARROW = [(x.name, x.sums) for x in dtypes.TYPES if x.operand and x.sums]  # narrow types, and the types of their sums
NARROW_ON_DEVICES = [x for x in NARROW if dtypes.TYPE[np.dtype(x[0])].c_name]


def grid_shapes(size: int) -> list[tuple[int, int]]:
    """Return every grid shape Pr x Pc of `size` ranks."""
    return [(pr, size // pr) for pr in range(1, size + 1) if size % pr == 0]


def boxes(size: int) -> Iterator[tuple[int, int, int]]:
    """Yield every Pr x Pc of at most `size` ranks, with one layer, and with as many layers c as fit."""
    for pr, pc in itertools.product(range(1, size + 1), repeat=2):
        if pr * pc <= size:
            yield pr, pc, size // (pr * pc)
            if size // (pr * pc) > 1:
                yield pr, pc, 1


def accepted(size: int) -> list[tuple[str, tuple[int, int], int]]:
    """Return (algorithm, grid shape, layers) for all registered algorithms that can be forced on `size` ranks."""
    cases: list[tuple[str, tuple[int, int], int]] = [("row", (size, 1), 1), ("column", (1, size), 1)]
    for pr, pc, c in boxes(size):
        # layers, all ranks, or small grids that leave ranks idle
        if c > 1 or pr * pc == size or (pr, pc) in ((2, 2), (1, 2)):
            entries = [entry for entry in ALGORITHMS.values() if entry.runs_on(pr, pc, c, size)]
            cases += [(name, (pr, pc), c) for entry in entries for name in entry.names]
    return cases


def sources(shape: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Yield the first grid position, and the last if it is another."""
    yield 0, 0
    if shape != (1, 1):
        yield shape[0] - 1, shape[1] - 1


def op(x: np.ndarray, letter: str) -> np.ndarray:
    return {"N": x, "T": x.T, "C": x.conj().T}[letter]


def gemm_error(
    C: np.ndarray,
    alpha: complex,
    A: np.ndarray,
    B: np.ndarray,
    beta: complex = 0,
    C0: np.ndarray | None = None,
) -> float:
    """Return |C - Cref| / (eps (sqrt(k + 2) |alpha| |A| |B| + 2 |beta| |C0|)) in Frobenius norms.

    This is the error of SLATE's test_gemm, which accepts up to 3 (complex: divided by 2 sqrt 2 here); Higham 2002,
    3.6.  Cref is formed in double precision.
    """
    wide = np.result_type(C.dtype, np.float64)
    reference = alpha * (A.astype(wide) @ B.astype(wide))
    size = np.sqrt(A.shape[1] + 2) * abs(alpha) * np.linalg.norm(A) * np.linalg.norm(B)
    if C0 is not None and beta != 0:
        reference = reference + beta * C0
        size += 2 * abs(beta) * np.linalg.norm(C0)
    error = np.linalg.norm(C - reference)
    if size == 0:
        return 0.0 if error == 0 else np.inf
    factor = 2 * np.sqrt(2) if C.dtype.kind == "c" else 1
    return float(error / (factor * np.finfo(C.dtype).eps * size))


TOLERANCE = 3.0


NASTY = ("normal", "uniform", "constant", "graded", "cancelling", "sparse", "integers", "huge and tiny")


def nasty(kind: str, shape: tuple[int, int], dtype: str, seed: int) -> np.ndarray:
    """Return a matrix of one of the kinds NASTY, which have very different rounding errors."""
    r = np.random.default_rng(seed)
    x = r.normal(size=shape)
    if kind == "uniform":
        x = r.uniform(size=shape)
    if kind == "constant":
        x = np.full(shape, r.uniform(0.1, 3))
    if kind == "graded":
        x *= np.logspace(-6, 6, shape[0])[:, None]
    if kind == "cancelling":
        x[:, 1::2] = -x[:, : shape[1] // 2 * 2 : 2] * (1 + 1e-6)
    if kind == "sparse":
        x *= r.uniform(size=shape) < 0.02
    if kind == "integers":
        x = r.integers(-3, 4, shape).astype(float)
    if kind == "huge and tiny":
        x *= 10.0 ** r.integers(-12, 13, shape)
    return (x * (1 + 0.7j) if np.dtype(dtype).kind == "c" else x).astype(dtype)
