"""How ranks access each other's GPU memory: by CUDA IPC on a node, by GPU-aware MPI, by NCCL."""

from __future__ import annotations

import ctypes
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import cupy
import numpy as np
from cupy.cuda import runtime
from mpi4py import MPI

from pdgemm.arrays.device import REMEDY, Array, Device, Reach
from pdgemm.devices import gpu_aware_mpi
from pdgemm.errors import DeviceError
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.support.agreement import together

with warnings.catch_warnings():  # CuPy warns if NCCL is not installed; `available` says so, too
    warnings.simplefilter("ignore")
    from cupy.cuda import nccl as libnccl

_HANDLE_BYTES = 64
NCCL_BYTES = 1  # ncclUint8
_IS_IPC_CAPABLE = 10  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: plain cudaMalloc


class IpcMemory:
    """GPU memory that the ranks of a node map into their address space, allocation by allocation; see `NodeMemory`.

    A mapped allocation must not be returned to the driver, as CuPy's pool does with unused ones on request or when
    memory is exhausted.  So it stays mapped while a product has arrays in it, and its owner keeps a reference to it as
    long; `Plan.prepare` maps it once.
    """

    def __init__(self, node: MPI.Intracomm, device: Device) -> None:
        self.node, self.alone, self._device = node, node.size == 1, device
        ranks = MPI.Group.Translate_ranks(node.group, list(range(node.size)), MPI.COMM_WORLD.group)
        self.window = _domain(tuple(sorted(ranks)))

    def empty(self, shape: Sequence[int], dtype: Any, order: str = "C") -> Array:
        made = self._device.empty(shape, dtype, order)
        if not self.lies_here(made):
            raise DeviceError(
                "CuPy's allocator now returns managed memory, or cudaMallocAsync's, which no other rank can read: "
                "use its default pool for buffers, or a mover that sends messages (mover='staged')"
            )
        return made

    def lies_here(self, x: Array) -> bool:
        return self.alone or capable(x)

    def where(self, x: Array) -> list[int]:
        """Return the IPC handle of the allocation and the offset of the array in it, as words."""
        if self.alone or not x.size:
            return [0] * (_HANDLE_BYTES // 8 + 1)
        base = _base(x.data.ptr)
        handle = np.frombuffer(runtime.ipcGetMemHandle(base), np.int64)
        return [*handle.tolist(), x.data.ptr - base]

    def array(self, rank: int, shape: Sequence[int], dtype: np.dtype, where: Sequence[int], strides: Any) -> Array:
        *handle, offset = where
        memory = _mapped(np.array(handle, np.int64).tobytes())
        return cupy.ndarray(tuple(shape), dtype, cupy.cuda.MemoryPointer(memory, offset), tuple(strides))

    def gather(self, words: np.ndarray) -> np.ndarray:
        rows = np.empty((self.node.size, words.size), words.dtype)
        self.node.Allgather(words, rows)
        return rows

    def sync(self) -> None:
        self.node.Barrier()

    def fence(self) -> None:
        """Do nothing: what is complete before a message is sent is visible to its receiver."""


def discover_peers(grid: ProcessGrid, device: Device) -> None:
    """Determine once how the ranks of the grid access each other's GPU memory.  Collective over the grid."""
    if grid.memory in _known:
        return
    places = grid.comm.allgather((grid.nodes[grid.comm.rank], f"{MPI.Get_processor_name()} {_place()}"))
    memory = IpcMemory(grid.node, device)
    mapped = grid.comm.allreduce(_maps(memory, device), MPI.LAND) and grid.comm.allreduce(grid.node.size, MPI.MAX) > 1
    one_gpu = len(set(places)) == len({node for node, _ in places})
    reads = ("shared" if one_gpu else "ipc") if mapped else ""
    sharing = max(Counter(gpu for _, gpu in places).values())
    able = grid.comm.allreduce(sharing == 1 and libnccl.available, MPI.LAND)
    tried = able and reads == "" and grid.size > 1  # it would be chosen
    nccl = _broadcasts(grid.comm, device) if tried else able
    aware, why = gpu_aware_mpi.gpu_aware(grid.comm, device) if grid.size > 1 else (True, "one rank sends no messages")
    _known[grid.memory] = Reach(reads, not aware, bool(nccl), why, sharing), memory
    if not aware and grid.comm.rank == 0:
        warnings.warn(f"messages between GPUs go through the host: {why}; {REMEDY}", RuntimeWarning, stacklevel=2)


def reach(grid: ProcessGrid) -> Reach:
    found: Reach = _known[grid.memory][0]
    return found


def memory(grid: ProcessGrid) -> IpcMemory:
    found: IpcMemory = _known[grid.memory][1]
    return found


_known: WeakKeyDictionary[Any, tuple[Reach, IpcMemory]] = WeakKeyDictionary()


def capable(x: Array) -> bool:
    """Return whether x is in cudaMalloc's memory; managed or stream-ordered memory cannot be mapped or given to MPI."""
    if not x.size:
        return True
    flag = ctypes.c_int(0)
    error = _driver().cuPointerGetAttribute(ctypes.byref(flag), _IS_IPC_CAPABLE, ctypes.c_uint64(x.data.ptr))
    return error == 0 and bool(flag.value)


def _maps(memory: IpcMemory, device: Device) -> bool:
    """Return whether this rank can read the GPU memory of all others on its node.  Collective over the node."""
    node = memory.node
    if memory.alone:
        return True
    try:
        mine = device.to_device(np.full(1000, node.rank, np.int64), "C")
        where = memory.where(mine) if capable(mine) else None
    except (runtime.CUDARuntimeError, MemoryError):
        where = None
    there, seen = node.allgather(where), False
    try:
        seen = all(
            x is not None and bool((device.to_host(memory.array(rank, (1000,), mine.dtype, x, (8,))) == rank).all())
            for rank, x in enumerate(there)
            if rank != node.rank
        )
    except runtime.CUDARuntimeError:
        seen = False
    node.Barrier()  # all have read
    return seen


class _Mapping:
    """An allocation of another rank, mapped until the last array in it is deleted."""

    def __init__(self, handle: bytes) -> None:
        self.ptr = runtime.ipcOpenMemHandle(handle)

    def __del__(self) -> None:
        with suppress(Exception):  # the driver may be gone
            runtime.ipcCloseMemHandle(self.ptr)


_mappings: WeakValueDictionary[bytes, _Mapping] = WeakValueDictionary()


def _mapped(handle: bytes) -> Any:
    mapping = _mappings.get(handle)
    if mapping is None:
        mapping = _mappings[handle] = _Mapping(handle)
    return cupy.cuda.UnownedMemory(mapping.ptr, 0, mapping, runtime.getDevice())


def _place() -> str:
    """The name of this rank's GPU."""
    return str(runtime.deviceGetPCIBusId(runtime.getDevice()))


def _base(ptr: int) -> int:
    """Return the first address of the allocation that a pointer is in."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    error = _driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(ptr))
    if error:
        raise runtime.CUDARuntimeError(error)
    return base.value


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _domain(ranks: tuple[int, ...]) -> object:
    """Return the object that stands for these ranks of a node, the same for all grids over them."""
    return object()


def _destroy(comm: MPI.Comm, keyval: int, made: Any) -> None:
    made.destroy()


_NCCL = MPI.Comm.Create_keyval(delete_fn=_destroy)


def nccl(comm: MPI.Comm) -> Any:
    """Return the NCCL communicator of the same ranks, which the first call creates.  Collective over comm.

    Raises DeviceError on all ranks if it cannot be created.
    """
    made: Any = comm.Get_attr(_NCCL)
    if made is None:
        with together(comm):
            unique = _or_error(libnccl.get_unique_id) if comm.rank == 0 else None
        unique = comm.bcast(unique)
        with together(comm):
            made = _or_error(libnccl.NcclCommunicator, comm.size, unique, comm.rank)
        comm.Set_attr(_NCCL, made)
    return made


def _or_error(call: Callable[..., Any], *args: Any) -> Any:
    try:
        return call(*args)
    except (RuntimeError, OSError) as bad:  # NcclError is one
        raise DeviceError(f"NCCL cannot be used: {bad}") from None


def _broadcasts(comm: MPI.Intracomm, device: Device) -> bool:
    """Return whether an NCCL broadcast from rank 0 arrives on all ranks.  Collective over comm."""
    with together(comm):
        x = device.to_device(np.full(1000, comm.rank + 7, np.int64), "C")
    right = False
    with suppress(DeviceError, RuntimeError):  # NcclError, CUDARuntimeError: perhaps on this rank only
        device.broadcast(comm, x, 0)
        right = bool((device.to_host(x) == 7).all())
    return bool(comm.allreduce(right, MPI.LAND))
