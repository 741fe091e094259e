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

Coefficients = tuple[float, ...]  # coefficients of a polynomial, the constant first

# AS 241: quotients of polynomials of 0.425^2 - q^2, of r - 1.6 and of r - 5, where q = 1/2 - p and r = sqrt(-log p)
_CENTRE: tuple[Coefficients, Coefficients] = (
    (3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4,
     4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3),
    (1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3, 2.1213794301586595867e4,
     3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3),
)  # fmt: skip
_NEAR: tuple[Coefficients, Coefficients] = (
    (1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0,
     1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4),
    (1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1, 1.48103976427480074590e-1,
     1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9),
)  # fmt: skip
_FAR: tuple[Coefficients, Coefficients] = (
    (6.65790464350110377720e0, 5.46378491116411436990e0, 1.78482653991729133580e0, 2.96560571828504891230e-1,
     2.65321895265761230930e-2, 1.24266094738807843860e-3, 2.71155556874348757815e-5, 2.01033439929228813265e-7),
    (1.0, 5.99832206555887937690e-1, 1.36929880922735805310e-1, 1.48753612908506148525e-2, 7.86869131145613259100e-4,
     1.84631831751005468180e-5, 1.42151175831644588870e-7, 2.04426310338993978564e-15),
)  # fmt: skip
_LOGARITHM: Coefficients = tuple(2.0 / (2 * k + 1) for k in range(11))  # log m = s P(s^2), s = (m - 1) / (m + 1)
_AT_ONCE = 1 << 13  # hashes, so that all temporaries stay in cache
_LOG_2, _HALF_ROOT, _TAIL, _SQUARE, _SCALE = 0.6931471805599453, 0.7071067811865476, 0.075, 0.180625, 2.0**-64


def normal(h: np.ndarray) -> np.ndarray:
    """Return the normal random numbers of hashes, float64, |x| <= 9.2, with a relative error of some 1e-15."""
    p = (h >> np.uint64(1)).astype(np.float64)
    p += 0.5
    p *= _SCALE
    value, parts = np.empty(h.shape), p.reshape(-1)
    numbers = value.reshape(-1)
    for at in range(0, h.size, _AT_ONCE):
        numbers[at : at + _AT_ONCE] = _in_centre(parts[at : at + _AT_ONCE])
    tail = np.flatnonzero(parts < _TAIL)
    numbers[tail] = _in_tail(parts[tail])
    value.view(np.uint64)[...] ^= h << np.uint64(63)  # the sign
    return value


def _in_centre(p: np.ndarray) -> np.ndarray:
    q = 0.5 - p
    r = q * q
    np.subtract(_SQUARE, r, out=r)
    value = _quotient(_CENTRE, r)
    value *= q
    return value


def _in_tail(p: np.ndarray) -> np.ndarray:
    m, e = np.frexp(p)  # exact
    low = m < _HALF_ROOT
    e = e - low
    m *= 1.0 + low  # exact
    s = (m - 1.0) / (m + 1.0)
    r = np.sqrt(-(_polynomial(_LOGARITHM, s * s) * s + e * _LOG_2))
    value, far = _quotient(_NEAR, r - 1.6), r > 5.0
    value[far] = _quotient(_FAR, r[far] - 5.0)
    return value


def _quotient(of: tuple[Coefficients, Coefficients], x: np.ndarray) -> np.ndarray:
    value = _polynomial(of[0], x)
    value /= _polynomial(of[1], x)
    return value


def _polynomial(coefficients: Coefficients, x: np.ndarray) -> np.ndarray:
    """Return the polynomial by Horner's rule."""
    *others, last = coefficients
    value: np.ndarray = x * last
    for at, coefficient in enumerate(reversed(others)):
        if at:
            value *= x
        value += coefficient
    return value


def _written(coefficients: Coefficients, x: str) -> str:
    """Return `_polynomial` in C."""
    text = repr(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        text = f"({x} * {text} + {coefficient!r})"
    return text


def _divided(of: tuple[Coefficients, Coefficients], x: str) -> str:
    return f"{_written(of[0], x)} / {_written(of[1], x)}"


STATEMENTS = [  # C statements that compute the number v, a double, from the hash h, an unsigned long long
    f"double p = (static_cast<double>(h >> 1) + 0.5) * {_SCALE!r}",
    "double q = 0.5 - p",
    f"double r = {_SQUARE!r} - q * q",
    f"double v = {_divided(_CENTRE, 'r')} * q",
    "long long b = __double_as_longlong(p)",
    "double m = __longlong_as_double((b & 0xFFFFFFFFFFFFF) | 0x3FE0000000000000)",
    "long long e = (b >> 52) - 1022",
    f"if (m < {_HALF_ROOT!r}) e = e - 1",
    f"if (m < {_HALF_ROOT!r}) m = m + m",
    "double s = (m - 1.0) / (m + 1.0)",
    "double z = s * s",
    f"double t = sqrt(-({_written(_LOGARITHM, 'z')} * s + static_cast<double>(e) * {_LOG_2!r}))",
    "double near = t - 1.6",
    "double far = t - 5.0",
    f"double x = {_divided(_NEAR, 'near')}",
    f"if (t > 5.0) x = {_divided(_FAR, 'far')}",
    f"if (p < {_TAIL!r}) v = x",
    "if ((h & 1) == 1) v = -v",
]


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
