"""Linear layers that are divided along tp: numbers of one process, and the words of their schedule."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from layers import close, mesh_of, numbers
from tiers import square_grid

from pdgemm.errors import ArgumentError, LayoutError, NodeMemoryError
from pdgemm.grids.node_memory import NodeMemory
from pdgemm.instrument.recorder import Traffic
from pdgemm.local.arrays.activations import ACTIVATIONS
from pdgemm.parallel import SGD, Buckets, ShardedOptimizer
from pdgemm.parallel.layers.linear import Linear

pytestmark = pytest.mark.mpi

SIZES = [(33, 12, 20), (2, 7, 5), (8, 3, 2), (0, 4, 6), (130, 40, 17), (5, 1, 9)]  # tokens, inputs, outputs
WAYS = [(split, sequence) for split in ("columns", "rows") for sequence in (True, False)]


class Whole:
    """A layer in one process, and a rank's parts of its arrays."""

    def __init__(self, mesh: Any, layer: Any, tokens: int, dtype: Any = float) -> None:
        m, n = layer.d_in, layer.d_out
        self.x, self.w, self.b = numbers((tokens, m), 1, dtype), numbers((m, n), 2, dtype), numbers((n,), 3, dtype)
        self.r, self.dy, self.z = numbers((tokens, n), 4), numbers((tokens, n), 5), numbers((tokens, m), 6)
        x, w, b = (v.astype(float) for v in (self.x, self.w, self.b))
        gelu = ACTIVATIONS["gelu"]
        self.aux = x @ w + b
        self.y = gelu.value(self.aux, np.empty_like(self.aux)) + self.r
        self.dx = self.dy @ w.T * gelu.derivative(self.z)
        self.dw, self.db = x.T @ self.dy, self.dy.sum(axis=0)
        s = layer.schedule(tokens, float)
        index = mesh.index("tp")
        t, i, o = s.block(tokens, index), s.block(m, index), s.block(n, index)
        every, rows = slice(None), t if layer.sequence else slice(None)
        if layer.split == "columns":
            self.part = {"x": (rows, every), "w": (every, o), "y": (every, o), "b": (o,)}
        else:
            self.part = {"x": (every, i), "w": (i, every), "y": (rows, every), "b": (every,)}

    def own(self, name: str, like: str) -> np.ndarray:
        return np.array(getattr(self, name)[self.part[like]])


def check(mesh: Any, split: Any, sequence: bool, size: tuple[int, int, int], dtype: Any = float, **how: Any) -> None:
    """Forward with bias, activation and residual, and the whole backward pass, twice."""
    tokens, m, n = size
    layer = Linear(mesh, m, n, split, sequence=sequence)
    whole, tolerance = Whole(mesh, layer, tokens, dtype), how.get("tolerance", 1e-13)
    wide = np.result_type(np.dtype(dtype), np.float32)
    x, w, b = whole.own("x", "x").astype(wide), whole.own("w", "w"), whole.own("b", "b")
    r, dy, z = (whole.own(name, like).astype(wide) for name, like in (("r", "y"), ("dy", "y"), ("z", "x")))
    if how.get("transposed"):
        w = np.ascontiguousarray(w.T).T
    before = [v.copy() for v in (x, w, b, r, dy, z)]
    words = layer.schedule(tokens, wide).words(mesh.index("tp"))
    dw, db = np.ones_like(w, wide), np.ones_like(b, wide)
    for time in (1, 2):
        mesh.traffic.clear()
        counted = []
        y, aux = layer.forward(x, w, b, "gelu", r, tokens=tokens)
        counted.append(mesh.traffic["tensor"].words_received)
        dx, later = layer.input_gradient(dy, w, "gelu", z)
        counted.append(mesh.traffic["tensor"].words_received)
        layer.weight_gradient(later, x, dw, db)
        counted.append(mesh.traffic["tensor"].words_received)
        assert np.diff([0, *counted]).tolist() == [
            words[step] for step in ("forward", "input_gradient", "weight_gradient")
        ]
        assert y.dtype == dx.dtype == wide
        close(y, whole.own("y", "y"), tolerance)
        close(aux, whole.own("aux", "y"), tolerance)
        close(dx, whole.own("dx", "x"), tolerance)
        close(dw - 1, time * whole.own("dw", "w"), 2 * tolerance)
        close(db - 1, time * whole.own("db", "b"), 2 * tolerance)
    for v, old in zip((x, w, b, r, dy, z), before):
        np.testing.assert_array_equal(v, old)
    sent = mesh.comm.allreduce(mesh.traffic["tensor"].words_sent)
    read = mesh.comm.allreduce(mesh.traffic["tensor"].words_read)
    assert sent + read == mesh.comm.allreduce(mesh.traffic["tensor"].words_received)
    assert mesh.length("tp") > 1 or mesh.traffic["tensor"] == Traffic()


@pytest.mark.on_ranks(2, 3)
@pytest.mark.parametrize(("split", "sequence"), WAYS)
@pytest.mark.parametrize("variable", ["", "RANKS_PER_NODE=1", "RANKS_PER_NODE=2", "NODE_MEMORY=0"])
def test_numbers_of_one_process_and_planned_words(
    comm: Any, split: str, sequence: bool, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are read in place, or sent; the sizes alternate, so that plans and buffers are used again.

    Parameters of 16 bits are multiplied in float32: what rounding they have, they have as numbers of one process.
    """
    if variable:
        monkeypatch.setenv(*f"PDGEMM_{variable}".split("="))
    with mesh_of(comm) as mesh:
        for size in [*SIZES, *SIZES[:2]]:
            check(mesh, split, sequence, size)
        for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
            check(mesh, split, sequence, SIZES[0], dtype, tolerance=1e-5)


@pytest.mark.parametrize(("split", "sequence"), WAYS)
def test_rows_are_sent_where_shared_memory_lacks(
    comm: Any, split: str, sequence: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank has no room for its buffers: all ranks send rows from then on."""

    def full(*arguments: Any) -> Any:
        raise NodeMemoryError("no room")

    with mesh_of(comm) as mesh:
        if comm.rank == comm.size - 1:
            monkeypatch.setattr(NodeMemory, "empty", full)
        check(mesh, split, sequence, (33, 12, 20))
        assert mesh.traffic["tensor"].words_read == 0


@pytest.mark.on_ranks(2, 3)
@pytest.mark.parametrize("per_node", ["", "1"])
def test_tied_weights_are_a_view(comm: Any, per_node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """W = E^T of an embedding E that is divided by rows, and its gradient; a part of one column is in any order."""
    if per_node:
        monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", per_node)
    with mesh_of(comm) as mesh:
        for n in (4 * comm.size, comm.size + 1, 2, 1):
            check(mesh, "columns", True, (9, 6, n), transposed=True)


@square_grid
def test_each_line_along_tp_has_its_own_rows(comm: Any) -> None:
    """Lines with different numbers of tokens at a time; other axes do not matter."""
    for sizes in ({"dp": 2, "tp": 2}, {"pp": 2, "tp": 2}, {"cp": 2, "tp": 2}, {"dp": 4}):
        with mesh_of(comm, **sizes) as mesh:
            other = mesh.rank // mesh.length("tp")
            for split, sequence in WAYS:
                check(mesh, split, sequence, (9 + 4 * other, 6, 10))


@square_grid
@pytest.mark.parametrize("per_node", ["", "1"])
def test_gradients_are_reduced_while_layers_multiply(comm: Any, per_node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reductions of gradients along dp are in progress during products along tp; no rank waits for another for ever."""
    if per_node:
        monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", per_node)
    with mesh_of(comm, tp=2, dp=-1) as mesh:
        layer = Linear(mesh, 16, 16, "columns")
        own = layer.schedule(24, float).shapes(mesh.index("tp"))
        buckets = Buckets(mesh, {f"w{k}": np.ones(own["w"]) for k in range(6)}, bucket_bytes=600, stage=2)
        optimizer = ShardedOptimizer(buckets, SGD())
        for _ in range(2):
            with buckets.backward():
                for k in reversed(range(6)):
                    name = f"w{k}"
                    _, later = layer.input_gradient(np.ones(own["y"]), buckets.parameters[name], tokens=24)
                    layer.weight_gradient(later, np.ones(own["x"]), buckets.gradients[name])
                    buckets.ready(name)
            dp = mesh.length("dp")
            assert abs(optimizer.step(0.0).norm - 24 * dp * np.sqrt(6 * own["w"][0] * own["w"][1])) < 1e-9 * dp


def test_bad_arguments_are_refused_on_all_ranks(comm: Any) -> None:
    with mesh_of(comm) as mesh:
        for bad, message in (((-1, 4, "columns"), "d_in"), ((4, 2.5, "rows"), "d_out"), ((4, 4, "diagonals"), "split")):
            with pytest.raises(ArgumentError, match=message):
                Linear(mesh, *bad)
        layer = Linear(mesh, 6, 4 * comm.size, "columns")
        shapes = layer.schedule(8, float).shapes(mesh.rank)
        x, w, y = (np.ones(shapes[name]) for name in "xwy")
        last = comm.rank == comm.size - 1
        where = f"rank {comm.size - 1} of {comm.size} along tp of a layer 6 x {4 * comm.size} by columns"
        with pytest.raises(LayoutError, match=where):  # of one rank alone, and raised on all
            layer.forward(x, w[:, 1:] if last else w, tokens=8)
        with pytest.raises(LayoutError, match=f"bias is .*{where}"):
            layer.forward(x, w, np.ones(3 if last else 4), tokens=8)
        with pytest.raises(ArgumentError, match="activation"):
            layer.forward(x, w, activation="sigmoid", tokens=8)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="tokens"):
            layer.forward(x, w)
        with pytest.raises(ArgumentError, match="different arguments: .* Linear, 7; .* Linear, 8"):
            layer.forward(x if last else np.ones(layer.schedule(7, float).shapes(comm.rank)["x"]), w, tokens=7 + last)
        layer.forward(x, w, tokens=8)
        np.testing.assert_array_equal(layer.forward(x, w)[0], layer.forward(x, w, tokens=8)[0])  # T of the call before
        with pytest.raises(ArgumentError, match="aux"):
            layer.input_gradient(y, w, "gelu")
