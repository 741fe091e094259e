"""Attention on heads that are divided along tp and positions that are divided along cp: numbers of one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from layers import close, mesh_of, numbers
from mpi4py import MPI

from pdgemm.errors import ArgumentError, MeshError
from pdgemm.parallel.layers.attention import attention, attention_backward
from pdgemm.parallel.layers.context import ContextSplit
from pdgemm.parallel.layers.heads import HeadSplit

pytestmark = pytest.mark.mpi


def of_one_process(q: np.ndarray, k: np.ndarray, v: np.ndarray, do: np.ndarray) -> list[np.ndarray]:
    """The result of attention of whole sequences, and its gradients by autograd."""
    import autograd.numpy as anp
    from autograd import make_vjp

    heads, kv_heads, s = q.shape[1], k.shape[1], q.shape[2]
    later = np.triu(np.ones((s, s), bool), 1)

    def function(arrays: tuple[Any, ...]) -> Any:
        q, k, v = arrays
        k, v = (anp.repeat(x, heads // kv_heads, axis=1) for x in (k, v))
        scores = anp.where(later, -1e30, anp.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(q.shape[-1]))
        weights = anp.exp(scores - anp.max(scores, axis=-1, keepdims=True))
        return anp.einsum("bhqk,bhkd->bhqd", weights / anp.sum(weights, axis=-1, keepdims=True), v)

    backward, result = make_vjp(function)((q, k, v))
    return [result, *backward(do)]


@pytest.mark.on_ranks(2, 3)
@pytest.mark.parametrize(("sequence", "heads", "kv_heads"), [(33, 4, 2), (5, 3, 1), (2, 4, 4), (1, 4, 2)])
def test_positions_along_cp(comm: Any, sequence: int, heads: int, kv_heads: int) -> None:
    """Results and gradients of each rank's positions; words as the schedule says."""
    b, d = 2, 6
    q, do = (numbers((b, heads, sequence, d), seed) for seed in (1, 2))
    k, v = (numbers((b, kv_heads, sequence, d), seed) for seed in (3, 4))
    wanted = of_one_process(q, k, v, do)
    with mesh_of(comm, cp=comm.size) as mesh:
        split = ContextSplit(mesh, sequence)
        own, everything = split.positions, split.all_positions
        assert sorted(everything) == list(range(sequence))
        own_k, own_v = k[:, :, own], v[:, :, own]
        mesh.traffic.clear()
        all_k, all_v = split.gather(own_k), split.gather(own_v)
        words = split.schedule.words(mesh.index("cp"), b * kv_heads * d)
        assert mesh.traffic["context"].words_received == 2 * words["gather"]
        out, kept = attention(q[:, :, own], all_k, all_v, own, everything)
        dq, dk, dv = attention_backward(do[:, :, own], kept)
        mesh.traffic.clear()
        dk, dv = split.reduce(dk), split.reduce(dv)
        assert mesh.traffic["context"].words_received == 2 * words["reduce"]
        for x, y in zip((out, dq, dk, dv), wanted):
            close(x, y[:, :, own])
        again, _ = attention(q[:, :, own], all_k, all_v, own, everything)
        np.testing.assert_array_equal(again, out)


@pytest.mark.parametrize("dtype", [float, np.float32])
def test_heads_along_tp(comm: Any, dtype: Any) -> None:
    """One product for queries, keys and values: its columns mean the same for any tp."""
    with mesh_of(comm) as mesh, mesh_of(MPI.COMM_SELF) as alone:
        p, b, s, d = comm.size, 3, 7, 4
        for served in (1, 2):
            heads, kv_heads, h = served * 2 * p, 2 * p, 10
            one = HeadSplit(alone, heads, kv_heads, d)
            split = HeadSplit(mesh, heads, kv_heads, d)
            assert (split.heads, split.kv_heads, split.columns) == (2 * served, 2, (heads + 2 * kv_heads) * d)
            x, w = numbers((b * s, h), 1), numbers((h, split.columns), 2)
            whole, width = x @ w, split.columns // p
            own = whole[:, mesh.rank * width : (mesh.rank + 1) * width].astype(dtype)
            q, k, v = one.split(whole, b)
            q_, k_, v_ = split.split(own, b)
            first = mesh.rank * split.heads
            tolerance = 1e-13 if dtype is float else 1e-5
            for x, y, n in ((q_, q, split.heads), (k_, k, 2), (v_, v, 2)):
                close(x, y[:, mesh.rank * n : (mesh.rank + 1) * n], tolerance)
            np.testing.assert_array_equal(split.joined(q_, k_, v_), own)
            positions = np.arange(s)
            out, kept = attention(q_, k_, v_, positions, positions)
            do = numbers(q.shape, 5)
            wanted = of_one_process(q, k, v, do)
            mine = slice(first, first + split.heads)
            close(out, wanted[0][:, mine], tolerance)
            np.testing.assert_array_equal(split.by_head(split.rows(out), b), out)
            close(split.rows(out), one.rows(wanted[0])[:, first * d : (first + split.heads) * d], tolerance)
            gradients = attention_backward(do[:, mine].astype(dtype), kept)
            close(
                split.joined(*gradients),
                one.joined(*wanted[1:])[:, mesh.rank * width : (mesh.rank + 1) * width],
                tolerance,
            )


@pytest.mark.on_ranks(3)
def test_heads_that_tp_does_not_divide_are_refused(comm: Any) -> None:
    with mesh_of(comm) as mesh:
        with pytest.raises(ArgumentError, match="3 heads of keys and values do not divide 4"):
            HeadSplit(mesh, 4, 3, 8)
        with pytest.raises(ArgumentError, match="kv_heads"):
            HeadSplit(mesh, 4, 0, 8)
        with pytest.raises(MeshError, match=f"8 heads with 2 .* tp {comm.size} .* may be 1, 2"):
            HeadSplit(mesh, 8, 2, 8)
