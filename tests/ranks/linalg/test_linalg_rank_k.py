"""One triangle of A A^H and related products: every algorithm on every grid, compared with NumPy; exact counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_device import SCHEDULES, fake_device
from problems import DTYPES, TOLERANCE, accepted, gemm_error
from tiers import pairs, square_grid, third

from pdgemm import DistMatrix, ProcessGrid, linalg, pdgemm
from pdgemm.errors import ArgumentError, DTypeError, LayoutError, PdgemmError
from pdgemm.linalg import gram, her2k, herk, syrk
from pdgemm.local.arrays.device import to_host
from pdgemm.local.arrays.elementwise import set_elements

pytestmark = pytest.mark.mpi

SIZES = [(0, 3), (5, 0), (13, 8), (37, 50), (90, 21)]
FORMS = ("summa", "cannon", "2.5d", "inner", "row", "column")


def triangle(x: np.ndarray, uplo: str) -> np.ndarray:
    return np.tril(x) if uplo == "L" else np.triu(x)


def check(
    grid: Any,
    name: str,
    size: tuple[int, int],
    *,
    uplo: str = "L",
    trans: str = "N",
    dtype: str = "float64",
    beta: complex = 0,
    alpha: complex = 1,
    block: Any = None,
    block_c: Any = None,
    order: str = "C",
    device: str = "host",
    **options: Any,
) -> Any:
    """Check one call on windows of larger matrices; the other triangle of C holds NaN, with beta = 0 all of C."""
    n, k = size
    two, hermitian = name.endswith("2k"), name.startswith("he")
    made: dict[str, Any] = {"grid": grid, "dtype": dtype, "kind": "normal", "block": block, "device": device}
    shape = (n, k) if trans == "N" else (k, n)
    wholes = [DistMatrix.random((shape[0] + 3, shape[1] + 2), seed=x, order=order, **made) for x in (1, 2)]
    operands = [x[1 : shape[0] + 1, 2 : shape[1] + 2] for x in wholes[: 1 + two]]
    before = [to_host(x.stored).copy() for x in wholes]
    whole = DistMatrix.random((n + 2, n + 3), seed=3, order=order, **(made | {"block": block_c or block}))
    C = whole[2:, 1 : n + 1]
    old = C.allgather()
    start = triangle(np.ones((n, n)), uplo) if beta != 0 else np.zeros((n, n))
    c = np.where(start > 0, old, np.nan)
    set_elements(C.stored, c[np.ix_(*C.indices())].astype(dtype))
    around = to_host(whole.stored).copy()
    result = getattr(linalg, name)(alpha, *operands, beta, C, uplo=uplo, trans=trans, **options)
    assert result is C
    got = C.allgather()
    x = [y.allgather() for y in operands]
    x = [y if trans == "N" else y.conj().T if trans == "C" else y.T for y in x]
    other = [y.conj().T if hermitian else y.T for y in x]
    reference_a, reference_b = (np.hstack([x[0], x[1]]), np.vstack([other[1], other[0]])) if two else (x[0], other[0])
    if two and hermitian:
        reference_a, alpha = np.hstack([alpha * x[0], np.conj(alpha) * x[1]]), 1
    if hermitian and n:
        old[np.diag_indices(n)] = old[np.diag_indices(n)].real
        assert np.all(np.diag(got).imag == 0)
    full = alpha * (reference_a.astype(complex) @ reference_b) + (beta * old if beta != 0 else 0)
    inside = triangle(np.ones((n, n)), uplo) > 0
    filled = np.where(inside, got, full if np.iscomplexobj(got) else full.real).astype(got.dtype)
    assert gemm_error(filled, alpha, reference_a, reference_b, beta, old) <= TOLERANCE, C.report
    assert all(np.array_equal(to_host(x.stored), y) for x, y in zip(wholes, before))
    outside = np.ones(whole.shape, bool)
    outside[2:, 1 : n + 1] = ~inside
    here = outside[np.ix_(*whole.indices())]
    assert np.array_equal(to_host(whole.stored)[here], around[here], equal_nan=True)
    report = C.report
    assert report.counted == report.predicted, str(report)
    assert report.extra_bytes == report.predicted_extra_bytes, str(report)
    return report


@square_grid
@pytest.mark.parametrize("algorithm", FORMS)
def test_every_grid_and_shape(comm: Any, algorithm: str) -> None:
    grids = [x for x in accepted(comm.size) if x[0] == algorithm]
    with ProcessGrid(comm) as grid:
        sizes = SIZES if comm.size < 9 else SIZES[3:]
        rows = pairs(grids, sizes, "LU", ["auto", "ibcast"], [None, 3, (2, 5)])
        for (_, shape, layers), size, uplo, mover, block in third(rows):
            options = {"algorithm": algorithm, "shape": shape, "layers": layers, "mover": mover}
            report = check(grid, "syrk", size, uplo=uplo, block=block, **options)
            if all(size):
                assert (report.grid, report.layers) == (shape, layers)


@pytest.mark.parametrize("name", ["herk", "syrk", "her2k", "syr2k"])
def test_forms_types_and_scalars(comm: Any, name: str) -> None:
    other = "C" if name.startswith("he") else "T"
    with ProcessGrid(comm) as grid:
        for dtype, uplo, trans, beta, order, algorithm in pairs(
            DTYPES, "LU", "N" + other, [0, 1, -0.5], "CF", ["auto", "summa", "inner"]
        ):
            alpha: complex = -2.0
            if dtype.startswith("complex") and name != "herk":
                alpha = 0.5 - 1j
                beta = beta * (1 + 0.5j) if name in ("syrk", "syr2k") else beta
            options: dict[str, Any] = {"trans": trans, "order": order, "block": 4, "algorithm": algorithm}
            check(grid, name, (29, 18), uplo=uplo, dtype=dtype, alpha=alpha, beta=beta, block_c=(3, 5), **options)


def test_new_matrices_are_zero_in_the_other_triangle_and_shared_evenly(comm: Any) -> None:
    for shape in [(comm.size, 1), (1, comm.size)]:
        with ProcessGrid(comm, shape=shape) as grid:
            A = DistMatrix.random((64 * comm.size + 5, 30), grid=grid, seed=1, dtype="complex128", kind="normal")
            for uplo in "LU":
                C = herk(1, A, uplo=uplo)  # type: ignore[arg-type]
                a, c = A.allgather(), C.allgather()
                mirrored = c.conj().T * ~np.eye(len(c), dtype=bool)
                assert gemm_error(c + mirrored, 1, a, a.conj().T) <= TOLERANCE
                assert np.array_equal(triangle(c, uplo), c)
                assert grid.shape == C.grid.shape
                held = np.count_nonzero(triangle(np.ones(c.shape), uplo)[np.ix_(*C.indices())])
                assert held <= 1.6 * np.count_nonzero(c) / comm.size
            assert np.array_equal(np.triu(herk(1, A.H, trans="C").allgather(), 1), np.zeros(c.shape))


def test_gram(comm: Any) -> None:
    with ProcessGrid(comm) as grid:
        for dtype, (m, n), block in pairs(DTYPES, [(300, 17), (40, 45), (0, 3)], [None, 3]):
            A = DistMatrix.random((m, n), grid=grid, seed=1, dtype=dtype, kind="normal", block=block)
            a, full = A.allgather(), gram(A)
            g = full.allgather()
            assert gemm_error(g, 1, a.conj().T, a) <= TOLERANCE
            assert np.array_equal(g, g.conj().T)
            upper = gram(A, uplo="U").allgather()
            assert np.array_equal(upper, np.triu(upper))
            assert gemm_error(upper + np.tril(g, -1), 1, a.conj().T, a) <= TOLERANCE


@square_grid
def test_half_of_the_words_and_flops(comm: Any) -> None:
    """A window of rows is formed up to the column of its last row: 1/2 + 1/(2 windows) of C, plus rows of a block."""
    with ProcessGrid(comm) as grid:
        n, k = 1600, 64
        A = DistMatrix.random((n, k), grid=grid, seed=1, dtype="float32")
        C = DistMatrix.zeros((n, n), grid=grid, dtype="float32", block=20)
        options: dict[str, Any] = {"algorithm": "inner", "mover": "ibcast", "memory_limit": None}
        whole = pdgemm(1, A, A.T, 0, C, **options).report
        half = syrk(1, A, 0, C, **options).report
        assert half.flops / whole.flops == pytest.approx(0.5, rel=1e-3)
        moved = [sum(move.counted.words_received for move in x.moves) for x in (whole, half)]
        words = comm.allreduce(np.array([x.counted.words_received - y for x, y in zip((whole, half), moved)]))
        assert comm.size == 1 or words[1] <= 0.57 * words[0]


def test_the_same_exception_on_all_ranks(comm: Any) -> None:
    with ProcessGrid(comm) as grid:
        A = DistMatrix.random((6, 4), grid=grid, seed=1, dtype="complex64")
        B = DistMatrix.random((5, 4), grid=grid, seed=1, dtype="complex64")
        C = DistMatrix.zeros((6, 6), grid=grid)
        calls: list[tuple[type[PdgemmError], str, Any]] = [
            (DTypeError, "alpha = 1j is complex", lambda: herk(1j, A)),  # type: ignore[arg-type]
            (DTypeError, "beta = 1j is complex", lambda: her2k(1j, A, A, 1j)),  # type: ignore[arg-type]
            (LayoutError, "their shapes must be the same", lambda: her2k(1, A, B)),
            (DTypeError, "of one type|cannot be stored", lambda: herk(1, A, 0, C)),
            (ArgumentError, "uplo 'X' is not one of L, U", lambda: herk(1, A, uplo="X")),  # type: ignore[arg-type]
            (ArgumentError, 'trans is "N" or "C"', lambda: herk(1, A, trans="T")),  # type: ignore[arg-type]
            (ArgumentError, 'trans is "N" or "T"', lambda: syrk(1, A, trans="C")),  # type: ignore[arg-type]
            (ArgumentError, "unknown options: depth", lambda: syrk(1, A, depth=3)),  # type: ignore[call-arg]
            (ArgumentError, "unknown options: triangle", lambda: syrk(1, A, triangle="U")),  # type: ignore[call-arg]
            (ArgumentError, "computes all of C", lambda: syrk(1, A, algorithm="stationary_b")),
            (LayoutError, "shape mismatch", lambda: syrk(1, B, 0, DistMatrix.zeros((6, 6), grid=grid, dtype="c8"))),
        ]
        for error, message, call in calls:
            with pytest.raises(error, match=message):
                call()


@square_grid
def test_on_a_device(comm: Any) -> None:
    cases = pairs(SCHEDULES, ["auto", "summa", "inner"], ["herk", "syr2k"], "LU", [0, 2])
    for schedule, algorithm, name, uplo, beta in cases:
        with fake_device(schedule) as device, ProcessGrid(comm) as grid:
            options: dict[str, Any] = {"dtype": "complex64", "device": "fake", "block": 5, "algorithm": algorithm}
            check(grid, name, (50, 30), uplo=uplo, beta=beta, **options)
            assert not device.races
