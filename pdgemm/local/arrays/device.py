"""Arrays in host memory and on devices; the work of a device is asynchronous, in streams.

The algorithms are written for any array that can be sliced, transposed and reshaped like a NumPy array.  They leave
work on elements to `elementwise`, `local_gemm` and `block_copy`, and synchronization to `streams`; all of these look up
the device of an array here.  A NumPy array has no device: the host's work is complete on return.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, cast

import numpy as np

from pdgemm.errors import DeviceError, DTypeError
from pdgemm.local.arrays import workspace
from pdgemm.local.arrays.arguments import shown
from pdgemm.local.arrays.workspace import BufferCache
from pdgemm.names import DeviceName

if TYPE_CHECKING:
    from mpi4py import MPI

Array = Any  # a NumPy array, or one of a device

HOST: Final = "host"
REMEDY = "Open MPI built with --with-cuda, or MPICH_GPU_SUPPORT_ENABLED=1 on a Cray"  # where MPI is not GPU-aware
_MODULES = {"cuda": "pdgemm.devices.cuda"}  # the module of each device


class Event(Protocol):
    """A point in a stream, complete when all work before it is complete."""

    def synchronize(self) -> None: ...


class Stream(Protocol):
    """A queue of work that a device executes in order; work started in a `with` block of a stream is added to it."""

    def record(self) -> Any: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def __enter__(self) -> Any: ...
    def __exit__(self, *error: Any) -> Any: ...


class Pinned(NamedTuple):
    """Pinned host memory, as an array of the host and as an array of the device."""

    host: np.ndarray
    device: Array

    @property
    def nbytes(self) -> int:
        return self.host.nbytes

    def cut(self, start: int, stop: int) -> Pinned:
        return Pinned(self.host[start:stop], self.device[start:stop])

    def shared_out(self, parts: int) -> list[Pinned]:
        """Return consecutive parts of the memory, of equal size."""
        words = self.host.size // parts
        return [self.cut(part * words, (part + 1) * words) for part in range(parts)]


class Reach(NamedTuple):
    """How ranks access each other's device memory.

    reads  : the mover by which ranks of a node read each other's device memory.  "shared": they read it in place;
        "ipc": they copy it; "": they cannot read it.
    staged : MPI does not accept pointers to device memory, so messages are staged through host memory.
    nccl   : NCCL can be used.
    why    : how the support of MPI was determined.
    sharing : the maximum number of ranks that use one device.
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
    """The interface of a device.  Methods start work in the current stream, and wait for it only where they say so.

    product_stream  : the stream for products; this stream and the default stream do not wait for each other.
    transfer_stream : the stream for copies that overlap with products.
    upload_stream   : the stream for copies from the host that overlap with copies to the host.
    """

    name: str
    product_stream: Any
    transfer_stream: Any
    upload_stream: Any

    def use(self) -> None:
        """Make this the current device of the calling thread."""

    def empty(self, shape: Sequence[int], dtype: Any, order: str = "C") -> Array:
        """Return an uninitialized array.  Raises OutOfMemoryError."""

    def release_memory(self) -> None:
        """Give back memory that no array uses: this rank's, and memory of other ranks that this rank has mapped."""

    def pinned(self, words: int, dtype: Any) -> Pinned:
        """Return pinned host memory, which the copy engine and kernels access at full bandwidth."""

    def multiply(
        self, alpha: Any, A: Array, B: Array, C: Array, conjugate_a: bool, conjugate_b: bool, tf32: bool
    ) -> Callable[[Any], None]:
        """Return the product C := alpha op(A) op(B) + beta C as a function of beta; see `local_gemm.prepare`.

        tf32 : operands in single precision may be rounded to 11 bits.
        """

    def multiply_stack(self, alpha: Any, A: Array, B: Array, beta: Any, C: Array) -> None:
        """Compute C_i := alpha A_i B_i + beta C_i in one call, for stacks (items, rows, columns), items >= 1."""

    def multiply_each(self, alpha: Any, products: Sequence[tuple[Array, Array, Array]], beta: Any) -> None:
        """Compute C := alpha A B + beta C for each (A, B, C); there is at least one.

        The matrices have the same type and any shapes, and none is empty.  If the library of the device supports it,
        all products are one call.
        """

    def solve_triangular(self, how: tuple[str, str, str, str], alpha: Any, A: Array, X: Array) -> None:
        """Compute X := alpha op(A)^-1 X as BLAS's trsm does, for column-major arrays.

        how : BLAS's letters for side, triangle, op and unit diagonal.
        """

    def load_factorisations(self) -> Any:
        """Return the `cusolver.Factorisations` of the device, whose library is loaded once.  Raises DeviceError."""

    def keep_triangle(self, A: Array, lower: bool, unit: bool) -> None:
        """Set a triangle of a square A to zero: the upper one if `lower`, else the lower one.

        A has any memory order.   unit : the diagonal becomes one.
        """

    def combine(self, how: Any, target: Array, source: Array) -> None:
        """Compute target := alpha op(source) + beta target; an array that is multiplied by 0 is not read.

        how : an `elementwise.Combine`.
        """

    def combine_blocks(self, how: Any, target: Array, source: Array, rows: Any, cols: Any) -> None:
        """Combine elements of both arrays.   rows, cols : their indices, an `index_map.IndexMap` for each dimension."""

    def combine_within(self, how: Any, target: Array, source: Array, within: Any) -> None:
        """Combine the elements of both arrays in a `staircase.Staircase`, such as a triangle."""

    def finish(self, how: Any, C: Array, sums: Array) -> None:
        """Apply an `activations.Finish` to sums."""

    def generate(self, target: Array, rows: np.ndarray, cols: np.ndarray, f: Any) -> bool:
        """Set target[l, h] := f(rows[l], cols[h]), bitwise as on the host.

        f : an element function.  A device may compute an `element_functions.KnownFunction`; for all other functions
            it does nothing, and returns False.
        """

    def pick(self, x: Array, rows: np.ndarray, cols: np.ndarray) -> Array:
        """Return the elements x[rows[l], cols[l]], at least one, as an array of one dimension on the device."""

    def copy(self, target: Any, source: Any) -> None:
        """Copy contiguous elements from or to pinned memory with the copy engine."""

    def broadcast(self, comm: MPI.Comm, x: Array, root: int) -> None:
        """Broadcast x from root to all ranks with NCCL.  Collective over comm, in the same order on all ranks."""

    def exchange(
        self, comm: MPI.Comm, sends: Sequence[tuple[Array, int]], receives: Sequence[tuple[Array, int]]
    ) -> None:
        """Send contiguous arrays to ranks of comm, and receive arrays from ranks of comm, with NCCL."""

    def reduce(self, comm: MPI.Comm, parts: Sequence[tuple[Array, Array, int]]) -> None:
        """For each (part, total, root), set `total` on rank root to the sum of all ranks' parts, with NCCL."""

    def current_stream(self) -> Stream:
        """Return the caller's stream."""

    def happened(self, event: Any) -> bool:
        """Return whether an event is complete.

        Raises the error of the device, if there is one; DeviceError where NCCL has failed, or was abandoned, on a rank;
        MPI.Exception where a rank has failed.
        """

    def wait(self, work: Event | Stream) -> None:
        """Let the host wait for an event, or for all work of a stream so far.  Raises the exceptions of `happened`."""

    def abandon_nccl(self, reason: str) -> None:
        """End the operations of NCCL that this rank has started, and send the reason to their other ranks."""

    def elapsed(self, begin: Any, end: Any) -> float:
        """Return the seconds between two completed events."""

    def to_host(self, x: Array) -> np.ndarray:
        """Return a copy in host memory, complete on return."""

    def to_device(self, x: np.ndarray, order: str) -> Array:
        """Return a copy on the device, complete on return."""

    def discover_peers(self, grid: Any) -> None:
        """Determine, once, how the ranks of the grid access each other's memory.  Collective over the grid."""

    def reach(self, grid: Any) -> Reach:
        """Return how the ranks of the grid access each other's device memory now.  Needs `discover_peers` before."""

    def memory(self, grid: Any) -> Any:
        """Return the device memory that the ranks of a node can read, with the methods of `NodeMemory`."""

    def check(self, x: Array) -> None:
        """Raise DeviceError for an array on another device than this rank's, or at an unaligned address."""

    def addressable(self, x: Array) -> bool:
        """Return whether MPI and other ranks can use the address of an array."""

    def takes(self, x: Any) -> Array | None:
        """Return another library's array on this device as an `Array`, without a copy; None for other objects.

        If the library does not export the array, raises DTypeError, which gives the reason.
        """


_devices: dict[type, Device] = {}


def register_device(kind: type, device: Device) -> None:
    """Register the device of an array type."""
    _devices[kind] = device


def in_use() -> bool:
    """Return whether this rank has used a device."""
    return bool(_devices)


def release_memory() -> None:
    """Give back the memory of devices that no array uses; see `Device.release_memory`."""
    gc.collect()  # the tracebacks of exceptions refer to arrays
    for device in _devices.values():
        device.release_memory()


def of(x: Array) -> Device | None:
    """Return the device of an array; None for the host."""
    if isinstance(x, np.ndarray):
        return None
    device = _devices.get(type(x))
    if device is None and type(x).__module__.partition(".")[0] == "cupy":
        device = device_named("cuda")
    return device


def device_named(name: Any) -> Device | None:
    """Return the device of this name; None for the host.  Raises DeviceError if there is none."""
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
        way = "pip install 'cupy-cuda13x[ctk]' (or cupy-cuda12x)"
        raise DeviceError(f"device {name!r} needs CuPy: {bad}; {way}") from None
    loaded: Device = module.device()
    return loaded


def name_of(x: Array) -> DeviceName:
    device = of(x)
    return cast(DeviceName, device.name) if device else HOST


def adopted(x: Any) -> Array:
    """Return any array-like object as an array of the host or of a device, without a copy if possible.

    x : an array of NumPy or CuPy, nested lists of numbers, or an object with `__dlpack__`, `__cuda_array_interface__`,
        `__array_interface__`, `__array__` or the buffer protocol.

    Raises DTypeError for masked and sparse arrays, and for objects that are not arrays.
    """
    if any(isinstance(part, np.ma.MaskedArray) for part in (x, *(x if isinstance(x, (list, tuple)) else ()))):
        raise DTypeError("a masked array would lose its mask: fill it first, array.filled(value)")
    if hasattr(x, "toarray"):
        raise DTypeError(f"a {type(x).__name__} is sparse: convert it first, array.toarray()")
    if not isinstance(x, np.ndarray) and of(x) is not None:
        return x
    if on_cuda(x) or (not hasattr(x, "__dlpack_device__") and hasattr(x, "__cuda_array_interface__")):
        cuda = device_named("cuda")
        taken = cuda.takes(x) if cuda else None
        if taken is not None:
            return taken
    return _on_host(x)


def _on_host(x: Any) -> np.ndarray:
    """Return an object that exports an array as a NumPy array.  Raises DTypeError."""
    only_dlpack = hasattr(x, "__dlpack__") and not any(hasattr(x, f"__array{name}__") for name in ("", "_interface"))
    try:
        array: np.ndarray = np.from_dlpack(x) if only_dlpack else np.asarray(x)
    except (TypeError, ValueError, RuntimeError, BufferError) as bad:
        if isinstance(x, (np.ndarray, list, tuple)) or hasattr(x, "__array_ufunc__"):
            raise  # with the message of NumPy, or of this package
        raise DTypeError(
            f"NumPy cannot read this {type(x).__name__} as an array: {' '.join(str(bad).split())}"
        ) from bad
    if array.dtype == object and array is not x and not array.ndim:
        raise DTypeError(f"{shown(x)} is not an array, and does not export one (DLPack, __array__, buffer protocol)")
    return array


def on_cuda(x: Any) -> bool:
    """Return whether x is on a CUDA device, according to DLPack."""
    where = getattr(x, "__dlpack_device__", None)
    return where is not None and int(where()[0]) in (2, 13)  # kDLCUDA, kDLCUDAManaged


def empty(shape: Sequence[int], dtype: Any, order: str = "C", device: Device | None = None) -> Array:
    if device is None:
        return np.empty(shape, dtype, order)  # type: ignore[call-overload]
    return device.empty(shape, dtype, order)


def own_memory(device: Device | None) -> Device | BufferCache:
    """Return the allocator for those buffers of a product that other ranks do not read."""
    return workspace.host if device is None else device


def shared_memory(device: Device | None, grid: Any) -> Any:
    """Return the node-shared memory of a device, or of the host."""
    return grid.memory if device is None else device.memory(grid)


def to_host(x: Array) -> np.ndarray:
    """Return the elements in host memory: the array itself, or a copy."""
    device = of(x)
    return x if device is None else device.to_host(x)


def beside(x: Array, y: Array) -> Array:
    """Return x on the device of y: x itself, or a copy of a host array."""
    device = of(y)
    return x if device is None or of(x) is not None else device.to_device(x, "F" if x.flags.f_contiguous else "C")


def shadow(x: Array) -> np.ndarray:
    """Return a NumPy array with the address and the strides of x.  Its elements must not be read."""
    if isinstance(x, np.ndarray):
        return x
    seen = dict(x.__cuda_array_interface__)
    strides = seen.get("strides") or x.strides
    interface = {"version": 3, "shape": x.shape, "strides": strides, "data": (seen["data"][0], True)}
    return np.asarray(SimpleNamespace(__array_interface__=interface | {"typestr": f"|V{x.dtype.itemsize}"}))


def address(x: Array) -> int:
    """Return the address of the first element."""
    if isinstance(x, np.ndarray):
        return int(x.ctypes.data)
    return int(x.__cuda_array_interface__["data"][0])


def writeable(x: Array) -> bool:
    return bool(getattr(x.flags, "writeable", True))
