"""What a linear layer moves whose weights are divided along tp, as a value.

Shoeybi et al., Megatron-LM, arXiv:1909.08053, 2019; Korthikanti et al., Reducing Activation Recomputation in Large
Transformer Models, MLSys 2023 (sequence parallelism).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from pdgemm.schedules.collectives.collective import Collective
from pdgemm.schedules.training.mesh_shape import block_of
from pdgemm.schedules.training.row_collectives import row_collective, rows_by_rank
from pdgemm.support.remembered import remembered

WeightSplit = Literal["columns", "rows"]
LinearStep = Literal["forward", "input_gradient", "weight_gradient"]

# the collective of each step: with `sequence`, and without
_COLLECTIVES: dict[tuple[WeightSplit, LinearStep], tuple[str, str]] = {
    ("columns", "forward"): ("all_gather", ""),
    ("columns", "input_gradient"): ("reduce_scatter", "all_reduce"),
    ("columns", "weight_gradient"): ("all_gather", ""),
    ("rows", "forward"): ("reduce_scatter", "all_reduce"),
    ("rows", "input_gradient"): ("all_gather", ""),
    ("rows", "weight_gradient"): ("", ""),
}


@dataclass(frozen=True)
class LinearSchedule:
    """Y = X W + b of `tokens` rows, W (d_in, d_out), on the t ranks of a line.

    split : the dimension of W that is divided, in blocks of ceil(n/t): "columns", and so are Y and b, or "rows", and so
        are the columns of X.
    sequence : the other one of X and Y is divided by rows, in blocks of ceil(tokens/t); else it is whole on each rank.
    dtype : of X and Y.   line : the ranks.

    ============  ==================  ======================  ======================
    split         forward             input gradient          weight gradient
    ============  ==================  ======================  ======================
    columns       all-gather of X     reduce-scatter of dX    all-gather of X
    rows          reduce-scatter of Y all-gather of dY        (has dY)
    ============  ==================  ======================  ======================

    Without `sequence` dX of columns and Y of rows are all-reduced, and nothing else moves.
    """

    split: WeightSplit
    sequence: bool
    tokens: int
    d_in: int
    d_out: int
    dtype: np.dtype
    line: tuple[int, ...]

    def collective(self, step: LinearStep) -> Collective | None:
        """Return what a step moves; None: nothing.  Products bring the same words panel by panel."""
        operation = _COLLECTIVES[self.split, step][not self.sequence]
        if not operation or len(self.line) == 1:
            return None
        width = self.d_in if self.split == "columns" else self.d_out
        return row_collective(operation, self.rows, width, self.dtype, self.line)

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """The rows of each rank with `sequence`, and of each part of an all-reduce."""
        return rows_by_rank(self.tokens, len(self.line))

    def block(self, n: int, rank: int) -> slice:
        """Return which of n rows or columns that are divided a rank has."""
        return block_of(n, len(self.line), self.line.index(rank))

    def words(self, rank: int) -> dict[LinearStep, int]:
        """Return the words that a rank receives in each step."""
        moved = {step: self.collective(step) for step in get_args(LinearStep)}
        return {step: x.traffic(rank).words_received if x else 0 for step, x in moved.items()}

    @remembered
    def shapes(self, rank: int) -> dict[str, tuple[int, int]]:
        """Return the shapes of a rank's parts of x, w and y."""
        own = self.block(self.d_out if self.split == "columns" else self.d_in, rank)
        part, some = own.stop - own.start, self.block(self.tokens, rank)
        rows = some.stop - some.start if self.sequence else self.tokens
        if self.split == "columns":
            return {"x": (rows, self.d_in), "w": (self.d_in, part), "y": (self.tokens, part)}
        return {"x": (self.tokens, part), "w": (part, self.d_out), "y": (rows, self.d_out)}

    def activation_bytes(self, rank: int) -> int:
        """Return the bytes that a rank keeps for the backward pass: its part of X."""
        rows, columns = self.shapes(rank)["x"]
        return rows * columns * self.dtype.itemsize
