"""Array: a tensor by the rules of the Python array API standard."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Self

import numpy as np

import pdgemm
from pdgemm.errors import ArgumentError
from pdgemm.tensors.dist_tensor import DistTensor


class Array(DistTensor):
    """A DistTensor whose functions and parts are arrays of any number of axes, as the array API standard requires.

    A DistTensor has results of fewer than two axes on every rank; an Array distributes them, too.  `float(x)`,
    `int(x)`, `bool(x)` and `complex(x)` of an array without axes return its number on every rank.  Collective over the
    grid.
    """

    def _result(self) -> Self:
        return self

    def __array_namespace__(self, *, api_version: str | None = None) -> ModuleType:
        """Return `pdgemm.array_api`.  Local."""
        known = pdgemm.array_api
        if api_version not in (None, "2021.12", "2022.12", "2023.12", "2024.12", known.__array_api_version__):
            raise ArgumentError(f"pdgemm.array_api follows version {known.__array_api_version__}, not {api_version}")
        return known

    @property
    def mT(self) -> Self:
        """The matrices along the last two axes, transposed; a view.  Local."""
        if self.ndim < 2:
            raise ArgumentError(f"mT takes an array of at least two axes, not of shape {self.shape}")
        return self.transpose(*range(self.ndim - 2), self.ndim - 1, self.ndim - 2)

    def _number(self, of: type) -> Any:
        if self.ndim:
            raise TypeError(f"only an array without axes is a number, not one of shape {self.shape}")
        return of(self.allgather()[()])

    def __bool__(self) -> bool:
        return self._number(bool)

    def __int__(self) -> int:
        return self._number(int)

    def __float__(self) -> float:
        return self._number(float)

    def __complex__(self) -> complex:
        return self._number(complex)

    def __index__(self) -> int:
        if not np.issubdtype(self.dtype, np.integer):
            raise TypeError(f"an array of {self.dtype} is not an index")
        return self._number(int)
