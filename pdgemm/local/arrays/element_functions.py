"""Elements as functions of their global indices: any rank builds any block without communication.

Random numbers are a hash of (seed, stream, i, j), the same on every grid: SplitMix64's finaliser
(Steele, Lea & Flood, Fast splittable pseudorandom number generators, OOPSLA 2014) applied to the
row and then to the column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from pdgemm.errors import ArgumentError, DTypeError
from pdgemm.local.arrays.dtypes import FLOATS, names
from pdgemm.local.arrays.integers import as_seed

ElementFunction = Callable[[Any, Any], Any]  # f(i, j), i of shape (r, 1), j of shape (1, c)

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SLAB_ELEMENTS = 1 << 16  # temporaries of this size stay in cache


def slabs(rows: int, cols: int, most: int = _SLAB_ELEMENTS) -> Iterator[slice]:
    """Yield the range of rows in slices of about `most` elements, at least one row each."""
    step = max(1, most // max(1, cols))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def tiles(rows: int, cols: int, most: int = _SLAB_ELEMENTS) -> Iterator[tuple[slice, slice]]:
    """Yield rows x cols in tiles of at most `most` elements: whole rows where a row fits."""
    tile_cols = max(1, min(cols, most))
    for rows_ in slabs(rows, tile_cols, most):
        for start in range(0, cols, tile_cols):
            yield rows_, slice(start, min(cols, start + tile_cols))


def fill(local: np.ndarray, rows: np.ndarray, cols: np.ndarray, f: ElementFunction) -> None:
    """Set local[l, h] := f(rows[l], cols[h]), a slab of rows at a time."""
    if local.size:
        for slab in slabs(*local.shape):
            values = f(rows[slab, None], cols[None, :])
            if isinstance(values, np.ma.MaskedArray):
                raise DTypeError("f returned a masked array, whose mask would be lost: fill it, .filled(value)")
            local[slab] = values


def mix(x: np.ndarray) -> np.ndarray:
    """Hash 64-bit words in place."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def hashed(i: np.ndarray, j: np.ndarray, seed: int, stream: int = 0) -> np.ndarray:
    """Return a 64-bit hash for each pair (i, j)."""
    start = mix(np.array([int(seed) % 2**64, stream], np.uint64) * _GOLDEN)
    row = mix(np.asarray(i).astype(np.uint64) * _GOLDEN + mix(start[:1] + start[1:]))
    return mix(row + np.asarray(j).astype(np.uint64) * _GOLDEN)


def _unit(h: np.ndarray, real: np.dtype) -> np.ndarray:
    """Convert hashes to numbers in [0, 1), every bit of the significand random; 16-bit numbers are held as float32."""
    bits = int(ml_dtypes.finfo(real).nmant) + 1  # type: ignore[no-untyped-call]
    wide = np.result_type(real, np.float32)
    return (h >> np.uint64(64 - bits)).astype(wide) * wide.type(0.5**bits)


def _uniform(i: np.ndarray, j: np.ndarray, seed: int, real: np.dtype, stream: int) -> np.ndarray:
    return _unit(hashed(i, j, seed, 2 * stream), real)


def _normal(i: np.ndarray, j: np.ndarray, seed: int, real: np.dtype, stream: int) -> np.ndarray:
    """Return normal random numbers by Box and Muller, Ann. Math. Stat. 29(2), 1958."""
    wide = np.result_type(real, np.float32)
    radius = np.sqrt(-2 * np.log1p(-_unit(hashed(i, j, seed, 2 * stream), wide)))
    return radius * np.cos(wide.type(2 * np.pi) * _unit(hashed(i, j, seed, 2 * stream + 1), wide))


def _random(i: np.ndarray, j: np.ndarray, draw: Callable[..., np.ndarray], seed: int, dtype: np.dtype) -> np.ndarray:
    real = np.empty(0, dtype).real.dtype
    if dtype.kind != "c":
        return draw(i, j, seed, real, 0).astype(dtype, copy=False)
    return draw(i, j, seed, real, 0) + 1j * draw(i, j, seed, real, 1)


KINDS = ("uniform", "normal", "eye", "ones", "zeros")


def element_function(kind: str, seed: int, dtype: np.dtype) -> ElementFunction:
    """Return the element function of a kind of matrix.

    "uniform" is on [0, 1), "normal" has mean 0 and variance 1, for complex numbers in both the real and the imaginary
    part.  "uniform" of int8, whose products are exact, is on -128 to 127.
    """
    if kind in ("uniform", "normal"):
        seed = as_seed(seed)
        if kind == "uniform" and dtype == np.int8:
            return lambda i, j: (hashed(i, j, seed) >> np.uint64(56)).astype(np.uint8).view(np.int8)
        if dtype not in FLOATS:
            raise DTypeError(f"{kind} random matrices can have the types {names(FLOATS)}, not {dtype}")
        return partial(_random, draw=_uniform if kind == "uniform" else _normal, seed=seed, dtype=dtype)
    if kind == "eye":
        return lambda i, j: i == j
    if kind in ("ones", "zeros"):
        return lambda i, j: kind == "ones"
    raise ArgumentError(f"kind {kind!r} is not one of {', '.join(KINDS)}")
