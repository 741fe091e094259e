"""Checks of numbers, pairs and names that users pass (dimensions, counts, ranges, seeds), and values in messages."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from numbers import Real
from operator import index
from typing import Any

import numpy as np

from pdgemm.errors import ArgumentError, PdgemmError

_MOST = 2**63 - 1  # the largest index
_SHOWN = 60  # characters


def shown(value: object) -> str:
    """Return a value as text for a message: in one line, and truncated if the text is long."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # Python does not print integers of more than 4300 digits
        return f"a value of type {type(value).__name__} that is too long to be shown"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def as_name(value: object, name: str, known: Collection[str]) -> str:
    """Return `value`, which must be one of the `known` names.  Raises ArgumentError."""
    if not isinstance(value, str) or value not in known:
        raise ArgumentError(f"{name} {shown(value)} is not one of {', '.join(known)}")
    return value


def op_letter(trans: str, name: str) -> str:
    """Return "N", "T" or "C"; lower case is accepted."""
    if not isinstance(trans, str) or trans.upper() not in ("N", "T", "C"):
        raise ArgumentError(f'{name} is "N", "T" or "C", got {trans!r}')
    return trans.upper()


def as_whole(value: Any, name: str, least: int = -_MOST - 1, most: int = _MOST) -> int:
    """Return an integer from `least` to `most`, by default any signed 64-bit integer.  Raises ArgumentError."""
    try:
        number = None if isinstance(value, (bool, np.bool_)) else index(value)
    except TypeError:
        number = None
    if number is None:
        raise ArgumentError(f"{name} is a whole number, got {shown(value)}")
    if number < least:
        raise ArgumentError(f"{name} must be >= {least}, got {shown(number)}")
    if number > most:
        raise ArgumentError(f"{name} must be <= {most}, got {shown(number)}")
    return number


def as_count(value: object, name: str, least: int) -> int:
    """Return a count, an integer >= least.  Raises ArgumentError."""
    return as_whole(value, name, least)


def as_optional(value: object, name: str, least: int) -> int | None:
    """Return a count, an integer >= least; None stays None.  Raises ArgumentError."""
    return None if value is None else as_count(value, name, least)


def as_seed(value: object) -> int:
    """Return a seed, a signed or unsigned 64-bit integer.  Raises ArgumentError."""
    return as_whole(value, "seed", most=2**64 - 1)


def as_real(value: object, name: str, above: float = -np.inf) -> float:
    """Return a real number, neither NaN nor infinite, that is larger than `above`.  Raises ArgumentError."""
    number = np.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):  # an integer too large for a float
            number = float(value)
    if not (np.isfinite(number) and number > above):
        raise ArgumentError(
            f"{name} must be a real number{f' > {above}' if above > -np.inf else ''}, got {shown(value)}"
        )
    return number


def as_pair(value: Any, rule: str, error: type[PdgemmError] = ArgumentError) -> tuple[Any, Any]:
    """Return the two items of a pair.  If it is not a pair, raises `error`; the message begins with `rule`."""
    try:
        first, second = value
    except (TypeError, ValueError):
        raise error(f"{rule} {shown(value)}") from None
    return first, second


def as_shape(value: object) -> tuple[int, int] | None:
    """Return the shape of a grid; None stays None.  Raises ArgumentError."""
    if value is None:
        return None
    rows, cols = as_pair(value, "shape must be a pair (Pr, Pc), got")
    return as_count(rows, "Pr", 1), as_count(cols, "Pc", 1)


def as_range(value: object, name: str, extent: int | None = None, length: int = 0) -> tuple[int, int]:
    """Return (start, stop) of a range of consecutive indices.  Raises ArgumentError.

    value  : a pair (start, stop), a slice or a range of step 1, or None for all indices.
    extent : the number of all indices; slices are cut to it as in NumPy, and may count from the end.
    length : without `extent`, the number of indices of a slice without an end.
    """
    kinds = "a pair (start, stop), a slice or a range"
    if value is None:
        value = slice(None)
    if isinstance(value, (slice, range)):
        if value.step not in (None, 1):
            raise ArgumentError(f"{name} are taken in steps of 1, got {shown(value)}")
        start, stop = value.start, value.stop
        if isinstance(value, range):
            stop = max(start, stop)
        elif extent is not None:
            try:
                start, stop, _ = value.indices(extent)
            except TypeError:
                raise ArgumentError(f"{name} are {kinds} of whole numbers, got {shown(value)}") from None
            stop = max(start, stop)
        else:
            start = 0 if start is None else start
            stop = as_whole(start, f"the start of {name}") + length if stop is None else stop
    else:
        start, stop = as_pair(value, f"{name} are {kinds}, got")
    first = as_whole(start, f"the start of {name}", 0)
    last = as_whole(stop, f"the stop of {name}", first)
    if extent is not None and last > extent:
        raise ArgumentError(f"{name} {first}:{last} are not within 0:{extent}")
    return first, last
