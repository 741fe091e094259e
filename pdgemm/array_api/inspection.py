"""What the namespace can do: its devices, its types and their defaults."""

from __future__ import annotations

from typing import Any

import numpy as np

from pdgemm.array_api.data_types import DTYPES, complex128, float64, int64
from pdgemm.errors import DeviceError
from pdgemm.local.arrays import device as devices

_KINDS = ("bool", "signed integer", "unsigned integer", "real floating", "complex floating")


class Inspection:
    """The inspection functions of the standard.  Local."""

    def capabilities(self) -> dict[str, Any]:
        return {"boolean indexing": True, "data-dependent shapes": True, "max dimensions": 64}

    def default_device(self) -> str:
        return devices.HOST

    def devices(self) -> tuple[str, ...]:
        """Return the names of the memories that arrays can be in: "host", and "cuda" where CuPy is installed."""
        try:
            devices.device_named("cuda")
        except DeviceError:
            return (devices.HOST,)
        return devices.HOST, "cuda"

    def default_dtypes(self, *, device: Any = None) -> dict[str, np.dtype]:
        return {"real floating": float64, "complex floating": complex128, "integral": int64, "indexing": int64}

    def dtypes(self, *, device: Any = None, kind: str | tuple[str, ...] | None = None) -> dict[str, np.dtype]:
        """Return the types of a kind, or of several kinds, by name; by default all."""
        return {x.name: x for x in DTYPES if np.isdtype(x, _KINDS if kind is None else kind)}


def __array_namespace_info__() -> Inspection:
    return Inspection()
