"""Sums of squares without rounding, which depend on no order: any division of an array gives the same bits.

Each digit of 39 bits is cut off by adding and subtracting a large number (Rump, Ogita & Oishi, Accurate floating-point
summation I, SIAM J. Sci. Comput. 31(1), 2008); digits at one place are added without rounding, and then as integers.
"""

from __future__ import annotations

from math import frexp, ldexp

import numpy as np

from pdgemm.schedules.training.flat_layout import DIGITS

_AT_A_TIME, _BITS = 1 << 13, 39  # 2^13 digits of 39 bits with a sign are added in 53 bits
_LEAST = -1074  # the exponent of the smallest number, of which all others are multiples
_LARGEST = 2.0**960  # from here on squares count as infinite, so that 2^64 of them have a sum
Array = np.ndarray


def exact_squares(x: Array) -> int | None:
    """Return the sum of the squares of real numbers in units of 2^-1074.  Local.

    x : (n,) of float32, whose squares are exact in float64, or of float64, whose squares are rounded one by one.
    None where a square is NaN, or 2^960 or more.
    5 n operations for each digit: squares of one magnitude have two, and those of gradients three to five.
    """
    total = 0
    for start in range(0, len(x), _AT_A_TIME):
        rest = np.square(x[start : start + _AT_A_TIME], dtype=np.float64)
        if not (largest := float(rest.max())) < _LARGEST:
            return None
        place = frexp(largest)[1] - _BITS
        while rest.any():
            place = max(place, _LEAST)
            large = ldexp(1.5, place + 52)  # numbers near it are multiples of 2^place
            digits = rest + large
            digits -= large
            rest -= digits
            total += int(ldexp(float(digits.sum()), -place)) << (place - _LEAST)
            place -= _BITS
    return total


def as_numbers(total: int | None) -> Array:
    """Return an exact sum as digits of 32 bits, (DIGITS,) of float64: sums over 2^21 ranks are exact, too.  Local."""
    if total is None:
        return np.full(DIGITS, np.inf)
    return np.frombuffer(total.to_bytes(4 * DIGITS, "little"), "<u4").astype(np.float64)


def as_float(numbers: Array) -> float:
    """Return the float64 that is nearest to the exact sum that sums of `as_numbers` stand for.  Local."""
    return sum(int(digit) << 32 * at for at, digit in enumerate(numbers)) / (1 << -_LEAST)
