"""Chunks of layers of a pipeline stage, each with its own passes: with stage 3 they gather its parameters alone."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from tiers import in_turn

from pdgemm.errors import ArgumentError
from pdgemm.instrument.recorder import Traffic
from pdgemm.parallel import SGD, Buckets, Initial, Mesh, Part, ShardedOptimizer

pytestmark = pytest.mark.mpi


def model() -> list[dict[str, Any]]:
    """Three chunks, of several parameters, of one, and of one without an element and one."""
    sizes = [{"a": (7, 5), "b": 11, "c": (3, 3)}, {"d": (13, 2)}, {"e": (0, 4), "f": (6, 6)}]
    return [{name: Initial(x, "uniform", seed=ord(name), dtype="d") for name, x in some.items()} for some in sizes]


@pytest.mark.parametrize(("bucket_bytes", "per_node"), in_turn([8, 150, None], ["", "1"]))
def test_a_pass_gathers_its_chunk_alone(
    comm: Any, bucket_bytes: int | None, per_node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order of passes; words and messages are those of its buckets, and without a chunk those of all."""
    if per_node:
        monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", per_node)
    mesh, chunks = Mesh(comm.Dup(), dp=-1), model()
    buckets = Buckets(mesh, chunks, stage=3, bucket_bytes=bucket_bytes)
    layout, whole = buckets.layout, {name: x for some in chunks for name, x in some.items()}
    assert all({*bucket.names} <= {*chunks[bucket.chunk]} for bucket in layout.buckets)
    assert [x.chunk for x in layout.buckets] == sorted((x.chunk for x in layout.buckets), reverse=True)
    for chunk in (0, 1, 0, 2, 2, None, 1):
        names = [*(whole if chunk is None else chunks[chunk])]
        for turn, order in ((buckets.forward, names), (buckets.backward, names[::-1])):
            mesh.traffic.clear()
            with turn(chunk):
                for name in order:
                    assert np.array_equal(buckets.parameters[name].ravel(), whole[name][0 : whole[name].size])
            gathered = (layout.gathering(x) for x in layout.buckets if chunk in (None, x.chunk))
            assert mesh.traffic["parameters"] == sum((x.traffic(mesh.rank) for x in gathered), Traffic())
    mesh.free()


def test_a_parameter_of_another_chunk(comm: Any) -> None:
    """On one rank alone: it is NaN, with a warning; all ranks raise at the end of the step, and the next is right."""
    last = comm.rank == comm.size - 1
    mesh = Mesh(comm.Dup(), tp=-1)
    chunks = [{"a": Part(np.ones(6), tp="sum")}, {"b": Part(np.ones((3, 2 * comm.size)), tp=1)}]
    for used, chunk, turn in (("b", 0, "forward"), ("a", 1, "forward"), ("a", 1, "backward"), ("b", 0, "backward")):
        buckets = Buckets(mesh, chunks, stage=3)  # of which a line has none in each pass, where there are several ranks
        optimizer = ShardedOptimizer(buckets, SGD())
        with warnings.catch_warnings(record=True) as record:
            warnings.simplefilter("always")
            with getattr(buckets, turn)(chunk):
                assert np.isfinite(buckets.parameters["ab"[chunk]]).all()
                if last:
                    assert np.isnan(buckets.parameters[used]).all()
        assert [x.filename for x in record] == [__file__] * last
        what = f"parameters {used} are of chunk {1 - chunk}, and were used in a pass of another one"
        buckets.ready("a", "b")
        with pytest.raises(ArgumentError, match=what):
            optimizer.step(1.0)
        buckets.gradients["b"] += 1.0
        buckets.ready("b", "a")
        assert optimizer.step(1.0).norm == pytest.approx(np.sqrt(6 * comm.size))
        with buckets.forward():
            assert (buckets.parameters["a"] == 1).all() and not buckets.parameters["b"].any()
        with pytest.raises(ArgumentError, match=r"inside forward\(\) and backward\(\) alone"):
            _ = buckets.parameters["a"]
    mesh.free()


def test_chunks_that_are_none(comm: Any) -> None:
    """The same error on all ranks, of a pass before anything is gathered, of a model before anything is allocated."""
    mesh, w = Mesh(comm.Dup(), dp=-1), np.zeros(3)
    for stage in range(4):
        buckets = Buckets(mesh, [{"a": w}, {"b": np.ones(3)}], stage=stage)
        for bad, message in ((2, "must be <= 1, got 2"), (-1, "must be >= 0, got -1"), ("b", "whole number, got 'b'")):
            for turn in (buckets.forward, buckets.backward):
                with pytest.raises(ArgumentError, match=f"chunk .*{message}"), turn(bad):
                    pass
        with buckets.forward(1):
            assert (buckets.parameters["b"] == 1).all()
    one, two = {"a": w, "b": np.ones(3)}, [{"a": w}, {"b": np.ones(3)}]
    wrong: list[tuple[Any, str]] = [
        ([{"a": w}, {"a": np.ones(3)}], "two parameters have the name 'a'"),
        ([{"a": w}, np.ones(3)], "a list of such, one a chunk, got one of ndarray"),
        ([], "at least one parameter"),
    ]
    for chunks, message in wrong:
        with pytest.raises(ArgumentError, match=message):
            Buckets(mesh, chunks)
    cuts = [one, {"c": np.ones(2)}], [{"a": w}, {"b": np.ones(3), "c": np.ones(2)}]
    several: tuple[Any, str]
    for several, message in (((one, two), "1 chunk.*2 chunks"), (cuts, "chunk=0.*chunk=1")):
        with pytest.raises(ArgumentError, match=f"different arguments: .*{message}"):
            Buckets(mesh, several[comm.rank == comm.size - 1], stage=3)
    mesh.free()
