"""Rows are sent to the owners of their groups, multiplied and sent back; each row is compared with NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from mpi4py import MPI
from problems import grid_shapes, op
from tiers import every_grid, examples, in_turn

from pdgemm import Batch, DistMatrix, Epilogue, ProcessGrid, matmul_batched, matmul_grouped, plan_grouped
from pdgemm.errors import ArgumentError, DTypeError, GridError, LayoutError, PdgemmError
from pdgemm.local.arrays import dtypes

pytestmark = pytest.mark.mpi

TYPES = [  # (types of X, of W, of Y, of sums)
    ("float64", "float64", None, None),
    ("float32", "float32", "float32", None),
    ("complex64", "complex64", "complex128", None),
    ("bfloat16", "bfloat16", "float32", None),
    ("float16", "float16", None, "float32"),
    ("int8", "int8", "int32", None),
]


def drawn(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    dtype = np.dtype(dtype)
    if dtype.kind == "i":
        return rng.integers(-128, 128, shape).astype(dtype)
    x = rng.standard_normal(shape)
    return (x + 1j * rng.standard_normal(shape)).astype(dtype) if dtype.kind == "c" else x.astype(dtype)


def weights(comm: Any, rng: np.random.Generator, shapes: list[tuple[int, int]], dtype: Any) -> tuple[Any, Any]:
    """Return a batch with a matrix for each group, on random ranks, and the list of these matrices."""
    whole = [drawn(rng, shape, dtype) for shape in shapes]
    owner = rng.integers(0, comm.size, len(shapes))
    return Batch.from_global(whole or np.zeros((0, 0, 0), dtype), comm, owner), whole


def held(X: Any, groups: np.ndarray) -> np.ndarray:
    return groups[X.indices()[0]]


def check_rows(
    x: np.ndarray, w: list[np.ndarray], groups: np.ndarray, y0: np.ndarray, y: np.ndarray, alpha: Any, beta: Any,
    accumulate: Any = None,
) -> None:  # fmt: skip
    """Check |y - y^| <= (d + 4) eps (|alpha| |x| |w| + |beta| |y0|) + 2 eps(Y) (|alpha x w| + |beta y0| + |y^|).

    Higham 2002, 3.5; for complex numbers times 2 sqrt 2.  The product and the sum are each rounded to the type of Y.
    """
    flat, wide = groups.ravel(), "D" if y.dtype.kind == "c" else np.int64 if y.dtype.kind == "i" else "d"
    assert y.shape == (len(flat), y0.shape[1])
    source = x if len(x) == len(flat) else np.repeat(x, groups.size // max(1, len(groups)), axis=0)
    product, size = np.zeros((2, *y.shape), wide)
    for g, each in enumerate(w):
        rows = flat == g
        product[rows] = alpha * (source[rows].astype(wide) @ each.astype(wide))
        size[rows] = abs(alpha) * (abs(source[rows].astype(wide)) @ abs(each.astype(wide)))
    old = beta * y0.astype(wide) if beta else np.zeros(y.shape, wide)
    if y.dtype.kind == "i":
        assert np.array_equal(y, (product + old).astype(y.dtype))
        return
    eps = dtypes.eps(accumulate or dtypes.arithmetic(x.dtype, y.dtype))
    factor = 2 * np.sqrt(2) if wide == "D" else 1
    bound = (x.shape[1] + 4) * eps * (size + abs(old))
    bound = factor * (bound + 2 * dtypes.eps(y.dtype) * (abs(product) + abs(old) + abs(product + old)))
    assert (abs(y.astype(wide) - product - old) <= bound).all()


def words_of(X: Any, rows: np.ndarray, groups: np.ndarray, owner: np.ndarray) -> int:
    """Return the number of elements of these rows of X that are not on the rank that owns their group."""
    layout = X.layout_in(X.grid)
    i, j = layout.distribution.owner(*np.ix_(rows, np.arange(X.shape[1])))
    ranks = np.array(layout.rank_map)[i * layout.distribution.cols.parts + j]
    return int((ranks != owner[groups][:, None]).sum())


# ------------------------------------------------------------------ products
@every_grid
def test_forward_and_backward_of_a_layer_reuse_the_routing(comm: Any, grids: list[Any]) -> None:
    rng = np.random.default_rng(1)
    m, d, n, number = 30, 7, 4, 2 * comm.size + 1
    x, g = rng.standard_normal((m, d)), rng.integers(-1, number, (m, 2))
    for grid, block in in_turn(grids, [None, (3, 2), 4]):
        X = DistMatrix.from_global(x, grid=grid, block=block)
        W, w = weights(comm, rng, [(d, n)] * number, "d")
        routing, of_row = plan_grouped(X, held(X, g), W), g.ravel()
        dy = rng.standard_normal((2 * m, n))
        dY = DistMatrix.from_global(dy)
        rows, gradients = routing.to_groups(X), routing.to_groups(dY)
        dW = matmul_batched(rows, gradients, transa="T")
        dX = matmul_grouped(dY, W, routing, transb="T")
        assert rows.report.as_predicted and dX.report.as_predicted  # type: ignore[attr-defined]
        chosen = np.flatnonzero(of_row >= 0)
        assert comm.allreduce(rows.report.counted.words_received) == words_of(  # type: ignore[attr-defined]
            X, chosen // 2, of_row[chosen], W.owner
        )
        for group, own, its_rows in zip(np.flatnonzero(W.owner == comm.rank), dW.items, rows.items, strict=True):
            mine = np.flatnonzero(of_row == group)
            assert np.array_equal(its_rows, x[mine // 2])
            assert np.allclose(own, x[mine // 2].T @ dy[mine], atol=1e-13)
        check_rows(dy, [each.T for each in w], of_row[:, None], np.zeros((2 * m, d)), dX.allgather(), 1, 0)
        again = routing.to_rows(rows, DistMatrix.from_global(np.ones((2 * m, d))), beta=2)
        expected = np.where(of_row[:, None] >= 0, np.repeat(x, 2, axis=0), 0)
        assert np.array_equal(again.allgather(), expected + 2) and again.report.as_predicted
        new = routing.to_rows(rows)
        assert np.array_equal(new.allgather(), expected)
        X_rows = X.distribution.rows
        owners, there = X_rows.owner(np.arange(m)), new.distribution.rows.owner(np.arange(2 * m))
        assert np.array_equal(there, np.repeat(owners, 2))


def test_rows_sorted_by_group_are_sent_back_to_their_places(comm: Any) -> None:
    """Rows that are sorted by group: both directions keep their order, but by different plans."""
    x = np.random.default_rng(5).standard_normal((6 * comm.size, 4))
    for groups in (np.zeros(len(x), int), np.arange(len(x)) // 6):
        for block in (None, 6):
            X = DistMatrix.from_global(x, block=block)
            routing = plan_grouped(X, held(X, groups), range(comm.size))
            for _ in range(2):
                assert np.array_equal(routing.to_rows(routing.to_groups(X), X * np.nan).allgather(), x)


def test_the_result_may_be_the_matrix_itself(comm: Any) -> None:
    rng = np.random.default_rng(4)
    for x, order in in_turn([rng.standard_normal((17, 6)), rng.standard_normal((40, 6))], ["C", "F"]):
        X = DistMatrix.from_global(x, block=2, order=order)  # type: ignore[arg-type]
        W, w = weights(comm, rng, [(6, 6)] * 3, "d")
        groups = rng.integers(-1, 3, len(x))
        assert matmul_grouped(X, W, held(X, groups), X, beta=1) is X
        check_rows(x, w, groups[:, None], x, X.allgather(), 1, 1)


size = st.integers(0, 12)


@every_grid
@settings(max_examples=examples(60))
@given(data=st.data())
def test_any_grouped_product(comm: Any, data: st.DataObject) -> None:
    draw = data.draw
    m, d, n, number, choices = draw(st.integers(0, 25)), draw(size), draw(size), draw(size), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    kinds, trans = draw(st.sampled_from(TYPES)), draw(st.sampled_from("NTC"))
    alpha, beta = draw(st.sampled_from([1, 2, -3, 0])), draw(st.sampled_from([0, 1, 2]))
    groups = rng.integers(-1, number, (m, choices)) if draw(st.booleans()) else np.full((m, choices), number - 1)
    if draw(st.booleans()):  # groups without rows
        groups[groups % 3 == 1] = -1
    block = st.none() | st.tuples(st.integers(1, 5), st.integers(1, 5))
    with ProcessGrid(comm, draw(st.sampled_from(grid_shapes(comm.size)))) as grid, ProcessGrid(comm) as other:
        x = drawn(rng, (m, d), kinds[0])
        views = {"whole": np.s_[:, :], "part": np.s_[2 : m + 2, 1 : d + 1], "transposed": np.s_[:, :]}
        view = draw(st.sampled_from([*views]))
        whole = x.T if view == "transposed" else np.pad(x, ((2, 1), (1, 3))) if view == "part" else x
        X = DistMatrix.from_global(whole, grid=grid, block=draw(block), order=draw(st.sampled_from("CF")))
        X = (X.T if view == "transposed" else X)[views[view]]
        W, w = weights(comm, rng, [(d, n) if trans == "N" else (n, d)] * number, kinds[1])
        y0 = drawn(rng, (m * choices, n), kinds[0] if kinds[2] is None else kinds[2])
        if beta == 0 and y0.dtype.kind != "i":
            y0[:] = np.nan
        Y = DistMatrix.from_global(y0, grid=other, block=draw(block))
        options: Any = {"alpha": alpha, "beta": beta, "transb": trans, "accumulate_dtype": kinds[3]}
        routing = plan_grouped(X, held(X, groups if choices > 1 else groups[:, 0]), W)
        assert routing.sizes.tolist() == np.bincount(groups[groups >= 0], minlength=number).tolist()
        assert matmul_grouped(X, W, routing, Y, **options) is Y
        check_rows(x, [op(each, trans) for each in w], groups, y0, Y.allgather(), alpha, beta, kinds[3])
        assert np.array_equal(X.allgather(), x)
        report, flat, chosen = Y.report, groups.ravel(), np.flatnonzero(groups.ravel() >= 0)
        assert report.as_predicted and report.rows == len(chosen) and report.groups == number
        moved = words_of(X, chosen // choices, flat[chosen], W.owner) + words_of(Y, chosen, flat[chosen], W.owner)
        assert comm.allreduce(report.counted.words_received) == moved
        assert str(report).endswith("times the mean work")
        each, sizes = (8 if Y.dtype.kind == "c" else 2) * d * n * (alpha != 0), routing.sizes
        load = each * np.bincount(W.owner, sizes, comm.size) if number else np.zeros(comm.size)
        assert (report.flops, report.local_flops) == (load.sum(), load[comm.rank])
        if load.any():
            assert report.imbalance == pytest.approx(load.max() / load.mean())


# ------------------------------------------------------------------ bad input
def test_bad_input_is_refused_on_all_ranks_alike(comm: Any) -> None:
    with ProcessGrid(comm, (1, comm.size)) as wide, ProcessGrid(comm, (comm.size, 1)) as grid:
        m, last = 4 * comm.size, comm.size - 1
        X, Y = (DistMatrix.from_global(np.ones((m, k)), grid=grid) for k in (3, 2))
        count = comm.size + 1
        W = Batch.from_global(np.ones((count, 3, 2)), comm)
        odd = Batch.from_global([np.ones((3, 2 + (g == 2))) for g in range(3)], comm)
        g = np.zeros(4, int)
        routing = plan_grouped(X, g, W)
        fewer = Batch.from_global(np.ones((1, 3, 2)), comm)
        flags = Batch.from_global(np.ones((count, 3, 2), bool), comm)
        moved = Batch.from_global(np.ones((count, 3, 2)), comm, [last] * count)
        twice = [DistMatrix.from_global(np.ones((2 * m, k)), grid=grid) for k in (3, 2)]
        whole = DistMatrix.from_global(np.ones((m, 3)), grid=wide)
        frozen = DistMatrix.from_global(np.ones((m, 2)), grid=grid)
        frozen.local.flags.writeable = False
        bad = g + (np.arange(4) == 2) * (comm.rank == last) * count  # on one rank only
        few = g[: 4 - (comm.rank == 0)]
        cases: list[tuple[type[PdgemmError], str, Any]] = [
            (ArgumentError, rf"must be 0 to {count - 1}.*rank {last}.*got {count}", lambda: plan_grouped(X, bad, W)),
            (ArgumentError, f"groups must be 0 to {count - 1}", lambda: matmul_grouped(X, W, bad, Y)),
            (ArgumentError, r"-1 for none.*got -2", lambda: plan_grouped(X, g - 2, W)),
            (LayoutError, r"groups must have shape \(4,\) or \(4, k\)", lambda: plan_grouped(X, few, W)),
            (LayoutError, r"got \(4, 0\)", lambda: plan_grouped(X, g.reshape(4, 1)[:, :0], W)),
            (DTypeError, "groups must be integers.*float64", lambda: plan_grouped(X, g * 1.0, W)),
            (LayoutError, "owner must be a list of ranks", lambda: plan_grouped(X, g, [comm.size])),
            (LayoutError, "owner must be a list .*None", lambda: plan_grouped(X, g, None)),  # type: ignore[arg-type]
            (LayoutError, rf"Y needs {m} rows", lambda: routing.to_rows(routing.to_groups(X), twice[0])),
            (DTypeError, "X must be a DistMatrix", lambda: matmul_grouped(np.ones((4, 3)), W, g)),  # type: ignore[arg-type]
            (DTypeError, "W must be a Batch, got ndarray", lambda: matmul_grouped(X, np.ones((2, 3, 2)), g)),  # type: ignore[arg-type]
            (DTypeError, "X has dtype bool", lambda: matmul_grouped(X.astype(bool), W, g)),
            (DTypeError, "W has dtype bool", lambda: matmul_grouped(X, flags, g)),
            (DTypeError, "Y has dtype int8", lambda: matmul_grouped(X, W, g, Y.astype("i1"))),
            (DTypeError, "complex128.*cannot be stored", lambda: matmul_grouped(X.astype("D"), W, g, Y)),
            (DTypeError, "beta = 1j is complex", lambda: matmul_grouped(X, W, g, Y, beta=1j)),
            (DTypeError, "alpha must be a number", lambda: matmul_grouped(X, W, g, Y, alpha="1")),  # type: ignore[arg-type]
            (DTypeError, "accumulate_dtype", lambda: matmul_grouped(X, W, g, accumulate_dtype="float16")),
            (ArgumentError, "transb is", lambda: matmul_grouped(X, W, g, transb="X")),  # type: ignore[arg-type]
            (LayoutError, r"op\(W\) of group 0 is 2 x 3, not 3 x 3: X is", lambda: matmul_grouped(X, W, g, transb="T")),
            (LayoutError, r"op\(W\) of group 2 is 3 x 3", lambda: matmul_grouped(X, odd, g)),
            (LayoutError, rf"Y is {m} x 3 .* but the result is {m} x 2", lambda: matmul_grouped(X, W, g, X)),
            (LayoutError, rf"Y is {2 * m} x 2 .* but the result is {m} x 2", lambda: matmul_grouped(X, W, g, twice[1])),
            (LayoutError, rf"X needs {m} rows, got", lambda: matmul_grouped(twice[0], W, routing)),
            (ArgumentError, "Y is read-only", lambda: matmul_grouped(X, W, g, frozen)),
            (LayoutError, "have other owners", lambda: matmul_grouped(X, fewer, routing)),
            (DTypeError, "batch must be a Batch, got NoneType", lambda: routing.to_rows(None)),  # type: ignore[arg-type]
            (LayoutError, "do not match the groups", lambda: routing.to_rows(W)),
            (LayoutError, "the rows of groups have 3 elements", lambda: routing.to_rows(routing.to_groups(X), Y)),
            (LayoutError, "X needs .* rows", lambda: routing.to_groups(twice[0])),
        ]  # fmt: skip
        if comm.size > 1:
            alone = Batch.from_global(np.ones((2, 3, 2)), MPI.COMM_SELF)
            differ = np.full(m, comm.rank)
            cases += [
                (GridError, "over different ranks", lambda: matmul_grouped(X, alone, g)),
                (LayoutError, "have other owners", lambda: matmul_grouped(X, moved, routing)),
                (ArgumentError, "same rows have passed different groups", lambda: plan_grouped(whole, differ, W)),
                (ArgumentError, "different arguments", lambda: matmul_grouped(X, W, routing, Y, alpha=comm.rank)),
                (ArgumentError, "different arguments", lambda: matmul_grouped(X, W, routing, Y, beta=comm.rank)),
                (ArgumentError, "different arguments", lambda: plan_grouped(X, g, [comm.rank] * 3)),
                (ArgumentError, "different arguments", lambda: plan_grouped(X, np.zeros((4, 1 + comm.rank), int), W)),
            ]
        before = Y.local.copy()
        for kind, message, call in cases:
            with pytest.raises(kind, match=message) as caught:
                call()
            assert len(set(comm.allgather(str(caught.value)))) == 1
            assert np.array_equal(Y.local, before)
        with pytest.raises(TypeError, match="cannot be pickled"):
            routing.__reduce__()
        matmul_batched(routing.to_groups(X), W)  # after the errors, ranks can still communicate


def test_an_epilogue_with_a_bias_for_each_group(comm: Any) -> None:
    """Also if Y is narrower than its sums; rows without a group are 0, and Y's old values are not read."""
    rng = np.random.default_rng(3)
    x, groups = drawn(rng, (29, 7), "float32"), rng.integers(-1, 4, 29)
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            W, w = weights(comm, np.random.default_rng(4), [(7, 5)] * 4, "float32")
            b = drawn(np.random.default_rng(5), (4, 1, 5), "float32")
            X, bias = DistMatrix.from_global(x, grid=grid, block=3), Batch.from_global(b, comm, W.owner)
            for dtype, unit in (("float32", 1e-6), ("float16", 1e-3)):
                Y = DistMatrix.from_global(np.full((29, 5), np.nan, dtype), grid=grid, block=2)
                matmul_grouped(X, W, held(X, groups), Y, epilogue=Epilogue(bias=bias, activation="relu", scale=0.5))
                product = [0.5 * x[i] @ w[g] + b[g, 0] if g >= 0 else np.zeros(5) for i, g in enumerate(groups)]
                assert np.allclose(Y.allgather(), np.maximum(product, 0), rtol=unit, atol=10 * unit)
                assert Y.report.as_predicted
            with pytest.raises(ArgumentError, match="beta = 1: a grouped product with an epilogue overwrites Y"):
                matmul_grouped(X, W, held(X, groups), Y, beta=1, epilogue=Epilogue(activation="relu"))
