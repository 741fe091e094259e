"""What an algorithm costs a rank, by formula: words, messages, flops.

The formulas know the layouts and the steps of a schedule, not the code that moves panels; the tests
hold them against what the movers count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.schedule import PanelStep
from pdgemm.timing import Traffic


def gemm_flops(m: int, n: int, k: int, complex_: bool = False) -> int:
    """2mnk real operations; a complex multiplication and addition are 8."""
    return (8 if complex_ else 2) * m * n * k


def summa_traffic(
    A: Distribution, B: Distribution, steps: Sequence[PanelStep], mover: str, coords: tuple[int, int]
) -> Traffic:
    """Traffic of rank (i, j) in C-stationary SUMMA: A's panels along its row, B's along its column.

    Words in: m_loc (k - k_loc) of A and n_loc (k - k_loc) of B, where k_loc inner indices are its own.
    Summed over the ranks of q x q: (mk + kn)(q - 1).
    """
    i, j = coords
    along_row = _broadcasts(A.rows.count(i), A.cols, Counter(step.col for step in steps), mover, j)
    along_col = _broadcasts(B.cols.count(j), B.rows, Counter(step.row for step in steps), mover, i)
    return along_row + along_col


def reduce_scatter_traffic(counts: np.ndarray, rank: int) -> Traffic:
    """Traffic of a rank when everybody's partial sums are added up, `counts[r]` words of them for rank r.

    Counted as if each rank sent every other one its part, as pairwise exchange does.  Summed over the P ranks:
    counts.sum() (P - 1) words.
    """
    mine, size = int(counts[rank]), len(counts)
    others = np.count_nonzero(counts) - (mine > 0)
    return Traffic(int(counts.sum()) - mine, mine * (size - 1), int(others), (mine > 0) * (size - 1))


def _broadcasts(breadth: int, inner: BlockCyclic, panels: Counter[int], mover: str, me: int) -> Traffic:
    """Panels of `breadth` times (inner indices), each broadcast from its owner to all other parts.

    panels[q] : number of panels that part q owns.
    """
    parts, every = inner.parts, panels.total()
    if parts == 1 or breadth == 0:  # an empty panel is not sent
        return Traffic()
    received = breadth * (inner.n - inner.count(me)), every - panels[me]
    if mover == "ring":  # forwards all but the panels of the next rank, where the ring would close
        after = (me + 1) % parts
        sent = breadth * (inner.n - inner.count(after)), every - panels[after]
    else:  # "ibcast": counted from the source to every other rank
        sent = (parts - 1) * breadth * inner.count(me), (parts - 1) * panels[me]
    return Traffic(sent[0], received[0], sent[1], received[1])
