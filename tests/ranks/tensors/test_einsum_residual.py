"""Results of einsum that are compared by random vectors; plans that choose the layouts of operands, in slices, too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pdgemm
from pdgemm import DistTensor
from pdgemm.errors import MemoryLimitError
from pdgemm.planning.tensors.expression import parsed
from pdgemm.tensors.einsum_residual import image_size, verify_einsum

pytestmark = pytest.mark.mpi

CASES: list[tuple[str, list[tuple[int, ...]]]] = [
    ("ijab,abkl->ijkl", [(4, 5, 6, 7), (6, 7, 3, 5)]),
    ("ij,jk,kl->li", [(5, 6), (6, 7), (7, 3)]),
    ("bij,bjk->ikb", [(7, 4, 5), (7, 5, 3)]),
    ("ij,ij->ij", [(5, 4), (5, 4)]),
    ("iijk,j->ki", [(4, 4, 3, 5), (3,)]),
    ("ijk->j", [(4, 5, 6)]),
    ("ij,ij->", [(4, 5), (4, 5)]),
    ("ij,jk->ik", [(4, 1), (6, 3)]),
    ("i,j->ij", [(4,), (5,)]),
]


@pytest.mark.on_ranks(3)
@pytest.mark.parametrize("dtype", ["f4", "c16", "i1"])
def test_right_and_wrong_results(comm: Any, dtype: str) -> None:
    """A right result passes; with one other element, or with zeros in its place, it does not."""
    cases = [x for x in CASES if dtype != "i1" or (len(x[1]) == 2 and x[1] != [(4, 1), (6, 3)])]
    for number, (text, shapes) in enumerate(cases):
        rng = np.random.default_rng(number)
        arrays = [rng.integers(1, 9, shape).astype(dtype) / (1 if dtype == "i1" else 7) for shape in shapes]
        arrays = [(x + (1j * x[::-1] if dtype == "c16" else 0)).astype(dtype) for x in arrays]
        operands = [DistTensor.from_global(x, rows=range(number % (1 + x.ndim))) for x in arrays]
        expression, _ = parsed(text, operands)
        C = pdgemm.einsum(text, *operands, alpha=3)
        right = verify_einsum(expression, operands, C, 3, seed=number)
        assert right.passed and right.rows > 0, (text, right)
        assert image_size(expression) > 0
        whole = C.allgather() if isinstance(C, DistTensor) else np.asarray(C)
        wide = [x.astype("i4") if dtype == "i1" else x for x in arrays]
        assert np.allclose(whole, 3 * np.einsum(text, *wide), rtol=1e-5)
        if text not in ("bij,bjk->ikb", "ij,ij->ij"):  # all elements are compared
            whole = whole.copy()
            whole[(0,) * whole.ndim] *= 2
            assert verify_einsum(expression, operands, DistTensor.from_global(whole), 3, seed=number).wrong
        zeros = DistTensor.zeros(whole.shape, dtype=whole.dtype)
        assert verify_einsum(expression, operands, zeros, 3, seed=number).wrong
        assert verify_einsum(expression, operands, C, 2, seed=number).wrong


def test_results_that_are_not_finite(comm: Any) -> None:
    x, y = np.random.default_rng(0).random((2, 6, 6))
    x[2, 3] = np.nan
    A, B = DistTensor.from_global(x), DistTensor.from_global(y)
    expression, _ = parsed("ij,ik->ijk", [A, B])
    C = pdgemm.einsum("ij,ik->ijk", A, B)
    told = verify_einsum(expression, [A, B], C, seed=1)
    assert not told.wrong and told.not_finite + told.rows == 6
    wrong = C.allgather()
    wrong[...] = np.nan
    assert verify_einsum(expression, [A, B], DistTensor.from_global(wrong), seed=1).misplaced


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("ijab,abkl,lkm->mij", [(4, 5, 6, 7), (6, 7, 3, 5), (5, 3, 8)]),
        ("ijab,abkl->ijkl", [(4, 5, 6, 1), (6, 7, 3, 5)]),  # broadcast along a slice
        ("ijab,abkl->ijkl", [(4, 5, 6, 7), (1, 7, 3, 5)]),
    ],
)
def test_layouts_of_operands_are_chosen_with_the_slices(comm: Any, text: str, shapes: list[tuple[int, ...]]) -> None:
    """Down to the smallest memory limit, with each number of slices."""
    arrays = [np.random.default_rng(3).random(shape) for shape in shapes]
    expected, seen, limit = np.einsum(text, *arrays), set[int](), 1 << 16
    while True:
        try:
            plan = pdgemm.plan_einsum(text, *shapes, ranks=comm.size, free=True, memory_limit=limit)
        except MemoryLimitError:
            break
        seen.add(len(plan.slices))
        assert [x.shape for x in plan.layouts] == shapes and plan.extra_bytes <= limit
        limit = plan.extra_bytes - 1
        tensors = [DistTensor.from_global(x, layout=layout) for x, layout in zip(arrays, plan.layouts)]
        C = pdgemm.einsum(text, *tensors, optimize=plan)
        assert np.allclose(C.allgather(), expected)
        assert comm.allreduce(C.report.counted.words_received, max) == plan.words
    assert seen > {0}
