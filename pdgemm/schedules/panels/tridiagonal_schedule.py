"""The schedule of the direct reduction of a Hermitian matrix to tridiagonal form, A = Q T Q^H."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from math import lcm

import numpy as np

from pdgemm.grids.distribution import BlockCyclic
from pdgemm.schedules.mover_registry import RING
from pdgemm.schedules.panels.householder_schedule import cuts
from pdgemm.schedules.panels.panel_schedule import Panel, PanelSchedule, diagonal_panels
from pdgemm.schedules.rounds import LINE, MEMORY, Messages, Round, WorkPiece, grid_of, messages, products
from pdgemm.schedules.schedule import Buffers

NOTES = 2  # numbers appended to a partial sum: its product with v, and its element in the next column's row


@dataclass(frozen=True)
class TridiagonalSchedule(PanelSchedule):
    """For each column, v is formed, A v is summed over the ranks, and w is formed; a panel updates A -= V W^H + W V^H.

    All ranks have v, V and W.  The rows from a panel's start on are cut into slices, one for each rank.  In the rows of
    its slice, a rank receives the panel, sums A v, and forms w and the next column: each number is computed by one
    rank, so that all ranks have the same v.  For each column there are two exchanges among all ranks: partial sums A v
    are scattered, and slices of w and of the next column are gathered.

    A is in square blocks from grid position (0, 0) on, and column-major.  The blocks have q classes, q = lcm(Pr, Pc):
    block x is of class x mod q.  A rank has all elements of some classes of rows in some classes of columns; where both
    classes are the same, they form a Hermitian matrix.  The entries of vectors are ordered class by class, the class of
    the panel first, so that the rows of the panel's diagonal block are the first ones.

    reduced : the number of columns that are reduced, at the end of a block or of the matrix.
    """

    reduced: int = field(kw_only=True)
    algorithm = "tridiagonal"
    lookahead = 0
    exposed_buffers = ("columns", "sums", "slices")

    @property
    def flops(self) -> int:
        return self.real_flops * 4 * (self.n**3 - (self.n - self.reduced) ** 3) // 3

    @property
    def events(self) -> int:
        return 4 * self.reduced * len(self.ranks)

    @cached_property
    def steps(self) -> tuple[Panel, ...]:
        return diagonal_panels(self.rows, self.cols, self.width, self.reduced)

    @cached_property
    def ranks(self) -> list[int]:
        """The ranks in the order of their slices."""
        return grid_of(self.A).ravel().tolist()

    @cached_property
    def by_class(self) -> BlockCyclic:
        """The indices of each class."""
        return BlockCyclic(self.n, self.rows.block, lcm(*self.grid.shape))

    def slices(self, panel: Panel) -> list[slice]:
        """Return the slice of each rank in the vectors of a panel, whose entries are ordered by class."""
        return as_slices(cuts(self.n - panel.start, len(self.ranks)))

    @cached_property
    def segments(self) -> dict[Panel, dict[int, slice]]:
        """The slice of each class in the vectors of a panel, which hold the indices from the panel's start on."""
        segments, q = {}, self.by_class.parts
        for panel in self.steps:
            first = int(self.by_class.owner(panel.start))
            order = [(first + distance) % q for distance in range(q)]
            counts = [self.by_class.count(c) - self.by_class.below(panel.start, c) for c in order]
            segments[panel] = dict(zip(order, as_slices([*accumulate(counts, initial=0)])))
        return segments

    def place(self, panel: Panel, index: int) -> int:
        """Return the place of an index in the vectors of a panel."""
        c = int(self.by_class.owner(index))
        return self.segments[panel][c].start + self.by_class.below(index, c) - self.by_class.below(panel.start, c)

    def local_classes(self, part: int, parts: int) -> dict[int, slice]:
        """Return the local indices of each class, class by class, on a grid row or grid column."""
        own = [*range(part, self.by_class.parts, parts)]
        return dict(zip(own, as_slices([*accumulate(map(self.by_class.count, own), initial=0)])))

    def pieces(self, panel: Panel, i: int, part: slice) -> list[tuple[slice, slice]]:
        """Return pairs: a run of local rows of grid row i in `part` of a vector, and its place in the vector."""
        segments, pieces = self.segments[panel], []
        for c, local in self.local_classes(i, self.grid.shape[0]).items():
            start, stop = max(part.start, segments[c].start), min(part.stop, segments[c].stop)
            behind = local.stop - segments[c].stop  # both end with the last index of the class
            if start < stop:
                pieces.append((slice(start + behind, stop + behind), slice(start, stop)))
        return pieces

    def chunks(self, panel: Panel, i: int) -> list[slice]:
        """Return, for each slice, a part of the buffer "columns" of a rank in grid row i.

        The part holds the local rows of the panel that are in the slice.
        """
        heights = [sum(x.stop - x.start for _, x in self.pieces(panel, i, part)) for part in self.slices(panel)]
        return as_slices([panel.width * x for x in accumulate(heights, initial=0)])

    def products(self, panel: Panel) -> int:
        """Return the number of products A v in a panel: one for each column, but none for the last column of A."""
        return panel.width - (panel.stop == self.n)

    def notes(self, panel: Panel) -> list[slice]:
        """Return each rank's part of the buffer "sums": its slice of the sum, and `NOTES` numbers of the whole sum."""
        sizes = [x.stop - x.start + NOTES for x in self.slices(panel)]
        return as_slices([*accumulate(sizes, initial=0)])

    def rounds(self) -> Iterator[Round]:
        grid, size = grid_of(self.A), len(self.ranks)
        every, where = np.ones((size, size), np.int64), grid.ravel()
        for panel in self.steps:
            m, w, times = self.n - panel.start, panel.width, self.products(panel)
            lengths = np.diff(cuts(m, size))
            from_owners = np.zeros((size, size), np.int64)
            for i, owner in enumerate(grid[:, panel.col]):
                words = [x.stop - x.start for x in self.chunks(panel, i)]
                from_owners[np.flatnonzero(where == owner)[0]] = words
            yield Round(self._swapped(from_owners, 1), hidden=False)
            heights = self.by_rank(self.rows_from(panel.start)[:, None])
            widths = self.by_rank((self.cols_from(panel.start)[None, :] + 1) // 2)
            passes = [WorkPiece((heights, widths, times), MEMORY)]
            yield Round(self._swapped(every * (lengths + NOTES), times), passes, hidden=False)
            yield Round(self._swapped(every * (2 * lengths + 1)[:, None], w + (panel.stop < self.n)), hidden=False)
            m_loc, n_loc = self.rows_from(panel.stop)[:, None], self.cols_from(panel.stop)[None, :]
            yield Round([], products(grid, m_loc, (n_loc + 1) // 2, 2 * w))

    def _swapped(self, words: np.ndarray, times: int) -> list[Messages]:
        """Return the messages, or signals and reads, of `times` exchanges.

        words : words[a, b] are sent from ranks[a] to ranks[b].
        """
        if len(self.ranks) == 1:
            return []
        from_, to = np.nonzero(~np.eye(len(self.ranks), dtype=bool))
        where = np.array(self.ranks)
        source, target, words = (np.tile(x, times) for x in (where[from_], where[to], words[from_, to]))
        itemsize = self.A.dtype.itemsize
        moves = messages(self.mover, source, target, words, itemsize, LINE)
        if self.shared:
            moves.append(Messages(RING.name, source, target, np.zeros(source.size, np.int64), itemsize, LINE))
        return moves

    def buffers(self, rank: int | None) -> Buffers:
        n, w, size = self.n, self.widest, len(self.ranks)
        part, others = -(-n // size), (size - 1) * (not self.shared)
        words = {
            "panel": 2 * w * n,  # V and W
            "exchanged panel": 2 * w * n,  # W and V
            "own columns": w * part,
            "vectors": 3 * n,
            "columns": w * self.rows.largest * (size > 1),
            "sums": n + NOTES * size,
            "sum": part + NOTES,
            "slices": 2 * part + 1,
            "columns of others": w * part * (others > 0),
            "sums of others": others * (part + NOTES),
            "slices of others": others * (2 * part + 1),
        }
        return self.on_grid(rank, words if self.reduced else dict.fromkeys(words, 0))


def as_slices(bounds: list[int]) -> list[slice]:
    """Return the slices between successive bounds."""
    return [slice(*both) for both in pairwise(bounds)]
