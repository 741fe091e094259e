"""The epilogue of a product in its plan: the layouts of the epilogue's operands, and their redistributions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.grids.layout import Layout

OperandName = Literal["scale", "bias", "residual"]


class EpilogueOperand(NamedTuple):
    """A distributed operand of an epilogue: its layout, and the layout to which it is redistributed to match C."""

    name: OperandName
    source: Layout
    target: Layout

    @property
    def stays(self) -> bool:
        return self.source.same_owners(self.target)


@dataclass(frozen=True)
class Ending:
    """The epilogue of a product whose sums S have the layout of C and the type of accumulation.

    dtype    : the type of C.
    text     : the formula.
    operands : the distributed matrices among scale, bias and residual.
    """

    dtype: np.dtype
    text: str
    operands: tuple[EpilogueOperand, ...] = ()

    def __str__(self) -> str:
        operands = "".join(f"; {x.name} is {x.source}" for x in self.operands)
        return f"{self.text} of {self.dtype}{operands}"

    @property
    def moved(self) -> list[EpilogueOperand]:
        """The operands that are redistributed before the product."""
        return [x for x in self.operands if not x.stays]


def vector_operand(name: OperandName, x: Layout, C: Layout) -> EpilogueOperand:
    """Return x, 1 x n (or m x 1), as an operand for C, m x n: each rank receives x for its columns (or rows) of C.

    The source of the exchange has one copy of x for each grid row of C, all on the owners of x.  So the exchange sends
    each element of x once to each grid row.
    """
    if x.distribution.shape != (1, C.distribution.shape[1]):
        return EpilogueOperand(name, *(y.T for y in vector_operand(name, x.T, C.T)[1:]))
    row, (copies, _) = x.distribution.rows, C.distribution.grid_shape
    repeated = BlockCyclic(copies, copies, row.parts, int(row.owner(0)))
    source = replace(x, distribution=Distribution(repeated, x.distribution.cols), order="C")
    one_each = Distribution(BlockCyclic.even(copies, copies), C.distribution.cols)
    return EpilogueOperand(name, source, replace(source, distribution=one_each, rank_map=C.rank_map))
