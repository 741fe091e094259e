"""What the namespace can do: its devices, its types and their defaults."""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from pdgemm.array_api.array import Array
from pdgemm.errors import DeviceError
from pdgemm.local.arrays import device as devices

bool = np.dtype(np.bool_)
int8, int16, int32, int64 = map(np.dtype, ("int8", "int16", "int32", "int64"))
uint8, uint16, uint32, uint64 = map(np.dtype, ("uint8", "uint16", "uint32", "uint64"))
float32, float64, complex64, complex128 = map(np.dtype, ("float32", "float64", "complex64", "complex128"))
DTYPES = (bool, int8, int16, int32, int64, uint8, uint16, uint32, uint64, float32, float64, complex64, complex128)


class FloatInfo(NamedTuple):
    """The range of a floating-point type; of a complex type, that of its parts."""

    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: np.dtype


def _type(x: Any) -> Any:
    return x.dtype if hasattr(x, "dtype") else x


def finfo(type: Any, /) -> FloatInfo:
    """Return the range of a floating-point type, or of the type of an array."""
    info: Any = ml_dtypes.finfo(_type(type))  # type: ignore[no-untyped-call]
    eps, most, least, normal = (float(x) for x in (info.eps, info.max, info.min, info.smallest_normal))
    return FloatInfo(int(info.bits), eps, most, least, normal, np.dtype(info.dtype))


def iinfo(type: Any, /) -> np.iinfo[Any]:
    """Return the range of an integer type, or of the type of an array."""
    return np.iinfo(_type(type))


def can_cast(from_: Any, to: Any, /) -> Any:
    """Return whether a type, or that of an array, promotes to another one."""
    return np.can_cast(_type(from_), to)


def result_type(*arrays_and_dtypes: Any) -> np.dtype:
    """Return the type to which arrays, types and numbers promote.  Local."""
    return np.result_type(*map(_type, arrays_and_dtypes))


def astype(x: Array, dtype: Any, /, *, copy: Any = True, device: Any = None) -> Array:
    """Return a copy with elements of another type; without `copy`, x itself if it has this type.  Collective."""
    same = dtype == x.dtype and not copy
    result = x if same else x.astype(dtype)
    return result if device is None else result.to_device(device)


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
