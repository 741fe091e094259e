"""Checks of the arrays that layers take.  Local: a layer that communicates makes them inside `LineChecks.checked`."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from pdgemm.errors import ArgumentError, DTypeError, LayoutError
from pdgemm.local.arrays.dtypes import FLOATS
from pdgemm.parallel.parts import of_host

Array = np.ndarray


@dataclass(frozen=True)
class SameContent:
    """An array as an argument of `LineChecks.checked`: ranks compare it when they agree on what is new otherwise.

    All of them are equal as members of `known`, so that another array is no reason to agree again.
    """

    digest: str = field(compare=False)

    @classmethod
    def of(cls, name: str, x: Any) -> SameContent:
        numbers = np.ascontiguousarray(x, float)  # integers of any type
        return cls(f"{name} with the digest {blake2b(numbers.tobytes(), digest_size=4).hexdigest()}")

    def __str__(self) -> str:
        return self.digest


def check_array(name: str, x: Any, shape: tuple[int | None, ...], where: str) -> None:
    """Raise an exception where x is no array of real numbers of this shape on the host.

    shape : None is any length.   where : says which rank of which layer wants it.
    """
    if not isinstance(x, np.ndarray):
        of_host(x, name)
        raise ArgumentError(f"{name} is an array of NumPy, got {type(x).__name__} {where}")
    if x.dtype.kind not in "iub" and (x.dtype not in FLOATS or x.dtype.kind == "c"):
        raise DTypeError(f"{name} has real numbers, got {x.dtype} {where}")
    if shape != x.shape and (len(shape) != x.ndim or any(n not in (None, m) for n, m in zip(shape, x.shape))):
        raise LayoutError(f"{name} is {x.shape}, and {shape} {where}")


def check_ids(name: str, ids: Any, number: int, where: str = "") -> None:
    """Raise ArgumentError where ids are not integers from 0 to `number` - 1."""
    at = f" {where}" if where else ""
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
        of_host(ids, name)
        raise ArgumentError(
            f"{name} are integers of one dimension, got {getattr(ids, 'dtype', type(ids).__name__)}{at}"
        )
    if len(bad := np.flatnonzero((ids < 0) | (ids >= number))):
        raise ArgumentError(f"{name} are 0 to {number - 1}, got {ids[bad[0]]} at token {bad[0]}{at}")
