"""Newton-Schulz steps on stacks of matrices on one rank: approximate orthogonal factors, computed only by products."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import sqrt
from typing import Any

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.local.arrays.arguments import shown
from pdgemm.local.arrays.element_functions import slabs
from pdgemm.local.blas.local_gemm import multiply_stack

MUON, STEPS = (3.4445, -4.7750, 2.0315), 5  # coefficients, and the number of steps
_CHUNK_BYTES = 1 << 20  # temporaries of this size stay in cache


def coefficients_of_steps(coefficients: Any, steps: int) -> list[tuple[float, ...]]:
    """Return the three coefficients (a, b, c) of each step.  Raises ArgumentError.  Local."""
    try:
        triples = np.atleast_2d(np.asarray(coefficients, float))
    except (TypeError, ValueError):
        raise ArgumentError(f"coefficients are real numbers (a, b, c), got {shown(coefficients)}") from None
    triples = np.repeat(triples, steps, axis=0) if len(triples) == 1 else triples
    if triples.shape != (steps, 3) or not np.isfinite(triples).all():
        raise ArgumentError(
            f"coefficients are (a, b, c), or one triple for each of {steps} steps, got shape {triples.shape}"
        )
    return [tuple(map(float, row)) for row in triples]


@np.errstate(over="ignore", invalid="ignore")  # where warnings are errors, only the owner would raise one
def orthogonal_factors(
    stack: np.ndarray,
    steps: int = STEPS,
    coefficients: Sequence[float] | Sequence[Sequence[float]] = MUON,
    work: np.ndarray | None = None,
) -> np.ndarray:
    """Overwrite matrices X of one shape with approximations of their orthogonal factors, and return them.  Local.

    X is divided by |X|_F; then each step computes X := a X + (b A + c A^2) X, where A = X X^T.  A step maps a singular
    value s to a s + b s^3 + c s^5.  At the end singular values are between about 0.7 and 1.2, except very small ones;
    they do not converge to 1.  A zero matrix stays zero.

    stack : (matrices, m, n), m <= n, float32 or float64, C-contiguous.   coefficients : as in `newton_schulz`.
    work  : flat, of `work_words` elements of the same type, overwritten; None: it is allocated.

    Cost of each matrix: (4 n m^2 + 2 m^3) flops a step.  Each matrix is multiplied by separate BLAS calls, so that its
    bits do not depend on the stack.
    Higham, Functions of Matrices, 2008, 8.3; Jordan et al., Muon, 2024.
    """
    matrices, m, n = stack.shape
    if work is None:
        work = np.empty(work_words(matrices, m, n, stack.dtype), stack.dtype)
    each = [[*map(stack.dtype.type, step)] for step in coefficients_of_steps(coefficients, steps)]
    for part in _slabs(matrices, m, n, stack.dtype):
        X = stack[part]
        square, whole = len(X) * m * m, len(X) * m * n
        A, B = (work[at : at + square].reshape(-1, m, m) for at in (0, square))
        Y = work[2 * square : 2 * square + whole].reshape(-1, m, n)
        for x in X:
            _to_norm_one(x)
        for a, b, c in each:
            multiply_stack(X, X.swapaxes(1, 2), A)
            multiply_stack(A, A, B)
            B *= c
            A *= b
            B += A  # b A + c A^2
            multiply_stack(B, X, Y)
            X *= a
            X += Y
    return stack


def work_words(matrices: int, m: int, n: int, dtype: np.dtype) -> int:
    """Return the words of `work` for the matrices of one slab: A, the polynomial of A, and its product with X."""
    most = max((x.stop - x.start for x in _slabs(matrices, m, n, dtype)), default=0)
    return most * (2 * m * m + m * n)


def _slabs(matrices: int, m: int, n: int, dtype: np.dtype) -> Iterator[slice]:
    """Yield slices of matrices that are multiplied together, so that their temporaries stay in cache."""
    return slabs(matrices, (2 * m * m + m * n) * dtype.itemsize, _CHUNK_BYTES)


def _to_norm_one(x: np.ndarray) -> None:
    """Divide a matrix by its Frobenius norm, in two steps so that no square overflows or vanishes; zeros stay.  Local.

    Squares are added up in float64, in an order that depends only on the shape.
    """
    largest = np.maximum(x.max(initial=0), -x.min(initial=0))
    if largest:
        x /= largest
        squares = (np.square(x[rows], dtype=np.float64).sum() for rows in slabs(*x.shape))
        x /= x.dtype.type(sqrt(sum(squares)))
