"""Bad input of a layer on one rank, or on all: one exception on all ranks of the line, and the layer goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import sleep
from typing import Any

import numpy as np
import pytest
from fake_device import FakeArray, fake_device
from layers import mesh_of, numbers
from tiers import in_turn

from pdgemm.errors import ArgumentError, PdgemmError
from pdgemm.local.arrays import device as devices
from pdgemm.parallel import Buckets, Mesh
from pdgemm.parallel.layers import ContextSplit, CrossEntropy, Dropout, Embedding, Linear, dropout
from pdgemm.schedules.training.mesh_shape import block_of

pytestmark = pytest.mark.mpi

T, H, V = 7, 6, 10  # tokens, features, words: not divisible
Passes = dict[str, tuple[Callable[..., Any], list[Any]]]  # by name: a method, and its right arguments


def linear(mesh: Any, split: str, sequence: bool) -> Passes:
    layer = Linear(mesh, H, 9, split, sequence=sequence)
    shapes = layer.schedule(T, float).shapes(mesh.index("tp"))
    x, w, y = (numbers(shapes[name], 1) for name in "xwy")
    b = numbers(shapes["w"][1:], 2)
    _, later = layer.input_gradient(y, w, "gelu", x, tokens=T)
    return {
        "forward": (lambda *a: layer.forward(*a[:3], "relu", a[3], tokens=T), [x, w, b, y]),
        "input_gradient": (lambda *a: layer.input_gradient(*a[:2], "gelu", a[2], tokens=T), [y, w, x]),
        "weight_gradient": (layer.weight_gradient, [later, x, np.zeros_like(w), np.zeros_like(b)]),
    }


def embedding(mesh: Any) -> Passes:
    layer, own = Embedding(mesh, V, H), block_of(T, mesh.length("tp"), mesh.index("tp"))
    table, ids = numbers((layer.own.stop - layer.own.start, H), 1), np.arange(T) % V
    dy = numbers((T, H), 2)[own]
    return {
        "forward": (lambda table, ids: layer.forward(ids, table), [table, ids]),
        "backward": (lambda dy, ids, dtable: layer.backward(dy, ids, dtable), [dy, ids, np.zeros_like(table)]),
    }


def cross_entropy(mesh: Any) -> Passes:
    layer = CrossEntropy(mesh, V)
    logits = numbers((T, V), 1)[:, layer.own]
    return {"forward": (lambda *a: layer.forward(*a)[0], [logits, np.arange(T), np.ones(T)])}


def context(mesh: Any) -> Passes:
    layer = ContextSplit(mesh, T)
    k, dk = numbers((2, 3, len(layer.positions), H), 1), numbers((2, 3, T, H), 2)
    return {"gather": (layer.gather, [k]), "reduce": (layer.reduce, [dk])}


LAYERS: dict[str, tuple[Callable[..., Passes], tuple[Any, ...], str]] = {
    "columns": (linear, ("columns", True), "tp"),
    "rows": (linear, ("rows", True), "tp"),
    "whole rows": (linear, ("rows", False), "tp"),
    "embedding": (embedding, (), "tp"),
    "cross-entropy": (cross_entropy, (), "tp"),
    "context": (context, (), "cp"),
}


def spoilt(x: np.ndarray, on_device: Any) -> Iterator[tuple[Any, str]]:
    """What is wrong in place of an array, and what the message says of it."""
    if x.dtype.kind != "i":  # T may vary
        yield np.zeros((*x.shape[:-2], *(n + 1 for n in x.shape[-2:])), x.dtype), "is|are|different arguments: rank"
    yield x[..., None], r"\(.*, 1\), and \(|integers of one dimension"
    yield x.astype(complex), "complex128"
    yield x.astype(object), "object"
    yield x.tolist(), "list"
    yield "x", "str"
    yield on_device, "is on a device, fake; training takes arrays of the host"
    if x.dtype.kind == "i":
        for bad, message in ((-1, "-1 at token 1"), (V, f"{V} at token 1"), (1.5, "float64")):
            ids = x.astype(type(bad))
            ids[1:2] = bad
            yield ids, message


def results(passes: Passes) -> list[np.ndarray]:
    """What all passes return, or change in place."""
    every = list[np.ndarray]()
    for call, right in passes.values():
        arguments = [x.copy() for x in right]
        result = call(*arguments)
        every += [np.asarray(x) for x in (result if isinstance(result, tuple) else (result,)) if x is not None]
        every += arguments
    return every


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An array on a device, where communicators are as ever."""
    with fake_device() as device:
        x = devices.empty((2, 2), np.dtype("f"), device=device)
    monkeypatch.setitem(devices._devices, FakeArray, device)
    return x


@pytest.mark.on_ranks(2, 3)
@pytest.mark.parametrize(("name", "where"), in_turn(LAYERS, ["a node", "nodes"]))
def test_every_argument_of_a_layer(comm: Any, name: str, where: str, on_device: Any, monkeypatch: Any) -> None:
    """Wrong shapes, types, values and devices, on each rank alone and on all."""
    if where == "nodes":
        monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", "1")
    make, arguments, axis = LAYERS[name]
    with mesh_of(comm, **{axis: comm.size}) as mesh:
        passes = make(mesh, *arguments)
        good, turn = results(passes), 0
        for call, right in passes.values():
            for at, x in enumerate(right):
                for bad, message in spoilt(x, on_device):
                    turn += 1
                    failing = {comm.rank, turn % comm.size} if turn % 4 == 0 else {turn % comm.size}
                    mine = comm.rank in failing
                    passed = [x.copy() for x in right]
                    with pytest.raises(PdgemmError, match=message) as raised:  # noqa: PT012
                        call(*(bad if mine and i == at else y for i, y in enumerate(passed)))
                        mesh.sum(0.0, axis=axis)  # a pass without words does not wait for others
                    (text,) = {*comm.allgather(str(raised.value))}
                    assert "rank" in text or "on a device" in text
                    assert not mine or all(np.array_equal(x, y) for x, y in zip(passed, right))
        for x, y in zip(results(passes), good, strict=True):
            np.testing.assert_array_equal(x, y)


def test_other_tokens_and_types_on_one_rank(comm: Any) -> None:
    """What is new on one rank alone, where the others go on with what all have agreed on."""
    with mesh_of(comm) as mesh:
        embedding, head, first = Embedding(mesh, V, H), CrossEntropy(mesh, V), comm.rank == 0
        table, ids = np.ones((embedding.own.stop - embedding.own.start, H)), np.arange(T)
        logits = np.ones((T, head.own.stop - head.own.start))
        loss = head.forward(logits, ids)[0]
        for rows, kind, message in ((T - 1, float, f"{T - 1}.*; rank.*{T}"), (T, "f", "float32; rank.* float64")):
            embedding.forward(ids, table)
            with pytest.raises(ArgumentError, match=f"different arguments: rank 0: Embedding.*{message}"):
                embedding.forward(ids[: rows if first else T], table.astype(kind if first else float))
            with pytest.raises(ArgumentError, match=f"different arguments: rank 0: CrossEntropy, {message}"):
                head.forward(
                    logits[: rows if first else T].astype(kind if first else float), ids[: rows if first else T]
                )
        with pytest.raises(ArgumentError, match="different arguments: rank 0: Embedding, .*; rank.*CrossEntropy"):
            Embedding(mesh, V, H) if first else head.forward(logits, ids)
        assert head.forward(logits, ids)[0] == loss
        assert (embedding.forward(ids, table) == 1).all()


def test_dropout_of_other_rates_and_seeds(comm: Any) -> None:
    with mesh_of(comm) as mesh:
        for rate, seed, message in ((0.3, 1, "rate 0.2; rank.* rate 0.3"), (0.2, 2, "seed 1; rank.* seed 2")):
            with pytest.raises(ArgumentError, match=f"different arguments: rank.*: Dropout, .*{message}"):
                Dropout(mesh, *((rate, seed) if comm.rank == comm.size - 1 else (0.2, 1)))
        for bad in ((1.0, 1), (-0.1, 1), (0.1, 1.5)):
            with pytest.raises(ArgumentError, match="rate|seed"):
                Dropout(mesh, *(bad if comm.rank == 0 else (0.1, 1)))
        x, layer = np.ones((5, 4)), Dropout(mesh, 0.5, 3)
        np.testing.assert_array_equal(layer(x, 2, np.arange(5)), dropout(x, 0.5, 3, 2, np.arange(5)))


@pytest.mark.on_ranks(2, 4)
@pytest.mark.parametrize("stage", [0, 3])
def test_an_exception_in_a_step(comm: Any, stage: int) -> None:
    """Of one rank, in the middle of a pass: all ranks raise it where they wait, and layers go on."""
    for size in ({"dp": 2}, {"tp": 2}) if comm.size == 2 else ({"dp": 2, "tp": -1},):
        with Mesh(comm.Dup(), **size) as mesh:
            buckets = Buckets(mesh, {f"b{at}": np.ones(9) for at in range(4)}, stage=stage, bucket_bytes=8)
            layer = Linear(mesh, H, 8, "columns")
            shapes = layer.schedule(T, float).shapes(mesh.index("tp"))
            x, w = numbers(shapes["x"], 1), numbers(shapes["w"], 2)
            for failing in range(comm.size):
                good = layer.forward(x, w, tokens=T)[0]
                with pytest.raises(ZeroDivisionError, match="by zero") as raised, mesh.raised_together():  # noqa: PT012
                    with buckets.forward():
                        for name in buckets.parameters:
                            assert buckets.parameters[name].all()
                            if name == "b2":
                                assert 1 / (comm.rank != failing)
                            layer.forward(x, w, tokens=T)
                    mesh.sum(1.0, axis="dp+tp")
                assert f"[rank {failing} of {comm.size}]" in raised.value.__notes__
                np.testing.assert_array_equal(layer.forward(x, w, tokens=T)[0], good)
                buckets = Buckets(mesh, {f"b{at}": np.ones(9) for at in range(4)}, stage=stage, bucket_bytes=8)


@pytest.mark.on_ranks(4, 6)
@pytest.mark.parametrize("per_node", ["", "1"])
def test_an_exception_while_others_multiply(comm: Any, per_node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a rank of this line or of another one, at any time, also where sizes are new to a layer; then it goes on."""
    if per_node:
        monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", per_node)
    rng = np.random.default_rng(7)
    with mesh_of(comm, dp=comm.size // 3, tp=-1) as mesh:
        for turn in range(20):
            columns = 8 + turn // 4
            x, w, dy = numbers((T, H), mesh.index("dp")), numbers((H, columns), 9), numbers((T, columns), 8)
            layer, tp = Linear(mesh, H, columns), mesh.length("tp")
            own, mine = (block_of(n, tp, mesh.index("tp")) for n in (T, columns))
            a, b, c, right = x[own], w[:, mine], dy[:, mine], (x @ w[:, mine], (dy @ w.T)[own], x.T @ dy[:, mine])

            def step(part: int, layer: Any = layer, a: Any = a, b: Any = b, c: Any = c, right: Any = right) -> None:
                z = np.zeros_like(b)
                if part < 2:
                    z, _ = layer.input_gradient(c, b, tokens=T) if part else layer.forward(a, b, tokens=T)
                else:
                    layer.weight_gradient(c, a, z)
                np.testing.assert_allclose(z, right[part], rtol=1e-12, atol=1e-12)

            failing, at, late = rng.integers(comm.size), rng.integers(6), rng.random((6, comm.size)) * 1e-3
            with pytest.raises(ZeroDivisionError, match=f"turn {turn}"), mesh.raised_together():  # noqa: PT012
                for number in range(6):
                    if turn % 2:
                        sleep(late[number, comm.rank])
                    if (comm.rank, number) == (failing, at):
                        raise ZeroDivisionError(f"turn {turn}")
                    step(number % 3)
                mesh.sum(0.0, axis="dp+tp")
            for part in range(3):
                step(part)
