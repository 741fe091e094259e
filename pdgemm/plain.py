"""Frozen dataclasses as JSON and back."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.grids.layout import Layout
from pdgemm.machine import Link, Machine

Kind = TypeVar("Kind")
_MOST_RANKS = 1 << 24
_KNOWN: tuple[type, ...] = (BlockCyclic, Distribution, Layout, Link, Machine)


def pack(x: Any) -> Any:
    """What json.dumps takes; a run of consecutive ranks in short."""
    if is_dataclass(x) and not isinstance(x, type):
        return {"is": type(x).__name__, **{f.name: pack(getattr(x, f.name)) for f in fields(x)}}
    if isinstance(x, np.dtype):
        return {"is": "dtype", "name": x.name}
    if isinstance(x, dict):
        return {"is": "dict", "items": [[pack(key), pack(value)] for key, value in x.items()]}
    if isinstance(x, tuple):
        if len(x) > 3 and x == tuple(range(x[0], x[0] + len(x))):
            return {"is": "range", "start": x[0], "stop": x[0] + len(x)}
        return [pack(value) for value in x]
    return x


def unpack(text: str, kind: type[Kind], types: tuple[type, ...]) -> Kind:
    """What `pack` was given, of this kind; `types` that it may hold beside those of layouts and machines.

    Raises ArgumentError for anything else, fields of other types included.
    """
    known = {x.__name__: x for x in (*_KNOWN, kind, *types)}

    def made(x: Any) -> Any:
        if isinstance(x, list):
            return tuple(made(value) for value in x)
        if not isinstance(x, dict):
            return x
        given = dict(x)
        name = given.pop("is")
        if name == "dtype":
            return np.dtype(given["name"])
        if name == "range":
            if not 0 <= given["start"] <= given["stop"] <= _MOST_RANKS:
                raise ValueError("ranks out of range")
            return tuple(range(given["start"], given["stop"]))
        if name == "dict":
            return {made(key): made(value) for key, value in given["items"]}
        filled = known[name](**{field: made(value) for field, value in given.items()})
        for field, wanted in get_type_hints(known[name], localns=known).items():
            if field in given and not _fits(getattr(filled, field), wanted):
                raise TypeError(f"{field} of {name} is {getattr(filled, field)!r}")
        return filled

    try:
        found = made(json.loads(text))
        if not isinstance(found, kind):
            raise TypeError(f"a {type(found).__name__}")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as bad:
        raise ArgumentError(f"not a {kind.__name__} that was saved: {type(bad).__name__}: {bad}") from bad
    return found


def _fits(x: Any, wanted: Any) -> bool:
    """Is x of the type of an annotation?"""
    origin, parts = get_origin(wanted), get_args(wanted)
    if origin in (Union, UnionType):
        return any(_fits(x, part) for part in parts)
    if origin is Literal:
        return x in parts
    if origin is tuple:
        if not isinstance(x, tuple):
            return False
        if parts[-1] is Ellipsis:
            return all(_fits(value, parts[0]) for value in x)
        return len(x) == len(parts) and all(map(_fits, x, parts))
    if origin is not None:
        return isinstance(x, origin)
    if wanted is int:
        return isinstance(x, int) and not isinstance(x, bool) and abs(x) < 1 << 62
    if wanted is float:
        return isinstance(x, (int, float)) and not isinstance(x, bool)
    return isinstance(x, wanted) if isinstance(wanted, type) else x is None
