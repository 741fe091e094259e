"""Expressions that users of NumPy type: each is right, or its error names an alternative."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
from layouts import drawn, matrices

from pdgemm import DistMatrix
from pdgemm.errors import LayoutError

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

ROWS, ROW = np.arange(9), np.arange(5) / 7


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


def in_place(a: Any) -> None:
    a[1] += 1
    a[:, 0] *= 2
    a *= ROW
    a += a[:, 2:3]
    np.subtract(a, ROW, out=a)


def parts_of_complex_numbers(a: Any) -> list[Any]:
    z = a * (1 + 2j)
    return [np.real(z), z.real, np.imag(z), z.imag, z.conj(), z.T.conj().real, np.astype(z, "complex64")]


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
    assigned(2, 5),
    assigned((-1, -1), 7),
    changed(in_place),
    changed(lambda a: a.fill(7)),
    parts_of_complex_numbers,
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
    lambda a: a - a.mean(axis=0),
    lambda a: a - a.mean(axis=1, keepdims=True),
    lambda a: a[:, 2:3] * a[1:2],
    lambda a: (a[3], a[-1, :], a[:, 4], a[2:7, -2], a[4, 3], a[np.int64(8), -1], a.T[2]),
    lambda a: (len(a), a.size, a.nbytes, a.ndim, a.shape, np.empty_like(a).shape),
    lambda a: (np.zeros_like(a), np.ones_like(a, dtype="int32"), np.full_like(a, 2.5), np.copy(a), np.transpose(a)),
    lambda a: (np.where(np.abs(a) > 0.7, a, ROW), np.where(np.abs(a) > 0.7, 0, a)),
    lambda a: np.where(a[:5] < a[:5].T, a[:5], a[:5].T),
    lambda a: (np.round(a, 2), np.nan_to_num(a / 0), np.isclose(a, ROW)),
    lambda a: [f(a, k) for f in (np.triu, np.tril) for k in (-20, -3, 0, 2, 20)],
    lambda a: (np.count_nonzero(a > 0), np.count_nonzero(np.triu(a), axis=0)),
    lambda a: (np.clip(a, -0.5, ROW), np.clip(a, None, 0.1), a.clip(0, 1), a.clip(max=a - 1)),
    lambda a: (a.transpose(), a.dot(a.T), a.round(1)),
    lambda a: (np.array_equal(a, a.copy()), np.array_equal(a, a + 1), np.array_equal(a, a.T)),
    lambda a: (np.allclose(a, a * (1 + 1e-7)), np.allclose(a, a + 1)),
    lambda a: [np.array_equal(a / 0 * 0, a / 0 * 0, equal_nan=x) for x in (True, False)],
    lambda a: [np.allclose(a / 0 * 0, a / 0 * 0, equal_nan=x) for x in (True, False)],
    lambda a: (np.dot(a, a.T), np.dot(a, 2), np.inner(a, a + 1), np.vdot(a, a + 1j)),
    lambda a: (np.vstack((a, a.astype("f4"), a)), np.hstack([a, a])),
    lambda a: (np.concatenate((a, a[:, :3]), axis=1), np.concatenate((a.T, a.T), axis=-2)),
]

# (refused expression, exception, the alternative that it names)
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
    (lambda a: a[np.ones((9, 5), bool)], IndexError, "numpy.where"),
    (lambda a: a[1, 2, 3], IndexError, "A[i0:i1, j0:j1]"),
    (lambda a: a[True], IndexError, "A[i0:i1, j0:j1]"),
    (lambda a: a["x"], IndexError, "got 'x'"),
    (lambda a: a[0, 5], IndexError, "index 5 is out of range"),
    (lambda a: a[-10, 0], IndexError, "index -10 is out of range"),
    (lambda a: np.array_equiv(a, a), TypeError, "use A.allclose(B, rtol=0, atol=0)"),
    (lambda a: np.zeros((3, 3), like=a), TypeError, "numpy.zeros is not available"),
    (lambda a: np.vecdot(a, a), TypeError, "vecdot is not available"),
    (lambda a: divmod(a, 2), TypeError, "divmod is not available"),
    (lambda a: np.add(a, a, out=np.zeros((9, 5))), TypeError, "out is a ndarray, and not a DistMatrix"),
    (lambda a: np.ma.masked + a, TypeError, "not one array"),
    (lambda a: a + np.ma.array(1.0, mask=True), TypeError, "mask"),
    (lambda a: a @ np.ma.ones((5, 9)), TypeError, "mask"),
    (lambda a: 3 in a, TypeError, "not iterable"),
    (lambda a: a in [a + 1], ValueError, "allclose"),
    (lambda a: bool(a == a), ValueError, "allclose"),
    (lambda a: np.nditer(a), TypeError, "operand"),
    (lambda a: reversed(a), TypeError, "not reversible"),
    (lambda a: memoryview(a), TypeError, "bytes-like"),
    (lambda a: setattr(a, "local", a), AttributeError, "local"),
    (lambda a: np.triu(a, a), TypeError, "DistMatrix"),
    (lambda a: np.clip(a, 2), TypeError, "DistMatrix"),
    (lambda a: np.astype(a, a), TypeError, "DistMatrix"),
    (lambda a: np.concatenate((a, np.zeros((9, 5)))), TypeError, "only a DistMatrix is joined"),
    (lambda a: np.zeros_like(a, shape=(2, 2)), TypeError, "zeros_like with these arguments"),
    (lambda a: np.vstack((a, a[:, :3])), LayoutError, "must match in the other axis"),
]


def test_each_expression_is_right_or_names_an_alternative(comm: Any, grid: Any) -> None:
    whole = drawn((9, 5), "float64")
    for A in islice(matrices(comm, whole), 0, None, 3):
        for number, act in enumerate(RIGHT):
            several = (x if isinstance(x, (tuple, list)) else [x] for x in (act(A), act(whole)))
            for found, expected in zip(*several, strict=True):
                found = found.allgather() if isinstance(found, DistMatrix) else found
                assert np.shape(found) == np.shape(expected), number
                assert np.asarray(found).dtype == np.asarray(expected).dtype, number
                assert np.allclose(found, expected, rtol=1e-14, atol=1e-14, equal_nan=True), number
        assert np.array_equal(A.allgather(), whole)
    A = DistMatrix.from_global(whole, grid=grid, block=2)
    for number, (act, error, way) in enumerate(REFUSED):
        with pytest.raises(error) as caught:
            act(A)
        assert way in str(caught.value) and "\n" not in str(caught.value), (number, str(caught.value))
    for pointless in (lambda: float(A[0:1, 0:1]), lambda: hash(A), lambda: f"{A:.2f}"):  # Python's message
        with pytest.raises(TypeError):
            pointless()
    assert np.array_equal(A.allgather(), whole)
