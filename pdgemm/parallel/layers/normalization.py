"""Layer normalisation of rows, which are whole on a rank."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pdgemm.parallel.layers.array_checks import check_array

Array = np.ndarray


class NormalizedRows(NamedTuple):
    """What a layer normalisation keeps: rows of mean 0 and variance 1, and by what they were multiplied."""

    rows: Array
    factors: Array


def layernorm(x: Array, gain: Array, bias: Array, eps: float = 1e-5) -> tuple[Array, NormalizedRows]:
    """Return gain (x - mean(x)) / sqrt(var(x) + eps) + bias for each row, and what the gradient needs.  Local.

    x : (rows, h).   gain, bias : (h,).   In float64 where x is, else float32.  Memory: an array like x, and rows words.
    Raises ArgumentError, DTypeError or LayoutError on this rank.
    Ba, Kiros & Hinton, Layer Normalization, arXiv:1607.06450, 2016.
    """
    check_array("x", x, (None, None), "of a normalisation")
    for name, one in (("gain", gain), ("bias", bias)):
        check_array(name, one, x.shape[1:], f"for x {x.shape} of a normalisation")
    wide = np.result_type(x.dtype, np.float32)
    centred = np.subtract(x, x.mean(axis=1, keepdims=True, dtype=wide), dtype=wide)
    factors = 1 / np.sqrt(np.square(centred).mean(axis=1, keepdims=True) + wide.type(eps))
    centred *= factors
    y = centred * gain.astype(wide, copy=False)
    y += bias.astype(wide, copy=False)
    return y, NormalizedRows(centred, factors)


def layernorm_backward(dy: Array, kept: NormalizedRows, gain: Array) -> tuple[Array, Array, Array]:
    """Return the gradients by x, gain and bias.  Local.

    Where a rank has own rows alone, those by gain and bias are parts of sums over the line of tp: they are parameters
    with tp="sum".
    """
    rows, factors = kept
    check_array("dy", dy, rows.shape, "as x of a normalisation")
    check_array("gain", gain, rows.shape[1:], f"for x {rows.shape} of a normalisation")
    dgain, dbias = (dy * rows).sum(axis=0), dy.sum(axis=0)
    dx = dy * gain.astype(rows.dtype, copy=False)
    means = dx.mean(axis=1, keepdims=True), (dx * rows).mean(axis=1, keepdims=True)
    dx -= means[0]
    dx -= rows * means[1]
    dx *= factors
    return dx, dgain, dbias
