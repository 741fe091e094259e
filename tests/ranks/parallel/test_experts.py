"""A mixture of experts on any mesh gives the numbers of one process, drops the same tokens, and moves what it says."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
from tiers import every_grid

pytestmark = pytest.mark.mpi
H, F = 6, 10
DIVISOR, BALANCE = 50.0, 0.3


def meshes(size: int) -> list[dict[str, int]]:
    """All dp x cp x tp of so many ranks, with each ep."""
    shapes = [dict(zip(("dp", "cp", "tp"), x)) for x in product(range(1, size + 1), repeat=3) if np.prod(x) == size]
    return [x | {"ep": ep} for x in shapes for ep in range(1, x["dp"] + 1) if x["dp"] % ep == 0]


def numbers(mesh: Any, samples: int, positions: int) -> np.ndarray:
    """The global numbers of this rank's tokens: of its samples, its two chunks of positions, and of these some rows."""
    from pdgemm.schedules.training.mesh_shape import block_of

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
    from scipy.special import erf

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
        total, dgates = probabilities[t, best].sum(), np.zeros(experts)
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
            dp[e] += dgates[e] / total - sum(dgates[i] * probabilities[t, i] for i in best) / total**2
        dscores = probabilities[t] * (dp - dp @ probabilities[t])
        dx[t] += p["router"] @ dscores
        g["router"] += np.outer(x[t], dscores)
    return Plain(y, dx, g, dropped, float(slope @ probabilities.sum(0)))


def passed(mesh: Any, layer: Any, x: np.ndarray, dy: np.ndarray, p: dict[str, np.ndarray], order: np.ndarray) -> Any:
    """A forward and a backward pass with this rank's part of whole arrays; gradients are summed over the mesh."""
    from pdgemm.schedules.training.mesh_shape import block_of

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
    from pdgemm.errors import MeshError
    from pdgemm.parallel import Mesh
    from pdgemm.parallel.layers.experts import Experts
    from pdgemm.schedules.training.token_exchange import expert_capacity

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
