"""Checks of every algorithm of a collective: on all ranks at once without MPI, and by messages against NumPy.

The built-in algorithms pass through these checks, and so does an algorithm that is registered from outside.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pdgemm.instrument.recorder import Traffic
from pdgemm.planning.machines.machine import Machine
from pdgemm.planning.machines.simulator import simulate
from pdgemm.transport.collectives import all_to_all, carry_out

GUARD = 3  # elements around a vector that are neither read nor written


def everything(p: int, rank: int) -> range:
    return range(p)


def own(p: int, rank: int) -> range:
    return range(rank, rank + 1)


def roots(p: int, rank: int) -> range:
    return range(p) if rank == 0 else range(0)


# the parts that a rank has before and after the collective
PARTS: dict[str, tuple[Any, Any]] = {
    "all_reduce": (everything, everything),
    "reduce": (everything, roots),
    "reduce_scatter": (everything, own),
    "all_gather": (own, everything),
    "gather": (own, roots),
    "broadcast": (roots, everything),
    "scatter": (roots, own),
    "all_to_all": (lambda p, rank: range(rank * p, rank * p + p), lambda p, rank: range(rank, p * p, p)),
}


def on_all_ranks(collective: Any, begin: list[dict[int, Any]], adds: Any) -> list[dict[int, Any]]:
    """Return the parts that each rank has at the end, given those at the beginning."""
    has, parts = [dict(x) for x in begin], len(collective.counts)
    for step in collective.steps():
        moved = [
            (target, (first + at) % parts, has[source][(first + at) % parts], source < target)
            for source, target, first, number in zip(*(x.tolist() for x in step[:4]))
            for at in range(number)
        ]
        for target, part, value, before in moved:
            there = has[target].get(part)
            has[target][part] = value if not step.adds else adds(value, there) if before else adds(there, value)
    return has


def joined(a: frozenset[int], b: frozenset[int]) -> frozenset[int]:
    """Return a sum as the set of the ranks whose addends it contains, each once."""
    assert not a & b
    return a | b


def check_parts(collective: Any) -> None:
    """Check that every rank ends with its parts, and that each sum contains each addend once."""
    p, (first, last), sums = len(collective.ranks), PARTS[collective.operation], "reduce" in collective.operation
    begin = [{part: frozenset([rank if sums else part]) for part in first(p, rank)} for rank in range(p)]
    end = on_all_ranks(collective, begin, joined)
    for rank in range(p):
        for part in last(p, rank):
            assert end[rank][part] == (frozenset(range(p)) if sums else {part}), collective


def check_counts(collective: Any) -> None:
    """Check that words, messages and buffers follow from the steps, and are at least the lower bounds."""
    words, size = sum(int(collective.words_of(x).sum()) for x in collective.steps()), 1 + max(collective.ranks)
    assert collective.total_words == words == sum(collective.traffic(rank).words_received for rank in collective.ranks)
    run = simulate(collective, Machine(), size)
    for rank in range(size):  # the sums over all rounds equal the counts of a rank
        by_rounds, own = sum((x.traffic for x in collective.transfers(rank)), Traffic()), collective.traffic(rank)
        assert own == by_rounds and own.words_read == own.words_received * collective.reads
        assert run.traffic(rank) == own - Traffic(0, own.words_read, 0, 0, own.words_read)  # sending takes time
    least, _ = collective.lower_bounds()
    assert collective.extra_bytes(None) == collective.dtype.itemsize * collective.words
    messages = [np.bincount(x.moves[0].source[x.moves[0].words > 0]) for x in collective.rounds()]
    assert min(collective.counts) == 0 or sum(max(x, default=0) for x in messages) >= least


def check_by_messages(comm: Any, collective: Any) -> None:
    """Random numbers with exact sums, NaN in the parts that must not be read, and a guard zone around the vector."""
    p, kind, offsets, counted = comm.size, collective.dtype, collective.offsets, Traffic()
    at, operation = collective.ranks.index(comm.rank), collective.operation
    whole = np.round(np.random.default_rng(7).standard_normal((p, int(offsets[-1]))) * 4).astype(kind)
    if operation == "all_to_all":
        parts = np.split(whole[0], offsets[1:-1])
        arrived = all_to_all(collective, comm, [x.copy() for x in parts[at * p : at * p + p]], counted)
        assert [x.tobytes() for x in arrived] == [x.tobytes() for x in parts[at::p]]
        assert counted == collective.traffic(comm.rank)
        return
    guarded = np.full(whole.shape[1] + 2 * GUARD, np.nan, kind)
    vector, mine = guarded[GUARD : len(guarded) - GUARD], slice(offsets[at], offsets[at + 1])
    sums = "reduce" in operation
    if sums or (at == 0 and operation in ("broadcast", "scatter")):
        vector[:] = whole[at if sums else 0]
    elif operation in ("all_gather", "gather"):
        vector[mine] = whole[0, mine]
    carry_out(collective, comm, [vector], counted)
    wanted = whole.sum(axis=0, dtype=kind) if sums else whole[0]
    if operation in ("reduce_scatter", "scatter"):
        assert np.array_equal(vector[mine], wanted[mine]), collective
    elif operation in ("all_reduce", "broadcast", "all_gather") or at == 0:
        assert np.array_equal(vector, wanted), collective
    if operation == "all_reduce":
        assert len(set(comm.allgather(vector.tobytes()))) == 1
    assert np.isnan(guarded[:GUARD]).all() and np.isnan(guarded[len(guarded) - GUARD :]).all()
    assert counted == collective.traffic(comm.rank), collective
