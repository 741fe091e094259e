"""Memory of tensors: no rank allocates an array of the size of a whole tensor, and plans count the bytes of einsum."""

from __future__ import annotations

import tracemalloc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import tiers
from mpi4py import MPI

from pdgemm import DistTensor, einsum, plan_einsum
from pdgemm.grids.node_memory import NodeMemory
from pdgemm.planning.tensors.tensor_layouts import default_layout
from pdgemm.tensors.tensor_base import in_layout

pytestmark = [pytest.mark.mpi, tiers.square_grid]

N = 16
OBJECTS = 1 << 16  # bytes of Python's own objects in a call that was planned before


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], tuple[int, int]]:
    """A function that calls another one twice, and returns the largest array and the most bytes of the second call.

    Arrays in node-shared memory are counted one by one; in private memory only the sum is known.
    """
    shared, held, empty = list[int](), np.zeros(2, np.int64), NodeMemory.empty  # held: the bytes now, and at most

    def counted(*arguments: object) -> np.ndarray:
        array = empty(*arguments)  # type: ignore[arg-type]
        shared.append(array.nbytes)
        held[0] += array.nbytes
        held[1] = max(held)
        weakref.finalize(array, np.subtract, held[:1], array.nbytes, held[:1])
        return array

    monkeypatch.setattr(NodeMemory, "empty", counted)

    def count(call: Callable[[], object]) -> tuple[int, int]:
        call()
        shared.clear()
        before = held[1] = held[0]
        tracemalloc.start()
        try:
            call()
            private = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        return max([private, *shared]), int(held[1] - before) + private

    return count


OPERATIONS: dict[str, Callable[[DistTensor, DistTensor], object]] = {
    "move": lambda A, B: in_layout(A, default_layout(A.shape, A.grid.size, ((3, 2), (1, 0)))),
    "matrix": lambda A, B: A.matrix((0, 2), (1, 3)),
    "reshape": lambda A, B: A.T.reshape(N * N, N * N),
    "sum over divided axes": lambda A, B: A.sum((0, 1)),
    "max": lambda A, B: A.max(3),
    "slice": lambda A, B: A[1:, :, ::-2],
    "slice of a divided axis": lambda A, B: A[::-1],
    "index": lambda A, B: A[3],
    "broadcast": lambda A, B: A * B.sum((0, 1), keepdims=True),
    "other layout": lambda A, B: A + B.T,
    "product": lambda A, B: einsum("aebf,efij->abij", A, B),
    "diagonal": lambda A, B: einsum("aabc->abc", A),
    "concatenate": lambda A, B: np.concatenate([A[:, :3], B[:, :5]], 1),
    "flip": lambda A, B: np.flip(A),
    "roll": lambda A, B: np.roll(A, (3, 5), (0, 1)),
    "unstack": lambda A, B: np.unstack(A),
    "diagonals": lambda A, B: np.diagonal(A, 1, 0, 3),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_nothing_of_the_size_of_a_whole_tensor(
    name: str, allocations: Callable[[Callable[[], object]], tuple[int, int]]
) -> None:
    """On four ranks the largest array is a quarter of the tensor, or two of them in private temporaries."""
    A, B = (DistTensor.random((N,) * 4, seed=seed) for seed in (1, 2))
    largest, _ = allocations(lambda: OPERATIONS[name](A, B))
    assert largest <= A.local.nbytes + OBJECTS < A.size * 8 / 2


@pytest.mark.parametrize(
    ("expression", "way"),
    [
        ("abef,efij->abij", "product"),
        ("aebf,efij->abij", "product"),
        ("abef,cbfj->aecj", "product"),
        ("abef,abfj->abej", "stack"),
        ("abef,aefb->abef", "elementwise"),
        ("aabc,bcij->aij", "product"),
        ("aebf,efij,ij->ab", "product"),
    ],
)
def test_plans_count_the_bytes_of_einsum(
    expression: str, way: str, allocations: Callable[[Callable[[], object]], tuple[int, int]]
) -> None:
    shapes = [(N,) * len(x) for x in expression.partition("->")[0].split(",")]
    operands = [DistTensor.random(shape, seed=at) for at, shape in enumerate(shapes)]
    plan = plan_einsum(expression, *operands)
    assert way in str(plan)
    _, nbytes = allocations(lambda: einsum(expression, *operands, optimize=plan))
    nbytes = operands[0].grid.comm.allreduce(nbytes, MPI.MAX)
    assert operands[0].local.nbytes <= nbytes <= plan.extra_bytes + OBJECTS


def test_a_memory_limit_holds_with_slices(allocations: Callable[[Callable[[], object]], tuple[int, int]]) -> None:
    expression, extent = "abe,bcf,acg,efg->ab", {"e": 4}
    shapes = [tuple(extent.get(x, 2 * N) for x in labels) for labels in expression.partition("->")[0].split(",")]
    operands = [DistTensor.random(shape, seed=at) for at, shape in enumerate(shapes)]
    limit = plan_einsum(expression, *operands).extra_bytes // 2
    plan = plan_einsum(expression, *operands, memory_limit=limit)
    assert plan.slices == ("e",)
    _, nbytes = allocations(lambda: einsum(expression, *operands, optimize=plan))
    assert plan.extra_bytes <= limit
    assert operands[0].grid.comm.allreduce(nbytes, MPI.MAX) <= plan.extra_bytes + 2 * OBJECTS  # of twelve products
