"""A training run that is continued on other ranks, with other stages and buckets, is the run that was not ended."""

from __future__ import annotations

import threading
from pathlib import Path
from time import sleep
from typing import Any

import h5py
import numpy as np
import pytest
from perceptron import BATCH, continued, initial, microbatch, samples

from pdgemm import trace
from pdgemm.errors import ArgumentError, FileError
from pdgemm.io import dataset_access
from pdgemm.parallel import (
    SGD,
    AdamW,
    Buckets,
    LossScale,
    Mesh,
    Prefetch,
    Sampler,
    ShardedOptimizer,
    StepTimes,
    TrainingState,
)
from pdgemm.parallel.step_report import PHASES
from pdgemm.tools.profiling.profile import load_profile
from pdgemm.tools.profiling.profile_tables import tables

pytestmark = pytest.mark.mpi


def shared_path(comm: Any, tmp_path: Path) -> Path:
    return Path(comm.bcast(str(tmp_path))) / "run.h5"


def test_a_state_has_names_and_whole_matrices(comm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any program reads it; 16-bit parameters are saved as their master weights, with the scale of the loss.

    A run that goes on opens the file once for all matrices.
    """
    openings, opened = list[Path](), dataset_access.open_on_all

    def counting(comm: Any, path: Path, *how: Any) -> Any:
        openings.append(path)
        return opened(comm, path, *how)

    mesh = Mesh(comm.Dup(), dp=-1)
    for stage, dtype, rule, kinds in ((2, "float16", None, 3), (3, "d", SGD(0.9), 2), (0, "f", SGD(), 1)):
        path = shared_path(comm, tmp_path).with_name(f"{stage}.h5")
        _, _, optimizer = continued(mesh, path, 5, dtype=dtype, rule=rule, stage=stage)
        if comm.rank == 0:
            with h5py.File(path) as file:
                assert file["parameters/w1"].shape == (17, 10) and file["parameters/b1"].shape == (1, 10)
                assert len(file) == kinds and sum(len(group) for group in file.values()) == 6 * kinds
                assert file.attrs["step"] == file.attrs["updates"] == 5
                assert file["parameters/w1"].dtype == ("f8" if dtype == "d" else "f4")
                if dtype == "float16":
                    assert (file.attrs["loss_scale"], file.attrs["good_steps"]) == (2.0**13, 1)
        if dtype == "float16":
            assert optimizer.scale == LossScale(2.0**13, growth_every=4, good=1)
            masters = optimizer.buckets.storage.arrays["masters"].copy()
            with monkeypatch.context() as patch:
                patch.setattr(dataset_access, "open_on_all", counting)
                _, _, again = continued(mesh, path, 5, dtype=dtype, stage=stage)
            assert openings == [path]
            assert np.array_equal(again.buckets.storage.arrays["masters"], masters)
            assert again.scale == optimizer.scale
        comm.Barrier()
    mesh.free()


def test_a_state_of_another_run_is_refused(comm: Any, tmp_path: Path) -> None:
    """One error on all ranks, which says what differs; the file is left as it is."""
    mesh, path = Mesh(comm.Dup(), dp=-1), shared_path(comm, tmp_path)
    continued(mesh, path, 2, stage=1)
    other = Buckets(mesh, initial((13, 17, 9)), dtype="d")
    for buckets, rule, attrs, message in (
        (other, AdamW(), {"batch": BATCH}, "the state of another model: .* is .*, and here"),
        (Buckets(mesh, initial()), SGD(0.9), {"batch": BATCH}, "another model: v/"),
        (Buckets(mesh, initial()), AdamW(0.5), {"batch": BATCH}, "another run: rule is AdamW"),
        (Buckets(mesh, initial()), AdamW(), {"batch": 61}, "another run: batch is 60, and here 61"),
        (Buckets(mesh, initial(), dtype="f"), AdamW(), {"batch": BATCH}, "another run: parameter_type is float64"),
    ):
        with pytest.raises(FileError, match=message):
            TrainingState(path, ShardedOptimizer(buckets, rule), attrs=attrs)
    mesh.free()


def test_names_that_no_state_can_have(comm: Any, tmp_path: Path) -> None:
    """They are refused before a step is taken, not when it is saved; names of groups and of other scripts are kept."""
    mesh, path = Mesh(comm.Dup(), dp=-1), shared_path(comm, tmp_path)

    def state(names: Any, **attrs: Any) -> Any:
        return TrainingState(path, ShardedOptimizer(Buckets(mesh, {x: np.ones(2) for x in names}), SGD()), attrs=attrs)

    for name in ("", ".", "/a", "a/", "a//b", "a/./b", "a\0b", "\ud800"):
        with pytest.raises(ArgumentError, match="cannot be a dataset of a state"):
            state([name])
    with pytest.raises(ArgumentError, match="parameters 'a/b' and 'a/b/c/d' cannot be datasets of one state"):
        state(["a/b", "a/b/c/d", "a/c"])
    for name in ("step", "updates", "loss_scale", "good_steps", "rule", "parameter_type"):
        with pytest.raises(ArgumentError, match=f"names beside its own, got '{name}'"):
            state("w", **{name: 1})
    assert not path.exists()
    names = ["a/b", "a/c/b", "a.b", "\u00fc b", ".."]
    state(names, seed=1).save()
    state(names, seed=1)
    mesh.free()


def test_what_fails_in_a_thread_is_raised_on_all_ranks(comm: Any) -> None:
    """In the step that lacks the samples; those before it are complete, and threads end with the block."""
    mesh, sampler = Mesh(comm.Dup(), dp=-1), Sampler(50, 20)
    x = np.arange(50.0)

    class Fails:
        def __init__(self) -> None:
            self.reads = 0

        def __getitem__(self, rows: np.ndarray) -> np.ndarray:
            self.reads += 1
            if self.reads == 3 and comm.rank == comm.size - 1:
                raise OSError("the disk is gone")
            return x[rows]

    with Prefetch(mesh, (x, Fails()), sampler.shares(mesh, range(9))) as batches:
        samples_read = iter(batches)
        for batch in (next(samples_read), next(samples_read)):
            assert batch.divisor == 20 and all(np.array_equal(a, b) for a, b in batch.arrays)
            assert all(np.array_equal(a, x[rows]) for rows, (a, _) in zip(batch.rows, batch.arrays))
        with pytest.raises(OSError, match="the disk is gone"):
            next(samples_read)
    assert not [thread for thread in threading.enumerate() if thread.name == "pdgemm-prefetch"]
    with Prefetch(mesh, (x,), sampler.shares(mesh, range(2)), counts=lambda some: float((some > 24).sum())) as batches:
        divisors = [batch.divisor for batch in batches]
    assert divisors == [float((sampler.rows(step) > 24).sum()) for step in range(2)]
    with pytest.raises(ArgumentError, match="inside of the block"):
        next(iter(Prefetch(mesh, (x,), [[np.arange(3)]])))
    with Prefetch(mesh, (x,), iter([[np.arange(3)]] * 100)) as batches:
        next(iter(batches))  # leaves the block early
    rows = [np.array([3, -1, 3, 0]), np.array([], int)]
    with h5py.File("memory", "w", driver="core", backing_store=False) as file:
        file["x"] = x
        with Prefetch(mesh, (file["x"], x), [rows]) as batches:
            for batch in batches:
                assert batch.divisor == 4 * comm.size
                assert all(
                    np.array_equal(a, x[some]) and np.array_equal(b, a) for (a, b), some in zip(batch.arrays, rows)
                )
    mesh.free()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_step_reports(comm: Any, stage: int) -> None:
    """Phases add up to the time of the steps; a rank that sleeps is named.

    Words are as predicted, also where a step overflows, and where the model is used between steps.
    """
    mesh, (x, labels) = Mesh(comm.Dup(), dp=-1), samples(60)
    buckets = Buckets(mesh, initial(), stage=stage, bucket_bytes=600)
    optimizer = ShardedOptimizer(buckets, AdamW(), scale=LossScale(4.0))
    times = StepTimes(optimizer)
    for planted in (0, np.inf, 0):
        with buckets.forward():
            assert buckets.parameters["w0"].size
        with times.step(60):
            if comm.rank == comm.size - 1:
                with buckets.timed("forward"):
                    sleep(0.1)
            microbatch(buckets, x, labels, 60, optimizer.scale.scale, planted)
            assert optimizer.step(0.01).skipped == (planted > 0)
    report = times.report()
    assert report.steps == 3 and report.samples == 180 and report.as_predicted
    assert report.counted["decisions"] == report.predicted["decisions"]
    assert report.phases.shape == (comm.size, len(PHASES)) and (report.phases >= 0).all()
    assert report.slow_rank == comm.size - 1
    assert report.p99 >= report.p50 >= 0.1 and report.seconds >= 0.3
    text = str(report)
    assert "3 steps in" in text and "words received a step by rank 0, as predicted" in text
    assert f"rank {comm.size - 1} is slow" in text and "predicted " not in text.replace("as predicted", "")
    mesh.free()


@pytest.mark.on_ranks(3)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_profile_names_a_slow_rank(comm: Any, shared_tmp_path: Path, stage: int) -> None:
    """Rank 2 sleeps in its backward passes; where others wait for it, in their own passes too, they are not slow."""
    mesh, path = Mesh(comm.Dup(), dp=-1), shared_tmp_path / "steps.json"
    for sleeps in (False, True):
        buckets = Buckets(mesh, initial(), stage=stage, bucket_bytes=600)
        optimizer = ShardedOptimizer(buckets, AdamW())
        with trace(path, mesh.grid):
            for _ in range(2):
                slowly(buckets, 0.3 if sleeps and comm.rank == 2 else 0.0)
                optimizer.step(0.01)
        profile = load_profile(path)
        assert all(set(x.training) >= {"forward", "backward", "reduce", "optimizer"} for x in profile.ranks)
        assert all(0 <= x.busy < 60 for x in profile.ranks)
        if sleeps:
            text = " ".join(tables(profile).split())
            assert profile.slow == profile.as_dict()["slow_rank"] == 2
            assert "rank 2 is slow: it is busy for" in text
            assert "of each rank in steps of training; waits are part of the passes rank forward backward" in text
    mesh.free()


def slowly(buckets: Any, seconds: float) -> None:
    """Passes of a model without samples, of which the backward pass sleeps in its middle."""
    names = [*initial()]
    with buckets.forward():
        for name in names:
            assert buckets.parameters[name].shape
    with buckets.backward():
        for name in names[::-1]:
            buckets.gradients[name] += 0 * buckets.parameters[name]
            if name == "w1":
                sleep(seconds)
            buckets.ready(name)
