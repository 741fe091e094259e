"""pytest plugin: fixtures of process grids, one over all ranks, or a list of many."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from problems import grid_shapes


@pytest.fixture
def grid(comm: Any) -> Iterator[Any]:
    from pdgemm import ProcessGrid

    with ProcessGrid(comm) as made:
        yield made


@pytest.fixture(scope="module")
def grids(comm: Any) -> Iterator[list[Any]]:
    """Grids of every shape, one with ranks in reverse order, and one that leaves a rank idle."""
    from pdgemm import ProcessGrid

    made = [ProcessGrid(comm, shape) for shape in grid_shapes(comm.size)]
    made.append(ProcessGrid(comm, ranks=range(comm.size - 1, -1, -1)))
    if comm.size > 1:
        made.append(ProcessGrid(comm, ranks=range(1, comm.size)))
    yield made
    for grid in made:
        grid.free()


@pytest.fixture(scope="module", params=[None, "1", "2"], ids=["one node", "nodes of one rank", "nodes of two ranks"])
def grids_on_nodes(comm: Any, request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    """Grids of every shape, some with ranks in reverse order, and smaller grids; nodes of all, one or two ranks."""
    from pdgemm import ProcessGrid

    comm, size = comm.Dup(), comm.size
    with pytest.MonkeyPatch.context() as environment:
        if request.param:
            environment.setenv("PDGEMM_RANKS_PER_NODE", request.param)
        first = ProcessGrid(comm)  # the other grids share its nodes
    backwards = list(range(size))[::-1]
    made = [ProcessGrid(comm, shape) for shape in grid_shapes(size)]
    made += [ProcessGrid(comm, shape, ranks=backwards) for shape in grid_shapes(size)[:2]]
    if size > 2:
        made += [ProcessGrid(comm, shape, ranks=backwards[:-1]) for shape in grid_shapes(size - 1)[:2]]
        made += [ProcessGrid(comm, (1, 1), ranks=[size // 2])]
    yield made
    for grid in (first, *made):
        grid.free()
    comm.Free()
