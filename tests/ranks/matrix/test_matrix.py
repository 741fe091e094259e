"""DistMatrix: every constructor and every method of inspection, on every grid."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from problems import BLOCKS, DTYPES, SHAPES, grid_shapes, sources
from tiers import in_turn

from pdgemm import Batch, DistMatrix, ProcessGrid, matmul_batched, pdgemm
from pdgemm.errors import ArgumentError, LayoutError, OutOfMemoryError
from pdgemm.instrument.run_report import vectors_so_far
from pdgemm.matrix import gather
from pdgemm.schedules.collectives import vectors

pytestmark = pytest.mark.mpi

MATRICES = sorted({(m, n) for group in SHAPES.values() for m, n, _ in group})


def layouts(comm: Any) -> Iterator[dict[str, Any]]:
    """Yield every grid of these ranks with every block, and sources in turn."""
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            for (mb, nb, *_), source in in_turn(BLOCKS, [*sources(shape)]):
                yield {"grid": grid, "block": mb if mb is None else (mb, nb), "source": source}


def whole(shape: tuple[int, int], dtype: str = "float64") -> np.ndarray:
    """Return A[i, j] = 0.19 i + 0.24 j (+ 1j)."""
    i, j = np.indices(shape)
    return (0.19 * i + 0.24 * j + (1j * i if dtype.startswith("complex") else 0)).astype(dtype)


def test_dealing_and_gathering_are_inverse(comm: Any) -> None:
    for layout in layouts(comm):
        for shape in MATRICES:
            expected = whole(shape)
            order = "F" if shape[0] % 2 else "C"
            A = DistMatrix.from_global(expected.astype(">f8"), order=order, **layout)  # of another byte order
            assert A.order == order
            assert A.dtype.isnative
            assert A.shape == shape
            assert np.array_equal(A.local, expected[np.ix_(*A.indices())])
            assert np.array_equal(A.allgather(), expected)
            root = comm.size - 1
            gathered = A.to_global(root)
            assert (gathered is None) == (comm.rank != root)
            assert gathered is None or np.array_equal(gathered, expected)


def test_dealing_from_one_rank(comm: Any) -> None:
    for layout in layouts(comm):
        for shape in [(0, 3), (1, 1), (13, 8)]:
            for root in {0, comm.size - 1}:
                mine = whole(shape) if comm.rank == root else None
                order = "CF"[root % 2]
                A = DistMatrix.from_global(mine, root=root, order=order, **layout)
                assert A.order == order and A.local.flags[f"{order}_CONTIGUOUS"]
                assert np.array_equal(A.local, whole(shape)[np.ix_(*A.indices())])


def test_long_messages_are_sent_in_pieces(comm: Any, grid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "PIECE_BYTES", 100)
    monkeypatch.setattr(vectors, "_STAGE_BYTES", 100)
    A = DistMatrix.from_global(whole((50, 7)), grid=grid, block=3)
    assert len(list(gather._pieces(A.distribution, grid, 8))) > comm.size
    before = vectors_so_far()
    assert np.array_equal(A.allgather(), whole((50, 7)))
    schedule, sent = vectors.gathering(A.layout_in(grid), comm.size)[0], vectors_so_far() - before
    assert len(schedule.stages) > 1 and sent.counted == sent.predicted == schedule.traffic(comm.rank)
    assert sent.counted.words_received == 50 * 7 - A.local.size
    gathered = A.to_global()
    assert gathered is None or np.array_equal(gathered, whole((50, 7)))
    B = DistMatrix.from_global(gathered, root=0, grid=grid, block=(2, 5))
    assert np.array_equal(B.allgather(), whole((50, 7)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_constructors(comm: Any, dtype: str) -> None:
    f = lambda i, j: whole((13, 8), dtype)[i, j]  # noqa: E731
    for layout in layouts(comm):
        layout["dtype"] = dtype
        assert np.array_equal(DistMatrix.zeros((3, 5), **layout).allgather(), np.zeros((3, 5), dtype))
        assert np.array_equal(DistMatrix.eye(6, **layout).allgather(), np.eye(6, dtype=dtype))
        assert np.array_equal(DistMatrix.eye((3, 5), **layout).allgather(), np.eye(3, 5, dtype=dtype))
        assert np.array_equal(DistMatrix.from_function(f, (13, 8), **layout).allgather(), whole((13, 8), dtype))
        for order in "CF":
            A = DistMatrix.empty((7, 9), order=order, **layout)
            assert A.local.dtype == dtype
            assert A.local.flags[f"{order}_CONTIGUOUS"]


def test_random_is_the_same_on_every_grid(comm: Any) -> None:
    with ProcessGrid(MPI.COMM_SELF) as alone:
        expected = DistMatrix.random((29, 31), grid=alone, seed=7, kind="normal").local
    for layout in layouts(comm):
        A = DistMatrix.random((29, 31), seed=7, kind="normal", **layout)
        assert np.array_equal(A.allgather(), expected)
        with pytest.raises(ArgumentError, match="kind 'eye' is not one of uniform, normal"):
            DistMatrix.random((29, 31), kind="eye", **layout)


def test_local_arrays_are_adopted_not_copied(comm: Any) -> None:
    for layout in layouts(comm):
        like = DistMatrix.from_global(whole((13, 8)), **layout)
        for array in (like.local, np.asfortranarray(like.local)):
            A = DistMatrix.from_local(array, (13, 8), **layout)
            assert A.local is array
            assert np.array_equal(A.allgather(), whole((13, 8)))
            assert len(set(comm.allgather(A.order))) == 1


def test_local_arrays_of_the_wrong_shape_are_refused_everywhere(comm: Any, grid: Any) -> None:
    right = DistMatrix.zeros((12, 12), grid=grid).local
    wrong = np.zeros((1, 99)) if comm.rank == comm.size - 1 else right
    with pytest.raises(LayoutError, match=r"\(1, 99\).*12 x 12"):
        DistMatrix.from_local(wrong, (12, 12), grid=grid)
    uneven = np.zeros(right.shape[0], [("h", "i4"), ("x", "f8", (right.shape[1],))])["x"]
    for strided in (np.zeros((24, 24))[::2, ::2][: len(right), : right.shape[1]], np.zeros(right.shape)[::-1], uneven):
        if len(right) > 1:
            with pytest.raises(LayoutError, match="contiguous"):
                DistMatrix.from_local(strided, (12, 12), grid=grid)
    if comm.size > 1:
        mixed = np.asfortranarray(right) if comm.rank == 0 else right
        with pytest.raises(LayoutError, match="Fortran order on others"):
            DistMatrix.from_local(mixed, (12, 12), grid=grid)
        with pytest.raises(ArgumentError, match="float32"):
            DistMatrix.from_local(right.astype("f") if comm.rank == 0 else right, (12, 12), grid=grid)


def test_an_element_function_that_fails_somewhere_fails_everywhere(grid: Any) -> None:
    def f(i: np.ndarray, j: np.ndarray) -> np.ndarray:
        if (i == 0).any() and (j == 0).any():
            raise KeyError("only the owner of (0, 0)")
        return i + j

    with pytest.raises(KeyError):
        DistMatrix.from_function(f, (12, 12), grid=grid)


def test_a_matrix_too_large_for_a_rank_is_refused_everywhere(grid: Any) -> None:
    with pytest.raises(OutOfMemoryError, match="Unable to allocate"):
        DistMatrix.empty((10**8, 10**8), grid=grid)


def test_rows_further_apart_than_blas_takes_are_refused_everywhere(comm: Any) -> None:
    """One rank has a view with too long a distance between rows: BLAS would read it modulo 2^32."""
    here = comm.rank == comm.size - 1
    memory = np.empty((2, (1 << 31) + 8 if here else 8), np.int8)[:, :8]  # its pages are never touched
    with ProcessGrid(comm, (comm.size, 1)) as grid:
        A = DistMatrix.from_local(memory, (2 * comm.size, 8), grid=grid, block=(2, 8))
        B = DistMatrix.ones((8, 3), grid=grid, dtype="int8")
        for call in (lambda: pdgemm(1, A, B), lambda: A @ B, lambda: B.T @ A.T):
            with pytest.raises(LayoutError, match="BLAS takes up to 2147483647"):
                call()
    lists = [memory[:, :3], np.ones((3, 3), "i1")], [np.ones((3, 2), "i1")] * 2, [np.ones((n, 2), "i4") for n in (2, 3)]
    with pytest.raises(LayoutError, match="BLAS takes up to 2147483647"):
        matmul_batched(*(Batch.from_local(items, comm) for items in lists))


def test_fortran_order_is_kept(grid: Any) -> None:
    A = DistMatrix.random((20, 30), grid=grid, block=3, order="F")
    for B in (A.copy(), A.astype("f"), A * 2, A + A):
        assert B.order == "F"
        assert B.local.flags.f_contiguous


def test_norms_of_large_numbers_nan_and_nothing(comm: Any) -> None:
    for layout in layouts(comm):
        assert [DistMatrix.zeros((0, 4), **layout).norm(x) for x in ("fro", 1, np.inf, "max")] == [0] * 4
        big = DistMatrix.from_function(lambda i, j: 1e300, (30, 30), **layout)
        assert np.isclose(big.norm(), 3e301)  # squares would overflow
        big.local[:1, :1] = np.nan
        big.local[-1:, -1:] = np.inf
        assert all(np.isnan(big.norm(kind)) for kind in ("fro", 1, np.inf, "max"))  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="nuclear"):
            big.norm("nuclear")
        if comm.size > 1:
            with pytest.raises(ArgumentError, match="norm"):
                big.norm("fro" if comm.rank else 1)


def test_comparison_within_a_tolerance(comm: Any) -> None:
    for layout in layouts(comm):
        A = DistMatrix.from_global(whole((13, 8)), **layout)
        B = A + 1e-9
        assert A.allclose(B)
        assert not A.allclose(B, rtol=0, atol=1e-10)
        if (A.distribution.owner(12, 7)) == A.grid.coords:
            B.local[-1, -1] += 1  # one wrong element on one rank
        assert not A.allclose(B)
        assert DistMatrix.zeros((3, 3), **layout).allclose(0)
