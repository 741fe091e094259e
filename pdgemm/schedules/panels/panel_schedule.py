"""Panels along the diagonal of a matrix, tiles of the triangle on each rank, and the base of all panel schedules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from math import prod
from typing import ClassVar, NamedTuple

import numpy as np

from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.index_map import common_refinement
from pdgemm.grids.layout import Layout
from pdgemm.schedules.collectives.collective import Collective
from pdgemm.schedules.mover_registry import reads
from pdgemm.schedules.rounds import (
    COLS,
    MEMORY,
    Messages,
    Round,
    WorkPiece,
    broadcast,
    counts_of,
    grid_of,
    messages,
    products,
    signals,
)
from pdgemm.schedules.schedule import Buffers, RankMap, Schedule
from pdgemm.schedules.staircase import Tile


class Panel(NamedTuple):
    """The row and column indices from start to stop; the diagonal block of these rows and columns has one owner."""

    start: int
    stop: int
    row: int  # grid row that owns these rows
    col: int  # grid column that owns these columns

    @property
    def width(self) -> int:
        return self.stop - self.start


@lru_cache(maxsize=64)
def diagonal_panels(rows: BlockCyclic, cols: BlockCyclic, width: int, stop: int | None = None) -> tuple[Panel, ...]:
    """Return the panels of a matrix up to the end of its diagonal, cut where a block of rows or of columns begins.

    The two distributions may differ: blocks of 64 and of 96 make panels of 64, 32, 32, 64.  No panel is wider than
    `width`.
    """
    n = min(rows.n, cols.n) if stop is None else stop
    if not n:
        return ()
    panels = []
    for start, length, row, col in zip(*(x.tolist() for x in common_refinement(rows.window(0, n), cols.window(0, n)))):
        parts = -(-length // width)
        ends = [start + length * part // parts for part in range(parts + 1)]
        panels += [Panel(a, b, row, col) for a, b in pairwise(ends)]
    return tuple(panels)


INDEX = np.dtype(np.int64)  # the type of pivots
Window = tuple[slice, slice]  # rows and columns of a local array
_SAMPLES = 16  # trailing matrices whose balance is checked
_UNEVEN, _NARROW = 1.25, 4  # limits of busiest share / mean share, and of panels / least number of panels


@lru_cache(maxsize=256)
def is_balanced(layout: Layout, width: int) -> bool:
    """Do the ranks share the trailing matrices about evenly, in panels that are not much narrower than `width`?"""
    rows, cols = layout.distribution.rows, layout.distribution.cols
    (m, n), (pr, pc) = layout.distribution.shape, layout.distribution.grid_shape
    if pr * pc == 1 or min(m, n) <= width or layout.distribution.block == (width, width):  # as in working copies
        return True
    busiest = every = 0
    for start in range(0, min(m, n), max(1, min(m, n) // _SAMPLES)):
        busiest += max(map(rows.window(start, m).count, range(pr))) * max(map(cols.window(start, n).count, range(pc)))
        every += (m - start) * (n - start)
    panels = len(diagonal_panels(rows, cols, width))
    return busiest * pr * pc <= _UNEVEN * every and panels * width <= _NARROW * min(m, n)


def lower_tiles(
    rows: BlockCyclic, cols: BlockCyclic, coords: tuple[int, int], start: int, stop: int, smallest: int, most: int = 0
) -> Iterator[Tile]:
    """Yield tiles, in local indices, that cover a rank's elements on and below the diagonal in columns start to stop.

    Ranges of columns are halved, where a block ends, until no element of a tile is above the diagonal, or until they
    have at most `smallest` columns: tiles below the diagonal are as large as possible, and tiles on the diagonal exceed
    the triangle by less than `smallest` columns.
    most : a tile of at most `most` columns with equal row and column indices in A is not divided: half of it is
        above the diagonal.
    """
    i, j = coords
    first, last = cols.below(start, j), cols.below(stop, j)

    def cover(c0: int, c1: int, r1: int) -> Iterator[Tile]:
        left, right = int(cols.to_global(c0, j)), int(cols.to_global(c1 - 1, j))
        r0, width = rows.below(left, i), c1 - c0
        if r0 >= r1:
            return
        below = r0 + width
        if width <= most and below <= r1 and int(rows.to_global(r0, i)) == left:
            alike = right - left == width - 1 or (rows == cols and i == j)
            if alike and int(rows.to_global(below - 1, i)) == right:
                yield Tile(slice(r0, below), slice(c0, c1), False, True)
                if below < r1:
                    yield Tile(slice(below, r1), slice(c0, c1), True)
                return
        inside = int(rows.to_global(r0, i)) >= right
        if inside or width <= smallest:
            yield Tile(slice(r0, r1), slice(c0, c1), inside)
            return
        mid = _near(cols, j, c0, c1)
        lower = min(r1, rows.below(int(cols.to_global(mid, j)), i))
        yield from cover(c0, mid, lower)
        if lower < r1:
            yield Tile(slice(lower, r1), slice(c0, mid), True)
        yield from cover(mid, c1, r1)

    if first < last:
        yield from cover(first, last, rows.count(i))


def _near(cols: BlockCyclic, j: int, c0: int, c1: int) -> int:
    """Return the end of a block nearest to the middle of local columns c0 to c1; the middle if no block ends inside."""
    mid = (c0 + c1) // 2
    start = int(cols.number(cols.to_global(mid, j))) * cols.block - cols.skip
    ends = [x for x in (cols.below(max(0, start), j), cols.below(min(cols.n, start + cols.block), j)) if c0 < x < c1]
    return min(ends, key=lambda x: abs(x - mid), default=mid)


@dataclass(frozen=True)
class PanelSchedule(Schedule):
    """A panel algorithm on a matrix A: in each step a panel is factored, broadcast, and updates the trailing matrix.

    width  : width of the widest panel.
    mover  : "shared": panels are read in place in node-shared memory; "ring": panels are sent.
    device : the device that holds the matrices; "": the host.
    """

    A: Layout
    width: int
    mover: str
    device: str = field(default="", kw_only=True)
    lookahead = 1
    reaches_idle: ClassVar[bool] = False  # ranks without a position in the grid take part, too
    bound_factor: ClassVar[float] = 0.0

    @property
    def rows(self) -> BlockCyclic:
        return self.A.distribution.rows

    @property
    def cols(self) -> BlockCyclic:
        return self.A.distribution.cols

    @property
    def n(self) -> int:
        return self.cols.n

    @property
    def real_flops(self) -> int:
        """The number of real multiplications in one multiplication of elements of A."""
        return 4 if self.A.dtype.kind == "c" else 1

    def rows_from(self, start: int) -> np.ndarray:
        """Return the number of rows from an index on, in each grid row."""
        return counts_of(self.rows.window(start, self.rows.n))

    def cols_from(self, start: int) -> np.ndarray:
        """Return the number of columns from an index on, in each grid column."""
        return counts_of(self.cols.window(start, self.cols.n))

    def by_rank(self, x: np.ndarray) -> np.ndarray:
        """Return an array of numbers by rank, from an array of numbers by grid position."""
        numbers = np.zeros(1 + max(self.A.rank_map), np.int64)
        numbers[grid_of(self.A)] = x
        return numbers

    def on_grid(self, rank: int | None, words: dict[str, int]) -> Buffers:
        """Return buffers of the type of A, which are empty on ranks without a position in the grid."""
        active = rank is None or rank in self.A.rank_map
        return {name: (size * active, self.A.dtype) for name, size in words.items()}

    @cached_property
    def grid(self) -> RankMap:
        return RankMap.of_layers(self.A.distribution.grid_shape, self.A.rank_map)

    @cached_property
    def steps(self) -> tuple[Panel, ...]:
        """The panels, in the order in which they are factored."""
        return diagonal_panels(self.rows, self.cols, self.width)

    @cached_property
    def widest(self) -> int:
        return max((panel.width for panel in self.steps), default=0)

    def window(self, panel: Panel, i: int) -> Window:
        """Return the local rows, from the panel's first row on, and columns of a panel on its rank in grid row i."""
        down = slice(self.rows.below(panel.start, i), self.rows.count(i))
        return down, self.cols.local_window(panel.start, panel.stop, panel.col)

    def members(self, panel: Panel) -> list[int]:
        """Return the grid rows that take part when a panel is gathered, the panel's own grid row first."""
        return [(panel.row + distance) % self.rows.parts for distance in range(self.rows.parts)]

    def direct(self, source: np.ndarray, target: np.ndarray, words: np.ndarray) -> list[Messages]:
        """Return messages, or reads after signals, from each source to its target in the same grid column."""
        moves = messages(self.mover, source, target, words, self.A.dtype.itemsize, COLS)
        return moves + [signals(source, target[:, None], self.A.dtype.itemsize, COLS)] * self.shared

    def gathered(self, panel: Panel, back: bool = False, beneath: int = 0) -> list[Messages]:
        """Return the messages that gather a panel on its owner; if `back`, those that return it.

        beneath : the number of rows that are added to the rows of each rank.
        """
        owner, *others = grid_of(self.A)[self.members(panel), panel.col]
        words = (self.rows_from(panel.start)[self.members(panel)[1:]] + beneath) * panel.width
        here, there = np.full(len(others), owner), np.array(others, int)
        return self.direct(here, there, words) if back else self.direct(there, here, words)

    @property
    def orders(self) -> dict[str, str]:
        """The memory order of each matrix."""
        return {"A": self.A.order}

    @cached_property
    def shared(self) -> bool:
        return reads(self.mover)

    @property
    def panel_dtype(self) -> np.dtype:
        return self.A.dtype

    def lower_bound_words(self, ranks: int) -> float:
        """Return a lower bound on the words that some rank receives, for any algorithm; 0 where none is known.

        The bound is bound_factor n^2/sqrt(P) for a memory of n^2/P words, less the n^2/P words that a rank holds.  The
        factor is 1/3 for Cholesky and 2/3 for LU: Kwasniewski et al., On the parallel I/O optimality of linear algebra
        kernels, SC 2021.
        """
        return max(0.0, self.bound_factor * self.n**2 / ranks**0.5 - self.n**2 / ranks)

    @property
    def events(self) -> int:
        return 4 * len(self.steps)

    def described(self, name: str) -> tuple[str, str]:
        return self.algorithm, f"{self.A}, {len(self.steps)} panels"


@dataclass(frozen=True)
class OneRankSchedule(PanelSchedule):
    """A routine of LAPACK on a grid of one rank; nothing is sent.

    algorithm : the name of the routine.
    extents   : m, n and k of a product that takes as many flops, 2 m n k.
    passes    : how often the matrix is read from memory for one half of the flops; 0: all flops are in products.
    helpers   : the number of ranks on whose cores the routine runs, while all of them but one wait.
    """

    algorithm: str = field(kw_only=True)
    extents: tuple[float, float, float] = field(kw_only=True)
    passes: int = field(default=0, kw_only=True)
    helpers: int = field(default=1, kw_only=True)
    lookahead = 0

    @property
    def flops(self) -> int:
        return int(2 * self.real_flops * prod(self.extents))

    @property
    def steps(self) -> tuple[Panel, ...]:
        return ()

    @property
    def events(self) -> int:
        return 1

    def rounds(self) -> Iterator[Round]:
        rows, cols = self.by_rank(self.rows_from(0)[:, None]), self.A.distribution.shape[1]
        work = [WorkPiece((rows, cols, self.passes / self.helpers), MEMORY)] if self.passes else []
        share = (0.5 if self.passes else 1) / self.helpers
        yield Round([], work + products(grid_of(self.A), *self.extents, share=share))

    def buffers(self, rank: int | None) -> Buffers:
        return {}


def window_gathering(layout: Layout, rows: tuple[int, int], cols: tuple[int, int]) -> Collective:
    """Return the all-gather of a window of a matrix, rank by rank.   rows, cols : (start, stop) of the window."""
    both = layout.distribution.rows.window(*rows), layout.distribution.cols.window(*cols)
    words = np.outer(*map(counts_of, both))
    return Collective("all_gather", "bruck", layout.rank_map, tuple(words.ravel().tolist()), layout.dtype)


def carried(
    mover: str, lines: np.ndarray, root: int, words: np.ndarray, itemsize: int, along: str, ready: bool = False
) -> list[Messages]:
    """Return the messages that broadcast words[x] words along the ranks lines[x], from position `root` in lines[x].

    With a mover that reads, these are signals and reads.
    ready : the source is complete already, so readers need no signal before they read.
    """
    moves = broadcast(mover, lines, root, words, itemsize, along)
    if reads(mover) and not ready:
        there = lines[words > 0]
        moves.append(signals(there[:, root], np.delete(there, root, axis=1), itemsize, along))
    return moves


def panel_slabs(rows: BlockCyclic, panel: Panel) -> dict[int, slice]:
    """Return, for each grid row, the slice of the owner's buffer that holds its rows from the panel's first row on.

    The owner's local rows are first, so that the diagonal block is on top; the rows of a grid row keep their order.
    """
    slabs, at = dict[int, slice](), 0
    for distance in range(rows.parts):
        part = (panel.row + distance) % rows.parts
        rest = rows.count(part) - rows.below(panel.start, part)
        slabs[part] = slice(at, at + rest)
        at += rest
    return slabs


def gathered_rows(rows: BlockCyclic, panel: Panel) -> np.ndarray:
    """Return the global row index of each row in the buffer of the panel's owner."""
    parts = panel_slabs(rows, panel)
    return np.concatenate(
        [rows.to_global(rows.below(panel.start, i) + np.arange(x.stop - x.start), i) for i, x in parts.items()]
    )
