"""What Muon does with the matrices of a pipeline stage, in the order and the buckets in which a run has them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from pdgemm.planning.models.model_shape import ModelShape
from pdgemm.planning.models.training_layout import TrainingLayout
from pdgemm.schedules.training.flat_layout import FlatLayout, Parameter, updated_elements
from pdgemm.schedules.training.home_exchange import HomeLoads
from pdgemm.schedules.training.pipeline_schedule import layers_of


class _Entry(NamedTuple):
    """Parameters that are neighbours in a model.   divided : along tp.   matrix : Muon updates it."""

    shape: tuple[int, ...]
    divided: bool = False
    matrix: bool = False


class _Storage(NamedTuple):
    """What decides where the gradients of a block of layers lie in flat storage, beside the number of layers.

    tied_ends : the first and the last stage have the table.   experts : are not divided by ep.
    """

    tp: int
    tied_ends: bool
    experts: bool
    dtype: np.dtype
    bucket_words: int


def home_loads(shape: ModelShape, layout: TrainingLayout, stage: int) -> HomeLoads:
    """Return what the ranks of a pipeline stage update of the matrices of its layers, as `Homes.loads` of a run.

    Matrices are those of attention and of linear layers; tables, vectors, routers and experts have another rule.
    """
    tied_ends = layout.pp > 1 and shape.tied
    storage = _Storage(layout.tp, tied_ends, layout.ep == 1, layout.element, layout.bucket_words)
    return _home_loads(shape, storage, layout.dp, layout.cp, layout.pp, layout.chunks, stage, layout.zero > 0)


@lru_cache(maxsize=256)  # of layouts that differ in what the optimizer does not see
def _home_loads(
    shape: ModelShape, storage: _Storage, dp: int, cp: int, pp: int, chunks: int, stage: int, divided: bool
) -> HomeLoads:
    """Return what `home_loads` returns, from the line along which gradients of matrices are added."""
    matrices = _of_stage(shape, storage, pp, chunks, stage)
    ranks = np.arange(dp * cp * storage.tp)
    on_line = ranks // storage.tp % cp * dp + ranks // (storage.tp * cp)
    parts = np.array([updated_elements(place, dp * cp, divided)[on_line] for place in matrices.places], np.int64)
    return HomeLoads(matrices.shapes, parts.reshape(-1, len(ranks)), matrices.kinds, matrices.dtype)


class _Matrices(NamedTuple):
    """The matrices of layers: shapes, and the kind of each.   places : of each kind, see `FlatLayout.in_bucket`."""

    shapes: tuple[tuple[int, int], ...]
    kinds: np.ndarray
    places: tuple[tuple[int, int, int], ...]
    dtype: np.dtype


@lru_cache(maxsize=64)  # of stages of as many ranks, and of more
def _of_stage(shape: ModelShape, storage: _Storage, pp: int, chunks: int, stage: int) -> _Matrices:
    """Return the matrices of a pipeline stage, in the order of the forward pass."""
    shapes, places = list[tuple[int, int]](), list[tuple[int, int, int]]()
    for chunk in range(chunks):
        layers = len(layers_of(shape.layers, pp, chunks, stage, chunk))
        flat, tables = _stored(shape, storage, layers, stage == chunk == 0, (stage, chunk) == (pp - 1, chunks - 1))
        shapes += tables.values()
        places += map(flat.in_bucket, tables)
    kinds = {place: kind for kind, place in enumerate(dict.fromkeys(places))}
    return _Matrices(tuple(shapes), np.array([kinds[x] for x in places], np.int64), tuple(kinds), flat.wide)


@lru_cache(maxsize=64)  # of blocks of as many layers
def _stored(
    shape: ModelShape, storage: _Storage, layers: int, first: bool, last: bool
) -> tuple[FlatLayout, dict[str, tuple[int, int]]]:
    """Return the storage of a block of layers on one rank, for the line of matrices, and the shapes of these by name.

    first, last : it begins the model, or ends it.  Buckets are of one block, so that others do not change its own.
    """
    parameters, tables, t = list[Parameter](), dict[str, tuple[int, int]](), storage.tp
    for entry in _of_block(shape, storage, layers, first, last):
        if entry.divided or t == 1:  # others are added along other lines, see `Division.line`
            name = str(len(parameters))
            parameters.append(Parameter(name, (-(-prod(entry.shape) // t),)))
            if entry.matrix:
                tables[name] = entry.shape  # type: ignore[assignment]
    return FlatLayout(tuple(parameters), storage.dtype, bucket_words=storage.bucket_words), tables


def _of_block(shape: ModelShape, storage: _Storage, layers: int, first: bool, last: bool) -> Iterator[_Entry]:
    """Yield the parameters of a block of layers, in the order of the forward pass.

    Without those of a tied table on two stages, which have a line of their own, and of experts that ep divides.
    """
    if first:
        if not storage.tied_ends:
            yield _Entry((shape.table,), divided=True)
        yield _Entry((shape.positions,))
    for _ in range(layers):
        yield from _of_layer(shape, storage.experts)
    if last:
        yield _Entry((shape.norm,))
        if not shape.tied:
            yield _Entry((shape.hidden, shape.vocabulary), divided=True)


def _of_layer(shape: ModelShape, experts: bool) -> Iterator[_Entry]:
    """Yield the parameters of a layer.   experts : with those of experts."""
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
        if experts:
            for words in ((1 + shape.gated) * h * shape.ffn, biases * shape.ffn, shape.ffn * h, biases * h):
                yield _Entry((shape.experts, words))
        return
    for _ in range(2 if shape.gated else 1):
        yield _Entry((h, shape.ffn), divided=True, matrix=True)
    yield _Entry((biases * shape.ffn,), divided=True)
    yield _Entry((shape.ffn, h), divided=True, matrix=True)
    yield _Entry((biases * h,))
