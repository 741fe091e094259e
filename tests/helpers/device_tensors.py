"""Checks of tensors on a device against NumPy, for simulated and for real GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np

from pdgemm import DistMatrix, DistTensor, ProcessGrid, einsum, plan_einsum, tensordot
from pdgemm.grids.tensor_layout import TensorLayout
from pdgemm.tensors.tensor_base import in_layout

KINDS = ("float64", "complex64", "bfloat16")
EXPRESSIONS = (
    "ijk,kjl->il", "ijk,kjl->ikl", "ijk,kjl->jil", "ijk,kjl->lkji", "ijk,kj->ijk", "bij,bjk->bik", "ij,kl->kilj",
    "iji->ij", "iik,kj->ji", "ijk->kj", "ij,jk,kl->il", "i,ij,jii->ij", ",ik,ij->kj",
)  # fmt: skip
EXTENTS = dict(zip("ijklb", (5, 4, 6, 3, 2)))


def numbers(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Return whole numbers, from 1 to 3 in absolute value, so that few of them are summed without rounding."""
    rng = np.random.default_rng(len(shape) + sum(shape))
    x = rng.integers(1, 4, shape) * rng.choice([-1, 1], shape)
    return np.asarray(x + 1j * x[::-1] if np.dtype(dtype).kind == "c" and shape else x).astype(dtype)


def same(x: Any, wanted: Any) -> None:
    got = x.allgather() if hasattr(x, "allgather") else np.asarray(x)
    wide = np.complex128 if np.iscomplexobj(got) else np.float64
    assert got.shape == np.shape(wanted)
    assert np.allclose(got.astype(wide), np.asarray(wanted).astype(wide), rtol=1e-2 if got.itemsize == 2 else 1e-5)


def check_tensors(grid: ProcessGrid, device: str, dtype: str) -> None:
    """Compare the functions of tensors with NumPy's."""
    a, b = numbers((6, 5, 4), dtype), numbers((5, 6, 4), dtype).transpose(1, 0, 2)
    plain = a.astype(np.complex128 if a.dtype.kind == "c" else np.float64)
    for rows in ((0,), (2, 1), ()):
        A, B = (DistTensor.from_global(x, grid=grid, device=device, rows=rows, dtype=dtype) for x in (a, b))
        assert A.device == device and A.T.local.shape == A.local.shape[::-1]
        for axis in (0, (0, 2), (1, 2), None):
            same(A.sum(axis), plain.sum(axis))
            same(A.max(axis, keepdims=True), plain.max(axis, keepdims=True))
        same(A.any(1), plain.any(axis=1))
        same(A.var(1), plain.var(axis=1))
        same(A.T + B.transpose(2, 1, 0), (a + b).T)
        same(A * B[:, :1] - b[0], a * b[:, :1] - b[0])
        same(np.where(A == B, A, B), b)
        same(A.reshape(10, 12), a.reshape(10, 12))
        for key in (np.s_[1:3, :, 2], np.s_[::-1, 1::2], np.s_[:, [3, 0, 3]], np.s_[..., ::-3], np.s_[4]):
            same(A[key], a[key])
        same(np.concatenate([A, B, b], 1), np.concatenate([a, b, b], 1))
        same(np.stack([A, B], -1), np.stack([a, b], -1))
        same(A.matrix([0, 2]), a.transpose(0, 2, 1).reshape(24, 5))
        same(A.to_host().to_device(device), a)
    same(DistTensor.zeros((3, 0, 4), grid=grid, device=device, dtype=dtype).sum((0, 1)), np.zeros(4))
    same(DistTensor.random((3, 2, 4), grid=grid, device=device), DistTensor.random((3, 2, 4), grid=grid).allgather())


def check_indexing(grid: ProcessGrid, device: str) -> None:
    """Parts of tensors by masks and arrays of indices, read and set; sorts, sets and cumulative sums."""
    x = numbers((6, 5, 4), "float64") * np.arange(1, 5)
    flat = x.ravel().copy()
    X, long = (DistTensor.from_global(a, grid=grid, device=device) for a in (x, flat))
    mask, places = (DistTensor.from_global(a, grid=grid, device=device) for a in (x > 2, np.array([3, 0, 3])))
    for key, own in (((mask,), (x > 2,)), (([0, 3], [1, 2]), ([0, 3], [1, 2])), ((slice(1, 3), places),) * 2):
        own = tuple(a.allgather() if isinstance(a, DistTensor) else a for a in own)
        same(X[key if len(key) > 1 else key[0]], x[own])
        X[key] = x[own] = 7
    X[:, [0, 2]], x[:, [0, 2]] = (np.arange(4.0),) * 2
    X[1], x[1] = X[2], x[2]
    same(X, x)
    for f in (np.sort, np.argsort, np.unique, np.cumsum, np.diff, np.argmax):
        same(f(long), f(flat) if f is not np.argsort else np.argsort(flat, stable=True))
    same(np.take_along_axis(X, np.argsort(X, 1), 1), np.sort(x, 1))
    for one, wanted in zip(np.nonzero(X), np.nonzero(x)):
        same(one, wanted)


def check_views(grid: ProcessGrid, device: str) -> None:
    """Parts of matrices and conjugated matrices are read as tensors, and moved."""
    x = numbers((12, 9), "complex128")
    for order in ("C", "F"):
        X = DistMatrix.from_global(x, grid=grid, device=device, order=order, block=(3, 9))
        for part, y in ((X[3:, 1:], x[3:, 1:]), (X.H.T, x.conj()), (X.H, x.conj().T), (X.T[:, 2:8], x.T[:, 2:8])):
            T, y = part.tensor((3, len(y) // 3, y.shape[1])), y.reshape(3, -1, y.shape[1])
            same(T, y)
            same(in_layout(T, TensorLayout.even(T.shape, (0, 1), (2,), (1, grid.size))), y)
            same(T.sum(1), y.sum(1))


def check_einsums(grid: ProcessGrid, device: str, dtype: str) -> None:
    """Compare contractions with NumPy's, and their words with the plan's."""
    groups = cycle([{}, {"rows": (0,)}, {"rows": (), "cols": None}, {"rows": (-1,)}])
    for expression in EXPRESSIONS:
        inputs = expression.split("->")[0].split(",")
        arrays = [numbers([EXTENTS[x if x != "b" else "b"] for x in labels], dtype) for labels in inputs]
        if "jii" in inputs or "iji" in inputs or "iik" in inputs:
            arrays = [x[tuple(slice(4) for _ in x.shape)] for x in arrays]
        tensors = [
            DistTensor.from_global(x, grid=grid, device=device, dtype=dtype, **(next(groups) if x.ndim else {}))
            for x in arrays
        ]
        wanted = np.einsum(expression, *(x.astype(np.complex128) for x in arrays))
        wanted = wanted if np.dtype(dtype).kind == "c" else wanted.real
        C, plan = einsum(expression, *tensors), plan_einsum(expression, *tensors)
        same(C, wanted)
        assert C.device == device and C.report.counted == C.report.predicted
        counted, planned = C.report.counted, plan.program.traffic(grid.rank)
        for name in ("words_received", "words_sent", "words_read"):
            assert getattr(counted, name) == getattr(planned, name), (expression, str(plan.program))
        same(einsum(expression, *tensors, out=C, alpha=2, beta=-1), wanted)
    a = numbers((6, 5, 4), dtype)
    if dtype != "bfloat16":
        A = DistTensor.from_global(a, grid=grid, device=device)
        same(tensordot(A, a, ([0, 1], [0, 1])), np.tensordot(a, a, ([0, 1], [0, 1])))
        same(A @ a[0].T, a @ a[0].T)
