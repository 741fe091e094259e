"""Grids on which programs are planned: their matrices have no elements, and nothing is sent."""

from __future__ import annotations

from typing import Any, TypeVar

from pdgemm.errors import ArgumentError
from pdgemm.grids.process_grid import ProcessGrid

Value = TypeVar("Value")


class Draft:
    """The stages of a program that is planned: each function that would communicate adds what it would do.

    machine    : by which products are planned; None: that of the ranks at hand.
    iterations : how many are planned where the elements decide; None: as many as most matrices take.
    """

    def __init__(self, machine: Any = None, iterations: int | None = None) -> None:
        self.machine, self.iterations = machine, iterations
        self.stages: list[tuple[str, Any]] = []

    def add(self, name: str, stage: Any) -> None:
        """Add a stage.   name : of the matrix that it moves or computes."""
        self.stages.append((name, stage))


class Echo:
    """Stands for a communicator all of whose ranks do the same: this one is its rank 0, and hears itself."""

    rank, handle = 0, 0

    def __init__(self, size: int) -> None:
        self.size = size

    def bcast(self, value: Value, root: int = 0) -> Value:
        return value

    def allreduce(self, value: Value, op: object = None) -> Value:
        """Return the value: the largest, the least or the conjunction of equal ones."""
        return value

    def allgather(self, value: Value) -> list[Value]:
        return [value] * self.size

    def __getattr__(self, name: str) -> Any:
        raise ArgumentError(f"a function that calls `{name}` of a communicator, or reads elements, cannot be planned")

    def Allreduce(self, sent: object, received: object, op: object = None) -> None:
        """Leave the buffer as it is, which is sent and received in place."""


class PlannedGrid(ProcessGrid):
    """A grid as an idle rank sees it, which owns no elements, so that the code of a function runs without any.

    What communicates adds a stage to `draft` instead, and returns a result without elements, too; numbers that would
    be computed from elements are those that the function declares by `expected`.  Local: the ranks need not meet.
    """

    def __init__(self, grid: ProcessGrid, draft: Draft) -> None:
        self.__dict__.update(grid.__dict__)
        self.__dict__.pop("T", None)
        self.draft, self.comm, self.rank = draft, Echo(grid.size), 0  # type: ignore[assignment]
        self.layer, self.coords = -1, (-1, -1)

    def expected(self, value: Value, planned: Value) -> Value:
        return planned

    def iterations(self, most: int, usual: int) -> int:
        assert self.draft is not None
        return min(most, self.draft.iterations or usual)

    def work_grid(self, shape: tuple[int, int], layers: int, rank_map: tuple[int, ...]) -> ProcessGrid:
        if (self.shape, self.layers, self.rank_map) == (shape, layers, rank_map):
            return self
        return self.base._reshaped(shape, layers, rank_map)

    def free(self) -> None:
        """Do nothing: the grid that is planned for keeps its communicators."""
