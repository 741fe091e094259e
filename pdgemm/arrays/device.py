"""Memory of the host, and of devices that work behind the host's back, in streams.

The algorithms are written for any array that can be cut, transposed and reshaped like NumPy's.  What they do with its
elements they leave to `elementwise`, `local_gemm` and `block_copy`, and when it is done to `streams`; all of these ask
here whose array it is.  A NumPy array belongs to nobody: the host does its work at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from pdgemm.errors import DeviceError, DTypeError

if TYPE_CHECKING:
    from mpi4py import MPI

Array = Any  # a NumPy array, or one of a device

HOST = "host"
REMEDY = "Open MPI built with --with-cuda, or MPICH_GPU_SUPPORT_ENABLED=1 on a Cray"  # for MPI without GPUs
_MODULES = {"cuda": "pdgemm.devices.cuda"}  # devices that there are: what makes them


class Combination(Protocol):
    """Y := alpha op(X) + beta Y, as `elementwise.Combine` says it."""

    alpha: Any
    beta: Any
    conjugated: bool
    through: np.dtype | None


class Event(Protocol):
    """A moment of a stream."""

    def synchronize(self) -> None: ...


class Stream(Protocol):
    """Work that a device does in order.  In a `with` block it takes what is begun there."""

    def record(self) -> Any: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def __enter__(self) -> Any: ...
    def __exit__(self, *error: Any) -> Any: ...


class Pinned(NamedTuple):
    """Words of the host's memory that the device can reach: as the host sees them, and as the device does."""

    host: np.ndarray
    device: Array

    @property
    def nbytes(self) -> int:
        return self.host.nbytes

    def cut(self, start: int, stop: int) -> Pinned:
        return Pinned(self.host[start:stop], self.device[start:stop])

    def shared_out(self, parts: int) -> list[Pinned]:
        """In parts of one size."""
        words = self.host.size // parts
        return [self.cut(part * words, (part + 1) * words) for part in range(parts)]


class Reach(NamedTuple):
    """How ranks reach each other's memory of a device.

    reads  : the mover by which ranks of a node read it, "shared" where it lies, "ipc" with a copy; "": they cannot.
    staged : MPI does not take pointers to it: messages go through the host.
    nccl   : NCCL does.
    why    : how that is known of MPI.
    sharing : ranks that work on one device, at most.
    """

    reads: str = ""
    staged: bool = True
    nccl: bool = False
    why: str = ""
    sharing: int = 1

    def __str__(self) -> str:
        near = {"shared": "in place (CUDA IPC, one GPU)", "ipc": "by copies (CUDA IPC)"}.get(self.reads, "by messages")
        return (
            f"ranks of a node read each other's memory {near}; MPI {'does not take' if self.staged else 'takes'} "
            f"pointers to it ({self.why}); NCCL {'can' if self.nccl else 'cannot'} be used"
        )


class Device(Protocol):
    """What pdgemm needs of a device.  Work is begun in the current stream; nothing here waits unless it says so."""

    name: str

    def empty(self, shape: Sequence[int], dtype: Any, order: str = "C") -> Array:
        """An array whose elements are not set.  Raises OutOfMemoryError."""

    def pinned(self, words: int, dtype: Any) -> Pinned:
        """Memory of the host that is copied from and to at full speed, and by kernels, too."""

    def multiply(
        self, alpha: Any, A: Array, B: Array, C: Array, conjugate_a: bool, conjugate_b: bool, tf32: bool
    ) -> Callable[[Any], None]:
        """C := alpha op(A) op(B) + beta C, to be called with beta, again and again; see `local_gemm.prepare`.

        tf32 : may operands in single precision be rounded to 11 bits?
        """

    def multiply_stack(self, alpha: Any, A: Array, B: Array, beta: Any, C: Array) -> None:
        """C_i := alpha A_i B_i + beta C_i for stacks (items, rows, columns), at least one item, in one call."""

    def combine(self, how: Combination, target: Array, source: Array) -> None:
        """target := alpha op(source) + beta target; what is multiplied by 0 is not read."""

    def combine_blocks(self, how: Combination, target: Array, source: Array, rows: Any, cols: Any) -> None:
        """The same of rows x columns of both, as `index_map.IndexMap`; see `block_copy.copy_blocks`."""

    def copy(self, target: Any, source: Any) -> None:
        """Contiguous elements from or to pinned memory, by the copy engine."""

    def broadcast(self, comm: MPI.Comm, x: Array, root: int) -> None:
        """x of root to all ranks, by NCCL.  Collective over comm, in the same order on all ranks."""

    def current_stream(self) -> Stream:
        """The caller's."""

    def transfer_stream(self) -> Stream:
        """One of our own, for what is copied while products are formed."""

    def happened(self, event: Any) -> bool:
        """Is all done that was begun before?  Raises what went wrong on the device."""

    def elapsed(self, begin: Any, end: Any) -> float:
        """Seconds between two events, which are done."""

    def to_host(self, x: Array) -> np.ndarray:
        """A copy, complete on return."""

    def to_device(self, x: np.ndarray, order: str) -> Array:
        """A copy, complete on return."""

    def meet(self, grid: Any) -> None:
        """Find out how the ranks of the grid reach each other, if that is not known.  Collective over the grid."""

    def reach(self, grid: Any) -> Reach:
        """What `meet` found."""

    def memory(self, grid: Any) -> Any:
        """What the ranks of a node can read of each other's device memory, as `grids.node_memory.NodeMemory`."""

    def check(self, x: Array) -> None:
        """Raises DeviceError for an array on another device of its kind than this rank's."""

    def plain(self, x: Array) -> bool:
        """May MPI and other ranks be given its address?"""

    def takes(self, x: Any) -> Array | None:
        """Another library's array of this device as one of ours, without a copy; None for anything else."""


_devices: dict[type, Device] = {}


def register(kind: type, device: Device) -> None:
    """Arrays of this type belong to this device."""
    _devices[kind] = device


def of(x: Array) -> Device | None:
    """The device whose array it is; None for the host's."""
    if isinstance(x, np.ndarray):
        return None
    found = _devices.get(type(x))
    if found is None and type(x).__module__.partition(".")[0] == "cupy":
        found = named("cuda")
    return found


def named(name: Any) -> Device | None:
    """The device of a name; None for the host.  Raises DeviceError where there is none."""
    if name in (None, HOST):
        return None
    for device in _devices.values():
        if device.name == name:
            return device
    if name not in _MODULES:
        raise DeviceError(f"device {name!r} is not one of {', '.join((HOST, *_MODULES))}")
    try:
        module = import_module(_MODULES[name])
    except ImportError as bad:
        raise DeviceError(f"device {name!r} needs CuPy: {bad}; pip install 'pdgemm[cuda13]' (or cuda12)") from None
    made: Device = module.device()
    return made


def name_of(x: Array) -> str:
    found = of(x)
    return found.name if found else HOST


def adopted(x: Any) -> Array:
    """Anything that is an array, as the host's or a device's, without a copy if it can be avoided.

    Raises DTypeError for what would not be the same as an array of numbers.
    """
    if any(isinstance(part, np.ma.MaskedArray) for part in (x, *(x if isinstance(x, (list, tuple)) else ()))):
        raise DTypeError("a masked array would lose its mask: fill it first, array.filled(value)")
    if hasattr(x, "toarray"):
        raise DTypeError(f"a {type(x).__name__} is no dense array: convert it first, array.toarray()")
    if not isinstance(x, np.ndarray) and of(x) is not None:
        return x
    if _on_cuda(x) or (not hasattr(x, "__dlpack_device__") and hasattr(x, "__cuda_array_interface__")):
        cuda = named("cuda")
        taken = cuda.takes(x) if cuda else None
        if taken is not None:
            return taken
    return np.asarray(x)


def _on_cuda(x: Any) -> bool:
    """Does DLPack say so?"""
    where = getattr(x, "__dlpack_device__", None)
    return where is not None and int(where()[0]) in (2, 13)  # kDLCUDA, kDLCUDAManaged


def empty(shape: Sequence[int], dtype: Any, order: str = "C", device: Device | None = None) -> Array:
    if device is None:
        return np.empty(shape, dtype, order)  # type: ignore[call-overload]
    return device.empty(shape, dtype, order)


def memory(device: Device | None, grid: Any) -> Any:
    """What the ranks of a node share of the memory of a device, or of the host."""
    return grid.memory if device is None else device.memory(grid)


def to_host(x: Array) -> np.ndarray:
    """The elements where the host can read them: the array itself, or a copy."""
    found = of(x)
    return x if found is None else found.to_host(x)


def shadow(x: Array) -> np.ndarray:
    """An array of the same place and strides, to be asked where its elements lie, never what they are."""
    if isinstance(x, np.ndarray):
        return x
    seen = dict(x.__cuda_array_interface__)
    strides = seen.get("strides") or x.strides
    interface = {"version": 3, "shape": x.shape, "strides": strides, "data": (seen["data"][0], True)}
    return np.asarray(SimpleNamespace(__array_interface__=interface | {"typestr": f"|V{x.dtype.itemsize}"}))


def address(x: Array) -> int:
    """Where an array begins."""
    if isinstance(x, np.ndarray):
        return int(x.ctypes.data)
    return int(x.__cuda_array_interface__["data"][0])


def writeable(x: Array) -> bool:
    return bool(getattr(x.flags, "writeable", True))
