"""What is wrong on one rank of a training run is the same error on all ranks, and none waits for another for ever."""

from __future__ import annotations

import warnings
from itertools import product
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from perceptron import BATCH, initial, microbatch, own, samples
from tiers import in_turn

from pdgemm import DistMatrix
from pdgemm.errors import ArgumentError, FileError, LinAlgError, PdgemmError
from pdgemm.io import hdf5
from pdgemm.parallel import SGD, AdamW, Buckets, LossScale, Mesh, Prefetch, Sampler, ShardedOptimizer, TrainingState

pytestmark = pytest.mark.mpi


def stepped(optimizer: Any, rate: float = 0.01, clip: float | None = 1.0, x: Any = None) -> Any:
    """A step on the first 60 samples."""
    buckets, (usual, labels) = optimizer.buckets, samples(60)
    (some,) = own(buckets.mesh, np.arange(60), 1)
    microbatch(buckets, (usual if x is None else x)[some], labels[some], 60)
    return optimizer.step(rate, clip)


def parameters(buckets: Any) -> dict[str, np.ndarray]:
    with buckets.forward():
        return {name: buckets.parameters[name].copy() for name in buckets.parameters}


@pytest.mark.parametrize(("stage", "per_node"), [(2, "1"), (3, ""), (3, "1")])
def test_a_gradient_that_is_missing_in_one_microbatch(
    comm: Any, stage: int, per_node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `reduce_each`, on one rank, in any microbatch and bucket: an error of all ranks, and a right next step."""
    if per_node:
        monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", per_node)
    mesh, names = Mesh(comm.Dup(), dp=-1), ["a", "b", "c"]
    values = {name: np.zeros(64, "f") for name in names}
    buckets = Buckets(mesh, values, stage=stage, microbatches=3, reduce_each=True, bucket_bytes=256)
    optimizer = ShardedOptimizer(buckets, SGD())

    def passes(missing: tuple[int, str] | None) -> None:
        for number in range(3):
            with buckets.backward():
                for name in names[::-1]:
                    _ = buckets.parameters[name]
                    buckets.gradients[name] += 1.0
                    if (number, name) != missing:
                        buckets.ready(name)

    for missing in product(range(3), names):
        passes(missing if comm.rank == comm.size - 1 else None)
        with pytest.raises(ArgumentError, match=f"the gradient of '{missing[1]}' did not become ready"):
            optimizer.step(0.1)
        passes(None)
        assert optimizer.step(0.1).norm == pytest.approx(3 * comm.size * np.sqrt(3 * 64))
    mesh.free()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_that_take_other_steps_are_named(comm: Any, stage: int) -> None:
    """Other rates, norms or steps on one rank: nothing is changed, and the next step is that of a run without it."""
    mesh = Mesh(comm.Dup(), dp=-1)
    optimizer, clean = (
        ShardedOptimizer(Buckets(mesh, initial(), stage=stage, bucket_bytes=600), AdamW()) for _ in range(2)
    )
    last = comm.rank == comm.size - 1
    for rate, clip, step, message in (
        (0.02, 1.0, 0, "rate 0.01.* rate 0.02"),
        (0.01, None, 0, "clip 1.0.* clip None"),
        (0.01, 1.0, 3, "step 1; .* step 4"),
    ):
        optimizer.updates = step if last else 0
        with pytest.raises(ArgumentError, match=f"different arguments: ranks? 0.*: ShardedOptimizer.step, .*{message}"):
            stepped(optimizer, rate if last else 0.01, clip if last else 1.0)
    optimizer.updates = 0
    assert stepped(optimizer) == stepped(clean) and optimizer.updates == 1
    for name, value in parameters(clean.buckets).items():
        assert np.array_equal(parameters(optimizer.buckets)[name], value)
    mesh.free()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_that_are_no_numbers_are_named(comm: Any, stage: int) -> None:
    """NaN in the data of one rank: without a scale at once, with one after it has become the least; nothing changes."""
    mesh, (x, _) = Mesh(comm.Dup(), dp=-1), samples(60)
    for scale, skipped in ((None, 0), (LossScale(2.0, least=0.5), 2)):
        optimizer = ShardedOptimizer(Buckets(mesh, initial(), stage=stage, bucket_bytes=600), AdamW(), scale=scale)
        bad = x.copy()
        bad[59, 3] = np.nan  # of the last rank
        for _ in range(skipped):
            assert stepped(optimizer, x=bad).skipped
        with pytest.raises(
            LinAlgError, match="gradient of 'w0' and 5 others is NaN or infinite in step 1: nothing was"
        ):
            stepped(optimizer, x=bad)
        assert all(np.array_equal(value, initial()[name]) for name, value in parameters(optimizer.buckets).items())
        assert not optimizer.states[0].any()
    mesh.free()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_norm_that_overflows(comm: Any, stage: int) -> None:
    """Its squares on one rank, or their sum alone, overflow: an error, or a step that is skipped, on all ranks."""
    mesh, largest = Mesh(comm.Dup(), dp=-1), np.sqrt(np.finfo(float).max)
    trees = [False, True] if comm.size in (1, 2, 4) else [False]
    for scale, same_bits in product((None, LossScale(2.0)), trees):
        buckets = Buckets(mesh, {"w": np.ones(60)}, stage=stage, same_bits=same_bits)
        optimizer = ShardedOptimizer(buckets, AdamW(), scale=scale)
        for value in (1e160, 1.01 * largest / np.sqrt(60)):  # of each element of the sum of all ranks
            optimizer.buckets.gradients["w"] += value / comm.size
            optimizer.buckets.ready("w")
            if scale:
                assert optimizer.step(0.1, clip=1.0).skipped
                continue
            with pytest.raises(
                LinAlgError, match="the norm of the gradients, whose squares overflow, is infinite in step 1"
            ):
                optimizer.step(0.1, clip=1.0)
        assert not optimizer.states[0].any() and (parameters(optimizer.buckets)["w"] == 1).all()
    mesh.free()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("per_node", ["", "1"])
def test_warnings_that_are_errors(comm: Any, per_node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of gradients, and parameters, that overflow in the part of one rank raise on no rank alone."""
    if per_node:
        monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", per_node)
    mesh = Mesh(comm.Dup(), dp=-1)
    for stage in range(4):
        buckets = Buckets(mesh, {"w": np.full(60, 6e4, "f")}, stage=stage, dtype="float16")
        optimizer = ShardedOptimizer(buckets, SGD(), scale=LossScale(1.0))
        for value, skipped in ((3e38, True), (-1e5 / comm.size, False)):
            buckets.gradients["w"][59] += value
            buckets.ready("w")
            assert optimizer.step(1.0, clip=1e6).skipped == skipped
        values = parameters(buckets)["w"]
        assert np.isinf(values[59])
        assert (values[:59] == np.float16(6e4)).all()
    mesh.free()


def test_parameters_of_stage_3_in_another_order(comm: Any) -> None:
    """On one rank alone: it warns, all ranks raise its error at the end of the step, and the next step is right."""
    mesh = Mesh(comm.Dup(), dp=-1)
    optimizer, clean = (ShardedOptimizer(Buckets(mesh, initial(), stage=3, bucket_bytes=600), AdamW()) for _ in "ab")
    buckets = optimizer.buckets
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        with buckets.forward():
            for name in [*initial(), *(["w0"] if comm.rank == comm.size - 1 else [])]:
                last = buckets.parameters[name].copy()
    wrong = [x for x in record if "use parameters in their order" in str(x.message)]
    if comm.rank == comm.size - 1:
        assert np.isnan(last).all() and last.shape == initial()["w0"].shape
        assert len(wrong) == 1 and wrong[0].filename == __file__
    else:
        assert not wrong
    with pytest.raises(ArgumentError, match="parameters w0 were whole earlier in this pass.*larger bucket_bytes"):
        stepped(optimizer)
    assert stepped(optimizer) == stepped(clean)
    mesh.free()


@pytest.mark.parametrize(("stage", "bucket_bytes"), in_turn((2, 3, 0, 2, 1, 3), (8, 600, None)))
def test_gradients_that_were_kept(comm: Any, stage: int, bucket_bytes: int | None) -> None:
    """Where buckets use the memory of gradients in turn, arrays of an earlier step on one rank are an error on all."""
    mesh, how = Mesh(comm.Dup(), dp=-1), dict[str, Any](stage=stage, bucket_bytes=bucket_bytes)
    buckets, kept = Buckets(mesh, initial(), **how), dict[str, np.ndarray]()
    optimizer = ShardedOptimizer(buckets, AdamW())

    def step(anew: bool) -> Any:
        for name in reversed([*initial()]):
            gradient = buckets.gradients[name] if anew else kept[name]
            gradient += 1
            kept[name] = gradient
            buckets.ready(name)
        return optimizer.step(0.01)

    first = step(True)
    if stage < 2:
        assert step(False).norm == first.norm
    else:
        with pytest.raises(ArgumentError, match="gradient of 'b2' was added to an array of another bucket or step"):
            step(comm.rank < comm.size - 1)
        assert step(True).norm == first.norm
    buckets.gradients["w0"] += 1
    buckets.clear()
    assert step(True).norm == first.norm
    mesh.free()


def test_a_pass_that_fails_on_one_rank_is_ended_on_it(comm: Any) -> None:
    """The others have the parameters for which they wait; so a program may go on, as after an error on all ranks."""
    mesh = Mesh(comm.Dup(), dp=-1)
    for stage in (1, 3):
        how: dict[str, Any] = {"stage": stage, "bucket_bytes": 600}
        optimizer, clean = (ShardedOptimizer(Buckets(mesh, initial(), **how), AdamW()) for _ in "ab")
        try:
            with optimizer.buckets.forward():
                for name in initial():
                    if name == "b0" and comm.rank == comm.size - 1:
                        raise ValueError("a layer fails")
                    assert np.array_equal(optimizer.buckets.parameters[name], initial()[name])
        except ValueError as bad:
            error: Exception | None = bad
        else:
            error = None
        with pytest.raises((ArgumentError, ValueError), match="a layer fails|did not become ready"):
            optimizer.buckets.finish(error)
        assert stepped(optimizer) == stepped(clean)
    mesh.free()


def test_other_models_and_meshes_are_named(comm: Any) -> None:
    """On one rank: the error of all ranks says which ranks have what, before anything is allocated."""
    last, mesh = comm.rank == comm.size - 1, Mesh(comm.Dup(), dp=-1)
    with pytest.raises(ArgumentError, match="different arguments: ranks? 0.*: Mesh, dp .*; rank .*: Mesh, tp"):
        Mesh(comm, dp=1 if last else -1, tp=-1 if last else 1)
    shapes = {"w": np.zeros((3, 2 + last)), "b": np.zeros(2)}
    names = {"w": np.zeros((3, 2)), "c" if last else "b": np.zeros(2)}
    for model, message in ((shapes, r"shape=\(3, 2\).*shape=\(3, 3\)"), (names, "name='b'.*name='c'")):
        with pytest.raises(ArgumentError, match=f"different arguments: ranks? 0.*: Buckets, .*{message}"):
            Buckets(mesh, model)
    model = {"w": np.zeros((3, 2)), "b": np.zeros(2)}
    for rule, scale, decays, message in (
        (SGD(), None, None, r"AdamW\(.*SGD\("),
        (AdamW(), LossScale(), None, r"None.*LossScale\("),
        (AdamW(), None, lambda name: name == "w", "True.*False"),
    ):
        mine = (rule, scale, decays) if last else (AdamW(), None, None)
        with pytest.raises(ArgumentError, match=f"different arguments: ranks? 0.*: ShardedOptimizer, .*{message}"):
            ShardedOptimizer(Buckets(mesh, model), mine[0], scale=mine[1], decays=mine[2])
    mesh.free()


def test_samples_of_other_runs(comm: Any) -> None:
    """Other seeds, steps or microbatches on one rank; fewer samples than parts; steps without a sample."""
    mesh, x, last = Mesh(comm.Dup(), dp=-1), np.arange(50.0), comm.rank == comm.size - 1
    sampler = Sampler(50, 20, seed=3)
    for other, steps, number, message in (
        (Sampler(50, 20, seed=4), range(9), 1, "seed=3.*seed=4"),
        (sampler, range(1, 9), 1, r"range\(0, 9\).*range\(1, 9\)"),
        (sampler, range(9), 2, "1; rank .*2"),
    ):
        mine = (other, steps, number) if last else (sampler, range(9), 1)
        with pytest.raises(ArgumentError, match=f"different arguments: ranks? 0.*: Sampler.shares, .*{message}"):
            mine[0].shares(mesh, *mine[1:])
    shares = [*sampler.shares(mesh, range(2))]
    with Prefetch(mesh, (x,), shares[:1] if last else shares) as batches:
        following = iter(batches)
        assert next(following).divisor == 20
        with pytest.raises(ArgumentError, match="different arguments: .*Prefetch, no more steps"):
            next(following)
    one = Sampler(50, comm.size)
    with pytest.raises(
        ArgumentError, match=f"a batch of {comm.size} samples has no part for each of {comm.size} ranks"
    ):
        one.shares(mesh, range(2), 2)
    with Prefetch(mesh, (x,), one.shares(mesh, range(2), 2, allow_empty=True)) as batches:
        for step, batch in enumerate(batches):
            assert batch.divisor == comm.size and sum(map(len, batch.rows)) == 1
            assert set(mesh.comm.allreduce([int(n) for some in batch.rows for n in some])) == set(one.rows(step))
    with (
        Prefetch(mesh, (x,), [[np.arange(0)]]) as batches,
        pytest.raises(ArgumentError, match="that count are 0 on all"),
    ):
        next(iter(batches))
    with pytest.raises(ArgumentError, match="depth"):
        Prefetch(mesh, (x,), [], depth=0 if last else 1)
    mesh.free()


def test_files_that_are_no_states(comm: Any, shared_tmp_path: Path) -> None:
    """FileError on all ranks, in one line that says what is wrong; the file stays as it is."""
    mesh = Mesh(comm.Dup(), dp=-1)
    good, path = shared_tmp_path / "good.h5", shared_tmp_path / "bad.h5"
    buckets = Buckets(mesh, {"w": np.ones((5, 3))}, dtype="float16", stage=1)
    optimizer = ShardedOptimizer(buckets, SGD(0.9), scale=LossScale())
    TrainingState(good, optimizer, attrs={"batch": BATCH}).save()
    data = good.read_bytes()
    before = parameters(optimizer.buckets)

    def attribute(name: str, value: Any) -> None:
        path.write_bytes(data)
        with h5py.File(path, "r+") as file:
            del file.attrs[name]
            if value is not None:
                file.attrs[name] = value

    def refused(message: str) -> None:
        with pytest.raises(PdgemmError, match=message) as raised:
            TrainingState(path, optimizer, attrs={"batch": BATCH})
        assert "\n" not in str(raised.value) and len({*comm.allgather(str(raised.value))}) == 1
        assert all(np.array_equal(value, before[name]) for name, value in parameters(optimizer.buckets).items())
        assert not optimizer.states[0].any() and optimizer.updates == 0

    for change, message in (
        (lambda: path.write_text("no HDF5"), "bad.h5"),
        (lambda: path.write_bytes(b""), "bad.h5"),
        (lambda: path.write_bytes(data[: len(data) // 2]), "bad.h5"),
        (lambda: attribute("step", None), "bad.h5"),
        (lambda: attribute("step", -3), "bad.h5"),
    ):
        if comm.rank == 0:
            change()
        comm.Barrier()
        refused(message)
        comm.Barrier()
    state = {"parameters/v": DistMatrix.zeros((3, 2), grid=mesh.grid)}
    path = shared_tmp_path / "foreign.h5"
    hdf5.save_all(path, state)
    refused("the state of another model: m/w is not there, and here")
    whole = hdf5.load_all(good, mesh.grid)
    for number, (other, message) in enumerate((
        ({"step": -1}, "is no state of a training run: step is -1"),
        ({"updates": "x"}, "is no state of a training run: updates is x"),
        ({"loss_scale": -2.0}, "its scale of the loss is none"),
        ({"batch": np.arange(3)}, "another run: batch is "),
    )):  # fmt: skip
        path = shared_tmp_path / f"{number}.h5"
        hdf5.save_all(path, whole.matrices, attrs=whole.attrs | other)
        refused(message)
    for name in ("step", "updates"):
        path = shared_tmp_path / f"without-{name}.h5"
        hdf5.save_all(path, whole.matrices, attrs={x: y for x, y in whole.attrs.items() if x != name})
        refused(f"is no state of a training run: {name} is not there")
    names = f"'w0', and pipeline stages 0 and {comm.size - 1} have other ones"
    with Mesh(comm.Dup(), pp=comm.size) as both:
        model = initial() if both.rank in (0, comm.size - 1) else {f"x{both.rank}": np.ones(2)}
        ends = ShardedOptimizer(Buckets(both, model), SGD())
        with pytest.raises(ArgumentError, match=names):
            TrainingState(path, ends)
    assert good.read_bytes() == data
    with pytest.raises(FileError):
        TrainingState(shared_tmp_path, optimizer)
    mesh.free()
