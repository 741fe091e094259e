"""The contexts of the tests of ScaLAPACK's interface."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from problems import grid_shapes


@pytest.fixture(scope="module")
def contexts(comm: Any) -> Iterator[list[int]]:
    """Every shape, row by row and column by column; one that leaves a process out."""
    from pdgemm import scalapack

    made = [scalapack.blacs_gridinit(comm, *shape, order) for shape in grid_shapes(comm.size) for order in "RC"]
    if comm.size > 2:
        made.append(scalapack.blacs_gridinit(comm, 1, comm.size - 1))
    yield made
    for ictxt in made:
        scalapack.blacs_gridexit(ictxt)
