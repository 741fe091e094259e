"""Factorisations of blocks and panels on a GPU, by LAPACK's routines of the same names in cuSOLVER.

cuSOLVER takes column-major arrays, and device memory for its workspace and for all results.  Results that the host
needs are in one array, so that they are copied at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import cupy
import numpy as np
from cupy.cuda import cusolver

from pdgemm.devices.kernels import memory_errors
from pdgemm.local.arrays.device import Array, Device
from pdgemm.local.arrays.dtypes import TYPE
from pdgemm.local.arrays.elementwise import CONVERT
from pdgemm.local.blas.local_gemm import leading

_LOWER, _UPPER = 0, 1  # cublasFillMode_t
_INFO_BYTES = 16  # bytes for `info`, so that the elements behind it are aligned
_memory_errors = memory_errors({cusolver.CUSOLVERError: 2})  # CUSOLVER_STATUS_ALLOC_FAILED


class Factorisations:
    """Factorisations in the current stream, by a separate handle: users may change the modes of CuPy's handle."""

    @_memory_errors
    def __init__(self, device: Device) -> None:
        self._device, self._handle = device, cusolver.create()

    @_memory_errors
    def potrf(self, A: Array, lower: bool) -> tuple[int, np.ndarray]:
        """Overwrite one triangle of a column-major A with its Cholesky factor, as LAPACK's potrf.

        The other triangle is neither read nor written.  Returns info and the diagonal of the factor on the host, which
        waits for one small copy of both.
        """
        n, dtype = len(A), A.dtype
        results = self._device.empty((_INFO_BYTES + n * dtype.itemsize,), np.int8)
        routine, work = self._routine("potrf", A, _LOWER if lower else _UPPER, n)
        routine(work.data.ptr, work.size, results.data.ptr)
        diagonal = cupy.lib.stride_tricks.as_strided(A, (n,), (sum(A.strides),))
        self._device.combine(CONVERT, results[_INFO_BYTES:].view(dtype), diagonal)
        on_host = self._device.to_host(results)
        return int(on_host[:4].view(np.int32)[0]), on_host[_INFO_BYTES:].view(dtype)

    @_memory_errors
    def getrf(self, A: Array, pivots: np.ndarray) -> int:
        """Overwrite A, column-major (m, n), with its factors, P A = L U, as LAPACK's getrf, and return info.

        pivots : min(m, n) numbers on the host, counted from 1.  They are copied together with info, and the host waits
            for this copy.
        """
        (m, n), number = A.shape, min(A.shape)
        results = self._device.empty((1 + number,), np.int32)
        routine, work = self._routine("getrf", A, m, n)
        routine(work.data.ptr, results[1:].data.ptr, results.data.ptr)
        info, *rows = self._device.to_host(results).tolist()
        # pivots of a matrix with NaN are undefined; other ranks need valid row numbers
        pivots[:number] = [row if step <= row <= m else step for step, row in enumerate(rows, 1)]
        return int(info)

    @_memory_errors
    def geqrf(self, A: Array) -> Array:
        """Overwrite A, column-major (m, n), with R and reflectors, as LAPACK's geqrf; return tau, on the device."""
        tau, info = self._device.empty((min(A.shape),), A.dtype), self._device.empty((1,), np.int32)
        routine, work = self._routine("geqrf", A, *A.shape)
        routine(tau.data.ptr, work.data.ptr, work.size, info.data.ptr)
        return tau

    def _routine(self, name: str, A: Array, *sizes: int) -> tuple[Callable[..., None], Array]:
        """Return a routine, with all arguments up to the leading dimension of A bound, and a workspace for it.

        The host may free the workspace before the routine has run: the memory pool of the current stream gives it only
        to later work in this stream.
        """
        cusolver.setStream(self._handle, cupy.cuda.get_current_stream().ptr)
        routine = f"{TYPE[A.dtype].blas}{name}"
        head = self._handle, *sizes, A.data.ptr, leading(A)[1]
        words = getattr(cusolver, f"{routine}_bufferSize")(*head)
        return partial(getattr(cusolver, routine), *head), self._device.empty((max(1, words),), A.dtype)
