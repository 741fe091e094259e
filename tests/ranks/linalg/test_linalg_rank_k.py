"""One triangle of A A^H and related products: every algorithm on every grid, compared with NumPy; exact counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_device import SCHEDULES, fake_device
from problems import DTYPES, TOLERANCE, accepted, gemm_error, grid_shapes
from tiers import every_grid, everything, pairs, square_grid, third

from pdgemm import DistMatrix, ProcessGrid, linalg, pdgemm
from pdgemm.errors import ArgumentError, DTypeError, LayoutError, PdgemmError
from pdgemm.grids.distribution import Distribution
from pdgemm.grids.layout import Layout
from pdgemm.linalg import gram, her2k, herk, plan, syrk
from pdgemm.local.arrays.device import to_host
from pdgemm.local.arrays.elementwise import set_elements
from pdgemm.planning.machines.machine import Link, Machine
from pdgemm.schedules.products.triangle_blocks import TriangleBlocks, triangle_shape

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


@every_grid
def test_triangle_blocks(comm: Any) -> None:
    """On each grid, in one layer, in several, and in one for each rank, with the words of the schedule; also n < P."""
    values = [
        sorted({1, min(2, comm.size), comm.size}),
        ["herk", "syrk", "her2k", "syr2k"],
        "LU",
        SIZES[2:],
        DTYPES,
        "NT",
        [0, 2],
    ]
    rows = pairs(*values, [None, 3, (2, 5)], "CF")
    shapes = grid_shapes(comm.size)
    grids = [ProcessGrid(comm, shape=shape) for shape in shapes]
    for at, (layers, name, uplo, size, dtype, trans, beta, block, order) in enumerate(
        rows if everything() else rows[:: 4 if comm.size < 5 else 12]
    ):
        trans = "C" if trans == "T" and name.startswith("he") else trans
        options: dict[str, Any] = {"dtype": dtype, "block": block, "order": order, "algorithm": "triangle"}
        options |= {"layers": layers if at % 2 else None, "uplo": uplo, "trans": trans, "beta": beta}
        report = check(grids[at % len(grids)], name, size, alpha=-2.0, block_c=(3, 4), **options)
        assert report.algorithm == "triangle"
        assert report.layers == layers or not at % 2
    for size in [(1, 1), (2, 3)]:
        assert check(grids[-1], "herk", size, algorithm="triangle").algorithm == "triangle"
    for size in [(0, 3), (5, 0)]:
        assert check(grids[-1], "syr2k", size, algorithm="triangle").algorithm == "summa"  # nothing is multiplied
    for grid in grids:
        grid.free()


@pytest.mark.on_ranks(2, 3, 6)
def test_triangle_blocks_have_the_words_of_the_bound(comm: Any) -> None:
    """From rows of A on their ranks, a rank receives n k (c - 1)/c of the lines' share, 1/2 of A at P = 6, 1/3 at 12.

    No algorithm with all inner indices on one rank can do with less: with less than 1/c of the rows on each rank, each
    row would be on c + 1 ranks or more, but c (c + 1) ranks cannot have so many.  The sums of C add n^2/2 words, and
    an eighth at most for the strips on the diagonal.
    """
    n, k, size = 144, 12, comm.size
    share = {2: 1, 3: 2 / 3, 6: 1 / 2, 12: 1 / 3}[size]
    with ProcessGrid(comm, shape=(size, 1)) as grid:
        A = DistMatrix.random((n, k), grid=grid, seed=1)
        C = DistMatrix.zeros((n, n), grid=grid, block=4)
        report = herk(1, A, 0, C, algorithm="triangle", layers=1).report
        words = comm.allgather(report.counted.words_received)
        rows = [n * k * share - n * k / size] * size if size > 2 else [n * k / 2, 0]
        assert n * n / 2 * (1 - 2 / size) <= sum(words) - sum(rows) <= n * n / 2 * 9 / 8
        layout = Layout(A.distribution, grid.rank_map, A.dtype)
        of_c = Layout(Distribution(C.distribution.rows, C.distribution.cols), grid.rank_map, A.dtype)
        planned = TriangleBlocks(layout, None, of_c, (*range(size),), "L", triangle_shape(n, k, size, layers=1)[0], 1)
        assert sorted(planned.arrivals["A"].traffic(rank).words_received for rank in range(size)) == sorted(rows)
        assert planned.traffic(comm.rank) == report.counted


@pytest.mark.on_ranks(6)
def test_triangle_blocks_are_chosen_where_messages_are_slow(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one rank on each node, and slow links; the plan of the call names the schedule, and has its words."""
    slow = Machine(ranks_per_node=1, inter={kind: Link(1e-6, 1e-8) for kind in Machine().inter})
    monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", "1")
    own = comm.Dup()
    with ProcessGrid(own) as grid:
        for n, k, calls in ((96, 96, ("herk", "syr2k")), (240, 4, ("herk",))):
            A = DistMatrix.random((n, k), grid=grid, seed=1, block=4)
            for name in calls:
                operands = (A, A) if name == "syr2k" else (A,)
                planned, C = (
                    plan(name, 1.0, *operands, machine=slow),
                    getattr(linalg, name)(1.0, *operands, machine=slow),
                )
                assert [stage.algorithm for _, stage in planned.stages] == ["triangle" if k > 4 else "summa"]
                assert C.report.algorithm == planned.stages[0][1].algorithm
                assert planned.traffic(comm.rank) == C.report.counted
                other = getattr(linalg, name)(1.0, *operands, machine=slow, algorithm="summa").report
                assert k == 4 or own.allreduce(C.report.counted.words_received - other.counted.words_received) < 0
            assert plan("gram", A.H, machine=slow).stages[0][1].algorithm == C.report.algorithm
    own.Free()


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


def test_products_with_one_triangle(comm: Any) -> None:
    """C := alpha A B + beta C, or alpha B A; the other triangle of A holds NaN, as C does where beta is 0."""
    with ProcessGrid(comm) as grid:
        forms = pairs(["hemm", "symm"], DTYPES, "LR", "LU", [0, 2], [None, 3, (2, 5)], "CF")
        for name, dtype, side, uplo, beta, block, order in forms:
            n, m = 13, 9
            full, made = rng_matrix(n, n, dtype), {"grid": grid, "block": block, "order": order}
            stored = np.where(triangle(np.ones((n, n)), uplo) > 0, full, np.nan).astype(dtype)
            other = triangle(full, "U" if uplo == "U" else "L")
            strict = np.triu(full, 1) if uplo == "U" else np.tril(full, -1)
            whole = other + (strict.conj().T if name == "hemm" else strict.T)
            if name == "hemm":
                whole[np.diag_indices(n)] = whole.diagonal().real
            b = rng_matrix(*((n, m) if side == "L" else (m, n)), dtype)
            c = rng_matrix(*b.shape, dtype) if beta else np.full(b.shape, np.nan, dtype)
            A, B, C = (DistMatrix.from_global(x, **made) for x in (stored, b, c))
            before = A.local.tobytes()
            C = getattr(linalg, name)(-2.0, A, B, beta, C, side=side, uplo=uplo)
            left, right = (whole, b) if side == "L" else (b, whole)
            assert gemm_error(C.allgather(), -2.0, left, right, beta, c if beta else None) <= TOLERANCE
            assert C.report.counted == C.report.predicted
            assert A.local.tobytes() == before
            new = getattr(linalg, name)(1, A, B, side=side, uplo=uplo).allgather()
            assert gemm_error(new, 1, left, right) <= TOLERANCE
        T = DistMatrix.zeros((4, 3), grid=grid)
        for error, message, call in (
            (LayoutError, "A must be square", lambda: linalg.symm(1, T, T)),
            (LayoutError, "inner dimensions", lambda: linalg.hemm(1, T.T @ T, T)),
            (ArgumentError, "is not one of L, R", lambda: linalg.symm(1, T.T @ T, T, side="X")),  # type: ignore[arg-type]
            (ArgumentError, "is not one of L, U", lambda: linalg.hemm(1, T.T @ T, T, uplo="X")),  # type: ignore[arg-type]
        ):
            with pytest.raises(error, match=message):
                call()


def rng_matrix(m: int, n: int, dtype: str) -> np.ndarray:
    rng = np.random.default_rng(m + 7 * n)
    return (rng.standard_normal((m, n)) + (1j * rng.standard_normal((m, n)) if "complex" in dtype else 0)).astype(dtype)


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
            (
                ArgumentError,
                "but not shape, mover",
                lambda: syrk(1, A, algorithm="triangle", mover="ring", shape=(1, 1)),
            ),
            (ArgumentError, "but not layers=99", lambda: her2k(1, A, A, algorithm="triangle", layers=99)),
            (ArgumentError, "layers", lambda: herk(1, A, algorithm="triangle", layers=0)),
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
