"""The base of all schedules: words, messages, work and bytes follow from rounds and buffers.  No MPI, no data."""

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
from pdgemm.support.members import remembered

Buffers = dict[str, tuple[int, np.dtype]]  # name of the buffer: words, element type


@dataclass(frozen=True)
class RankMap:
    """A process grid as a value: its axes, and the rank at each grid position.

    axes  : name and length of each axis, for any number of axes; the index along the last axis varies fastest.
    ranks : the rank at each grid position, in this order.

    Messages are sent along an axis: a grid row (`ROWS`), a grid column (`COLS`), or through the layers (`LAYERS`).
    """

    axes: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...]

    @classmethod
    def of_layers(cls, shape: tuple[int, int], ranks: tuple[int, ...], layers: int = 1) -> RankMap:
        """Return the process grid of `layers` layers of Pr x Pc ranks, listed layer by layer and row by row."""
        return cls(((LAYERS, layers), (COLS, shape[0]), (ROWS, shape[1])), ranks)

    @classmethod
    def of_line(cls, ranks: Iterable[int]) -> RankMap:
        """Return the one-dimensional process grid of these ranks, whose only axis is `LINE`."""
        return cls(((LINE, len(ranks := (*ranks,))),), ranks)

    @cached_property
    def lengths(self) -> dict[str, int]:
        """The number of ranks along each axis; the axis `LINE` joins all ranks of any grid."""
        return {LINE: len(self.ranks), **dict(self.axes)}

    @cached_property
    def strides(self) -> dict[str, int]:
        """The stride of each axis: the difference between neighbouring ranks; 1 for an axis of one rank."""
        step, strides = 1, {LINE: 1}
        for axis, length in reversed(self.axes):
            strides[axis] = abs(self.ranks[step] - self.ranks[0]) if length > 1 else 1
            step *= length
        return strides

    @cached_property
    def shape(self) -> tuple[int, int]:
        """The shape (Pr, Pc) of a layer: the numbers of its grid rows and grid columns."""
        return self.lengths.get(COLS, 1), self.lengths.get(ROWS, 1)

    @property
    def layers(self) -> int:
        return self.lengths.get(LAYERS, 1)

    def layer(self, number: int) -> tuple[int, ...]:
        """Return the ranks of one layer, row by row."""
        plane = prod(self.shape)
        return self.ranks[number * plane : (number + 1) * plane]

    def coords(self, rank: int) -> tuple[int, int]:
        """Return the grid row and the grid column of a rank in its layer; (-1, -1) if the rank is not in the grid."""
        at = position(self.ranks, rank)
        return (-1, -1) if at < 0 else divmod(at % prod(self.shape), self.shape[1])

    def layer_of(self, rank: int) -> int:
        """Return the layer of a rank; -1 if the rank is not in the grid."""
        at = position(self.ranks, rank)
        return -1 if at < 0 else at // prod(self.shape)


class Schedule(ABC):
    """An algorithm on certain layouts as a value: the messages and products of all ranks, and the buffers of each.

    A subclass defines `rounds` and `buffers`.  The words, messages, work and bytes of each rank are sums over rounds
    and buffers.  Where such a sum takes too long for many ranks, the subclass overrides the sum by a closed formula,
    and a test compares formula and sum.  A schedule contains no seconds: `pdgemm.planning` times it on a machine.

    algorithm : name of the algorithm.
    lookahead : number of rounds whose messages are in flight while an earlier round is multiplied.
    """

    algorithm: str
    lookahead: int

    @abstractmethod
    def rounds(self) -> Iterator[Round]:
        """Yield the messages and the work of all ranks, round by round."""

    @abstractmethod
    def buffers(self, rank: int | None) -> Buffers:
        """Return the buffers that a rank allocates besides its matrices; for rank None, the maximum over all ranks."""

    @property
    @abstractmethod
    def grid(self) -> RankMap:
        """The process grid; messages are sent along its axes."""

    @property
    @abstractmethod
    def panel_dtype(self) -> np.dtype:
        """The element type of the operands that are multiplied."""

    @property
    @abstractmethod
    def events(self) -> int:
        """The approximate number of messages and products of a rank."""

    @property
    def flops(self) -> int:
        """The floating-point operations of all ranks together."""
        return 0

    @property
    def blas_products(self) -> int:
        """The number of BLAS products that form one product: several if it is emulated."""
        return 1

    @property
    def schedules(self) -> list[Schedule]:
        """The schedule itself; a stage of a program may have several schedules, which run one after the other."""
        return [self]

    @property
    def last_rank(self) -> int:
        """The largest rank that sends, receives or multiplies."""
        return max(self.grid.ranks)

    @cached_property
    def tally(self) -> Tally:
        """The traffic and the work of each rank, summed over all rounds."""
        return Tally(self.rounds(), 1 + self.last_rank)

    @property
    def total_words(self) -> int:
        """The number of words that all ranks together receive."""
        return sum(self.traffic(rank).words_received for rank in range(1 + self.last_rank))

    @property
    def widest(self) -> int:
        """The number of inner indices of the widest panel."""
        return self.tally.widest

    def transfers(self, rank: int) -> list[Transfer]:
        """Return the traffic of a rank: one `Transfer` for each axis of the grid and each kind of message."""
        strides, lengths = self.grid.strides, self.grid.lengths
        return [
            Transfer(x.kind, traffic, x.itemsize, strides[x.along], lengths[x.along], x.after)
            for x, traffic in self.tally.of(rank).items()
        ]

    def traffic(self, rank: int) -> Traffic:
        """Return the words and messages that a rank sends and receives altogether."""
        return sum((transfer.traffic for transfer in self.transfers(rank)), Traffic())

    @property
    def exposed_buffers(self) -> tuple[str, ...]:
        """The names of the buffers that other ranks read, where panels are read in place."""
        return ()

    def staged_buffers(self, rank: int | None) -> Buffers:
        """Return the further buffers of a rank on the host, where messages are staged in host memory."""
        return {}

    @remembered
    def extra_bytes(self, rank: int | None) -> int:
        """Return the bytes of all buffers of a rank; for rank None, the maximum over all ranks."""
        buffers = [*self.buffers(rank).values(), *self.staged_buffers(rank).values()]
        return sum(words * dtype.itemsize for words, dtype in buffers)

    def copied(self, rank: int) -> int:
        """Return the bytes that a rank packs, copies or adds outside of its products."""
        return 0

    def described(self, name: str) -> tuple[str, str]:
        """Return two texts for the user: the operation, on a matrix called `name`, and its details."""
        return self.algorithm, ""


class LineSchedule(Schedule):
    """A schedule on a one-dimensional process grid: `ranks`, in this order, exchange elements of one type."""

    ranks: tuple[int, ...]
    dtype: np.dtype

    @property
    def grid(self) -> RankMap:
        return RankMap.of_line(self.ranks)

    @property
    def panel_dtype(self) -> np.dtype:
        return self.dtype
