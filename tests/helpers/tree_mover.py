"""A mover registered by the tests: a binomial tree of point-to-point messages.

The rank at distance d behind the owner of a panel receives it from the one at d without its lowest bit:

    0 -> 4 -> 6 -> 7
           -> 5
      -> 2 -> 3
      -> 1

The package knows only the mover's entry, which describes this tree, and its function.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pdgemm.instrument.recorder import Recorder, Then
from pdgemm.schedules.mover_registry import Mover, add_mover, by_messages, host_movers, remove

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
    """Broadcast x from root."""
    size, tag, me = comm.size, slot.tag, (comm.rank - root) % comm.size

    def forward() -> None:
        bit = 1 << size.bit_length()
        while bit := bit >> 1:  # the rank with the most to forward receives first
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
    """Register the tree as a mover for a while; afterwards it is unknown again."""
    from pdgemm.transport.movers import BROADCASTS, register_mover

    register_mover(TREE, tree)
    try:
        yield
    finally:
        remove(TREE.name)
        del BROADCASTS[TREE.name]


@contextmanager
def tree_planned() -> Iterator[None]:
    """Register it without MPI: it can be planned and counted, but not carried out."""
    add_mover(TREE)
    try:
        yield
    finally:
        remove(TREE.name)


@pytest.fixture(name="tree_mover")
def _tree_mover(request: pytest.FixtureRequest) -> Iterator[None]:
    with tree_registered() if request.node.get_closest_marker("mpi") else tree_planned():
        yield


@pytest.fixture(name="mover")
def _mover(tree_mover: None, request: pytest.FixtureRequest) -> str:
    """Return the mover of a test that is parametrized `indirect`; the tree is registered meanwhile."""
    return str(request.param)
