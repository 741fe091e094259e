"""Cannon's algorithm, as a value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pdgemm.instrument.recorder import Traffic, Transfer
from pdgemm.model.formulas import MESSAGE_BYTES
from pdgemm.schedules.product import Buffers, Product
from pdgemm.schedules.rounds import Round, counts_of, grid_of, messages, on_grid
from pdgemm.schedules.steps import TorusStep, cannon_neighbours, cannon_steps


@dataclass(frozen=True)
class Cannon(Product):
    """C stationary; A and B lie skewed, as `skewed_places` says, and are shifted by one in every step.

    C lies on a Pr x Pc grid where Pr divides Pc; C's row map is A's, C's column map is B's.  On a square grid
    A's column map is B's row map, block-cyclic or not.  Else the two have the same blocks, at most Pc of them.
    """

    algorithm = "cannon"

    @property
    def at_hand(self) -> bool:
        return True

    @property
    def panels(self) -> int:
        return self.C.distribution.grid_shape[1] if self.mnk[2] else 0

    @property
    def widest(self) -> int:
        return self.A.distribution.cols.largest

    def steps(self, rank: int) -> list[TorusStep]:
        here = self.C.coords(rank)
        return cannon_steps(self.C.distribution.grid_shape, here) if self.mnk[2] and here[0] >= 0 else []

    @property
    def total_words(self) -> int:
        m, n, k = self.mnk
        pr, pc = self.C.distribution.grid_shape
        return m * k * (pc - 1) + k * n * (pr - 1)

    @cached_property
    def widths(self) -> tuple[np.ndarray, np.ndarray]:
        """Inner indices in each part of A's columns and of B's rows."""
        a, b = self.A.distribution.cols, self.B.distribution.rows
        return np.array([a.count(x) for x in range(a.parts)]), np.array([b.count(x) for x in range(b.parts)])

    def rounds(self) -> Iterator[Round]:
        """A shift of A, every Pc / Pr steps one of B too, and a product."""
        if not self.mnk[2]:
            return
        grid, (pr, pc) = grid_of(self.C), self.C.distribution.grid_shape
        i, j = np.indices(grid.shape)
        steps = np.array([[[*step] for step in self.steps(rank)] for rank in grid.ravel().tolist()])
        held_a, held_b = steps.reshape(pr, pc, pc, 2).transpose(3, 2, 0, 1)  # by step
        width_a, width_b = self.widths
        high, wide = counts_of(self.C.distribution.rows), counts_of(self.C.distribution.cols)
        for number in range(pc):
            shifts = []
            if number:
                source = np.array([cannon_neighbours((pr, pc), x, number - 1)[1] for x in range(pc)])
                words = high[:, None] * width_a[held_a[number]]
                shifts += messages("shift", grid[i, source[j]], grid, words, self.A.dtype.itemsize)
                if number % (pc // pr) == 0:
                    words = wide[None, :] * width_b[held_b[number]]
                    shifts += messages("shift", grid[(i + 1) % pr, j], grid, words, self.B.dtype.itemsize)
            yield Round(shifts, on_grid(grid, high[:, None], wide[None, :], width_a[held_a[number]]))

    def transfers(self, rank: int) -> list[Transfer]:
        """Every part of A in the rank's row but the first comes in, and every one but the last goes out; so of B."""
        steps, (row, col, _) = self.steps(rank), self.grid.strides
        if not steps:
            return []
        m_loc, n_loc = self.C.local_shape(rank)
        a, b = self.widths
        held_b = [step.b for step in steps[:: len(a) // len(b)]]
        along_row = _shifts(m_loc * a[[step.a for step in steps]], self.A.dtype)
        along_col = _shifts(n_loc * b[held_b], self.B.dtype)
        return [
            Transfer("shift", along_row, self.A.dtype.itemsize, row, len(a)),
            Transfer("shift", along_col, self.B.dtype.itemsize, col, len(b)),
        ]

    def local_shape(self, rank: int) -> tuple[int, int, int]:
        return *self.C.local_shape(rank), self.mnk[2]

    @property
    def slots(self) -> int:
        """Blocks of each operand held at once: one in use and one that is filled."""
        return 2 + self.spare

    def staging(self, rank: int | None) -> Buffers:
        buffers = self.buffers(rank)
        return {"staged A": buffers["panels of A"], "staged B": buffers["panels of B"]}

    def buffers(self, rank: int | None) -> Buffers:
        """What does not move needs no buffers."""
        m_loc, n_loc = self.C.local_shape(rank)
        (a, b), (pr, pc) = self.widths, self.C.distribution.grid_shape
        wide_a, wide_b = int(a.max()), int(b.max())
        convert = min(self.width, wide_a)
        sums = 0 if self.sums_in_c or not self.mnk[2] else m_loc * n_loc
        return {
            "panels of A": ((pc > 1) * self.slots * wide_a * m_loc, self.A.dtype),
            "panels of B": ((pr > 1) * self.slots * wide_b * n_loc, self.B.dtype),
            "converted A": (self.converts(self.A, self.C.order) * convert * m_loc, self.panel_dtype),
            "converted B": (self.converts(self.B, self.C.order) * convert * n_loc, self.panel_dtype),
            "sums": (sums, self.accumulate),
            "update": self._update(sums),
            "exact": (self._exact(m_loc, n_loc), self.panel_dtype),
        }


def _shifts(words: np.ndarray, dtype: np.dtype) -> Traffic:
    """Traffic of a rank that holds blocks of so many words in turn."""
    messages = -(-words // (MESSAGE_BYTES // dtype.itemsize))
    sent, received = int(words[:-1].sum()), int(words[1:].sum())
    return Traffic(sent, received, int(messages[:-1].sum()), int(messages[1:].sum()))
