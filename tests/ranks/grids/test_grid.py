"""Process grids, collective errors and threads."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from problems import grid_shapes
from tiers import every_grid, square_grid

from pdgemm import DistMatrix, ProcessGrid, pdgemm, plan, redistribute, verify
from pdgemm.errors import ArgumentError, GridError, LayoutError, PdgemmError
from pdgemm.local.blas.threads import core_share, decided_by, threads
from pdgemm.support.agreement import agree, agree_if_later, together
from pdgemm.support.text import ranks_text

pytestmark = pytest.mark.mpi


@every_grid
def test_default_grid_is_near_square(comm: Any, grid: Any) -> None:
    expected = {1: (1, 1), 2: (1, 2), 3: (1, 3), 4: (2, 2), 6: (2, 3), 8: (2, 4), 9: (3, 3), 12: (3, 4)}
    assert grid.shape == expected.get(comm.size, grid.shape)
    assert grid.size == comm.size


@every_grid
def test_every_grid_has_its_rows_columns_and_layers(comm: Any) -> None:
    for layers in [c for c in range(1, comm.size + 1) if comm.size % c == 0]:
        for shape in grid_shapes(comm.size // layers):
            with ProcessGrid(comm) as base:
                grid = base.work_grid(shape, layers, (*range(comm.size),))
                i, j = grid.coords
                pr, pc = shape
                assert grid.rank == grid.rank_of(i, j, grid.layer) == (grid.layer * pr + i) * pc + j
                assert grid.coords_of(grid.rank) == (i, j)
                assert grid.rank_of(i - pr, j + pc) == grid.rank_of(i, j)  # around the torus
                assert (grid.row.size, grid.col.size, grid.depth.size) == (pc, pr, layers)
                assert (grid.row.rank, grid.col.rank, grid.depth.rank) == (j, i, grid.layer)
                assert set(grid.row.allgather(i)) == {i}
                assert set(grid.col.allgather(j)) == {j}
                assert set(grid.depth.allgather((i, j))) == {(i, j)}
                assert grid.row.periods == grid.col.periods == [True]
                assert grid.depth.periods == [False]
                assert grid.node.size >= 1
                assert MPI.Comm.Compare(grid.comm, comm) == MPI.CONGRUENT  # messages cannot match the caller's


def test_grids_of_one_communicator_share_its_duplicate_until_the_last_is_freed(comm: Any) -> None:
    part = comm.Dup()
    one, two = ProcessGrid(part), ProcessGrid(part, (part.size, 1))
    assert one.comm is two.comm
    A, B = DistMatrix.eye(6, grid=one), DistMatrix.eye(6, grid=two) * 2
    if comm.size > 1:  # mixed-up matrices on different grids are an error
        with pytest.raises(ArgumentError, match="different arguments"):
            pdgemm(1, B, A) if comm.rank == 0 else pdgemm(1, A, B)
    one.free()
    assert one.comm == one.T.comm == MPI.COMM_NULL
    assert (B @ B.T).norm("max") == 4
    part.Free()  # the user frees the communicator before the last grid
    two.free()
    with ProcessGrid(comm) as again:
        assert again.comm != MPI.COMM_NULL


def test_a_rank_that_left_a_grid_by_an_exception_joins_the_next_grid(comm: Any) -> None:
    part = comm.Dup()
    with suppress(ZeroDivisionError), ProcessGrid(part) as left:
        1 // comm.rank
    assert bool(left.comm) == (comm.rank == 0)  # freeing is collective: not freed on rank 0 alone
    with ProcessGrid(part) as grid:
        assert DistMatrix.eye(4, grid=grid).norm("max") == 1
    part.Free()


@pytest.mark.on_ranks(1, 3)
def test_listed_ranks_idle_ranks_and_transposed_grids(comm: Any) -> None:
    backwards = list(range(comm.size))[::-1]
    with ProcessGrid(comm, (1, comm.size), ranks=backwards) as grid:
        assert [grid.rank_of(0, j) for j in range(comm.size)] == backwards
        assert grid.coords == (0, comm.size - 1 - comm.rank)
        assert grid.row.rank == grid.coords[1]
        assert grid.T.shape == (comm.size, 1)
        assert grid.T.T is grid
        assert grid.T.col is grid.row
        assert grid.T.rank_of(*grid.T.coords) == comm.rank
        assert grid.T.coords_of(comm.rank) == grid.T.coords
        with ProcessGrid(comm, (comm.size, 1), ranks=backwards) as column, ProcessGrid(comm, (comm.size, 1)) as other:
            assert grid.T.same_as(column)
            assert grid.T.same_as(other) == (comm.size == 1)
            with ProcessGrid(comm, (comm.size, 1)) as again:
                assert again.same_as(other)
    if comm.size > 1:
        with ProcessGrid(comm, ranks=backwards[:-1]) as fewer:
            assert fewer.idle == (comm.rank == 0)
            assert (fewer.row == MPI.COMM_NULL) == fewer.idle
            assert fewer.comm.size == comm.size
    for ranks in ([0, 0], [comm.size], [-1], []):
        with pytest.raises(GridError, match="different numbers from 0"):
            ProcessGrid(comm, ranks=ranks)
    with pytest.raises(GridError, match="needs 2 ranks, but there is 1"):
        ProcessGrid(comm, (2, 1), ranks=[0])


def test_free_gives_the_communicators_back(comm: Any) -> None:
    own = comm.Dup()  # no other grid shares its duplicate
    for _ in range(300):  # a leak would fail: MPI supports fewer communicators
        grid = ProcessGrid(own)
        grid.free()
        for each in (grid.comm, grid.row, grid.col, grid.depth):
            assert each == MPI.COMM_NULL
        grid.free()
    own.Free()
    assert "freed" in repr(grid)


def test_matrices_of_a_freed_grid_are_refused_in_words(comm: Any) -> None:
    grid = ProcessGrid(comm)
    A, B, C = (DistMatrix.random((9, 9), grid=grid, seed=seed) for seed in (1, 2, 3))
    p = plan(A, B, C)
    prepared = p.prepare(A, B, C)
    before = C.local.copy()
    grid.free()
    for use in (
        lambda: pdgemm(1.0, A, B, 0.0, C),
        lambda: A @ B,
        lambda: p.execute(A, B, C),
        prepared,
        lambda: verify(C, 1.0, A, B),
        lambda: redistribute(A, B),
        A.to_global,
        A.norm,
    ):
        with pytest.raises(GridError, match="has been freed"):
            use()
    assert np.array_equal(C.local, before)


@pytest.mark.parametrize("options", [{"shape": (2, 100)}, {"shape": (0, 1)}, {"shape": (1,)}])
def test_a_grid_that_does_not_fit_is_refused_everywhere(comm: Any, options: dict[str, Any]) -> None:
    with pytest.raises(GridError, match=r"\d"):
        ProcessGrid(comm, **options)


# ------------------------------------------------------------------ raising together
def test_an_error_on_one_rank_is_raised_on_all(comm: Any) -> None:
    for failing in range(comm.size):
        with pytest.raises(LayoutError) as caught:
            agree(comm, LayoutError("bad") if comm.rank == failing else None)
        expected = "bad" if comm.size == 1 else f"bad [rank {failing} of {comm.size}]"
        assert str(caught.value) == expected
        with pytest.raises(ZeroDivisionError), together(comm):
            1 // int(comm.rank != failing)
    agree(comm, None)


def test_arguments_are_compared_by_the_next_agreement(comm: Any) -> None:
    """Also an exception of one rank meets the other ranks there."""

    def first(argument: object, bad: bool = False) -> None:
        with together(comm, later=True) as arguments:
            arguments.append(argument)
            if bad:
                raise LayoutError("bad")

    first("equal")
    agree(comm, description="both")
    if comm.size > 1:
        first(comm.rank)
        with pytest.raises(ArgumentError, match="rank 0: 0; rank 1: 1"):
            agree(comm, description="both")
        first(comm.rank)
        with pytest.raises(ArgumentError, match="different arguments"):
            agree_if_later(comm)
    agree_if_later(comm)  # compares nothing twice
    if comm.rank == comm.size - 1:
        with pytest.raises(LayoutError, match="bad"):
            first("equal", bad=True)
    else:
        first("equal")
        with pytest.raises(LayoutError, match="bad"):
            agree(comm)
    agree(comm)


@square_grid
def test_the_lowest_rank_is_raised_and_all_are_named(comm: Any) -> None:
    with pytest.raises(PdgemmError) as caught:
        agree(comm, PdgemmError(f"from {comm.rank}") if comm.rank != 1 else None)
    assert str(caught.value).startswith("from 0")
    if comm.size == 4:
        assert str(caught.value) == "from 0 [ranks 0, 2-3 of 4]"


def test_exceptions_that_cannot_be_pickled_are_raised_on_all_ranks(comm: Any) -> None:
    class LocalError(Exception):
        pass

    with pytest.raises(PdgemmError, match="LocalError: here"):
        agree(comm, LocalError("here") if comm.rank == comm.size - 1 else None)


def test_rank_lists_are_readable() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"


# ------------------------------------------------------------------ threads
def test_share_of_cores() -> None:
    assert core_share([[0, 1, 2, 3]] * 2, 0) == 2  # unbound: they share all cores
    assert core_share([[0, 1], [2, 3]], 1) == 2  # bound separately: a whole core each
    assert core_share([[0, 1, 2], [2, 3]], 0) == 2  # one core in common
    assert core_share([[0, 1]] * 9, 4) == 1
    assert core_share([[*range(6)]] * 3, 0) == 2  # exact, although 6 * (1 / 3) may be less than 2


def test_a_rank_uses_its_share_unless_told_otherwise(comm: Any, grid: Any) -> None:
    before = threads()
    share = core_share(grid.node.allgather(sorted(os.sched_getaffinity(0))), grid.node.rank)
    assert threads() == (before if decided_by() else min(before, share))


@pytest.mark.mpi(min_size=2)
def test_work_grids_outlive_the_grid_that_they_were_made_for(comm: Any) -> None:
    """Work grids belong to the communicator: another grid gets the same one, and redistributes to it."""
    first, second = ProcessGrid(comm), ProcessGrid(comm, (1, comm.size))
    place = tuple(range(comm.size))
    work = first.work_grid((comm.size, 1), 1, place)
    first.free()
    with second:
        assert second.work_grid((comm.size, 1), 1, place) is work
        A = DistMatrix.random((9, 7), grid=second)
        there = A.redistribute(DistMatrix.zeros((9, 7), grid=work))
        assert np.array_equal(there.allgather(), A.allgather())
