"""What ranks find out about a device is kept with the grids of a communicator: each test has one of its own."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(name="comm")
def own_comm(comm: Any) -> Iterator[Any]:
    own = comm.Dup()
    yield own
    own.Free()
