"""Draw tensors in all kinds of layouts."""

from __future__ import annotations

import random
from math import prod
from typing import Any

import numpy as np

from pdgemm import DistMatrix, DistTensor


def elements(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    """Return an array of small numbers, whose sums and products neither overflow nor cancel completely."""
    source, dtype = np.random.default_rng(seed), np.dtype(dtype)
    if dtype.kind in "biu":
        return np.asarray(source.integers(-2 * (dtype.kind == "i"), 3, shape)).astype(dtype)
    x = np.asarray(source.standard_normal(shape))
    return np.asarray(x + 1j * source.standard_normal(shape) if dtype.kind == "c" else x).astype(dtype)


def tensor_of(array: np.ndarray, grid: Any, draw: random.Random) -> Any:
    """Return an array as a tensor: of chosen groups of axes, of a view of a matrix, or of a transposed tensor."""
    axes, how = list(range(array.ndim)), draw.randrange(7)
    draw.shuffle(axes)
    at = draw.randint(0, array.ndim)
    if how == 0:
        return DistTensor.from_global(array, grid=grid)
    if how == 6:
        return DistTensor.from_global(array, grid=grid).copy()  # not in node-shared memory
    if how == 1:
        return DistTensor.from_global(array.transpose(axes), grid=grid).transpose(np.argsort(axes).astype(int))
    if how == 2 and array.ndim:
        shape = array.shape
        flat = array.reshape(prod(shape[:at]), prod(shape[at:]))
        options: Any = {"grid": grid, "order": draw.choice("CF"), "block": draw.choice([None, (1, 1), (2, 3)])}
        options["source"] = tuple(draw.randrange(x) for x in grid.shape)
        kind = draw.randrange(4)
        if kind == 0:
            A = DistMatrix.from_global(flat, **options)
        elif kind == 1:
            A = DistMatrix.from_global(np.ascontiguousarray(flat.T), **options).T
        elif kind == 2:
            A = DistMatrix.from_global(np.ascontiguousarray(flat.conj().T), **options).H
        else:
            wide = np.pad(flat, ((1, 2), (3, 1)))
            A = DistMatrix.from_global(wide, **options)[1 : 1 + flat.shape[0], 3 : 3 + flat.shape[1]]
        return A.tensor(shape)
    return DistTensor.from_global(array, grid=grid, rows=axes[:at], cols=axes[at:])
