"""Checks of integers that a user passes: dimensions, blocks, counts, seeds; and how messages show values."""

from __future__ import annotations

from operator import index
from typing import Any

import numpy as np

from pdgemm.errors import ArgumentError

_MOST = 2**63 - 1  # the largest index
_SHOWN = 60  # characters


def shown(value: object) -> str:
    """Return a value as a message shows it: in one line, and truncated where it is long."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # Python writes no integer of more than 4300 digits
        return f"a value of type {type(value).__name__} that is too long to be shown"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def as_whole(given: object, name: str, least: int = -_MOST - 1, most: int = _MOST) -> int:
    """Return an integer within bounds, by default those of 64 bits.  Raises ArgumentError."""
    value: Any = given
    try:
        number = None if isinstance(value, (bool, np.bool_)) else index(value)
    except TypeError:
        number = None
    if number is None:
        raise ArgumentError(f"{name} is a whole number, got {shown(given)}")
    if number < least:
        raise ArgumentError(f"{name} must be >= {least}, got {shown(number)}")
    if number > most:
        raise ArgumentError(f"{name} must be <= {most}, got {shown(number)}")
    return number


def as_count(given: object, name: str, least: int) -> int:
    """Return a count, an integer >= least.  Raises ArgumentError."""
    return as_whole(given, name, least)


def as_seed(given: object) -> int:
    """Return a seed, a signed or unsigned 64-bit integer.  Raises ArgumentError."""
    return as_whole(given, "seed", most=2**64 - 1)
