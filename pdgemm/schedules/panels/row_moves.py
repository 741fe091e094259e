"""Moves of the rows of a matrix to other places, such as the row exchanges of pivots, and their messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from pdgemm.grids.distribution import BlockCyclic
from pdgemm.schedules.mover_registry import RING
from pdgemm.schedules.panels.panel_schedule import Panel, PanelSchedule
from pdgemm.schedules.rounds import COLS, Messages, Round, grid_of, messages
from pdgemm.schedules.schedule import Buffers


class RowMoves(NamedTuple):
    """Row sources[x] moves to row targets[x], for all x at the same time; both arrays contain the same rows."""

    targets: np.ndarray
    sources: np.ndarray

    @classmethod
    def of(cls, pivots: np.ndarray, start: int) -> RowMoves:
        """Return the combined moves of exchanging row start + t with row pivots[t], for t = 0, 1, ... in turn."""
        first = np.arange(start, start + len(pivots))
        rows = np.unique(np.concatenate([first, pivots]))
        lying = list(range(len(rows)))
        for here, there in zip(*(rows.searchsorted(x).tolist() for x in (first, pivots))):
            lying[here], lying[there] = lying[there], lying[here]
        return cls.to(rows, rows[lying])

    @classmethod
    def to(cls, targets: np.ndarray, sources: np.ndarray) -> RowMoves:
        """Return the moves without the rows that stay in their place."""
        moved = targets != sources
        return cls(targets[moved], sources[moved])

    def counts(self, rows: BlockCyclic) -> np.ndarray:
        """Return the number of rows that move from part i to part j of a dimension, for all i and j."""
        pair = rows.owner(self.sources) * rows.parts + rows.owner(self.targets)
        return np.bincount(pair, minlength=rows.parts**2).reshape(rows.parts, rows.parts)

    def sent(
        self, rows: BlockCyclic, grid: np.ndarray, widths: np.ndarray, itemsize: int, along: str = COLS
    ) -> list[Messages]:
        """Return the messages along grid columns, where grid column j has widths[j] columns of the matrix.

        With along=ROWS, columns are exchanged: pass the rows of the transposed matrix, and the transposed grid.
        """
        counts = self.counts(rows)
        np.fill_diagonal(counts, 0)
        source, target = np.nonzero(counts)
        words = counts[source, target][:, None] * widths
        return messages(RING.name, grid[source], grid[target], words, itemsize, along)


def moves_left(steps: tuple[Panel, ...], pivots: np.ndarray, m: int) -> Iterator[tuple[Panel, RowMoves]]:
    """Yield each panel, the last panel first, with the row moves of all later panels that its columns still need."""
    lying = np.arange(m)
    for panel in reversed(steps):
        yield panel, RowMoves.to(np.arange(m), lying)
        step, moves = np.arange(m), RowMoves.of(pivots[panel.start : panel.stop], panel.start)
        step[moves.targets] = moves.sources
        lying = step[lying]


def permutation(pivots: np.ndarray, m: int) -> np.ndarray:
    """Return p, where P A = A[p], after exchanging row t with row pivots[t], for t = 0, 1, ... in turn."""
    rows, moves = np.arange(m), RowMoves.of(pivots, 0)
    rows[moves.targets] = moves.sources
    return rows


@dataclass(frozen=True)
class PermutationSchedule(PanelSchedule):
    """A permutation of the rows of a matrix: row order[i] becomes row i."""

    order: tuple[int, ...] = field(kw_only=True, repr=False)
    algorithm = "permutation"
    flops = 0

    @property
    def steps(self) -> tuple[Panel, ...]:
        return ()

    @cached_property
    def moves(self) -> RowMoves:
        return RowMoves.to(np.arange(len(self.order)), np.array(self.order, np.int64))

    def rounds(self) -> Iterator[Round]:
        yield Round(self.moves.sent(self.rows, grid_of(self.A), self.cols_from(0), self.A.dtype.itemsize))

    def buffers(self, rank: int | None) -> Buffers:
        (_, n_loc), counts = self.A.local_shape(rank), self.moves.counts(self.rows)
        leaving, arriving = counts.sum(axis=1), counts.sum(axis=0) - counts.diagonal()
        i = slice(None) if rank is None else [x for x in self.A.coords(rank)[:1] if x >= 0]
        return {
            "leaving rows": (int(leaving[i].max(initial=0)) * n_loc, self.A.dtype),
            "arriving rows": (int(arriving[i].max(initial=0)) * n_loc, self.A.dtype),
        }


@dataclass(frozen=True)
class ScalingSchedule(PanelSchedule):
    """A scaling of the rows of a matrix, multiplied or divided by numbers that every rank holds: nothing is sent."""

    algorithm = "scaling"

    @property
    def flops(self) -> int:
        m, n = self.A.distribution.shape
        return self.real_flops * m * n

    @property
    def steps(self) -> tuple[Panel, ...]:
        return ()

    def rounds(self) -> Iterator[Round]:
        return iter(())

    def buffers(self, rank: int | None) -> Buffers:
        return {}
