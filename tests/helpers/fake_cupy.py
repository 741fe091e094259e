"""CuPy without a GPU: what `pdgemm.devices` asks of CuPy, cuBLAS, CUDA's runtime and driver and NCCL, done on the host.

They take and refuse here what they take and refuse there, by CuPy 14.2's sources and CUDA's manuals: cuBLAS reads
matrices by address and leading dimension, kernels are told in C, CUDA IPC maps allocations of other processes (here
files in memory that have no name).  All is done at once: when it is done is the matter of fake_device.py.  Only NCCL's
operations may never be done (`Nccl.stuck`), nor then what is in the streams behind them.  cuSOLVER is in
fake_cusolver.py.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import re
import struct
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
from functools import partial, partialmethod
from importlib.machinery import ModuleSpec
from itertools import count
from math import prod
from time import sleep
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
from fake_cusolver import Cusolver
from fake_device import FakeArray, solve_triangular
from mpi4py import MPI
from scipy.special import erfc

BLOCK = 1 << 20  # bytes that the pool asks of the runtime, at least
GRAIN = 512  # bytes that it gives out, at least
TOTAL = 1 << 31  # bytes of the GPU
# of pdgemm.devices
MODULES = "cuda", "cuda_ipc", "cuda_nccl", "cusolver", "generators", "grouped_gemm", "kernels", "launch_errors"

_TYPES = {"float": "f4", "double": "f8", "complex<float>": "c8", "complex<double>": "c16"}
_TYPES |= {"long long": "i8", "int": "i4", "signed char": "i1", "float16": "f2", "bfloat16": ml_dtypes.bfloat16}
_TYPES |= {"unsigned long long": "u8"}
# cudaDataType_t
_CUBLAS_TYPES = {2: "f2", 14: ml_dtypes.bfloat16, 0: "f4", 1: "f8", 4: "c8", 5: "c16", 3: "i1", 10: "i4"}
# cublasComputeType_t: operands and results that there are, by the type of alpha and beta
_CUBLAS: dict[int, set[tuple[str, str]]] = {
    68: {("f2", "f2"), ("f2", "f4"), ("bf", "bf"), ("bf", "f4"), ("f4", "f4"), ("c8", "c8")},
    77: {("f4", "f4"), ("c8", "c8")},
    70: {("f8", "f8"), ("c16", "c16")},
    72: {("i1", "i4")},
}


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: object) -> None:
        super().__init__(f"cudaError: {status}")
        self.status = status


class CUDADriverError(CUDARuntimeError):
    pass


class CUBLASError(RuntimeError):
    def __init__(self, status: object) -> None:
        super().__init__(f"cuBLAS: {status}")
        self.status = status


class OutOfMemoryError(MemoryError):
    pass


# ---------------------------------------------------------------- memory
class Allocation(mmap.mmap):
    """What the runtime has given the pool."""

    def __new__(cls, size: int, fd: int, managed: bool = False) -> Allocation:
        made = super().__new__(cls, fd, size)
        made.fd, made.managed, made.ptr, made.number = fd, managed, _address(made), next(cls._numbers)
        return made

    fd: int
    managed: bool
    ptr: int
    number: int
    _numbers = count(1)


def _address(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


class Part:
    """Memory that somebody holds: `size` bytes from `ptr` on, which `owner` keeps."""

    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        self.ptr, self.size, self.owner = ptr, size, owner


class Unowned(Part):
    """Memory that CuPy has not allocated: pinned, or of another process."""


class Pool:
    """It keeps what the runtime has given it, and gives it out again."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._used, self._peak = gpu, 0, 0
        self._last, self._end = gpu.allocate(BLOCK), 0  # what nobody has held yet
        self._free: dict[int, list[tuple[int, Allocation]]] = {}
        self._held: dict[int, int] = {}  # bytes that were asked for, by address
        self.managed = False

    def holds(self, ptr: int, nbytes: int) -> bool:
        """Is this in one part that somebody holds?"""
        return any(start <= ptr and ptr + nbytes <= start + size for start, size in [*self._held.items()])

    def take(self, nbytes: int) -> Part:
        asked = nbytes
        nbytes = -(-max(1, nbytes) // GRAIN) * GRAIN
        if self.managed:
            made = self._gpu.allocate(nbytes, managed=True)
            return Part(made.ptr, nbytes, made)
        ptr, allocation = (self._free.get(nbytes) or [self._new(nbytes)]).pop()
        self._held[ptr] = asked
        self._used += nbytes
        self._peak = max(self._peak, self._used)
        part = Part(ptr, nbytes, allocation)
        weakref.finalize(part, self._give, ptr, nbytes, allocation)
        return part

    def _new(self, nbytes: int) -> tuple[int, Allocation]:
        if self._end + nbytes > len(self._last):
            try:
                self._last, self._end = self._gpu.allocate(max(BLOCK, nbytes)), 0
            except CUDARuntimeError:
                gc.collect(), self.free_all_blocks()
                try:
                    self._last, self._end = self._gpu.allocate(max(BLOCK, nbytes)), 0
                except CUDARuntimeError:
                    raise OutOfMemoryError from None
        self._end += nbytes
        return self._last.ptr + self._end - nbytes, self._last

    def _give(self, ptr: int, nbytes: int, allocation: Allocation) -> None:
        self._used -= nbytes
        del self._held[ptr]
        self._free.setdefault(nbytes, []).append((ptr, allocation))

    def used_bytes(self) -> int:
        return self._used

    def total_bytes(self) -> int:
        return self._peak

    def free_bytes(self) -> int:
        return self._peak - self._used

    def free_all_blocks(self) -> None:
        self._peak = self._used
        self._free.clear()  # allocations of which nobody holds a part go back to the runtime


class Gpu:
    """The runtime, the driver and NCCL, of one process that sees `count` GPUs."""

    memcpyDefault, CUDARuntimeError, CUBLASError = 4, CUDARuntimeError, CUBLASError

    def __init__(self, count: int) -> None:
        self.count, self.current, self.context = count, 0, False
        self.total = TOTAL
        self.allocations: list[weakref.ref[Allocation]] = []
        self.given_back: list[tuple[int, int]] = []  # file and bytes of memory that other ranks may have mapped
        self.mapped: dict[int, mmap.mmap] = {}
        self.mapped_from: dict[int, bytes] = {}  # the handles, each of which a process opens once
        self.files: dict[int, int] = {}  # of mapped memory
        self.calls: list[str] = []
        self.downloads: list[int] = []  # bytes of each array that was copied to the host, pinned memory included
        self.uploads: list[int] = []  # and from there
        self._pinned: list[tuple[int, int]] = []  # first and last address
        self.modes: dict[int, int] = {}  # the math modes of cuBLAS's handles
        self.streams: dict[int, int] = {}  # and the streams that they were given
        self.current_stream = lambda: 0
        self.version = 130100  # of cuBLAS
        self.most_pitch = (1 << 31) - 1
        self.failed = 0  # what the driver says ever after a kernel has failed

    def allocate(self, nbytes: int, managed: bool = False) -> Allocation:
        if self.used() + nbytes > self.total:
            raise CUDARuntimeError(2)
        fd = os.memfd_create("cuda")
        os.ftruncate(fd, nbytes)
        made = Allocation(nbytes, fd, managed)
        weakref.finalize(made, self._give_back, fd, nbytes)
        self.allocations = [x for x in self.allocations if x()] + [weakref.ref(made)]
        return made

    def _give_back(self, fd: int, nbytes: int) -> None:
        self.given_back.append((os.dup(fd), nbytes))
        os.close(fd)  # the handle may be that of the next allocation

    def used(self) -> int:
        """Bytes that are allocated: what was given back is so while others, which lock it, have mapped it."""
        for fd, nbytes in [*self.given_back]:
            with suppress(BlockingIOError):
                flock(fd, LOCK_EX | LOCK_NB)
                os.close(fd)
                self.given_back.remove((fd, nbytes))
        return sum(len(x) for ref in self.allocations if (x := ref())) + sum(nbytes for _, nbytes in self.given_back)

    def _of(self, ptr: int) -> Allocation:
        for x in self.allocations:
            found = x()
            if found is not None and found.ptr <= ptr < found.ptr + len(found):
                return found
        raise CUDARuntimeError("invalid argument")

    def pinned(self, nbytes: int) -> mmap.mmap:
        if nbytes > TOTAL:
            raise CUDARuntimeError("out of memory")
        self.calls.append("hostAlloc")
        memory = mmap.mmap(-1, nbytes)
        self._pinned.append((_address(memory), _address(memory) + nbytes))
        return memory

    def passed(self, target: int, source: int, nbytes: int) -> None:
        """A kernel or a copy engine has copied between these addresses."""
        for where, passes in ((target, self.downloads), (source, self.uploads)):
            if any(start <= where < stop for start, stop in self._pinned):
                passes.append(nbytes)

    # the runtime, as CuPy has it
    def getDeviceCount(self) -> int:
        return self.count

    def setDevice(self, number: int) -> None:
        assert 0 <= number < self.count
        self.current = number

    def getDevice(self) -> int:
        return self.current

    def deviceGetPCIBusId(self, number: int) -> str:
        return f"0000:{number:02X}:00.0"

    def eventQuery(self, event: int) -> int:
        return self.failed or (600 if event in Event.behind and Nccl.waiting else 0)

    def getDeviceProperties(self, number: int) -> dict[str, Any]:
        return {"name": b"simulated"}

    def runtimeGetVersion(self) -> int:
        return 13000

    driverGetVersion = runtimeGetVersion

    def memGetInfo(self) -> tuple[int, int]:
        return self.total - self.used(), self.total

    def pointerGetAttributes(self, ptr: int) -> Any:
        self._of(ptr)
        return SimpleNamespace(device=self.current)

    def memcpyAsync(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        assert kind == self.memcpyDefault
        self.calls.append("memcpyAsync")
        self.passed(target, source, nbytes)
        ctypes.memmove(target, source, nbytes)

    def memcpy2DAsync(
        self, target: int, to_pitch: int, source: int, from_pitch: int, width: int, height: int, kind: int, stream: int
    ) -> None:
        assert kind == self.memcpyDefault
        assert 0 < width <= min(to_pitch, from_pitch)
        if max(to_pitch, from_pitch) > self.most_pitch:
            raise CUDARuntimeError("invalid pitch argument")
        self.calls.append("memcpy2DAsync")
        self.passed(target, source, width * height)
        for row in range(height):
            ctypes.memmove(target + row * to_pitch, source + row * from_pitch, width)

    def ipcGetMemHandle(self, ptr: int) -> bytes:
        found = self._of(ptr)
        if found.ptr != ptr or found.managed:
            raise CUDARuntimeError("invalid argument")
        return f"{os.getpid()} {found.fd} {len(found)}".encode().ljust(64)

    def ipcOpenMemHandle(self, handle: bytes) -> int:
        pid, fd, size = map(int, handle.split())
        if pid == os.getpid():
            raise CUDARuntimeError("invalid device context: no process maps its own memory")
        self.calls.append("ipcOpenMemHandle")
        if handle in self.mapped_from.values():
            raise CUDARuntimeError(208)  # already mapped
        try:
            file = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        except OSError:
            raise CUDARuntimeError("invalid resource handle") from None
        flock(file, LOCK_SH)
        memory = mmap.mmap(file, size)
        ptr = _address(memory)
        self.mapped[ptr], self.mapped_from[ptr], self.files[ptr] = memory, handle, file
        return ptr

    def ipcCloseMemHandle(self, ptr: int) -> None:
        del self.mapped_from[ptr]
        self.mapped.pop(ptr).close()
        os.close(self.files.pop(ptr))

    # the driver, through ctypes
    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGetCount(self, found: Any) -> int:
        found._obj.value = self.count
        return 0

    def cuCtxGetCurrent(self, found: Any) -> int:
        found._obj.value = 1 if self.context else None
        return 0

    def cuCtxGetDevice(self, found: Any) -> int:
        found._obj.value = self.current
        return 0

    def cuDeviceGetPCIBusId(self, name: Any, size: int, number: int) -> int:
        name.value = self.deviceGetPCIBusId(number).encode()
        return 0

    def cuDeviceGet(self, found: Any, number: int) -> int:
        found._obj.value = number
        return 0 if number < self.count else 101

    def cuDevicePrimaryCtxRetain(self, found: Any, device: ctypes.c_int) -> int:
        found._obj.value = 1 + device.value
        return 0

    def cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:
        assert context.value
        self.current, self.context = context.value - 1, True
        return 0

    def cuPointerGetAttribute(self, found: Any, attribute: int, ptr: ctypes.c_uint64) -> int:
        allocation = self._of(ptr.value)
        found._obj.value = {7: allocation.number, 10: not allocation.managed}[attribute]
        return 0

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, ptr: ctypes.c_uint64) -> int:
        found = self._of(ptr.value)
        base._obj.value, size._obj.value = found.ptr, len(found)
        return 0

    # cuBLAS
    def create(self) -> int:
        self.modes[handle := 1 + len(self.modes)] = 0
        return handle

    def setMathMode(self, handle: int, mode: int) -> None:
        self.modes[handle] = mode

    def getVersion(self, handle: int) -> int:
        assert handle in self.modes
        return self.version

    def setStream(self, handle: int, stream: int) -> None:
        self.streams[handle] = stream

    def gemmEx(
        self, handle: int, op_a: int, op_b: int, m: int, n: int, k: int, alpha: int, A: int, type_a: int, lda: int,
        B: int, type_b: int, ldb: int, beta: int, C: int, type_c: int, ldc: int, compute: int, algorithm: int,
    ) -> None:  # fmt: skip
        """C := alpha op(A) op(B) + beta C, by columns; where beta is 0 C is not read."""
        assert algorithm == -1
        assert min(m, n, k) > 0
        if max(m, n, k, lda, ldb, ldc) >= 1 << 31:
            raise OverflowError("value too large to convert to int")  # of Cython
        types = [np.dtype(_CUBLAS_TYPES[x]) for x in (type_a, type_b, type_c)]
        short = ["bf" if x == ml_dtypes.bfloat16 else x.str[1:] for x in types]
        assert self.modes[handle] == 16, "partial sums may be rounded to the type of C"
        assert short[0] == short[1] and (short[0], short[2]) in _CUBLAS[compute], f"cuBLAS has no {short} by {compute}"
        scalar = "f4" if short[2] in ("f2", "bf") else short[2]
        a, b = _by_columns(A, types[0], lda, m, k, op_a), _by_columns(B, types[1], ldb, k, n, op_b)
        c = _by_columns(C, types[2], ldc, m, n, 0)
        width = ctypes.c_byte * np.dtype(scalar).itemsize
        first, second = (np.frombuffer(width.from_address(x), scalar)[0] for x in (alpha, beta))
        if compute == 72:
            self._check_integers((first, second), (m, n, k), (A, B, C), (lda, ldb, ldc), op_a, op_b)
        product = first * (a.astype(scalar) @ b.astype(scalar))
        with np.errstate(all="ignore"):
            c[...] = product if second == 0 else product + second * c.astype(scalar)
        self.calls.append("gemmEx")

    def _check_integers(self, scalars: Any, extents: Any, places: Any, lds: Any, op_a: int, op_b: int) -> None:
        """What cuBLAS refuses of int8 operands; nor may a product be slow, or its sums too large for 32 bits."""
        if {*map(int, scalars)} - {0, 1} or any(x % 4 for x in (*extents, *places, *lds)):
            raise CUBLASError(15)  # not supported
        assert (op_a, op_b) == (1, 0), "int8 products are fast only where both operands lie along k"
        assert not any(x % 16 for x in (*places, *lds)), "int8 products are fast only at multiples of 16 bytes"
        assert extents[2] < 1 << 17, "sums of int8 products may exceed 32 bits"

    def trsm(
        self, dtype: str, handle: int, side: int, uplo: int, op: int, unit: int, m: int, n: int, alpha: int, A: int,
        lda: int, X: int, ldx: int,
    ) -> None:  # fmt: skip
        """X := alpha op(A)^-1 X, by columns."""
        size, known = n if side else m, np.dtype(dtype)
        a, x = _by_columns(A, known, lda, size, size, 0), _by_columns(X, known, ldx, m, n, 0)
        width = ctypes.c_byte * known.itemsize
        first = np.frombuffer(width.from_address(alpha), known)[0]
        with np.errstate(all="ignore"):
            solve_triangular(("LR"[side], "LU"[uplo], "NTC"[op], "NU"[unit]), first, a, x)
        self.calls.append("trsm")

    strsm, dtrsm = partialmethod(trsm, "f4"), partialmethod(trsm, "f8")
    ctrsm, ztrsm = partialmethod(trsm, "c8"), partialmethod(trsm, "c16")

    def gemmStridedBatchedEx(
        self, handle: int, op_a: int, op_b: int, m: int, n: int, k: int, alpha: int, A: int, type_a: int, lda: int,
        step_a: int, B: int, type_b: int, ldb: int, step_b: int, beta: int, C: int, type_c: int, ldc: int,
        step_c: int, items: int, compute: int, algorithm: int,
    ) -> None:  # fmt: skip
        sizes = [np.dtype(_CUBLAS_TYPES[x]).itemsize for x in (type_a, type_b, type_c)]
        for item in range(items):
            a, b, c = (x + item * step * size for x, step, size in zip((A, B, C), (step_a, step_b, step_c), sizes))
            self.gemmEx(
                handle, op_a, op_b, m, n, k, alpha, a, type_a, lda, b, type_b, ldb, beta, c, type_c, ldc, compute, -1
            )

    # cuBLAS, through ctypes
    def cublasGemmGroupedBatchedEx(
        self, handle: Any, op_a: Any, op_b: Any, m: Any, n: Any, k: Any, alpha: Any, A: Any, type_a: Any, lda: Any,
        B: Any, type_b: Any, ldb: Any, beta: Any, C: Any, type_c: Any, ldc: Any, number: Any, sizes: Any, compute: Any,
    ) -> int:  # fmt: skip
        """One product after the other; extents and scalars are read on the host, and addresses on the GPU."""
        assert self.version >= 120500, "the library has no such function"
        assert self.streams[handle.value] == self.current_stream(), "another stream than the caller's"
        on_host = op_a, op_b, m, n, k, lda, ldb, ldc, sizes
        assert not any(self._on_gpu(x.value) for x in (*on_host, alpha, beta)), "extents and scalars are on the host"
        assert all(self._on_gpu(x.value) for x in (A, B, C)), "addresses are on the GPU"
        kind, compute = type_c.value, compute.value
        if {type_a.value, type_b.value} != {kind} or (kind, compute) not in ((0, 68), (0, 77), (1, 70)):
            return 15  # not supported
        groups = np.transpose([_numbers(x, number.value, np.intc) for x in on_host]).tolist()
        if any(min(group) < 0 or group[7] < group[2] for group in groups):
            return 7  # invalid value
        places = np.transpose([_numbers(x, sum(group[8] for group in groups), np.uint64) for x in (A, B, C)]).tolist()
        assert all(self._on_gpu(x) for place in places for x in place)
        called, itemsize = len(self.calls), np.dtype(_CUBLAS_TYPES[kind]).itemsize
        for group, (*shared, ld_a, ld_b, ld_c, size) in enumerate(groups):
            first, second = (x.value + group * itemsize for x in (alpha, beta))
            for _ in range(size):
                a, b, c = places.pop(0)
                lying = a, kind, ld_a, b, kind, ld_b, second, c, kind, ld_c
                self.gemmEx(handle.value, *shared, first, *lying, compute, -1)
        self.calls[called:] = ["gemmGroupedBatchedEx"]
        return 0

    def _on_gpu(self, ptr: int) -> bool:
        return any((x := made()) is not None and x.ptr <= ptr < x.ptr + len(x) for made in self.allocations)


def _numbers(ptr: Any, number: int, dtype: Any) -> np.ndarray:
    """Numbers at an address."""
    return np.frombuffer((ctypes.c_byte * (number * np.dtype(dtype).itemsize)).from_address(ptr.value), dtype)


def _by_columns(ptr: int, dtype: np.dtype, ld: int, rows: int, cols: int, op: int) -> np.ndarray:
    """op(X) of rows x cols, where X has the leading dimension ld; op: as it is, transposed, or conjugated, too."""
    high, wide = (rows, cols) if op == 0 else (cols, rows)
    assert ld >= high
    memory = (ctypes.c_byte * (((wide - 1) * ld + high) * dtype.itemsize)).from_address(ptr)
    x: np.ndarray = np.ndarray((high, wide), dtype, memory, strides=(dtype.itemsize, ld * dtype.itemsize))
    return x if op == 0 else x.T if op == 1 else x.conj().T


# ---------------------------------------------------------------- arrays and kernels
class Simulated:
    """cupy, and what is below it."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.pool = gpu, Pool(gpu)
        simulated = self
        self.streams = [Stream(self)]
        gpu.current_stream = lambda: self.streams[-1].ptr

        class ndarray(FakeArray):
            """Memory by its address."""

            def __init__(
                self,
                shape: Sequence[int],
                dtype: Any = float,
                memptr: Any = None,
                strides: Any = None,
                order: str = "C",
            ) -> None:
                dtype = np.dtype(dtype)
                if memptr is None:
                    memptr = MemoryPointer(simulated.pool.take(prod(shape) * dtype.itemsize), 0)
                if strides is None:
                    strides = np.empty(shape, dtype, order).strides  # type: ignore[call-overload]
                extent = sum((n - 1) * s for n, s in zip(shape, strides)) + dtype.itemsize if prod(shape) else 0
                memory = (ctypes.c_byte * max(1, extent)).from_address(memptr.ptr)
                self.memory = memptr.mem  # kept as long as this
                super().__init__(np.ndarray(shape, dtype, memory, 0, strides), simulated)  # type: ignore[arg-type]

            @property
            def data(self) -> Any:
                return SimpleNamespace(ptr=self.x.__array_interface__["data"][0], mem=self.memory)

            def get(self, stream: Any = None, order: str = "C") -> np.ndarray:
                simulated.streams[-1].synchronize()
                simulated.gpu.downloads.append(self.nbytes)
                return np.array(self.x, order=order)  # type: ignore[call-overload]

            def set(self, x: np.ndarray) -> None:
                assert x.dtype == self.dtype and x.shape == self.shape and self.flags.forc
                assert x.flags.f_contiguous if self.flags.f_contiguous else x.flags.c_contiguous
                simulated.gpu.uploads.append(self.nbytes)
                self.x[...] = x

        ndarray.__module__ = "cupy"
        self.ndarray = ndarray

    # of FakeArray's device
    def _launch(self, what: str, reads: Sequence[Any], writes: Sequence[Any], act: Any) -> None:
        assert all(isinstance(x, FakeArray) for x in (*reads, *writes)), f"{what} of an array of the host"
        act()

    def empty(self, shape: Sequence[int], dtype: Any = float, order: str = "C") -> Any:
        made = self.ndarray(shape, dtype, order=order)
        if made.size:
            ctypes.memset(made.data.ptr, 0xFF, made.nbytes)  # memory that nobody has written to
        return made

    def to_host(self, x: Any) -> np.ndarray:
        return np.array(x.x)

    # of cupy
    def ones(self, shape: Sequence[int], dtype: Any = float) -> Any:
        made = self.empty(shape, dtype)
        made.x[...] = 1
        return made

    def asarray(self, x: np.ndarray) -> Any:
        self.gpu.uploads.append(x.nbytes)
        made = self.empty(x.shape, x.dtype)
        made.x[...] = x
        return made

    def from_dlpack(self, x: Any) -> Any:
        if x.__dlpack_device__()[0] == 2:
            x.__dlpack__()
        raise BufferError("an array of the host")

    def as_strided(self, x: Any, shape: Sequence[int], strides: Sequence[int]) -> Any:
        return x._like(np.lib.stride_tricks.as_strided(x.x, shape, strides))

    @contextmanager
    def using_allocator(self, allocator: str | None) -> Iterator[None]:
        self.pool.managed = allocator == "managed"
        try:
            yield
        finally:
            self.pool.managed = False

    def get_elapsed_time(self, begin: Event, end: Event) -> float:
        assert begin.number <= end.number
        return 1e-3 * (end.number - begin.number)

    def modules(self) -> dict[str, ModuleType]:
        cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
        cupy.__spec__ = ModuleSpec("cupy", None)  # find_spec looks for it
        vars(cupy).update(
            __version__="14.2.0",
            ndarray=self.ndarray,
            empty=self.empty,
            ones=self.ones,
            asarray=self.asarray,
            from_dlpack=self.from_dlpack,
            get_default_memory_pool=lambda: self.pool,
            ElementwiseKernel=partial(ElementwiseKernel, self.gpu),
            lib=SimpleNamespace(stride_tricks=SimpleNamespace(as_strided=self.as_strided)),
            cuda=cuda,
        )
        vars(cuda).update(
            runtime=self.gpu,
            cublas=self.gpu,
            cusolver=Cusolver(self),
            driver=SimpleNamespace(CUDADriverError=CUDADriverError),
            nccl=Nccl,
            memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
            MemoryPointer=MemoryPointer,
            UnownedMemory=Unowned,
            PinnedMemory=self.gpu.pinned,
            PinnedMemoryPointer=lambda memory, offset: memory,
            malloc_managed="managed",
            using_allocator=self.using_allocator,
            Event=Event,
            Stream=lambda non_blocking, priority=0: Stream(self),
            get_current_stream=lambda: self.streams[-1],
            get_elapsed_time=self.get_elapsed_time,
        )
        return {"cupy": cupy, "cupy.cuda": cuda}


class MemoryPointer:
    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset


class Event:
    _numbers = count()
    behind: ClassVar[set[int]] = set()  # those recorded behind operations of NCCL that are never done

    def __init__(self) -> None:
        self.number = next(self._numbers)
        self.ptr = self.number
        if Nccl.waiting:
            self.behind.add(self.ptr)

    def synchronize(self) -> None:
        while self.ptr in self.behind and Nccl.waiting:
            sleep(1e-3)


class Stream:
    def __init__(self, simulated: Simulated) -> None:
        self._simulated, self.ptr = simulated, next(self._numbers)  # no two streams have the same

    _numbers = count()

    def record(self) -> Event:
        return Event()

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, Event)

    def synchronize(self) -> None:
        self.record().synchronize()

    def __enter__(self) -> Stream:
        self._simulated.streams.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        assert self._simulated.streams.pop() is self


class ElementwiseKernel:
    """Its C, as Python on whole arrays."""

    def __init__(
        self, gpu: Gpu, in_params: str, out_params: str, operation: str, name: str, options: tuple[str, ...] = ()
    ) -> None:
        assert name != "pdgemm_normal" or "--fmad=false" in options, "CUDA would round otherwise than the host"
        self._gpu = gpu
        self._in, self._out = ([tuple(x.rsplit(" ", 1)) for x in p.split(", ")] for p in (in_params, out_params))
        self._operation = _in_python(operation)

    def __call__(self, *args: Any, size: int | None = None) -> None:
        names: dict[str, Any] = {
            "cast": _cast,
            "conj": np.conj,
            "where": np.where,
            **{name: getattr(np, name) for name in ("sqrt", "exp", "tanh")},
            "erfc": erfc,
        }
        names["__double_as_longlong"] = lambda x: x.view(np.int64)
        names["__longlong_as_double"] = lambda x: x.view(np.float64)
        assert len(args) == len(self._in) + len(self._out)
        for (kind, name), x in zip(self._in + self._out, args):
            declared = kind.removeprefix("raw ")
            names[declared] = x.dtype.type
            if len(declared) > 1:  # not a letter for any type
                assert np.dtype(declared) == x.dtype, f"{name} is {x.dtype}, declared as {kind}"
            names[name] = x.x.view() if isinstance(x, FakeArray) else x
        targets = args[len(self._in) :]
        (kind, _), target = self._out[0], targets[0]
        for x in (x for x in args[: len(self._in)] if isinstance(x, FakeArray)):
            self._gpu.passed(target.data.ptr, x.data.ptr, target.nbytes)
        if size is None:
            steps = [s for n, s in zip(target.shape, target.strides) if n > 1]
            assert steps == sorted(steps, reverse=True), "neighbouring threads do not write neighbouring elements"
        if size is not None:
            assert kind.startswith("raw ")
            names["i"] = np.arange(size)
        with np.errstate(all="ignore"):
            exec(self._operation, names)
            if size is None:
                for (_, name), target in zip(self._out, targets):
                    assert names[name].dtype == target.dtype
                    assert names[name].shape in (target.shape, ()), "a kernel that broadcasts its result"
                    target.x[...] = names[name]


def _cast(name: str, x: Any) -> np.ndarray:
    return np.asarray(x).astype(_TYPES[name])


def _in_python(operation: str) -> str:
    lines = []
    for statement in operation.split("; "):
        text = re.sub(r"static_cast<(complex<\w+>|[\w ]+)>\(", r'cast("\1", ', statement).replace(".real()", ".real")
        text = re.sub(r"\bfrom\b", "origin", text).replace("[] =", " =").replace("{", "(").replace("}", ")")
        text = re.sub(r"\b(0x[0-9A-F]+)ULL\b", r"\1", re.sub(r"^(unsigned long long|long long|double|R) ", "", text))
        text = re.sub(r"^if \((.+?)\) (\S+) = (.+)", r"\2 = where(\1, \3, \2)", text)
        if text.startswith("ptrdiff_t "):
            text = text.removeprefix("ptrdiff_t ").replace(" / ", " // ")
            text = re.sub(r", (\w+) +=", r"; \1 =", text)
        lines.append(text)
    return "; ".join(lines)


# ---------------------------------------------------------------- NCCL
def _memory(ptr: int, nbytes: int) -> np.ndarray:
    assert nbytes > 0, "NCCL is called for nothing"
    return np.ctypeslib.as_array((ctypes.c_ubyte * nbytes).from_address(ptr))


class Nccl:
    """One rank per GPU, and all calls in the same order.

    stuck : the operations of this rank wait for ranks that never come, until they are aborted.
    error : what NCCL's own thread has seen going wrong.   world : has all ranks, and none that has failed.
    """

    available, NCCL_UINT8 = True, 1
    _tags = count(1)
    _group: ClassVar[list[tuple[Any, ...]]] = []
    waiting: ClassVar[set[Any]] = set()  # communicators of operations that are never done
    stuck, error, world = False, "", MPI.COMM_WORLD
    _depth = aborted = 0

    @staticmethod
    def get_version() -> int:
        return 22703

    @classmethod
    def groupStart(cls) -> None:
        cls._depth += 1

    @classmethod
    def groupEnd(cls) -> None:
        cls._depth -= 1
        if not cls._depth:
            cls._run()

    @classmethod
    def _run(cls) -> None:
        """Messages between two ranks are matched in their order; nobody goes on before all of a group is done."""
        group, cls._group = cls._group, []
        requests = []
        if cls.stuck:
            cls.waiting.update(communicator for _, communicator, *_ in group)
            return
        group = [(what, communicator._comm, *args) for what, communicator, *args in group]
        for what, comm, *args in group:
            if what == "recv":
                requests.append(comm.Irecv(*args))
        for what, comm, *args in group:
            if what == "send":
                requests.append(comm.Issend(*args))
            elif what == "bcast":
                comm.Bcast(*args)
            elif what == "reduce":
                part, total, root = args
                in_place = part.ctypes.data == total.ctypes.data and comm.rank == root
                comm.Reduce(MPI.IN_PLACE if in_place else part, total if comm.rank == root else None, MPI.SUM, root)
        MPI.Request.Waitall(requests)

    @classmethod
    def get_unique_id(cls) -> bytes:
        return struct.pack("qq112x", cls.world.rank, next(cls._tags))

    class NcclCommunicator:
        def __init__(self, size: int, unique: bytes, rank: int) -> None:
            assert isinstance(unique, bytes) and len(unique) == 128
            root, number = struct.unpack("qq112x", unique)
            tag, world = 4000 + number % 1000, Nccl.world
            if rank == 0:
                ranks = [root] + [0] * (size - 1)
                for _ in range(size - 1):
                    place, there = world.recv(tag=tag)
                    ranks[place] = there
                for there in ranks[1:]:
                    world.send(ranks, there, tag)
            else:
                world.send((rank, world.rank), root, tag)
                ranks = world.recv(source=root, tag=tag)
            self._comm = world.Create_group(world.group.Incl(ranks), tag)

        def _queue(self, what: str, *args: Any) -> None:
            """It is done when the group that it is in ends."""
            assert self._comm is not None, "NCCL crashes: the communicator was aborted"
            Nccl._group.append((what, self, *args))
            if not Nccl._depth:
                Nccl._run()

        def bcast(self, ptr: int, count: int, dtype: int, root: int, stream: int) -> None:
            assert dtype == Nccl.NCCL_UINT8
            self._queue("bcast", _memory(ptr, count), root)

        def send(self, ptr: int, count: int, dtype: int, peer: int, stream: int) -> None:
            assert dtype == Nccl.NCCL_UINT8
            self._queue("send", _memory(ptr, count), peer)

        def recv(self, ptr: int, count: int, dtype: int, peer: int, stream: int) -> None:
            assert dtype == Nccl.NCCL_UINT8
            self._queue("recv", _memory(ptr, count), peer)

        def reduce(self, part: int, total: int, count: int, dtype: int, op: int, root: int, stream: int) -> None:
            assert op == 0
            kind = np.dtype({2: "i4", 4: "i8", 7: "f4", 8: "f8"}[dtype])
            found, there = (_memory(ptr, count * kind.itemsize).view(kind) for ptr in (part, total))
            self._queue("reduce", found, there, root)

        def abort(self) -> None:
            """Whatever the others do; nothing is left to be destroyed."""
            Nccl.aborted += 1
            Nccl.waiting.discard(self)
            self._comm = None

        def check_async_error(self) -> None:
            assert self._comm is not None, "NCCL crashes: the communicator was aborted"
            if Nccl.error:
                raise RuntimeError(Nccl.error)

        def destroy(self) -> None:
            while self in Nccl.waiting:  # kernels have to end first
                sleep(1e-3)
            if self._comm is not None:
                self._comm.Free()
                self._comm = None


@contextmanager
def fake_cupy(gpus: int = 1, aware: str = "no") -> Iterator[Gpu]:
    """`import cupy` finds this.  The process sees so many GPUs; MPI says whether it takes pointers to their memory."""
    from pdgemm import devices
    from pdgemm.devices import gpu_aware_mpi
    from pdgemm.devices import gpu_binding as choice
    from pdgemm.local.arrays import device

    gpu = Gpu(gpus)
    simulated = Simulated(gpu)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"stuck": False, "error": "", "waiting": set()}.items():
            patch.setattr(Nccl, name, value)
        for name, module in simulated.modules().items():
            patch.setitem(sys.modules, name, module)
        for name in MODULES:  # each time anew
            patch.delitem(sys.modules, f"pdgemm.devices.{name}", raising=False)
            patch.delattr(devices, name, raising=False)
        patch.setattr(device, "_devices", dict(device._devices))
        patch.setattr(choice, "_driver", lambda: gpu)
        patch.setattr(gpu_aware_mpi, "support_reported", lambda: aware)
        patch.setattr(gpu_aware_mpi, "_SIDE", 16)
        choice.visible.cache_clear()
        from pdgemm.devices import cuda_ipc, grouped_gemm

        patch.setattr(cuda_ipc, "_driver", lambda: gpu)
        patch.setattr(grouped_gemm, "_library", {13: gpu}.get)
        try:
            yield gpu
        finally:
            choice.visible.cache_clear()
            for name in MODULES:
                sys.modules.pop(f"pdgemm.devices.{name}", None)
                vars(devices).pop(name, None)
