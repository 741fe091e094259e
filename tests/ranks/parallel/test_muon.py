"""Muon: matrices are updated whole, each on one rank, and every mesh gives the bits of one process."""

from __future__ import annotations

import tracemalloc
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from divided_model import meshes, names_of, one_step, own_values, run, values, window
from mpi4py import MPI
from tiers import everything

from pdgemm.errors import ArgumentError, LinAlgError
from pdgemm.instrument.recorder import Traffic
from pdgemm.local.blas.orthogonal_stacks import orthogonal_factors
from pdgemm.parallel import AdamW, Buckets, LossScale, Mesh, Muon, Part, ShardedOptimizer, StepTimes
from pdgemm.parallel.updates.homes import Homes

pytestmark = pytest.mark.mpi
STEPS, CLIP = 3, 3.0
DTYPES = "float64", "float32", "float16"


def is_matrix(name: str) -> bool:
    return name.endswith(("rows", "columns"))


@cache
def one_process(dtype: str, microbatches: int = 1, steps: int = STEPS) -> tuple[list[float], dict[str, np.ndarray]]:
    norms, optimizer = run(Mesh(MPI.COMM_SELF), steps, microbatches=microbatches, rule=Muon(), dtype=dtype)
    return norms, own_values(optimizer.buckets)


def assert_same_bits(buckets: Any, end: dict[str, np.ndarray], what: object) -> None:
    for name, x in own_values(buckets).items():
        assert np.array_equal(x, end[name][window(buckets.mesh.shape, buckets.mesh.rank, name)]), (name, what)


@pytest.mark.on_ranks(2, 4)
def test_every_mesh_gives_the_bits_of_one_process(comm: Any) -> None:
    """Parameters and norms of 3 clipped steps; words, messages and bytes exactly.

    A matrix of N elements, of which its home updates H, and all ranks of the stage together T: its home receives N - H
    words, and others T - H.  T is N with stages 1 to 3, and with stage 0 as often N as ranks along dp and cp have it.
    """
    for at, sizes in enumerate(meshes(comm.size)):
        mesh = Mesh(comm, **sizes)
        for stage in range(4) if everything() else (at % 4,):
            how: dict[str, Any] = {"microbatches": 1 + (at + stage) % 2, "dtype": DTYPES[(at + stage) % 3]}
            norms, end = one_process(how["dtype"], how["microbatches"])
            how |= {"bucket_bytes": (None, 300)[at % 3 > 0], "chunks": 1 + at % 3, "same_bits": False}
            mesh.traffic.clear()
            here, optimizer = run(mesh, STEPS, stage=stage, rule=Muon(), **how)
            assert here == norms, (sizes, stage)
            assert_same_bits(optimizer.buckets, end, (sizes, stage))
            homes, me = optimizer.homes, mesh.line("dp+cp+tp").rank
            kept = optimizer.buckets.layouts.bytes(optimizer.state_words)
            assert optimizer.bytes == {**kept, "homes": homes.loads.bytes[me]}, (sizes, stage)
            assert homes.loads.received[me] == homes.traffic().words_received, (sizes, stage)
            assert mesh.traffic["homes"] == sum([homes.traffic()] * STEPS, Traffic()), (sizes, stage)
            assert [*homes.names] == [x for x in names_of(mesh.shape, mesh.rank) if is_matrix(x)]
            own = [optimizer.kept("m", x).size if optimizer.buckets.line_of(x) else 0 for x in homes.names]
            stage_line = mesh.line("dp+cp+tp").comm
            updated = np.array(stage_line.allgather(own)).T
            words = sum(
                values(name).size + of_ranks.sum() - 2 * of_ranks[home]
                for name, of_ranks, home in zip(homes.names, updated, homes.exchange.homes)
            )
            assert stage_line.allreduce(homes.traffic().words_received) == words
            copies = 1 if stage else sizes["dp"] * sizes["cp"]
            assert updated.sum() == copies * sum(values(name).size for name in homes.names)
        mesh.free()


def reference(steps: int, rate: float) -> dict[str, np.ndarray]:
    """Return parameters after steps of one process: Muon of matrices, and AdamW of others, by their papers."""
    mesh = type("one", (), {"pp": 1, "index": lambda *_: 0})
    p = {name: values(name).copy() for name in names_of(mesh, 0)}
    m, v = ({name: np.zeros_like(x) for name, x in p.items()} for _ in range(2))
    for step in range(steps):
        gradients = {name: values(name, step, 0) for name in p}
        norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
        for name, x in p.items():
            g, decayed = gradients[name] * min(1.0, CLIP / norm), not name.endswith("bias")
            if is_matrix(name):
                m[name] = 0.95 * m[name] + g
                u = g + 0.95 * m[name]
                tall = u.shape[0] > u.shape[1]
                y = u.T if tall else u
                y = y / np.sqrt((y**2).sum())
                for _ in range(5):
                    a = y @ y.T
                    y = 3.4445 * y + (-4.7750 * a + 2.0315 * a @ a) @ y
                y = y.T if tall else y
                x *= 1 - rate * 0.1
                x -= rate * 0.2 * np.sqrt(max(u.shape)) * y
            else:
                m[name] = 0.9 * m[name] + 0.1 * g
                v[name] = 0.999 * v[name] + 0.001 * g**2
                x *= 1 - rate * 0.01 * decayed
                mean, square = m[name] / (1 - 0.9 ** (step + 1)), v[name] / (1 - 0.999 ** (step + 1))
                x -= rate * mean / (np.sqrt(square) + 1e-8)
    return p


def test_steps_are_those_of_the_papers(comm: Any) -> None:
    wanted = reference(4, rate=0.01)
    for sizes in ({"dp": comm.size}, {"tp": comm.size}):
        with Mesh(comm.Dup(), **sizes) as mesh:
            _, optimizer = run(mesh, 4, stage=1, rule=Muon())
            for name, x in own_values(optimizer.buckets).items():
                whole = wanted[name][window(mesh.shape, mesh.rank, name)]
                np.testing.assert_allclose(x, whole, rtol=1e-10, atol=1e-12, err_msg=name)


@pytest.mark.on_ranks(1)
@pytest.mark.parametrize("kind", ["f", "d"])
def test_factors_have_the_same_bits_in_any_stack(kind: str) -> None:
    """At any alignment, with any number of other matrices; singular values come to near 1, and zeros stay."""
    rng = np.random.default_rng(5)
    for m, n in ((1, 1), (1, 7), (3, 3), (5, 130), (17, 40), (33, 65), (64, 64), (127, 129)):
        stack = rng.standard_normal((4, m, n)).astype(kind)
        stack[2] *= 1e-30 if kind == "f" else 1e-300  # whose squares are 0
        stack[3] *= 1e30 if kind == "f" else 1e300  # whose squares are infinite
        alone = [orthogonal_factors(x[None].copy())[0] for x in stack]
        for offset, copies in product((0, 1, 3), (1, 5)):
            memory = np.empty(offset + copies * stack.size, kind)
            many = memory[offset:].reshape(-1, m, n)
            many[...] = np.tile(stack, (copies, 1, 1))
            orthogonal_factors(many)
            for at, x in enumerate(many):
                assert np.array_equal(x, alone[at % 4]), (m, n, offset, copies)
        for x in alone:
            least, most = (f(np.linalg.svd(x.astype("d"), compute_uv=False)[: m // 2 + 1]) for f in (min, max))
            assert 0.65 < least <= most < 1.25, (m, n)
    assert not orthogonal_factors(np.zeros((2, 3, 4), kind)).any()


@pytest.mark.on_ranks(3)
def test_homes_share_the_work(comm: Any) -> None:
    """By n m^2, on the same ranks for all; matrices of which each of h ranks updates 1/h move 2 N (h-1)/h words."""
    mesh, h = Mesh(comm.Dup(), dp=-1), comm.size
    shapes = 4 * [(8 * h, 24), (4, 8 * h), (8 * h, 8), (2 * h, 4)]
    for number in (1, len(shapes)):
        model = {f"w{at}": np.ones(shape, "f") for at, shape in enumerate(shapes[:number])}
        buckets = Buckets(mesh, model, stage=2, bucket_bytes=1)  # one for each matrix
        exchange = ShardedOptimizer(buckets, Muon()).homes.exchange
        assert comm.allgather(exchange.homes) == [exchange.homes] * h
        load = np.zeros(h)
        cost = [max(x) * min(x) ** 2 for x in shapes[:number]]
        for home, own in zip(exchange.homes, cost):
            load[home] += own
        assert load.max() <= sum(cost) / h + max(cost) * (h - 1) / h  # Graham; no rank is without work
        assert np.count_nonzero(load) == min(h, number)
        words = sum(x.size for x in model.values())
        received = [exchange.traffic(rank).words_received for rank in range(h)]
        assert sum(received) * h == 2 * words * (h - 1)
    mesh.free()


def test_an_update_allocates_what_is_counted(comm: Any) -> None:
    """Beside the buffers, which are the bytes of `HomeLoads`, an update of 8 MB of matrices takes less than 1 MB."""
    mesh = Mesh(comm.Dup(), dp=-1)
    model = {f"w{at}": np.ones(shape, "f") for at, shape in enumerate([(400, 1600), (1500, 2, 200), (500, 1500)])}
    for stage in (0, 2):
        optimizer = ShardedOptimizer(Buckets(mesh, model, stage=stage), Muon(), matrices=model)
        homes, me = optimizer.homes, comm.rank
        assert optimizer.bytes["homes"] == homes.loads.bytes[me] >= 4 * homes.loads.buffers["matrices"][me]
        parts = [np.random.default_rng(n).standard_normal(n).astype("f") for n in homes.loads.own[:, me]]
        tracemalloc.start()
        homes.update(parts)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert most < 1e6
    mesh.free()


def test_skipped_steps_move_nothing_and_zeros_change_nothing(comm: Any) -> None:
    """A gradient that overflows on one rank leaves all as it was; one that is 0 lets weights decay alone."""
    mesh = Mesh(comm.Dup(), dp=-1)
    w = np.random.default_rng(2).standard_normal((5, 3)).astype("f")
    for stage, scale in product((0, 1, 3), (LossScale(), None)):
        buckets = Buckets(mesh, {"w": w, "b": w[0].copy(), "z": w.T.copy(), "u": 2 * w}, stage=stage)
        optimizer = ShardedOptimizer(buckets, Muon(), scale=scale, decays=lambda name: name != "u")
        times, moved = StepTimes(optimizer), mesh.traffic["homes"].words_received
        for step, planted in enumerate((np.inf, 1.0)):
            with times.step(1):
                with buckets.forward():
                    pass
                with buckets.backward():
                    for name in "uzbw":
                        if name == "w":
                            buckets.gradients["w"] += planted if comm.rank == comm.size - 1 else 0
                        buckets.ready(name)
                if scale is None and not step:
                    with pytest.raises(LinAlgError, match="'w' is NaN or infinite"):
                        optimizer.step(0.5)
                else:
                    assert optimizer.step(0.5).skipped == (not step)
            if not step:
                assert mesh.traffic["homes"].words_received == moved and not any(x.any() for x in optimizer.states)
        with buckets.forward():
            u, z, x = (buckets.parameters[name].copy() for name in "uzw")
        assert np.array_equal(u, 2 * w) and np.array_equal(z, w.T * np.float32(0.95))
        assert np.isfinite(x).all() and (x < w).any()
        report = times.report()
        assert report.as_predicted and report.predicted["homes"] == report.counted["homes"]
        assert "homes: " in str(report)
    mesh.free()


def test_further_dimensions_are_columns(comm: Any) -> None:
    """An array that the user names is the matrix of its rows, which tp may divide; others keep AdamW."""
    rng, mesh = np.random.default_rng(3), Mesh(comm.Dup(), tp=-1)
    w, g = rng.standard_normal((2, 4, 5, 3))
    ends = list[np.ndarray]()
    for shape, tp in (((4, 5, 3), 1), ((4, 15), None)):
        model = {"w": Part(w.reshape(shape), tp=tp), "u": np.ones((2, 2))}
        buckets = Buckets(mesh, model, stage=1)
        optimizer = ShardedOptimizer(buckets, Muon(), matrices=lambda name: name == "w")
        assert optimizer.state_words == {"w": 1, "u": 2}
        own = buckets.divisions["w"].window(mesh.shape, mesh.rank)
        buckets.gradients["w"] += g.reshape(shape)[own]
        buckets.ready("u", "w")
        optimizer.step(0.1)
        ends.append(buckets.parameters["w"].copy())
    assert np.array_equal(ends[0], ends[1].reshape(4, 5, 3)[:, Part(w, tp=1).division.window(mesh.shape, mesh.rank)[1]])
    mesh.free()


def test_what_cannot_work_is_refused_on_all_ranks(comm: Any) -> None:
    mesh, last = Mesh(comm.Dup(), dp=-1), comm.rank == comm.size - 1
    model = {"w": np.ones((3, 4)), "u": np.ones((3, 4)), "b": np.ones(4), "table": Part(np.ones((5, 2)), tied=True)}
    model["experts.b"] = Part(np.ones((5, 4)), ep=0)
    buckets = Buckets(mesh, model)
    assert [*ShardedOptimizer(buckets, Muon()).homes.names] == ["w", "u"]
    assert [*ShardedOptimizer(buckets, Muon(), matrices=["u"]).homes.names] == ["u"]
    assert ShardedOptimizer(buckets, Muon(), matrices=()).homes.traffic().words_received == 0
    assert ShardedOptimizer(buckets, AdamW()).homes is None
    bad: list[tuple[Any, Any, str]] = [
        (Muon(), ["v"], "'v', and parameters of two or more dimensions are w, u, table, experts.b"),
        (Muon(), ["b"], "'b', and parameters"),
        (Muon(), "w", "names, a function of a name or None, got 'w'"),
        (Muon(), 3, "got 3"),
        (Muon(), ["table"], "'table' is tied"),
        (Muon(), lambda name: name != "u", "'table' is tied"),
        (AdamW(), ["w"], "Muon alone updates matrices"),
        (Muon(), ["w"] if last else ["u"], "matrices, u"),
        (Muon(rms=0.1 if last else 0.2), None, "rms=0.1"),
        (Muon(), ["w", "x"] if last else ["w"], f"'x'.*rank {comm.size - 1}"),
    ]
    for rule, matrices, message in bad:
        with pytest.raises(ArgumentError, match=f"(?s){message}"):
            ShardedOptimizer(buckets, rule, matrices=matrices)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"momentum": 0}, "pass nesterov=False"),
        ({"steps": 0}, "steps"),
        ({"coefficients": (1, 2, np.nan)}, "coefficients are"),
        ({"others": Muon()}, "single elements"),
    ]
    for options, message in wrong:
        with pytest.raises(ArgumentError, match=message):
            Muon(**options)
    optimizer = ShardedOptimizer(buckets, Muon(momentum=0, nesterov=False))
    assert optimizer.state_words == {"w": 0, "u": 0, "b": 2, "table": 2, "experts.b": 2}
    mesh.free()


def test_a_home_without_memory_is_an_error_of_all_ranks(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for what it sends back, not for the watchdog; late messages come into buffers of their own.

    A rank may have all that it waits for, and gather the next parameters, before the exception reaches it.
    """
    complete, update = list[bool](), Homes.update

    def fails(rule: Any, *arrays: np.ndarray) -> None:
        raise MemoryError("a home is full")

    def noted(homes: Homes, parts: list[np.ndarray]) -> None:
        update(homes, parts)
        complete.append(True)

    mesh = Mesh(comm, dp=comm.size)
    _, optimizer = run(mesh, 1, stage=2, rule=Muon())
    assert optimizer.homes
    old, size = optimizer.homes._buffers, optimizer.bytes
    with monkeypatch.context() as patch:
        if comm.rank == comm.size - 1:
            patch.setattr(Muon, "whole_updates", fails)
        patch.setattr(Homes, "update", noted)
        with pytest.raises(MemoryError, match="a home is full"):
            one_step(optimizer, 1)
    optimizer.buckets.clear()
    assert not one_step(optimizer, 1).skipped
    new = optimizer.homes._buffers
    assert optimizer.bytes == size
    assert complete or not any(np.shares_memory(new[kind], old[kind]) for kind in old)
    assert comm.rank != comm.size - 1 or not complete
    comm.Barrier()
