"""Redistribution between all pairs of layouts, exact; words, messages and memory equal the formulas."""

from __future__ import annotations

import tracemalloc
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tiers import square_grid

from pdgemm import DistMatrix
from pdgemm.errors import ArgumentError, DTypeError, LayoutError, MemoryLimitError, PdgemmError
from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.index_map import IndexMap, index_maps, overlap_counts
from pdgemm.instrument.recorder import Traffic
from pdgemm.transport.block_copy import copy_blocks


@pytest.mark.mpi
def test_nothing_is_sent_within_one_layout(comm: Any, grids: list[Any]) -> None:
    for grid in grids:
        X = DistMatrix.random((50, 40), grid=grid, block=3)
        Y = X.redistribute(block=3, dtype="float32", alpha=2)
        assert Y.report.counted == Traffic()
        assert Y.allclose((2 * X).astype("float32"))
        assert Y.grid is grid


@pytest.mark.mpi
def test_the_memory_limit_is_kept_down_to_one_element(comm: Any, grids: list[Any]) -> None:
    X = DistMatrix.random((30, 20), grid=grids[0], block=4)
    assert not X.shared or X.redistribute(grid=grids[-1], block=3, memory_limit=0).report.extra_bytes == 0
    X = X.copy()  # not in shared memory: other ranks cannot read it
    for limit in (10**6, 2000, 64, 32):
        Y = X.redistribute(grid=grids[-1], block=3, memory_limit=limit)
        assert Y.report.extra_bytes <= limit
        assert np.array_equal(Y.allgather(), X.allgather())
    with pytest.raises(MemoryLimitError, match="memory limit 31 bytes.*at least 32"):
        X.redistribute(grid=grids[-1], block=3, memory_limit=31)


@pytest.mark.mpi
def test_bad_input_is_refused_on_all_ranks_alike(comm: Any, grid: Any) -> None:
    X, Y = DistMatrix.zeros((6, 4), grid=grid), DistMatrix.zeros((6, 4), grid=grid, dtype="complex64")
    frozen = X.copy()
    frozen.local.flags.writeable = False
    whole: Any = np.zeros((6, 4))
    cases: list[tuple[type[PdgemmError], str, Any, dict[str, Any]]] = [
        (LayoutError, "shapes differ: X is 6 x 4.*out is 4 x 6", Y.T, {}),
        (ArgumentError, "conjugate", Y.H.T, {}),
        (ArgumentError, "out is read-only", frozen, {}),
        (ArgumentError, "out shares memory with X", X[1:, :], {}),
        (DTypeError, "out must be a DistMatrix, got ndarray", whole, {}),
        (DTypeError, "alpha = 1j is complex", X.copy(), {"alpha": 1j}),
        (DTypeError, "beta must be a number", X.copy(), {"beta": "x"}),
        (DTypeError, "alpha = 0.5 is not an integer", None, {"alpha": 0.5, "dtype": "int32"}),
        (DTypeError, "float64 elements cannot become int32", None, {"dtype": "int32"}),
        (ArgumentError, "order 'K'", None, {"order": "K"}),
        (ArgumentError, "beta = 3 requires out", None, {"beta": 3}),
        (ArgumentError, "but out was given", X.copy(), {"block": 3}),
        (ArgumentError, "but out was given", X.copy(), {"dtype": "float32"}),
        (ArgumentError, "memory_limit is a whole number, got '1G'", None, {"memory_limit": "1G"}),
        (LayoutError, "block size", None, {"block": -1}),
    ]
    for kind, message, out, options in cases:
        given = X.astype("int8") if options.get("alpha") == 0.5 else X[:5, :] if "shares" in message else X
        with pytest.raises(kind, match=message) as caught:
            given.redistribute(out, **options)
        assert len(set(comm.allgather(str(caught.value)))) == 1
    with pytest.raises(DTypeError, match="complex64 elements cannot become float64"):
        Y.redistribute(X)


@pytest.mark.mpi
def test_overflow_is_infinity_on_all_ranks(comm: Any, grids: list[Any]) -> None:
    """Overflow on one rank is no error in an exchange, even if warnings and floating-point errors raise."""
    X = DistMatrix.from_function(lambda i, j: np.where((i == 0) & (j == 0), 1e6, 1.0), (20, 20), grid=grids[0])
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        Y = X.redistribute(grid=grids[-1], dtype="float16", block=3)
    assert np.isinf(Y.allgather()).sum() == 1


@pytest.mark.mpi
def test_integers_are_numbers_modulo_two_to_the_32(comm: Any, grids: list[Any]) -> None:
    x = np.arange(400, dtype="int32").reshape(20, 20)
    Y = DistMatrix.from_global(x, grid=grids[0], block=3).redistribute(grid=grids[-1], alpha=3_000_000_000)
    assert np.array_equal(Y.allgather(), (x.astype(np.int64) * 3_000_000_000).astype(np.int32))


@pytest.mark.mpi
@square_grid
def test_redistribution_in_place_if_no_element_moves(comm: Any, grids: list[Any]) -> None:
    x = np.arange(400).reshape(20, 20) * (1 + 1j)
    for grid in grids:
        X = DistMatrix.from_global(x, grid=grid, block=3)
        X.redistribute(X, alpha=2)
        assert np.array_equal(X.allgather(), 2 * x)
        X[3:9, 2:] = X[3:9, 2:].H.T
        expected = 2 * x
        expected[3:9, 2:] = expected[3:9, 2:].conj()
        assert np.array_equal(X.allgather(), expected)


# ------------------------------------------------------------------ arithmetic, in one process
dimensions = st.builds(
    lambda n, block, parts, source, first: (n, block, parts, source % parts, block - (first or block)),
    st.integers(0, 200), st.integers(1, 30), st.integers(1, 4), st.integers(0, 3), st.integers(0, 60),
)  # fmt: skip


@given(dimensions, dimensions)
def test_index_maps_name_every_index_once(one: tuple[int, ...], two: tuple[int, ...]) -> None:
    a, b = BlockCyclic(*one), BlockCyclic(one[0], *two[1:])
    shared = overlap_counts(a, b)
    seen = 0
    for i in range(a.parts):
        for j, index_map in index_maps(a, b, i):
            source, target = index_map.indices()
            assert a.to_global(source, i).tolist() == b.to_global(target, j).tolist()
            assert index_map.size == shared[i, j] == len(source)
            seen += index_map.size
            back = dict(index_maps(a, b, j, by_target=True))[i]
            assert [x.tolist() for x in back.indices()] == [source.tolist(), target.tolist()]
            assert index_map.pack().indices()[0].tolist() == source.tolist()
            assert index_map.unpack().indices()[1].tolist() == target.tolist()
    assert seen == a.n == shared.sum()


@given(dimensions, dimensions, st.data())
def test_pieces_and_strided_runs_are_the_whole(one: tuple[int, ...], two: tuple[int, ...], data: st.DataObject) -> None:
    a, b = BlockCyclic(*one), BlockCyclic(one[0], *two[1:])
    for i in range(a.parts):
        for _, index_map in index_maps(a, b, i):
            size = index_map.size
            step = data.draw(st.integers(1, size))
            pieces = [index_map.cut(lo, min(size, lo + step)) for lo in range(0, size, step)]
            for side in (0, 1):
                whole = index_map.indices()[side].tolist()
                assert [at for x in pieces for at in x.indices()[side].tolist()] == whole
            for piece in (index_map, *pieces):
                found = sorted(
                    (s.source + k * s.source_stride + at, s.target + k * s.target_stride + at)
                    for s in piece.strided_runs
                    for k in range(s.repeats)
                    for at in range(s.length)
                )
                assert not found or found == sorted(zip(*(x.tolist() for x in piece.indices())))


@given(dimensions, dimensions, st.sampled_from("CF"), st.sampled_from("CF"))
def test_blocks_are_copied_where_they_belong(
    one: tuple[int, ...], two: tuple[int, ...], order: Any, other_order: Any
) -> None:
    rows, cols = BlockCyclic(*one), BlockCyclic(*two)
    whole_rows, whole_cols = BlockCyclic.even(rows.n, 1), BlockCyclic.even(cols.n, 1)
    x = np.asarray(np.arange(1.0, 1 + rows.n * cols.n).reshape(rows.n, cols.n), order=order)
    for i, r in index_maps(whole_rows, rows, 0):
        for j, c in index_maps(whole_cols, cols, 0):
            expected = x[np.ix_(rows.indices(i), cols.indices(j))]
            part = np.zeros(expected.shape, order=other_order)
            copy_blocks(x, part, r, c)
            assert np.array_equal(part, expected)
            back = np.zeros_like(x)
            copy_blocks(part, back, IndexMap(r.target, r.source, r.lengths), IndexMap(c.target, c.source, c.lengths))
            assert back.sum() == expected.sum()
            assert np.array_equal(back[np.ix_(rows.indices(i), cols.indices(j))], expected)


def test_many_runs_are_one_entry_and_no_objects() -> None:
    """From blocks of 1 to one block: runs are stored in a few arrays of 8 bytes per run, not as Python objects."""
    runs = 100_000
    one, whole = BlockCyclic(2 * runs, 1, 2), BlockCyclic.even(2 * runs, 1)
    ((_, index_map),) = index_maps(one, whole, 1)
    tracemalloc.start()
    assert index_map.strided_runs == [(0, 1, 1, 2, runs, 1)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 * 8 * runs
