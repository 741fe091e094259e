"""Which positions of a sequence each rank along cp has, as a value."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pdgemm.schedules.training.mesh_shape import block_of


@dataclass(frozen=True)
class ContextSchedule:
    """A sequence in 2 c chunks of ceil(sequence/2c) positions, of which rank i of c has chunks i and 2c - 1 - i.

    A late position attends to more positions than an early one, so each rank has some of both (Llama Team, The Llama 3
    Herd of Models, arXiv:2407.21783, 2024).   line : the ranks.
    """

    sequence: int
    line: tuple[int, ...]

    def positions(self, rank: int) -> np.ndarray:
        """Return the positions of a rank, ascending."""
        chunks, index = 2 * len(self.line), self.line.index(rank)
        blocks = [block_of(self.sequence, chunks, chunk) for chunk in (index, chunks - 1 - index)]
        return np.concatenate([np.arange(block.start, block.stop) for block in blocks])

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of positions of each rank."""
        return tuple(len(self.positions(rank)) for rank in self.line)
