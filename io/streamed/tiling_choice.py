"""The tiling of a product of files that fits the memory and costs least.  No MPI, no data."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import numpy as np

from pdgemm.errors import MemoryLimitError
from pdgemm.io.streamed.tiling import Tiling
from pdgemm.support.text import in_bytes

_RESERVE = 16  # 1 / _RESERVE of the memory is left to the buffers of the products


def fitting(whole: Tiling, memory: int | None, most_flops: float = inf) -> Tiling:
    """Return `best_tiling`; raise MemoryLimitError, which says how many bytes are needed, where nothing fits.

    memory : bytes per rank; None: as many as A, B and C need.
    """
    if memory is None:
        memory = most_memory(whole.all_bytes)
    outcome = best_tiling(whole, memory, most_flops)
    if isinstance(outcome, Tiling):
        return outcome
    raise MemoryLimitError(
        f"no tile fits {in_bytes(memory)} of memory per rank: {in_bytes(outcome)} ({outcome} bytes) are needed"
    )


def best_tiling(whole: Tiling, memory: int, most_flops: float = inf) -> Tiling | int:
    """Return the tiling of the least cost that takes, with the buffers of products, at most `memory` bytes per rank.

    whole : the product in one tile.
    most_flops : limit of the operations of a rank in a step, unless panels would become thin.

    Where no tiling fits, returns the number of bytes per rank that are needed.
    """
    (m, n, k), limit, needed = whole.mnk, memory - memory // _RESERVE, inf
    cut = replace(whole, a=whole.a._replace(unit=(1, 1)), b=whole.b._replace(unit=(1, 1)))
    for product in (whole, cut):  # cut chunks, which are read as a whole for each part, only if necessary

        def tiling_of(*counts: Any) -> Tiling:
            return replace(product, counts=counts)  # noqa: B023

        tl, ti = (x.ravel().astype(float) for x in np.meshgrid(counts(k), counts(m), indexing="ij"))
        low, high = np.zeros_like(ti), np.full_like(ti, max(1, n) - 1)
        least: Any = tiling_of(ti, high + 1, tl).all_bytes
        needed, fits = min(needed, least.min()), least <= limit
        tl, ti, low, high = (x[fits] for x in (tl, ti, low, high))
        while (low < high).any():  # bisect for the fewest tiles in a row, for all candidates at once
            middle = (low + high) // 2
            fits = tiling_of(ti, middle + 1, tl).all_bytes <= limit
            low, high = np.where(fits, low, middle + 1), np.where(fits, middle, high)
        if len(ti):
            those = tiling_of(ti, low + 1, tl)
            best = np.lexsort((those.cost, np.maximum(most_flops, those.flops)))[0]
            return tiling_of(int(ti[best]), int(low[best]) + 1, int(tl[best]))
    return most_memory(int(needed))


def fits_in(tiling: Tiling, memory: int | None) -> bool:
    """Return whether a tiling takes at most `memory` bytes per rank.   memory : None: no limit."""
    return memory is None or tiling.all_bytes <= memory - memory // _RESERVE


def most_memory(nbytes: int) -> int:
    """Return the memory per rank that holds `nbytes` and the reserve for the buffers of products."""
    return int(nbytes * _RESERVE / (_RESERVE - 1)) + _RESERVE


def counts(n: int) -> list[int]:
    """Return candidate numbers of parts: 1 to 8, then each larger than the one before by a quarter, and at last n."""
    numbers, count = [], 1
    while count < n:
        numbers.append(count)
        count += max(1, count // 4)
    return [*numbers, max(1, n)]
