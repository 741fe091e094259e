"""How panels can travel between these ranks, for these matrices."""

from __future__ import annotations

from pdgemm.arrays import device as devices
from pdgemm.arrays.device import REMEDY, Device, Reach
from pdgemm.errors import ArgumentError
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.movers import ASKED, BY_MPI, ON_DEVICES, SHARED
from pdgemm.schedules.product import READ

_ON_HOST, _BY_MESSAGES = Reach(SHARED, staged=False), Reach("", staged=False)


def reached(mover: object, shared: bool, A: DistMatrix, *others: DistMatrix) -> tuple[str, Reach]:
    """The mover that a plan is asked for, and how ranks reach each other's panels by it.

    shared : may they read them?
    """
    if not isinstance(mover, str) or mover not in ASKED:
        raise ArgumentError(f"mover {mover!r} is not one of {', '.join(ASKED)}")
    device, alone = devices.of(A.stored), A.grid.size == 1
    if device is None:
        reach = _ON_HOST if shared and not alone and A.grid.shares_memory else _BY_MESSAGES
        if mover in ON_DEVICES:
            raise ArgumentError(f"mover {mover!r} is for matrices on a device, these are on the host")
    else:
        reach = device.reach(A.grid)
        managed = not all(x.mpi_addressable for x in (A, *others))
        reach = reach._replace(staged=reach.staged or managed, nccl=reach.nccl and not managed)
        if not shared or A.grid.ranks_per_node is not None:
            reach = reach._replace(reads="")
    if alone:
        return mover if mover in BY_MPI else "auto", reach._replace(reads="") if reach.reads else reach
    if mover in READ:
        if not reach.reads:
            raise ArgumentError(f"mover {mover!r} is for ranks that share memory with others of their node")
        return mover, reach._replace(reads=mover)
    if mover == "nccl" and not reach.nccl:
        raise ArgumentError("mover 'nccl' needs cupy.cuda.nccl and a GPU for each rank; the others do without")
    if device and mover in ("mpi", *BY_MPI) and reach.staged:
        raise ArgumentError(
            f"mover {mover!r} hands pointers to device memory to MPI, but {_untaken(device, A.grid)}: mover='staged'"
        )
    if mover == "auto":
        return ("nccl" if reach.nccl and not reach.reads else "auto"), reach
    by_message = {"mpi": ("auto", False), "staged": ("ring", True)}
    mover, staged = by_message.get(mover, (mover, reach.staged))
    return mover, reach._replace(reads="", staged=staged)


def _untaken(device: Device, grid: ProcessGrid) -> str:
    """Why MPI cannot be given them."""
    reach = device.reach(grid)
    if not reach.staged:
        return "a matrix lies in managed memory, or in that of cudaMallocAsync"
    return f"this one does not take them ({reach.why}; {REMEDY})"


def private(A: DistMatrix, B: DistMatrix) -> str:
    """Which of them do not lie where the ranks of the node can read them."""
    device = devices.of(A.stored)
    window = devices.memory(device, A.grid).window
    return "".join(
        name for name, x in (("A", A), ("B", B)) if not (x.shared and devices.memory(device, x.grid).window is window)
    )


def nodes(grid: ProcessGrid) -> tuple[int, ...]:
    """The node of each rank; () where all are on one."""
    return () if grid.ranks_per_node is None else grid.nodes
