"""Normal random numbers from hashes, by operations that round in the same way on every processor.

A hash of 64 bits is a sign and a probability p up to 1/2; the number is the normal distribution's quantile of p:
Wichura, The percentage points of the normal distribution, algorithm AS 241, Appl. Stat. 37(3), 1988.  Its polynomials
and its logarithm are additions, multiplications, divisions and square roots of float64 here, which IEEE 754 defines to
the last bit.  Neither NumPy nor CUDA specifies the rounding of logarithm and cosine.

`normal` computes on the host.  `STATEMENTS` are the same operations, in the same order, in C, for a compiler that does
not fuse multiplications with additions.
"""

from __future__ import annotations

import numpy as np

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
