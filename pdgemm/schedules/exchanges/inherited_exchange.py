"""The messages of an exchange from the local arrays of an earlier grid; a rank may hold the arrays of several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import numpy as np

from pdgemm.grids.index_map import IndexMap
from pdgemm.grids.layout import Layout
from pdgemm.instrument.recorder import Traffic
from pdgemm.schedules.exchanges.block_messages import Block, Redistribution
from pdgemm.schedules.exchanges.exchange import Exchange, fitted_messages
from pdgemm.schedules.exchanges.node_messages import WordsOf
from pdgemm.support.remembered import remembered


@dataclass(frozen=True)
class InheritedExchange(Exchange):
    """An exchange from the local arrays of a first, larger communicator to a second communicator, as a value.

    The second communicator has `size` ranks, and carries out the exchange.
    source  : layout of the matrix on the first communicator; it uses the ranks of the first communicator.
    target  : layout of the matrix on the second communicator.
    holders : for each rank of the first communicator, the rank of the second that holds its local array.
    """

    holders: tuple[int, ...] = field(kw_only=True)

    @remembered
    def held(self, rank: int) -> list[int]:
        """Return the ranks of the first communicator whose local arrays `rank` holds, in the order of `Block.part`."""
        return [old for old, holder in enumerate(self.holders) if holder == rank]

    def blocks(self, rank: int, form: Callable[[IndexMap], IndexMap], by_target: bool) -> Iterator[Block]:
        if by_target:
            for block in super().blocks(rank, form, by_target):
                holder = self.holders[block.peer]
                yield block._replace(peer=holder, part=self.held(holder).index(block.peer))
        else:
            for part, old in enumerate(self.held(rank)):
                yield from (x._replace(part=part) for x in super().blocks(old, form, by_target))

    def traffic(self, rank: int) -> Traffic:
        return Redistribution.traffic(self, rank)

    def blocks_sent(self) -> tuple[np.ndarray, ...]:
        return Redistribution.blocks_sent(self)

    @property
    def words_of(self) -> tuple[WordsOf, WordsOf]:
        return partial(self._words_of, self.sends), partial(self._words_of, self.receives)

    def _words_of(self, blocks: Callable[[int], list[Block]], ranks: np.ndarray) -> np.ndarray:
        words = np.zeros(self.size, np.int64)
        for block in chain.from_iterable(map(blocks, ranks.tolist())):
            words[block.peer] += block.rows.size * block.cols.size
        return words

    def staying_words(self, rank: int) -> int:
        return Redistribution.staying_words(self, rank)


def plan_inheritance(source: Layout, target: Layout, size: int, holders: tuple[int, ...]) -> InheritedExchange:
    """Return an exchange whose messages fit in cache."""
    return fitted_messages(InheritedExchange(source, target, size, 1, True, holders=holders))
