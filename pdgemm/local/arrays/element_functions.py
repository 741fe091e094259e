"""Elements as functions of their global indices: any rank builds any block without communication.

Random numbers are a hash of (seed, stream, i, j), the same on every grid: SplitMix64's finaliser
(Steele, Lea & Flood, Fast splittable pseudorandom number generators, OOPSLA 2014) applied to the
row and then to the column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from pdgemm.errors import ArgumentError, DTypeError
from pdgemm.local.arrays.arguments import as_seed
from pdgemm.local.arrays.dtypes import FLOATS, names
from pdgemm.local.arrays.normal_numbers import normal

ElementFunction = Callable[[Any, Any], Any]  # f(i, j), i of shape (r, 1), j of shape (1, c)

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_STREAMS = 0xD1B54A32D192ED03  # an odd number whose small multiples are far apart
_SLAB_ELEMENTS = 1 << 16  # temporaries of this size stay in cache


def slabs(rows: int, cols: int, most: int = _SLAB_ELEMENTS) -> Iterator[slice]:
    """Yield slices that cover the rows, each of about `most` elements, and of at least one row."""
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


def hash_start(seed: int, stream: int) -> np.ndarray:
    """Return the hash of a seed and a stream: one word, from which the hash of each row is computed.

    Seed s of stream t has the same numbers as seed t of stream s; seed 0 of stream 0 starts with 0, which makes the
    hash of i = j = 0 zero.  Therefore random numbers use only the streams of `numbered`.
    """
    start = mix(np.array([int(seed) % 2**64, stream], np.uint64) * GOLDEN)
    return mix(start[:1] + start[1:])


def numbered(stream: int) -> int:
    """Return the stream of a small number: a word that is not 0, and is unlikely to be a user's seed."""
    return (stream + 1) * _STREAMS % 2**64


def hashed(i: np.ndarray, j: np.ndarray, seed: int, stream: int) -> np.ndarray:
    """Return a 64-bit hash for each pair (i, j)."""
    row = mix(np.asarray(i).astype(np.uint64) * GOLDEN + hash_start(seed, stream))
    return mix(row + np.asarray(j).astype(np.uint64) * GOLDEN)


def random_bits(real: np.dtype) -> int:
    """Return the number of random bits of a uniform random number of a real type: the bits of its significand."""
    return int(ml_dtypes.finfo(real).nmant) + 1  # type: ignore[no-untyped-call]


def _unit(h: np.ndarray, real: np.dtype) -> np.ndarray:
    """Convert hashes to numbers in [0, 1) with random bits in the whole significand; 16-bit types become float32."""
    bits = random_bits(real)
    wide = np.result_type(real, np.float32)
    return (h >> np.uint64(64 - bits)).astype(wide) * wide.type(0.5**bits)


def _uniform(i: np.ndarray, j: np.ndarray, seed: int, real: np.dtype, stream: int) -> np.ndarray:
    return _unit(hashed(i, j, seed, numbered(2 * stream)), real)


def _normal(i: np.ndarray, j: np.ndarray, seed: int, real: np.dtype, stream: int) -> np.ndarray:
    return normal(hashed(i, j, seed, numbered(2 * stream + 1))).astype(np.result_type(real, np.float32), copy=False)


def _random(i: np.ndarray, j: np.ndarray, draw: Callable[..., np.ndarray], seed: int, dtype: np.dtype) -> np.ndarray:
    real = np.empty(0, dtype).real.dtype
    if dtype.kind != "c":
        return draw(i, j, seed, real, 0).astype(dtype, copy=False)
    return draw(i, j, seed, real, 0) + 1j * draw(i, j, seed, real, 1)


KINDS = ("uniform", "normal", "eye", "ones", "zeros")


@dataclass(frozen=True)
class KnownFunction:
    """An element function of this module, which a device may evaluate by a kernel (`Device.generate`).

    kind : "uniform", "normal", "eye", or "constant" with its value.   dtype : the type of random numbers.
    """

    kind: str
    seed: int = 0
    dtype: np.dtype = np.dtype(np.float64)  # noqa: RUF009
    value: Any = 0

    def __call__(self, i: np.ndarray, j: np.ndarray) -> Any:
        if self.kind == "constant":
            return self.value
        if self.kind == "eye":
            return i == j
        if self.kind == "uniform" and self.dtype.kind in "iu":
            bits = hashed(i, j, self.seed, numbered(0)) >> np.uint64(64 - 8 * self.dtype.itemsize)
            return bits.astype(f"u{self.dtype.itemsize}").view(self.dtype)
        return _random(i, j, _uniform if self.kind == "uniform" else _normal, self.seed, self.dtype)


def element_function(kind: str, seed: int, dtype: np.dtype) -> KnownFunction:
    """Return the element function of a kind of matrix.

    "uniform" is on [0, 1), "normal" has mean 0 and variance 1, for complex numbers in both the real and the imaginary
    part.  "uniform" of integers, whose products are exact, is on all numbers of the type: of int8 on -128 to 127.
    """
    if kind in ("uniform", "normal"):
        if dtype not in FLOATS and not (kind == "uniform" and dtype.kind in "iu"):
            raise DTypeError(f"{kind} random matrices can have the types {names(FLOATS)}, not {dtype}")
        return KnownFunction(kind, as_seed(seed), dtype)
    if kind == "eye":
        return KnownFunction(kind)
    if kind in ("ones", "zeros"):
        return KnownFunction("constant", value=kind == "ones")
    raise ArgumentError(f"kind {kind!r} is not one of {', '.join(KINDS)}")
