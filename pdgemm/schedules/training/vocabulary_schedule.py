"""What an embedding and a cross-entropy move whose vocabulary is divided along tp, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from pdgemm.schedules.collectives.collective import Collective
from pdgemm.schedules.training.row_collectives import row_collective, rows_by_rank

VocabularyStep = Literal["embedding", "embedding_gradient", "cross_entropy"]


@dataclass(frozen=True)
class VocabularySchedule:
    """Rows of a table, and logits, of words that are divided along a line in blocks of ceil(vocabulary/t).

    tokens : of all ranks.   hidden : the length of rows.   sequence : as of `LinearSchedule`.
    dtype  : of rows and logits.   line : the ranks.
    """

    tokens: int
    hidden: int
    sequence: bool
    dtype: np.dtype
    line: tuple[int, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows of each rank with `sequence`, and of each part of an all-reduce."""
        return rows_by_rank(self.tokens, len(self.line))

    def collectives(self, step: VocabularyStep) -> list[Collective]:
        """Return what a step moves: a row of each token, and in a cross-entropy 1 and 2 words of each."""
        if len(self.line) == 1 or (step == "embedding_gradient" and not self.sequence):
            return []
        by_sequence = {"embedding": "reduce_scatter", "embedding_gradient": "all_gather"}
        operation = by_sequence.get(step, "all_reduce") if self.sequence else "all_reduce"
        widths = (1, 2) if step == "cross_entropy" else (self.hidden,)
        return [row_collective(operation, self.rows, width, self.dtype, self.line) for width in widths]

    def words(self, rank: int) -> dict[VocabularyStep, int]:
        """Return the words that a rank receives in each step."""
        steps: tuple[VocabularyStep, ...] = ("embedding", "embedding_gradient", "cross_entropy")
        return {step: sum(x.traffic(rank).words_received for x in self.collectives(step)) for step in steps}
