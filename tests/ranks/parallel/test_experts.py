"""A mixture of experts on any mesh gives the numbers of one process, drops the same tokens, and moves what it says."""

from __future__ import annotations

from itertools import product
from time import sleep
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from tiers import in_turn

from pdgemm.errors import ArgumentError, DTypeError, LayoutError, MeshError, PdgemmError
from pdgemm.local.arrays.dtypes import element_type
from pdgemm.parallel import SGD, Buckets, Mesh, ShardedOptimizer
from pdgemm.parallel.layers import Experts
from pdgemm.schedules.training.mesh_shape import block_of

pytestmark = pytest.mark.mpi
H, F = 6, 10
DIVISOR, BALANCE = 50.0, 0.3


def meshes(size: int) -> list[dict[str, int]]:
    """All dp x cp x tp of so many ranks, with each ep."""
    shapes = [dict(zip(("dp", "cp", "tp"), x)) for x in product(range(1, size + 1), repeat=3) if np.prod(x) == size]
    return [x | {"ep": ep} for x in shapes for ep in range(1, x["dp"] + 1) if x["dp"] % ep == 0]


def numbers(mesh: Any, samples: int, positions: int) -> np.ndarray:
    """The global numbers of this rank's tokens: of its samples, its two chunks of positions, and of these some rows."""
    dp, cp, tp = (mesh.shape.length(axis) for axis in ("dp", "cp", "tp"))
    mine, at = np.arange(samples)[block_of(samples, dp, mesh.index("dp"))], mesh.index("cp")
    chunks = (at, 2 * cp - 1 - at) if cp > 1 else (0, 1)
    some = np.concatenate([np.arange(positions)[block_of(positions, 2 * cp, chunk)] for chunk in chunks])
    rows = (mine[:, None] * positions + some).ravel()
    return rows[block_of(len(rows), tp, mesh.index("tp"))]


def parameters(experts: int, seed: int = 0, dtype: Any = float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {
        "router": (H, experts),
        "w1": (experts, H, F),
        "b1": (experts, F),
        "w2": (experts, F, H),
        "b2": (experts, H),
    }
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def passed(mesh: Any, layer: Any, x: np.ndarray, dy: np.ndarray, p: dict[str, np.ndarray], order: np.ndarray) -> Any:
    """A forward and a backward pass with this rank's part of whole arrays; gradients are summed over the mesh."""
    own = block_of(layer.experts, mesh.shape.ep, mesh.index("ep"))
    mine = {name: value if name == "router" else value[own] for name, value in p.items()}
    y, kept = layer.forward(x[order], order, mine, DIVISOR)
    dx, later = layer.input_gradient(dy[order], kept, mine)
    gradients = {name: np.zeros(value.shape) for name, value in p.items()}
    layer.weight_gradient(later, {name: v if name == "router" else v[own] for name, v in gradients.items()})
    sums = mesh.comm.allreduce(np.concatenate([v.ravel() for v in gradients.values()]))
    ends = np.cumsum([v.size for v in gradients.values()])
    whole = {k: sums[end - v.size : end].reshape(v.shape) for (k, v), end in zip(gradients.items(), ends)}
    return y, dx, whole, kept


CASES = [(3, 7, 4, 2, 1.0), (1, 5, 8, 3, 0.6), (5, 4, 8, 1, 1.25), (2, 9, 4, 4, 9.0)]


@pytest.mark.on_ranks(2, 4)
def test_every_mesh_gives_the_numbers_of_one_process(comm: Any) -> None:
    """y, dx and all gradients to 1e-12; the same tokens are dropped; words and messages as planned."""
    for sizes, (samples, positions, experts, topk, factor) in in_turn(meshes(comm.size), CASES):
        tokens, rng = samples * positions, np.random.default_rng(1)
        x, dy, p = rng.standard_normal((tokens, H)), rng.standard_normal((tokens, H)), parameters(experts)
        with Mesh(MPI.COMM_SELF) as alone, Mesh(comm.Dup(), **sizes) as mesh:
            one = Experts(alone, experts, topk, factor, balance=BALANCE)
            expected = passed(alone, one, x, dy, p, np.arange(tokens))
            assert (one.statistics.dropped > 0) == (factor < 9)
            layer = Experts(mesh, experts, topk, factor, balance=BALANCE)
            order = numbers(mesh, samples, positions)
            y, dx, gradients, kept = passed(mesh, layer, x, dy, p, order)
            np.testing.assert_allclose(y, expected[0][order], rtol=1e-12, atol=1e-12, err_msg=str(sizes))
            np.testing.assert_allclose(dx, expected[1][order], rtol=1e-12, atol=1e-12, err_msg=str(sizes))
            for name, value in expected[2].items():
                np.testing.assert_allclose(gradients[name], value, rtol=1e-12, atol=1e-12, err_msg=f"{name} {sizes}")
            planned = kept.exchange.traffic(mesh.rank, H, np.dtype(float))
            assert {kind: mesh.traffic[kind] for kind in planned} == planned
            statistics = layer.statistics
            assert (statistics.tokens, statistics.dropped) == (tokens, one.statistics.dropped)
            assert np.isclose(statistics.balance_loss, one.statistics.balance_loss, rtol=1e-13)


def test_all_tokens_choose_one_expert(comm: Any) -> None:
    """With capacity 1 an expert takes its mean share, of the first tokens, on any mesh; more of them drop no token."""
    samples, positions, experts = 3, 7, 4
    tokens, p = samples * positions, parameters(experts)
    x = np.abs(np.random.default_rng(2).standard_normal((tokens, H)))
    p["router"][:] = 0
    p["router"][:, 0] = 1
    for sizes in meshes(comm.size):
        if experts % sizes["ep"]:
            continue
        mesh = Mesh(comm.Dup(), **sizes)
        order = numbers(mesh, samples, positions)
        for topk, factor, taken in ((1, 1.0, 6), (2, 1.0, 11), (1, 0.01, 1), (1, 4.0, 21), (2, 2.0, 21)):
            layer = Experts(mesh, experts, topk, factor)
            y, dx, gradients, _ = passed(mesh, layer, x, x, p, order)
            some = layer.statistics
            assert some.dropped == topk * (tokens - taken) and some.loads.tolist() == [21, 21 * (topk - 1), 0, 0]
            assert some.imbalance == experts / topk
            assert f"{topk * (tokens - taken)} choices dropped of {topk * tokens}" in str(some)
            assert f"the most loaded expert has {experts / topk:.2f} times the mean" in str(some)
            assert np.array_equal(y.any(axis=1), order < taken)  # equal scores: the lower expert is the second choice
            assert not gradients["w1"][topk:].any() and gradients["w1"][:topk].any()
            assert np.isfinite(dx).all()
            layer.reset_statistics()
            assert layer.statistics.tokens == layer.statistics.dropped == 0 and layer.statistics.imbalance == 1
        mesh.free()


def test_recomputed_passes_have_the_same_bits(comm: Any) -> None:
    """A second forward pass, and its words; a loss with a scale; gradients that are added to what is there."""
    mesh = Mesh(comm.Dup(), dp=-1, ep=2 if comm.size % 2 == 0 else 1)
    p, order, rng = parameters(4), numbers(mesh, 5, 3), np.random.default_rng(4)
    x, dy = rng.standard_normal((2, 15, H))
    layer = Experts(mesh, 4, 2, 0.9, activation="silu")
    mine = {name: v if name == "router" else np.split(v, mesh.shape.ep)[mesh.index("ep")] for name, v in p.items()}
    y, kept = layer.forward(x[order], order, mine, 1)
    second, again = layer.forward(x[order], order, mine, 1)
    dx, later = layer.input_gradient(dy[order], again, mine)
    planned = kept.exchange.traffic(mesh.rank, H, np.dtype(float), forwards=2)
    assert {kind: mesh.traffic[kind] for kind in planned} == planned
    assert layer.statistics.tokens == 15  # a microbatch counts once
    assert np.array_equal(y, second) and np.array_equal(dx, layer.input_gradient(dy[order], kept, mine)[0])
    doubled, twice = layer.input_gradient(2 * dy[order], kept, mine, scale=2.0)
    assert np.array_equal(doubled, 2 * dx)
    unscaled, _ = layer.input_gradient(2 * dy[order], kept, mine)
    assert not len(order) or not np.array_equal(unscaled, doubled)  # the balance loss has the scale, too
    gradients = {name: np.zeros_like(v) for name, v in mine.items()}
    layer.weight_gradient(later, gradients)
    first = {name: v.copy() for name, v in gradients.items()}
    layer.weight_gradient(twice, gradients)
    for name, value in first.items():
        np.testing.assert_allclose(gradients[name], 3 * value, rtol=1e-13, atol=1e-13, err_msg=name)
    mesh.free()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_parameters_of_fewer_bits(comm: Any, dtype: str) -> None:
    """They are converted to the type of the tokens, float32."""
    mesh, rng, experts = Mesh(comm.Dup(), dp=-1, ep=comm.size), np.random.default_rng(5), 2 * comm.size
    p, x = parameters(experts, dtype=element_type(dtype)), rng.standard_normal((20, H))
    order = np.array_split(np.arange(20), comm.size)[comm.rank]
    with Mesh(MPI.COMM_SELF) as alone:
        one, wide = Experts(alone, experts, 2, 1.0, balance=BALANCE), {name: v.astype(float) for name, v in p.items()}
        expected_y, expected_dx, expected, _ = passed(alone, one, x, x, wide, np.arange(20))
    layer = Experts(mesh, experts, 2, 1.0, balance=BALANCE)
    own = slice(comm.rank * 2, comm.rank * 2 + 2)
    mine = {name: value if name == "router" else value[own] for name, value in p.items()}
    y, kept = layer.forward(x[order].astype("f"), order, mine, DIVISOR)
    dx, later = layer.input_gradient(x[order], kept, mine)
    gradients = {name: np.zeros(value.shape, "f") for name, value in mine.items()}
    layer.weight_gradient(later, gradients)
    assert y.dtype == dx.dtype == np.float32 and kept.results.dtype == np.float32
    np.testing.assert_allclose(y, expected_y[order], rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(dx, expected_dx[order], rtol=2e-4, atol=2e-3)
    np.testing.assert_allclose(gradients["w2"], expected["w2"][own], rtol=2e-4, atol=2e-3)
    mesh.free()


@pytest.mark.on_ranks(1)
@pytest.mark.parametrize("topk", [1, 3])
def test_gradients_are_those_of_autograd(comm: Any, topk: int) -> None:
    """Of sum(y dy) + balance loss, by x and by all parameters, with tokens dropped and without.

    With one expert a token the gate is its probability: Fedus, Zoph & Shazeer, Switch transformers, 2022, equation 2.
    """
    autograd = pytest.importorskip("autograd")
    import autograd.numpy as xp
    from autograd.scipy.special import erf

    n, experts = 19, 5
    rng, p = np.random.default_rng(6), parameters(experts)
    x, dy = rng.standard_normal((2, 3 * n, H))
    order = rng.permutation(3 * n)[:n]  # numbers have gaps, and rows any order
    with Mesh(comm.Dup()) as mesh:
        for factor in (0.8, 9.0):
            layer = Experts(mesh, experts, topk, factor, balance=BALANCE)
            y, dx, gradients, kept = passed(mesh, layer, x, dy, p, order)
            chosen, taken = kept.routes.chosen, np.zeros(n * topk)
            taken[kept.taken] = 1
            assert (kept.exchange.dropped > 0) == (factor < 1) and taken.sum() == n * topk - kept.exchange.dropped

            def results(v: Any, chosen: Any = chosen, taken: Any = taken) -> tuple[Any, Any]:
                scores = xp.dot(v["x"], v["router"])
                e = xp.exp(scores - xp.max(scores, axis=1, keepdims=True))
                probabilities = e / xp.sum(e, axis=1, keepdims=True)
                picked = probabilities[xp.arange(n)[:, None], chosen]
                gates = picked / (xp.sum(picked, axis=1, keepdims=True) if topk > 1 else 1.0) * taken.reshape(n, topk)
                z = xp.einsum("nh,ehf->nef", v["x"], v["w1"]) + v["b1"]
                out = xp.einsum("nef,efh->neh", z * (1 + erf(z / 2**0.5)) / 2, v["w2"]) + v["b2"]
                fraction = np.bincount(chosen.ravel(), minlength=experts) / (n * topk)
                balance = BALANCE * n / DIVISOR * experts * xp.dot(fraction, xp.mean(probabilities, axis=0))
                return xp.sum(gates[:, :, None] * out[xp.arange(n)[:, None], chosen], axis=1), balance

            def loss(v: Any, results: Any = results) -> Any:
                y, balance = results(v)
                return xp.sum(y * dy[order]) + balance

            values = p | {"x": x[order]}
            np.testing.assert_allclose(y, results(values)[0], rtol=1e-12, atol=1e-12)
            assert np.isclose(layer.statistics.balance_loss, results(values)[1], rtol=1e-13)
            for name, value in autograd.grad(loss)(values).items():
                scale = np.abs(value).max()
                np.testing.assert_allclose((gradients | {"x": dx})[name], value, rtol=1e-13, atol=1e-13 * scale)


@pytest.mark.parametrize("per_node", ["", "1"])
def test_tokens_travel_while_gradients_are_reduced(comm: Any, per_node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that waits for tokens lets the reductions go on for which other ranks wait."""
    if per_node:
        monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", per_node)
    mesh, p = Mesh(comm.Dup(), dp=-1, ep=comm.size), parameters(2 * comm.size)
    own = slice(comm.rank * 2, comm.rank * 2 + 2)
    mine = {name: value if name == "router" else value[own] for name, value in p.items()}
    x, order = np.random.default_rng(comm.rank).standard_normal((5, H)), np.arange(5) + 5 * comm.rank
    layer = Experts(mesh, 2 * comm.size, 2, 1.0)
    y, kept = layer.forward(x, order, mine, 1.0)
    first, _ = layer.input_gradient(y, kept, mine)
    for stage in (0, 2, 3):
        buckets = Buckets(mesh, {f"w{k}": np.full(50 + k, 1.0) for k in range(12)}, stage=stage, bucket_bytes=600)
        optimizer = ShardedOptimizer(buckets, SGD())
        with buckets.backward():
            for k in reversed(range(12)):
                if k == 5 and comm.rank % 2:  # while others wait for the reduction of w7, which had this slot
                    dx, _ = layer.input_gradient(y, kept, mine)
                buckets.gradients[f"w{k}"] += k
                if k == 5 and comm.rank % 2 == 0:
                    dx, _ = layer.input_gradient(y, kept, mine)
                if k == 7 and comm.rank % 2 == 0:
                    sleep(0.02)
                buckets.ready(f"w{k}")
        optimizer.step(1.0)
        assert np.array_equal(dx, first) and np.array_equal(y, layer.forward(x, order, mine, 1.0)[0])
        with buckets.forward():
            for k in range(12):
                assert (buckets.parameters[f"w{k}"] == 1 - k * comm.size).all()
    mesh.free()


def test_what_is_refused(comm: Any) -> None:
    """The same error on all ranks, also where one rank alone has passed what is wrong."""
    last, size = comm.rank == comm.size - 1, comm.size
    experts = 2 * size
    mesh = Mesh(comm.Dup(), dp=-1, ep=size)
    for arguments, message in (
        ((experts, experts + 1, 1.0), f"a token chooses 1 to {experts} different experts, got topk = {experts + 1}"),
        ((experts, 0, 1.0), "topk must be >= 1, got 0"),
        ((0, 1, 1.0), "experts must be >= 1, got 0"),
        ((experts, 2, 0.0), "capacity must be a real number > 0"),
        ((experts, 2, float("nan")), "capacity must be a real number > 0"),
    ):
        with pytest.raises(ArgumentError, match=message):
            Experts(mesh, *arguments)
    with pytest.raises(ArgumentError, match="activation 'tanh' is not one of relu, gelu, gelu_tanh, silu"):
        Experts(mesh, experts, 2, 1.0, activation="tanh")
    with pytest.raises(MeshError, match=f"{size + 1} experts are not divided over ep {size}: ep is one of 1"):
        Experts(mesh, size + 1, 1, 1.0)
    with pytest.raises(ArgumentError, match="different arguments: .*Experts, .*1; rank.*2"):
        Experts(mesh, experts, 2 if last else 1, 1.0)
    with Mesh(comm.Dup(), tp=-1) as lines, pytest.raises(MeshError, match=f"sequence=True on tp {size}"):
        Experts(lines, experts, 2, 1.0, sequence=False)
    Experts(mesh, experts, 2, 1.0, sequence=False)
    layer, p = Experts(mesh, experts, 2, 1.0), parameters(experts)
    own = slice(comm.rank * 2, comm.rank * 2 + 2)
    mine = {name: value if name == "router" else value[own] for name, value in p.items()}
    x, order = np.ones((3, H)), np.arange(3) + 3 * comm.rank
    good, _ = layer.forward(x, order, mine, 1.0)
    of_last = f"on rank {size - 1}"
    cases: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        ((x, order[:2], mine, 1.0), ArgumentError, f"order has an integer for each of 3 tokens {of_last}"),
        ((x, order * 0.5, mine, 1.0), ArgumentError, "order has an integer for each of 3 tokens"),
        ((x, order - 3 * size, mine, 1.0), ArgumentError, f"tokens have numbers >= 0, got -3 {of_last}"),
        ((x, order * 0, mine, 1.0), ArgumentError, "tokens have one number each in a microbatch, got 0 to "),
        ((x.astype(int), order, mine, 1.0), DTypeError, f"float32 or float64, got \\(3, {H}\\) of int64 {of_last}"),
        ((x[0], order, mine, 1.0), DTypeError, "x is \\(tokens, h\\)"),
        ((x, order, mine, 0.0), ArgumentError, "divisor must be a real number > 0"),
        ((x, order, mine | {"w2": p["w2"][:, :, 1:]}, 1.0), LayoutError, f"w2 is .* {of_last}"),
        ((x[:, 1:], order, mine, 1.0), LayoutError, f"router is .*, and \\({H - 1}, {experts}\\) {of_last}"),
        ((x, order, {}, 1.0), KeyError, "b1"),
        ((x, order - 3, mine, 1.0), ArgumentError, f"on rank {size - 2} and .* on rank {size - 1}"),
        ((x, order, mine, 2), ArgumentError, "different arguments: .*divisor 1.0; rank.* divisor 2.0"),
    ]
    for arguments, kind, message in cases:
        with pytest.raises(kind, match=message) as raised:
            layer.forward(*(arguments if last else (x, order, mine, 1.0)))
        if kind is not KeyError:
            assert isinstance(raised.value, PdgemmError) and len({*comm.allgather(str(raised.value))}) == 1
        assert np.array_equal(layer.forward(x, order, mine, 1.0)[0], good)
    _, kept = layer.forward(x, order, mine, 1.0)
    before = layer.input_gradient(x, kept, mine)[0]
    for dy, scale, parts, kind, message in (
        (x[:2], 1.0, mine, LayoutError, f"dy is \\(2, {H}\\), and \\(3, {H}\\) {of_last}"),
        (x + 1j, 1.0, mine, DTypeError, "dy has real numbers, got complex128"),
        ("dy", 1.0, mine, ArgumentError, "dy is an array of NumPy, got str"),
        (x, "1", mine, ArgumentError, "scale must be a real number"),
        (x, 1.0, mine | {"w1": mine["w1"][:, 1:]}, LayoutError, f"w1 is .* {of_last}"),
        (x, 1.0, {}, KeyError, "b1"),
    ):
        with pytest.raises(kind, match=message) as raised:  # noqa: PT012
            layer.input_gradient(*((dy, kept, parts, scale) if last else (x, kept, mine)))
            mesh.sum(0.0)  # a rank to which no token of the last one comes does not wait for it before
        if kind is not KeyError:
            assert len({*comm.allgather(str(raised.value))}) == 1
        assert np.array_equal(layer.input_gradient(x, kept, mine)[0], before)
        assert np.array_equal(layer.forward(x, order, mine, 1.0)[0], good)
    mesh.free()
