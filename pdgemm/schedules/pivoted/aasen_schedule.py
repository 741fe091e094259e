"""The schedule of Aasen's factorisation of a Hermitian or symmetric matrix in blocks, P A P^T = L T L^H."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from pdgemm.schedules.mover_registry import RING
from pdgemm.schedules.panels.panel_schedule import Panel, PanelSchedule, carried
from pdgemm.schedules.rounds import COLS, Messages, Round, counts_of, grid_of, messages, products
from pdgemm.schedules.schedule import Buffers

INDEX = np.dtype(np.int64)


@dataclass(frozen=True)
class AasenSchedule(PanelSchedule):
    """Each rank of a grid of one column updates its rows of a block column; the first rank factors it, and returns it.

    No row moves before the end: a rank computes with those of its rows that no earlier panel chose.

    order : the row numbers of A in the order in which panels choose them; None: the order is not known, and a random
        order stands for it.
    """

    order: tuple[int, ...] | None = field(default=None, kw_only=True, repr=False)
    algorithm = "aasen"
    lookahead = 0
    bound_factor = 1 / 3

    @property
    def flops(self) -> int:
        return (4 if self.A.dtype.kind == "c" else 1) * self.n**3 // 3

    @cached_property
    def steps(self) -> tuple[Panel, ...]:
        """The block columns: all have `width` columns but the last, which may have fewer."""
        ends = [*range(0, self.n, self.width), self.n]
        return tuple(Panel(start, stop, 0, 0) for start, stop in pairwise(ends))

    @cached_property
    def chosen(self) -> np.ndarray:
        """The order of the rows, or a random one if it is not known; the first block keeps its rows."""
        if self.order is not None:
            return np.array(self.order, INDEX)
        first, rest = np.split(np.arange(self.n), [self.width])
        return np.concatenate([first, np.random.default_rng(0).permutation(rest)])

    def ends(self, number: int) -> tuple[Panel, int]:
        """Return a step, and the last column of the step that follows it."""
        return self.steps[number], min(self.n, self.steps[number].stop + self.width)

    def rounds(self) -> Iterator[Round]:
        grid, size, rows = grid_of(self.A), self.A.dtype.itemsize, self.A.distribution.rows
        owners, left, line = rows.owner(self.chosen), counts_of(rows), grid.T
        for number in range(len(self.steps)):
            (start, stop, *_), following = self.ends(number)
            w, then, inner = stop - start, following - stop, max(0, stop - self.width)
            here = np.bincount(owners[start:stop], minlength=rows.parts)
            sent = list[Messages]()
            for part in range(rows.parts) if number else ():
                sent += carried(RING.name, line, part, here[[part]] * inner, size, COLS)
            yield Round(sent, products(grid, left[:, None], w, inner))
            root = np.zeros(grid.shape, int)
            root[0, 0] = self.n - stop
            gathered = messages(RING.name, line[0, 1:], np.full(rows.parts - 1, line[0, 0]), left[1:] * w, size, COLS)
            yield Round(gathered, products(grid, root, w, w + (w + 1) // 2))
            left = left - here
            sent = messages(RING.name, np.full(rows.parts - 1, line[0, 0]), line[0, 1:], left[1:] * then, size, COLS)
            sent += carried(RING.name, line, 0, np.array([w * (following - start)]), size, COLS)
            sent += carried(RING.name, line, 0, np.array([then]), INDEX.itemsize, COLS)
            yield Round(sent, products(grid, left[:, None], w, w + 2 * then))

    def buffers(self, rank: int | None) -> Buffers:
        (m_loc, n), w, dtype = self.A.local_shape(rank), self.widest, self.A.dtype
        root = rank in (None, self.A.rank(0, 0))
        return {
            "L": (m_loc * n, dtype),
            "L T": (m_loc * n, dtype),
            "rows of L": (w * n, dtype),
            "arriving rows": (w * n, dtype),
            "panel": (m_loc * w, dtype),
            "blocks of T": (2 * w * w, dtype),
            "gathered": (n * w * root, dtype),
            "factored": (2 * n * w * root, dtype),
        }
