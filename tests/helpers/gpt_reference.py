"""The transformer of docs/examples/gpt in one process, written independently for automatic differentiation."""

from __future__ import annotations

from typing import Any

import numpy as np


def loss(xp: Any, sizes: Any, p: dict[str, Any], microbatches: list[np.ndarray], balance: float = 0.01) -> Any:
    """Return the mean cross-entropy of windows of tokens, and the balance losses of experts.

    p : whole parameters by name.   microbatches : (samples, sequence + 1) tokens each.   xp : numpy, or autograd's.
    """
    divisor = sum(len(windows) for windows in microbatches) * sizes.sequence
    return sum(_sum_of(xp, sizes, p, windows, balance) for windows in microbatches) / divisor


def _sum_of(xp: Any, sizes: Any, p: dict[str, Any], windows: np.ndarray, balance: float) -> Any:
    ids, labels = windows[:, :-1].ravel(), windows[:, 1:].ravel()
    x = p["embedding"][ids] + p["positions"][np.tile(np.arange(sizes.sequence), len(windows))]
    more = 0.0
    for n in range(sizes.layers):
        own = {name.partition(".")[2]: value for name, value in p.items() if name.partition(".")[0] == str(n)}
        x = x + _attention(xp, sizes, own, _norm(xp, x, own["norm1.gain"], own["norm1.bias"]), len(windows))
        y = _norm(xp, x, own["norm2.gain"], own["norm2.bias"])
        if sizes.experts:
            y, loss = _mixture(xp, sizes, own, y)
            x, more = x + y, more + balance * len(ids) * loss
        else:
            x = x + _gelu(xp, y @ own["up.weight"] + own["up.bias"]) @ own["down.weight"] + own["down.bias"]
    scores = _norm(xp, x, p["norm.gain"], p["norm.bias"]) @ (p["embedding"].T if sizes.tied else p["head"])
    top = np.max(getattr(scores, "_value", scores))
    return more + xp.sum(xp.log(xp.sum(xp.exp(scores - top), axis=1)) + top - scores[np.arange(len(ids)), labels])


def _norm(xp: Any, x: Any, gain: Any, bias: Any) -> Any:
    x = x - xp.mean(x, axis=1, keepdims=True)
    return x / xp.sqrt(xp.mean(x * x, axis=1, keepdims=True) + 1e-5) * gain + bias


def _gelu(xp: Any, z: Any) -> Any:
    return z * (1 + xp.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z * z * z))) / 2


def _softmax(xp: Any, x: Any) -> Any:
    e = xp.exp(x - np.max(getattr(x, "_value", x), axis=-1, keepdims=True))
    return e / xp.sum(e, axis=-1, keepdims=True)


def _attention(xp: Any, sizes: Any, p: dict[str, Any], y: Any, samples: int) -> Any:
    keys, width, each = sizes.keys, sizes.width, sizes.heads // sizes.keys
    w, b = p["qkv.weight"].reshape(sizes.hidden, -1), p["qkv.bias"].reshape(-1)
    qkv = (y @ w + b).reshape(samples, sizes.sequence, keys, each + 2, width)
    causal = np.where(np.tri(sizes.sequence, dtype=bool), 0.0, -np.inf)
    heads = []
    for head in range(sizes.heads):
        q, k, v = (qkv[:, :, head // each, at] for at in (head % each, each, each + 1))
        scores = xp.einsum("bqd,bkd->bqk", q, k) / np.sqrt(width) + causal
        heads.append(xp.einsum("bqk,bkd->bqd", _softmax(xp, scores), v))
    out = xp.concatenate(heads, axis=2).reshape(len(y), -1)
    return out @ p["out.weight"] + p["out.bias"]


def _mixture(xp: Any, sizes: Any, p: dict[str, Any], y: Any) -> tuple[Any, Any]:
    """Return the output of the experts, and their balance loss: E times the sum of fractions times probabilities."""
    probabilities = _softmax(xp, y @ p["router"])
    values = np.asarray(getattr(probabilities, "_value", probabilities))
    chosen = np.argsort(-values, axis=1, kind="stable")[:, : sizes.topk]
    capacity = int(np.ceil(sizes.capacity * len(values) * sizes.topk / sizes.experts))
    rows = np.arange(len(values))
    total = sum(probabilities[rows, chosen[:, j]] for j in range(sizes.topk)) if sizes.topk > 1 else 1.0
    taken, out = np.zeros((len(values), sizes.topk), bool), 0.0
    for e in range(sizes.experts):
        places = np.flatnonzero(chosen.ravel() == e)[:capacity]
        taken.reshape(-1)[places] = True
        for j in range(sizes.topk):
            gate = probabilities[:, e] / total * ((chosen[:, j] == e) & taken[:, j])
            out = out + gate[:, None] * (_gelu(xp, y @ p["w1"][e] + p["b1"][e]) @ p["w2"][e] + p["b2"][e])
    fractions = np.bincount(chosen.ravel(), minlength=sizes.experts) / chosen.size
    return out, sizes.experts * xp.sum(fractions * xp.mean(probabilities, axis=0))
