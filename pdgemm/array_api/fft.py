"""The standard's extension of Fourier transforms: see `pdgemm.tensors.numpy_modules.tensor_fft`."""
# ruff: noqa: I001

from __future__ import annotations

from typing import Any

import numpy as np

from pdgemm.array_api.array import Array
from pdgemm.errors import ArgumentError
from pdgemm.local.arrays.device import HOST
from pdgemm.tensors.numpy_modules.tensor_fft import (
    fft as fft, fftn as fftn, fftshift as fftshift, hfft as hfft, ifft as ifft, ifftn as ifftn,
    ifftshift as ifftshift, ihfft as ihfft, irfft as irfft, irfftn as irfftn, rfft as rfft, rfftn as rfftn,
)  # fmt: skip


def fftfreq(n: int, /, *, d: float = 1.0, dtype: Any = None, device: Any = None) -> Array:
    """Return the frequencies of the n elements of `fft`, for samples at a distance d.  Collective over the grid."""
    return _frequencies(n, n, d, dtype, device)


def rfftfreq(n: int, /, *, d: float = 1.0, dtype: Any = None, device: Any = None) -> Array:
    """Return the frequencies of the n // 2 + 1 elements of `rfft`.  Collective over the grid."""
    return _frequencies(n, n // 2 + 1, d, dtype, device)


def _frequencies(n: int, count: int, d: float, dtype: Any, device: Any) -> Array:
    dtype = np.dtype(float if dtype is None else dtype)
    if n < 1 or dtype.kind != "f":
        raise ArgumentError(f"frequencies are real numbers for n >= 1 samples, got n={n} and dtype={dtype}")
    last = (n - 1) // 2 if count == n else count  # frequencies behind it are negative
    return Array.from_function(
        lambda k: np.where(k <= last, k, k - n) / (n * d), (count,), dtype=dtype, device=device or HOST
    )
