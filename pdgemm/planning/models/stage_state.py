"""The parameters of a rank of a pipeline stage, by the lines along which their gradients are added."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pdgemm.planning.models.model_shape import ModelShape
from pdgemm.planning.models.training_layout import TrainingLayout
from pdgemm.schedules.training.flat_layout import FlatLayout, Parameter


class LineState(NamedTuple):
    """Parameters of a rank whose gradients are added along one line.

    words : of the rank.   ranks : of the line.   zero : what they divide.
    """

    words: int
    ranks: int
    zero: int

    def moved(self, microbatches: int, reduce_each: bool) -> dict[str, float]:
        """Return the words that a rank receives in a step, where the ranks divide them evenly: `FlatLayout.step`."""
        part = (self.ranks - 1) / self.ranks * self.words
        reductions = 2 if not self.zero else microbatches if reduce_each else 1  # an all-reduce gathers, too
        return {"gradients": reductions * part, "parameters": (0, 1, 1, 2 * microbatches)[self.zero] * part}

    def bytes(self, layout: TrainingLayout, microbatches: int) -> dict[str, int]:
        """Return the bytes that a rank allocates, by kind, with the two moments of Adam: `FlatLayout.bytes`."""
        return _bytes(self, layout.element, min(2, microbatches), layout.reduce_each and self.zero > 1)


@lru_cache(maxsize=1024)  # of layouts that divide what is computed, and not what is kept
def _bytes(state: LineState, element: np.dtype, microbatches: int, each: bool) -> dict[str, int]:
    """Return what `LineState.bytes` returns, for one microbatch and for several, and is not to be changed."""
    all_words = (Parameter("all", (state.words,)),)
    flat = FlatLayout(all_words, element, state.ranks, state.zero, microbatches=microbatches, reduce_each=each)
    sizes = flat.bytes(0, 2)
    return {kind: sizes[kind] for kind in ("parameters", "gradients", "optimizer")}


def layers_of_stage(shape: ModelShape, layout: TrainingLayout, stage: int) -> int:
    """Return the number of layers of a stage, as `layers_of` deals them out."""
    each, more = divmod(shape.layers, layout.pp * layout.chunks)
    return layout.chunks * each + len(range(stage, more, layout.pp))


def state_of_stage(shape: ModelShape, layout: TrainingLayout, stage: int) -> list[LineState]:
    """Return the parameters of a rank of a stage.

    Gradients of what is divided along tp, and of biases that are added to sums, are added along dp x cp; those of
    norms, routers and positions, which a rank has for its own rows, along tp as well; those of experts along
    dp/ep x cp x tp; and those of a tied table along the first and the last stage as well.
    """
    t, copies, first, last = layout.tp, layout.copies, stage == 0, stage == layout.pp - 1
    layers, weights = layers_of_stage(shape, layout, stage), shape.layer
    addends = copies * t if layout.sequence else copies
    own = layers * (-(-weights.divided // t) + weights.whole)
    rows = layers * weights.addends + first * shape.positions + last * shape.norm
    table, ends = -(-shape.table // t), 0
    if shape.tied and layout.pp > 1:
        ends = (first or last) * table
    else:
        own += table * (first + (last and not shape.tied))
    state = [
        LineState(own, copies, layout.zero),
        LineState(rows, addends, layout.zero),
        LineState(-(-layers * weights.experts // layout.ep), copies // layout.ep * t, layout.zero),
        LineState(ends, 2 * copies, min(1, layout.zero)),
    ]
    return [x for x in state if x.words]
