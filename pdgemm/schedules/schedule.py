"""What all kinds of schedules have in common: what follows from their rounds and their buffers.  No MPI, no data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from pdgemm.grids.layout import position
from pdgemm.instrument.recorder import Traffic, Transfer
from pdgemm.schedules.rounds import COLS, LAYERS, LINE, ROWS, Round, Tally
from pdgemm.support.remembered import remembered

Buffers = dict[str, tuple[int, np.dtype]]  # name: words, type


@dataclass(frozen=True)
class RankMap:
    """A process grid as a value: its axes, and which rank is at each position.

    axes  : the name and the length of each axis, of any number of them; the last one runs fastest.
    ranks : the rank at each position.

    Messages travel along an axis: `ROWS` is the axis along which the ranks of a grid row stand, and so on.
    """

    axes: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...]

    @classmethod
    def of_layers(cls, shape: tuple[int, int], ranks: tuple[int, ...], layers: int = 1) -> RankMap:
        """Return the grid of `layers` grids of Pr x Pc ranks, layer by layer and row by row."""
        return cls(((LAYERS, layers), (COLS, shape[0]), (ROWS, shape[1])), ranks)

    @classmethod
    def of_line(cls, ranks: Iterable[int]) -> RankMap:
        """Return the grid of one axis, `LINE`."""
        return cls(((LINE, len(ranks := (*ranks,))),), ranks)

    @cached_property
    def lengths(self) -> dict[str, int]:
        """The number of ranks along each axis; `LINE` has all ranks of any grid."""
        return {LINE: len(self.ranks), **dict(self.axes)}

    @cached_property
    def strides(self) -> dict[str, int]:
        """The difference between the ranks of neighbours along each axis; 1 where there is one rank."""
        step, strides = 1, {LINE: 1}
        for axis, length in reversed(self.axes):
            strides[axis] = abs(self.ranks[step] - self.ranks[0]) if length > 1 else 1
            step *= length
        return strides

    @cached_property
    def shape(self) -> tuple[int, int]:
        """The numbers of grid rows and grid columns of a layer."""
        return self.lengths.get(COLS, 1), self.lengths.get(ROWS, 1)

    @property
    def layers(self) -> int:
        return self.lengths.get(LAYERS, 1)

    def layer(self, number: int) -> tuple[int, ...]:
        """Return the ranks of one layer, row by row."""
        plane = prod(self.shape)
        return self.ranks[number * plane : (number + 1) * plane]

    def layer_of(self, rank: int) -> int:
        """Return the layer of a rank; -1 if the rank is not in the grid."""
        at = position(self.ranks, rank)
        return -1 if at < 0 else at // prod(self.shape)


class Schedule(ABC):
    """An algorithm on certain layouts as a value: what all ranks send and multiply, and what each of them allocates.

    A kind of schedule defines `rounds` and `buffers`.  The words, messages, work and bytes of each rank are sums over
    these.  Where such a sum takes too long for many ranks, a kind of schedule overrides it by a formula, and a test
    compares the two.  A schedule has no seconds: `pdgemm.planning` times it on a machine.

    algorithm : its name.
    lookahead : number of rounds whose messages are under way while an earlier round is multiplied.
    """

    algorithm: str
    lookahead: int

    @abstractmethod
    def rounds(self) -> Iterator[Round]:
        """Yield what all ranks send and multiply, round by round."""

    @abstractmethod
    def buffers(self, rank: int | None) -> Buffers:
        """Return the buffers that a rank allocates beyond its matrices; for rank None, the most of any rank."""

    @property
    @abstractmethod
    def grid(self) -> RankMap:
        """The grid along whose axes messages are sent."""

    @property
    @abstractmethod
    def panel_dtype(self) -> np.dtype:
        """The type of the numbers that are multiplied."""

    @property
    @abstractmethod
    def events(self) -> int:
        """The approximate number of messages and products of a rank."""

    @property
    def flops(self) -> int:
        """The floating-point operations of all ranks together."""
        return 0

    @property
    def schedules(self) -> list[Schedule]:
        """The schedule itself; a stage of a program may have several, which run one after the other."""
        return [self]

    @property
    def last_rank(self) -> int:
        """The largest rank that sends, receives or multiplies."""
        return max(self.grid.ranks)

    @cached_property
    def tally(self) -> Tally:
        """The sums over the rounds, for each rank."""
        return Tally(self.rounds(), 1 + self.last_rank)

    @property
    def total_words(self) -> int:
        """The number of words that all ranks together receive."""
        return self.tally.total_words

    @property
    def widest(self) -> int:
        """The number of inner indices of the widest panel."""
        return self.tally.widest

    def transfers(self, rank: int) -> list[Transfer]:
        """Return what a rank sends and receives along each axis of the grid."""
        strides, lengths = self.grid.strides, self.grid.lengths
        return [
            Transfer(x.kind, traffic, x.itemsize, strides[x.along], lengths[x.along], x.after)
            for x, traffic in self.tally.of(rank).items()
        ]

    def traffic(self, rank: int) -> Traffic:
        """Return the words and messages of a rank."""
        return sum((transfer.traffic for transfer in self.transfers(rank)), Traffic())

    @property
    def exposed_buffers(self) -> tuple[str, ...]:
        """The names of the buffers that other ranks read, where panels are read in place."""
        return ()

    def staged_buffers(self, rank: int | None) -> Buffers:
        """Return the buffers that a rank allocates on the host besides these, where messages are staged."""
        return {}

    @remembered
    def extra_bytes(self, rank: int | None) -> int:
        """Return the bytes of all buffers of a rank; for rank None, the most of any rank."""
        buffers = [*self.buffers(rank).values(), *self.staged_buffers(rank).values()]
        return sum(words * dtype.itemsize for words, dtype in buffers)

    def copied(self, rank: int) -> int:
        """Return the bytes that a rank packs, copies or adds outside of its products."""
        return 0

    def described(self, name: str) -> tuple[str, str]:
        """Return what the schedule does, to a matrix of this name, and where, for people."""
        return self.algorithm, ""


class LineSchedule(Schedule):
    """A schedule of ranks that stand in one line, in this order, and exchange numbers of one type."""

    ranks: tuple[int, ...]
    dtype: np.dtype

    @property
    def grid(self) -> RankMap:
        return RankMap.of_line(self.ranks)

    @property
    def panel_dtype(self) -> np.dtype:
        return self.dtype
