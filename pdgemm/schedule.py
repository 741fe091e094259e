"""Which inner indices meet at which step, and who owns them: pure arithmetic.

An algorithm is a schedule.  The pipeline moves and multiplies its steps, the cost model counts
them, the tests check that every product A[i, k] B[k, j] is formed exactly once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.runs import Pairing, meeting, packed


class PanelStep(NamedTuple):
    """One update C_ij += A[i, K] B[K, j] for a set K of inner indices with one owner in A and in B."""

    col: int  # grid column that owns A[:, K]
    row: int  # grid row that owns B[K, :]
    width: int  # |K|
    a: Pairing  # K as local columns of A on its owners, to columns of the panel
    b: Pairing  # K as local rows of B on its owners, to rows of the panel


@lru_cache(maxsize=8)
def summa_steps(inner_a: BlockCyclic, inner_b: BlockCyclic, width: int) -> tuple[PanelStep, ...]:
    """The panels of C-stationary SUMMA (van de Geijn & Watts 1997) for any two inner layouts.

    inner_a, inner_b : how A's columns and B's rows are dealt; they may differ in everything but n.
    width            : no panel is wider; each owner pair is cut into panels of nearly equal width.

    The panels of one owner pair (qa, qb) cover all k owned by grid column qa of A and grid row qb
    of B: with equal cyclic layouts a few wide products, not one for each block.  Pairs take turns,
    so that no rank is the source of many panels in a row.
    """
    cuts, lengths, owner_a, owner_b = meeting(inner_a, inner_b)
    pair = owner_a * inner_b.parts + owner_b
    by_pair = np.argsort(pair, kind="stable")
    turns = []
    for mine in np.split(by_pair, np.flatnonzero(np.diff(pair[by_pair])) + 1) if inner_a.n else []:
        first = int(mine[0])
        for turn, (at, size) in enumerate(_even_cuts(cuts[mine], lengths[mine], width)):
            step = PanelStep(
                col=int(pair[first]) // inner_b.parts,
                row=int(pair[first]) % inner_b.parts,
                width=int(size.sum()),
                a=packed(inner_a.to_local(at), size),
                b=packed(inner_b.to_local(at), size),
            )
            turns.append((turn, first, step))
    return tuple(step for _, _, step in sorted(turns, key=lambda t: t[:2]))


def _even_cuts(starts: np.ndarray, lengths: np.ndarray, width: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Cut a list of runs into consecutive pieces of nearly equal total length <= width."""
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    parts = -(-total // width)
    pieces = []
    for p in range(parts):
        lo, hi = total * p // parts, total * (p + 1) // parts
        run = slice(np.searchsorted(ends, lo, "right"), np.searchsorted(ends, hi, "left") + 1)
        at, size = starts[run].copy(), lengths[run].copy()
        skipped = lo - (ends[run.start] - size[0])
        at[0] += skipped
        size[0] -= skipped
        size[-1] -= ends[run.stop - 1] - hi
        pieces.append((at, size))
    return pieces
