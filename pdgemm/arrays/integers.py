"""Whole numbers that a user gives: dimensions, blocks, counts, seeds; and how values are shown in messages."""

from __future__ import annotations

from operator import index
from typing import Any

import numpy as np

from pdgemm.errors import ArgumentError

_MOST = 2**63 - 1  # of index arithmetic
_SHOWN = 60  # characters


def shown(value: object) -> str:
    """A value as a message shows it: in one line, and not all of what is long."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # Python writes no integer of more than 4300 digits
        return f"a value of type {type(value).__name__} that is too long to be shown"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def as_whole(given: object, name: str, least: int = -_MOST - 1, most: int = _MOST) -> int:
    """A whole number within bounds, by default those of 64 bits.  Raises ArgumentError."""
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
    """A number of things."""
    return as_whole(given, name, least)


def as_seed(given: object) -> int:
    """A number of 64 bits, with or without a sign."""
    return as_whole(given, "seed", most=2**64 - 1)
