"""Meshes, flat storage, positions along cp, and orders of samples as values: without MPI."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from pdgemm.errors import ArgumentError, MeshError
from pdgemm.schedules.training.context_schedule import ContextSchedule
from pdgemm.schedules.training.flat_shards import FlatShards
from pdgemm.schedules.training.mesh_shape import AXES, MeshShape, block_of

WORDS, UNITS = (1, 90, 10, 170, 17, 221, 3), (0, 0, 0, 1, 1, 2, 3)


@pytest.mark.parametrize("d", [1, 2, 3, 8, 600])
def test_flat_storage(d: int) -> None:
    """Each element is in one bucket, and one rank has it; parts differ by one word at most."""
    shards = FlatShards(tuple("abcdefg"), WORDS, UNITS, (1, 1, 2, 1), d, 1, np.dtype("f"))
    assert [x.stop - x.start for x in shards.places.values()] == [*WORDS]
    assert [x.names for x in shards.buckets] == [("a", "b", "c"), ("d", "e"), ("f",), ("g",)]
    owners = np.zeros(sum(WORDS), int)
    for bucket in shards.buckets:
        counts = shards.counts(bucket)
        assert max(counts) - min(counts) <= 1 and sum(counts) == bucket.words
        for index in range(d):
            part = shards.part(bucket, index)
            assert part.stop - part.start == counts[index]
            owners[part] += 1
    assert (owners == 1).all()


def test_words_of_flat_storage() -> None:
    """(d-1)/d N words for each reduce-scatter and all-gather: sums over all ranks are exact."""
    for d, microbatches in product((1, 2, 5), (1, 3)):
        for stage, gradients in enumerate((2, 1, microbatches, microbatches)):
            shards = FlatShards(tuple("abcdefg"), WORDS, UNITS, (1, 1, 2, 1), d, stage, np.dtype("d"))
            received = [shards.traffic(index, microbatches) for index in range(d)]
            total = {kind: sum(x[kind].words_received for x in received) for kind in ("gradients", "parameters")}
            passes = (0, sum(WORDS), sum(WORDS), microbatches * (2 * sum(WORDS) + 221))[stage]  # two use bucket 2
            assert total == {"gradients": gradients * (d - 1) * sum(WORDS), "parameters": (d - 1) * passes}
    with pytest.raises(ArgumentError, match="zero is 0, 1, 2 or 3, got 4"):
        FlatShards((), (), (), (), 1, 4, np.dtype("d"))


def test_bytes_of_flat_storage() -> None:
    """ZeRO's formulas with Adam in 16 bits: 2 + 4 + 12 bytes an element, of which stages 1, 2 and 3 divide more."""
    for stage, each in enumerate(((2, 4, 12), (2, 4, 1.5), (2, 0.5, 1.5), (0.25, 0.5, 1.5))):
        shards = FlatShards(("a",), (1024,), (0,), (1,), 8, stage, np.dtype(np.float16))
        assert [*shards.bytes(0, 2).values()] == [1024 * x for x in each]


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (4, 1, 2, 3), (2, 3, 2, 2), (6, 1, 1, 2)])
def test_every_rank_has_one_place_in_a_mesh(sizes: tuple[int, int, int, int]) -> None:
    dp, cp, tp, pp = sizes
    for ep in (x for x in range(1, dp + 1) if dp % x == 0):
        shape = MeshShape(dp, cp, tp, pp, ep)
        places = [tuple(shape.index(axis, rank) for axis in AXES) for rank in range(shape.size)]
        assert places == [*product(*map(range, (pp, dp, cp, tp)))]  # tp varies fastest, then cp, dp, pp
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


def test_chunks_of_positions() -> None:
    schedule = ContextSchedule(33, (0, 1, 2))
    positions = [schedule.positions(rank).tolist() for rank in range(3)]
    assert positions == [[*range(6), *range(30, 33)], [*range(6, 12), *range(24, 30)], [*range(12, 24)]]
    assert schedule.counts == (9, 12, 12) and ContextSchedule(4, (0, 1, 2)).counts == (1, 1, 2)


@pytest.mark.parametrize("sequence", [1, 5, 33, 64, 1000])
@pytest.mark.parametrize("c", [1, 2, 3, 8])
def test_each_position_is_on_one_rank(sequence: int, c: int) -> None:
    """Where 2c divides the sequence, the queries of each rank see the same number of keys."""
    schedule = ContextSchedule(sequence, tuple(range(c)))
    positions = [schedule.positions(rank) for rank in range(c)]
    assert sorted(np.concatenate(positions).tolist()) == [*range(sequence)]
    if sequence % (2 * c) == 0:
        assert len({(own + 1).sum() for own in positions}) == 1
