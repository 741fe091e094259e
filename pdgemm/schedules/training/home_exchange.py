"""Matrices whose parts many ranks update, and which each come together on one rank, their home, and go back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np

from pdgemm.instrument.recorder import Traffic
from pdgemm.schedules.collectives.collective import Collective


class HeldPart(NamedTuple):
    """What a rank updates of a matrix: elements `start` to `stop` of its window, row by row; none where they are equal.

    window : the first index of each dimension that the rank has, and the one behind the last.
    line   : a number for the ranks that together update each element of the window once, or each of them the whole.
    """

    window: tuple[tuple[int, int], ...]
    start: int
    stop: int
    line: int

    @property
    def words(self) -> int:
        return self.stop - self.start

    @property
    def place(self) -> tuple[slice, ...]:
        """The window in the whole matrix."""
        return tuple(slice(*ends) for ends in self.window)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the window."""
        return tuple(stop - start for start, stop in self.window)


@dataclass(frozen=True)
class HomeExchange:
    """One exchange of parts of matrices to their homes, and one of all updated parts back.

    ranks : of a pipeline stage, along dp, cp and tp; they are numbered from 0.
    homes : the rank of each matrix.
    held  : for each matrix, what each rank updates of it.

    Each element of a matrix comes once to its home, from the rank nearest to it where several have the same ones: as
    with stage 0, and with parameters that are whole along tp.  All ranks get back what they update.  So for N elements
    of matrices, of which each rank updates other ones, as many on each of h ranks, all ranks together receive
    2 N (h-1)/h words; and for any sizes 2 (N - H), where homes update H elements of their own matrices.
    """

    ranks: int
    homes: tuple[int, ...]
    held: tuple[tuple[HeldPart, ...], ...]

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """For each matrix, the ranks whose parts come to its home."""
        return tuple(self._sources(home, parts) for home, parts in zip(self.homes, self.held))

    def _sources(self, home: int, parts: tuple[HeldPart, ...]) -> tuple[int, ...]:
        """Return the ranks of which parts make up a matrix: for each window those of the line nearest to the home."""
        ranks = list[int]()
        for window in dict.fromkeys(x.window for x in parts if prod(x.shape)):
            near = min((at for at, x in enumerate(parts) if x.window == window), key=lambda at: (abs(at - home), at))
            whole = parts[near].words == prod(parts[near].shape)
            line = [at for at, x in enumerate(parts) if (x.window, x.line) == (window, parts[near].line) and x.words]
            ranks += [near] if whole else line
        return tuple(sorted(ranks))

    def matrices(self, source: int, target: int, back: bool = False) -> list[int]:
        """Return the matrices of which a rank sends parts to another one, or to itself, one after the other."""
        if back:
            return [at for at, home in enumerate(self.homes) if home == source and self.held[at][target].words]
        return [at for at, home in enumerate(self.homes) if home == target and source in self.sources[at]]

    def exchange(self, dtype: np.dtype, back: bool = False) -> Collective:
        """Return the exchange of all ranks to the homes, or back."""
        counts = np.zeros((self.ranks, self.ranks), int)
        for home, parts, sources in zip(self.homes, self.held, self.sources):
            for rank in range(self.ranks) if back else sources:
                counts[(home, rank) if back else (rank, home)] += parts[rank].words
        return Collective("all_to_all", "pairwise", tuple(range(self.ranks)), tuple(counts.ravel().tolist()), dtype)

    def traffic(self, rank: int, dtype: np.dtype) -> Traffic:
        """Return the words and messages of a rank in a step, there and back."""
        return sum((self.exchange(dtype, back).traffic(rank) for back in (False, True)), Traffic())
