"""Layers whose rows are whole on a rank: normalisation and dropout, on any division of the rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from layers import close, numbers

from pdgemm.errors import ArgumentError
from pdgemm.parallel.layers.dropout import dropout
from pdgemm.parallel.layers.normalization import layernorm, layernorm_backward
from pdgemm.schedules.training.mesh_shape import block_of

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("dtype", [float, np.float32])
def test_layernorm(comm: Any, dtype: Any) -> None:
    """Each rank has some rows; gradients by gain and bias are parts of sums over the ranks."""
    import autograd.numpy as anp
    from autograd import make_vjp

    def function(arrays: tuple[Any, ...]) -> Any:
        x, gain, bias = arrays
        centred = x - anp.mean(x, axis=1, keepdims=True)
        return centred / anp.sqrt(anp.mean(centred**2, axis=1, keepdims=True) + 1e-5) * gain + bias

    tolerance = 1e-13 if dtype is float else 1e-5
    for rows, h in ((33, 12), (1, 5), (4, 1), (0, 3)):
        x, gain, bias, dy = 3 + numbers((rows, h), 1), numbers((h,), 2), numbers((h,), 3), numbers((rows, h), 4)
        backward, y = make_vjp(function)((x, gain, bias))
        wanted = backward(dy)
        own = block_of(rows, comm.size, comm.rank)
        mine = x[own].astype(dtype)
        before = mine.copy()
        result, kept = layernorm(mine, gain.astype(dtype), bias.astype(dtype))
        dx, dgain, dbias = layernorm_backward(dy[own].astype(dtype), kept, gain.astype(dtype))
        assert result.dtype == dx.dtype == dtype
        np.testing.assert_array_equal(mine, before)
        close(result, y[own], tolerance)
        close(dx, wanted[0][own], 10 * tolerance)
        close(comm.allreduce(dgain), wanted[1], tolerance * 10)
        close(comm.allreduce(dbias), wanted[2], tolerance * 10)


def test_layernorm_is_in_float32_at_least(comm: Any) -> None:
    x, gain = numbers((5, 64), 1, np.float32) + 1000, numbers((64,), 2, np.float16)
    y, kept = layernorm(x, gain, np.zeros(64, np.float16))
    assert y.dtype == np.float32 and all(v.dtype == np.float32 for v in layernorm_backward(y, kept, gain))
    wide = x.astype(float)
    wanted = (wide - wide.mean(axis=1, keepdims=True)) / wide.std(axis=1, keepdims=True) * gain.astype(float)
    close(y, wanted, 1e-4)


def test_dropout_is_the_same_on_any_mesh(comm: Any) -> None:
    """Each rank has some rows of some columns, in any order."""
    rows, columns, rate = 301, 40, 0.3
    x = numbers((rows, columns), 1, np.float32)
    whole = dropout(x, rate, 5, 17, np.arange(rows))
    kept = whole != 0
    assert abs(kept.mean() - 0.7) < 0.02  # a deviation of 5
    assert abs(np.corrcoef(kept[:-1].ravel(), kept[1:].ravel())[0, 1]) < 0.05
    close(whole, np.where(kept, x / np.float32(0.7), 0), 1e-6)
    own_rows = np.arange(comm.rank, rows, comm.size)[::-1]
    own_columns = np.arange(comm.rank % 2, columns, 2)
    part = dropout(x[np.ix_(own_rows, own_columns)], rate, 5, 17, own_rows, own_columns)
    np.testing.assert_array_equal(part, whole[np.ix_(own_rows, own_columns)])
    for other in ((6, 17), (5, 18)):
        assert 0.3 < (dropout(x, rate, *other, np.arange(rows)) != 0)[kept].mean() < 0.8
    np.testing.assert_array_equal(dropout(x, 0.0, 5, 17, np.arange(rows)), x)
    assert dropout(x[:0], rate, 5, 17, np.arange(0)).shape == (0, columns)


def test_rates_and_places_of_dropout_are_checked(comm: Any) -> None:
    x = np.ones((3, 2))
    for rate in (1.0, -0.1, np.nan, "half"):
        with pytest.raises(ArgumentError, match="rate"):
            dropout(x, rate, 1, 1, np.arange(3))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="2 rows and 2 columns of an array"):
        dropout(x, 0.5, 1, 1, np.arange(2))
