"""Buckets of parameters and gradients: waits, initial values, types of few bits, overflows and trees."""

from __future__ import annotations

import tracemalloc
from itertools import product
from time import sleep
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from perceptron import initial, microbatch, own, samples, trained
from tiers import square_grid

from pdgemm import DistMatrix, ProcessGrid
from pdgemm.errors import ArgumentError, DTypeError, MeshError, PdgemmError
from pdgemm.local.blas import local_gemm
from pdgemm.parallel import SGD, AdamW, Buckets, Initial, LossScale, Mesh, ShardedOptimizer

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("per_node", ["", "1"])
def test_sums_while_gradients_are_reduced(comm: Any, per_node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that waits for a sum, as that of batch statistics, lets the reductions go on for which others wait."""
    if per_node:
        monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", per_node)
    mesh, p = Mesh(comm.Dup(), dp=-1), comm.size
    for stage in range(4):
        buckets = Buckets(mesh, {f"w{k}": np.full(50 + k, 1.0) for k in range(12)}, stage=stage, bucket_bytes=600)
        optimizer = ShardedOptimizer(buckets, SGD())
        for step in range(1, 3):
            with buckets.backward():
                for k in reversed(range(12)):
                    if k == 5 and comm.rank % 2:  # while others wait for the reduction of w7, which had this slot
                        assert mesh.sum(comm.rank, k) == [p * (p - 1) / 2, k * p]
                    buckets.gradients[f"w{k}"] += k * (comm.rank + 1.0)
                    if k == 5 and comm.rank % 2 == 0:
                        assert mesh.sum(comm.rank, k) == [p * (p - 1) / 2, k * p]
                    if k == 7 and comm.rank % 2 == 0:
                        sleep(0.02)
                    buckets.ready(f"w{k}")
                    if k > 9:
                        assert mesh.sum(comm.rank, k) == [p * (p - 1) / 2, k * p]
            optimizer.step(1.0)
            assert mesh.sum(1.0) == [p]
            with buckets.forward():
                for k in range(12):
                    assert (buckets.parameters[f"w{k}"] == 1 - step * k * p * (p + 1) / 2).all(), (stage, step, k)
    mesh.free()


def test_initial_values_by_formulas(comm: Any) -> None:
    """They are those of matrices and arrays on any number of ranks; with stage 3 a rank computes what it keeps."""

    def table(i: Any, j: Any) -> Any:
        assert np.max(i) < 11  # no rank computes rows that a parameter does not have
        return 100.0 * i + j

    mesh, how = Mesh(comm.Dup(), dp=-1), {"dtype": "float64"}
    with ProcessGrid(comm) as grid:
        normal = DistMatrix.random((7, 30), grid=grid, seed=5, kind="normal").allgather()
        vector = DistMatrix.random((1, 41), grid=grid, seed=6).allgather()[0]
    values: dict[str, Any] = {
        "n": Initial((7, 3, 2, 5), "normal", seed=5, scale=0.5, **how), "u": Initial(41, "uniform", seed=6, **how),
        "t": Initial((11, 4), table, **how), "z": Initial((0, 3), "ones", **how), "s": Initial((), "ones", **how),
        "plain": np.arange(6.0),
    }  # fmt: skip
    exact: dict[str, Any] = {
        "n": 0.5 * normal.reshape(7, 3, 2, 5), "u": vector, "t": table(*np.indices((11, 4))), "z": np.ones((0, 3)),
        "s": np.ones(()), "plain": np.arange(6.0),
    }  # fmt: skip
    for stage in range(4):
        for bucket_bytes, dtype in ((None, "float64"), (64, "float16")):
            buckets = Buckets(mesh, values, stage=stage, bucket_bytes=bucket_bytes, dtype=dtype)
            with buckets.forward():
                for name, value in exact.items():
                    assert np.array_equal(buckets.parameters[name], value.astype(dtype)), (stage, name)
            optimizer = ShardedOptimizer(buckets, SGD())
            for bucket in buckets.layout.buckets:
                for name in bucket.names:
                    elements, _ = buckets.layout.overlap(name, buckets.storage.span(bucket))
                    wide = exact[name].reshape(-1)[elements].astype(buckets.layout.wide)
                    assert np.array_equal(optimizer.kept("parameters", name), wide), name
    mesh.free()


def test_parameters_are_read_and_set_by_a_method(comm: Any) -> None:
    """What is written into the array of a pass would not reach master weights, nor parts that other ranks keep."""
    mesh = Mesh(comm.Dup(), dp=-1)
    for stage, dtype in ((0, "float16"), (1, "float64"), (2, "float16"), (3, "float16"), (3, "float64")):
        buckets: Any = Buckets(mesh, {"v": np.zeros(5), "w": np.zeros((3, 2))}, stage=stage, dtype=dtype)
        optimizer = ShardedOptimizer(buckets, SGD())
        with buckets.forward():
            with pytest.raises(ValueError, match="read-only"):
                buckets.parameters["w"][0] = 1
            with pytest.raises(TypeError, match="item assignment"):
                buckets.parameters["w"] = np.ones((3, 2))
        buckets.set_parameter("w", np.arange(6.0).reshape(3, 2) / 3)
        with pytest.raises(ArgumentError, match="parameter 'v' has 5 elements, got 6"):
            buckets.set_parameter("v", np.zeros(6))
        for step in range(2):
            with buckets.forward():
                wanted = (np.arange(6.0).reshape(3, 2) / 3).astype(buckets.layout.wide) - step * comm.size
                assert (
                    np.array_equal(buckets.parameters["w"], wanted.astype(dtype)) and not buckets.parameters["v"].any()
                )
            buckets.gradients["w"] += 1.0
            buckets.ready("w", "v")
            optimizer.step(1.0)
    mesh.free()


def test_parameters_of_stage_3_are_valid_as_long_as_they_are_kept(comm: Any) -> None:
    """Taken before they are used, each from a bucket of its own, of which two are in memory at a time."""
    mesh = Mesh(comm.Dup(), dp=-1)
    values = {f"w{k}": Initial((5, 7), "uniform", seed=k) for k in range(6)}
    buckets = Buckets(mesh, values, stage=3, bucket_bytes=4)
    assert len(buckets.layout.buckets) == len(values)
    for turn, order in ((buckets.forward, [*values]), (buckets.backward, [*values][::-1])):
        with turn():
            taken = {name: buckets.parameters[name] for name in order}
            for name, x in taken.items():
                np.testing.assert_array_equal(x.ravel(), values[name][0:35])
    mesh.free()


def test_initial_values_take_the_memory_of_what_is_kept(comm: Any) -> None:
    """Also where the model is much larger; and bad formulas are errors of all ranks."""
    mesh = Mesh(comm.Dup(), dp=-1)
    tracemalloc.start()
    buckets = Buckets(mesh, {f"w{k}": Initial((500, 400), "uniform", seed=k) for k in range(12)}, stage=3)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most <= sum(buckets.storage.bytes.values()) + 4 * (500 * 400) + 64 * (1 << 16)
    with pytest.raises(ArgumentError, match="shape"):
        Initial((3, -1))
    with pytest.raises(ArgumentError, match="kind 'gauss' is not one of"):
        Initial(3, "gauss")
    with pytest.raises(ArgumentError, match="Initial"):
        Buckets(mesh, {"w": Initial(3, "normal", seed=comm.rank)})

    def fails(i: Any, j: Any) -> Any:
        if comm.rank == comm.size - 1:
            raise ValueError("no such element")
        return 0.0

    with pytest.raises((ValueError, PdgemmError), match="no such element"):
        Buckets(mesh, {"w": Initial(3, fails)})
    mesh.free()


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_that_come_in_late(comm: Any, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between nodes a step ends before the updates of a slow rank have come in; who takes a parameter waits for it."""

    class Slow(SGD):
        def update(self, *arguments: Any) -> None:
            if comm.rank == comm.size - 1:
                sleep(0.02)
            super().update(*arguments)

    monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", "1")
    mesh = Mesh(comm.Dup(), dp=-1)
    buckets = Buckets(mesh, {"v": np.zeros(100), "w": np.zeros((30, 5))}, stage=stage, bucket_bytes=600)
    assert buckets.layout.mover == "ring" and buckets.layout.gathers_late
    optimizer = ShardedOptimizer(buckets, Slow())
    for step in range(1, 4):
        for name in ("w", "v"):
            buckets.gradients[name] -= 1.0
            buckets.ready(name)
        optimizer.step(1.0)
        assert all((buckets.parameters[name] == step * comm.size).all() for name in ("v", "w"))
    mesh.free()


@pytest.mark.parametrize("per_node", ["", "1"])
def test_products_let_messages_go_on(comm: Any, per_node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every order and type, added or not, in one piece where parts are read in place, else with a poll for each."""
    if per_node:
        monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", per_node)
    monkeypatch.setattr(local_gemm, "SLAB_ROWS", 2)
    monkeypatch.setattr(local_gemm, "SLAB_FLOPS", 500.0)
    mesh, rng, polls = Mesh(comm.Dup(), dp=-1), np.random.default_rng(3), list[int]()
    buckets = Buckets(mesh, {"w": np.zeros((9, 7), "f")})
    monkeypatch.setattr(buckets, "poll", lambda: polls.append(1))
    for (m, k, n), order in product([(9, 30, 7), (5, 4, 40), (3, 0, 2)], product("CF", repeat=2)):
        a, b = (np.asarray(rng.standard_normal(x).astype("f"), order=o) for x, o in zip(((m, k), (k, n)), order))
        c = rng.standard_normal((m, n))
        exact = a.astype("d") @ b
        polls.clear()
        result = buckets.multiply(a, b)
        assert result.dtype == np.float32 and np.allclose(result, exact, rtol=1e-5, atol=1e-4)
        assert (len(polls) > 1) == (comm.size > 1 and bool(per_node) and k > 0)
        wanted = c + exact
        assert buckets.multiply(a[:, ::-1], b[::-1], add_to=c) is c and np.allclose(c, wanted, rtol=1e-13)
        assert np.allclose(buckets.multiply(a[:, ::-1], b[::-1]), exact, rtol=1e-5, atol=1e-4)
        assert np.allclose(buckets.multiply(a.astype("f2"), b.astype("f2")), exact, rtol=1e-2, atol=2e-2)
    a, b = np.ones((4, 3)), np.ones((3, 2))
    for bad in ((a, a), (a, b[0]), (a[0], b), (a, b, np.ones((4, 1))), (a, b, np.ones((2, 2))), (a, b, np.ones(2))):
        with pytest.raises(ArgumentError, match="shapes that are no product A B"):
            buckets.multiply(*bad)
    mesh.free()


@pytest.mark.on_ranks(2, 4)
def test_trees_give_the_same_bits(comm: Any) -> None:
    """8 microbatches on 1, 2, 4 ranks, with every stage: parameters, losses and norms to the bit."""
    wanted = trained(Mesh(MPI.COMM_SELF), 3, batch=64, microbatches=8, same_bits=True, bucket_bytes=600)
    plain = trained(Mesh(MPI.COMM_SELF), 3, batch=64)
    np.testing.assert_allclose(wanted[0], plain[0], rtol=1e-12)
    mesh = Mesh(comm.Dup(), dp=-1)
    for stage in range(4):
        bucket_bytes = (600, None, 1200, 300)[stage]  # of any size
        how = {"stage": stage, "same_bits": True, "bucket_bytes": bucket_bytes, "microbatches": 8 // comm.size}
        got = trained(mesh, 3, batch=64, **how)
        assert got[1] == wanted[1]
        for name, value in wanted[2].items():
            assert got[2][name].tobytes() == value.tobytes(), (stage, name)
        layout, index = got[3].layout, mesh.index("dp")
        words = layout.words if stage < 2 or comm.size < 8 else layout.owned(index)
        assert got[4].bytes == layout.bytes(index, state_words=2)
        assert got[4].bytes["gradients"] == (8 // comm.size).bit_length() * words * 8
    mesh.free()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_parameters_of_few_bits(comm: Any, dtype: str) -> None:
    """Master weights are float32; all stages agree to the rounding of sums, and bytes are as the layout says."""
    scale = LossScale(2.0**10) if dtype == "float16" else None
    wanted = trained(Mesh(MPI.COMM_SELF), 12, dtype=dtype, scale=scale)
    exact = trained(Mesh(MPI.COMM_SELF), 12)
    assert abs(wanted[0][-1] / exact[0][-1] - 1) < 0.02
    np.testing.assert_allclose(wanted[1], exact[1], rtol=0.1)  # without the scale of the loss
    mesh = Mesh(comm.Dup(), dp=-1)
    for stage in (0, 2, 3):
        got = trained(mesh, 12, dtype=dtype, scale=scale, stage=stage, microbatches=2)
        np.testing.assert_allclose(got[0], wanted[0], rtol=2e-3 if dtype != "float32" else 1e-5)
        assert got[4].bytes == got[3].layout.bytes(mesh.index("dp"), 2)
        assert got[3].layout.masters == (dtype != "float32")
    mesh.free()


def test_master_weights_begin_with_the_values_of_the_user(comm: Any) -> None:
    """And not with these rounded to 16 bits."""
    mesh = Mesh(comm.Dup(), dp=-1)
    for stage, dtype in product(range(4), ("float16", "bfloat16")):
        optimizer = ShardedOptimizer(Buckets(mesh, initial(), dtype=dtype, stage=stage, bucket_bytes=600), AdamW())
        storage = optimizer.buckets.storage
        for name, value in initial().items():
            bucket = storage.layout.bucket_of[name]
            elements, _ = storage.layout.overlap(name, storage.span(bucket))
            kept = optimizer.kept("parameters", name)
            assert np.array_equal(kept, value.astype("f").ravel()[elements]), (stage, name)
    mesh.free()


def test_an_overflow_skips_one_step_on_all_ranks(comm: Any) -> None:
    """A planted 1e6 on the last rank at step 7: parameters, moments and corrections are those of a run without it."""
    mesh, (x, labels) = Mesh(comm.Dup(), dp=-1), samples(240)

    def run(planted: int | None, skipped: int | None, stage: int) -> Any:
        buckets = Buckets(mesh, initial(), dtype="float16", stage=stage)
        optimizer, steps = ShardedOptimizer(buckets, AdamW(), scale=LossScale(2.0**15, growth_every=5)), []
        for step in range(1, 13):
            if step == skipped:
                optimizer.scale = optimizer.scale.after(True) if optimizer.scale else None
                continue
            (some,) = own(mesh, (np.arange(60) + 60 * step) % 240, 1)
            scale = optimizer.scale.scale if optimizer.scale else 1
            here = step == planted and mesh.rank == mesh.shape.size - 1
            microbatch(buckets, x[some], labels[some], 60, scale, np.inf if here else 0.0)
            steps.append(optimizer.step(0.01, 1.0).skipped)
        with buckets.forward():
            end = [buckets.parameters[name].astype("f") for name in buckets.parameters]
        assert optimizer.updates == 11
        return steps, end, optimizer.scale

    for stage in range(4):
        planted, clean = run(7, None, stage), run(None, 7, stage)
        assert planted[0] == [False] * 6 + [True] + [False] * 5
        assert planted[2] == clean[2] == LossScale(2.0**16, growth_every=5)
        for a, b in zip(planted[1], clean[1]):
            assert np.array_equal(a, b)
    mesh.free()


@pytest.mark.on_ranks(2, 3)
def test_bad_arguments(comm: Any) -> None:
    """The same error on all ranks, before anything is allocated."""
    for sizes, message in (
        ({"dp": comm.size + 1}, f"dp {comm.size + 1} = {comm.size + 1} on {comm.size} ranks"),
        ({"dp": -1, "tp": -1}, "one axis of a mesh may be -1, got dp and tp"),
        ({"dp": 0}, "the sizes of a mesh are 1 or more"),
        ({"dp": -1, "ep": comm.size + 1}, f"ep {comm.size + 1} does not divide dp {comm.size}"),
    ):
        with pytest.raises(MeshError, match=message):
            Mesh(comm, **sizes)
    mesh, w = Mesh(comm.Dup(), dp=-1), np.zeros((3, 2))
    for parameters, how, error, message in (
        ({}, {}, ArgumentError, "at least one parameter"),
        ({"w": np.zeros((0, 3))}, {}, ArgumentError, "at least one parameter"),
        ({1: w, "1": np.zeros(3)}, {}, ArgumentError, "two parameters have the name '1'"),
        ({"w": np.zeros(3, int)}, {}, DTypeError, "parameter 'w' is of int64; parameters are real numbers"),
        ({"w": w, "v": w[1:]}, {}, ArgumentError, "'w' and 'v' share memory"),
        ({"w": w, "v": np.zeros(3, "f")}, {}, DTypeError, "convert them with dtype="),
        ({"w": w}, {"dtype": "complex64"}, DTypeError, "parameters are real numbers"),
        ({"w": w}, {"stage": 4}, ArgumentError, "stage is 0, 1, 2 or 3, got 4"),
        ({"w": w}, {"microbatches": 0}, ArgumentError, "microbatches"),
        ({"w": w}, {"microbatches": 3, "same_bits": True}, ArgumentError, "power of two of microbatches, got 3"),
        ({"w": w}, {"stage": 1, "reduce_each": True}, ArgumentError, "with stages 2 and 3"),
        ({"w": w}, {"bucket_bytes": 0}, ArgumentError, "bucket_bytes"),
    ):
        with pytest.raises(error, match=message):
            Buckets(mesh, parameters, **how)
    with pytest.raises(ArgumentError, match="stage"):
        Buckets(mesh, {"w": w}, stage=mesh.rank % 2)
    if comm.size & (comm.size - 1):
        with pytest.raises(ArgumentError, match=f"same_bits takes 1, 2, 4, ... ranks along dp, got {comm.size}"):
            Buckets(mesh, {"w": w}, same_bits=True)
    with pytest.raises(ArgumentError, match="momentum"):
        SGD(nesterov=True)
    buckets = Buckets(mesh, initial())
    for name in ["b1", *reversed([*initial()])]:
        buckets.ready(name)
    with pytest.raises(ArgumentError, match="the gradient of 'b1' became ready more often"):
        buckets.finish()
    with pytest.raises(ArgumentError, match="'w9' is not a parameter"):
        buckets.ready("w9")
    mesh.free()


def test_biases_are_not_decayed(comm: Any) -> None:
    """With gradients of 0: weights shrink by rate times decay, and what is not decayed stays, on every stage."""
    mesh = Mesh(comm.Dup(), dp=-1)
    for stage, bucket_bytes in enumerate((600, None, 600, 300)):
        buckets = Buckets(mesh, initial(), stage=stage, bucket_bytes=bucket_bytes)
        optimizer = ShardedOptimizer(buckets, AdamW(weight_decay=0.5), decays=lambda name: name.startswith("w"))
        for _ in range(2):
            buckets.ready(*buckets.layout.places)
            optimizer.step(0.1)
        with buckets.forward():
            for name, value in initial().items():
                factor = (1 - 0.1 * 0.5) ** 2 if name[0] == "w" else 1
                np.testing.assert_allclose(buckets.parameters[name], value * factor, rtol=1e-14)
    mesh.free()


@square_grid
def test_lines_on_one_node_and_on_several(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of one line read parts in place, those of the other send them: both train the same model."""
    from pdgemm.grids.process_grid import ProcessGrid

    monkeypatch.setattr(ProcessGrid, "shares_memory", property(lambda grid: comm.rank % 2 == 0))
    mesh, (expected, *_) = Mesh(comm.Dup(), dp=2, tp=2), trained(Mesh(MPI.COMM_SELF), 4)
    for stage in range(4):
        losses, _, _, buckets, _ = trained(mesh, 4, stage=stage, bucket_bytes=600)
        np.testing.assert_allclose(losses, expected, rtol=1e-12)
        assert buckets.layout.in_place == (comm.rank % 2 == 0)
    mesh.free()


@pytest.mark.on_ranks(6)
def test_sums_of_two_levels(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the fastest on three nodes of two ranks each, where nothing is divided; words are as predicted."""
    monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", "2")
    mesh, n = Mesh(comm.Dup(), dp=3, cp=2), 10_000
    buckets = Buckets(mesh, {"w": np.zeros(n)})
    ((_, layout, index),) = buckets.layouts.lines
    assert layout.reduce_by == "two-level"
    buckets.gradients["w"] += np.arange(n) * (1.0 + index)
    buckets.ready("w")
    ShardedOptimizer(buckets, SGD()).step(1.0)
    with buckets.forward():
        np.testing.assert_array_equal(buckets.parameters["w"], -21.0 * np.arange(n))
    predicted = layout.step(index)["gradients"]
    assert mesh.traffic["gradients"] == predicted
    assert comm.allreduce(predicted.words_received) == 2 * 5 * n
    mesh.free()
