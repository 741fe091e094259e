"""A mixture of experts on any mesh gives the numbers of one process, drops the same tokens, and moves what it says."""

from __future__ import annotations

from itertools import product
from time import sleep
from typing import Any, NamedTuple

import numpy as np
import pytest
from mpi4py import MPI
from scipy.special import erf
from tiers import every_grid, square_grid

from pdgemm.errors import ArgumentError, DTypeError, LayoutError, MeshError, PdgemmError
from pdgemm.local.arrays.dtypes import element_type
from pdgemm.parallel import SGD, AdamW, Buckets, Mesh, Part, ShardedOptimizer
from pdgemm.parallel.layers import Experts
from pdgemm.schedules.training.mesh_shape import block_of
from pdgemm.schedules.training.token_exchange import expert_capacity

pytestmark = [pytest.mark.mpi, square_grid]
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


class Plain(NamedTuple):
    """A mixture in one process: results and gradients by loops over experts."""

    y: np.ndarray
    dx: np.ndarray
    gradients: dict[str, np.ndarray]
    dropped: int
    balance_loss: float


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


def plain(x: np.ndarray, dy: np.ndarray, p: dict[str, np.ndarray], topk: int, capacity: int) -> Plain:
    """Token by token in the order of their numbers."""
    (n, _), experts = x.shape, p["router"].shape[1]
    scores = x @ p["router"]
    probabilities = np.exp(scores - scores.max(1, keepdims=True, initial=-np.inf))
    probabilities /= probabilities.sum(1, keepdims=True)
    load, dropped, chosen, fraction = np.zeros(experts, int), 0, [], np.zeros(experts)
    y, dx, g = np.zeros_like(x), np.zeros_like(x), {name: np.zeros_like(value) for name, value in p.items()}
    for t in range(n):
        best = sorted(range(experts), key=lambda e: (-scores[t, e], e))[:topk]
        chosen.append([])
        for e in best:
            fraction[e] += 1 / (n * topk)
            if load[e] < capacity:
                chosen[t].append(e)
                load[e] += 1
            else:
                dropped += 1
        chosen[t] = (best, chosen[t])
    slope = BALANCE * experts * fraction / DIVISOR
    for t, (best, kept) in enumerate(chosen):
        total, dgates = probabilities[t, best].sum() if topk > 1 else 1.0, np.zeros(experts)
        for e in kept:
            z = x[t] @ p["w1"][e] + p["b1"][e]
            hidden, gate = z * (1 + erf(z / np.sqrt(2))) / 2, probabilities[t, e] / total
            out = hidden @ p["w2"][e] + p["b2"][e]
            y[t] += gate * out
            dgates[e] = out @ dy[t]
            dout = gate * dy[t]
            dz = (p["w2"][e] @ dout) * ((1 + erf(z / np.sqrt(2))) / 2 + z * np.exp(-z * z / 2) / np.sqrt(2 * np.pi))
            g["w2"][e] += np.outer(hidden, dout)
            g["b2"][e] += dout
            g["w1"][e] += np.outer(x[t], dz)
            g["b1"][e] += dz
            dx[t] += p["w1"][e] @ dz
        dp = slope.copy()
        for e in best:
            common = sum(dgates[i] * probabilities[t, i] for i in best) / total**2 if topk > 1 else 0.0
            dp[e] += dgates[e] / total - common
        dscores = probabilities[t] * (dp - dp @ probabilities[t])
        dx[t] += p["router"] @ dscores
        g["router"] += np.outer(x[t], dscores)
    return Plain(y, dx, g, dropped, float(slope @ probabilities.sum(0)))


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


@every_grid
@pytest.mark.parametrize(("samples", "positions", "experts", "topk", "factor"), CASES)
def test_every_mesh_gives_the_numbers_of_one_process(
    comm: Any, samples: int, positions: int, experts: int, topk: int, factor: float
) -> None:
    """y, dx and all gradients to 1e-12; the same tokens are dropped; words and messages as planned."""
    tokens, rng = samples * positions, np.random.default_rng(1)
    x, dy, p = rng.standard_normal((tokens, H)), rng.standard_normal((tokens, H)), parameters(experts)
    reference = plain(x, dy, p, topk, expert_capacity(factor, tokens, topk, experts))
    assert (reference.dropped > 0) == (factor < 9)
    for sizes in meshes(comm.size):
        mesh = Mesh(comm.Dup(), **sizes)
        if experts % sizes["ep"]:
            with pytest.raises(MeshError, match=f"{experts} experts are not divided over ep {sizes['ep']}"):
                Experts(mesh, experts, topk, factor)
            mesh.free()
            continue
        layer = Experts(mesh, experts, topk, factor, balance=BALANCE)
        order = numbers(mesh, samples, positions)
        y, dx, gradients, kept = passed(mesh, layer, x, dy, p, order)
        np.testing.assert_allclose(y, reference.y[order], rtol=1e-12, atol=1e-12, err_msg=str(sizes))
        np.testing.assert_allclose(dx, reference.dx[order], rtol=1e-12, atol=1e-12, err_msg=str(sizes))
        for name, value in reference.gradients.items():
            np.testing.assert_allclose(gradients[name], value, rtol=1e-12, atol=1e-12, err_msg=f"{name} {sizes}")
        planned = kept.exchange.traffic(mesh.rank, H, np.dtype(float))
        assert {kind: mesh.traffic[kind] for kind in planned} == planned
        statistics = layer.statistics
        assert (statistics.tokens, statistics.dropped) == (tokens, reference.dropped)
        assert np.isclose(statistics.balance_loss, reference.balance_loss, rtol=1e-13)
        mesh.free()


@every_grid
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


@every_grid
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
    wide = {name: value.astype(np.float32) for name, value in p.items()}
    reference = plain(
        x.astype("f"), x.astype("f"), {name: v.astype(float) for name, v in p.items()}, 2, -(-40 // experts)
    )
    for values in (p, wide):
        layer = Experts(mesh, experts, 2, 1.0, balance=BALANCE)
        own = slice(comm.rank * 2, comm.rank * 2 + 2)
        mine = {name: value if name == "router" else value[own] for name, value in values.items()}
        y, kept = layer.forward(x[order].astype("f"), order, mine, DIVISOR)
        dx, later = layer.input_gradient(x[order], kept, mine)
        gradients = {name: np.zeros(value.shape, "f") for name, value in mine.items()}
        layer.weight_gradient(later, gradients)
        assert y.dtype == dx.dtype == np.float32 and kept.results.dtype == np.float32
        np.testing.assert_allclose(y, reference.y[order], rtol=2e-4, atol=2e-4)
        np.testing.assert_allclose(dx, reference.dx[order], rtol=2e-4, atol=2e-3)
        np.testing.assert_allclose(gradients["w2"], reference.gradients["w2"][own], rtol=2e-4, atol=2e-3)
    mesh.free()


@pytest.mark.parametrize("topk", [1, 2])
def test_the_router_learns_from_its_gates(comm: Any, topk: int) -> None:
    """Its gradient is that of differences of sum(y dy), without a balance loss; a token keeps its experts.

    With one expert a token the gate is its probability: Fedus, Zoph & Shazeer, Switch transformers, 2022, equation 2.
    """
    p, rng, step = parameters(4), np.random.default_rng(8), 1e-6
    x, dy, direction = *rng.standard_normal((2, 12, H)), rng.standard_normal((H, 4))
    for sizes in meshes(comm.size):
        if 4 % sizes["ep"]:
            continue
        with Mesh(comm.Dup(), **sizes) as mesh:
            layer, order = Experts(mesh, 4, topk, 1.0, balance=0.0), numbers(mesh, 3, 4)

            def result(factor: float, mesh: Any = mesh, layer: Any = layer, order: Any = order) -> Any:
                moved = p | {"router": p["router"] + factor * direction}
                y, _, gradients, kept = passed(mesh, layer, x, dy, moved, order)
                (loss,) = mesh.sum((y * dy[order]).sum(), axis="dp+cp+tp")
                return loss, (gradients["router"] * direction).sum(), kept.routes

            (above, _, _), (below, _, _), (_, slope, routes) = result(step), result(-step), result(0.0)
            assert slope == pytest.approx((above - below) / (2 * step), rel=1e-6) and abs(slope) > 0.1
            if topk == 1:
                assert np.array_equal(routes.gates[:, 0], routes.probabilities.max(axis=1))


@pytest.mark.on_ranks(1)
def test_gradients_are_those_of_autograd(comm: Any) -> None:
    """Of sum(y dy) + balance loss, by x and by all parameters, with tokens dropped and without."""
    autograd = pytest.importorskip("autograd")
    import autograd.numpy as xp
    from autograd.scipy.special import erf

    if comm.size > 1:
        pytest.skip("one process")
    n, experts, topk = 19, 5, 3
    rng, p = np.random.default_rng(6), parameters(experts)
    values = p | {"x": rng.standard_normal((n, H))}
    dy = rng.standard_normal((n, H))
    with Mesh(comm.Dup()) as mesh:
        for factor in (0.8, 9.0):
            layer = Experts(mesh, experts, topk, factor, balance=BALANCE)
            order = rng.permutation(n) * 3  # numbers have gaps, and rows any order
            _, dx, gradients, kept = passed_alone(layer, values, dy, order)
            chosen, taken = kept.routes.chosen, np.zeros(n * topk)
            taken[kept.taken] = 1
            assert (kept.exchange.dropped > 0) == (factor < 1) and taken.sum() == n * topk - kept.exchange.dropped

            def loss(v: Any, chosen: Any = chosen, taken: Any = taken) -> Any:
                scores = xp.dot(v["x"], v["router"])
                e = xp.exp(scores - xp.max(scores, axis=1, keepdims=True))
                probabilities = e / xp.sum(e, axis=1, keepdims=True)
                picked = probabilities[xp.arange(n)[:, None], chosen]
                gates = picked / xp.sum(picked, axis=1, keepdims=True) * taken.reshape(n, topk)
                z = xp.einsum("nh,ehf->nef", v["x"], v["w1"]) + v["b1"]
                out = xp.einsum("nef,efh->neh", z * (1 + erf(z / 2**0.5)) / 2, v["w2"]) + v["b2"]
                y = xp.sum(gates[:, :, None] * out[xp.arange(n)[:, None], chosen], axis=1)
                fraction = np.bincount(chosen.ravel(), minlength=experts) / (n * topk)
                balance = experts * xp.dot(fraction, xp.mean(probabilities, axis=0))
                return xp.sum(y * dy) + BALANCE * balance * n / DIVISOR

            for name, value in autograd.grad(loss)(values).items():
                scale = np.abs(value).max()
                np.testing.assert_allclose((gradients | {"x": dx})[name], value, rtol=1e-13, atol=1e-13 * scale)


def passed_alone(layer: Any, values: dict[str, np.ndarray], dy: np.ndarray, order: np.ndarray) -> Any:
    y, kept = layer.forward(values["x"], order, values, DIVISOR)
    dx, later = layer.input_gradient(dy, kept, values)
    gradients = {name: np.zeros_like(value) for name, value in values.items() if name != "x"}
    layer.weight_gradient(later, gradients)
    return y, dx, gradients, kept


def test_training_gives_the_numbers_of_one_process(comm: Any) -> None:
    """With its gradients added by buckets, and divided optimizers: steps of two microbatches on any mesh."""
    samples, positions, experts, microbatches = 3, 5, 4, 2
    tokens, rng = samples * positions, np.random.default_rng(7)
    x, target = rng.standard_normal((2, microbatches, tokens, H))

    def trained(mesh: Any, stage: int) -> dict[str, np.ndarray]:
        parts = {
            name: Part(v, tp="sum") if name == "router" else Part(v, ep=0) for name, v in parameters(experts).items()
        }
        buckets = Buckets(mesh, parts, stage=stage, microbatches=microbatches)
        optimizer = ShardedOptimizer(buckets, AdamW())
        layer = Experts(mesh, experts, 2, 1.0, balance=BALANCE)
        order = numbers(mesh, samples, positions)
        for _ in range(3):
            for i in range(microbatches):
                with buckets.forward():
                    y, kept = layer.forward(x[i][order], order, buckets.parameters, tokens * microbatches)
                with buckets.backward():
                    dy = (y - target[i][order]) / (tokens * microbatches)
                    _, later = layer.input_gradient(dy, kept, buckets.parameters)
                    layer.weight_gradient(later, buckets.gradients)
                    buckets.ready("b2", "w2", "b1", "w1", "router")
            optimizer.step(0.01, 1.0)
        with buckets.forward():
            return {name: buckets.parameters[name].copy() for name in buckets.parameters}

    with Mesh(MPI.COMM_SELF) as alone:
        expected = trained(alone, 0)
    for sizes in meshes(comm.size):
        if experts % sizes["ep"]:
            continue
        mesh = Mesh(comm.Dup(), **sizes)
        own = slice(mesh.index("ep") * experts // sizes["ep"], (mesh.index("ep") + 1) * experts // sizes["ep"])
        for name, value in trained(mesh, 2 if sizes["ep"] > 1 else 0).items():
            whole = expected[name] if name == "router" else expected[name][own]
            np.testing.assert_allclose(value, whole, rtol=1e-11, atol=1e-12, err_msg=f"{name} {sizes}")
        mesh.free()


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
                    sleep(0.05)
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
        ((experts, 2, -1.0), "capacity must be a real number > 0"),
        ((experts, 2, float("nan")), "capacity must be a real number > 0"),
    ):
        with pytest.raises(ArgumentError, match=message):
            Experts(mesh, *arguments)
    with pytest.raises(ArgumentError, match="activation 'tanh' is not one of relu, gelu, gelu_tanh, silu"):
        Experts(mesh, experts, 2, 1.0, activation="tanh")
    if size > 1:
        with pytest.raises(MeshError, match=f"{size + 1} experts are not divided over ep {size}: ep is one of 1"):
            Experts(mesh, size + 1, 1, 1.0)
        with pytest.raises(ArgumentError, match="different arguments: .*Experts, .*1; rank.*2"):
            Experts(mesh, experts, 2 if last else 1, 1.0)
        lines = Mesh(comm.Dup(), tp=-1)
        with pytest.raises(MeshError, match=f"sequence=True on tp {size}"):
            Experts(lines, experts, 2, 1.0, sequence=False)
        lines.free()
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
    ]
    if size > 1:
        cases.append(((x, order - 3, mine, 1.0), ArgumentError, f"on rank {size - 2} and .* on rank {size - 1}"))
        cases.append(((x, order, mine, 2), ArgumentError, "different arguments: .*divisor 1.0; rank.* divisor 2.0"))
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
