"""The functions of numpy.linalg of tensors: of one matrix, which all ranks factor, and of stacks."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tiers
from drawn_tensors import tensor_of

import pdgemm.array_api as xp
from pdgemm import DistTensor
from pdgemm.errors import ArgumentError, LayoutError
from pdgemm.grids.tensor_layout import TensorLayout

pytestmark = [pytest.mark.mpi, tiers.every_grid]
SQUARE = ((4, 4), (3, 4, 4), (2, 0, 4, 4), (0, 0), (2, 0, 0), (2, 3, 1, 1))
TALL = ((5, 3), (3, 5), (2, 4, 3), (2, 3, 4, 4), (0, 4, 3), (4, 0))


def gathered(x: Any) -> Any:
    return tuple(map(gathered, x)) if isinstance(x, tuple) else x.allgather() if isinstance(x, DistTensor) else x


def draw_array(shape: tuple[int, ...], dtype: str, hermitian: bool = False) -> np.ndarray:
    """Return matrices far from singular ones; Hermitian ones are positive definite."""
    source, n = np.random.default_rng(len(shape)), max(shape[-2:])
    x = source.standard_normal(shape) + (1j * source.standard_normal(shape) if "complex" in dtype else 0)
    x = x @ x.conj().swapaxes(-1, -2) if hermitian else x
    return np.asarray(x + 2 * n * np.eye(*shape[-2:])).astype(dtype)


def transposed(x: Any) -> Any:
    return x.conj().swapaxes(-1, -2)


def products(result: Any) -> np.ndarray:
    """Return the product of the factors of a matrix, which are the same for any signs of their vectors."""
    if len(result) == 3:  # U, S and Vh
        k = result[1].shape[-1]
        return (result[0][..., :k] * result[1][..., None, :]) @ result[2][..., :k, :]
    if result[0].ndim == result[1].ndim - 1:  # eigenvalues and eigenvectors
        return (result[1] * result[0][..., None, :]) @ np.linalg.inv(result[1])
    return result[0] @ result[1]


FUNCTIONS: dict[str, tuple[Callable[[Any], Any], Any, bool]] = {  # a function, the shapes, Hermitian matrices?
    "cholesky": (np.linalg.cholesky, SQUARE, True),
    "upper cholesky": (lambda x: np.linalg.cholesky(x, upper=True), SQUARE, True),
    "det": (np.linalg.det, SQUARE, False),
    "diagonal": (lambda x: np.linalg.diagonal(x, offset=1), TALL, False),
    "eigvalsh": (np.linalg.eigvalsh, SQUARE, True),
    "inv": (np.linalg.inv, SQUARE, False),
    "matmul": (lambda x: np.linalg.matmul(x, np.linalg.matrix_transpose(x)), TALL, False),
    "matrix_norm": (lambda x: np.linalg.matrix_norm(x, keepdims=True), TALL, False),
    "1-norm": (lambda x: np.linalg.matrix_norm(x, ord=1), SQUARE[:3], False),
    "nuclear norm": (lambda x: np.linalg.matrix_norm(x, ord="nuc"), TALL[:-1], False),
    "matrix_power": (lambda x: np.linalg.matrix_power(x, -2), SQUARE, False),
    "matrix_rank": (np.linalg.matrix_rank, TALL[:-1], False),
    "pinv": (lambda x: np.linalg.pinv(x, rtol=0.01), TALL, False),
    "slogdet": (lambda x: tuple(np.linalg.slogdet(x)), SQUARE, False),
    "solve": (lambda x: np.linalg.solve(x, x[..., :2]), SQUARE, False),
    "svdvals": (np.linalg.svdvals, TALL, False),
    "tensordot": (lambda x: np.linalg.tensordot(x, x, axes=1) if x.ndim == 2 else x, SQUARE, False),
    "trace": (lambda x: np.linalg.trace(x, offset=-1), TALL, False),
    "vecdot": (lambda x: np.linalg.vecdot(x, x), TALL, False),
    "vector_norm": (lambda x: np.linalg.vector_norm(x, axis=0), TALL, False),
    "3-norm": (lambda x: np.linalg.vector_norm(x, ord=3), TALL, False),
    "eigh": (lambda x: tuple(np.linalg.eigh(x)), SQUARE, True),
    "svd": (lambda x: tuple(np.linalg.svd(x)), TALL, False),
    "reduced svd": (lambda x: tuple(np.linalg.svd(x, full_matrices=False)), TALL, False),
    "qr": (lambda x: tuple(np.linalg.qr(x)), TALL, False),
    "complete qr": (lambda x: tuple(np.linalg.qr(x, mode="complete")), TALL, False),
    "eig": (lambda x: tuple(y.astype(complex) for y in np.linalg.eig(x)), SQUARE, False),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_matrices(grids: list[Any], name: str) -> None:
    (function, shapes, hermitian), draw = FUNCTIONS[name], random.Random(1)
    for at, shape in enumerate(shapes):
        dtype = ("float64", "complex128", "float32", "complex64")[(at + len(name)) % 4]
        x = draw_array(shape, dtype, hermitian)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected, result = function(x), gathered(function(tensor_of(x, draw.choice(grids), draw)))
        pairs = [(result, expected)]
        if isinstance(expected, tuple):
            assert [(y.shape, y.dtype.kind) for y in result] == [(y.shape, y.dtype.kind) for y in expected]
            pairs = [*zip(result, expected)] if name == "slogdet" else [(products(result), products(expected))]
            for y in result[::2] if "svd" in name else result[-1:] if name == "eigh" else result[:1]:
                if "qr" in name or "svd" in name or name == "eigh":
                    square = transposed(y) @ y if y.shape[-2] >= y.shape[-1] else y @ transposed(y)
                    assert np.allclose(square, np.eye(square.shape[-1]), 1e-4, 1e-4)
        for y, z in pairs:
            assert np.shape(y) == np.shape(z), (name, shape)
            assert np.asarray(y).dtype == np.asarray(z).dtype or name in ("matrix_rank", "eig"), (name, shape)
            assert (
                np.allclose(y, z, 1e-3, 1e-3) if dtype in ("float32", "complex64") else np.allclose(y, z, 1e-8, 1e-8)
            ), (name, shape)


def test_operands_of_two_functions_are_broadcast(grids: list[Any]) -> None:
    draw = random.Random(2)
    for grid in grids:
        A, B, v = draw_array((3, 1, 4, 4), "float64"), draw_array((2, 4, 5), "complex128"), np.arange(4.0)
        result = np.linalg.solve(tensor_of(A, grid, draw), tensor_of(B, grid, draw))
        assert np.allclose(gathered(result), np.linalg.solve(A, B))
        for a in (A, A[0, 0]):
            x = np.linalg.solve(tensor_of(a, grid, draw), DistTensor.from_global(v, grid=grid))
            assert np.allclose(gathered(x), np.linalg.solve(a, v))
        rtol = DistTensor.from_global(np.array([[0.9], [1e-9], [0.5]]), grid=grid)
        expected = np.linalg.matrix_rank(A, rtol=rtol.allgather())
        assert np.array_equal(gathered(np.linalg.matrix_rank(tensor_of(A, grid, draw), rtol=rtol)), expected)
        u, w = np.arange(1, 4, dtype="int8"), np.arange(-2, 3, dtype="int8")
        outer = xp.linalg.outer(xp.Array.from_global(u, grid=grid), xp.Array.from_global(w, grid=grid))
        assert outer.dtype == np.int8  # as for all arrays of the standard
        assert np.array_equal(outer.allgather(), np.outer(u, w))


def test_words_of_stacks_are_those_of_moves(grids: list[Any]) -> None:
    """Of matrices that are whole on the ranks nothing is sent; others move once, also where they are broadcast."""
    for grid in grids:
        r, inside = len(grid.members), min(grid.coords) >= 0

        def placed(x: np.ndarray, rows: tuple[int, ...], cols: tuple[int, ...], r: int = r, grid: Any = grid) -> Any:
            layout = TensorLayout.even(x.shape, rows, cols, (r, 1), grid.members)
            return DistTensor.from_global(x, grid=grid, layout=layout)

        x, b = draw_array((2 * r, 3, 6 * r), "float64"), draw_array((3, 3), "complex64")
        for X, words in ((placed(x, (0,), (1, 2)), 0), (placed(x, (2,), (0, 1)), 36 * (r - 1))):
            for result in (*np.linalg.qr(X), *np.linalg.svd(X, full_matrices=False), np.linalg.pinv(X)):
                report = result.report
                assert report.counted == report.predicted if report else words == 0
                assert (report.counted.words_received if report else 0) == words * inside
            assert np.allclose(result.allgather(), np.linalg.pinv(x))
        a = x[..., :3] + 9 * np.eye(3)
        X = np.linalg.solve(placed(a, (0,), (1, 2)), placed(b, (0,), (1,)))
        assert np.allclose(X.allgather(), np.linalg.solve(a, b), 1e-6)
        words = X.report.counted.words_received if X.report else 0
        assert grid.comm.allreduce(words) == 9 * (r - 1)  # each rank gets the rows of b that it lacks


def test_results_of_arrays_are_distributed_and_named(grid: Any) -> None:
    for shape in ((4, 4), (3, 4, 4)):
        A = xp.Array.from_global(draw_array(shape, "float64", True), grid=grid)
        for result in (xp.linalg.eigh(A), xp.linalg.eig(A), xp.linalg.qr(A), xp.linalg.slogdet(A), xp.linalg.svd(A)):
            assert all(isinstance(x, xp.Array) and getattr(result, f) is x for x, f in zip(result, result._fields))
        assert np.allclose((xp.linalg.qr(A).Q @ xp.linalg.qr(A).R).allgather(), A.allgather())


def test_norms_of_large_and_small_numbers_do_not_overflow(grids: list[Any]) -> None:
    for grid in grids:
        x = DistTensor.from_global(np.array([[[3e200, 0.0], [4e200, 3e-200]], [[0.0, 0.0], [0.0, 4e-200]]]), grid=grid)
        norms = np.linalg.vector_norm(x, axis=(0, 1))
        assert np.allclose(norms, [5e200, 5e-200], rtol=1e-14, atol=0)


def test_errors_on_all_ranks(grid: Any) -> None:
    X = DistTensor.zeros((4, 3), grid=grid)
    S = DistTensor.from_function(lambda i, j, k: (j == k) * (i < 5), (6, 2, 2), grid=grid, dtype=float)
    for call in (np.linalg.inv, np.linalg.cholesky, lambda A: np.linalg.solve(A, X[:2])):
        with pytest.raises(np.linalg.LinAlgError, match=r", in a stack of shape \(6, 2, 2\) on a .* grid"):
            call(S)  # only the last matrix, of one rank, is singular
    with pytest.raises(LayoutError, match=r"inv takes square matrices .* got shape \(4, 3\)"):
        np.linalg.inv(X)
    with pytest.raises(LayoutError, match=r"svd takes .* got shape \(12,\)"):
        np.linalg.svd(X.ravel())
    with pytest.raises(LayoutError, match=r"equal inner extents .* \(4, 3\) and \(4, 3\)"):
        np.linalg.matmul(X, X)
    with pytest.raises(LayoutError, match=r"solve: a matrix of shape \(6, 2, 2\) and a right-hand side of shape \(4"):
        np.linalg.solve(S, X)
    with pytest.raises(ArgumentError, match="mode is 'reduced' or 'complete', got 'raw'"):
        np.linalg.qr(X, mode="raw")
