"""Chains of functions of tensors of 0 to 8 dimensions, in all kinds of layouts, compared with NumPy's.

Each function gets the result of the function before it: views, parts and reshapes of each other.  The elements are
whole numbers, so that results are equal.  With --all there are 1,500 chains on each number of ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import pytest
import tiers
from drawn_tensors import drawn_key, drawn_layout, elements, tensor_of
from mpi4py import MPI

import pdgemm
from pdgemm import DistTensor
from pdgemm.grids.tensor_layout import TensorLayout
from pdgemm.support.agreement import together
from pdgemm.tensors.tensor_base import in_layout

pytestmark = [pytest.mark.mpi, tiers.every_grid]
PARTS = 5
MOST = 4000  # elements
Both = tuple[np.ndarray, Any]  # an array, and the tensor of its elements


def drawn_shape(draw: random.Random) -> tuple[int, ...]:
    """Return the extents of 0 to 8 axes; of many axes, small ones."""
    shape = list[int]()
    for _ in range(draw.randint(0, 8)):
        n = draw.choice((0, 1, 1, 2, 3)) if draw.random() < 0.2 else draw.choice((1, 2, 2, 3, 4, 5, 7))
        shape.append(n if prod(shape) * n <= 300 else draw.choice((1, 2)) if prod(shape) < 300 else 1)
    return tuple(shape)


def drawn_elements(shape: tuple[int, ...], dtype: Any, draw: random.Random) -> np.ndarray:
    """Return whole numbers from -2 to 2 as elements of a type; of a complex one, of both parts."""
    x = elements(shape, "int8", draw.randrange(1000))
    return x.astype(dtype) * (dtype.type(1 + 1j) if dtype.kind == "c" else 1)


def drawn_tensor(draw: random.Random, grid: Any, shape: tuple[int, ...] | None = None, dtype: Any = None) -> Both:
    dtype = np.dtype(dtype or draw.choice(("float64", "complex128", "int64", "float32")))
    x = np.asarray(drawn_elements(drawn_shape(draw) if shape is None else shape, dtype, draw), dtype)
    return x, tensor_of(x, grid, draw)


def some_axes(draw: random.Random, x: np.ndarray) -> tuple[int, ...]:
    return tuple(axis - draw.choice((0, x.ndim)) for axis in range(x.ndim) if draw.random() < 0.4)


def reshaped(draw: random.Random, x: np.ndarray, X: Any, grid: Any) -> Both:
    factors, left = list[int](), x.size
    while left > 1:
        p = next(p for p in range(2, left + 1) if left % p == 0)
        factors.append(p)
        left //= p
    draw.shuffle(factors)
    shape = list[int]()
    while factors:
        k = draw.randint(0, 3)
        shape.append(prod(factors[:k]))
        factors = factors[k:]
    shape = shape[:7] + ([prod(shape[7:])] if len(shape) > 7 else [])
    if not x.size:
        shape = [draw.choice((0, 1, 2, 3)) for _ in range(draw.randint(0, 7))]
        shape.insert(draw.randint(0, len(shape)), 0)
    if 0 not in shape and shape and draw.random() < 0.3:
        at = draw.randrange(len(shape))
        return x.reshape(shape), X.reshape([*shape[:at], -1, *shape[at + 1 :]])
    return x.reshape(shape), X.reshape(shape)


def transposed(draw: random.Random, x: np.ndarray, X: Any, grid: Any) -> Both:
    axes = draw.sample(range(x.ndim), x.ndim)
    return x.transpose(axes), X.transpose(axes)


def part(draw: random.Random, x: np.ndarray, X: Any, grid: Any) -> Both:
    key = drawn_key(draw, x.shape)
    return x[key], X[key]


def expanded(draw: random.Random, x: np.ndarray, X: Any, grid: Any) -> Both:
    new = draw.sample(range(x.ndim + 2), 2)
    return np.expand_dims(x, new), np.expand_dims(X, new)


def squeezed(draw: random.Random, x: np.ndarray, X: Any, grid: Any) -> Both:
    thin = tuple(axis for axis in some_axes(draw, x) if x.shape[axis] == 1)
    return np.squeeze(x, thin), np.squeeze(X, thin)


def reduced(draw: random.Random, x: np.ndarray, X: Any, grid: Any) -> Both:
    axes, keepdims = some_axes(draw, x), draw.random() < 0.5
    name = draw.choice(("sum", "sum", "min", "max") if prod(x.shape[axis] for axis in axes) else ("sum",))
    return getattr(x, name)(axes, keepdims=keepdims), getattr(X, name)(axes, keepdims=keepdims)


def joined(draw: random.Random, x: np.ndarray, X: Any, grid: Any) -> Both:
    if not x.ndim:
        y, Y = drawn_tensor(draw, grid, (), x.dtype)
        return np.stack([x, y]), np.stack([X, Y])
    axis = draw.randrange(x.ndim)
    shape = (*x.shape[:axis], draw.choice((0, 1, 2, 3)), *x.shape[axis + 1 :])
    y, Y = drawn_tensor(draw, grid, shape)
    return np.concatenate([x, y, x], axis), np.concatenate([X, Y, X], axis)


def stacked(draw: random.Random, x: np.ndarray, X: Any, grid: Any) -> Both:
    (y, Y), axis = drawn_tensor(draw, grid, x.shape), draw.randint(-x.ndim - 1, x.ndim)
    return np.stack([y, x], axis), np.stack([Y, X], axis)


def combined(draw: random.Random, x: np.ndarray, X: Any, grid: Any) -> Both:
    """An elementwise function of operands of which each may be broadcast, or is an array that all ranks have."""
    shape = tuple(draw.choice((1, n)) for n in x.shape)[draw.randint(0, x.ndim) :]
    if draw.random() < 0.3 and x.ndim < 8:
        shape = (draw.choice((1, 2)), *(n if n != 1 else draw.choice((1, 2)) for n in x.shape))
    y, Y = drawn_tensor(draw, grid, shape, x.dtype)
    f = draw.choice((np.add, np.subtract, np.multiply))
    return f(x, y), f(X, y if draw.random() < 0.2 else Y)


def in_place(draw: random.Random, x: np.ndarray, X: Any, grid: Any) -> Both:
    y, Y = drawn_tensor(draw, grid, tuple(draw.choice((1, n)) for n in x.shape), x.dtype)
    X = X.copy()
    X += Y
    return x + y, X


def of_other_elements(draw: random.Random, x: np.ndarray, X: Any, grid: Any) -> Both:
    whole = np.copy if x.dtype.kind == "c" else np.abs
    f: Callable[..., Any] = draw.choice((np.conj, np.real, np.imag, np.negative, whole))
    return f(x), f(X)


def moved(draw: random.Random, x: np.ndarray, X: Any, grid: Any) -> Both:
    return x, in_layout(X, drawn_layout(x.shape, grid.size, draw))


def as_matrix(draw: random.Random, x: np.ndarray, X: Any, grid: Any) -> Both:
    axes, at = draw.sample(range(x.ndim), x.ndim), draw.randint(0, x.ndim)
    M, shape = X.matrix(axes[:at], axes[at:]), [x.shape[axis] for axis in axes]
    how, y = draw.randrange(4), x.transpose(axes)
    if how == 0:
        return y, M.tensor(shape)
    if how == 1:
        return y.transpose(*range(at, x.ndim), *range(at)), M.T.tensor(shape[at:] + shape[:at])
    if how == 2:
        return y.conj().transpose(*range(at, x.ndim), *range(at)), M.H.tensor(shape[at:] + shape[:at])
    flat, skip = y.reshape(M.shape), draw.randint(0, min(2, M.shape[0]))
    return flat[skip:], M[skip:].tensor((M.shape[0] - skip, M.shape[1]))


def einsum_of_one(draw: random.Random, x: np.ndarray, X: Any, grid: Any) -> Both:
    letters, extents = list[str](), dict[str, int]()
    for n in x.shape:
        same = [letter for letter, m in extents.items() if m == n and draw.random() < 0.4]
        letters.append(same[0] if same else "abcdefghijkl"[len(extents)])
        extents.setdefault(letters[-1], n)
    kept = draw.sample([*extents], draw.randint(0, len(extents)))
    expression = f"{''.join(letters)}->{''.join(kept)}"
    return np.asarray(np.einsum(expression, x)), pdgemm.einsum(expression, X)


FUNCTIONS = (
    *(reshaped, reshaped, reshaped, transposed, part, part, expanded, squeezed, reduced, joined, stacked, combined),
    *(in_place, of_other_elements, moved, as_matrix, as_matrix, einsum_of_one),
)  # fmt: skip


def check_equal(x: np.ndarray, X: Any) -> None:
    """Check a result, and the words of its report.  Collective: all ranks fail, or none."""
    whole = X.allgather() if isinstance(X, DistTensor) else np.asarray(X)
    with together(MPI.COMM_WORLD):
        assert (whole.shape, whole.dtype) == (x.shape, x.dtype)
        assert np.array_equal(whole, x)
        if isinstance(X, DistTensor):
            assert X.shape == x.shape
            assert isinstance(X.layout, TensorLayout)
            assert X.local.dtype == x.dtype
            if X.local.size:
                assert np.array_equal(X.local, x[np.ix_(*X.indices())] if x.ndim else x)
            assert X.report is None or X.report.counted == X.report.predicted


def follow(draw: random.Random, grid: Any, steps: list[str]) -> None:
    """Apply some functions to a tensor and to its array, and compare after each; `steps` gets what is done."""
    x, X = drawn_tensor(draw, grid)
    steps.append(f"{x.dtype} {X!r}")
    for _ in range(draw.randint(2, 5)):
        f = draw.choice(FUNCTIONS)
        y, Y = f(draw, x, X, grid)
        y = np.asarray(y)
        steps.append(f"{f.__name__}: {Y!r}")
        check_equal(y, Y)
        check_equal(x, X)  # the operand has not changed
        if y.ndim > 8 or y.size > MOST or (y.size and abs(y).max() > 1e4):
            break
        x, X = y, Y if isinstance(Y, DistTensor) else tensor_of(y, grid, draw)


@pytest.mark.parametrize("part", range(PARTS), ids="part{}".format)
def test_chains_of_functions(grids: list[Any], part: int) -> None:
    number = 1500 if tiers.everything() else 60 if MPI.COMM_WORLD.size < 3 else 15
    for turn in range(part, number, PARTS):
        draw, steps = random.Random(turn), list[str]()
        try:
            follow(draw, draw.choice(grids), steps)
        except Exception as error:
            error.add_note("\n".join(steps))
            raise
