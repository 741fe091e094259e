"""CUDA without a GPU: the runtime, the driver, cuBLAS and memory, simulated on the host (fake_cupy.py)."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import weakref
from contextlib import suppress
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
from fake_cublas import Cublas, CUBLASError
from fake_nccl import Nccl

BLOCK = 1 << 20  # least bytes that the pool requests from the runtime
GRAIN = 512  # least bytes of a part that the pool hands out
TOTAL = 1 << 31  # bytes of the GPU


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: object) -> None:
        super().__init__(f"cudaError: {status}")
        self.status = status


class CUDADriverError(CUDARuntimeError):
    pass


class OutOfMemoryError(MemoryError):
    pass


class Allocation(mmap.mmap):
    """Memory that the pool has allocated from the runtime."""

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
    """A part of an allocation that an array uses: `size` bytes from `ptr` on, kept alive by `owner`."""

    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        self.ptr, self.size, self.owner = ptr, size, owner


class Unowned(Part):
    """Memory that CuPy has not allocated: pinned, or of another process."""


class Pool:
    """CuPy's memory pool: it allocates from the runtime, and reuses freed parts."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._used, self._peak = gpu, 0, 0
        self._last, self._end = gpu.allocate(BLOCK), 0  # where new parts are taken from
        self._free: dict[int, list[tuple[int, Allocation]]] = {}
        self._held: dict[int, int] = {}  # requested bytes, by address
        self.managed = False

    def holds(self, ptr: int, nbytes: int) -> bool:
        """Return whether this range is inside one part in use."""
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
                self._last = self._gpu.allocate(max(BLOCK, nbytes))
            except CUDARuntimeError:
                gc.collect(), self.free_all_blocks()
                try:
                    self._last = self._gpu.allocate(max(BLOCK, nbytes))
                except CUDARuntimeError:
                    raise OutOfMemoryError from None
            self._end = 0
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
        self._free.clear()  # the runtime frees allocations without a part in use


class Gpu(Cublas):
    """The runtime, the driver and NCCL of one process that sees `count` GPUs."""

    memcpyDefault, CUDARuntimeError, CUBLASError = 4, CUDARuntimeError, CUBLASError

    def __init__(self, count: int) -> None:
        self.count, self.current, self.context = count, 0, False
        self.total = TOTAL
        self.allocations: list[weakref.ref[Allocation]] = []
        self.given_back: list[tuple[int, int]] = []  # (file, bytes) of freed memory that other ranks may have mapped
        self.mapped: dict[int, mmap.mmap] = {}
        self.mapped_from: dict[int, bytes] = {}  # open IPC handles; a process opens each once
        self.files: dict[int, int] = {}  # files of mapped memory
        self.calls: list[str] = []
        self.downloads: list[int] = []  # bytes of each array copied to the host, including pinned memory
        self.uploads: list[int] = []  # bytes of each array copied from the host
        self._pinned: list[tuple[int, int]] = []  # first and last address
        self.modes: dict[int, int] = {}  # math modes by handle of cuBLAS
        self.streams: dict[int, int] = {}  # streams by handle of cuBLAS
        self.current_stream = lambda: 0
        self.version = 130100  # of cuBLAS: 13.1
        self.most_pitch = (1 << 31) - 1
        self.failed = 0  # after a kernel has failed: the error of all later calls of the driver

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
        os.close(fd)  # the next allocation may have the same handle

    def used(self) -> int:
        """Return the allocated bytes, including freed memory that other ranks still map (they lock its file)."""
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
        """Count the bytes that a kernel or copy engine moves, if one of the addresses is in pinned host memory."""
        for where, passes in ((target, self.downloads), (source, self.uploads)):
            if any(start <= where < stop for start, stop in self._pinned):
                passes.append(nbytes)

    # the runtime, with CuPy's interface
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
        return self.failed or (600 if event in Nccl.behind and Nccl.waiting else 0)

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
        return _written(found, self.count)

    def cuCtxGetCurrent(self, found: Any) -> int:
        return _written(found, 1 if self.context else None)

    def cuCtxGetDevice(self, found: Any) -> int:
        return _written(found, self.current)

    def cuDeviceGetPCIBusId(self, name: Any, size: int, number: int) -> int:
        name.value = self.deviceGetPCIBusId(number).encode()
        return 0

    def cuDeviceGet(self, found: Any, number: int) -> int:
        return _written(found, number) if number < self.count else 101

    def cuDevicePrimaryCtxRetain(self, found: Any, device: ctypes.c_int) -> int:
        return _written(found, 1 + device.value)

    def cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:
        assert context.value
        self.current, self.context = context.value - 1, True
        return 0

    def cuPointerGetAttribute(self, found: Any, attribute: int, ptr: ctypes.c_uint64) -> int:
        allocation = self._of(ptr.value)
        return _written(found, {7: allocation.number, 10: not allocation.managed}[attribute])

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, ptr: ctypes.c_uint64) -> int:
        found = self._of(ptr.value)
        base._obj.value, size._obj.value = found.ptr, len(found)
        return 0


def _written(found: Any, value: Any) -> int:
    found._obj.value = value
    return 0
