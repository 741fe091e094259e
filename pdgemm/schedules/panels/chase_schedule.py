"""The schedules of the bulge chase of a band, pipelined over the ranks, and of its back-transformation."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

from pdgemm.schedules.collectives.collective import Collective
from pdgemm.schedules.mover_registry import RING
from pdgemm.schedules.panels.panel_schedule import PanelSchedule
from pdgemm.schedules.rounds import LINE, MEMORY, Messages, Round, WorkPiece, grid_of, products
from pdgemm.schedules.schedule import Buffers

MOST_SWEEPS = 8  # in a group: more sweeps save messages, and fewer let the last rank start earlier
_PASSES = 6  # memory passes over a block in a task: two blocks are reflected, one of them from both sides


@dataclass(frozen=True)
class Chase:
    """The tasks of a chase, grouped into tiles: the rank of each tile, and the columns that neighbours exchange.

    n, b   : order of the matrix, and number of diagonals below its main one.
    ranks  : the number of ranks, in a line.   g, T : `group` and `breadth`.

    Task t of sweep s reflects rows s + 1 + t b to s + (t + 1) b.  Group G has the sweeps s = G g + r, 0 <= r < g; of
    each of them tile (G, x) has the tasks x T - r to (x + 1) T - r - 1.  So a tile depends only on the tiles
    (G, x - 1), (G - 1, x) and (G - 1, x + 1).  A rank has the tiles of consecutive x, in all groups; all ranks have
    about the same number of tasks.
    """

    n: int
    b: int
    ranks: int

    @property
    def group(self) -> int:
        return max(1, min(MOST_SWEEPS, self.n // (8 * self.b * self.ranks)))

    @property
    def breadth(self) -> int:
        """T, the tasks of a sweep in a tile: enough that a tile shares columns only with adjacent tiles."""
        return self.group + 2

    @property
    def groups(self) -> int:
        return -(-max(0, self.n - 1) // self.group)

    def tasks(self, s: int) -> int:
        """Return the number of tasks of a sweep."""
        return max(0, -(-(self.n - 1 - s) // self.b))

    @cached_property
    def cuts(self) -> list[int]:
        """The first x of the tiles of each rank, beginning with 0; the last entry is the number of different x."""
        number = -(-(self.tasks(0) + self.group - 1) // self.breadth)
        sweeps = np.maximum(self.n - np.arange(number) * self.breadth * self.b, 1)  # sweeps with tasks at x, roughly
        wanted = np.arange(1, self.ranks) * sweeps.sum() / self.ranks
        inner = np.searchsorted(np.cumsum(sweeps) - sweeps / 2, wanted)
        return [0, *np.maximum(inner, min(1, number)).tolist(), number]

    def part(self, G: int, x: int) -> list[tuple[int, range]]:
        """Return the tasks of a tile, as pairs of a sweep and its tasks in this tile."""
        tile, T = list[tuple[int, range]](), self.breadth
        for r in range(min(self.group, self.n - 1 - G * self.group)):
            s = G * self.group + r
            tasks = range(max(0, x * T - r), min(self.tasks(s), (x + 1) * T - r))
            if tasks:
                tile.append((s, tasks))
        return tile

    @lru_cache(maxsize=1 << 12)  # noqa: B019
    def count(self, G: int, x: int) -> int:
        """Return the number of tasks of a tile; 0 also where there is no such tile."""
        if not (0 <= G < self.groups and 0 <= x < self.cuts[-1]):
            return 0
        return sum(len(tasks) for _, tasks in self.part(G, x))

    def counts(self, G: int) -> list[int]:
        """Return the number of tasks of group G on each rank."""
        return [sum(self.count(G, x) for x in range(lo, hi)) for lo, hi in pairwise(self.cuts)]

    def tiles(self, rank: int) -> Iterator[tuple[int, int]]:
        """Yield the tiles of a rank that have tasks, in the order in which it carries them out."""
        for G in range(self.groups):
            for x in range(*self.cuts[rank : rank + 2]):
                if self.count(G, x):
                    yield G, x

    def neighbours(self, rank: int, x: int) -> tuple[int | None, int | None]:
        """Return the ranks of the tiles x - 1 and x + 1; None if this is `rank` itself, or if there is no such tile."""
        before, behind = (bisect_right(self.cuts, at) - 1 for at in (x - 1, x + 1))
        return before if 0 <= before < rank else None, behind if rank < behind < self.ranks else None

    def down(self, G: int, x: int) -> slice:
        """Return the columns of the band that both tile (G, x - 1) and tile (G, x) change."""
        return self._columns((G + 1) * self.group, G * self.group, x)

    def up(self, G: int, x: int) -> slice:
        """Return the columns of the band that both tile (G, x) and tile (G + 1, x - 1) change."""
        return self._columns((G + 1) * self.group, (G + 1) * self.group, x)

    def _columns(self, first: int, last: int, x: int) -> slice:
        at, b = x * self.breadth, self.b
        return slice(max(0, min(self.n, first + (at - self.group) * b)), min(self.n, last + 1 + at * b))


@dataclass(frozen=True)
class ChaseSchedule(PanelSchedule):
    """The bulge chase of a banded matrix: ranks carry out their tiles, and exchange columns that two neighbours change.

    A      : the layout of the banded matrix; all ranks have the whole band on entry.
    width  : the number of diagonals below the main one.
    """

    algorithm = "chase"
    lookahead = 0

    @cached_property
    def chase(self) -> Chase:
        return Chase(self.n, self.width, len(self.A.rank_map))

    @property
    def widest(self) -> int:
        return self.width

    @property
    def flops(self) -> int:
        return self.real_flops * 6 * self.n**2 * self.width

    @property
    def events(self) -> int:
        return 2 * self.chase.groups

    def rounds(self) -> Iterator[Round]:
        chase, ranks, high, size = self.chase, np.array(self.A.rank_map), 3 * self.width + 1, self.A.dtype.itemsize
        for G in range(chase.groups):
            sent = list[tuple[int, int, int]]()
            for p, x in enumerate(chase.cuts[:-1]):
                before = chase.neighbours(p, x)[0]
                if chase.cuts[p + 1] == x or before is None or not chase.count(G, x):
                    continue
                columns = chase.down(G, x)
                sent += [
                    (before, p, (columns.stop - columns.start) * high),
                    (before, p, chase.group * (self.width + 1)),
                ]
                if chase.count(G + 1, x - 1):
                    columns = chase.up(G, x)
                    sent.append((p, before, (columns.stop - columns.start) * high))
            source, target, words = np.array(sent, np.int64).reshape(-1, 3).T
            moves = [Messages(RING.name, ranks[source], ranks[target], words, size, LINE)] if sent else []
            tasks = self.by_rank(np.reshape(chase.counts(G), self.grid.shape))
            yield Round(moves, [WorkPiece((tasks, self.width**2, _PASSES), MEMORY)])

    @cached_property
    def task_counts(self) -> np.ndarray:
        """The number of tasks of each group on each rank."""
        return np.array([self.chase.counts(G) for G in range(self.chase.groups)]).reshape(-1, self.chase.ranks)

    def buffers(self, rank: int | None) -> Buffers:
        return self.on_grid(rank, {"last reflections": 2 * self.chase.group * (self.width + 1)})

    def kept(self, rank: int) -> int:
        """Return the words of the reflections that a rank carries out and stores."""
        tasks = self.task_counts.sum(axis=0)
        return int(tasks[self.A.rank_map.index(rank)]) * (self.width + 1) if rank in self.A.rank_map else 0


@dataclass(frozen=True)
class BackChaseSchedule(PanelSchedule):
    """The reflections of a chase, applied to a matrix X (n, k) with each column on one rank.

    A      : the layout of X, on a grid of one row.   width : the number of diagonals of the band below the main one.
    The reflections of about 32 sweeps at a time, the last sweeps first, are all-gathered; each rank applies them to its
    columns by products.
    """

    chased: ChaseSchedule = field(kw_only=True)
    algorithm = "back chase"
    lookahead = 0

    @property
    def flops(self) -> int:
        n, k = self.A.distribution.shape
        return self.real_flops * 2 * n**2 * k

    @property
    def widest(self) -> int:
        return self.width

    @property
    def joined(self) -> int:
        """The number of groups of the chase that are applied together."""
        return max(1, -(-32 // self.chased.chase.group))

    @property
    def sweeps(self) -> int:
        """The number of sweeps that are applied together."""
        return self.joined * self.chased.chase.group

    @property
    def sections(self) -> list[range]:
        """The groups that are applied together, in the order in which they are applied."""
        groups = self.chased.chase.groups
        return [range(G, min(groups, G + self.joined)) for G in range(0, groups, self.joined)][::-1]

    @property
    def events(self) -> int:
        return 2 * len(self.sections)

    def gathering(self, section: range) -> Collective:
        """Return the all-gather of the reflections of some groups."""
        counts = self.chased.task_counts[section.start : section.stop].sum(axis=0) * (self.width + 1)
        return Collective("all_gather", "bruck", self.chased.A.rank_map, tuple(counts.tolist()), self.chased.A.dtype)

    def rounds(self) -> Iterator[Round]:
        for section in self.sections:
            tasks = int(self.chased.task_counts[section.start : section.stop].sum())
            yield from self.gathering(section).rounds()
            yield Round([], products(grid_of(self.A), 2 * tasks, self.cols_from(0)[None], self.width + self.sweeps))

    def buffers(self, rank: int | None) -> Buffers:
        chase, n_loc = self.chased.chase, self.A.local_shape(rank)[1]
        sweeps = self.sweeps
        gathered = max((self.gathering(x).words for x in self.sections), default=0)
        blocks = (-(-chase.n // max(1, chase.b))) * (self.width + sweeps) * sweeps
        return self.on_grid(rank, {"gathered": gathered, "blocks": blocks, "products": 2 * sweeps * n_loc})
