"""Causal attention of the heads of one rank, by batched products."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pdgemm.errors import LayoutError
from pdgemm.local.blas.local_gemm import multiply_stack
from pdgemm.parallel.layers.array_checks import check_array

Array = np.ndarray


class AttentionWeights(NamedTuple):
    """What attention keeps for its gradient; without it, `attention` of q, k and v computes it again."""

    q: Array
    k: Array
    v: Array
    weights: Array


def attention(q: Array, k: Array, v: Array, q_positions: Array, k_positions: Array) -> tuple[Array, AttentionWeights]:
    """Return softmax(q k^T / sqrt(d)) v over the keys at positions up to the query's, and what the gradient needs.

    q : (b, heads, sq, d).   k, v : (b, kv_heads, sk, d), float32 or float64; each of the kv_heads serves heads/kv_heads
        neighbouring heads.
    q_positions, k_positions : (sq,) and (sk,), in the whole sequence, in any order.  A query that sees no key gets 0.

    Local.  4 b heads sq sk d flops; memory for b heads sq sk weights, which are kept, and as many in the backward pass.
    Raises LayoutError.   Vaswani et al., Attention Is All You Need, NeurIPS 2017.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_array(name, x, (None,) * 4, "as of attention")
    (b, heads, sq, d), (kv_heads, sk) = q.shape, k.shape[1:3]
    wanted = (b, kv_heads, sk, d)
    if k.shape != wanted or v.shape != wanted or (len(q_positions), len(k_positions)) != (sq, sk):
        where = f"positions of {len(q_positions)} queries and {len(k_positions)} keys"
        raise LayoutError(f"q {q.shape}, k {k.shape} and v {v.shape} with {where} are no attention")
    if not kv_heads or heads % kv_heads:
        raise LayoutError(f"{kv_heads} heads of keys and values do not divide {heads} heads of queries")
    weights = multiply_stack(_grouped(q, kv_heads), k.swapaxes(2, 3))
    weights *= d**-0.5
    by_query = weights.reshape(b, kv_heads, heads // kv_heads, sq, sk)
    causal_softmax(by_query, q_positions, k_positions)
    return multiply_stack(weights, v).reshape(q.shape), AttentionWeights(q, k, v, weights)


def attention_backward(do: Array, kept: AttentionWeights) -> tuple[Array, Array, Array]:
    """Return the gradients by q, k and v.  Local; 8 b heads sq sk d flops.   do : of the shape of q."""
    q, k, v, weights = kept
    check_array("do", do, q.shape, "as q of attention")
    kv_heads, scale = k.shape[1], q.shape[-1] ** -0.5
    do = _grouped(do, kv_heads)
    dv = multiply_stack(weights.swapaxes(2, 3), do)
    ds = multiply_stack(do, v.swapaxes(2, 3))
    softmax_gradient(ds, weights)
    ds *= scale
    dk = multiply_stack(ds.swapaxes(2, 3), _grouped(q, kv_heads))
    return multiply_stack(ds, k).reshape(q.shape), dk, dv


def causal_softmax(scores: Array, q_positions: Array, k_positions: Array) -> None:
    """Set rows of scores to their softmax over the keys at positions up to the query's; 0 where there is none.  Local.

    scores : (..., sq, sk), contiguous.   q_positions, k_positions : (sq,) and (sk,).
    """
    np.copyto(scores, -np.inf, where=np.asarray(q_positions)[:, None] < np.asarray(k_positions))
    largest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    scores -= np.where(largest == -np.inf, 0, largest)
    np.exp(scores, out=scores)
    sums = scores.sum(axis=-1, keepdims=True)
    scores /= np.where(sums == 0, 1, sums)


def softmax_gradient(dweights: Array, weights: Array) -> None:
    """Set dweights, the gradient by the weights of a softmax over the last axis, to that by its scores.  Local."""
    dweights -= np.einsum("...qk,...qk->...q", dweights, weights)[..., None]
    dweights *= weights


def _grouped(q: Array, kv_heads: int) -> Array:
    """Return the queries of all heads that a head of keys serves as rows of one matrix."""
    b, heads, sq, d = q.shape
    return q.reshape(b, kv_heads, heads // kv_heads * sq, d)
