"""Input from outside of the program: JSON and environment variables.

A value is used only after a check that it has the stated type and is within the stated bounds.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from pdgemm.errors import ArgumentError
from pdgemm.local.arrays import dtypes

Kind = TypeVar("Kind")
LARGEST = 1 << 62  # the largest whole number: 64 bits hold such numbers and their sums
Count = Annotated[int, Meta(ge=1, le=1 << 31)]  # number of ranks, threads, cores
Size = Annotated[int, Meta(ge=0, le=LARGEST)]  # number of elements, bytes
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Figure = Annotated[float, Meta(ge=0, le=1e30)]  # words, flops, shares
Positive = Annotated[float, Meta(ge=1e-30, le=1e30)]  # its inverse is a Figure, too
_DTYPES = {x.name: x for x in (*dtypes.OPERANDS, *dtypes.RESULTS)}
_LONGEST = 300  # characters of a wrong value in a message


def decoded(text: bytes | str, kind: type[Kind], what: str = "", exact: bool = False) -> Kind:
    """Return JSON as a value of a type.  Raises ArgumentError, which shows `what`, the place and the fault.

    exact : whether members that the type does not have are refused; otherwise they are ignored.
    """
    try:
        result = msgspec.json.decode(text, type=kind, dec_hook=_special)
        if exact:
            _look_for_more(msgspec.json.decode(text), jsonable(result))
    except (ValueError, RecursionError) as bad:
        raise ArgumentError(_fault(what, bad)) from None
    return result


def converted(value: Any, kind: type[Kind], what: str = "", exact: bool = False, strict: bool = True) -> Kind:
    """Return decoded JSON as a value of a type, like `decoded`; strict=False: the text "12" may be a number."""
    try:
        result = msgspec.convert(value, kind, dec_hook=_special, str_keys=True, strict=strict)
        if exact:
            _look_for_more(value, jsonable(result))
    except (ValueError, RecursionError) as bad:
        raise ArgumentError(_fault(what, bad)) from None
    return result


def jsonable(x: Any) -> Any:
    """Return a value in the form that JSON can represent and `converted` accepts."""
    return msgspec.to_builtins(x, str_keys=True, enc_hook=_plain)


def variable(name: str, kind: Any, what: str = "", environment: Mapping[str, str] = os.environ) -> Any:
    """Return the value of an environment variable; None where the variable is not set, or empty.

    what : the valid values in words; ArgumentError is raised for other values.  "": other values give None.
    """
    said = environment.get(name, "").strip()
    try:
        return converted(said, kind, strict=False) if said else None
    except ArgumentError:
        if not what:
            return None
        raise ArgumentError(f"{name} must be {what}, got {_short(said)!r}") from None


def _special(kind: type, value: Any) -> Any:
    """Return a value of np.dtype, a type that msgspec does not know."""
    if kind is np.dtype:
        if not isinstance(value, str) or value not in _DTYPES:
            raise ValueError(f"not an element type: {_short(repr(value))}")
        return _DTYPES[value]
    raise NotImplementedError(kind)


def _plain(x: Any) -> Any:
    return x.name if isinstance(x, np.dtype) else x.item() if isinstance(x, np.generic) else repr(x)


def _look_for_more(value: Any, known: Any, place: str = "$") -> None:
    """Raise ValueError for members of `value` that its decoded form `known` lacks, and for numbers beyond LARGEST."""
    if isinstance(value, dict):
        for name, x in value.items():
            if name not in known:
                raise ValueError(f"{_short(name)!r} is not a field of it - at `{place}`")
            _look_for_more(x, known[name], f"{place}.{name}")
    elif isinstance(value, list):
        for number, (x, y) in enumerate(zip(value, known)):
            _look_for_more(x, y, f"{place}[{number}]")
    elif type(value) is int and abs(value) > LARGEST:
        raise ValueError(f"Integer value out of range - at `{place}`")


def _fault(what: str, bad: Exception) -> str:
    fault = "nested too deeply" if isinstance(bad, RecursionError) else _short(str(bad))
    return f"{what}: {fault}" if what else fault


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
