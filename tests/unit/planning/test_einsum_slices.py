"""The slices of a tensor network under a memory limit."""

from __future__ import annotations

import pytest

from pdgemm import PdgemmError, plan_einsum

CUBE = "adi,abj,bck,cdl,ehi,efj,fgk,ghl->"  # eight tensors at the corners of a cube, and its edges


@pytest.mark.parametrize("limit", [64_000, 32_000])
def test_slices_are_the_labels_that_save_most_memory(limit: int) -> None:
    """Two labels of 8 are enough; the labels of one corner would save nothing beyond the first one."""
    plan = plan_einsum(CUBE, *[(8, 8, 8)] * 8, ranks=4, memory_limit=limit)
    assert plan.extra_bytes <= limit and plan.contractions == 7 * 8 ** len(plan.slices)
    assert len(plan.slices) == {64_000: 1, 32_000: 2}[limit]


def test_a_limit_that_no_slices_keep() -> None:
    with pytest.raises(PdgemmError, match="memory limit 100 bytes per rank is too small"):
        plan_einsum(CUBE, *[(8, 8, 8)] * 8, ranks=4, memory_limit=100)
