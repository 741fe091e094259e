"""Meshes, flat layouts, orders of samples, loss scales and rates as values: without MPI."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise, product

import numpy as np
import pytest

from pdgemm.errors import ArgumentError, MeshError
from pdgemm.instrument.recorder import Traffic
from pdgemm.parallel.exact_squares import as_float, as_numbers, exact_squares
from pdgemm.parallel.updates.loss_scale import LossScale
from pdgemm.parallel.updates.rates import linear_scaling, warmup_cosine
from pdgemm.parallel.updates.update_rules import SGD, AdamW
from pdgemm.schedules.collectives.collective import sum_of_numbers
from pdgemm.schedules.training.flat_layout import FlatLayout, Parameter
from pdgemm.schedules.training.joint_layout import JointLayout, LineLayout
from pdgemm.schedules.training.mesh_shape import AXES, MeshShape, block_of
from pdgemm.schedules.training.parameter_division import Division, Line

SHAPES = [(13, 17), (17,), (17, 10), (10,), (3, 3, 5, 2), ()]
PARAMETERS = tuple(Parameter(f"p{at}", shape) for at, shape in enumerate(SHAPES))


def test_words_are_those_of_the_formulas() -> None:
    """(d-1)/d N words for each reduce-scatter and all-gather, by every transport: sums over all ranks are exact."""
    for d in range(1, 10):
        for how in ({}, {"mover": "shared", "reduce_by": "pairwise", "gather_by": "pairwise"}):
            for stage, gradients, parameters in ((0, 2, 0), (1, 1, 1), (2, 1, 1), (3, 1, 2)):
                layout = FlatLayout(PARAMETERS, np.dtype("d"), d, stage, bucket_words=100, **how)  # type: ignore[arg-type]
                received = [layout.step(index) for index in range(d)]
                for kind, times in (("gradients", gradients), ("parameters", parameters)):
                    assert sum(x[kind].words_received for x in received) == times * (d - 1) * layout.words
                assert sum(layout.owned(index) for index in range(d)) == layout.words


def test_a_bucket_has_parameters_of_one_chunk() -> None:
    """Each is gathered twice for a microbatch, as without chunks, whose words are the same in all."""
    chunked = tuple(x._replace(chunk=at // 2) for at, x in enumerate(PARAMETERS))
    for words in (1, 100, 1000):
        one, several = (FlatLayout(x, np.dtype("d"), 3, 3, words, microbatches=2) for x in (PARAMETERS, chunked))
        assert one.places == several.places and {x.chunk for x in one.buckets} == {0}
        for bucket in several.buckets:
            assert {f"p{2 * bucket.chunk}", f"p{2 * bucket.chunk + 1}"} >= {*bucket.names}
            assert bucket.words <= words or len(bucket.names) == 1
        assert {x.chunk for x in several.buckets} == {0, 1, 2}
        for kind in ("gradients", "parameters"):
            received = [sum(x.step(index)[kind].words_received for index in range(3)) for x in (one, several)]
            assert received == [2 * one.words * (4 if kind == "parameters" else 1)] * 2


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (4, 1, 2, 3), (2, 3, 2, 2), (6, 1, 1, 2)])
def test_every_rank_has_one_place_in_a_mesh(sizes: tuple[int, int, int, int]) -> None:
    dp, cp, tp, pp = sizes
    for ep in (x for x in range(1, dp + 1) if dp % x == 0):
        shape = MeshShape(dp, cp, tp, pp, ep)
        ranks = [shape.rank(dp=d, cp=c, tp=t, pp=p) for p, d, c, t in product(*map(range, (pp, dp, cp, tp)))]
        assert ranks == [*range(shape.size)]  # tp varies fastest, then cp, dp, pp
        grid = shape.ranks  # the same mesh as a process grid of any number of axes
        for axis in ("pp", "edp", "ep", "cp", "tp"):
            neighbours = shape.line(axis, 0)
            assert len(neighbours) == grid.lengths[axis]
            assert len(neighbours) == 1 or neighbours[1] == grid.strides[axis]


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (4, 2, 1, 3, 2), (2, 1, 3, 4, 1), (6, 1, 2, 2, 3)])
def test_lines_along_axes(sizes: tuple[int, ...]) -> None:
    """Their ranks have the same indices along all others, and of joined axes the last one varies fastest."""
    shape = MeshShape(*sizes)
    joined = ("dp+cp", "cp+dp", "dp+cp+tp", "edp+cp+tp", "ep+tp", "pp+tp", "ends", "ends+dp+cp", "ends+tp+dp")
    for axis in (*AXES, "ep", "edp", *joined):
        lines = [*shape.lines(axis)]
        assert sorted(rank for line in lines for rank in line) == [*range(shape.size)]
        names = [x for name in axis.split("+") for x in (("edp", "ep") if name == "dp" else (name,))]
        for line in lines:
            assert len(line) == len({*line}) == shape.length(axis, line[-1])
            assert all(shape.line(axis, rank) == line and line[shape.index(axis, rank)] == rank for rank in line)
            end = "ends" in names and shape.index("pp", line[0]) in (0, shape.pp - 1)
            moving = ["pp" if x == "ends" else x for x in names if x != "ends" or end]
            stages = shape.pp if "pp" in names else min(2, shape.pp) if end else 1
            assert len(line) == stages * np.prod([shape.length(x) for x in names if x not in ("pp", "ends")])
            fixed = [x for x in ("pp", "edp", "ep", "cp", "tp") if x not in moving]
            assert len({tuple(shape.index(x, rank) for x in fixed) for rank in line}) == 1
            places = [tuple(shape.index(x, rank) for x in moving) for rank in line]
            assert places == sorted(places)
    assert shape.axes("edp+ep") == shape.axes("dp") and shape.line("dp+cp", 0) == tuple(sorted(shape.line("cp+dp", 0)))
    assert MeshShape(pp=3, dp=2).line("ends", 2) == (2,) and MeshShape(pp=3).line("ends", 2) == (0, 2)


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1, 1), (4, 2, 1, 3, 2), (2, 2, 5, 1, 2)])
def test_windows_of_a_division(sizes: tuple[int, ...]) -> None:
    """Those of the owners make up the whole once, and the ranks of a line have the same window."""
    shape = MeshShape(*sizes)
    hows = ({}, {"tp": 1}, {"tp": "sum"}, {"tp": 0, "tied": True}, {"ep": 0}, {"ep": 0, "tp": "sum"}, {"tied": True})
    for how, extent in product(hows, ((7, 4), (2, 3), (1, 0))):
        division = Division(extent, **how)  # type: ignore[arg-type]
        stages = sorted({0, shape.pp - 1}) if division.tied else [shape.pp - 1]
        counts, axis = np.zeros(extent, int), division.line(shape).axis
        for rank, window in division.owners(shape, stages).items():
            assert counts[window].size and window == division.window(shape, rank)
            assert shape.index("pp", rank) == stages[0]
            counts[window] += 1
        assert (counts == 1).all()
        windows = [division.window(shape, rank) for rank in range(shape.size)]
        assert all(windows[rank] == windows[x] for rank in range(shape.size) for x in shape.line(axis, rank))
        whole = tuple(slice(0, n) for n in extent)
        if division.everywhere(shape, stages):
            assert all(window == whole for window in windows) and len(stages) == shape.pp
    for how, line in (
        ({}, (["cp", "dp"], shape.tp)), ({"tp": 0}, (["cp", "dp"], 1)), ({"tp": "sum"}, (["tp", "cp", "dp"], 1)),
        ({"ep": 0}, (["tp", "cp", "edp" if shape.ep > 1 else "dp"], 1)),
        ({"tied": True}, (["ends", "cp", "dp"], shape.tp)),
    ):  # fmt: skip
        names = [x for x in line[0] if x in ("dp", "edp") or (shape.pp if x == "ends" else shape.length(x)) > 1]
        assert Division((3, 2), **how).line(shape) == ("+".join(names), line[1])  # type: ignore[arg-type]


def test_words_and_bytes_of_several_lines() -> None:
    """They are sums over the lines, with one decision of all ranks and a norm for each line."""
    one, two = (FlatLayout(PARAMETERS[at:], np.dtype("d"), d, stage) for at, d, stage in ((0, 3, 2), (3, 2, 1)))
    lines = (LineLayout(Line("dp", 1), one, 2), LineLayout(Line("tp+dp", 1), two, 1))
    joint = JointLayout(lines, (Line("dp", 1), Line("dp", 2), Line("tp+dp", 1)), one, 6, 5)
    step = joint.step()
    for kind in ("gradients", "parameters"):
        assert step[kind] == one.step(2)[kind] + two.step(1)[kind]
    assert step["decisions"] == sum_of_numbers(6, 6).traffic(5) and joint.updates() == step["parameters"]
    assert joint.bytes(2) == {kind: n + two.bytes(1, 2)[kind] for kind, n in one.bytes(2, 2).items()}
    alone = JointLayout((LineLayout(Line("dp", 1), one, 2),), (Line("dp", 1),), one, 3, 2)
    assert alone.step() == one.step(2) and alone.bytes(2) == one.bytes(2, 2)


def test_blocks_are_those_of_matrices() -> None:
    for n, parts in product((0, 1, 5, 12, 13), (1, 2, 3, 5, 14)):
        block = -(-n // parts)
        for index in range(parts):
            assert range(n)[block_of(n, parts, index)] == range(n)[index * block :][:block]


def test_a_mesh_draws_itself() -> None:
    shape = MeshShape(dp=2, tp=2, pp=2, nodes=(0, 0, 0, 0, 1, 1, 1, 1))
    text = str(shape).splitlines()
    assert text[:2] == ["pp 0   dp 0    0 1", "pp 0   dp 1    2 3"]
    assert text[2] == "pp 1   dp 0   |4 5"
    assert "pp 2: layers (pipeline), between nodes" in text and "tp 2: columns of layers (tensor), on a node" in text
    assert shape.crosses("pp") and not shape.crosses("dp") and shape.sizes == "pp 2 x dp 2 x tp 2"
    for sizes, message in (
        ({"dp": 0}, "1 or more"),
        ({"dp": 3, "ep": 2}, "ep 2 does not divide dp 3"),
        ({"dp": 2, "nodes": (0,)}, "a mesh of 2 ranks, and nodes of 1"),
    ):
        with pytest.raises(MeshError, match=message):
            MeshShape(**sizes)
    for axis in ("xp", "dp+xp", "dp+", "dp+ep", "cp+cp", "pp+ends", ""):
        with pytest.raises(MeshError, match=r"axes of a mesh are pp, dp, cp, tp, ep, edp, ends, .* as dp\+cp; got '"):
            shape.line(axis, 0)
    with pytest.raises(MeshError, match="outside of the mesh"):
        shape.rank(dp=2)


@pytest.mark.parametrize("bucket_words", [1, 200, 10**6])
def test_flat_storage(bucket_words: int) -> None:
    """Every element lies in one bucket and belongs to one rank; for twice as many ranks the parts are halves."""
    for d in (1, 2, 3, 8, 600):
        layout = FlatLayout(PARAMETERS, np.dtype("f"), d, 1, bucket_words)
        assert [*layout.places] == [f"p{at}" for at in range(len(SHAPES))][::-1]
        assert [x.start for x in layout.buckets] == [0, *(x.stop for x in layout.buckets[:-1])]
        assert layout.buckets[-1].stop == layout.words == 221 + 17 + 170 + 10 + 90 + 1
        assert all(x.words <= bucket_words or len(x.names) == 1 for x in layout.buckets)
        assert [name for x in layout.buckets for name in x.names] == [*layout.places]
        owners = np.zeros(layout.words, int)
        for bucket in layout.buckets:
            for index in range(d):
                owners[layout.part(bucket, index)] += 1
                halves = FlatLayout(PARAMETERS, np.dtype("f"), 2 * d, 1, bucket_words)
                two = halves.part(bucket, 2 * index), halves.part(bucket, 2 * index + 1)
                assert layout.part(bucket, index) == slice(two[0].start, two[1].stop)
        assert (owners == 1).all()
        span, total = slice(5, 300), 0
        for name, place in layout.places.items():
            elements, there = layout.overlap(name, span)
            total += there.stop - there.start
            assert elements.stop - elements.start == there.stop - there.start >= 0
            assert elements == there or place.start + elements.start == 5 + there.start
        assert total == 295
        for index in range(d):
            kept = [layout.kept(bucket, index) for bucket in layout.buckets]
            assert [x.start for x in kept] == [0, *(x.stop for x in kept[:-1])]
            assert kept[-1].stop == layout.owned(index)


def test_bytes_and_words_are_those_of_the_formulas() -> None:
    """The table of ZeRO (Rajbhandari et al. 2020): 2 bytes for parameters, 4 for gradients here, 12 for AdamW."""
    n, one = 1 << 20, (Parameter("w", (1 << 20,)),)
    for d, (stage, expected) in product((1, 4, 64), enumerate([18, (6, 12), (2, 16), (0, 18)])):
        layout = FlatLayout(one, np.dtype("float16"), d, stage, bucket_words=n)
        whole, divided = expected if isinstance(expected, tuple) else (expected, 0)
        sizes = layout.bytes(0, state_words=2)
        buffers = sizes.pop("buffers")
        assert sum(sizes.values()) == n * whole + n * divided // d
        assert buffers == 2 * n * (4 * (stage > 1) + 2 * (stage == 3))
    accumulated = FlatLayout(one, np.dtype("d"), 4, 3, microbatches=4)
    each = FlatLayout(one, np.dtype("d"), 4, 3, microbatches=4, reduce_each=True)
    assert accumulated.bytes(0, 2)["gradients"] == 8 * n and each.bytes(0, 2)["gradients"] == 2 * n
    assert each.step(0)["gradients"].words_received == 4 * accumulated.step(0)["gradients"].words_received
    assert accumulated.step(0)["parameters"].words_received == 8 * (3 * n // 4)  # twice for each microbatch
    tree = FlatLayout(one, np.dtype("d"), 4, 0, microbatches=8, tree=True)
    assert tree.bytes(0, 2)["gradients"] == 4 * 8 * n  # log2 8 + 1 partial sums
    twice = replace(tree, uses=2)
    assert twice.bytes(0, 2)["gradients"] == 2 * 4 * 8 * n and twice.times == 16
    assert twice.step(0)["gradients"] == tree.step(0)["gradients"] + tree.step(0)["gradients"]
    assert tree.step(0)["decisions"] == sum_of_numbers(3 + 66, 4).traffic(0)
    assert FlatLayout(one, np.dtype("d")).step(0)["gradients"] == Traffic()


@pytest.mark.parametrize("dtype", ["f", "d"])
def test_exact_sums_of_squares(dtype: str) -> None:
    """Those of fractions, of numbers of all magnitudes and of one, whole and in parts of any order."""
    rng, (least, most) = np.random.default_rng(3), (-149, 125) if dtype == "f" else (-1074, 477)
    wide = np.ldexp(rng.standard_normal(5_000), rng.integers(least, most, 5_000)).astype(dtype)
    alike = rng.uniform(0.95, 1, 1 << 13).astype(dtype)
    for x in (wide, alike, alike[:-2] * 2.0**-70, wide[:1], np.zeros(9, dtype), np.zeros(0, dtype)):
        exact = sum(map(Fraction, np.square(x, dtype="d").tolist()), Fraction(0))
        assert exact_squares(x) == exact * 2**1074
        parts = np.split(rng.permutation(x), np.sort(rng.integers(0, 5_000, 6)))
        assert as_float(sum(as_numbers(exact_squares(part)) for part in parts)) == float(exact)
    for bad in (np.nan, np.inf, *([2.0**480, -1e200] if dtype == "d" else [])):
        with np.errstate(over="ignore"):
            assert exact_squares(np.array([1, bad, 2], dtype)) is None
    assert np.isinf(as_numbers(None)).all()
    assert as_float(as_numbers(2 ** (1074 + 960 + 63))) == 2.0**1023  # of 2^63 squares of 2^960


def test_loss_scales() -> None:
    scale = LossScale(8.0, growth_every=3)
    for overflow, expected in ((False, 8), (False, 8), (False, 16), (False, 16), (True, 8), (False, 8), (True, 4)):
        scale = scale.after(overflow)
        assert scale.scale == expected
    assert LossScale(2.0**24, growth_every=1).after(False).scale == 2.0**24
    assert LossScale(2.0**-14).after(True).scale == 2.0**-14
    positive, bounds = "scale must be a real number > 0", "the scale of the loss is 6.10352e-05 to 1.67772e\\+07, got"
    for bad in (0.0, -1.0, np.inf, np.nan, 2.0**-15, 2.0**25):
        with pytest.raises(ArgumentError, match=positive if bad * 0 != 0 or bad <= 0 else bounds):
            LossScale(bad)


def test_rates() -> None:
    rates = [warmup_cosine(step, 0.1, 4, 20, 0.01) for step in range(25)]
    assert np.allclose(rates[:4], [0.025, 0.05, 0.075, 0.1]) and rates[4] == 0.1
    assert all(a >= b for a, b in pairwise(rates[4:])) and np.allclose(rates[20:], 0.01)
    assert linear_scaling(0.1, 512, 128) == 0.4
    with pytest.raises(ArgumentError):
        warmup_cosine(0, 0.1, 30, 20)


@pytest.mark.parametrize("dtype", ["f", "d"])
def test_rules_are_those_of_their_papers(dtype: str) -> None:
    """Against formulas as they are written, element by element; parts are updated as the whole is."""
    rng, n = np.random.default_rng(0), 5_000
    p, tolerance = rng.standard_normal(n).astype(dtype), 1e-12 if dtype == "d" else 2e-5
    for rule in (AdamW(0.8, 0.9, 1e-6, 0.1), SGD(), SGD(0.9, weight_decay=0.1), SGD(0.9, nesterov=True)):
        x, parts, q = p.copy(), p.copy(), p.astype(float)
        state = np.zeros((len(rule.kept), n), dtype)
        state_parts, m, v = state.copy(), np.zeros(n), np.zeros(n)
        for step in range(1, 4):
            g = rng.standard_normal(n).astype(dtype)
            rule.update(x, g.copy(), state, step, 0.01, True)
            for span in (slice(0, 123), slice(123, n)):
                rule.update(parts[span], g[span].copy(), state_parts[:, span], step, 0.01, True)
            g = g.astype(float)
            if isinstance(rule, AdamW):
                m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
                q = q - 0.01 * (m / (1 - 0.8**step) / (np.sqrt(v / (1 - 0.9**step)) + 1e-6) + 0.1 * q)
            else:
                g = g + rule.weight_decay * q
                m = rule.momentum * m + g
                q = q - 0.01 * (g + rule.momentum * m if rule.nesterov or not rule.momentum else m)
        np.testing.assert_allclose(x, q, rtol=tolerance, atol=tolerance)
        assert np.array_equal(x, parts)
