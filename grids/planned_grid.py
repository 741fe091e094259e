"""Process grids on which programs are planned: matrices have no elements, and no message is sent."""

from __future__ import annotations

from typing import Any, TypeVar

from pdgemm.errors import ArgumentError
from pdgemm.grids.process_grid import ProcessGrid

Value = TypeVar("Value")


class Draft:
    """The stages of a program that is being planned: each function that would communicate adds a stage instead.

    machine    : the machine for which products are planned; None: the machine on which the ranks run.
    iterations : the number of iterations to plan if it depends on elements; None: the number that most matrices need.
    """

    def __init__(self, machine: Any = None, iterations: int | None = None) -> None:
        self.machine, self.iterations = machine, iterations
        self.stages: list[tuple[str, Any]] = []

    def add(self, name: str, stage: Any) -> None:
        """Add a stage.   name : the name of the matrix that the stage moves or computes."""
        self.stages.append((name, stage))


class Echo:
    """A substitute for a communicator: this rank is rank 0, and receives its own value from each rank."""

    rank, handle = 0, 0

    def __init__(self, size: int) -> None:
        self.size = size

    def bcast(self, value: Value, root: int = 0) -> Value:
        return value

    def allreduce(self, value: Value, op: object = None) -> Value:
        """Return the value: all values are equal, and so are their maximum, minimum and conjunction."""
        return value

    def allgather(self, value: Value) -> list[Value]:
        return [value] * self.size

    def __getattr__(self, name: str) -> Any:
        raise ArgumentError(f"a function that calls `{name}` of a communicator, or reads elements, cannot be planned")

    def Allreduce(self, sent: object, received: object, op: object = None) -> None:
        """Leave the buffer as it is: callers reduce in place (MPI.IN_PLACE)."""


class PlannedGrid(ProcessGrid):
    """A grid as an idle rank sees it: the rank owns no elements, so the code of a function runs without elements.

    A function that would communicate adds a stage to `draft` instead, and its result has no elements either.  For a
    number that would be computed from elements, the function declares a value by `expected`.  Local: nothing is sent.
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
        """Do nothing: the communicators belong to the grid for which the program is planned."""
