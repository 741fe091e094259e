"""SUMMA as users call it: operators, callbacks, operands that are not read, memory, and bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from checked_product import check
from problems import TOLERANCE, gemm_error
from tiers import every_grid, square_grid
from tree_mover import BY_MESSAGES

from pdgemm import DistMatrix, ProcessGrid, matmul, pdgemm
from pdgemm.errors import ArgumentError, DTypeError, GridError, LayoutError, PdgemmError
from pdgemm.instrument.recorder import Traffic

pytestmark = pytest.mark.mpi


@every_grid
def test_ranks_without_columns_know_the_memory_order_of_panels(comm: Any) -> None:
    """With k = 2, some ranks have no column of A: their empty local array does not show its memory order."""
    with ProcessGrid(comm, (1, comm.size)) as grid:
        for orders in ("FFC", "FCC", "CFF"):
            check(grid, (6, 7, 2), "summa", grid.shape, 1, block=2, orders=orders)


# ------------------------------------------------------------------ how users call it
def test_operators_and_numpy_protocol(comm: Any, grid: Any) -> None:
    A = DistMatrix.random((20, 30), grid=grid, block=4, seed=1)
    B = DistMatrix.random((30, 10), grid=grid, block=3, seed=2)
    a, b = A.allgather(), B.allgather()
    for C in (A @ B, np.matmul(A, B), matmul(A, B)):
        assert gemm_error(C.allgather(), 1, a, b) <= TOLERANCE
        assert C.report.counted == C.report.predicted
        assert C.block == (4, 3)
    out = DistMatrix.empty((20, 10), grid=grid, block=(4, 3))
    assert np.matmul(A, B, out=out) is out
    assert gemm_error(out.allgather(), 1, a, b) <= TOLERANCE


def test_without_c_a_new_matrix_is_returned_and_beta_is_ignored(comm: Any, grid: Any) -> None:
    ones = DistMatrix.from_function(lambda i, j: 1.0, (6, 6), grid=grid)
    assert pdgemm(0.5, ones, ones, 9.0).allclose(3)


def test_nan_propagates_and_stays_in_its_rows(comm: Any, grid: Any) -> None:
    a, b = np.ones((9, 7)), np.ones((7, 5))
    a[4, 2] = np.nan
    C = DistMatrix.from_global(a, grid=grid, block=2) @ DistMatrix.from_global(b, grid=grid, block=2)
    c = C.allgather()
    assert np.isnan(c[4]).all()
    assert (np.delete(c, 4, axis=0) == 7).all()


def test_without_alpha_neither_a_nor_b_is_read_or_sent(comm: Any, grid: Any) -> None:
    nan = DistMatrix.from_function(lambda i, j: np.nan, (6, 6), grid=grid)
    C = pdgemm(0, nan, nan, 2.0, DistMatrix.from_function(lambda i, j: 1.5, (6, 6), grid=grid))
    assert C.allclose(3)
    assert C.report is not None
    assert C.report.counted == Traffic()


def test_progress_counts_the_panels(comm: Any, grid: Any) -> None:
    A, seen = DistMatrix.eye(40, grid=grid, block=3), []
    C = pdgemm(1, A, A, panel_width=4, progress=lambda done, total: seen.append((done, total)))
    assert C.report is not None
    assert seen == [(t, C.report.panels) for t in range(1, C.report.panels + 1)]


@pytest.mark.on_ranks(1, 2)
def test_no_needless_buffers(comm: Any) -> None:
    """A matrix that is not sent needs no buffer; one rank needs no buffer at all."""
    with ProcessGrid(comm, (1, comm.size)) as grid:
        for k in (12, 2000):  # one panel, or many
            A, B = (DistMatrix.random(x, grid=grid, seed=1) for x in ((12, k), (k, 12)))
            bytes_of_a = (comm.size > 1) * 8 * 12  # buffer per inner index; B is not sent
            report = pdgemm(1, A, B, algorithm="summa", shape=grid.shape).report
            assert report.extra_bytes == (k == 12) * bytes_of_a * k  # one buffer, of the whole A
            report = pdgemm(1, A, B, algorithm="summa", shape=grid.shape, mover="ibcast").report
            assert report.extra_bytes == bytes_of_a * (k if k == 12 else 2 * report.panel_width)


# ------------------------------------------------------------------ bad input
def test_bad_input_is_refused_on_all_ranks_alike(comm: Any, grid: Any) -> None:
    A, B = DistMatrix.zeros((6, 4), grid=grid), DistMatrix.zeros((4, 5), grid=grid)
    C = DistMatrix.zeros((6, 5), grid=grid)
    whole: Any = np.zeros((4, 5))
    frozen = C.copy()
    frozen.local.flags.writeable = False
    square = DistMatrix.zeros((4, 4), grid=grid)
    flags = DistMatrix.from_function(lambda i, j: 1, (4, 5), grid=grid, dtype=bool)
    small = A.astype("i1"), B.astype("i1")
    cases: list[tuple[type[PdgemmError], str, tuple[Any, ...], dict[str, Any]]] = [
        (LayoutError, r"inner dimensions.*op\(A\) is 6 x 4 .*op\(B\) is 6 x 4", (1, A, A), {}),
        (LayoutError, r"inner .*op\(A\) is 4 x 6 .*op\(B\) is 5 x 4", (1, A, B), {"transa": "T", "transb": "C"}),
        (LayoutError, r"shape mismatch: C is 4 x 4, op\(A\) op\(B\) is", (1, A, B, 0, square), {}),
        (DTypeError, "complex128 times B float64.*cannot be stored in C float64", (1, A.astype("D"), B, 0, C), {}),
        (DTypeError, "cannot be stored in C int32", (1, A, B, 0, C.astype("i4")), {}),
        (DTypeError, "accumulate_dtype float16", (1, A, B), {"accumulate_dtype": "f2"}),
        (DTypeError, "bool; supported: float8_e4m3fn", (1, A, flags), {}),
        (ArgumentError, "transa is .*got 'X'", (1, A, B), {"transa": "X"}),
        (ArgumentError, "transb is .*got 1", (1, A, B), {"transb": 1}),
        (ArgumentError, "conjugate of another matrix", (1, A, B, 0, C.astype("D").T.H), {}),
        (DTypeError, "B must be a DistMatrix, got ndarray", (1, A, whole), {}),
        (DTypeError, "alpha must be a number, got str", ("1", A, B), {}),
        (DTypeError, "alpha must be a number, got ndarray", (whole, A, B), {}),
        (DTypeError, "beta = 1j is complex", (1, A, B, 1j, C), {}),
        (ArgumentError, "C is read-only", (1, A, B, 0, frozen), {}),
        (ArgumentError, "C shares memory with A", (1, square, square.copy(), 0, square), {}),
        (ArgumentError, "mover 'pigeon'", (1, A, B), {"mover": "pigeon"}),
        (ArgumentError, "lookahead must be >= 0, got -1", (1, A, B), {"lookahead": -1}),
        (ArgumentError, "panel_width must be >= 1, got 0", (1, A, B), {"panel_width": 0}),
        (ArgumentError, "lookahead is a whole number, got 1.0", (1, A, B), {"lookahead": 1.0}),
        (ArgumentError, "memory_limit is a whole number, got '1G'", (1, A, B), {"memory_limit": "1G"}),
        (DTypeError, "int8, .* int32, cannot be stored in C float64", (1, *small, 0, C), {"accumulate_dtype": "i4"}),
        (DTypeError, "alpha = nan is not an integer", (np.nan, *small), {}),
    ]
    if comm.size > 1:
        part = comm.Split(comm.rank // (comm.size - 1), comm.rank)
        with ProcessGrid(part, (part.size, 1)) as smaller:
            elsewhere = DistMatrix.zeros((4, 5), grid=smaller)
            with pytest.raises(GridError, match="different ranks.*ranks="):
                pdgemm(1, A, elsewhere)
        part.Free()
        cases.append((ArgumentError, "rank 0: .*alpha=0", (comm.rank, A, B), {}))
        cases.append((ArgumentError, "different arguments", (1, A, B), {"panel_width": comm.rank + 1}))
    for kind, message, arguments, options in cases:
        with pytest.raises(kind, match=message) as caught:
            pdgemm(*arguments, **options)
        assert len(set(comm.allgather(str(caught.value)))) == 1
    with pytest.raises(DTypeError):
        pdgemm(1, whole, B)


@pytest.mark.on_ranks(3)
def test_a_callback_that_raises_harms_nobody(comm: Any, grid: Any, tree_mover: None) -> None:
    def boom(done: int, total: int) -> None:
        raise KeyError("mine")

    A = DistMatrix.random((40, 40), grid=grid, block=3)
    expected = A.allgather() @ A.allgather()
    for mover in BY_MESSAGES:
        with pytest.raises(KeyError):
            pdgemm(1, A, A, panel_width=4, lookahead=3, mover=mover, progress=boom)
        for algorithm in ("summa", "inner"):  # A or C is redistributed after the last panel
            C = DistMatrix.zeros((40, 40), grid=grid, block=(5, 4))
            with pytest.raises(KeyError):
                pdgemm(1, A, A, 0, C, algorithm=algorithm, progress=boom)
            assert np.allclose(C.allgather(), expected)
        on_one = boom if comm.rank == 0 else None
        C = DistMatrix.zeros((40, 40), grid=grid, block=3)
        with pytest.raises(KeyError):  # all ranks raise
            pdgemm(1, A, A, 0, C, panel_width=4, lookahead=3, mover=mover, progress=on_one)
        assert np.allclose(C.allgather(), expected)


@square_grid
def test_a_callback_that_is_interrupted_leaves_no_messages(comm: Any) -> None:
    """After KeyboardInterrupt on all ranks, while panels are in flight, the next product receives none of these."""

    def interrupted(done: int, total: int) -> None:
        if done > 0.3 * total:
            raise KeyboardInterrupt

    x = np.random.default_rng(1).standard_normal((64, 64))
    with ProcessGrid(comm, (1, comm.size)) as grid:
        A = DistMatrix.from_global(x, grid=grid, block=4)
        with pytest.raises(KeyboardInterrupt):
            pdgemm(1, A, A, algorithm="summa", mover="ring", panel_width=4, progress=interrupted)
        C = pdgemm(1, A, A, algorithm="summa", mover="ring", panel_width=4)
        np.testing.assert_allclose(C.allgather(), x @ x, atol=1e-12)


def test_disjoint_columns_of_one_array_may_be_a_and_c(comm: Any) -> None:
    with ProcessGrid(comm, (comm.size, 1)) as grid:
        rows = DistMatrix.empty((8, 4), grid=grid).local.shape[0]
        both = np.ones((rows, 8))
        A = DistMatrix.from_local(both[:, :4], (8, 4), grid=grid)
        C = DistMatrix.from_local(both[:, 4:], (8, 4), grid=grid)
        pdgemm(1, A, DistMatrix.eye(4, grid=grid), 0, C)
        assert C.allclose(1)
