"""The input of the planner: the layouts of A, B and C, and the arguments of the product."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.grids.layout import Layout
from pdgemm.planning.ending import Ending
from pdgemm.planning.machines.machine import Machine
from pdgemm.schedules.mover_registry import AUTO, NCCL, RING, SHARED, by_messages, reads
from pdgemm.schedules.products import reduction
from pdgemm.schedules.products.scales import Scales
from pdgemm.schedules.staircase import TriangleName

REDUCED_BYTES = 1 << 26  # bytes of C that are reduced at a time, but at least REDUCED_ROWS rows, for the speed of BLAS
REDUCED_ROWS = 128
REDUCED_WINDOWS = 16  # windows of rows, if sums are sent: each but the last is sent while the next one is multiplied


class AlgorithmRequest(NamedTuple):
    """The requested algorithm (or "auto", or a policy), grid Pr x Pc and number of layers; None: any."""

    algorithm: str
    shape: tuple[int, int] | None
    layers: int | None

    @property
    def T(self) -> AlgorithmRequest:
        """The request for C^T = B^T A^T."""
        return self._replace(shape=self.shape and self.shape[::-1])

    def on(self, ranks: int) -> list[AlgorithmRequest]:
        """Return the request for each grid of its policy that also has the requested shape and number of layers.

        A request without a policy is returned unchanged.
        """
        row, column, layers = ((ranks, 1), 1), ((1, ranks), 1), ((1, 1), ranks)
        implied = {
            "row": (row,), "column": (column,), "allgather": (row, column), "reduce_scatter": (layers, row, column),
        }.get(self.algorithm)  # fmt: skip
        return [
            self._replace(shape=shape, layers=c)
            for shape, c in implied or [(self.shape, self.layers)]
            if self.shape in (None, shape) and self.layers in (None, c)
        ]


@dataclass(frozen=True)
class Problem:
    """The layouts of A, B and C, and the arguments of the product.

    size      : number of ranks of the communicator; the layouts use the rank numbers of this communicator.
    beta_is_zero : beta is 0, and C is not read.
    mover     : one of MOVERS, or "auto".
    movers    : the movers from which the model chooses if `mover` is "auto" and panels are sent as messages.
    algorithm : one of `algorithm_choices()`.   shape, layers : the requested grid; None: any.
    """

    A: Layout
    B: Layout
    C: Layout
    size: int
    beta_is_zero: bool
    accumulate: np.dtype
    width: int
    lookahead: int
    mover: str
    algorithm: str = "auto"
    shape: tuple[int, int] | None = None
    layers: int | None = None
    memory_limit: int | None = None
    width_asked: bool = True  # did the caller set `width`?
    shared: bool = False  # may ranks of a node read each other's panels?
    reads: str = SHARED.name  # the mover by which ranks of a node read panels
    device: str = ""  # the device that holds the matrices; "": the host
    compute: str = ""  # the type to which operands may be rounded, as in `Product`
    staged: bool = False  # must messages of the device be staged in host memory?
    nodes: tuple[int, ...] = ()  # the node of each rank; (): all ranks are on one node
    outside_node_memory: tuple[str, ...] = ()  # the operands among A and B that are not in node-shared memory
    ideal: bool = False  # each algorithm gets A, B and C on layouts that fit it, and nothing is redistributed
    triangle: TriangleName = ""  # the triangle of C that is computed, as in `Product`
    ending: Ending | None = None  # the epilogue; C is then the matrix of the sums, in the type of accumulation
    scales: tuple[Scales | None, Scales | None] = (None, None)  # the scales of A, and of B
    protect: str = ""  # "detect" or "repair": C is compared with checksums
    machine: Machine = field(default_factory=Machine, repr=False)
    movers: tuple[str, ...] = field(default_factory=by_messages)

    @property
    def layouts(self) -> tuple[Layout, Layout, Layout]:
        return self.A, self.B, self.C

    @property
    def mnk(self) -> tuple[int, int, int]:
        return *self.C.distribution.shape, self.A.distribution.cols.n

    @property
    def request(self) -> AlgorithmRequest:
        """The request; on one rank "auto" is "summa", because nothing is sent."""
        alone = self.size == 1 and self.algorithm == "auto"
        return AlgorithmRequest("summa" if alone else self.algorithm, self.shape, self.layers)

    @property
    def T(self) -> Problem:
        """The problem C^T = B^T A^T."""
        other: dict[TriangleName, TriangleName] = {"": "", "L": "U", "U": "L"}
        triangle = other[self.triangle]
        a, b = (x and x.T for x in self.scales)
        there: Any = {"shape": self.request.T.shape, "triangle": triangle, "scales": (b, a)}
        return replace(self, A=self.B.T, B=self.A.T, C=self.C.T, **there)

    @property
    def grids(self) -> list[Layout]:
        """One layout on each of the different grids of C, A and B."""
        by_grid: dict[object, Layout] = {}
        for x in (self.C, self.A, self.B):
            by_grid.setdefault(x.grid, x)
        return list(by_grid.values())

    @property
    def rank_map(self) -> tuple[int, ...]:
        """All ranks of the communicator, the ranks of C's grid first."""
        rest = set(range(self.size)) - set(self.C.rank_map) if len(self.C.rank_map) < self.size else ()
        return (*self.C.rank_map, *sorted(rest))

    @property
    def broadcast(self) -> str:
        """The mover of the panels before the plan is tuned."""
        if self.mover == AUTO:
            return self.reads if self.shared else self.broadcasts[0]
        return self.mover

    @property
    def broadcasts(self) -> tuple[str, ...]:
        """The movers that send messages; only the ring if messages are staged in host memory."""
        return (RING.name,) if self.staged else self.movers

    @property
    def relay_nodes(self) -> tuple[int, ...]:
        """The node of each rank if panels are read in place on a node and relayed between nodes, else ()."""
        return self.nodes if reads(self.broadcast) else ()

    @property
    def broadcast_by_message(self) -> str:
        """The mover for algorithms that can read panels in place only if all ranks are on one node."""
        return self.broadcasts[0] if reads(self.broadcast) and self.nodes else self.broadcast

    @property
    def shift(self) -> str:
        """The mover of Cannon's blocks: on devices of one node, ranks copy them from their neighbours."""
        return self.broadcast if self.device and reads(self.broadcast) and not self.nodes else "shift"

    @property
    def nccl(self) -> bool:
        """Does NCCL send all messages?"""
        return self.mover == NCCL.name

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `Product` that describe its device, its messages, its arithmetic and its triangle of C."""
        there = {"device": self.device, "staged": self.staged, "nccl": self.nccl, "compute": self.compute}
        return there | {"triangle": self.triangle}

    def reduced_rows(
        self, rows: int, cols: int, mover: str, owners: BlockCyclic | None = None, in_turn: bool = False
    ) -> int:
        """Return the number of rows of a block of C that are reduced at a time.

        If partial sums are sent, the number is small, so that most of the transfer overlaps with products.
        mover  : the mover by which partial sums are read in place; for any other name, they are sent as messages.
        owners : the distribution of these rows in C; if its blocks are large, a window has enough rows of each owner.
        in_turn : the rows of each owner are sent before the next owner's are formed; so windows may be twice as high.
        """
        at_once, least = REDUCED_BYTES // (max(1, cols) * self.accumulate.itemsize), REDUCED_ROWS
        if not reads(mover):
            at_once = min(at_once, -(-rows // REDUCED_WINDOWS))
            if owners and owners.block * owners.parts > max(at_once, least):
                least = max(least, (1 + in_turn) * reduction.LEAST_ROWS * owners.parts)
        return max(1, min(rows, max(least, at_once)))


Laid = tuple[BlockCyclic, BlockCyclic, tuple[int, ...]]  # distributions of rows and columns, and the rank map


def lay_out(problem: Problem, A: Laid, B: Laid, C: Laid) -> tuple[Layout, Layout, Layout, np.dtype, int]:
    """Return the layouts of a product, its accumulation type and its panel width."""
    (*of_a, at_a), (*of_b, at_b), (*of_c, at_c) = A, B, C
    return (
        brought(problem.A, Distribution(*of_a), at_a),
        brought(problem.B, Distribution(*of_b), at_b),
        brought(problem.C, Distribution(*of_c), at_c, problem.accumulate),
        problem.accumulate,
        problem.width,
    )


def brought(x: Layout, distribution: Distribution, rank_map: tuple[int, ...], dtype: np.dtype | None = None) -> Layout:
    """Return the layout of x on this distribution.

    If elements change their owners, it is the layout of a copy of x, of type `dtype`.
    """
    there = replace(x, distribution=distribution, rank_map=rank_map)
    return there if x.same_owners(there) else replace(there, dtype=dtype or x.dtype)


def nothing_to_multiply(A: Layout, B: Layout, C: Layout) -> tuple[Layout, Layout]:
    """Return layouts of operands with k = 0 that match the layout of C."""
    (pr, pc), c = C.distribution.grid_shape, C.distribution
    return (
        replace(C, distribution=Distribution(c.rows, BlockCyclic.even(0, pc)), dtype=A.dtype),
        replace(C, distribution=Distribution(BlockCyclic.even(0, pr), c.cols), dtype=B.dtype),
    )
