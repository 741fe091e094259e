"""How ranks access each other's GPU memory: by CUDA IPC on a node, or else by GPU-aware MPI or NCCL."""

from __future__ import annotations

import ctypes
import warnings
from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import cupy
import numpy as np
from cupy.cuda import runtime
from mpi4py import MPI

from pdgemm.devices import cuda_nccl, gpu_aware_mpi, gpu_binding
from pdgemm.errors import DeviceError, MappingError
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.local.arrays.device import REMEDY, Array, Device, Reach
from pdgemm.support.agreement import together

_HANDLE_WORDS = 8  # words of eight bytes in an IPC handle
_BUFFER_ID = 7  # CU_POINTER_ATTRIBUTE_BUFFER_ID: the number of an allocation, never used twice in a process
_IS_IPC_CAPABLE = 10  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: plain cudaMalloc
_MAPPINGS = 32  # allocations of other ranks that stay mapped, or as many as one product uses
_FAILURES = runtime.CUDARuntimeError, MemoryError, OSError  # if one rank raises them, no rank reads in place
_UNUSED = 8  # products without use after which a mapped allocation is unmapped
_SHORT = 10  # a GPU is short of memory if less than 1/_SHORT is free: then allocations are unmapped after one product


class IpcMemory:
    """GPU memory that the ranks of a node map into their address space, allocation by allocation; see `NodeMemory`.

    Allocations stay mapped for the next products, as in UCX.  Meanwhile CuPy's pool may return unused allocations to
    the driver.  So the number of the allocation is sent with its handle, and a mapping is reused only if the number is
    that of the mapped allocation.
    """

    def __init__(self, node: MPI.Intracomm, device: Device) -> None:
        self.node, self.alone, self._device = node, node.size == 1, device
        ranks = MPI.Group.Translate_ranks(node.group, list(range(node.size)), MPI.COMM_WORLD.group)
        self.window = _domain(tuple(sorted(ranks)))
        self.failed = False  # an allocation could not be mapped

    def empty(self, shape: Sequence[int], dtype: Any, order: str = "C") -> Array:
        buffer = self._device.empty(shape, dtype, order)
        if not self.lies_here(buffer):
            raise DeviceError(
                "CuPy's allocator now returns managed memory, or cudaMallocAsync's, which no other rank can read: "
                "use its default pool for buffers, or a mover that sends messages (mover='staged')"
            )
        return buffer

    def lies_here(self, x: Array) -> bool:
        return self.alone or capable(x)

    def where(self, x: Array) -> list[int]:
        """Return, as words, the IPC handle and the number of the array's allocation, and the array's offset in it."""
        if self.alone or not x.size:
            return [0] * (_HANDLE_WORDS + 2)
        base = _base(x.data.ptr)
        handle = np.frombuffer(runtime.ipcGetMemHandle(base), np.int64)
        return [*handle.tolist(), _buffer_id(x), x.data.ptr - base]

    def array(self, rank: int, shape: Sequence[int], dtype: np.dtype, where: Sequence[int], strides: Any) -> Array:
        *handle, number, offset = where
        mapping = _mappings.find(np.array(handle, np.int64).tobytes(), number)
        memory = cupy.cuda.UnownedMemory(mapping.ptr, 0, mapping, runtime.getDevice())
        return cupy.ndarray(tuple(shape), dtype, cupy.cuda.MemoryPointer(memory, offset), tuple(strides))

    def map_all(self, places: Sequence[Sequence[Sequence[int]]]) -> None:
        """Map the allocations of arrays.  Collective over the node: raises MappingError on all its ranks if one fails.

        places : by rank of the node, `where` of each array.   After a failure `reach` reports that ranks cannot read.
        """
        if self.alone:
            return
        try:
            with together(self.node):
                try:
                    for rank, arrays in enumerate(places):
                        for *handle, number, _ in arrays if rank != self.node.rank else ():
                            if any(handle):
                                _mappings.find(np.array(handle, np.int64).tobytes(), number)
                except _FAILURES as bad:
                    where = f"rank {self.node.rank} of the node cannot map the GPU memory of rank {rank}"
                    raise MappingError(f"{where}: {bad}; from now on ranks send messages instead") from None
        except MappingError:
            self.failed = True
            raise

    def gather(self, words: np.ndarray) -> np.ndarray:
        free, total = runtime.memGetInfo()
        sent = np.append(words, _SHORT * free < total)  # another rank's GPU may be short of memory
        rows = np.empty((self.node.size, sent.size), sent.dtype)
        self.node.Allgather(sent, rows)
        _mappings.next_turn(1 if rows[:, -1].any() else _UNUSED)
        return rows[:, :-1]

    def sync(self) -> None:
        self.node.Barrier()

    def fence(self) -> None:
        """Do nothing: device writes that are complete before a message is sent are visible to its receiver."""


def discover_peers(device: Device, grid: ProcessGrid) -> None:
    """Determine once how the ranks of the grid access each other's GPU memory.  Collective over the grid."""
    if grid.memory in _known:
        return
    aborts = cuda_nccl.aborts()  # also ends operations that were left in a grid after the failure of a rank
    gpu = runtime.deviceGetPCIBusId(runtime.getDevice())
    places = grid.comm.allgather((grid.nodes[grid.comm.rank], f"{MPI.Get_processor_name()} {gpu}"))
    memory = IpcMemory(grid.node, device)
    mapped = grid.comm.allreduce(_maps(memory, device), MPI.LAND) and grid.comm.allreduce(grid.node.size, MPI.MAX) > 1
    one_gpu = len(set(places)) == len({node for node, _ in places})
    reads = ("shared" if one_gpu else "ipc") if mapped else ""
    sharing = max(Counter(gpu for _, gpu in places).values())
    able = cuda_nccl.wanted(grid.comm) and sharing == 1
    between_nodes = grid.ranks_per_node is not None  # between nodes no panel is read in place
    tried = able and grid.size > 1 and (not reads or between_nodes)  # only where NCCL would be chosen
    nccl = cuda_nccl.nccl_arrives(grid.comm, device) if tried else able
    aware, why = gpu_aware_mpi.gpu_aware(grid.comm, device) if grid.size > 1 else (True, "one rank sends no messages")
    _known[grid.memory] = Reach(reads, not aware, nccl, why, sharing), memory, aborts
    if not aware and grid.comm.rank == 0:
        warnings.warn(f"messages between GPUs go through the host: {why}; {REMEDY}", RuntimeWarning, stacklevel=2)


def reach(grid: ProcessGrid) -> Reach:
    outcome, memory, aborts = _known[grid.memory]
    if outcome.nccl:
        outcome = outcome._replace(nccl=aborts == cuda_nccl.aborts())
    return outcome._replace(reads="") if memory.failed else outcome


def ipc_memory(grid: ProcessGrid) -> IpcMemory:
    memory: IpcMemory = _known[grid.memory][1]
    return memory


_known: WeakKeyDictionary[Any, tuple[Reach, IpcMemory, int]] = WeakKeyDictionary()  # the int: earlier aborts of NCCL


def capable(x: Array) -> bool:
    """Return whether x is in memory of cudaMalloc: managed or stream-ordered memory cannot be mapped or used by MPI."""
    if not x.size:
        return True
    flag = ctypes.c_int(0)
    return not _attribute(flag, _IS_IPC_CAPABLE, x) and bool(flag.value)


def _buffer_id(x: Array) -> int:
    """Return the number of the allocation that contains x."""
    number = ctypes.c_ulonglong(0)
    if error := _attribute(number, _BUFFER_ID, x):
        raise runtime.CUDARuntimeError(error)
    return number.value


def _attribute(destination: Any, which: int, x: Array) -> int:
    """Write a driver attribute of the memory of x to `destination`, and return the driver's error code."""
    driver = gpu_binding.driver()
    return int(driver.cuPointerGetAttribute(ctypes.byref(destination), which, ctypes.c_uint64(x.data.ptr)))


def _maps(memory: IpcMemory, device: Device) -> bool:
    """Return whether this rank can read the GPU memory of all other ranks on its node.  Collective over the node."""
    node = memory.node
    if memory.alone:
        return True
    mine, where, seen = None, None, False  # `mine` is not freed until all ranks have read it
    with suppress(*_FAILURES):
        mine = device.to_device(np.full(1000, node.rank, np.int64), "C")
        where = memory.where(mine) if capable(mine) else None
    there = node.allgather(where)
    with suppress(*_FAILURES):
        seen = all(
            x is not None and bool((device.to_host(memory.array(rank, (1000,), np.dtype("l"), x, (8,))) == rank).all())
            for rank, x in enumerate(there)
            if rank != node.rank
        )
    node.Barrier()
    return seen


class _Mapping:
    """An allocation of another rank, mapped until it is closed, or until this object and all arrays in it are deleted.

    number : the number of the allocation, which is sent with its handle.
    """

    def __init__(self, handle: bytes, number: int) -> None:
        self.number, self._open = number, False
        self.ptr = runtime.ipcOpenMemHandle(handle)
        self._open = True

    def close(self) -> None:
        if self._open:
            self._open = False
            with suppress(Exception):  # the driver may be gone
                runtime.ipcCloseMemHandle(self.ptr)

    __del__ = close


class _Mappings:
    """A cache of mapped allocations of other ranks, because mapping an allocation takes as long as a small product.

    An allocation that its owner has returned to the driver stays mapped until one of these events: its handle is
    received with the number of another allocation; more than _UNUSED products in a row have not used it, or one product
    if a GPU is short of memory; the cache is full; a rank runs out of memory.
    """

    def __init__(self) -> None:
        self._mapped: OrderedDict[bytes, tuple[int, _Mapping]] = OrderedDict()  # last turn, mapping
        self._alive: WeakValueDictionary[bytes, _Mapping] = WeakValueDictionary()  # mappings that are still in use
        self._turn = 0

    def next_turn(self, unused: int) -> None:
        """Start the turn of a product, and unmap the allocations that the last `unused` products have not used."""
        self._turn += 1
        while self._mapped and next(iter(self._mapped.values()))[0] < self._turn - unused:
            self._mapped.popitem(last=False)

    def clear(self) -> None:
        """Unmap all allocations that are not used by an array."""
        self._mapped.clear()

    def find(self, handle: bytes, number: int) -> _Mapping:
        mapping = self._alive.get(handle)
        self._mapped.pop(handle, None)
        if mapping and mapping.number != number:
            mapping.close()  # CUDA maps a handle once; the old allocation was freed, so its arrays are not read again
            mapping = None
        mapping = self._alive[handle] = mapping or _Mapping(handle, number)
        self._mapped[handle] = self._turn, mapping
        if len(self._mapped) > _MAPPINGS and next(iter(self._mapped.values()))[0] < self._turn:
            self._mapped.popitem(last=False)
        return mapping


_mappings = _Mappings()
unmap_unused = _mappings.clear


def _base(ptr: int) -> int:
    """Return the first address of the allocation that contains a pointer."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    error = gpu_binding.driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(ptr))
    if error:
        raise runtime.CUDARuntimeError(error)
    return base.value


@cache
def _domain(ranks: tuple[int, ...]) -> object:
    """Return the object that identifies these ranks of a node, the same object for all grids over these ranks."""
    return object()
