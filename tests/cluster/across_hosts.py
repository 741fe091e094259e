"""Bytes that pdgemm counts as sent from host to host equal those that the hosts' network cards count.

    scripts/hosts.sh 2 mpirun -n 4 --map-by ppr:2:node python -m pytest --with-mpi -m mpi tests/cluster/across_hosts.py

on 2 hosts with 2 ranks each; with -s it prints the figures.  `scripts/test.sh` runs it on 2 x 2, with --all on
2 x 1 and 3 x 2 too.

A card counts packets, with the headers of Ethernet, IP and TCP: 14 + 20 + 32 bytes, 66 per packet, 32 because of the
time stamps that Linux sends.  The rest is the payload of TCP: none in a packet that only acknowledges; the words of
pdgemm; Open MPI's headers; and a few words of barriers and agreements before and after the product.  So the cards must
count at least the words that the schedule sends from host to host, and at most these bytes more:

    SMALL                               for barriers and agreements, a few hundred bytes for each pair of hosts
    256 for each message                for Open MPI's headers, and answers before long messages: about 60
    1460 for each segment sent again    as the kernel counts them; usually there is none

An ARP packet of 42 bytes counts as 42 - 66 = -24 bytes; the barriers send more than that.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems import TOLERANCE, accepted, grid_shapes

from pdgemm import DistMatrix, ProcessGrid, plan
from pdgemm.planning.machines.machine import Link, Machine

pytestmark = pytest.mark.mpi(min_size=2)
HEADERS = 66
SEGMENT = 1460
MESSAGE = 256
SMALL = 1 << 14
SIZES = (601, 503, 701)  # m, n, k; a matrix is about 3 MB


# ------------------------------------------------------------------ counts of the cards
def card() -> np.ndarray:
    """Return TCP payload received and sent by this host's card, segments sent again, and all bytes received."""
    (line,) = (x for x in Path("/proc/net/dev").read_text().splitlines() if x.strip().startswith("eth0:"))
    figures = [int(x) for x in line.split(":")[1].split()]
    names, values = (x.split() for x in Path("/proc/net/snmp").read_text().splitlines() if x.startswith("Tcp:"))
    again = int(values[names.index("RetransSegs")])
    return np.array([figures[0] - HEADERS * figures[1], figures[8] - HEADERS * figures[9], again, figures[0]])


@dataclass
class Hosts:
    """The hosts of this job.   on : the index in `names` of each rank's host."""

    comm: Any
    names: list[str]
    on: np.ndarray

    @property
    def number(self) -> int:
        return len(self.names)

    def by_host(self, ranks: np.ndarray, figures: np.ndarray) -> np.ndarray:
        """Add up figures of ranks by host."""
        return np.bincount(self.on[ranks], figures, self.number).astype(np.int64)

    def carried(self, act: Callable[[], object]) -> np.ndarray:
        """Run `act` on all ranks; return for each host how much the counts of `card` grew."""
        self.comm.Barrier()
        before = card()
        self.comm.Barrier()  # all cards are read before any rank begins
        act()
        self.comm.Barrier()
        told = np.array(self.comm.allgather(card() - before))
        return np.array([told[np.argmax(self.on == host)] for host in range(self.number)])


@pytest.fixture(scope="module")
def hosts(comm: Any) -> Hosts:
    name = platform.node()
    names = sorted(set(comm.allgather(name)))
    if len(names) == 1:
        pytest.skip("all ranks are on one host; scripts/hosts.sh makes several")
    return Hosts(comm, names, np.array(comm.allgather(names.index(name))))


# ------------------------------------------------------------------ counts of the schedule
@dataclass
class Expected:
    """The least and the most bytes that each host receives from others, and the number of messages between hosts.

    received : words in messages to each rank, also from its own host.
    """

    hosts: Hosts
    least: np.ndarray = field(init=False)
    most: np.ndarray = field(init=False)
    received: np.ndarray = field(init=False)
    messages: int = 0

    def __post_init__(self) -> None:
        self.least, self.most = np.zeros((2, self.hosts.number), np.int64)
        self.received = np.zeros(self.hosts.comm.size, np.int64)

    def add(self, x: Any) -> None:
        """Add the messages of a round of the schedule (`rounds.Messages`)."""
        on, nbytes, away = self.hosts.on, x.words * x.itemsize, self.hosts.on[x.source] != self.hosts.on[x.target]
        self.received += np.bincount(x.target, x.words, len(on)).astype(np.int64)
        self.messages += int(away.sum())
        least = most = away
        if x.kind == "ibcast":  # the MPI library chooses the tree: a host receives the data once, or once per rank
            least = away & _first(x.source, on[x.target])
            most = np.isin(x.source, x.source[away])
        self.least += self.hosts.by_host(x.target[least], nbytes[least])
        self.most += self.hosts.by_host(x.target[most], nbytes[most])

    def move(self, source: Any, target: Any, itemsize: int) -> None:
        """Add the messages of a redistribution from one layout to another."""
        size, before, after = self.hosts.comm.size, owners(source).ravel(), owners(target).ravel()
        words = np.bincount(before * size + after, minlength=size * size).reshape(size, size)
        np.fill_diagonal(words, 0)
        self.received += words.sum(axis=0)
        away = np.where(self.hosts.on[:, None] != self.hosts.on, words, 0)
        entering = itemsize * self.hosts.by_host(np.arange(size), away.sum(axis=0))
        self.least += entering
        self.most += entering
        self.messages += np.count_nonzero(away) + (int(entering.sum()) >> 18)  # messages of at most 1 MiB, some shorter

    def compare(self, counted: np.ndarray, title: str) -> None:
        """Check that the counts of the cards are within the bounds."""
        entered, left, again, with_headers = counted.T
        room = SMALL + MESSAGE * self.messages + SEGMENT * int(again.sum())
        if self.hosts.comm.rank == 0:
            least, most, seen, whole = (int(x.sum()) for x in (self.least, self.most, entered, with_headers))
            known = f"{least} to {most}" if least < most else f"{least}"
            print(f"{title}: {known} bytes by the schedule, {seen} by the cards, {whole} with headers")
        assert abs(int(entered.sum() - left.sum())) <= room  # no other traffic enters or leaves
        assert self.least.sum() <= entered.sum() <= self.most.sum() + room, title
        assert (self.least <= entered).all() and (entered <= self.most + room).all(), title


def _first(*keys: np.ndarray) -> np.ndarray:
    """Return a mask of the entries whose keys no earlier entry has."""
    first = np.zeros(len(keys[0]), bool)
    first[np.unique(np.stack(keys), axis=1, return_index=True)[1]] = True
    return first


def owners(layout: Any) -> np.ndarray:
    """Return the matrix of owner ranks, one for each element."""
    rows, cols = layout.distribution.rows, layout.distribution.cols
    at: list[np.ndarray] = [np.empty(x.n, int) for x in (rows, cols)]
    for x, dimension in zip(at, (rows, cols)):
        for part in range(dimension.parts):
            x[dimension.indices(part)] = part
    return np.array(layout.rank_map).reshape(layout.distribution.grid_shape)[np.ix_(*at)]


def expected(plan: Any, hosts: Hosts) -> Expected:
    """Return the expected counts of a plan: of its redistributions and of the rounds of its product."""
    known = Expected(hosts)
    for _, move in plan.moves:
        known.move(move.source, move.target, move.wire.itemsize)
    for at in plan.product.rounds():
        for x in at.moves:
            if not x.read:
                known.add(x)
    return known


# ------------------------------------------------------------------ the tests
def test_hosts_are_nodes(hosts: Hosts) -> None:
    with ProcessGrid(hosts.comm) as grid:
        firsts = [int(np.argmax(hosts.on == host)) for host in hosts.on]
        assert list(grid.nodes) == firsts
        assert grid.node.allgather(platform.node()) == [platform.node()] * grid.node.size


def test_ranks_of_a_host_do_not_use_the_network(hosts: Hosts) -> None:
    with_me = hosts.comm.Split(int(hosts.on[hosts.comm.rank]))
    sent, got = np.zeros(1 << 20), np.empty(1 << 20)
    counted = hosts.carried(lambda: with_me.Sendrecv(sent, (with_me.rank + 1) % with_me.size, recvbuf=got))
    with_me.Free()
    Expected(hosts).compare(counted, "within hosts")


@pytest.fixture(scope="module")
def matrices(hosts: Hosts) -> Iterator[Any]:
    """Return A and B, whole and distributed."""
    m, n, k = SIZES
    with ProcessGrid(hosts.comm) as grid:
        A = DistMatrix.random((m, k), grid=grid, block=(50, 64), seed=1)
        B = DistMatrix.random((k, n), grid=grid, block=(64, 70), seed=2)
        yield A, B, A.allgather(), B.allgather()


def part(whole: np.ndarray, X: Any) -> np.ndarray:
    """Return this rank's part of a matrix in the layout of X."""
    i, j = X.grid.coords
    return whole[np.ix_(X.distribution.rows.indices(i), X.distribution.cols.indices(j))]


def products(size: int, algorithm: str) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield (grid shape, layers) on which the algorithm runs; Cannon's also with idle ranks."""
    for name, shape, layers in accepted(size):
        if name == algorithm and (name == "cannon" or shape[0] * shape[1] * layers == size):
            yield shape, layers


@pytest.mark.parametrize(
    ("algorithm", "mover"),
    [
        ("summa", "ring"),
        ("summa", "ibcast"),
        ("summa", "shared"),
        ("cannon", "auto"),
        ("2.5d", "auto"),
        ("2.5d", "ring"),
        ("2.5d", "shared"),
        ("stationary_a", "ring"),
        ("stationary_b", "ibcast"),
        ("inner", "auto"),
    ],
)
def test_counted_bytes_of_products_between_hosts(hosts: Hosts, matrices: Any, algorithm: str, mover: str) -> None:
    slow = Link(1.0, 1.0)
    no_shifts = Machine(intra={**Machine().intra, "shift": slow}, inter={**Machine().inter, "shift": slow})
    machine = Machine() if mover == "auto" else no_shifts  # slow shifts: 2.5D then uses SUMMA in its layers, not Cannon
    comm, (A, B, a, b) = hosts.comm, matrices
    if mover == "shared" and hosts.number == comm.size:
        pytest.skip("no ranks that share memory")
    product_of_all = a @ b
    # bound of problems.gemm_error
    bound = TOLERANCE * np.finfo(float).eps * np.sqrt(SIZES[2] + 2) * np.linalg.norm(a) * np.linalg.norm(b)
    for shape, layers in products(comm.size, algorithm):
        C = DistMatrix.zeros(SIZES[:2], grid=A.grid, block=(50, 70))
        asked: dict[str, Any] = {"algorithm": algorithm, "shape": shape, "layers": layers, "mover": mover}
        p = plan(A, B, C, **asked, panel_width=64, machine=machine)
        product = p.prepare(A, B, C)
        product()  # the first run sets up connections
        known, counted = expected(p, hosts), hosts.carried(product)
        inside = f"by {p.inside} " if p.inside else ""
        title = f"{algorithm} {inside}on {'x'.join(map(str, (*shape, layers)))}, {C.report.mover}"
        traffic = C.report.counted
        by_message = comm.allgather(traffic.words_received - traffic.words_read)
        assert by_message == known.received.tolist(), title
        known.compare(counted, title)
        assert np.sqrt(comm.allreduce(np.linalg.norm(C.local - part(product_of_all, C)) ** 2)) <= bound


def test_counted_bytes_of_redistribution_between_hosts(hosts: Hosts, matrices: Any) -> None:
    comm, (X, _, x, _) = hosts.comm, matrices
    for shape in grid_shapes(comm.size):
        for block, transposed, dtype in ((None, False, "f8"), ((7, 30), False, "f4"), (64, True, "f8")):
            with ProcessGrid(comm, shape) as other:
                source, values = (X.T, x.T) if transposed else (X, x)
                Y = DistMatrix.zeros(source.shape, grid=other, block=block, dtype=dtype)
                source.redistribute(Y)
                counted = hosts.carried(lambda source=source, Y=Y: source.redistribute(Y))
                known = Expected(hosts)
                known.move(source.layout_in(X.grid), Y.layout_in(X.grid), Y.dtype.itemsize)
                title = f"redistribute {'T ' * transposed}to {shape[0]}x{shape[1]}, block {block}, {dtype}"
                assert comm.allgather(Y.report.counted.words_received) == known.received.tolist(), title
                known.compare(counted, title)
                assert np.array_equal(Y.local, part(values.astype(dtype), Y))


@pytest.mark.parametrize("times", [-1, 1])
def test_a_message_more_or_less_would_be_seen(hosts: Hosts, matrices: Any, times: int) -> None:
    """If the smallest message between hosts were not sent, or sent twice, the comparison would fail."""
    A, B, _, _ = matrices
    C = DistMatrix.zeros(SIZES[:2], grid=A.grid, block=(50, 70))
    p = plan(A, B, C, algorithm="summa", shape=A.grid.shape, mover="ring", panel_width=64)
    p.execute(A, B, C)
    counted, known = hosts.carried(lambda: p.execute(A, B, C)), expected(p, hosts)
    known.compare(counted, "as it is")
    smallest = min(
        int((x.words[away] * x.itemsize).min())
        for at in p.product.rounds()
        for x in at.moves
        if not x.read
        if (away := hosts.on[x.source] != hosts.on[x.target]).any()
    )
    known.least[0] -= times * smallest
    known.most[0] -= times * smallest
    with pytest.raises(AssertionError):
        known.compare(counted, "had the schedule a message " + ("less" if times > 0 else "more"))
