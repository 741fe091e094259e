"""How a parameter is divided among the ranks of a mesh, and along which line its gradients are added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pdgemm.errors import ArgumentError
from pdgemm.schedules.training.mesh_shape import COPIES, ENDS, EXPERTS, MeshShape, block_of

SUM = "sum"  # along tp: ranks compute addends of the gradient of a parameter, which each has as a whole
Window = tuple[slice, ...]


class Line(NamedTuple):
    """A line of ranks that add the gradients of parameters.

    axis   : of a mesh, without axes of one rank but `ENDS`, so that equal lines are equal.
    copies : on how many lines the same parameters are, with the same gradients; the norm counts them once.
    """

    axis: str
    copies: int


@dataclass(frozen=True)
class Division:
    """Which part of a parameter a rank of a mesh has: its window, a range of each dimension.

    shape : of the whole parameter.
    tp : the dimension that is divided along tp, in blocks of `block_of`; or `SUM`: each rank along tp has the whole
        parameter, and an addend of its gradient; None: each has the whole parameter and the whole gradient.
    ep : the dimension that is divided along ep, that of the experts; ranks along tp have tokens of their own then.
    tied : the first and the last stage along pp have the parameter, and addends of its gradient; one stage has two
        addends where it computes the bits of several, see `Buckets`.

    Raises ArgumentError where a dimension is not one of the shape, or both tp and ep divide one.
    """

    shape: tuple[int, ...]
    tp: int | Literal["sum"] | None = None
    ep: int | None = None
    tied: bool = False

    def __post_init__(self) -> None:
        for axis, divided in (("tp", self.tp if self.tp != SUM else None), ("ep", self.ep)):
            whole = isinstance(divided, int) and not isinstance(divided, bool)
            if divided is not None and not (whole and 0 <= divided < len(self.shape)):  # type: ignore[operator]
                other = f", {SUM!r}" if axis == "tp" else ""
                raise ArgumentError(f"{axis} is a dimension of the shape {self.shape}{other} or None, got {divided!r}")
        if self.ep is not None and isinstance(self.tp, int):
            raise ArgumentError(f"experts are whole along tp: tp is {SUM!r} or None beside ep, got {self.tp}")

    def __str__(self) -> str:
        divided = {"tp": self.tp, "ep": self.ep, "tied": self.tied or None}
        return " ".join([f"shape={self.shape}", *(f"{axis}={x!r}" for axis, x in divided.items() if x is not None)])

    def line(self, mesh: MeshShape, apart: bool = False) -> Line:
        """Return the line along which the gradient is added; of its axes dp is the fastest.

        So a sum along a binary tree of the line begins along dp, as that of microbatches does.
        apart : on one pipeline stage, too, tied parameters have a line of their own, of the same ranks.
        """
        added = self.ep is not None or self.tp == SUM
        names = [(ENDS, self.tied and (apart or mesh.pp > 1)), ("tp", added and mesh.tp > 1), ("cp", mesh.cp > 1)]
        last = COPIES if self.ep is not None and mesh.ep > 1 else "dp"
        copies = mesh.tp if self.tp is None and not added else 1
        return Line("+".join([*(name for name, divides in names if divides), last]), copies)

    def window(self, mesh: MeshShape, rank: int) -> Window:
        """Return the range of each dimension that a rank has; it may be empty."""
        ranges = [slice(0, n) for n in self.shape]
        for axis, divided in (("tp", self.tp), (EXPERTS, self.ep)):
            if isinstance(divided, int):
                at = mesh.index(axis, rank)
                ranges[divided] = block_of(self.shape[divided], mesh.length(axis), at)
        return tuple(ranges)

    def owners(self, mesh: MeshShape, stages: Sequence[int]) -> dict[int, Window]:
        """Return the windows that make up the parameter, each by the lowest rank that has it; none is empty.

        stages : the indices along pp of the ranks that have the parameter.
        """
        ranks, owners = mesh.size // mesh.pp, dict[int, Window]()
        for rank in range(stages[0] * ranks, (stages[0] + 1) * ranks):
            window = self.window(mesh, rank)
            if window not in owners.values() and all(extents(window)):
                owners[rank] = window
        return owners

    def everywhere(self, mesh: MeshShape, stages: Sequence[int]) -> bool:
        """Does each rank of the mesh have the whole parameter?"""
        divided = (isinstance(self.tp, int) and mesh.tp > 1) or (self.ep is not None and mesh.ep > 1)
        return len(stages) == mesh.pp and not divided


def extents(window: Window) -> tuple[int, ...]:
    """Return the shape of a window."""
    return tuple(x.stop - x.start for x in window)
