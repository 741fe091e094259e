"""Homes of planned layouts beside the direct way: the elements of each rank of each matrix, one by one.  No MPI."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from math import prod

import numpy as np
import pytest

from pdgemm import balance
from pdgemm.errors import ArgumentError
from pdgemm.local.blas.orthogonal_stacks import work_words
from pdgemm.planning.machines.accelerators import accelerator
from pdgemm.planning.models import home_plan
from pdgemm.planning.models.layout_search import AGAIN, LayoutSearch
from pdgemm.planning.models.model_shape import ModelShape
from pdgemm.planning.models.stage_state import layers_of_stage
from pdgemm.planning.models.training_layout import TrainingLayout
from pdgemm.schedules.training.flat_layout import FlatLayout, Parameter
from pdgemm.schedules.training.home_exchange import HomeLoads
from pdgemm.schedules.training.pipeline_schedule import layers_of


def drawn(draw: random.Random) -> tuple[ModelShape, TrainingLayout]:
    """Return a model, and a layout in which buckets have parts of a layer, or of several."""
    dp, tp, cp = draw.choice([1, 2, 3, 4, 8]), draw.choice([1, 1, 2, 3]), draw.choice([1, 1, 2, 3])
    pp, chunks = draw.choice([1, 2, 3]), draw.choice([1, 1, 2, 3])
    experts = draw.choice([0, 0, 4])
    ep = draw.choice([x for x in (1, 2, 4) if not dp % x]) if experts else 1
    gated, tied = draw.random() < 0.5, draw.random() < 0.5
    ffn = draw.choice([0, 12, 70])
    shape = ModelShape(draw.randint(9, 14), 24, 6, 31, 20, ffn=ffn, experts=experts, gated=gated, tied=tied)
    layout = TrainingLayout(
        dp, tp, pp, cp, ep, zero=draw.randrange(4), chunks=chunks, optimizer="muon",
        schedule="interleaved" if chunks > 1 else "1f1b", dtype=draw.choice(["bfloat16", "float32", "float64"]),
        bucket_words=draw.choice([1, 700, 2000, 9000, 1 << 22]),
    )  # fmt: skip
    return shape, layout


def direct(shape: ModelShape, layout: TrainingLayout, stage: int) -> HomeLoads:
    """Return the loads of one storage of all layers of a stage, a kind for each matrix, as `Homes` has them."""
    storage = home_plan._Storage(layout.tp, layout.pp > 1 and shape.tied, layout.ep == 1, layout.element, 0)
    parameters, tables = list[Parameter](), dict[str, tuple[int, ...]]()
    for chunk in range(layout.chunks):
        layers = len(layers_of(shape.layers, layout.pp, layout.chunks, stage, chunk))
        last = stage == layout.pp - 1 and chunk == layout.chunks - 1
        for at, entry in enumerate(home_plan._of_block(shape, storage, layers, stage == chunk == 0, last)):
            if entry.divided or layout.tp == 1:
                parameters.append(Parameter(f"{chunk}.{at}", (-(-prod(entry.shape) // layout.tp),), chunk))
                tables |= {f"{chunk}.{at}": entry.shape} if entry.matrix else {}
    flat = FlatLayout(tuple(parameters), layout.element, layout.copies, layout.zero, layout.bucket_words)
    own = np.zeros((len(tables), layout.copies * layout.tp), np.int64)
    for at, name in enumerate(tables):
        bucket = flat.bucket_of[name]
        for rank in range(own.shape[1]):
            dp, cp = rank // layout.tp // layout.cp, rank // layout.tp % layout.cp
            span = flat.part(bucket, cp * layout.dp + dp) if layout.zero else slice(bucket.start, bucket.stop)
            elements, _ = flat.overlap(name, span)
            own[at, rank] = elements.stop - elements.start
    return HomeLoads(tuple(tables.values()), own, np.arange(len(own)), flat.wide)  # type: ignore[arg-type]


def test_homes_are_those_of_each_matrix_by_itself() -> None:
    draw = random.Random(7)
    for _ in range(60):
        shape, layout = drawn(draw)
        for stage in range(layout.pp):
            loads, other = home_plan.home_loads(shape, layout, stage), direct(shape, layout, stage)
            what = shape, layout, stage
            layers = [layers_of(shape.layers, layout.pp, layout.chunks, stage, x) for x in range(layout.chunks)]
            assert layers_of_stage(*what) == sum(map(len, layers)), what
            assert loads.shapes == other.shapes and loads.dtype == other.dtype, what
            assert np.array_equal(loads.own, other.own), what
            own, homes = loads.own, balance([(min(x), min(x), max(x)) for x in loads.shapes], loads.ranks)
            assert np.array_equal(loads.homes, homes), what
            matrices, work = np.zeros((2, loads.ranks), np.int64)
            arrives, received = np.zeros((2, loads.ranks), np.int64)
            for at, (m, n) in enumerate(loads.shapes):
                matrices[homes[at]] += m * n
                arrives[homes[at]] += own[at].sum()
                received += own[at]
                received[homes[at]] += m * n - 2 * own[at, homes[at]]
            wide = [(min(x), max(x)) for x in loads.shapes]
            for rank, size in ((rank, x) for rank in range(loads.ranks) for x in dict.fromkeys(wide)):
                stack = sum(x == size and home == rank for x, home in zip(wide, homes))
                work[rank] = max(work[rank], work_words(stack, *size, loads.dtype))
            updated = own.sum(axis=0)
            sizes = [np.maximum(updated, arrives), np.maximum(updated, matrices), matrices, work]
            assert np.array_equal([*loads.buffers.values()], sizes), what
            assert np.array_equal(loads.received, received) and np.array_equal(loads.updated, updated), what
            assert np.array_equal(loads.bytes, sum(sizes) * loads.dtype.itemsize), what
            assert (loads.least_updated, loads.most_bytes) == (updated.min(), loads.bytes.max()), what
            assert not loads.homes.flags.writeable  # others have the same ones


def test_the_least_that_fits_is_computed_again() -> None:
    machine, fixed = replace(accelerator("h100"), memory=4.5e9), TrainingLayout(fused=False)
    search = LayoutSearch(ModelShape(24, 1024, 16, 50257, 1024), 64, 8, machine, fixed=fixed)
    alone = (replace(search, recompute=(x,)).plans() for x in AGAIN)
    fastest = [next((x for x in tried if not x.refused), tried[-1]) for tried in zip(*alone)]
    assert [x.layout for x in search.plans()] == [x.layout for x in fastest]
    assert {(x.layout.recompute, bool(x.refused)) for x in fastest} == {*product(AGAIN, [False]), ("full", True)}
    for recompute in ((), ("full", "none"), ("none", "none"), ("all",), "full"):
        with pytest.raises(ArgumentError, match="recompute is some of none, selective, full, in this order"):
            replace(search, recompute=recompute)
