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
from pdgemm.schedules.rounds import COLS, Messages, Round, counts_of, grid_of, messages
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
        return moved(self.counts(rows), grid, widths, itemsize, along)


def moved(counts: np.ndarray, grid: np.ndarray, widths: np.ndarray, itemsize: int, along: str = COLS) -> list[Messages]:
    """Return the messages of `RowMoves.sent`, where counts[i, j] rows move from grid row i to grid row j."""
    source, target = np.nonzero(counts * (1 - np.eye(len(counts), dtype=int)))
    words = counts[source, target][:, None] * widths
    return messages(RING.name, grid[source], grid[target], words, itemsize, along)


def moves_left(steps: tuple[Panel, ...], pivots: np.ndarray, m: int) -> Iterator[tuple[Panel, RowMoves]]:
    """Yield each panel, the last panel first, with the row moves of all later panels that its columns still need."""
    exchanges = [RowMoves.of(pivots[x.start : x.stop], x.start) for x in steps]
    for panel, lying, _ in _rows_left(steps, exchanges, m):
        yield panel, RowMoves.to(np.arange(m), lying)


def counts_left(
    steps: tuple[Panel, ...], exchanges: list[RowMoves], rows: BlockCyclic
) -> Iterator[tuple[Panel, np.ndarray]]:
    """Yield the panels of `moves_left`, each with the number of rows that move or stay from part i to part j.

    exchanges : the row moves of each panel.   Cost: a row is counted again only after a panel has moved it.
    """
    owner = rows.owner(np.arange(rows.n))
    source, counts = owner.copy(), np.diag(counts_of(rows))
    for panel, lying, changed in _rows_left(steps, exchanges, rows.n):
        np.subtract.at(counts, (source[changed], owner[changed]), 1)
        source[changed] = owner[lying[changed]]
        np.add.at(counts, (source[changed], owner[changed]), 1)
        yield panel, counts


def _rows_left(
    steps: tuple[Panel, ...], exchanges: list[RowMoves], m: int
) -> Iterator[tuple[Panel, np.ndarray, np.ndarray]]:
    """Yield each panel of `moves_left`, the row that moves to each row, and the rows where that is another one now."""
    lying, place = np.arange(m), np.arange(m)  # row lying[i] moves to row i, and place is the inverse of lying
    changed = lying[:0]
    for panel, moves in zip(reversed(steps), reversed(exchanges)):
        yield panel, lying, changed
        changed = place[moves.targets]
        lying[changed], place[moves.sources] = moves.sources, changed


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
