"""Frozen dataclasses as JSON and back."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.grids.layout import Layout
from pdgemm.machine import Link, Machine

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


def unpack(text: str, types: tuple[type, ...]) -> Any:
    """What `pack` was given; `types` that it may have met beside those of layouts and machines."""
    known = {kind.__name__: kind for kind in (*_KNOWN, *types)}

    def made(x: Any) -> Any:
        if isinstance(x, list):
            return tuple(made(value) for value in x)
        if not isinstance(x, dict):
            return x
        given = dict(x)
        kind = given.pop("is")
        if kind == "dtype":
            return np.dtype(given["name"])
        if kind == "range":
            return tuple(range(given["start"], given["stop"]))
        if kind == "dict":
            return {made(key): made(value) for key, value in given["items"]}
        return known[kind](**{name: made(value) for name, value in given.items()})

    try:
        return made(json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError) as bad:
        raise ArgumentError(f"not what was saved: {type(bad).__name__}: {bad}") from bad
