"""Reports of products: a line for each rank, the summary of all ranks, and log messages."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdgemm import Batch, DistMatrix, ProcessGrid, linalg, matmul_batched, pdgemm, plan
from pdgemm.errors import ArgumentError, GridError
from pdgemm.instrument.report import Summary
from pdgemm.io import hdf5
from pdgemm.support.text import in_bytes, in_rate

pytestmark = pytest.mark.mpi


def test_report_reads_well(comm: Any, grid: Any) -> None:
    C = pdgemm(1, DistMatrix.eye(40, grid=grid), DistMatrix.eye(40, grid=grid), algorithm="summa", shape=grid.shape)
    assert C.report is not None
    lines = str(C.report).splitlines()
    of_rank = lines.pop()
    for part in (f"rank {comm.rank} at ", "FLOP/s", "compute", "wait", "pack", "received", "sent", "extra memory"):
        assert part in of_rank
    assert of_rank.endswith("as predicted")
    title = [x for x in lines if "by summa" in x and str(grid) in x]
    assert lines == title and len(title) == (comm.rank == 0)  # all ranks print the product once
    assert "mover shared" if comm.size > 1 else "mover ibcast" in title[0]
    total = C.report.compute_seconds + C.report.wait_seconds + C.report.pack_seconds
    assert 0 < total <= C.report.seconds
    wrong = C.report.changed(extra_bytes=C.report.predicted_extra_bytes + 1)
    assert "but predicted were" in str(wrong) and not wrong.as_predicted


def test_titles_name_the_operands_as_they_enter_the_product(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    """If the transpose of a matrix is multiplied, the title names the transpose and its shape."""
    A = DistMatrix.random((40, 30), grid=grid, seed=0)
    hdf5.save(shared_tmp_path / "a.h5", "x", A)
    stored = hdf5.dataset(shared_tmp_path / "a.h5", "x", grid=grid)
    for C, title in (
        (pdgemm(1, A, A, transa="T"), "C (30 x 30) := A^T (30 x 40) B, "),
        (pdgemm(1, stored, A, transb="c"), "C (40 x 40) := A (40 x 30) B^H, "),
        (pdgemm(1, A.T, stored), "C (30 x 30) := A (30 x 40) B, "),
        (linalg.gram(A), "C (30 x 30) := A^H (30 x 40) A, "),
        (linalg.syr2k(1, A, A.copy(), trans="T"), "C (30 x 30) := A^T (30 x 80) B, "),
    ):
        assert C.report.title.startswith(title), C.report.title


def test_the_summary_is_of_all_ranks_and_the_same_on_all(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    own = comm.Dup()  # no other grid of `own` is open
    with ProcessGrid(own) as grid:
        A = DistMatrix.eye(40, grid=grid)
        C = pdgemm(1, A, A, algorithm="summa", shape=grid.shape)
        summary = C.report.summary()
        assert [report.rank for report in summary.reports] == [*range(comm.size)]
        assert summary.reports[comm.rank] == C.report
        assert len({*comm.allgather(str(summary))}) == 1
        table = summary.as_dict()
        json.dumps(table)
        assert table["as_predicted"] and "as predicted" in str(summary)
        words, seconds = table["per_rank"]["words_received"], table["per_rank"]["seconds"]
        assert words["mean"] * comm.size == 40 * 40 * (grid.shape[0] - 1 + grid.shape[1] - 1)
        assert seconds["max"] == summary.seconds == max(comm.allgather(C.report.seconds))
        summary.print()
        assert capsys.readouterr().out == ("" if comm.rank else f"{summary}\n")

        slow = [report.changed(seconds=4.0 * (report.rank + 1), flops=6 * 10**6) for report in summary.reports]
        late = Summary(slow)
        assert late.gflops == 6e6 / (4 * comm.size) / 1e9 and f"{in_rate(1e9 * late.gflops)}; predicted" in str(late)
        bad = Summary([slow[0].changed(extra_bytes=1 + slow[0].predicted_extra_bytes), *slow[1:]])
        assert "NOT as predicted" in str(bad)

        copied = pickle.loads(pickle.dumps(C.report))  # like a report that MPI has sent
        assert copied == C.report
        with pytest.raises(ArgumentError, match="came from another process"):
            copied.summary()
        if comm.size > 1:
            D = pdgemm(1, A[:20, :], A)
            with pytest.raises(ArgumentError, match="the summary of a report"):
                (C if comm.rank else D).report.summary()
        assert C.report.summary().as_dict() == table
        unread = A @ A
    assert f"rank {comm.rank} at " in str(unread.report)  # needs no other rank
    with pytest.raises(GridError, match="has been freed"):
        C.report.summary()
    own.Free()


def test_products_are_logged_once(comm: Any, grid: Any, caplog: pytest.LogCaptureFixture) -> None:
    A, C = (DistMatrix.random((50, 50), grid=grid, block=7, seed=seed) for seed in range(2))
    p = plan(A, A, C)
    caplog.set_level(logging.INFO, "pdgemm")
    texts = [f"plan: {p}", str(pdgemm(1, A, A, 0, C).report)]
    texts += [f"plan: {p}", str(p.execute(A, A, C).report)]
    product = p.prepare(A, A, C)
    texts.append(f"plan: {p}")
    texts += [str(product().report) for _ in range(2)]  # no further log lines of the plan
    batch = Batch.from_global(np.ones((5, 3, 3)), comm)
    texts.append(str(matmul_batched(batch, batch).report))
    assert caplog.messages == (texts if comm.rank == 0 else [])
    caplog.clear()
    caplog.set_level(logging.WARNING, "pdgemm")
    A @ A
    assert not caplog.records


def test_the_debug_log_names_movers_reasons_and_allocations(
    comm: Any, grid: Any, caplog: pytest.LogCaptureFixture
) -> None:
    A = DistMatrix.random((50, 50), grid=grid, block=7)
    caplog.set_level(logging.DEBUG, "pdgemm")
    C = pdgemm(1, A, A, algorithm="summa", mover="ring", shape=(comm.size, 1))
    *first, buffers = [x.getMessage() for x in caplog.records if x.levelno == logging.DEBUG]
    assert buffers.startswith(f"rank {comm.rank} allocates {in_bytes(C.report.extra_bytes)}")
    assert len(first) == 2 * (comm.rank == 0)
    for text, words in zip(first, (["mover of the panels: ring, each rank"], ["considered:", "chosen", "rule: "])):
        assert text.startswith(words[0]) and all(x in text for x in words)
