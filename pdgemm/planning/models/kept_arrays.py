"""What layers keep of a microbatch for their backward pass, array by array."""

from __future__ import annotations

from typing import NamedTuple

from pdgemm.planning.models.model_shape import ModelShape
from pdgemm.planning.models.training_layout import TrainingLayout


class KeptArray(NamedTuple):
    """An array that a layer keeps.

    elements : on a rank.   itemsize : bytes of an element.   core : it lies inside the core of
        attention, which "selective" computes again from queries, keys and values.
    """

    name: str
    elements: float
    itemsize: int
    core: bool = False

    @property
    def bytes(self) -> float:
        return self.elements * self.itemsize


def kept_of_layer(shape: ModelShape, layout: TrainingLayout) -> list[KeptArray]:
    """Return what a layer keeps of a microbatch on a rank, without recomputation.

    The arrays of Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, MLSys 2023, table 2
    and section 4: with dropout, 16 bits, and as many heads of keys as of queries s b h (34 + 5 a s/h) bytes, all of it
    divided by tp with `sequence`; without, s b h (10 + (24 + 5 a s/h)/t).
    """
    t, e, h = layout.tp, layout.itemsize, shape.hidden
    tokens = layout.microbatch * shape.sequence / layout.cp
    rows = tokens / (t if layout.sequence else 1)
    weights = tokens * shape.heads / t * shape.sequence
    kept = [
        KeptArray("inputs of two norms", 2 * rows * h, e),
        KeptArray("scales of two norms", 2 * rows, e),
        KeptArray("inputs of two linear layers", 2 * rows * h, e),
        KeptArray("queries, keys and values", tokens * (shape.queries + 2 * shape.keys) / t, e),
        KeptArray("output of attention", tokens * shape.queries / t, e),
    ]
    if not layout.fused:
        grouped, divided = shape.heads > shape.kv_heads, layout.cp > 1
        if grouped:
            kept += [KeptArray("queries of a head of keys in one matrix", tokens * shape.queries / t, e)]
        if divided:
            everywhere = layout.microbatch * shape.sequence
            kept += [KeptArray("keys and values of all positions", 2 * everywhere * shape.keys / t, e)]
        if grouped and divided:  # nothing needs what these were copied from
            kept = [x for x in kept if x.name != "queries, keys and values"]
        kept += [KeptArray("softmax", weights, e, True)]
        if layout.dropout:
            kept += [
                KeptArray("after its dropout", weights, e, True),
                KeptArray("mask of its dropout", weights, 1, True),
            ]
    inner = tokens * (shape.topk if shape.experts else 1) * shape.ffn / t
    kept += [KeptArray("before and after the activation", (3 if shape.gated else 2) * inner, e)]
    if shape.experts:
        kept += [KeptArray("rows of experts", 2 * tokens * shape.topk * h / t, e)]
    if layout.dropout:
        kept += [KeptArray("masks of two dropouts", 2 * rows * h, 1)]
    return kept


def activation_bytes(shape: ModelShape, layout: TrainingLayout) -> float:
    """Return the bytes that a layer keeps of a microbatch on a rank: the input alone where all is computed again."""
    if layout.recompute == "full":
        rows = layout.microbatch * shape.sequence / layout.cp / (layout.tp if layout.sequence else 1)
        return rows * shape.hidden * layout.itemsize
    return sum(x.bytes for x in kept_of_layer(shape, layout) if not (x.core and layout.recompute == "selective"))


def score_bytes(shape: ModelShape, layout: TrainingLayout) -> float:
    """Return the bytes of the scores of a microbatch on a rank, and of their gradient, which is of 32 bits at least."""
    scores = layout.microbatch * shape.sequence / layout.cp * shape.vocabulary / layout.tp
    return scores * (layout.itemsize + max(4, layout.itemsize))
