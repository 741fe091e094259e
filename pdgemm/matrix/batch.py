"""Batch: many independent matrices, distributed over the ranks item by item, each whole on one rank.

Items of one shape are stored as one stack, items of different shapes as a list; `balance` distributes by flops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import numpy as np
from mpi4py import MPI

from pdgemm.errors import ArgumentError, DeviceError, DTypeError, LayoutError
from pdgemm.grids.distribution import BlockCyclic
from pdgemm.instrument.run_report import RunReport
from pdgemm.local.arrays import device as devices, dtypes
from pdgemm.local.arrays.arguments import as_whole
from pdgemm.local.arrays.device import Device
from pdgemm.local.arrays.dtypes import element_type
from pdgemm.local.arrays.element_functions import slabs
from pdgemm.local.arrays.elementwise import CONVERT
from pdgemm.local.blas.local_gemm import leading
from pdgemm.matrix.gather import PIECE_BYTES
from pdgemm.support.agreement import described_elements, together
from pdgemm.support.text import counted, in_bytes
from pdgemm.support.watchdog import watched

Items = Any  # an array (items, rows, columns), or a list of matrices


class Batch:
    """Independent matrices of one dtype, each whole on one rank of `comm`.

    owner  : (items), the owner of each item; shapes : (items, 2), rows and columns.  Read-only, the same on all ranks.
    items  : this rank's matrices by ascending number: an array (items, rows, columns) where all matrices of all
             ranks have one shape, else a list.  Changing their elements changes the batch.
    device : the `pdgemm.local.arrays.device.Device` of the matrices; None: they are on the host.
    report : the RunReport of the product or the exchange that made this batch, or None.

    Make a batch by `from_local` or `from_global`.
    """

    def __init__(
        self,
        items: Items,
        shapes: np.ndarray,
        owner: np.ndarray,
        dtype: np.dtype,
        comm: MPI.Comm,
        device: Device | None = None,
    ) -> None:
        """Make a batch of this rank's items without checking them.  Local; `from_local` checks."""
        self.device = device
        shapes.flags.writeable = owner.flags.writeable = False
        self.items, self.shapes, self.owner, self.dtype, self.comm = items, shapes, owner, dtype, comm
        self.report: RunReport = None  # type: ignore[assignment]  # so that the report of a product needs no cast

    @classmethod
    def from_local(cls, items: np.ndarray | Sequence[np.ndarray], comm: MPI.Comm) -> Batch:
        """Make a batch of the ranks' local matrices, numbered in the order of the ranks.  Collective over `comm`.

        items : (items, rows, columns), or a sequence of matrices, rows or columns contiguous, the same dtype on all
                ranks.  Only a sequence of matrices that are all of one shape is copied.  All arrays of all ranks are
                on the host, or all on one device, as in `DistMatrix.from_local`.
        """
        with together(watched(comm)) as arguments:
            arguments.append("Batch.from_local")
            matrices, shapes, dtype = _parsed(items)
            names = set[str]()
            for x in matrices if isinstance(matrices, list) else [matrices]:
                names.add(devices.name_of(x))
                if device := devices.of(x):
                    device.check(x)
            try:
                for x in matrices if isinstance(matrices, list) else matrices[:1]:
                    leading(x)
            except ValueError as bad:
                raise LayoutError(f"{bad}; pass numpy.ascontiguousarray") from None
        parts = comm.allgather((shapes, dtype, names))
        with together(comm):
            shapes, dtype = np.concatenate([x[0] for x in parts]), _one_dtype({x[1] for x in parts if x[1] is not None})
            device = _one_device(set().union(*(x[2] for x in parts)))
            owner = np.repeat(np.arange(comm.size), [len(x) for x, *_ in parts])
            return cls(_arranged(matrices, shapes, dtype, device), shapes, owner, dtype, comm, device)

    @classmethod
    def from_global(
        cls,
        items: np.ndarray | Sequence[np.ndarray],
        comm: MPI.Comm,
        owner: Sequence[int] | np.ndarray | None = None,
        *,
        check: bool = True,
    ) -> Batch:
        """Make a batch of matrices that are the same on every rank; each rank copies its own.  Collective over `comm`.

        owner : (items), the rank of each item, such as `balance` returns; by default contiguous blocks of equal size.
        check : compare a checksum of all items, each read once, among the ranks, as in `DistMatrix.from_global`.
        """
        with together(watched(comm)) as arguments:
            matrices, shapes, dtype = _parsed(items)
            if any(devices.of(x) for x in (matrices if isinstance(matrices, list) else [matrices])):
                raise DeviceError("from_global takes arrays on the host: use Batch.from_local for arrays on a device")
            numbers, dtype = np.arange(len(shapes)), _one_dtype({dtype} - {None})
            owners = BlockCyclic.even(len(shapes), comm.size).owner(numbers) if owner is None else np.array(owner)
            if owners.shape != numbers.shape or not np.isin(owners, range(comm.size)).all():
                what = f"a list of ranks below {comm.size}, one for each of {len(shapes)} items"
                raise LayoutError(f"owner must be {what}; got {owner}")
            owners = owners.astype(np.intp)
            arguments.append(f"Batch.from_global of {len(shapes)} items of {dtype}")
            arguments.append(f"checksum {crc32(shapes.tobytes() + owners.tobytes())}")
            if check and comm.size > 1:
                arguments.append(described_elements(*matrices))
            own = np.flatnonzero(owners == comm.rank)
            taken = matrices[own] if isinstance(matrices, np.ndarray) else [matrices[number].copy() for number in own]
            return cls(_arranged(taken, shapes, dtype), shapes, owners, dtype, comm)

    def __len__(self) -> int:
        """Return the number of items of all ranks."""
        return len(self.owner)

    def __repr__(self) -> str:
        least, most = (f(self.shapes, axis=0) if len(self) else (0, 0) for f in (np.min, np.max))
        low, high = (f"{rows} x {cols}" for rows, cols in (least, most))
        own = sum(x.nbytes for x in arrays(self))
        return (
            f"Batch({counted(len(self), 'item')} of {low}{'' if low == high else f' to {high}'}, {self.dtype}"
            f"{f' on {self.device.name}' if self.device else ''}; rank {self.comm.rank} of {self.comm.size} holds "
            f"{np.count_nonzero(self.owner == self.comm.rank)}, {in_bytes(own)})"
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        raise TypeError("a Batch is not one array: use .items or .to_global(root)")

    def __deepcopy__(self, memo: Any) -> Batch:
        """Copy the items, but not the communicator.  Local."""
        items = [x.copy() for x in self.items] if isinstance(self.items, list) else self.items.copy()
        return Batch(items, self.shapes, self.owner, self.dtype, self.comm, self.device)

    def __reduce__(self) -> Any:
        raise TypeError("a Batch is distributed over ranks and cannot be pickled: use .items or .to_global(root)")

    def to_global(self, root: int = 0) -> Items:
        """Return all items in order on `root`, None on the other ranks.  Collective.

        Root needs memory for all items and for the items of one more rank; messages have at most 256 MiB.
        """
        rank, size = self.comm.rank, self.comm.size
        with together(self.comm) as arguments:
            if as_whole(root, "root") not in range(size):
                raise ArgumentError(f"root {root} is not one of {size} ranks")
            arguments += [
                f"Batch.to_global, root={root}",
                self.dtype,
                crc32(self.shapes.tobytes() + self.owner.tobytes()),
            ]
            counts = np.bincount(self.owner, minlength=size)
            numbers = np.split(np.argsort(self.owner, kind="stable"), np.cumsum(counts))[:size]
            cuts = [np.cumsum([0, *self.shapes[part].prod(axis=1)]) for part in numbers]
            own = np.concatenate([np.empty(0, self.dtype), *(np.ravel(devices.to_host(x)) for x in arrays(self))])
            whole: Items = empty_items(self.shapes, self.shapes, self.dtype) if rank == root else None
            buffer = np.empty(max(cut[-1] for cut in cuts), self.dtype) if rank == root else own
        for source, (part, cut) in enumerate(zip(numbers, cuts)):
            words = own if source == rank else buffer[: cut[-1]]
            for piece in slabs(len(words), 1, PIECE_BYTES // words.itemsize):
                if source != root and rank == source:
                    self.comm.Send(dtypes.wire(words[piece]), root)
                elif source != root and rank == root:
                    self.comm.Recv(dtypes.wire(words[piece]), source)
            if isinstance(whole, np.ndarray):
                whole[part] = words.reshape(len(part), *whole.shape[1:])
            elif rank == root:
                for number, start, stop in zip(part, cut, cut[1:]):
                    whole[number][...] = words[start:stop].reshape(self.shapes[number])
        return whole


def arrays(x: Batch) -> list[np.ndarray]:
    """Return a list of the arrays that hold this rank's items: one array for a stack, else one for each item."""
    return x.items if isinstance(x.items, list) else [x.items]


def _parsed(items: Any) -> tuple[Items, np.ndarray, np.dtype | None]:
    """Return the matrices, their shapes and their dtype; the dtype of an empty list is None."""
    if not isinstance(items, (list, tuple)) and hasattr(items, "ndim"):
        items = devices.adopted(items)
        if items.ndim != 3:
            raise LayoutError(f"a stack of matrices must be (items, rows, columns), got shape {items.shape}")
        return items, np.full((len(items), 2), items.shape[1:]), _one_dtype({items.dtype})
    matrices = [devices.adopted(x) for x in items]
    for number, x in enumerate(matrices):
        if x.ndim != 2:
            raise LayoutError(f"item {number} is not a matrix, but has shape {x.shape}")
    shapes = np.array([x.shape for x in matrices], int).reshape(-1, 2)
    return matrices, shapes, _one_dtype({x.dtype for x in matrices}) if matrices else None


def _one_dtype(types: set[Any]) -> np.dtype:
    """Return the only dtype in the set, float64 if it is empty.  Raises DTypeError where there are several."""
    if len(types) > 1:
        raise DTypeError(f"items must have one dtype, got {', '.join(sorted(map(str, types)))}")
    return element_type(types.pop()) if types else np.dtype(float)


def _one_shape(shapes: np.ndarray) -> tuple[int, int] | None:
    """Return the shape of all items, (0, 0) if there are none, and None if the shapes differ."""
    if (shapes[:1] != shapes).any():
        return None
    return (int(shapes[0, 0]), int(shapes[0, 1])) if len(shapes) else (0, 0)


def _one_device(names: set[str]) -> Device | None:
    """Return the only device in the set, None for the host.  Raises DeviceError where there are several."""
    if len(names) > 1:
        raise DeviceError(f"items must all be on the host or all on one device, got {', '.join(sorted(names))}")
    return devices.device_named(names.pop()) if names else None


def _arranged(items: Items, shapes: np.ndarray, dtype: np.dtype, device: Device | None = None) -> Items:
    """Return a rank's items as a stack if all `shapes` of the batch are equal, else as a list."""
    shape = _one_shape(shapes)
    if shape is None:
        return list(items)
    if device is None:
        return np.asarray(items, dtype).reshape(len(items), *shape)
    if not isinstance(items, list):
        return items
    stack = device.empty((len(items), *shape), dtype)
    for number, item in enumerate(items):
        CONVERT(stack[number], item)
    return stack


def empty_items(own: np.ndarray, shapes: np.ndarray, dtype: np.dtype, device: Device | None = None) -> Items:
    """Allocate a rank's items, of the shapes `own`, not initialised: a stack if all `shapes` are equal, else a list."""
    shape = _one_shape(shapes)
    if shape is None:
        return [devices.empty(tuple(map(int, x)), dtype, device=device) for x in own]
    return devices.empty((len(own), *shape), dtype, device=device)
