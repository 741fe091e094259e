"""Ranks that are late: each waits at random before it reads what others have, who must not have changed it by then."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from factored import EPS, norm, positive_definite, relative, rng_matrix
from problems import grid_shapes
from tiers import examples

from pdgemm import DistMatrix, ProcessGrid, linalg
from pdgemm.transport.panels.in_place import InPlace
from pdgemm.transport.panels.task import Task

pytestmark = [pytest.mark.mpi, pytest.mark.on_ranks(3, 4)]


@pytest.fixture
def late(comm: Any, monkeypatch: Any) -> None:
    """Every third wait for a panel, or message that says that it can be read, is followed by a pause."""
    draw, wait, announce = random.Random(comm.rank), Task.wait, InPlace.announce

    def pause() -> None:
        if draw.random() < 0.3:
            time.sleep(draw.random() * 4e-3)

    def waiting(task: Any, slot: Any) -> None:
        wait(task, slot)
        pause()

    def announcing(task: Any, *arguments: Any) -> None:
        announce(task, *arguments)
        pause()

    monkeypatch.setattr(Task, "wait", waiting)
    monkeypatch.setattr(InPlace, "announce", announcing)


@pytest.mark.parametrize("block", [(7, 5), (16, 9), 8])  # of which some make several panels of one owner
def test_late_ranks(comm: Any, late: None, block: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("pdgemm.linalg.factors.ldl.BAND", 8)
    n, S, x, b = 60, positive_definite(60, "float64"), rng_matrix(60, 60, "float64"), rng_matrix(60, 9, "float64")
    _, pivots = scipy.linalg.lu_factor(x)
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            A, X, B = (DistMatrix.from_global(y, grid=grid, block=block) for y in (S, x, b))
            for _ in range(examples(6)):
                L = linalg.cholesky(A)
                assert relative(S - L.allgather() @ L.allgather().T, norm(S), "float64", n) <= EPS
                y = linalg.cho_solve(L, B).allgather()
                assert relative(b - S @ y, norm(S) * norm(y), "float64", n) <= EPS
                factors = linalg.lu_factor(X)
                assert np.array_equal(factors.pivots, pivots)
                y = linalg.lu_solve(factors, B).allgather()
                assert relative(b - x @ y, norm(x) * norm(y), "float64", n) <= EPS
                H = X + X.T
                y = linalg.ldl_solve(linalg.ldl(H), B).allgather()
                assert relative(b - (x + x.T) @ y, norm(x + x.T) * norm(y), "float64", n) <= EPS
                Q, R = linalg.householder_qr(X)
                assert Q is not None
                assert relative(x - Q.allgather() @ R.allgather(), norm(x), "float64", n) <= EPS
