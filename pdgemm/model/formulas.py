"""What an algorithm costs a rank, by formula: words, messages, flops.

The formulas know the layouts and the steps of a schedule, not the code that moves panels; the tests
hold them against what the movers count.
"""

from __future__ import annotations

import numpy as np

from pdgemm.grids.distribution import BlockCyclic
from pdgemm.instrument.recorder import Traffic

MESSAGE_BYTES = 1 << 30  # of one message: MPI counts are ints, and some transports fail above 2 GiB


def gemm_flops(m: int, n: int, k: int, complex_: bool = False) -> int:
    """2mnk real operations; a complex multiplication and addition are 8."""
    return (8 if complex_ else 2) * m * n * k


def reduce_scatter_traffic(counts: np.ndarray, rank: int) -> Traffic:
    """Traffic of a rank when everybody's partial sums are added up, `counts[r]` words of them for rank r.

    Counted as if each rank sent every other one its part, as pairwise exchange does.  Summed over the P ranks:
    counts.sum() (P - 1) words.
    """
    mine, size = int(counts[rank]), len(counts)
    others = np.count_nonzero(counts) - (mine > 0)
    return Traffic(int(counts.sum()) - mine, mine * (size - 1), int(others), (mine > 0) * (size - 1))


def broadcasts(breadth: int, inner: BlockCyclic, panels: np.ndarray, mover: str, me: int) -> Traffic:
    """Panels of `breadth` times (indices of `inner`), each broadcast from its owner to all other parts.

    panels[q] : number of panels that part q owns.
    """
    parts, every = inner.parts, int(panels.sum())
    if parts == 1 or breadth == 0 or me < 0:  # an empty panel is not sent
        return Traffic()
    received = breadth * (inner.n - inner.count(me)), every - int(panels[me])
    if mover in ("shared", "ipc"):  # read where they lie
        return Traffic(words_received=received[0], words_read=received[0])
    if mover == "ring":  # forwards all but the panels of the next rank, where the ring would close
        after = (me + 1) % parts
        sent = breadth * (inner.n - inner.count(after)), every - int(panels[after])
    else:  # "ibcast", "nccl": counted from the source to every other rank
        sent = (parts - 1) * breadth * inner.count(me), (parts - 1) * int(panels[me])
    return Traffic(sent[0], received[0], sent[1], received[1])


def reductions(breadth: int, inner: BlockCyclic, panels: np.ndarray, me: int) -> Traffic:
    """Panels of `breadth` times (indices of `inner`), each added up over all parts on its owner.

    Counted as one message from every other part to the owner.
    """
    parts, every = inner.parts, int(panels.sum())
    if parts == 1 or breadth == 0 or me < 0:
        return Traffic()
    mine = breadth * inner.count(me)
    return Traffic(breadth * inner.n - mine, (parts - 1) * mine, every - int(panels[me]), (parts - 1) * int(panels[me]))


def bound_memory_independent(m: int, n: int, k: int, ranks: int) -> float:
    """Words that some rank has to receive, however much memory there is, where A, B and C start and end in 1/P shares.

    With d1 >= d2 >= d3 the sorted dimensions:  D - (mk + kn + mn)/P, where D is

        (d1 d2 + d1 d3)/P + d2 d3         P <= d1/d2
        2 (d1 d2 d3^2/P)^(1/2) + d1 d2/P  d1/d2 <= P <= d1 d2/d3^2
        3 (d1 d2 d3/P)^(2/3)              d1 d2/d3^2 <= P

    Tight, constants included: Al Daas, Ballard, Grigori, Kumar & Rouse, SPAA 2022, theorem 3.
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


def bound_memory_dependent(m: int, n: int, k: int, ranks: int, memory_words: float) -> float:
    """Words that a rank with room for `memory_words` receives, or sends as partial sums: 2mnk/(P sqrt(M)) - 2M.

    The loads and stores of Smith, Lowery, Langou & van de Geijn, 2019 (sequential, constant 2), for some rank forms
    mnk/P products; Kwasniewski et al., SC 2019 (parallel).
    """
    return max(0.0, 2 * m * n * k / (ranks * memory_words**0.5) - 2 * memory_words) if memory_words else 0.0


def lower_bound(m: int, n: int, k: int, ranks: int, memory_words: float | None = None) -> float:
    """Words per rank that no algorithm can do without."""
    least = bound_memory_independent(m, n, k, ranks)
    return least if memory_words is None else max(least, bound_memory_dependent(m, n, k, ranks, memory_words))
