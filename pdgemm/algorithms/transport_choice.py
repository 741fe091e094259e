"""The choice of the mover: which movers can read or send panels of given matrices between the ranks of their grid."""

from __future__ import annotations

from pdgemm.errors import ArgumentError
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.device import REMEDY, Device, Reach
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.schedules.mover_registry import AUTO, BY_MPI, MOVERS, NCCL, POLICIES, RING, SHARED, STAGED, mover_choices

_ON_HOST, _BY_MESSAGES = Reach(SHARED.name, staged=False), Reach("", staged=False)


def mover_and_access(mover: object, shared: bool, A: DistMatrix, *others: DistMatrix) -> tuple[str, Reach]:
    """Return the mover to plan with, and the access that this mover has to the panels of other ranks.

    shared : ranks may read each other's panels in place.
    """
    if not isinstance(mover, str) or (mover not in MOVERS and mover not in POLICIES):
        raise ArgumentError(f"mover {mover!r} is not one of {', '.join(mover_choices())}")
    device, alone, entry = devices.of(A.stored), A.grid.size == 1, MOVERS.get(mover)
    sends = entry is not None and entry.by == "messages"
    if device is None:
        reach = _ON_HOST if shared and not alone and A.grid.shares_memory else _BY_MESSAGES
        if entry and not entry.on_host:
            raise ArgumentError(f"mover {mover!r} is for matrices on a device, these are on the host")
    else:
        reach = device.reach(A.grid)
        managed = not all(x.mpi_addressable for x in (A, *others))
        reach = reach._replace(staged=reach.staged or managed, nccl=reach.nccl and not managed)
        if not shared or A.grid.ranks_per_node is not None:
            reach = reach._replace(reads="")
    if alone:
        return mover if sends else AUTO, reach._replace(reads="") if reach.reads else reach
    if entry and entry.reads:
        if not reach.reads:
            raise ArgumentError(f"mover {mover!r} requires ranks that share memory with others of their node")
        return mover, reach._replace(reads=mover)
    if entry is NCCL and not reach.nccl:
        raise ArgumentError(f"mover {mover!r} requires cupy.cuda.nccl and one GPU per rank: choose another mover")
    if device and (mover == BY_MPI or sends) and reach.staged:
        raise ArgumentError(
            f"mover {mover!r} passes pointers to device memory to MPI, but {_untaken(device, A.grid)}: "
            f"use mover={STAGED.name!r}"
        )
    if mover == AUTO:
        return (NCCL.name if reach.nccl and not reach.reads else AUTO), reach
    by_message = {BY_MPI: (AUTO, False), STAGED.name: (RING.name, True)}
    mover, staged = by_message.get(mover, (mover, reach.staged))
    return mover, reach._replace(reads="", staged=staged)


def _untaken(device: Device, grid: ProcessGrid) -> str:
    """Return why MPI cannot access the memory of the matrices."""
    reach = device.reach(grid)
    if not reach.staged:
        return "a matrix is in managed memory, or was allocated by cudaMallocAsync"
    return f"this MPI library is not GPU-aware ({reach.why}; {REMEDY})"


def outside_node_memory(A: DistMatrix, B: DistMatrix) -> tuple[str, ...]:
    """Return the names of the operands that are not in node-shared memory."""
    device = devices.of(A.stored)
    window = devices.shared_memory(device, A.grid).window
    return tuple(
        name
        for name, x in (("A", A), ("B", B))
        if not (x.shared and devices.shared_memory(device, x.grid).window is window)
    )


def nodes(grid: ProcessGrid) -> tuple[int, ...]:
    """Return the node of each rank; () if all ranks are on one node."""
    return () if grid.ranks_per_node is None else grid.nodes
