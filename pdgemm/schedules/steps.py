"""The steps of SUMMA and of Cannon's algorithm: the inner indices of each step and their owners, by pure arithmetic.

The pipeline moves and multiplies the panels of these steps, the cost model counts them, and the tests check that every
product A[i, k] B[k, j] is formed exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.index_map import IndexMap, common_refinement, overlap_counts, packed
from pdgemm.grids.layout import listed


class PanelStep(NamedTuple):
    """One update C_ij += A[i, K] B[K, j] for a set K of inner indices that has one owner in A and one owner in B."""

    col: int  # grid column that owns A[:, K]
    row: int  # grid row that owns B[K, :]
    width: int  # |K|
    a: IndexMap  # maps the local columns of A that hold K to the columns of the panel
    b: IndexMap  # maps the local rows of B that hold K to the rows of the panel


@lru_cache(maxsize=8)
def summa_steps(inner_a: BlockCyclic, inner_b: BlockCyclic, width: int) -> tuple[PanelStep, ...]:
    """Return the panels of C-stationary SUMMA (van de Geijn & Watts 1997) for any two inner distributions.

    inner_a, inner_b : distributions of A's columns and B's rows; they may differ in everything but n.
    width            : width of the widest panel; the panels of an owner pair have nearly equal widths.

    The panels of one owner pair (qa, qb) cover all inner indices that grid column qa of A and grid
    row qb of B own: with equal cyclic layouts a few wide products replace one product per block.
    Owner pairs alternate, so that no rank is the source of many consecutive panels.
    """
    turns = []
    for first, col, row, starts, lengths in runs_of_pairs(inner_a, inner_b):
        for turn, (at, size) in enumerate(_even_cuts(starts, lengths, width)):
            step = PanelStep(
                col=col,
                row=row,
                width=int(size.sum()),
                a=packed(inner_a.to_local(at), size),
                b=packed(inner_b.to_local(at), size),
            )
            turns.append((turn, first, step))
    return tuple(step for _, _, step in sorted(turns, key=lambda t: t[:2]))


def runs_of_pairs(inner_a: BlockCyclic, inner_b: BlockCyclic) -> Iterator[tuple[int, int, int, np.ndarray, np.ndarray]]:
    """Yield for each owner pair the number of its first run, qa, qb, and the global starts and lengths of its runs."""
    cuts, lengths, owner_a, owner_b = common_refinement(inner_a, inner_b)
    pair = owner_a * inner_b.parts + owner_b
    by_pair = np.argsort(pair, kind="stable")
    for mine in np.split(by_pair, np.flatnonzero(np.diff(pair[by_pair])) + 1) if inner_a.n else []:
        col, row = divmod(int(pair[mine[0]]), inner_b.parts)
        yield int(mine[0]), col, row, cuts[mine], lengths[mine]


class OwnerPair(NamedTuple):
    """The inner indices of one pair of owners, in A and in B, cut into panels as in `summa_steps`.

    gaps : for A and for B, the numbers, from 0, of the pair's indices at which a new run begins in the local array.
    """

    owners: tuple[int, int]
    total: int
    panels: int
    gaps: tuple[list[int], list[int]]

    def cut(self, operand: int) -> set[int]:
        """Return the numbers of the panels that are several runs in the local array of operand 0 (A) or 1 (B)."""
        numbers = set()
        for gap in self.gaps[operand]:
            panel = -(-gap * self.panels // self.total)
            if self.total * panel // self.panels != gap:
                numbers.add(panel - 1)
        return numbers


def owner_pairs(inner_a: BlockCyclic, inner_b: BlockCyclic, width: int) -> list[OwnerPair]:
    """Return the owner pairs in the order in which `summa_steps` takes turns between their panels.

    The time of this function depends on the number of runs, and not on the number of panels.
    """
    numbered = []
    for first, col, row, starts, lengths in runs_of_pairs(inner_a, inner_b):
        ends = np.cumsum(lengths)
        local = (x.to_local(starts) for x in (inner_a, inner_b))
        gaps = [ends[:-1][x[1:] != x[:-1] + lengths[:-1]].tolist() for x in local]
        total = int(ends[-1])
        numbered.append((first, OwnerPair((col, row), total, -(-total // width), (gaps[0], gaps[1]))))
    return [pair for _, pair in sorted(numbered, key=lambda x: x[0])]


def in_one_run_each(inner: BlockCyclic, other: BlockCyclic, width: int) -> bool:
    """Is each panel of `summa_steps(inner, other, width)` one run of local indices of `inner`?"""
    return width == 1 or not any(pair.cut(0) for pair in owner_pairs(inner, other, width))


def _even_cuts(starts: np.ndarray, lengths: np.ndarray, width: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Divide a list of runs into consecutive pieces of nearly equal total length <= width."""
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


class Bundle(NamedTuple):
    """Panels that are sent one by one and multiplied in one BLAS call."""

    steps: tuple[PanelStep, ...]
    width: int
    a: IndexMap  # the maps `a` of all steps, joined
    b: IndexMap  # the maps `b` of all steps, joined


@lru_cache(maxsize=8)
def bundled(steps: tuple[PanelStep, ...], width: int) -> tuple[Bundle, ...]:
    """Return consecutive panels in bundles of total width <= `width`; a wider panel is a separate bundle."""
    bundles: list[list[PanelStep]] = []
    total = width
    for step in steps:
        total += step.width
        if total > width:
            bundles.append([])
            total = step.width
        bundles[-1].append(step)
    return tuple(
        Bundle(tuple(some), sum(x.width for x in some), joined([x.a for x in some]), joined([x.b for x in some]))
        for some in bundles
    )


def joined(maps: list[IndexMap]) -> IndexMap:
    """Return one map of the source indices of all maps, one map after the other, to 0, 1, 2, ..."""
    if len(maps) == 1:
        return maps[0]
    return packed(np.concatenate([x.source for x in maps]), np.concatenate([x.lengths for x in maps]))


def panel_counts(inner_a: BlockCyclic, inner_b: BlockCyclic, width: int) -> np.ndarray:
    """Return the number of panels of each owner pair (qa, qb) in `summa_steps`."""
    return -(-overlap_counts(inner_a, inner_b) // width)


def widest_panel(inner_a: BlockCyclic, inner_b: BlockCyclic, width: int) -> int:
    """Return the width of the widest panel of `summa_steps`."""
    held = overlap_counts(inner_a, inner_b)
    return int((-(-held // np.maximum(1, -(-held // width)))).max(initial=0))


def one_run(inner: BlockCyclic) -> bool:
    """Does each part hold one contiguous run of indices?"""
    return inner.n + inner.skip <= inner.block * inner.parts


class TorusStep(NamedTuple):
    """One update C_ij += A[i, part a] B[part a, j]; part a of A's columns is within part b of B's rows."""

    a: int
    b: int


def cannon_steps(shape: tuple[int, int], coords: tuple[int, int]) -> list[TorusStep]:
    """Return the parts that the rank at (i, j) of a Pr x Pc torus holds at each step; Pr divides Pc (Cannon 1969).

    Part a of A's columns is within part a mod Pr of B's rows.  With t = Pc / Pr, the t ranks of a grid row with the
    same j mod Pr form a group, which starts with part b = (i + j) mod Pr of B and the t parts of A within part b.
    The parts of A are shifted around the group while B stays; after t steps A is shifted by one group, B by one row.
    CA3DMM (Huang & Chow 2022) gathers A in each group; shifting A takes 1/t of that memory and sends as many words.
    """
    pr, pc = shape
    t = pc // pr
    i, (r, group) = coords[0], divmod(coords[1], pr)
    steps = []
    for turn in range(pr):
        b = (i + group + turn) % pr
        steps += [TorusStep(b + (r + v) % t * pr, b) for v in range(t)]
    return steps


def cannon_neighbours(shape: tuple[int, int], j: int, step: int) -> tuple[int, int]:
    """Return the grid columns to which column j sends its part of A after a step, and from which it receives a part."""
    pr, pc = shape
    t = pc // pr
    r, group = divmod(j, pr)
    on = step % t == t - 1  # the shift is to the next group
    return (group - on) % pr + (r - 1) % t * pr, (group + on) % pr + (r + 1) % t * pr


def skewed_rank_maps(rank_map: tuple[int, ...], shape: tuple[int, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the rank maps of A and of B at the first step, where C has `rank_map` on a Pr x Pc grid."""
    a, b = skewed(np.array(rank_map).reshape(1, *shape))
    return listed(a), listed(b)


def skewed(ranks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a and b: at the first step rank a[layer, i, j] holds A_ij, and rank b[layer, i, j] holds B_ij.

    ranks : rank ranks[layer, i, j] holds C_ij.
    """
    _, pr, pc = ranks.shape
    i, j = np.arange(pr)[:, None], np.arange(pc)
    return ranks[:, i, (j - i) % pr + j // pr * pr], ranks[:, (i - j) % pr, j]
