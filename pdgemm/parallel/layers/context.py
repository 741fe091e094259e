"""Positions of a sequence that are divided along cp, and their keys and values."""

from __future__ import annotations

from typing import Any

import numpy as np

from pdgemm.local.arrays.arguments import as_count
from pdgemm.parallel.layers.array_checks import check_array
from pdgemm.parallel.layers.line_collectives import line_collectives
from pdgemm.parallel.mesh import Mesh
from pdgemm.schedules.training.context_schedule import ContextSchedule

Array = np.ndarray


class ContextSplit:
    """The positions of sequences on the ranks along cp: rank i has chunks i and 2c - 1 - i of 2c.  Collective.

    sequence : the number of positions, which need not be a multiple of 2c; a chunk may be short or empty.

    positions : those of this rank.   all_positions : those of all ranks, in the order in which `gather` returns them.

    Words: (S - s) b heads d for each array that is gathered, and (c - 1) s b heads d for each that is reduced, of
    S positions, s of them own: `ContextSchedule`, counted in `mesh.traffic["context"]`.
    """

    def __init__(self, mesh: Mesh, sequence: int) -> None:
        self._line = line_collectives(mesh, "cp", "context")
        with self._line.checked(set()) as arguments:
            self.sequence = as_count(sequence, "sequence", 1)
            arguments += ["ContextSplit", self.sequence]
        ranks = range(self._line.size)
        self.schedule = ContextSchedule(self.sequence, tuple(ranks))
        self._known = set[Any]()
        self.positions = self.schedule.positions(self._line.index)
        self.all_positions = np.concatenate([self.schedule.positions(rank) for rank in ranks])

    def gather(self, k: Array) -> Array:
        """Return k of all positions, (b, heads, S, d), from (b, heads, s, d).  Collective over the line of cp.

        Raises ArgumentError, DTypeError or LayoutError on all ranks of the line, also where other dimensions or the
        type are new and not the same.
        """
        self._check("k", k, len(self.positions))
        if self._line.size == 1:
            return k
        return self._line.gather(k.transpose(2, 0, 1, 3), self.schedule.counts).transpose(1, 2, 0, 3)

    def reduce(self, dk: Array) -> Array:
        """Return the sums for the own positions, the transpose of `gather`.  Collective over the line of cp.

        dk : (b, heads, S, d), of the queries of this rank.   Raises exceptions as `gather`.
        """
        self._check("dk", dk, self.sequence)
        if self._line.size == 1:
            return dk
        by_position = dk.transpose(2, 0, 1, 3)
        addends = self._line.addends(by_position.shape, dk.dtype)
        addends[...] = by_position
        return self._line.own_sums(addends, self.schedule.counts).transpose(1, 2, 0, 3)

    def _check(self, name: str, x: Array, positions: int) -> None:
        """Compare an array with the positions that it has; the ranks agree on dimensions that are new."""
        with self._line.checked(self._known) as arguments:
            check_array(name, x, (None, None, positions, None), f"on {self._line.where} of {self.sequence} positions")
            arguments += ["ContextSplit", name, *x.shape[:2], x.shape[3], x.dtype]
