"""Parameters that are divided along tp, ep and pp: every mesh gives the numbers of one process."""

from __future__ import annotations

from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from divided_model import divisions, meshes, one_step, own_values, parts, run, values, window
from mpi4py import MPI
from tiers import everything

from pdgemm.errors import ArgumentError, LinAlgError
from pdgemm.instrument.recorder import Traffic
from pdgemm.parallel import (
    SGD,
    AdamW,
    Buckets,
    Initial,
    LossScale,
    Mesh,
    Muon,
    Part,
    ShardedOptimizer,
    StepTimes,
    TrainingState,
)
from pdgemm.schedules.collectives.collective import sum_of_numbers

pytestmark = pytest.mark.mpi
STEPS = 3


@cache
def one_process(microbatches: int, rule: Any = None) -> tuple[list[float], dict[str, np.ndarray]]:
    norms, optimizer = run(Mesh(MPI.COMM_SELF), STEPS, microbatches=microbatches, rule=rule)
    for step, norm in enumerate(norms):
        sums = (sum(values(name, step, at) for at in range(microbatches)) for name in divisions())
        assert norm == pytest.approx(np.sqrt(sum((x**2).sum() for x in sums)), rel=1e-13)
    return norms, own_values(optimizer.buckets)


def traffic(kinds: Any) -> Any:
    return sum(kinds, Traffic())


@pytest.mark.on_ranks(2, 3, 4)
@pytest.mark.parametrize("per_node", ["", "1"])
def test_every_mesh_gives_the_numbers_of_one_process(comm: Any, per_node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters and norms after 3 clipped steps to 1e-12; words, messages and bytes exactly as the layouts say."""
    if per_node:
        monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", per_node)
    for at, sizes in enumerate(meshes(comm.size)):
        mesh = Mesh(comm.Dup(), **sizes)
        for stage in range(4) if everything() or comm.size == 2 else ((at + 2 * bool(per_node)) % 4,):
            microbatches = 1 + (at + stage) % 2
            how = {"reduce_each": stage > 1 and at % 4 < 2, "bucket_bytes": (None, 300)[at % 3 > 0]}
            how["chunks"] = 1 + (at + stage // 2) % 3
            norms, end = one_process(microbatches)
            mesh.traffic.clear()
            here, optimizer = run(mesh, STEPS, stage=stage, microbatches=microbatches, **how)
            np.testing.assert_allclose(here, norms, rtol=1e-12, err_msg=f"{sizes} {stage}")
            layouts = optimizer.buckets.layouts
            step = layouts.step()
            for kind in ("gradients", "parameters", "decisions"):
                assert mesh.traffic[kind] == traffic([step[kind]] * STEPS), (sizes, stage, kind)
                assert not (per_node and mesh.traffic[kind].words_read), (sizes, stage, kind)
            assert optimizer.bytes == layouts.bytes(2)
            for name, x in own_values(optimizer.buckets).items():
                whole = end[name][window(mesh.shape, mesh.rank, name)]
                np.testing.assert_allclose(x, whole, rtol=1e-12, atol=1e-12, err_msg=f"{name} {sizes} {stage}")
        mesh.free()


@pytest.mark.on_ranks(4)
def test_a_state_goes_on_with_any_mesh(comm: Any, shared_tmp_path: Path) -> None:
    """From each mesh of these ranks to one of fewer: the same bits in the file and on each rank, and the same run."""
    numbers = sorted({comm.size, max(1, comm.size - 1), -(-comm.size // 2), min(3, comm.size)})
    some = {n: comm.Split(int(comm.rank < n), comm.rank) for n in numbers}
    rng = np.random.default_rng(comm.size)
    firsts, later = ([*rng.permutation([*meshes(comm.size)])], [(n, x) for n in numbers for x in meshes(n)])
    later = [later[at] for at in rng.permutation(len(later))]

    def same_bits(optimizer: Any, path: Path, end: Any) -> None:
        """Compare what this rank keeps with its windows of the whole matrices of the file."""
        buckets, mesh = optimizer.buckets, optimizer.buckets.mesh
        with h5py.File(path) as file:
            for name, line in ((name, x) for x in buckets.lines for name in x.layout.places):
                for kind in optimizer.kinds(name):
                    whole = file[f"{kind}/{name}"][:].reshape(end[name].shape)
                    elements, _ = line.layout.overlap(name, line.storage.span(line.layout.bucket_of[name]))
                    flat = whole[window(mesh.shape, mesh.rank, name)].ravel()
                    kept = optimizer.kept(kind, name)
                    assert np.array_equal(kept, flat[elements]), (kind, name)

    later = later if everything() else later[:2]
    for at, (first, (number, then)) in enumerate(zip(cycle(firsts), later)):
        path, stage, rule = shared_tmp_path / f"{at}.h5", at % 4, (AdamW(), Muon())[at % 2]
        mesh, (norms, end) = Mesh(comm, **first), one_process(1, rule)
        _, optimizer = run(mesh, 2, stage=stage, bucket_bytes=300, rule=rule)
        TrainingState(path, optimizer).save()
        comm.Barrier()
        same_bits(optimizer, path, end)
        if comm.rank < number:
            other = Mesh(some[number], **then)

            def load(optimizer: Any, path: Path = path, end: Any = end) -> None:
                TrainingState(path, optimizer)
                same_bits(optimizer, path, end)

            here, optimizer = run(other, STEPS, first=2, stage=(stage + 1 + at // 4) % 4, state=load, rule=rule)
            np.testing.assert_allclose(here, norms[2:], rtol=1e-12)
            for name, x in own_values(optimizer.buckets).items():
                whole = end[name][window(other.shape, other.rank, name)]
                np.testing.assert_allclose(x, whole, rtol=1e-12, atol=1e-12, err_msg=f"{name} {first} {then}")
            other.free()
        mesh.free()
    for part in some.values():
        part.Free()


def test_both_ends_of_one_stage_become_ready(comm: Any) -> None:
    """With `same_bits` a tied parameter is ready twice in a microbatch; once, or three times, is an error."""
    mesh = Mesh(comm, dp=-1)
    buckets = Buckets(mesh, {"table": Part(np.zeros(5), tied=True), "w": np.zeros(3)}, same_bits=True)
    for times, message in ((1, "did not become ready"), (3, "became ready more often")):
        for _ in range(times):
            buckets.ready("table")
        buckets.ready("w")
        with pytest.raises(ArgumentError, match=f"'table' {message}.*: in a step each becomes ready 2 times"):
            buckets.finish()
    buckets.ready("w")
    for addend in (1.0, 2.0):
        buckets.gradients["table"] += addend
        buckets.ready("table")
    assert buckets.finish().norm == np.sqrt(5.0) * 3 * comm.size
    mesh.free()


def test_a_tree_takes_microbatches_one_by_one(comm: Any) -> None:
    """Where chunks of a pipeline are in one bucket, and are ready in turn, partial sums would mix microbatches.

    Chunks that are passed as such have buckets of their own.
    """
    mesh = Mesh(comm, dp=-1)
    one, two = {"a": np.zeros(3), "b": np.zeros(3)}, [{"a": np.zeros(3)}, {"b": np.zeros(3)}]
    for model, same_bits in ((one, False), (one, True), (two, True)):
        buckets = Buckets(mesh, model, microbatches=2, same_bits=same_bits)
        for name in ("b", "b", "a", "a"):
            buckets.gradients[name] += 1.0
            buckets.ready(name)
        if same_bits and model is one:
            with pytest.raises(ArgumentError, match="the gradient of 'b' became ready before others of the microbatch"):
                buckets.finish()
        else:
            assert buckets.finish().norm == pytest.approx(2 * comm.size * np.sqrt(6))
    mesh.free()


@pytest.mark.on_ranks(4)
def test_decisions_are_those_of_all_stages(comm: Any) -> None:
    """An overflow, a gradient that is missing or NaN, on one rank of any stage: the same on all ranks of the mesh."""
    for sizes in [*meshes(comm.size)][:: 1 if everything() else 4]:
        mesh = Mesh(comm, **sizes)
        last = comm.rank == comm.size - 1
        buckets = Buckets(mesh, parts(mesh), stage=comm.size % 4, bucket_bytes=300)
        optimizer = ShardedOptimizer(buckets, SGD(), scale=LossScale(4.0))
        names = [*buckets.parameters]
        end = next(x for x in reversed(names) if buckets.gradients[x].size)
        named = comm.bcast(end, root=comm.size - 1)

        def passes(planted: float = 0.0, missing: str = "", buckets: Any = buckets, end: str = end) -> None:
            with buckets.backward():
                for name in reversed([*buckets.parameters]):
                    if comm.rank == comm.size - 1 and name == end:
                        buckets.gradients[name].reshape(-1)[:1] += planted
                    if name != missing:
                        buckets.ready(name)

        passes(np.inf)
        assert optimizer.step(0.1).skipped and optimizer.scale == LossScale(2.0)
        passes(3.0)
        assert optimizer.step(0.1).norm == pytest.approx(3.0 / 2 / np.sqrt(copies(mesh, buckets, end)), rel=1e-14)
        passes(missing=end if last else "")
        with pytest.raises(ArgumentError, match=f"the gradient of '{named}' did not become ready"):
            optimizer.step(0.1)
        passes(2.0)  # nothing has changed, and the next step may be taken
        assert optimizer.step(0.1).norm > 0
        plain = ShardedOptimizer(buckets, SGD())
        passes(np.nan)
        with pytest.raises(LinAlgError, match=f"the gradient of '{named}' is NaN or infinite in step 1"):
            plain.step(0.1)
        mesh.free()


def copies(mesh: Any, buckets: Any, name: str) -> int:
    """Return on how many lines the last rank's parameter is with the same gradient, of which one alone is planted."""
    copies = mesh.comm.bcast(buckets.divisions[name].line(mesh.shape).copies, root=mesh.comm.size - 1)
    return int(copies)


@pytest.mark.on_ranks(3)
def test_parts_that_do_not_fit(comm: Any) -> None:
    """The same error on all ranks of the mesh, also where the ranks of one stage alone have it."""
    mesh, w = Mesh(comm, pp=comm.size), np.zeros((3, 2))
    last = comm.rank == comm.size - 1
    for wrong, message in (
        ({"tp": 2}, r"tp is a dimension of the shape \(3, 2\), 'sum' or None, got 2"),
        ({"tp": "all"}, "tp is a dimension .* got 'all'"),
        ({"tp": True}, "tp is a dimension .* got True"),
        ({"ep": -1}, r"ep is a dimension of the shape \(3, 2\) or None, got -1"),
        ({"ep": 0, "tp": 1}, "experts are whole along tp: tp is 'sum' or None beside ep, got 1"),
    ):
        with pytest.raises(ArgumentError, match=message):
            Part(w, **wrong)
    tied = {"w": Part(w + last, tied=True), f"v{comm.rank}": w}
    for model, message in (
        (tied if last or not comm.rank else {"v": w}, "different arguments: rank 0: .*elements of checksum.*rank 1: "),
        ({} if last else {"w": w}, "at least one parameter with an element"),
        ({"w": Part(w, tied=True)}, "'w' is tied, and stage 1 is not the first"),
        ({"w": w.astype("f") if last else w}, "different arguments"),
    ):
        with pytest.raises(ArgumentError, match=message):
            Buckets(mesh, model)
    buckets = Buckets(
        mesh, {f"v{comm.rank}": Part(Initial((3, 4, 2), "normal", dtype="d"), tp=1), "w": Part(w, tp="sum")}
    )
    with pytest.raises(ArgumentError, match="has 24 elements, got 23"):
        buckets.set_parameter(f"v{comm.rank}", np.zeros(23))
    mesh.free()
    mesh = Mesh(comm, tp=comm.size)
    buckets = Buckets(mesh, {"v": Part(w, tp="sum"), "w": Part(np.zeros((3, comm.size)), tp=1)})
    with pytest.raises(ArgumentError, match="parameters are on 2 lines of the mesh, see Buckets.lines"):
        _ = buckets.layout
    mesh.free()


def test_windows_of_initial_values(comm: Any) -> None:
    """They are those of the whole values, on any mesh and with any stage; a rank computes its own alone."""
    whole = {
        "n": (Initial((7, 3, 5), "normal", seed=5, dtype="d"), {"tp": 1}),
        "u": (Initial(41, "uniform", seed=6, dtype="d"), {"tp": 0}),
        "e": (Initial((5, 4, 3), lambda i, j: 100.0 * i + j, dtype="d"), {"ep": 0}),
        "c": (Initial((1, 6), "normal", seed=7, dtype="d"), {"tp": 1}),
        "z": (Initial((0, 3), "ones", dtype="d"), {"tp": 0}),
    }
    exact = {name: x[slice(0, x.size)].reshape(x.shape) for name, (x, _) in whole.items()}
    for sizes in meshes(comm.size):
        mesh = Mesh(comm, **sizes)
        for stage in range(4):
            model = {name: Part(x, **how) for name, (x, how) in whole.items()}
            buckets = Buckets(mesh, model, stage=stage, bucket_bytes=100)
            for name, x in own_values(buckets).items():
                division = buckets.divisions[name]
                assert np.array_equal(x, exact[name][division.window(mesh.shape, mesh.rank)]), (name, sizes)
        mesh.free()


def test_reports_of_tokens_flops_and_other_traffic(comm: Any) -> None:
    """Words of each kind beside what was expected, in each step or in all, tokens a second, and shares of the peak."""
    for sizes in [*meshes(comm.size)][::3]:
        mesh = Mesh(comm, **sizes)
        _, optimizer = run(mesh, 0, stage=2, bucket_bytes=300)
        one, *others = (sum_of_numbers(n, mesh.length("tp")).traffic(mesh.index("tp")) for n in (5, 3, 400))
        expected = {"tensor": one.words_received, "experts": iter([x.words_received for x in others]).__next__}
        times = StepTimes(optimizer, expected=expected, flops=(3e6, 4e6), tokens=70)
        for step in range(2):
            with times.step(6):
                mesh.sum(np.ones(5), axis="tp", kind="tensor")
                mesh.sum(np.ones((3, 400)[step]), axis="tp", kind="experts")
                one_step(optimizer, step)
        report = times.report()
        assert report.as_predicted and report.counted["tensor"] == one + one
        assert report.counted["experts"] == sum(others, Traffic())
        assert report.counted["decisions"] == report.predicted["decisions"]
        assert report.tokens_per_second == 140 / report.seconds and report.ranks == comm.size
        assert report.mfu == 6e6 / (report.seconds * comm.size * report.peak) and report.peak > 1e6
        assert report.hfu == pytest.approx(report.mfu * 4 / 3)
        text = str(report)
        assert (
            "tokens/s" in text
            and ("tensor: " in text) == (mesh.length("tp") > 1)
            and "predicted " not in text.replace("as predicted", "")
        )
        assert f"= 3e+06 flops a step / ({'' if report.steps else '-'}" in text and "MFU" in text and "HFU" in text
        report.counted["tensor"] += Traffic(0, 1)
        assert not report.as_predicted and ", predicted " in str(report)
        mesh.free()
