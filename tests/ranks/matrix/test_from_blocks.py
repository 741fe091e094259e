"""Matrices from blocks of any sizes on all ranks, and requested parts of a matrix for each rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from drawn_problems import draw_side
from hypothesis import HealthCheck, given, settings, strategies as st
from problems import grid_shapes
from tiers import every_grid, examples, in_turn

from pdgemm import DistMatrix, ProcessGrid
from pdgemm.algorithms.blocks import reported_blocks
from pdgemm.errors import ArgumentError, DTypeError, LayoutError, PdgemmError
from pdgemm.schedules.exchanges import rectangle_exchange
from pdgemm.support import launcher

pytestmark = pytest.mark.mpi

RANKS = launcher.launched_size()
CASES = examples(45 if RANKS <= 2 else 24 if RANKS <= 4 else 12)
TYPES = ["bool", "int8", "int64", "bfloat16", "float32", "float64", "complex128"]
Ends = tuple[int, int]


def cuts(draw: Any, rows: Ends, cols: Ends, depth: int) -> Iterator[tuple[Ends, Ends]]:
    """Yield partitions of a matrix into rectangles, of which some are empty."""
    if depth == 0 or draw(st.integers(0, 3)) == 0:
        yield rows, cols
    elif draw(st.booleans()):
        at = draw(st.integers(*rows))
        for part in ((rows[0], at), (at, rows[1])):
            yield from cuts(draw, part, cols, depth - 1)
    else:
        at = draw(st.integers(*cols))
        for part in ((cols[0], at), (at, cols[1])):
            yield from cuts(draw, rows, part, depth - 1)


def in_memory(draw: Any, x: np.ndarray) -> np.ndarray:
    """Return a copy of a block: row-major, column-major, a part of another array, reversed, or read-only."""
    way = draw(st.sampled_from(["C", "F", "strided", "backwards", "read-only"]))
    if way == "strided":
        room = np.zeros((2 * x.shape[0] + 1, 3 * x.shape[1] + 1), x.dtype)
        room[: 2 * x.shape[0] : 2, : 3 * x.shape[1] : 3] = x
        return room[: 2 * x.shape[0] : 2, : 3 * x.shape[1] : 3]
    if way == "backwards":
        return x[::-1, ::-1].copy()[::-1, ::-1]
    x = x.copy(order="F" if way == "F" else "C")
    x.flags.writeable = way != "read-only"
    return x


@every_grid
@settings(max_examples=CASES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_partition_into_rectangles(comm: Any, grids: list[Any], data: st.DataObject) -> None:
    draw = data.draw
    m, n = draw(st.integers(0, 40)), draw(st.integers(0, 40))
    dtype = np.dtype(draw(st.sampled_from(TYPES)))
    whole = np.random.default_rng(m * n).integers(0, 100, (m, n)).astype(dtype)
    owned: list[list[Any]] = [[] for _ in range(comm.size)]
    for rectangle in cuts(draw, (0, m), (0, n), 5):
        owned[draw(st.integers(0, comm.size - 1))].append(rectangle)
    grid = draw(st.sampled_from(grids))
    block = draw(st.none() | st.tuples(st.integers(1, 9), st.integers(1, 9)))
    source = tuple(draw(st.integers(0, parts - 1)) for parts in grid.shape)
    order = draw(st.sampled_from("CF"))
    blocks = [[in_memory(draw, whole[slice(*rows), slice(*cols)]) for rows, cols in held] for held in owned]
    mine, places = blocks[comm.rank], owned[comm.rank]
    before = [x.copy() for x in mine]
    A = DistMatrix.from_blocks(
        mine, grid=grid, rows=[rows for rows, _ in places], cols=[slice(*cols) for _, cols in places],
        shape=(m, n), block=block, source=source, order=order,
    )  # fmt: skip
    assert (A.shape, A.dtype, A.order) == ((m, n), dtype if m * n else A.dtype, order)
    assert A.distribution.source == source
    rows, cols = A.indices()
    assert np.array_equal(A.local, whole[np.ix_(rows, cols)].astype(A.dtype))
    assert all(np.array_equal(x, y) for x, y in zip(mine, before))
    report = A.report
    assert report.counted == report.predicted
    assert report.extra_bytes == report.predicted_extra_bytes
    # only elements whose rank changes are sent, once
    had = np.zeros((m, n), bool)
    for down, across in places:
        had[slice(*down), slice(*across)] = True
    has = np.zeros((m, n), bool)
    has[np.ix_(rows, cols)] = True
    assert report.counted.words_received == (has & ~had).sum()
    assert report.counted.words_sent == (had & ~has).sum()
    assert report.counted.words_read == 0


@every_grid
@settings(max_examples=CASES, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_each_rank_gets_the_requested_parts(comm: Any, grids: list[Any], data: st.DataObject) -> None:
    """Parts may overlap, on one rank and among ranks, may be empty, and may be of views."""
    draw = data.draw
    m, n = draw(st.integers(0, 20)), draw(st.integers(0, 20))
    A = draw_side(draw, grids, (m, n), TYPES[1:], "NTC", 1)

    def ends(size: int) -> list[int]:
        return sorted((draw(st.integers(0, size)), draw(st.integers(0, size))))

    asked = [[(ends(m), ends(n)) for _ in range(draw(st.integers(0, 3)))] for _ in range(comm.size)]
    mine = asked[comm.rank]
    blocks, report = reported_blocks(A.view, [rows for rows, _ in mine], [cols for _, cols in mine])
    expected = [A.values()[slice(*rows), slice(*cols)] for rows, cols in mine]
    assert len(blocks) == len(mine)
    for x, y in zip(blocks, expected):
        assert (x.shape, x.dtype) == (y.shape, A.view.dtype)
        assert np.array_equal(x, y)
        assert x.flags.c_contiguous
    assert report.counted == report.predicted
    assert report.extra_bytes == report.predicted_extra_bytes
    had = np.zeros((m, n), bool)
    had[np.ix_(*A.view.indices())] = True
    assert report.counted.words_received == sum((~had[slice(*rows), slice(*cols)]).sum() for rows, cols in mine)
    others = [x for rank, held in enumerate(asked) for x in held if rank != comm.rank]
    assert report.counted.words_sent == sum(had[slice(*rows), slice(*cols)].sum() for rows, cols in others)


def test_rows_of_the_ranks_one_after_the_other(comm: Any) -> None:
    """As in programs with mpi4py, rank r has r + 3 rows of all columns, or none."""
    for shape, none_on in in_turn(grid_shapes(comm.size), (comm.size, 0, comm.size - 1)):
        counts = [0 if rank == none_on else rank + 3 for rank in range(comm.size)]
        start, total = sum(counts[: comm.rank]), sum(counts)
        whole = np.random.default_rng(2).standard_normal((total, 5))
        mine = whole[start : start + counts[comm.rank]]
        with ProcessGrid(comm, shape) as grid:
            made = [
                DistMatrix.from_blocks(mine, grid=grid, axis=0, block=2),
                DistMatrix.from_blocks(mine.T, grid=grid, axis=1, block=2).T,
                DistMatrix.from_blocks([mine[:1], mine[1:]], grid=grid, axis=0),
                DistMatrix.from_blocks(mine if len(mine) or comm.size == 1 else None, grid=grid, axis=0),
                DistMatrix.from_blocks(mine, grid=grid, rows=(start, start + len(mine))),
                DistMatrix.from_blocks(mine, grid=grid, rows=slice(start, None), cols=range(5)),
                DistMatrix.from_blocks(mine.T, grid=grid, cols=(start, start + len(mine))).T,
            ]
            rows, A = slice(start, start + len(mine)), made[0]
            for other in made:
                assert np.array_equal(other.to_blocks(rows=rows), mine)
            assert np.array_equal(A.to_blocks(), whole)
            assert np.array_equal(A.to_blocks(rows=rows, cols=slice(-2, None)), mine[:, -2:])
            assert [x.tolist() for x in A.to_blocks(rows=[rows, (0, 0)])] == [mine.tolist(), []]
            assert A.to_blocks((0, 0)).shape == (0, 5)
            narrow, total = np.zeros((comm.rank + 1, 0)), comm.size * (comm.size + 1) // 2  # blocks without elements
            assert DistMatrix.from_blocks(narrow, grid=grid, axis=0).shape == (total, 0)
            assert DistMatrix.from_blocks(narrow.T, grid=grid, axis=1).shape == (0, total)
            wider = narrow if comm.rank else np.zeros((2, 3))
            assert DistMatrix.from_blocks(wider, grid=grid, axis=0).shape == (2, 3)


def test_messages_of_many_tiles(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small blocks, and blocks larger than the largest message, here 7 elements."""
    monkeypatch.setattr(rectangle_exchange, "PACKED_BYTES", 56)
    whole = np.random.default_rng(3).standard_normal((31, 23))
    edges = np.linspace(0, 31, comm.size + 1).astype(int).tolist()
    place = edges[-2 - comm.rank], edges[-1 - comm.rank]  # the last rank has the first rows
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            A = DistMatrix.from_blocks(whole[slice(*place)], grid=grid, rows=place, block=(4, 3))
            assert np.array_equal(A.allgather(), whole)
            block, report = reported_blocks(A, rows=place)
            assert np.array_equal(block, whole[slice(*place)])
            for x in (report, A.report):
                assert x.counted == x.predicted
                assert x.counted.messages_sent >= x.counted.words_sent / 7


def test_bad_blocks_raise_on_all_ranks(comm: Any) -> None:
    last = comm.size - 1
    start, stop = 2 * comm.rank, 2 * comm.rank + 2
    m = 2 * comm.size
    x = np.ones((2, 3))
    mine = {"rows": (start, stop)}
    if comm.rank == last:
        mine = {"rows": (start + 1, stop + 1)}
    cases: list[tuple[type[PdgemmError], str, Any, dict[str, Any]]] = [
        (LayoutError, f"no rank has rows {m - 2}:{m - 1}, columns 0:3 of the {m + 1} x 3 matrix", x, mine),
        (LayoutError, f"no rank has rows 0:2, columns 3:4 of the {m} x 4", x, {"rows": (start, stop), "shape": (m, 4)}),
        (LayoutError, "no rank has rows 0:2, columns 0:1", x, {"rows": (start, stop), "cols": (1, 4)}),
        (LayoutError, f"rows {m - 2}:{m}, columns 0:3 of rank {last} are not within the {m - 1} x 3", x,
         {"rows": (start, stop), "shape": (m - 1, 3)}),
        (LayoutError, "two blocks overlap: rows 0:2, columns 0:3 of rank 0 and rows 0:2, columns 2:5 of rank 0",
         [x, x], {"rows": (start, stop), "cols": [(0, 3), (2, 5)]}),
        (LayoutError, r"rows 0:3, columns 0:3 are 3 x 3 elements, the block is of shape \(2, 3\)", x, {"rows": (0, 3)}),
        (LayoutError, r"a block has two dimensions, got an array of shape \(2,\)", x[:, 0], {"rows": (start, stop)}),
        (ArgumentError, r"needs the place of each block: rows=\(start, stop\)", x, {}),
        (ArgumentError, "axis must be 0 or 1, without rows or cols; got axis=2", x, {"axis": 2}),
        (ArgumentError, "axis must be 0 or 1, without rows or cols", x, {"axis": 0, "rows": (0, 2)}),
        (ArgumentError, "rows is a list of 1 ranges for 2 blocks", [x, x], {"rows": [(0, 2)]}),
        (ArgumentError, r"rows are taken in steps of 1, got slice\(0, 4, 2\)", x, {"rows": slice(0, 4, 2)}),
        (ArgumentError, r"rows are a pair \(start, stop\), a slice or a range, got 5", x, {"rows": 5}),
        (ArgumentError, "the start of rows must be >= 0, got -2", x, {"rows": (-2, 0)}),
        (DTypeError, "elements are numbers", x.astype(object), {"axis": 0}),
        (DTypeError, "mask", np.ma.ones((2, 3)), {"axis": 0}),
        (LayoutError, "block size", x, {"axis": 0, "block": -1}),
        (ArgumentError, "order 'K'", x, {"axis": 0, "order": "K"}),
    ]  # fmt: skip
    with ProcessGrid(comm) as grid:
        for kind, message, local, options in cases:
            with pytest.raises(kind, match=message) as caught:
                DistMatrix.from_blocks(local, grid=grid, **options)
            assert len(set(comm.allgather(str(caught.value)))) == 1
        if comm.size > 1:
            with pytest.raises(LayoutError, match=r"two blocks overlap: rows 0:2, columns 0:3 of rank \d and rows 0:2"):
                DistMatrix.from_blocks(x, grid=grid, rows=(0, 2))
            with pytest.raises(DTypeError, match=r"must have one dtype, got float64 \(rank 0\) and float32"):
                DistMatrix.from_blocks(x.astype("f4") if comm.rank else x, grid=grid, axis=0)
            with pytest.raises(LayoutError, match=r"the same number of columns, got 3 \(rank 0\) and 2 \(rank"):
                DistMatrix.from_blocks(x[:, :2] if comm.rank == 1 else x, grid=grid, axis=0)
            with pytest.raises(LayoutError, match=rf"a block has two dimensions.*\[rank 1 of {comm.size}\]"):
                DistMatrix.from_blocks(x[0] if comm.rank == 1 else x, grid=grid, axis=0)
            with pytest.raises(ArgumentError, match="different arguments"):
                DistMatrix.from_blocks(x, grid=grid, axis=0, shape=(m, 3) if comm.rank else None)
        A = DistMatrix.zeros((6, 4), grid=grid)
        with pytest.raises(ArgumentError, match="rows 0:7 are not within 0:6"):
            A.to_blocks(rows=(0, 7) if comm.rank == last else (0, 1))
        with pytest.raises(ArgumentError, match="steps of 1"):
            A.to_blocks(cols=slice(None, None, -1))
        assert A.to_blocks(rows=slice(4, 100)).shape == (2, 4)  # like NumPy's arrays
        grid.free()
        with pytest.raises(PdgemmError, match="freed"):
            A.to_blocks()
