"""A mover registered by the tests: a binomial tree of point-to-point messages.

The rank at distance d from the owner of a panel receives it from the rank at distance d without its lowest bit:

    0 -> 4 -> 6 -> 7
           -> 5
      -> 2 -> 3
      -> 1

The tests register its entry, which describes this tree, and the function that sends panels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pdgemm.instrument.recorder import Recorder, Then
from pdgemm.schedules.mover_registry import MOVERS, Mover, add_mover, by_messages, host_movers

TREE = Mover(
    "tree",
    "a binomial tree of ranks, point to point",
    "messages",
    sender=lambda distances, parts: distances & (distances - 1),
    hops=lambda parts: max(1, (parts - 1).bit_length()),
)
BY_MESSAGES = (*by_messages(), TREE.name)
ON_HOST = (*host_movers(), TREE.name)


def tree(comm: Any, x: Any, root: int, slot: Any, recorder: Recorder) -> None:
    """Broadcast the panel x from `root`, without blocking."""
    size, tag, me = comm.size, slot.tag, (comm.rank - root) % comm.size

    def forward() -> None:
        bit = 1 << size.bit_length()
        while bit := bit >> 1:  # first to the rank that forwards to the most ranks
            if (me == 0 or bit < me & -me) and me + bit < size:
                recorder.traffic.sent(x.size)
                slot.users.append(comm.Isend(x, dest=(me + bit + root) % size, tag=tag))

    if me == 0:
        recorder.synchronize_copies()
        forward()
    else:
        request = comm.Irecv(x, source=((me & (me - 1)) + root) % size, tag=tag)
        slot.arrivals.append(Then(recorder.coming(TREE.name, x, request), forward))


@contextmanager
def tree_registered() -> Iterator[None]:
    """Register the tree as a mover in the enclosed block only."""
    from pdgemm.transport.movers import BROADCASTS, register_mover

    register_mover(TREE, tree)
    try:
        yield
    finally:
        removed()
        del BROADCASTS[TREE.name]


@contextmanager
def tree_planned() -> Iterator[None]:
    """Register the entry without the function: the tree can be planned and counted, but not carried out."""
    add_mover(TREE)
    try:
        yield
    finally:
        removed()


def removed() -> None:
    """Make the tree unknown again."""
    del MOVERS[TREE.name]
    by_messages.cache_clear()


@pytest.fixture(name="tree_mover")
def _tree_mover(request: pytest.FixtureRequest) -> Iterator[None]:
    with tree_registered() if request.node.get_closest_marker("mpi") else tree_planned():
        yield


@pytest.fixture(name="mover")
def _mover(tree_mover: None, request: pytest.FixtureRequest) -> str:
    """The mover of a test that is parametrized `indirect`; during the test, the tree is registered."""
    return str(request.param)
