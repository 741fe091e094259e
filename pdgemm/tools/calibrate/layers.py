"""The seconds of the calls of a step, and the rates of products of layers, with caches as cold as in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.local.blas.local_gemm import gemm_accumulate
from pdgemm.parallel.buckets import Buckets
from pdgemm.parallel.layers.attention import attention, attention_backward
from pdgemm.parallel.layers.heads import HeadSplit
from pdgemm.parallel.layers.linear import Linear
from pdgemm.parallel.layers.normalization import NormalizedRows, layernorm, layernorm_backward
from pdgemm.parallel.layers.vocabulary import CrossEntropy, Embedding, add_table_rows, table_rows
from pdgemm.parallel.mesh import Mesh
from pdgemm.parallel.parts import Initial, Part
from pdgemm.parallel.updates.sharded_optimizer import ShardedOptimizer
from pdgemm.parallel.updates.update_rules import AdamW
from pdgemm.planning.machines.machine import Call, touched
from pdgemm.schedules.formulas import gemm_flops
from pdgemm.support.agreement import together
from pdgemm.tools.calibrate.place import in_turns

_WIDTH = 4  # features of a head, and rows of a rank, of a model whose work takes no time
_ROWS, _SIDES = 2048, (32, 128, 512)  # tokens, and sides of the weights, of the measured layer products
_BETWEEN = 128  # the side of the products between two calls, whose arrays are larger than the caches of a core


class SmallModel:
    """A transformer of one layer on a mesh along tp, so small that its step takes the time of its calls.  Collective.

    works : the parts of a step; each may be called by itself, and any number of times.
    """

    def __init__(self, mesh: Mesh) -> None:
        t = mesh.length("tp")
        h = self.tokens = _WIDTH * t
        self.heads, self.positions = HeadSplit(mesh, t, t, _WIDTH), np.arange(h)
        shapes = {"qkv": (h, 3 * h), "out": (h, h), "up": (h, 4 * h), "down": (4 * h, h)}
        self.linear = {
            name: Linear(mesh, *shape, "columns" if name in ("qkv", "up") else "rows") for name, shape in shapes.items()
        }
        self.scores, self.embedding = Linear(mesh, h, h), Embedding(mesh, h, h)
        self.cross_entropy = CrossEntropy(mesh, h)
        values = {"table": Part(_normal(h, h), tp=0), "positions": Part(_normal(h, h), tp="sum")}
        values |= {f"norm{k}.{x}": Part(_normal(h), tp="sum") for k in range(3) for x in ("gain", "bias")}
        for name, shape in shapes.items():
            columns = self.linear[name].split == "columns"
            values[f"{name}.weight"] = Part(_normal(*shape), tp=int(columns))
            values[f"{name}.bias"] = Part(_normal(shape[1]), tp=0 if columns else None)
        self.buckets = Buckets(mesh, values)
        self.optimizer = ShardedOptimizer(self.buckets, AdamW())
        self.rows = np.random.default_rng(0).standard_normal((_WIDTH, h), np.float32)
        self.works: dict[Call, Callable[[], None]] = {"layer": self.layer, "ends": self.ends, "update": self.update}

    def layer(self) -> None:
        """A layer forward and backward, as that of docs/examples/gpt."""
        x, t, linear = self.rows, self.tokens, self.linear
        y1, norm1 = self._norm("norm1", x)
        qkv, _ = self._forward("qkv", y1)
        out, kept = attention(*self.heads.split(qkv, 1), self.positions, self.positions)
        out = self.heads.rows(out)
        x, _ = self._forward("out", out, residual=x)
        y2, norm2 = self._norm("norm2", x)
        u, z = self._forward("up", y2, activation="gelu_tanh")
        x, _ = self._forward("down", u, residual=x)
        p = self.buckets.parameters
        dz, later = linear["down"].input_gradient(x, p["down.weight"], "gelu_tanh", z, tokens=t)
        self._weights("down", later, u)
        dy, later = linear["up"].input_gradient(dz, p["up.weight"], tokens=t)
        self._weights("up", later, y2)
        dx = x + self._norm_back("norm2", dy, norm2)
        dy, later = linear["out"].input_gradient(dx, p["out.weight"], tokens=t)
        self._weights("out", later, out)
        joined = self.heads.joined(*attention_backward(self.heads.by_head(dy, 1), kept))
        dy, later = linear["qkv"].input_gradient(joined, p["qkv.weight"], tokens=t)
        self._weights("qkv", later, y1)
        np.add(dx, self._norm_back("norm1", dy, norm1))

    def ends(self) -> None:
        """Embedding, positions, the last norm, scores and their loss, forward and backward."""
        ids, own, p, g = self.positions, self.positions[:_WIDTH], self.buckets.parameters, self.buckets.gradients
        x = self.embedding.forward(ids, p["table"]) + table_rows(p["positions"], own)
        y, norm = self._norm("norm0", x)
        scores, _ = self.scores.forward(y, p["table"].T, tokens=self.tokens)
        _, kept = self.cross_entropy.forward(scores, ids)
        dy, later = self.scores.input_gradient(self.cross_entropy.backward(kept), p["table"].T, tokens=self.tokens)
        self.scores.weight_gradient(later, y, g["table"].T)
        dx = self._norm_back("norm0", dy, norm)
        add_table_rows(dx, own, g["positions"])
        self.embedding.backward(dx, ids, g["table"])

    def update(self) -> None:
        """The reductions of a step, the norm of its gradients, and their update, which leaves parameters unchanged."""
        self.buckets.ready(*self.buckets.parameters)
        self.optimizer.step(1e-30, 1e-3)

    def _norm(self, name: str, x: np.ndarray) -> tuple[np.ndarray, NormalizedRows]:
        return layernorm(x, self.buckets.parameters[f"{name}.gain"], self.buckets.parameters[f"{name}.bias"])

    def _norm_back(self, name: str, dy: np.ndarray, kept: NormalizedRows) -> np.ndarray:
        dx, *gradients = layernorm_backward(dy, kept, self.buckets.parameters[f"{name}.gain"])
        for part, gradient in zip(("gain", "bias"), gradients):
            self.buckets.gradients[f"{name}.{part}"] += gradient
        return dx

    def _forward(self, name: str, x: np.ndarray, **how: Any) -> tuple[np.ndarray, np.ndarray | None]:
        p = self.buckets.parameters
        return self.linear[name].forward(x, p[f"{name}.weight"], p[f"{name}.bias"], tokens=self.tokens, **how)

    def _weights(self, name: str, later: np.ndarray, x: np.ndarray) -> None:
        g = self.buckets.gradients
        self.linear[name].weight_gradient(later, x, g[f"{name}.weight"], g[f"{name}.bias"])


def _normal(*shape: int) -> Initial:
    return Initial(shape, "normal", scale=0.02)


def layer_seconds(comm: MPI.Intracomm, copy: float) -> dict[str, Any]:
    """Return `Machine.linear`, `calls` and `line_calls`.   Collective.   copy : bytes per second of copies.

    Functions take turns with products, so that their arrays, and the program of calls, are not in cache, as in a step.
    """
    with together(comm):
        products = {side: _layer_products(side) for side in _SIDES}
        for product in products.values():
            product()
    shared = next((t for t in range(2, comm.size + 1) if not comm.size % t), 1)  # the shortest line
    alone, line = Mesh(MPI.COMM_SELF), Mesh(comm, dp=-1, tp=shared)
    works = [SmallModel(mesh).works for mesh in (alone, line)]
    small = [work for each in works for work in each.values()]
    every = [*products.values(), *(x for work in small for x in (products[_BETWEEN], work))]
    seconds = in_turns(comm, every)
    line.free()
    alone.free()
    calls = seconds[len(products) + 1 :: 2]
    number = len(works[0])
    return {
        "linear": {side: _rate(side, time, copy) for side, time in zip(products, seconds)},
        "calls": dict(zip(works[0], calls[:number])),
        "line_calls": dict(zip(works[1], calls[number:])),
    }


def _rate(side: int, seconds: float, copy: float) -> float:
    """Return the flops per second of the products of a layer without copies, as `calibrate` does for panels."""
    work = _ROWS, side, side
    moving = 3 * touched(work, work) * 4 / copy
    return 3 * gemm_flops(*work) / max(seconds - moving, seconds / 4)


def _layer_products(side: int) -> Callable[[], None]:
    """Return the three products of a linear layer, forward and backward.   side : rows and columns of its weights."""
    x, y = (np.random.default_rng(side).standard_normal((_ROWS, side), np.float32) for _ in range(2))
    w, z = np.ones((side, side), np.float32), np.empty_like(x)

    def work() -> None:
        gemm_accumulate(1, x, w, 0, z)
        gemm_accumulate(1, y, w.T, 0, z)
        gemm_accumulate(1, x.T, y, 0, w)

    return work
