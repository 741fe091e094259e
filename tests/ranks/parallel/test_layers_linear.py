"""Linear layers that are divided along tp: numbers of one process, and the words of their schedule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from layers import close, mesh_of, numbers
from tiers import every_grid

pytestmark = pytest.mark.mpi

SIZES = [(33, 12, 20), (2, 7, 5), (8, 3, 2), (0, 4, 6), (130, 40, 17), (5, 1, 9)]  # tokens, inputs, outputs
WAYS = [(split, sequence) for split in ("columns", "rows") for sequence in (True, False)]


class Whole:
    """A layer in one process, and a rank's parts of its arrays."""

    def __init__(self, mesh: Any, layer: Any, tokens: int, dtype: Any = float) -> None:
        from pdgemm.local.arrays.activations import ACTIVATIONS

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
    from pdgemm.instrument.recorder import Traffic
    from pdgemm.parallel.layers.linear import Linear

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


@every_grid
@pytest.mark.parametrize(("split", "sequence"), WAYS)
def test_numbers_of_one_process_and_planned_words(comm: Any, split: str, sequence: bool) -> None:
    with mesh_of(comm) as mesh:
        for size in SIZES:
            check(mesh, split, sequence, size)
