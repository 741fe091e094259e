"""Mistakes in a training program, most of them on one rank: all ranks raise one error, and none waits or drifts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layers import mesh_of, numbers
from tiers import in_turn, square_grid

from pdgemm.errors import ArgumentError, FileError, LinAlgError, PdgemmError
from pdgemm.parallel import SGD, AdamW, Buckets, LossScale, Muon, Part, Prefetch, ShardedOptimizer, TrainingState
from pdgemm.parallel.layers import ContextSplit, CrossEntropy, Embedding, Experts, Linear

pytestmark = pytest.mark.mpi
NAMES = tuple(f"w{at}" for at in range(6))


class Plain:
    """An update rule of a user, who has written no `__repr__`."""

    kept = ()

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def update(self, p: np.ndarray, g: np.ndarray, state: np.ndarray, step: int, rate: float, decays: bool) -> None:
        p -= rate * self.factor * g


def optimizer_of(mesh: Any, rule: Any = None, **how: Any) -> Any:
    return ShardedOptimizer(
        Buckets(mesh, {name: np.ones(50) for name in NAMES}, bucket_bytes=400, **how), rule or SGD()
    )


def refused(comm: Any, message: str, call: Callable[[], Any], kind: type[Exception] | None = None) -> None:
    """The call raises the same error of the package, or of another kind, on all ranks."""
    with pytest.raises(kind or PdgemmError, match=message) as raised:
        call()
    assert len({*comm.allgather(str(raised.value))}) == 1


def test_what_is_no_update_rule(comm: Any) -> None:
    """A string, a class or None, on all ranks and on one, also as the other rule of Muon."""
    with mesh_of(comm, dp=comm.size) as mesh:
        last = comm.rank == comm.size - 1
        for bad in ("adamw", AdamW, 0.1, {"beta1": 0.9}):
            said = "rule is an update rule, such as AdamW\\(\\), got "
            refused(comm, said, lambda bad=bad: optimizer_of(mesh, bad))
            refused(comm, said, lambda bad=bad: optimizer_of(mesh, bad if last else AdamW()))
            refused(comm, "others is an update rule, such as", lambda bad=bad: Muon(others=bad))


@pytest.mark.on_ranks(1)
def test_numbers_of_update_rules(comm: Any) -> None:
    """What is infinite, NaN, no number or out of range, also where it is 0 in 32 bits."""
    decays = {"weight_decay": (-0.1,)}
    for rule, fields in (
        (AdamW, {"beta1": (-0.1, 1.0), "beta2": (-0.1, 1.0), "eps": (0.0, -1e-8, 1e-50), **decays}),
        (SGD, {"momentum": (-0.1, 1.0), **decays}),
        (Muon, {"momentum": (-0.1, 1.0), "rms": (0.0,), **decays}),
        (LossScale, {"scale": (0.0,), "least": (0.0,), "most": (0.0,), "growth_every": (0, 1.5), "good": (-1,)}),
    ):
        for name, values in fields.items():
            for bad in (*values, np.inf, -np.inf, np.nan, "1", None):
                with pytest.raises(ArgumentError, match=name.rstrip("12")):
                    rule(**{name: bad})


def test_rules_of_other_numbers(comm: Any) -> None:
    """Of the same class, which says nothing of itself, alone and within Muon; and other rates than those of others."""
    last = comm.rank == comm.size - 1
    with mesh_of(comm, dp=comm.size) as mesh:
        for make in (Plain, lambda factor: Muon(others=Plain(factor))):
            said = "different arguments: .*'factor': 1.*'factor': 2"
            refused(comm, said, lambda make=make: optimizer_of(mesh, make(2 if last else 1)))
        optimizer = optimizer_of(mesh, Plain(1))
        for bad in (-0.1, np.nan, "1"):
            optimizer.buckets.ready(*NAMES[::-1])
            refused(comm, f"rate must be .*rank {comm.size - 1}", lambda bad=bad: optimizer.step(bad if last else 0.1))


def test_arguments_of_a_state(comm: Any, shared_tmp_path: Path) -> None:
    """On one rank, before and after a file is there; the file of a rule that says nothing of itself is gone on with."""
    last, path = comm.rank == comm.size - 1, shared_tmp_path / "run.h5"
    with mesh_of(comm, dp=comm.size) as mesh:
        optimizer = optimizer_of(mesh, Plain(1))
        for _ in range(2):
            for bad, message, kind in (
                ({"every": 0}, "every must be >= 1, got 0", None),
                ({"every": "x"}, "every is a whole number", None),
                ({"keep": 0}, "keep must be >= 1, got 0", None),
                ({"attrs": {"rule": "x"}}, "names beside its own, got 'rule'", None),
                ({"attrs": 5}, "int", TypeError),
                ({"path": None}, "NoneType", TypeError),
            ):
                arguments = {"path": path, **(bad if last else {})}
                refused(comm, message, lambda given=arguments: TrainingState(optimizer=optimizer, **given), kind)
            state = TrainingState(path, optimizer)
            refused(comm, "last", lambda state=state: next(state.steps(-1 if last else 3)))
            refused(comm, "steps, .*2; rank.* 3", lambda state=state: next(state.steps(3 if last else 2)))
            state.save()
        refused(comm, "rule is Plain", lambda: TrainingState(path, optimizer_of(mesh, Plain(2))), FileError)


def test_arguments_of_samples_and_passes(comm: Any) -> None:
    """Sources, shares, samples outside of their block, and a chunk that is not there, on one rank."""
    last = comm.rank == comm.size - 1
    with mesh_of(comm, dp=comm.size) as mesh:
        x, shares = np.arange(5.0), [[np.arange(2)]]
        refused(comm, "iterable", lambda: Prefetch(mesh, None if last else (x,), shares), TypeError)  # type: ignore[arg-type]
        refused(comm, "iterable", lambda: Prefetch(mesh, (x,), None if last else shares), TypeError)  # type: ignore[arg-type]
        batches = Prefetch(mesh, (x,), shares)
        if not last:
            batches.__enter__()
        refused(comm, "inside of the block", lambda: next(iter(batches)))
        if not last:
            batches.__exit__()
        for stage in (0, 2, 3):
            optimizer = optimizer_of(mesh, stage=stage)
            for begin in (optimizer.buckets.forward, optimizer.buckets.backward):
                refused(
                    comm, "chunk must be <= 0, got 3", lambda o=optimizer, b=begin: stepped(o, b(3 if last else None))
                )
                optimizer.buckets.clear()
            assert stepped(optimizer, optimizer.buckets.backward()) == pytest.approx(comm.size * np.sqrt(300))


def stepped(optimizer: Any, block: Any, failing: str = "", forward: Any = None) -> float:
    """The norm of a step whose gradients are 1, in this block; the last rank fails at a parameter."""
    buckets = optimizer.buckets
    last = buckets.mesh.rank == buckets.mesh.shape.size - 1
    for pass_, names in ((forward, NAMES), (block, NAMES[::-1])) if forward else ((block, NAMES[::-1]),):
        with pass_:
            for name in names:
                assert buckets.parameters[name].size
                if pass_ is block:
                    buckets.gradients[name] += 1.0
                if last and failing == ("f" if pass_ is forward else "") + name:
                    raise ZeroDivisionError(f"at {name}")
                if pass_ is block:
                    buckets.ready(name)
    norm: float = optimizer.step(0.0).norm
    return norm


@pytest.mark.on_ranks(2, 3)
@pytest.mark.parametrize(("stage", "per_node"), in_turn(range(4), ["", "1"]))
def test_a_step_after_an_exception(comm: Any, stage: int, per_node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one rank in any place, which all ranks have caught: it is right after `clear`, and else after one error."""
    if per_node:
        monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", per_node)
    right = pytest.approx(comm.size * np.sqrt(300))
    with mesh_of(comm, dp=comm.size) as mesh:
        optimizer = optimizer_of(mesh, stage=stage)
        buckets = optimizer.buckets

        def step(failing: str = "") -> float:
            return stepped(optimizer, buckets.backward(), failing, buckets.forward())

        for failing in ("fw0", "fw3", "fw5", "w5", "w3", "w0"):
            for cleared in (True, False):
                with pytest.raises(ZeroDivisionError, match=f"at {failing.lstrip('f')}"), mesh.raised_together():
                    step(failing)
                if cleared:
                    buckets.clear()
                elif failing[0] == "w":
                    refused(comm, r"an exception has ended a step, .*: call Buckets.clear\(\) on all ranks", step)
                else:
                    try:
                        step()
                    except Exception as bad:  # where other ranks had come to their backward pass
                        assert "call Buckets.clear()" in str(bad)
                assert step() == right and step() == right


@square_grid
@pytest.mark.parametrize("stage", [0, 3])
def test_a_sum_along_tp_that_was_forgotten(comm: Any, stage: int) -> None:
    """Addends for a parameter that each rank along tp has: nothing is changed, and the error names it."""
    with mesh_of(comm, tp=2, dp=comm.size // 2) as mesh:
        model = {
            "table": Part(np.ones((6, 4)), tp=0),
            "gain": np.ones(6),
            "shift": Part(np.ones(5), tp="sum"),
            "bias": np.ones(7),
        }
        buckets = Buckets(mesh, model, stage=stage, bucket_bytes=40)
        optimizer, unit = ShardedOptimizer(buckets, SGD()), np.zeros(6)
        unit[mesh.index("tp")] = 1  # of the same norm on both ranks

        def step(gain: Any, optimizer: Any = optimizer) -> Any:
            with buckets.backward():
                for name in reversed(model):
                    buckets.gradients[name] += gain if name == "gain" else 1.0
                    buckets.ready(name)
            return optimizer.step(0.5)

        said = "ranks along tp have different gradients of 'gain', and update copies .*tp=\"sum\".*divide it by 2"
        for bad in (unit, 1 + mesh.index("tp") * np.finfo(float).eps):
            refused(comm, said, lambda bad=bad: step(bad))
        with pytest.raises(LinAlgError, match="the gradient of 'gain' is NaN"):
            step(np.where(unit, np.nan, 0.0))
        scaled = ShardedOptimizer(buckets, SGD(), scale=LossScale(1.0))
        assert step(np.where(unit, np.inf, 0.0), scaled).skipped
        with buckets.forward():
            assert all((buckets.parameters[name] == 1).all() for name in model)
        step(1.0)
        with buckets.forward():
            assert (buckets.parameters["gain"] == 1 - 0.5 * mesh.shape.dp).all()


@pytest.mark.parametrize("per_node", ["", "1"])
def test_tokens_and_labels_that_are_known(comm: Any, per_node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other numbers of tokens on one rank of a line, both known, and other labels and ids in a later call."""
    if per_node:
        monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", per_node)
    last, h = comm.rank == comm.size - 1, 8
    with mesh_of(comm) as mesh, mesh_of(comm, cp=comm.size) as ring:
        embedding, head, split = Embedding(mesh, 12, h), CrossEntropy(mesh, 12), ContextSplit(ring, 16)
        table, layers = numbers((embedding.own.stop - embedding.own.start, h), 1), (Linear(mesh, h, h, "rows"),)
        layers += (Linear(mesh, h, h, "columns"), Linear(mesh, h, h, "rows", sequence=False))
        ids, zeros = np.arange(7), np.zeros_like(table)

        def linear(layer: Any, tokens: int, activation: Any = None) -> Any:
            shapes = layer.schedule(tokens, float).shapes(mesh.index("tp"))
            x, w = numbers(shapes["x"], 2), numbers(shapes["w"], 3)
            y, _ = layer.forward(x, w, None, activation, tokens=tokens)
            _, later = layer.input_gradient(np.ones(shapes["y"]), w, tokens=tokens)
            layer.weight_gradient(later, x, np.zeros_like(w))
            return y

        calls: list[tuple[Callable[[int], Any], str]] = [
            *((lambda n, layer=layer: linear(layer, 16 + n), "Linear, 1[67]") for layer in layers),
            *((lambda n, layer=layer: linear(layer, 16, "relu" if n else None), "relu") for layer in layers),
            (lambda n: embedding.forward(ids[n:], table), "Embedding.forward, [67]"),
            (lambda n: embedding.forward(ids + n, table), "ids with the digest"),
            (lambda n: embedding.backward(np.ones((len(np.array_split(ids, comm.size)[comm.rank]), h)), ids + n, zeros),
             "ids with the digest"),
            (lambda n: head.forward(numbers((7 - n, len(table)), 4), ids[n:])[0], "CrossEntropy, [67]"),
            (lambda n: head.forward(numbers((7, len(table)), 4), ids + n)[0], "labels with the digest"),
            (lambda n: head.forward(numbers((7, len(table)), 4), ids, np.ones(7) + n)[0], "weights with the digest"),
            (lambda n: split.gather(np.ones((1, 2 + n, len(split.positions), 3))), "ContextSplit, [23]"),
            (lambda n: mesh.all_reduce(np.ones(4 + n), axis="tp"), r"all_reduce, \([45],\)"),
        ]  # fmt: skip
        for call, message in calls:
            good = [call(n) for n in (0, 1)]
            for _ in range(2):
                refused(comm, f"different arguments: .*{message}", lambda call=call: call(int(last)))
                refused(comm, f"different arguments: .*{message}", lambda call=call: call(int(not last)))
                for n in (0, 1):
                    np.testing.assert_array_equal(call(n), good[n])


def test_numbers_of_a_sum(comm: Any) -> None:
    """What is no number, and other shapes, on one rank: an error of its line, where a part of a sum was returned."""
    last = comm.rank == comm.size - 1
    with mesh_of(comm, dp=comm.size) as mesh:
        for _ in range(2):
            assert mesh.sum(1.0, np.arange(3.0))[0] == comm.size
            refused(comm, "could not convert", lambda: mesh.sum("x" if last else 1.0), ValueError)
            refused(comm, r"Mesh.sum, .*\(3,\).*\(5,\)", lambda: mesh.sum(np.zeros(5 if last else 3)))
        layer = Experts(mesh, comm.size, 1, 1.0)
        refused(comm, "NoneType", lambda: (layer.input_gradient(None, None, {}), mesh.sum(0.0)), AttributeError)  # type: ignore[arg-type]
