"""The product on every grid, layout, type and order; its counters against the formulas."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from checked_product import check_summa
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import BLOCKS, DTYPES, SHAPES, TOLERANCE, gemm_error, grid_shapes
from tiers import USUAL, every_grid, examples, pairs
from tree_mover import BY_MESSAGES, ON_HOST, tree_registered

from pdgemm import DistMatrix, ProcessGrid, matmul, pdgemm
from pdgemm.errors import ArgumentError, DTypeError, GridError, LayoutError, MemoryLimitError, PdgemmError
from pdgemm.instrument.recorder import Traffic

pytestmark = [pytest.mark.mpi, every_grid]


def every(comm: Any, *factors: Any) -> Iterator[Any]:
    """Each grid of these ranks with what else is varied."""
    with ExitStack() as stack:
        grids = [stack.enter_context(ProcessGrid(comm, shape)) for shape in grid_shapes(comm.size)]
        yield from pairs(grids, *factors)


@pytest.mark.parametrize("mover", ON_HOST, indirect=True)
def test_every_shape_and_block_on_every_grid(comm: Any, mover: str) -> None:
    if mover == "shared" and comm.size == 1:
        pytest.skip("one rank has nobody to share memory with")
    shapes = [mnk for group in SHAPES.values() for mnk in group]
    for grid, mnk, blocks, last in every(comm, shapes, BLOCKS, [False, True]):
        source = (grid.shape[0] - 1, grid.shape[1] - 1) if last else (0, 0)
        report = check_summa(grid, mnk, blocks, source, "float64", mover=mover)
        assert (report.mover, report.algorithm, report.grid) == (mover, "summa", grid.shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_types_and_scalars(comm: Any, dtype: str) -> None:
    scalars: list[tuple[complex, complex]] = [(1, 0), (2, 3), (-0.5, 1), (0, 2), (0, 0)]
    if dtype.startswith("complex"):
        scalars += [(1 + 2j, 0), (2 - 1j, 3j)]
    for grid, (alpha, beta), blocks in every(comm, scalars, BLOCKS[:3]):
        check_summa(grid, (13, 8, 17), blocks, (0, 0), dtype, alpha=alpha, beta=beta)


def test_memory_orders_lookahead_and_width(comm: Any, tree_mover: None) -> None:
    orders = itertools.cycle("".join(x) for x in itertools.product("CF", repeat=3))
    blocks = BLOCKS[0], BLOCKS[2]
    for grid, lookahead, width, mover, cut in every(comm, [0, 1, 2, 5], [1, 3, None], BY_MESSAGES, blocks):
        options: dict[str, Any] = {"lookahead": lookahead, "panel_width": width, "mover": mover}
        report = check_summa(grid, (9, 14, 23), cut, (0, 0), "float64", orders=next(orders), **options)
        assert width is None or report.panel_width <= width


def test_a_rank_without_columns_knows_the_order_of_what_arrives(comm: Any) -> None:
    """k = 2 in Fortran order: on wide grids some ranks hold no column of A, whose order none can see."""
    with ProcessGrid(comm, (1, comm.size)) as grid:
        for orders in ("FFC", "FCC", "CFF"):
            check_summa(grid, (6, 7, 2), (2, 2, 2, 2), (0, 0), "float64", orders=orders)


@settings(max_examples=examples(40))
@given(data=st.data())
def test_any_problem(comm: Any, data: st.DataObject) -> None:
    draw = data.draw
    shape = draw(st.sampled_from(grid_shapes(comm.size)))
    size, block = st.integers(0, 40), st.integers(1, 12)
    with tree_registered(), ProcessGrid(comm, shape) as grid:
        check_summa(
            grid,
            (draw(size), draw(size), draw(size)),
            (draw(block), draw(block), draw(block), draw(block)),
            (draw(st.integers(0, shape[0] - 1)), draw(st.integers(0, shape[1] - 1))),
            draw(st.sampled_from(DTYPES)),
            orders="".join(draw(st.sampled_from("CF")) for _ in "ABC"),
            alpha=draw(st.sampled_from([1, -2, 0])),
            beta=draw(st.sampled_from([0, 1, 3])),
            lookahead=draw(st.integers(0, 3)),
            panel_width=draw(st.none() | st.integers(1, 40)),
            mover=draw(st.sampled_from(BY_MESSAGES)),
        )


# ------------------------------------------------------------------ how users call it
def test_operators_and_numpy_protocol(comm: Any) -> None:
    with ProcessGrid(comm) as grid:
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


def test_equal_but_distinct_grids(comm: Any) -> None:
    with ProcessGrid(comm) as one, ProcessGrid(comm) as two:
        A, B = DistMatrix.eye(12, grid=one, block=2), DistMatrix.random((12, 12), grid=two, block=5)
        assert (A @ B).allclose(DistMatrix.random((12, 12), grid=one, block=(2, 5)))


def test_c_is_made_where_none_is_given_and_beta_is_then_ignored(comm: Any) -> None:
    with ProcessGrid(comm) as grid:
        ones = DistMatrix.from_function(lambda i, j: 1.0, (6, 6), grid=grid)
        assert pdgemm(0.5, ones, ones, 9.0).allclose(3)


def test_nan_propagates_and_stays_in_its_rows(comm: Any) -> None:
    with ProcessGrid(comm) as grid:
        a, b = np.ones((9, 7)), np.ones((7, 5))
        a[4, 2] = np.nan
        C = DistMatrix.from_global(a, grid=grid, block=2) @ DistMatrix.from_global(b, grid=grid, block=2)
        c = C.allgather()
        assert np.isnan(c[4]).all()
        assert (np.delete(c, 4, axis=0) == 7).all()


def test_without_alpha_neither_a_nor_b_is_read_or_sent(comm: Any) -> None:
    with ProcessGrid(comm) as grid:
        nan = DistMatrix.from_function(lambda i, j: np.nan, (6, 6), grid=grid)
        C = pdgemm(0, nan, nan, 2.0, DistMatrix.from_function(lambda i, j: 1.5, (6, 6), grid=grid))
        assert C.allclose(3)
        assert C.report is not None
        assert C.report.counted == Traffic()


def test_progress_counts_the_panels(comm: Any) -> None:
    with ProcessGrid(comm) as grid:
        A, seen = DistMatrix.eye(40, grid=grid, block=3), []
        C = pdgemm(1, A, A, panel_width=4, progress=lambda done, total: seen.append((done, total)))
        assert C.report is not None
        assert seen == [(t, C.report.panels) for t in range(1, C.report.panels + 1)]


@pytest.mark.on_ranks(*USUAL)
def test_the_memory_limit_is_kept_down_to_the_smallest(comm: Any) -> None:
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            A, B = (DistMatrix.random((60, 60), grid=grid, block=7, seed=s) for s in (1, 2))
            a, b = A.allgather(), B.allgather()
            limit = 1 << 20
            while True:
                try:
                    C = pdgemm(1, A, B, memory_limit=limit)
                except MemoryLimitError as refused:
                    assert comm.size > 1
                    assert "bytes are needed" in str(refused)
                    break
                assert C.report is not None
                assert C.report.extra_bytes <= limit
                assert gemm_error(C.allgather(), 1, a, b) <= TOLERANCE
                if limit == 0:
                    break
                limit //= 4


def test_nothing_is_allocated_or_copied_that_need_not_be(comm: Any) -> None:
    """Where a matrix does not travel there is no buffer for it; on one rank there is none at all."""
    with ProcessGrid(comm, (1, comm.size)) as grid:
        for k in (12, 2000):  # thin panels are multiplied at once, wide ones in turn
            report = check_summa(grid, (12, 12, k), BLOCKS[0], (0, 0), "float64")
            assert report.extra_bytes == (k == 12 and comm.size > 1) * 8 * 12 * k  # nothing but A's panels as one
            report = check_summa(grid, (12, 12, k), BLOCKS[0], (0, 0), "float64", mover="ibcast")
            width, slots = (k, 1) if k == 12 else (report.panel_width, 2)
            assert report.extra_bytes == (comm.size > 1) * 8 * 12 * width * slots  # A's panels only: B stays


# ------------------------------------------------------------------ bad input
def test_bad_input_is_refused_on_all_ranks_alike(comm: Any) -> None:
    with ProcessGrid(comm) as grid:
        A, B = DistMatrix.zeros((6, 4), grid=grid), DistMatrix.zeros((4, 5), grid=grid)
        C = DistMatrix.zeros((6, 5), grid=grid)
        whole: Any = np.zeros((4, 5))
        frozen = C.copy()
        frozen.local.flags.writeable = False
        square = DistMatrix.zeros((4, 4), grid=grid)
        ints = DistMatrix.from_function(lambda i, j: 1, (4, 5), grid=grid, dtype=int)
        cases: list[tuple[type[PdgemmError], str, tuple[Any, ...], dict[str, Any]]] = [
            (LayoutError, r"inner dimensions.*op\(A\) is 6 x 4 .*op\(B\) is 6 x 4", (1, A, A), {}),
            (
                LayoutError,
                r"inner dimensions.*op\(A\) is 4 x 6 .*op\(B\) is 5 x 4",
                (1, A, B),
                {"transa": "T", "transb": "C"},
            ),
            (LayoutError, r"shape mismatch: C is 4 x 4, op\(A\) op\(B\) is", (1, A, B, 0, square), {}),
            (DTypeError, "complex128 times B float64.*cannot be stored in C float64", (1, A.astype("D"), B, 0, C), {}),
            (DTypeError, "cannot be stored in C int32", (1, A, B, 0, C.astype("i4")), {}),
            (DTypeError, "accumulate_dtype float16", (1, A, B), {"accumulate_dtype": "f2"}),
            (DTypeError, "int64; supported: float8_e4m3fn", (1, A, ints), {}),
            (ArgumentError, "transa is .*got 'X'", (1, A, B), {"transa": "X"}),
            (ArgumentError, "transb is .*got 1", (1, A, B), {"transb": 1}),
            (ArgumentError, "conjugate of another matrix", (1, A, B, 0, C.astype("D").T.H), {}),
            (DTypeError, "B must be a DistMatrix, got ndarray", (1, A, whole), {}),
            (DTypeError, "alpha must be a number, got str", ("1", A, B), {}),
            (DTypeError, "alpha must be a number, got ndarray", (whole, A, B), {}),
            (DTypeError, "beta = 1j is complex", (1, A, B, 1j, C), {}),
            (ArgumentError, "C is read-only", (1, A, B, 0, frozen), {}),
            (ArgumentError, "C shares memory with A", (1, square, square.copy(), 0, square), {}),
            (ArgumentError, "algorithm 'strassen'", (1, A, B), {"algorithm": "strassen"}),
            (ArgumentError, "mover 'pigeon'", (1, A, B), {"mover": "pigeon"}),
            (ArgumentError, "lookahead must be >= 0, got -1", (1, A, B), {"lookahead": -1}),
            (ArgumentError, "panel_width must be >= 1, got 0", (1, A, B), {"panel_width": 0}),
            (ArgumentError, "lookahead is a whole number, got 1.0", (1, A, B), {"lookahead": 1.0}),
            (ArgumentError, "memory_limit is a whole number, got '1G'", (1, A, B), {"memory_limit": "1G"}),
            (
                DTypeError,
                "int8, accumulated in int32, cannot be stored in C float64",
                (1, A.astype("i1"), B.astype("i1"), 0, C),
                {"accumulate_dtype": "i4"},
            ),
            (DTypeError, "alpha = nan is not an integer", (np.nan, A.astype("i1"), B.astype("i1")), {}),
        ]
        if comm.size > 1:
            part = comm.Split(comm.rank // (comm.size - 1), comm.rank)
            with ProcessGrid(part, (part.size, 1)) as smaller:
                elsewhere = DistMatrix.zeros((4, 5), grid=smaller)
                with pytest.raises(GridError, match="different ranks.*ranks="):
                    pdgemm(1, A, elsewhere)
            part.Free()
        for kind, message, arguments, options in cases:
            with pytest.raises(kind, match=message) as caught:
                pdgemm(*arguments, **options)
            assert len(set(comm.allgather(str(caught.value)))) == 1
        with pytest.raises(DTypeError):
            pdgemm(1, whole, B)


def test_ranks_that_disagree_all_hear_of_it(comm: Any) -> None:
    if comm.size == 1:
        return
    with ProcessGrid(comm) as grid:
        A = DistMatrix.zeros((6, 6), grid=grid)
        with pytest.raises(ArgumentError, match="rank 0: .*alpha=0"):
            pdgemm(comm.rank, A, A)
        with pytest.raises(ArgumentError, match="different arguments"):
            pdgemm(1, A, A, panel_width=comm.rank + 1)
        B = DistMatrix.zeros((5, 6), grid=grid)
        with pytest.raises(LayoutError, match=rf"inner dimensions.*\[rank 1 of {comm.size}\]"):
            pdgemm(1, A, B if comm.rank == 1 else A)


def test_a_callback_that_raises_harms_nobody(comm: Any, tree_mover: None) -> None:
    def boom(done: int, total: int) -> None:
        raise KeyError("mine")

    with ProcessGrid(comm) as grid:
        A = DistMatrix.random((40, 40), grid=grid, block=3)
        expected = A.allgather() @ A.allgather()
        for mover in BY_MESSAGES:
            with pytest.raises(KeyError):
                pdgemm(1, A, A, panel_width=4, lookahead=3, mover=mover, progress=boom)
            for algorithm in ("summa", "inner"):  # A or C moves after the last panel
                C = DistMatrix.zeros((40, 40), grid=grid, block=(5, 4))
                with pytest.raises(KeyError):
                    pdgemm(1, A, A, 0, C, algorithm=algorithm, progress=boom)
                assert np.allclose(C.allgather(), expected)
            on_one = boom if comm.rank == 0 else None
            C = DistMatrix.zeros((40, 40), grid=grid, block=3)
            with pytest.raises(KeyError):  # on all ranks
                pdgemm(1, A, A, 0, C, panel_width=4, lookahead=3, mover=mover, progress=on_one)
            assert np.allclose(C.allgather(), expected)


def test_a_callback_that_is_interrupted_leaves_no_messages(comm: Any) -> None:
    """On all ranks, with panels in flight that some ranks have still to forward: they would be of the next product."""

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
