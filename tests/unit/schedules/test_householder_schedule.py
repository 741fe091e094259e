"""The schedule of Householder QR: its words by formula, and the products of a panel in compact form."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from factored import rng_matrix

from pdgemm.grids.distribution import Distribution
from pdgemm.grids.layout import Layout
from pdgemm.local.blas.local_qr import compact_qr
from pdgemm.schedules.panels.householder_schedule import HouseholderSchedule


def schedule(shape: tuple[int, int], grid: tuple[int, int], block: int, mover: str, q: bool) -> HouseholderSchedule:
    ranks = tuple(range(grid[0] * grid[1]))
    layout = Layout(Distribution.over(grid, shape, block), ranks, np.dtype(float), "F")
    return HouseholderSchedule(layout, block, mover, wants_q=q)


@pytest.mark.parametrize("mover", ["ring", "shared"])
@pytest.mark.parametrize("grid", [(1, 1), (1, 3), (3, 1), (2, 3)])
@pytest.mark.parametrize(("m", "n"), [(48, 24), (24, 48)])
def test_words_by_formula(m: int, n: int, grid: tuple[int, int], mover: str) -> None:
    """Words: panels are gathered; rows of V, and T, are sent along columns and rows; sums are reduced and returned."""
    (pr, pc), w, k = grid, 4, min(m, n)
    r_words = q_words = 0
    for start in range(0, k, w):
        rows, q = m - start, min(pr, -(-(m - start) // w))
        own = len([x for x in range(start, m) if x // w % pr == start // w % pr])
        travel = (pc - 1) * (rows + q * w) * w
        r_words += (rows - own) * w + (rows - own + (q - 1) * w) * w + travel + 2 * (q - 1) * w * (n - start - w)
        q_words += travel + 2 * (q - 1) * w * (k - start)
    for wants_q, words in ((False, r_words), (True, r_words + q_words)):
        plan = schedule((m, n), grid, w, mover, wants_q)
        assert plan.total_words == words
        assert plan.tally.counts[0].sum() == (words if mover == "ring" else 0)
        assert plan.tally.counts[4].sum() == (words if mover == "shared" else 0)


@pytest.mark.parametrize("mover", ["ring", "shared"])
@pytest.mark.parametrize("grid", [(1, 1), (1, 3), (3, 1), (2, 3)])
def test_some_columns(grid: tuple[int, int], mover: str) -> None:
    """Words and flops of the first columns and of the trailing matrix add up to those of all columns."""
    whole = schedule((48, 30), grid, 4, mover, False)
    first = replace(whole, columns=12)
    rest = replace(whole, A=replace(whole.A, distribution=whole.A.distribution.window((12, 48), (12, 30))))
    assert [x.stop for x in first.steps] == [4, 8, 12] and len(first.steps) + len(rest.steps) == len(whole.steps)
    assert first.total_words + rest.total_words == whole.total_words
    assert abs(first.flops + rest.flops - whole.flops) <= 1
    assert replace(whole, columns=30).flops == whole.flops and first.updates(2) == [(12, 30)]


def test_buffers() -> None:
    """Buffers that other ranks read have equal sizes on all ranks; sent buffers may differ; idle ranks have none."""
    read, sent = (schedule((50, 20), (2, 2), 3, mover, True) for mover in ("shared", "ring"))
    for name in read.exposed_buffers[:2]:
        assert len({read.buffers(rank)[name][0] for rank in range(4)}) == 1
    assert all(read.buffers(0)[name][0] == 0 for name in ("parts", "panels", "parts of sums"))
    for plan in (read, sent):
        assert all(plan.buffers(None)[name][0] >= words for name, (words, _) in plan.buffers(3).items())
        assert plan.extra_bytes(9) == 0
    assert replace(sent, wants_q=False).flops == 2 * 20 * 20 * 50 - 2 * 20**3 // 3


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (60, 17), (200, 64)])
def test_compact_form(m: int, n: int, dtype: str) -> None:
    A = np.asfortranarray(rng_matrix(m, n, dtype))
    A[:, n // 2] = 0
    V, (R, T) = A.copy("F"), np.full((2, n, n), np.nan, dtype).transpose(0, 2, 1)
    compact_qr(V, R, T)
    assert (np.triu(V[:n]) == np.eye(n)).all()
    assert (np.tril(R, -1) == 0).all() and (np.tril(T, -1) == 0).all() and (R.diagonal().imag == 0).all()
    Q, eps = np.eye(m) - V @ T @ V.conj().T, np.finfo(dtype).eps
    assert np.linalg.norm(Q.conj().T @ Q - np.eye(m)) <= 10 * n * eps
    assert np.linalg.norm(Q[:, :n] @ R - A) <= 10 * n * eps * np.linalg.norm(A) + eps
