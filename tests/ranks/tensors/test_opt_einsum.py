"""opt_einsum contracts tensors: it takes `einsum`, `tensordot` and `transpose` from their package."""

from __future__ import annotations

from typing import Any

import numpy as np
import opt_einsum
import pytest

from pdgemm import DistTensor, ProcessGrid, einsum, tensordot

pytestmark = pytest.mark.mpi
EXTENTS = dict(zip("abcdef", (3, 4, 5, 2, 3, 4)))
EXPRESSIONS = [
    "ab,bc->ac", "ab,bc,cd->da", "abc,cd,de,ebf->fa", "aab,bc->ca", "abc,abd->dca", "ab,c->cab", "ab->ba", "ab,ab->",
    "ab,b,cd,d->ac",  # whose intermediate results are arrays
]  # fmt: skip


def test_values_are_those_of_numpy(comm: Any) -> None:
    rng = np.random.default_rng(3)
    with ProcessGrid(comm) as grid:
        for text in EXPRESSIONS:
            arrays = [rng.standard_normal([EXTENTS[x] for x in labels]) for labels in text.split("->")[0].split(",")]
            tensors = [DistTensor.from_global(x, grid=grid) if x.ndim > 1 else x for x in arrays]
            later = opt_einsum.contract_expression(text, *(x.shape for x in arrays))
            for result in (opt_einsum.contract(text, *tensors), later(*tensors)):
                whole = result.allgather() if isinstance(result, DistTensor) else result
                np.testing.assert_allclose(whole, np.einsum(text, *arrays), atol=1e-13, err_msg=text)


def test_arrays_alone(comm: Any) -> None:
    """As results of one axis are; the result goes to a tensor if `out` is one."""
    x, y = np.arange(3.0), np.arange(4.0)
    np.testing.assert_array_equal(einsum("a,b->ba", x, y, alpha=2), 2 * np.outer(y, x))
    np.testing.assert_array_equal(tensordot(x, y, 0), np.outer(x, y))
    with ProcessGrid(comm) as grid:
        out = DistTensor.full((4, 3), 1.0, grid=grid)
        assert einsum("a,b->ba", x, y, beta=3, out=out) is out
        np.testing.assert_array_equal(out.allgather(), 3 + np.outer(y, x))
