"""What people type who know NumPy: each expression is right, or its message names the way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pdgemm import DistMatrix, ProcessGrid

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

ROWS = np.arange(9)


def assigned(key: Any, value: Any) -> Callable[[Any], Any]:
    def act(a: Any) -> Any:
        made = copy.copy(a)
        made[key(a) if callable(key) else key] = value
        return made

    return act


def changed(act: Callable[[Any], None]) -> Callable[[Any], Any]:
    def change(a: Any) -> Any:
        made = copy.copy(a)
        act(made)
        return made

    return change


def row_plus_one(a: Any) -> None:
    a[1] += 1


def column_doubled(a: Any) -> None:
    a[:, 0] *= 2


RIGHT: list[Callable[[Any], Any]] = [
    lambda a: a[::2],
    lambda a: a[::-1],
    lambda a: a[[0, 2]],
    lambda a: a[ROWS % 2 == 0],
    lambda a: a[np.ix_([3, 1], [0, 2])],
    lambda a: a[..., 0],
    lambda a: a[np.argsort(a[:, 1])],
    assigned(lambda a: a > 0.5, 0),
    assigned((slice(None), 2), ROWS / 7),
    assigned((slice(2, 4), slice(1, 3)), np.ones((2, 2))),
    changed(row_plus_one),
    changed(column_doubled),
    lambda a: a.mT,
    lambda a: a.itemsize,
    lambda a: a.astype(a.dtype, copy=False),
    lambda a: a + 1e-6 * np.eye(9, 5),
    lambda a: a + np.ones((9, 5)),
    lambda a: np.allclose(a, np.ones((9, 5))),
    np.median,
    lambda a: np.percentile(a, [25, 75], axis=0),
    lambda a: np.quantile(a, 0.1, axis=1),
    lambda a: np.histogram(a)[0],
    np.nanmean,
    lambda a: np.nansum(a, axis=0),
    lambda a: np.sort(a),
    lambda a: np.sort(a, axis=0),
    lambda a: np.cumsum(a, axis=1),
    lambda a: a.cumsum(axis=0),
    lambda a: a.take([3, 1], axis=0),
    lambda a: np.take(a, [3, 1], axis=1),
    lambda a: np.flip(a, axis=0),
    lambda a: np.flip(a),
    lambda a: np.roll(a, 2, axis=0),
    lambda a: np.roll(a, -1, axis=1),
    lambda a: np.flipud(a),
    lambda a: np.fliplr(a),
    lambda a: np.ptp(a, axis=0),
    lambda a: a.mean(),
]

# what stays refused, the exception, and the way that its message names
REFUSED: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (lambda a: a[a > 0.5], IndexError, "numpy.where"),
    (lambda a: a[[0, 1], [0, 1]], IndexError, "numpy.ix_"),
    (lambda a: a[None], IndexError, "A[i0:i1, j0:j1]"),
    (lambda a: a[1.5], IndexError, "A[i0:i1, j0:j1]"),
    (lambda a: a[20], IndexError, "out of range for a dimension of 9"),
    (lambda a: np.where(a > 0.5), TypeError, "use A.allgather().nonzero(), or"),
    (lambda a: a.strides, AttributeError, "A.local.strides"),
    (lambda a: a.flags, AttributeError, "A.local.flags"),
    (lambda a: a.data, AttributeError, "A.local.data"),
    (lambda a: a.base, AttributeError, "A.local.base"),
    (lambda a: a.sort(), AttributeError, "numpy.sort(A, axis)"),
    (lambda a: a.argsort(), AttributeError, "A[numpy.argsort(A[:, j])]"),
    (lambda a: a.reshape(5, 9), AttributeError, "A.allgather()"),
    (lambda a: a.flatten(), AttributeError, "A.allgather()"),
    (lambda a: a.item(), AttributeError, "A[i, j]"),
    (lambda a: a.tolist(), AttributeError, "A.allgather()"),
    (lambda a: a.squeeze(), AttributeError, "A[0] or A[:, 0]"),
    (lambda a: np.argsort(a), TypeError, "A[numpy.argsort(A[:, j])]"),
    (lambda a: np.cumsum(a), TypeError, "axis"),
    (lambda a: np.unique(a), TypeError, "numpy.sort(A, axis=None)"),
    (lambda a: np.diff(a), TypeError, "A[1:] - A[:-1]"),
    (lambda a: np.average(a), TypeError, "A.mean(axis)"),
    (lambda a: np.cov(a), TypeError, "X.T @ X"),
    (lambda a: np.stack((a, a)), TypeError, "numpy.vstack"),
    (lambda a: np.copyto(a, 0), TypeError, "A[...] = B"),
    (lambda a: np.fill_diagonal(a, 0), TypeError, "numpy.where"),
    (lambda a: np.put(a, [0], 0), TypeError, "A[rows, cols] = x"),
    (lambda a: np.add.reduce(a), TypeError, "A.sum(axis=0)"),
    (lambda a: np.maximum.reduce(a), TypeError, "A.max(axis=0)"),
    (lambda a: np.multiply.outer(a, a), TypeError, "A.allgather()"),
    (lambda a: np.split(a, 3), TypeError, "A[i0:i1], a view for each part, or gather"),
    (lambda a: np.unique(a), TypeError, "on each rank, or gather"),
    (lambda a: a.gather(), AttributeError, "no method gather: use .local, .to_global(root) or .allgather()"),
    (lambda a: np.array(a), TypeError, ".allgather()"),
    (lambda a: list(a), TypeError, ".allgather()"),
    (lambda a: np.linalg.eigvals(a[:5]), TypeError, "pdgemm.linalg.eigvalsh"),
]


def test_each_expression_is_right_or_names_the_way(comm: Any) -> None:
    whole = np.random.default_rng(0).standard_normal((9, 5))
    with ProcessGrid(comm) as grid:
        A = DistMatrix.from_global(whole, grid=grid, block=2)
        for number, act in enumerate(RIGHT):
            found, expected = act(A), act(whole)
            found = found.allgather() if isinstance(found, DistMatrix) else found
            assert np.shape(found) == np.shape(expected) and np.allclose(found, expected, rtol=1e-14), number
        for number, (act, error, way) in enumerate(REFUSED):
            with pytest.raises(error) as caught:
                act(A)
            assert way in str(caught.value), (number, str(caught.value))
        for pointless in (lambda: float(A[0:1, 0:1]), lambda: hash(A), lambda: f"{A:.2f}"):  # Python's own words
            with pytest.raises(TypeError):
                pointless()
        assert np.array_equal(A.allgather(), whole)
