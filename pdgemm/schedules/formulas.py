"""Closed formulas for the cost of an algorithm on a rank: words, messages and flops.

The formulas depend on the layouts and steps of a schedule, not on the code that moves panels; the tests compare them
with the words and messages that the movers count.
"""

from __future__ import annotations

import numpy as np

from pdgemm.grids.distribution import BlockCyclic
from pdgemm.instrument.recorder import Traffic
from pdgemm.schedules.mover_registry import IBCAST, MOVERS, fan_out

LARGEST_MESSAGE_BYTES = 1 << 30  # MPI counts are ints, and some transports fail above 2 GiB


def gemm_flops(m: int, n: int, k: int, complex_: bool = False) -> int:
    """Return the flops of an m x n x k product: 2mnk, or 8mnk where the elements are complex."""
    return (8 if complex_ else 2) * m * n * k


def broadcasts(breadth: int, inner: BlockCyclic, panels: np.ndarray, mover: str, me: int) -> Traffic:
    """Return the traffic of part `me` when panels of `breadth` rows are broadcast from their owners to all other parts.

    inner : distribution of the inner indices.   panels[q] : number of panels that part q owns.
    """
    parts, every = inner.parts, int(panels.sum())
    if parts == 1 or breadth == 0 or me < 0:  # an empty panel is not sent
        return Traffic()
    received, entry = breadth * (inner.n - inner.count(me)), MOVERS[mover]
    if entry.reads:
        return Traffic(words_received=received, words_read=received)
    # each part sends a panel `most` times, or `most + more` times if it is `distance` parts behind the panel's owner
    most, others = fan_out(entry, parts)
    words, sent = most * inner.n, most * every
    for distance, more in others:
        owner = (me - distance) % parts
        words += more * inner.count(owner)
        sent += more * int(panels[owner])
    return Traffic(breadth * words, received, sent, every - int(panels[me]))


def reductions(breadth: int, inner: BlockCyclic, panels: np.ndarray, me: int) -> Traffic:
    """Return the traffic of part `me` when panels of `breadth` rows are reduced over all parts to their owners.

    Each reduction is counted as one message from every other part to the owner.
    """
    x = broadcasts(breadth, inner, panels, IBCAST.name, me)  # each reduction counts like a broadcast by the owner
    return Traffic(x.words_received, x.words_sent, x.messages_received, x.messages_sent)


def bound_memory_independent(m: int, n: int, k: int, ranks: int) -> float:
    """Return the least words that some rank receives with unlimited memory, where each rank holds 1/P of A, B and C.

    With d1 >= d2 >= d3 the sorted dimensions:  D - (mk + kn + mn)/P, where D is

        (d1 d2 + d1 d3)/P + d2 d3         P <= d1/d2
        2 (d1 d2 d3^2/P)^(1/2) + d1 d2/P  d1/d2 <= P <= d1 d2/d3^2
        3 (d1 d2 d3/P)^(2/3)              d1 d2/d3^2 <= P

    The bound is tight, constants included: Al Daas, Ballard, Grigori, Kumar & Rouse, SPAA 2022, theorem 3.
    """
    d1, d2, d3 = sorted((m, n, k), reverse=True)
    if not d3:
        return 0.0
    if ranks * d2 <= d1:
        access = (d1 * d2 + d1 * d3) / ranks + d2 * d3
    elif ranks * d3 * d3 <= d1 * d2:
        access = 2 * (d1 * d2 * d3 * d3 / ranks) ** 0.5 + d1 * d2 / ranks
    else:
        access = 3 * (d1 * d2 * d3 / ranks) ** (2 / 3)
    return max(0.0, access - (m * k + k * n + m * n) / ranks)


def bound_symmetric(n: int, k: int, ranks: int, terms: int = 1) -> float:
    """Return the least words that some rank receives for a triangle of A A^H, where each rank holds 1/P of A and C.

    A is n x k, and h = n (n - 1)/2.  The bound is D - (nk + h)/P, where D is

        nk/P + h (n - 1)/n          P <= k/n
        nk/sqrt(P) + h/P            k/n <= P <= n^2/k^2
        3/2 (2 h k/P)^(2/3)         n^2/k^2 <= P

    terms : 2 for a triangle of A B^H + B A^H, for which a rank needs the same rows of A and of B: k is replaced by 2k,
        but 2 h k by 4 h k/sqrt(2).
    After Al Daas, Ballard, Grigori, Kumar & Rouse, SPAA 2023; for two terms by the same argument.
    """
    half = n * (n - 1) / 2
    if not half * k:
        return 0.0
    pairs = half * k / ranks  # a rank that accesses a words of A and c of C forms at most a sqrt(c/2) of these products
    rows = max(n * k / ranks, min(n * k / ranks**0.5, (4 * pairs**2 / terms) ** (1 / 3)))
    sums = half if ranks * n <= terms * k else max(half / ranks, 2 * (pairs / rows) ** 2)
    return max(0.0, terms * rows + sums - (terms * n * k + half) / ranks)


def bound_memory_dependent(m: int, n: int, k: int, ranks: int, memory_words: float) -> float:
    """Return the least words that some rank with a memory of M words receives or sends: 2mnk/(P sqrt(M)) - 2M.

    Because some rank computes mnk/P products, the bound on the loads and stores of one processor holds for this rank:
    Smith, Lowery, Langou & van de Geijn, 2019 (sequential, constant 2); Kwasniewski et al., SC 2019 (parallel).
    """
    return max(0.0, 2 * m * n * k / (ranks * memory_words**0.5) - 2 * memory_words) if memory_words else 0.0


def lower_bound(m: int, n: int, k: int, ranks: int, memory_words: float | None = None) -> float:
    """Return a lower bound on the words per rank of any algorithm."""
    least = bound_memory_independent(m, n, k, ranks)
    return least if memory_words is None else max(least, bound_memory_dependent(m, n, k, ranks, memory_words))
