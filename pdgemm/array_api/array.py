"""Array: a tensor by the rules of the Python array API standard."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any, Self

import numpy as np

import pdgemm
from pdgemm.errors import ArgumentError
from pdgemm.local.arrays.device import to_host
from pdgemm.names import DeviceName
from pdgemm.tensors.dist_tensor import DistTensor


class Array(DistTensor):
    """A DistTensor whose functions and parts are arrays of any number of axes, as the array API standard requires.

    A DistTensor has results of fewer than two axes on every rank; an Array distributes them, too.  `float(x)`,
    `int(x)`, `bool(x)` and `complex(x)` of an array without axes return its number on every rank.  Collective over the
    grid.

    Where the grid has one rank, the array is one array in its memory: NumPy and other libraries read it in place
    (`numpy.asarray(x)`, DLPack).  Where it has several, `numpy.asarray(x)` gathers an array of at most one axis
    longer than 1 on every rank; otherwise both raise an error, because one rank has not all elements.
    """

    narrow_products = True

    def _result(self) -> Self:
        return self

    def to_device(self, device: DeviceName = "cuda", /, *, stream: Any = None) -> Self:
        """Return a copy in the memory of a device or the host, or the array itself if it is there.  Collective.

        stream : None; the copy is complete on return.
        """
        if stream is not None:
            raise ArgumentError("to_device takes no stream: the copy is complete when it returns")
        return super().to_device(device)

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

    def __iter__(self) -> Iterator[Self]:
        if not self.ndim:
            raise TypeError("an array without axes has no parts")
        return iter(np.unstack(self))  # type: ignore[arg-type]

    def _number(self, of: type) -> Any:
        if self.ndim:
            raise TypeError(f"only an array without axes is a number, not one of shape {self.shape}")
        return of(self.allgather().item())

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

    # ------------------------------------------------------------------ other libraries
    def _whole_local(self) -> Any:
        """Return the elements in place.  Raises BufferError where the grid has several ranks.  Local."""
        if self.grid.size > 1:
            raise BufferError(
                f"the elements are on {self.grid.size} ranks: x.local is this rank's part, x.to_global(root) and "
                "x.allgather() gather all of them as one array of NumPy"
            )
        return self.local

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: bool | None = None
    ) -> Any:
        options = {"stream": stream, "max_version": max_version, "dl_device": dl_device, "copy": copy}
        return self._whole_local().__dlpack__(**{name: x for name, x in options.items() if x is not None})

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.local.__dlpack_device__()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return an array of at most one axis longer than 1 on every rank, or any array whose grid has one rank.

        Collective.  Raises TypeError for an array of several longer axes on several ranks.
        """
        if sum(n > 1 for n in self.shape) < 2 and self.grid.size > 1 and copy is not False:
            return self.allgather().astype(dtype or self.dtype, copy=False)
        try:
            return np.array(to_host(self._whole_local()), dtype=dtype, copy=copy)
        except BufferError as bad:
            raise TypeError(f"an Array is not one array of NumPy: {bad}") from None
