"""Draw tensors in all kinds of layouts."""

from __future__ import annotations

import random
from math import prod
from typing import Any

import numpy as np

from pdgemm import DistMatrix, DistTensor
from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.tensor_layout import TensorLayout


def elements(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    """Return an array of small numbers, whose sums and products neither overflow nor cancel completely."""
    source, dtype = np.random.default_rng(seed), np.dtype(dtype)
    if dtype.kind in "biu":
        return np.asarray(source.integers(-2 * (dtype.kind == "i"), 3, shape)).astype(dtype)
    x = np.asarray(source.standard_normal(shape))
    return np.asarray(x + 1j * source.standard_normal(shape) if dtype.kind == "c" else x).astype(dtype)


def drawn_layout(shape: tuple[int, ...], size: int, draw: random.Random) -> TensorLayout:
    """Return a block-cyclic layout on a grid of some of `size` ranks, in any order."""
    axes, at = draw.sample(range(len(shape)), len(shape)), draw.randint(0, len(shape))
    groups, ranks = (axes[:at], axes[at:]), draw.randint(1, size)
    pr = draw.choice([x for x in range(1, ranks + 1) if ranks % x == 0])
    first = []
    for group, parts in zip(groups, (pr, ranks // pr)):
        if not group:
            first.append(BlockCyclic(1, 1, 1))
            continue
        n = shape[group[0]]
        first.append(BlockCyclic(n, draw.randint(1, max(1, n)), parts, draw.randrange(parts)))
    ranks = first[0].parts * first[1].parts
    return TensorLayout(shape, tuple(groups[0]), tuple(groups[1]), (first[0], first[1]),
                        tuple(draw.sample(range(size), ranks)))  # fmt: skip


def matrix_of(array: np.ndarray, grid: Any, draw: random.Random) -> DistMatrix:
    """Return an array of two axes as a matrix, or as a transpose, a conjugate or a part of one."""
    options: Any = {"grid": grid, "order": draw.choice("CF"), "block": draw.choice([None, (1, 1), (2, 3)])}
    options["source"] = tuple(draw.randrange(x) for x in grid.shape)
    kind = draw.randrange(4)
    if kind == 0:
        return DistMatrix.from_global(array, **options)
    if kind == 1:
        return DistMatrix.from_global(np.ascontiguousarray(array.T), **options).T
    if kind == 2:
        return DistMatrix.from_global(np.ascontiguousarray(array.conj().T), **options).H
    wide = np.pad(array, ((1, 2), (3, 1)))
    return DistMatrix.from_global(wide, **options)[1 : 1 + array.shape[0], 3 : 3 + array.shape[1]]


def tensor_of(array: np.ndarray, grid: Any, draw: random.Random) -> Any:
    """Return an array as a tensor: of a drawn layout, of a view of a matrix, or of a transposed tensor."""
    axes, how = list(range(array.ndim)), draw.randrange(9)
    draw.shuffle(axes)
    at = draw.randint(0, array.ndim)
    if how == 0:
        return DistTensor.from_global(array, grid=grid)
    if how == 6:
        return DistTensor.from_global(array, grid=grid).copy()  # not in node-shared memory
    if how == 1:
        return DistTensor.from_global(array.transpose(axes), grid=grid).transpose(np.argsort(axes).astype(int))
    if how == 2 and array.ndim:
        flat = array.reshape(prod(array.shape[:at]), prod(array.shape[at:]))
        return matrix_of(flat, grid, draw).tensor(array.shape)
    if how in (7, 8):
        return DistTensor.from_global(array, grid=grid, layout=drawn_layout(array.shape, grid.size, draw))
    return DistTensor.from_global(array, grid=grid, rows=axes[:at], cols=axes[at:])


def drawn_key(draw: random.Random, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Return a key of slices with steps, indices, one list, new axes and at most one ellipsis."""
    key, lists = list[Any](), 0
    for n in shape[: draw.randint(0, len(shape))]:
        kind = draw.randrange(7)
        ends = [draw.choice((None, draw.randint(-n - 2, n + 2))) for _ in range(2)]
        if kind == 0 and n:
            key.append(draw.choice((draw.randrange(n), np.int64(draw.randrange(n)) - n)))
        elif kind == 1 and not lists:
            lists = 1
            key.append([draw.randrange(-n, n) for _ in range(draw.randint(0, 4))] if n else [])
        elif kind == 2 and not lists:
            lists = 1
            key.append(np.array([draw.random() < 0.5 for _ in range(n)], bool))
        else:
            key.append(slice(*ends, draw.choice((None, 1, 1, 2, 3, -1, -2))))
    for _ in range(draw.choice((0, 0, 1, 2))):
        key.insert(draw.randint(0, len(key)), None)
    if draw.random() < 0.4:
        key.append(...)
    return tuple(key)
