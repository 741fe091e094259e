"""Process grids: 2D Cartesian and torus communicators, layers and nodes."""

from __future__ import annotations

from functools import cached_property
from operator import index
from types import TracebackType

from mpi4py import MPI

from pdgemm.errors import GridError, check_together
from pdgemm.threads import share_cores


class ProcessGrid:
    """Pr x Pc ranks, periodic in both directions, in one or more layers.  Collective over `comm`.

    ::

        ProcessGrid(comm, shape=(2, 3)) of 6 ranks         with layers=2, 12 ranks

                 j=0   j=1   j=2                             layer 1    6   7   8
               +-----+-----+-----+                          layer 0   9  10  11
          i=0  |  0  |  1  |  2  |  row of i=0:              0   1   2
               +-----+-----+-----+  ranks 0 1 2              3   4   5
          i=1  |  3  |  4  |  5  |                          depth of (0, 0): ranks 0 6
               +-----+-----+-----+
          col of j=1: ranks 1 4

    Periodic: the right neighbour of rank 2 is rank 0, the lower neighbour of rank 3 is rank 0.

    comm   : intracommunicator; the grid duplicates it, so its messages never meet the caller's.
             Default MPI.COMM_WORLD.
    shape  : (Pr, Pc) with Pr * Pc * layers == comm.size; by default as square as that allows,
             Pr <= Pc.
    layers : c, the number of copies of the Pr x Pc plane (2.5D algorithms).

    `row`: same i and layer; `col`: same j and layer; `depth`: same (i, j); `node`: ranks that
    share memory.  rank = (layer * Pr + i) * Pc + j.

    Communicators are a limited resource that only all ranks together can give back: use the grid
    as a context manager or call `free()`; matrices on it cannot be used afterwards.

    Threads: the first grid of a process lowers the number of BLAS threads to the rank's share of
    its node's cores, unless OMP_NUM_THREADS or the like is set (see `pdgemm.threads`).

    Raises GridError on every rank when shape and layers do not fit the number of ranks.
    """

    def __init__(
        self, comm: MPI.Intracomm | None = None, shape: tuple[int, int] | None = None, layers: int = 1
    ) -> None:
        base = MPI.COMM_WORLD if comm is None else comm
        error, dims = None, (1, 1)
        try:
            dims = grid_shape(base.size, shape, layers)
        except Exception as bad:
            error = bad
        check_together(base, error, f"ProcessGrid(shape={shape}, layers={layers})")

        self.layers = layers
        self.shape = dims
        self.comm = base.Create_cart((layers, *dims), periods=(False, True, True), reorder=False)
        self.row = self.comm.Sub((False, False, True))
        self.col = self.comm.Sub((False, True, False))
        self.depth = self.comm.Sub((True, False, False))
        self.node = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.rank, self.size = self.comm.rank, self.comm.size
        self.layer, i, j = self.comm.coords
        self.coords = (i, j)
        share_cores(self.node)

    @cached_property
    def _group(self) -> MPI.Group:
        return self.comm.Get_group()

    def rank_of(self, i: int, j: int, layer: int = 0) -> int:
        """The rank at grid position (i, j), counted around the torus."""
        pr, pc = self.shape
        return (layer * pr + i % pr) * pc + j % pc

    def coords_of(self, rank: int) -> tuple[int, int]:
        """Grid position (i, j) of a rank."""
        return rank // self.shape[1] % self.shape[0], rank % self.shape[1]

    def same_as(self, other: ProcessGrid) -> bool:
        """Same ranks at the same places (not necessarily the same communicator).  Local."""
        return self is other or (
            (self.shape, self.layers) == (other.shape, other.layers)
            and MPI.Group.Compare(self._group, other._group) == MPI.IDENT
        )

    def free(self) -> None:
        """Give the communicators back.  Collective; a second call does nothing."""
        if self.comm == MPI.COMM_NULL:
            return
        if "_group" in self.__dict__:
            self._group.Free()
        for comm in (self.node, self.depth, self.col, self.row, self.comm):
            comm.Free()

    def __enter__(self) -> ProcessGrid:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # an error may be this rank's alone; freeing is collective and would wait for the others
        if kind is None:
            self.free()

    def __str__(self) -> str:
        layers = f" x {self.layers}" if self.layers > 1 else ""
        return f"{self.shape[0]} x {self.shape[1]}{layers}"

    def __repr__(self) -> str:
        if self.comm == MPI.COMM_NULL:
            return f"ProcessGrid({self}, freed)"
        return f"ProcessGrid({self}; rank {self.rank} of {self.size} at {self.coords})"


def grid_shape(size: int, shape: tuple[int, int] | None = None, layers: int = 1) -> tuple[int, int]:
    """(Pr, Pc) for `size` ranks in `layers` layers: the given shape if it fits, else near-square."""
    if layers < 1 or size % layers:
        raise GridError(f"{size} ranks cannot form {layers} layers of equal size")
    plane = size // layers
    if shape is None:
        pr = next(d for d in range(int(plane**0.5), 0, -1) if plane % d == 0)
        return pr, plane // pr
    try:
        pr, pc = map(index, shape)
    except (TypeError, ValueError):
        raise GridError(f"a grid shape is a pair of numbers, got {shape!r}") from None
    if min(pr, pc) < 1:
        raise GridError(f"a grid shape is a pair of positive numbers, got {pr} x {pc}")
    if pr * pc != plane:
        layered = f" in {layers} layers" if layers > 1 else ""
        raise GridError(
            f"a {pr} x {pc} grid{layered} needs {pr * pc * layers} ranks, but there are {size}; "
            f"grids that fit: {', '.join(f'{d}x{plane // d}' for d in range(1, plane + 1) if plane % d == 0)}"
        )
    return pr, pc
