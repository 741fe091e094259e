"""The schedule of Cannon's algorithm."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pdgemm.instrument.recorder import Traffic, Transfer
from pdgemm.schedules.formulas import LARGEST_MESSAGE_BYTES
from pdgemm.schedules.mover_registry import RING
from pdgemm.schedules.products.product import PANELS_STAGED, Collective, Product, alike
from pdgemm.schedules.rounds import COLS, ROWS, Messages, Round, counts_of, grid_of, messages, products, signals
from pdgemm.schedules.schedule import Buffers
from pdgemm.schedules.steps import TorusStep, cannon_neighbours, cannon_steps, skewed_rank_maps
from pdgemm.support.members import remembered


@dataclass(frozen=True)
class Cannon(Product):
    """C is stationary; A and B start skewed (`skewed_rank_maps`); A is shifted every step, B every Pc / Pr steps.

    C has the row distribution of A and the column distribution of B, on a Pr x Pc grid where Pr divides Pc.  On a
    square grid, the columns of A are distributed as the rows of B, block-cyclic or not.  On other grids, both have the
    same block size, and at most Pc blocks.

    mover : "shift": blocks are sent; a mover that reads: each rank copies its next block from its neighbour's memory.
    lookahead : with 1 or less, whole blocks are shifted; with more, blocks are shifted in panels, so that the first
        panel is multiplied, and sent on, while the other panels arrive.
    """

    algorithm = "cannon"
    staged_names = PANELS_STAGED
    first_panel_is_local = True

    @property
    def collective(self) -> Collective:
        return "allgather" if 1 in self.C.distribution.grid_shape else ""

    def fits(self, size: int) -> bool:
        a, b, c = (x.distribution for x in (self.A, self.B, self.C))
        pr, pc = c.grid_shape
        inner_fits = alike(a.cols, b.rows) if pr == pc else a.cols.block == b.rows.block and not pc % pr
        skewed = a.grid_shape == b.grid_shape == c.grid_shape and inner_fits
        there = skewed and (self.A.rank_map, self.B.rank_map) == skewed_rank_maps(self.C.rank_map, (pr, pc))
        return alike(a.rows, c.rows) and alike(b.cols, c.cols) and there

    @cached_property
    def nothing_travels(self) -> bool:
        return self.C.distribution.grid_shape == (1, 1)

    @property
    def exposed_buffers(self) -> tuple[str, ...]:
        return ("panels of A", "panels of B") if self.transport.shared else ()

    @property
    def panels(self) -> int:
        a, _ = self.widths
        return self.C.distribution.grid_shape[1] * int(self._pieces(a.max())) if self.mnk[2] else 0

    @property
    def widest(self) -> int:
        a, _ = self.widths
        return int((-(-a // np.maximum(1, self._pieces(a)))).max())

    @property
    def in_blocks(self) -> bool:
        """Are blocks shifted whole, and not in panels?"""
        return self.lookahead <= 1 or self.nothing_travels

    def _pieces(self, columns: Any) -> Any:
        """Return the number of panels in which columns of A are shifted.

        It is 1 if blocks are shifted whole; otherwise it is the least number of panels of width `_panel_width`.
        """
        return np.minimum(1, columns) if self.in_blocks else -(-columns // self._panel_width)

    @cached_property
    def _panel_width(self) -> int:
        m_loc, n_loc = self.C.local_shape(None)
        return self._message_width(self.width, (m_loc, self.A.dtype), (n_loc, self.B.dtype))

    @remembered
    def cuts(self, part: int) -> list[tuple[int, int]]:
        """Return the panels of a part of A, as ranges of columns: they are shifted and multiplied one by one."""
        width = int(self.widths[0][part])
        pieces = int(self._pieces(width))
        return [(width * x // pieces, width * (x + 1) // pieces) for x in range(pieces)]

    @remembered
    def cuts_of_b(self, part: int) -> list[tuple[int, int]]:
        """Return the panels of a part of B, as ranges of rows: they match the panels of A, or one panel is the part."""
        a, b = self.A.distribution.cols, self.B.distribution.rows
        if self.in_blocks:
            return [(0, int(self.widths[1][part]))]
        parts = enumerate(range(part, a.parts, b.parts))
        return [(number * a.block + lo, number * a.block + hi) for number, x in parts for lo, hi in self.cuts(x)]

    def steps(self, rank: int) -> list[TorusStep]:
        here = self.C.coords(rank)
        return cannon_steps(self.C.distribution.grid_shape, here) if self.mnk[2] and here[0] >= 0 else []

    @cached_property
    def widths(self) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of inner indices in each part of A's columns and of B's rows."""
        a, b = self.A.distribution.cols, self.B.distribution.rows
        return np.array([a.count(x) for x in range(a.parts)]), np.array([b.count(x) for x in range(b.parts)])

    def rounds(self) -> Iterator[Round]:
        """Yield the steps: a shift of A, a shift of B (of panels, or of a block every Pc / Pr steps), and a product."""
        if not self.mnk[2]:
            return
        size_a, size_b = self.A.dtype.itemsize, self.B.dtype.itemsize
        grid, (pr, pc) = grid_of(self.C), self.C.distribution.grid_shape
        i, j = np.indices(grid.shape)
        steps = np.array([[[*step] for step in self.steps(rank)] for rank in grid.ravel().tolist()])
        held_a, held_b = steps.reshape(pr, pc, pc, 2).transpose(3, 2, 0, 1)  # parts, by step and position
        (_, width_b), t = self.widths, pc // pr
        cuts = np.zeros((self.panels // pc, pc), int)  # widths of the panels of each part of A
        for part in range(pc):
            cuts[: len(self.cuts(part)), part] = [hi - lo for lo, hi in self.cuts(part)]
        m_loc, n_loc = counts_of(self.C.distribution.rows), counts_of(self.C.distribution.cols)
        for number, cut in itertools.product(range(pc), cuts):
            shifts, width = [], cut[held_a[number]]
            if number:
                source = np.array([cannon_neighbours((pr, pc), x, number - 1)[1] for x in range(pc)])
                shifts += self._moved(number, grid[i, source[j]], grid, m_loc[:, None] * width, size_a, ROWS)
            if number >= t and not (self.in_blocks and number % t):
                words = n_loc[None, :] * (width_b[held_b[number]] if self.in_blocks else width)
                shifts += self._moved(number // t, grid[(i + 1) % pr, j], grid, words, size_b, COLS)
            yield Round(shifts, products(grid, m_loc[:, None], n_loc[None, :], width, self.formed.shares))

    def _moved(
        self, shift: int, source: np.ndarray, target: np.ndarray, words: np.ndarray, itemsize: int, along: str
    ) -> list[Messages]:
        """Return the messages of panels in a shift, or the reads, and the signals to the reader and back."""
        moved = messages(self.mover, source, target, words, itemsize, along)
        if self.transport.shared and shift > 1:  # initial blocks are read without signals
            ends = moved[0].source, moved[0].target
            moved.append(signals(np.concatenate(ends), np.concatenate(ends[::-1])[:, None], itemsize, along))
        return moved

    def transfers(self, rank: int) -> list[Transfer]:
        """Return the traffic: a rank sends all parts of A but its last, receives all but its first; likewise for B."""
        steps, strides = self.steps(rank), self.grid.strides
        if not steps:
            return []
        m_loc, n_loc = self.C.local_shape(rank)
        a, b = self.widths
        pieces = self._pieces(a)
        held_a, held_b = [step.a for step in steps], [step.b for step in steps[:: len(a) // len(b)]]
        along_row = self._shifts((m_loc * a)[held_a], pieces[held_a], self.A.dtype)
        along_col = self._shifts((n_loc * b)[held_b], pieces.reshape(-1, len(b)).sum(axis=0)[held_b], self.B.dtype)
        return [
            Transfer(kind, traffic, operand.dtype.itemsize, strides[along], length)
            for shifts, operand, along, length in ((along_row, self.A, ROWS, len(a)), (along_col, self.B, COLS, len(b)))
            for kind, traffic in shifts.items()
        ]

    def _shifts(self, words: np.ndarray, pieces: np.ndarray, dtype: np.dtype) -> dict[str, Traffic]:
        """Return the traffic of a rank, by mover.

        words, pieces : the words, and the number of panels, of each block that the rank holds, in order.
        """
        sent, received = int(words[:-1].sum()), int(words[1:].sum())
        if self.transport.shared:
            panels = (np.minimum(1, words) if self.in_blocks else pieces * (words > 0))[1:]  # without the initial block
            replied = int(panels[:-1].sum() + panels[1:].sum())
            return {self.mover: Traffic(0, received, words_read=received), RING.name: Traffic(0, 0, replied, replied)}
        messages = -(-words // (LARGEST_MESSAGE_BYTES // dtype.itemsize))
        if not self.in_blocks:
            messages = pieces * (words > 0)
        return {self.mover: Traffic(sent, received, int(messages[:-1].sum()), int(messages[1:].sum()))}

    def copied(self, rank: int) -> int:
        """Return the bytes of sums added to C and, where all ranks use one device, of blocks copied within it."""
        within = self.transport.shared and not self.transport.fetched
        return super().copied(rank) + sum(x.itemsize * x.traffic.words_read for x in self.transfers(rank) if within)

    def local_shape(self, rank: int) -> tuple[int, int, int]:
        return *self.C.local_shape(rank), self.mnk[2]

    @property
    def slots(self) -> int:
        """The number of blocks of each operand held at once: one in use, one in flight, and `spare`."""
        return 2 + self.spare

    def buffers(self, rank: int | None) -> Buffers:
        """Return the buffers of a rank; an operand that is not shifted needs no panel buffer."""
        m_loc, n_loc = self.C.local_shape(rank)
        (a, b), (pr, pc) = self.widths, self.C.distribution.grid_shape
        wide_a, wide_b = int(a.max()), int(b.max())
        mnk = m_loc, n_loc, min(self.width, wide_a)
        return {
            "panels of A": ((pc > 1) * self.slots * wide_a * m_loc, self.A.dtype),
            "panels of B": ((pr > 1) * self.slots * wide_b * n_loc, self.B.dtype),
            **self.arithmetic.buffers(mnk, self.A, self.B, self.C.order, self.triangle),
            **self._sums_of_block(m_loc, n_loc),
        }
