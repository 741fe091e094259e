"""Checks of an algorithm of a collective: its steps without MPI, and its execution by messages, compared with NumPy.

They apply to built-in algorithms and to algorithms that a user registers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pdgemm.instrument.recorder import Traffic
from pdgemm.planning.machines.machine import Machine
from pdgemm.planning.machines.simulator import simulate
from pdgemm.transport.collectives import all_to_all, carry_out

GUARD = 3  # elements before and behind a vector, which are neither read nor written


def everything(p: int, rank: int) -> range:
    return range(p)


def own(p: int, rank: int) -> range:
    return range(rank, rank + 1)


def roots(p: int, rank: int) -> range:
    return range(p) if rank == 0 else range(0)


# by operation: numbers of the parts that a rank holds before, and after the collective
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
    """Carry out the steps on the parts of all ranks, {number: value} each; return the parts at the end."""
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
    """Add two sums, each represented by the set of ranks whose addends it contains; none may occur twice."""
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
        assert own == by_rounds == run.traffic(rank)
    least, _ = collective.lower_bounds()
    assert collective.extra_bytes(None) == collective.dtype.itemsize * collective.words
    messages = [np.bincount(x.moves[0].source[x.moves[0].words > 0]) for x in collective.rounds()]
    assert min(collective.counts) == 0 or sum(max(x, default=0) for x in messages) >= least


def check_by_messages(comm: Any, collective: Any) -> None:
    """Carry out a collective by messages, and compare it with NumPy.

    The vector holds integers, and NaN in parts that must not be read; NaN around it must stay.
    """
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
