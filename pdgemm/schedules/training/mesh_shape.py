"""The mesh of ranks that train a model: which ranks share which part of the work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from pdgemm.errors import MeshError
from pdgemm.schedules.schedule import RankMap
from pdgemm.support.members import remembered

AXES = ("pp", "dp", "cp", "tp")  # from the slowest to the fastest: tp stays on a node, pp crosses nodes first
EXPERTS, COPIES = "ep", "edp"  # the dp axis in two: neighbours hold different experts, and copies of experts lie apart
ENDS = "ends"  # the first and the last stage along pp; a rank of another stage is alone in its line along this axis
MEANINGS = {
    "pp": "layers (pipeline)",
    "dp": "samples (data)",
    "cp": "positions (context)",
    "tp": "columns of layers (tensor)",
    "ep": "experts",
    "edp": "copies of experts",
}


@dataclass(frozen=True)
class MeshShape:
    """pp x dp x cp x tp ranks; the rank is ((pp index * dp + dp index) * cp + cp index) * tp + tp index.

    dp : groups of ranks that work on different samples.   cp : ranks that work on different positions of a sample.
    tp : ranks that share the layers.   pp : groups that have different layers.
    ep : ranks, neighbours along dp, that have different experts; ep divides dp, and dp/ep ranks have copies of one.
    nodes : a number for the node of each rank; empty where all ranks are on one node.

    Methods take an axis: one of `AXES`, `EXPERTS` and `COPIES`, which divide dp, `ENDS`, or several joined by "+", as
    "dp+cp": the ranks of a line along them differ in their indices along these axes alone, and the last one varies
    fastest.

    ::

        MeshShape(dp=2, tp=2, pp=2)      pp 0   dp 0    0  1
                                                dp 1    2  3
                                         pp 1   dp 0    4  5
                                                dp 1    6  7

    Raises MeshError where a size is less than 1, ep does not divide dp, or there are not as many nodes as ranks.
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    nodes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = {axis: getattr(self, axis) for axis in (*AXES, EXPERTS)}
        if min(sizes.values()) < 1:
            raise MeshError(f"the sizes of a mesh are 1 or more, got {sizes}")
        if self.dp % self.ep:
            raise MeshError(f"experts are divided over neighbours along dp: ep {self.ep} does not divide dp {self.dp}")
        if self.nodes and len(self.nodes) != self.size:
            raise MeshError(f"{self.sizes} is a mesh of {self.size} ranks, and nodes of {len(self.nodes)} were passed")

    @property
    def size(self) -> int:
        return prod(getattr(self, axis) for axis in AXES)

    @property
    def sizes(self) -> str:
        """The sizes that are not 1, as text."""
        return " x ".join(f"{axis} {n}" for axis in AXES if (n := getattr(self, axis)) > 1) or "1 rank"

    @cached_property
    def ranks(self) -> RankMap:
        """The mesh as a process grid with an axis for each of `AXES`, dp in two: `COPIES` and `EXPERTS`."""
        lengths = {"pp": self.pp, COPIES: self.dp // self.ep, EXPERTS: self.ep, "cp": self.cp, "tp": self.tp}
        return RankMap(tuple(lengths.items()), tuple(range(self.size)))

    @remembered
    def axes(self, axis: str) -> tuple[str, ...]:
        """Return the axes of more than one rank that an axis joins, the fastest last, dp as `COPIES` and `EXPERTS`.

        Lines along axes for which this is equal are the same ones.   Raises MeshError where it is no axis.
        """
        joined = [x for name in axis.split("+") for x in ((COPIES, EXPERTS) if name == "dp" else (name,))]
        if not {*joined} <= {*MEANINGS, ENDS} or len({*joined}) < len(joined) or {"pp", ENDS} <= {*joined}:
            known = f"{', '.join(MEANINGS)}, {ENDS}"
            raise MeshError(f"the axes of a mesh are {known}, and different ones joined as dp+cp; got {axis!r}")
        joined = ["pp" if x == ENDS and self.pp <= 2 else x for x in joined]
        return tuple(x for x in joined if x == ENDS or self.ranks.lengths[x] > 1)

    def _along(self, axis: str, rank: int) -> range:
        """Return the line of a rank along one of `axes`."""
        if axis == ENDS:
            stage = self.dp * self.cp * self.tp
            last = (self.pp - 1) * stage
            return range(rank % stage, self.size, last) if rank < stage or rank >= last else range(rank, rank + 1)
        stride, length = self.ranks.strides[axis], self.ranks.lengths[axis]
        first = rank - rank // stride % length * stride
        return range(first, first + stride * length, stride)

    def length(self, axis: str, rank: int = 0) -> int:
        """Return the number of ranks of a rank's line along an axis; only those along `ENDS` have two lengths."""
        return prod(len(self._along(one, rank)) for one in self.axes(axis))

    def index(self, axis: str, rank: int) -> int:
        """Return the index of a rank in its line along an axis."""
        at = 0
        for one in self.axes(axis):
            along = self._along(one, rank)
            at = at * len(along) + along.index(rank)
        return at

    def line(self, axis: str, rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only in their index along an axis, in the order of this index."""
        ranks: tuple[int, ...] = (rank,)
        for one in self.axes(axis):
            ranks = tuple(x for first in ranks for x in self._along(one, first))
        return ranks

    def lines(self, axis: str) -> Iterator[tuple[int, ...]]:
        """Yield all lines along an axis."""
        return (self.line(axis, rank) for rank in range(self.size) if not self.index(axis, rank))

    def crosses(self, axis: str) -> bool:
        """Does a line along this axis have ranks on several nodes?"""
        return bool(self.nodes) and any(len({self.nodes[x] for x in line}) > 1 for line in self.lines(axis))

    def __str__(self) -> str:
        """Draw the mesh: a line of text for each pair of pp and dp indices, with "|" between nodes."""
        rows = []
        for first in range(0, self.size, self.cp * self.tp):
            text = f"pp {self.index('pp', first):<3} dp {self.index('dp', first):<4}"
            for rank in range(first, first + self.cp * self.tp):
                new = bool(self.nodes) and rank > 0 and self.nodes[rank] != self.nodes[rank - 1]
                text += f"{'|' if new else ' '}{rank:>{len(str(self.size - 1))}}"
            rows.append(text)
        links = [
            f"{axis} {self.length(axis)}: {MEANINGS[axis]}, {'between nodes' if self.crosses(axis) else 'on a node'}"
            for axis in MEANINGS
            if self.length(axis) > 1 and (axis not in (EXPERTS, COPIES) or self.ep > 1)
        ]
        return "\n".join([*rows, *links])


def block_of(n: int, parts: int, index: int) -> slice:
    """Return part `index` of n things that are cut into blocks of ceil(n/parts); the last ones may be short or empty.

    The blocks of a `DistMatrix`, and what a rank has of rows, columns, heads, positions and experts.
    """
    block = -(-n // parts)
    return slice(min(n, index * block), min(n, (index + 1) * block))
