"""Collectives by messages: every algorithm, compared with NumPy; words and messages as planned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from collectives import check_by_messages
from tiers import every_grid, square_grid

from pdgemm.instrument.recorder import Traffic
from pdgemm.local.arrays.dtypes import element_type
from pdgemm.schedules.collectives.collective import OPERATIONS, Collective, algorithms
from pdgemm.transport.collectives import carry_out

pytestmark = [pytest.mark.mpi, square_grid]


def same_everywhere(comm: Any, x: np.ndarray) -> None:
    assert len(set(comm.allgather(x.tobytes()))) == 1


@every_grid
@pytest.mark.parametrize("dtype", ["d", "F", "bfloat16"])
def test_every_algorithm_against_numpy(comm: Any, dtype: str) -> None:
    p, pairs = comm.size, tuple(at // 2 for at in range(comm.size))
    for operation in OPERATIONS:
        parts = range(p * p if operation == "all_to_all" else p)
        for name, algorithm in algorithms(operation).items():
            node = pairs if name == "two-level" else ()
            for counts in ([(3 * at) % 5 + 2 for at in parts], [at % 3 for at in parts], [0 for _ in parts]):
                if algorithm.takes(node):
                    order = tuple(range(p))[::-1]
                    check_by_messages(
                        comm, Collective(operation, name, order, tuple(counts), element_type(dtype), node)
                    )


def as_tree(addends: np.ndarray) -> np.ndarray:
    """Return ((x0 + x1) + (x2 + x3)) + ..."""
    tree = [*addends]
    while len(tree) > 1:
        tree = [a + b for a, b in zip(tree[::2], tree[1::2])] + tree[len(tree) // 2 * 2 :]
    return tree[0]


def test_sums_are_in_the_order_of_the_ranks(comm: Any) -> None:
    """In every run, sums have the bits of the documented order of addends."""
    p, n = comm.size, 40
    addends = np.random.default_rng(1).standard_normal((p, n)) * 10.0 ** np.arange(-8, 8).repeat(3)[:n]
    tree = as_tree(addends)
    counts = tuple([n] + [0] * (p - 1))
    for _ in range(3):
        x = addends[comm.rank].copy()
        carry_out(Collective("all_reduce", "tree", tuple(range(p)), counts, x.dtype), comm, [x], Traffic())
        if p & (p - 1) == 0:
            assert x.tobytes() == tree.tobytes()
        same_everywhere(comm, x)
        if p & (p - 1) == 0:
            for operation in ("all_reduce", "reduce_scatter"):
                y, parts = addends[comm.rank].copy(), tuple(n // p + (at < n % p) for at in range(p))
                nearest = Collective(operation, "nearest", tuple(range(p)), parts, x.dtype)
                carry_out(nearest, comm, [y], Traffic())
                own = slice(nearest.offsets[comm.rank], nearest.offsets[comm.rank + 1])
                assert y[own].tobytes() == tree[own].tobytes()
    counts = tuple(n // p + (at < n % p) for at in range(p))
    ring = Collective("reduce_scatter", "ring", tuple(range(p)), counts, x.dtype)
    y = addends[comm.rank].copy()
    carry_out(ring, comm, [y], Traffic())
    own = slice(ring.offsets[comm.rank], ring.offsets[comm.rank + 1])
    wanted = addends[(comm.rank + 1) % p, own]
    for distance in range(2, p + 1):
        wanted = wanted + addends[(comm.rank + distance) % p, own]
    assert y[own].tobytes() == wanted.tobytes()


def test_reductions_with_other_operations(comm: Any) -> None:
    """Two arrays are reduced together; the left argument of the operation is from earlier ranks."""

    def later(a: Any, b: Any) -> Any:
        assert (a[1] < b[1]).all()
        return b

    p, counts = comm.size, tuple([2] + [0] * (comm.size - 1))
    for name in ("tree", "doubling"):
        assert name in algorithms("all_reduce")
        values, owner, counted = np.full(2, comm.rank + 0.5), np.full(2, comm.rank, np.int32), Traffic()
        x = Collective("all_reduce", name, tuple(range(p)), counts, values.dtype, arrays=2)
        carry_out(x, comm, [values, owner], counted, later)
        assert values.tolist() == [p - 0.5] * 2 and owner.tolist() == [p - 1] * 2 and owner.dtype == np.int32
        assert counted == x.traffic(comm.rank)


def test_ranks_that_do_not_take_part(comm: Any) -> None:
    some, counted = tuple(range(0, comm.size, 2)), Traffic()
    x = np.full(5, float(comm.rank))
    gather = Collective("all_reduce", "ring", some, tuple([5] + [0] * (len(some) - 1)), x.dtype)
    carry_out(gather, comm, [x], counted)
    assert x[0] == (sum(some) if comm.rank in some else comm.rank)
    assert counted == gather.traffic(comm.rank)
    assert comm.rank in some or counted == Traffic()


def test_messages_of_several_pieces(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("schedules.rounds", "schedules.collectives.collective", "transport.collectives"):
        monkeypatch.setattr(f"pdgemm.{module}.LARGEST_MESSAGE_BYTES", 64)
    x, counted = np.full(100, float(comm.rank)), Traffic()
    reduce = Collective("all_reduce", "halving", tuple(range(comm.size)), (100,) + (0,) * (comm.size - 1), x.dtype)
    carry_out(reduce, comm, [x], counted)
    assert (x == sum(range(comm.size))).all() and counted == reduce.traffic(comm.rank)
