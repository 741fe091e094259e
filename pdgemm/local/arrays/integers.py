"""Checks of integers and names that a user passes: dimensions, counts, ranges, seeds; how messages show values."""

from __future__ import annotations

from collections.abc import Collection
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


def as_name(given: object, name: str, known: Collection[str]) -> str:
    """Return one of the names that an option may have.  Raises ArgumentError."""
    if not isinstance(given, str) or given not in known:
        raise ArgumentError(f"{name} {shown(given)} is not one of {', '.join(known)}")
    return given


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


def as_range(given: object, name: str, extent: int | None = None, length: int = 0) -> tuple[int, int]:
    """Return the first index and the one after the last, of indices that follow each other.  Raises ArgumentError.

    given  : a pair (start, stop), a slice or a range of step 1, or None for all.
    extent : how many indices there are; slices are cut to them as NumPy's are, and may count from the end.
    length : where that is not known, the number of indices of a slice without an end.
    """
    kinds = "a pair (start, stop), a slice or a range"
    if given is None:
        given = slice(None)
    if isinstance(given, (slice, range)):
        if given.step not in (None, 1):
            raise ArgumentError(f"{name} are taken in steps of 1, got {shown(given)}")
        start, stop = given.start, given.stop
        if isinstance(given, range):
            stop = max(start, stop)
        elif extent is not None:
            try:
                start, stop, _ = given.indices(extent)
            except TypeError:
                raise ArgumentError(f"{name} are {kinds} of whole numbers, got {shown(given)}") from None
            stop = max(start, stop)
        else:
            start = 0 if start is None else start
            stop = as_whole(start, f"the start of {name}") + length if stop is None else stop
    else:
        try:
            start, stop = given  # type: ignore[misc]
        except (TypeError, ValueError):
            raise ArgumentError(f"{name} are {kinds}, got {shown(given)}") from None
    first = as_whole(start, f"the start of {name}", 0)
    last = as_whole(stop, f"the stop of {name}", first)
    if extent is not None and last > extent:
        raise ArgumentError(f"{name} {first}:{last} are not within 0:{extent}")
    return first, last
