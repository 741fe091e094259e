"""The assignment of products to ranks such that all ranks have about the same number of flops."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace

import numpy as np

from pdgemm.local.arrays.arguments import as_count
from pdgemm.schedules.formulas import gemm_flops


def balance(sizes: Sequence[tuple[int, int, int]], parts: int) -> np.ndarray:
    """Return the owner of each product, 0 <= owner < parts, so that all owners have about the same number of flops.

    sizes : (m, n, k) of each product.  Products are assigned from the largest to the smallest (equal ones in their
            order), each to the owner with the fewest flops so far; in a tie, to the lowest owner.

    The busiest owner has at most 4/3 - 1/(3 parts) times as many flops as the busiest owner in the best distribution.
    Raises ArgumentError for a size < 0 or parts < 1.
    Graham, Bounds on multiprocessing timing anomalies, SIAM J. Appl. Math. 17(2), 1969.

    >>> from pdgemm import balance
    >>> balance([(100, 100, 100), (60, 60, 60), (60, 60, 60), (10, 10, 10)], 2)
    array([0, 1, 1, 1])
    """
    parts = as_count(parts, "parts", 1)
    flops = [gemm_flops(as_count(m, "m", 0), as_count(n, "n", 0), as_count(k, "k", 0)) for m, n, k in sizes]
    owner = np.zeros(len(flops), np.intp)
    load = [(0, part) for part in range(min(parts, len(flops)))]  # further owners get no product
    for item in sorted(range(len(flops)), key=lambda item: -flops[item]):
        least, part = load[0]
        owner[item] = part
        heapreplace(load, (least + flops[item], part))
    return owner
