"""What Muon does with the matrices of a pipeline stage, in the order and the buckets in which a run has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from pdgemm.planning.models.model_shape import ModelShape
from pdgemm.planning.models.training_layout import TrainingLayout
from pdgemm.schedules.training.flat_layout import FlatLayout, Parameter
from pdgemm.schedules.training.home_exchange import HomeLoads
from pdgemm.schedules.training.pipeline_schedule import layers_of


class _Entry(NamedTuple):
    """Parameters that are neighbours in a model.   divided : along tp.   matrix : Muon updates it."""

    shape: tuple[int, ...]
    divided: bool = False
    matrix: bool = False


def home_loads(shape: ModelShape, layout: TrainingLayout, stage: int) -> HomeLoads:
    """Return what the ranks of a pipeline stage update of the matrices of its layers, as `Homes.loads` of a run.

    Matrices are those of attention and of linear layers; tables, vectors, routers and experts have another rule.
    """
    same = replace(layout, microbatch=1, recompute="none", fused=True, dropout=False, reduce_each=False)
    return _home_loads(shape, same, stage)


@lru_cache(maxsize=256)  # of layouts that differ in what the optimizer does not see
def _home_loads(shape: ModelShape, layout: TrainingLayout, stage: int) -> HomeLoads:
    """Return what `home_loads` returns, from the line along which gradients of matrices are added."""
    t, parameters, tables = layout.tp, list[Parameter](), dict[str, tuple[int, ...]]()
    for chunk in range(layout.chunks):
        for entry in _of_chunk(shape, layout, stage, chunk):
            if entry.divided or t == 1:  # others are added along other lines, see `Division.line`
                name = str(len(parameters))
                parameters.append(Parameter(name, (-(-prod(entry.shape) // t),), chunk))
                if entry.matrix:
                    tables[name] = entry.shape
    flat = FlatLayout(tuple(parameters), layout.element, layout.copies, layout.zero, layout.bucket_words)
    ranks = np.arange(layout.dp * layout.cp * t)
    dp, cp = ranks // (t * layout.cp), ranks // t % layout.cp
    own = np.array([flat.updated(name)[cp * layout.dp + dp] for name in tables], np.int64)
    return HomeLoads(tuple(tables.values()), own.reshape(-1, len(ranks)), flat.wide)  # type: ignore[arg-type]


def _of_chunk(shape: ModelShape, layout: TrainingLayout, stage: int, chunk: int) -> Iterator[_Entry]:
    """Yield the parameters of a block of layers of a stage, in the order of the forward pass.

    Without those of a tied table on two stages, which have a line of their own, and of experts that ep divides.
    """
    h, ends = shape.hidden, layout.pp > 1 and shape.tied
    if stage == chunk == 0:
        if not ends:
            yield _Entry((shape.table,), divided=True)
        yield _Entry((shape.positions,))
    for _ in layers_of(shape.layers, layout.pp, layout.chunks, stage, chunk):
        yield from _of_layer(shape, layout)
    if stage == layout.pp - 1 and chunk == layout.chunks - 1:
        yield _Entry((shape.norm,))
        if not shape.tied:
            yield _Entry((h, shape.vocabulary), divided=True)


def _of_layer(shape: ModelShape, layout: TrainingLayout) -> Iterator[_Entry]:
    """Yield the parameters of a layer, without experts that ep divides."""
    h, columns, biases = shape.hidden, shape.queries + 2 * shape.keys, not shape.gated
    norm = [_Entry((h,))] * (1 + biases)
    yield from norm
    yield _Entry((h, columns), divided=True, matrix=True)
    yield _Entry((biases * columns,), divided=True)
    yield _Entry((shape.queries, h), divided=True, matrix=True)
    yield _Entry((biases * h,))
    yield from norm
    if shape.experts:
        yield _Entry((h, shape.experts))
        if layout.ep == 1:
            for words in ((1 + shape.gated) * h * shape.ffn, biases * shape.ffn, shape.ffn * h, biases * h):
                yield _Entry((shape.experts, words))
        return
    for _ in range(2 if shape.gated else 1):
        yield _Entry((h, shape.ffn), divided=True, matrix=True)
    yield _Entry((biases * shape.ffn,), divided=True)
    yield _Entry((shape.ffn, h), divided=True, matrix=True)
    yield _Entry((biases * h,))
