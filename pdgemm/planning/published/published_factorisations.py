"""Published times and bytes of Cholesky and LU factorisations beside those of plans, with one set of constants.

The plans are those of `linalg.plan` for any number of ranks, made from the schedules without MPI.  As in
`published_products`, ranks of a node send each other messages, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from statistics import mean

import numpy as np

from pdgemm.grids.distribution import Distribution
from pdgemm.grids.layout import Layout
from pdgemm.planning.machines.known_machines import machine_of
from pdgemm.planning.program import Program
from pdgemm.planning.published.published_products import PublishedRow, checked_products, published_table, read_table
from pdgemm.schedules.mover_registry import RING
from pdgemm.schedules.panels.factor_schedules import CholeskySchedule, LUSchedule
from pdgemm.support.text import Table

SC21 = "Kwasniewski et al., SC 2021"
MACHINE, RANKS_PER_NODE = "piz-daint-omp", 2
_SCHEDULES = {"cholesky": CholeskySchedule, "lu": LUSchedule}
_BLOCKS = (256, 512)  # where the block is not published, the fastest of these
# the rows by which the constants of the machine were chosen: factorisation, program, n and ranks
_FITTED = {("cholesky", "SLATE", n, ranks) for n, ranks in ((16384, 64), (131072, 64), (131072, 256))}


def factorisation_plan(kind: str, n: int, grid: tuple[int, int], block: int) -> Program:
    """Return the plan of "cholesky" or "lu" of a float64 matrix (n, n) in square blocks, which are also the panels."""
    ranks = tuple(range(grid[0] * grid[1]))
    layout = Layout(Distribution.over(grid, (n, n), (block, block)).canonical, ranks, np.dtype("d"))
    stage = _SCHEDULES[kind](layout, block, RING.name)
    return Program((("A", stage),), len(ranks), machine_of(MACHINE, RANKS_PER_NODE))


@lru_cache(maxsize=64)
def predicted(kind: str, n: int, grid: tuple[int, int], block: int) -> tuple[float, int]:
    """Return the seconds of a factorisation, and the bytes that all ranks together receive."""
    run = factorisation_plan(kind, n, grid, block).simulate()
    return run.seconds, int(run.words_received.sum()) * np.dtype("d").itemsize


def factorisation_times() -> Iterator[PublishedRow]:
    """Yield the seconds of factorisations: the mean of the five repetitions that the authors print."""
    for row in read_table("conflux_sc21_seconds"):
        seconds = mean(float(row[f"ms_{k}"]) for k in range(1, 6)) / 1000
        blocks = [int(row["block"])] if row["block"] else _BLOCKS
        yield _row(row, "s", seconds, min(predicted(*_sizes(row), block)[0] for block in blocks))


def factorisation_bytes() -> Iterator[PublishedRow]:
    """Yield the bytes that all ranks receive, which the authors counted."""
    for row in read_table("conflux_sc21_bytes"):
        yield _row(row, "GB", int(row["bytes"]) / 1e9, predicted(*_sizes(row), int(row["block"]))[1] / 1e9)


def _sizes(row: dict[str, str]) -> tuple[str, int, tuple[int, int]]:
    return row["factorisation"], int(row["n"]), (int(row["grid_rows"]), int(row["grid_cols"]))


def _row(row: dict[str, str], what: str, published: float, expected: float) -> PublishedRow:
    kind, program, n, ranks = row["factorisation"], row["program"], int(row["n"]), int(row["ranks"])
    how = f"{ranks} ranks, {RANKS_PER_NODE} a node of {MACHINE}, blocks of {row['block'] or 'unknown size'}"
    fitted = what == "s" and (kind, program, n, ranks) in _FITTED
    return PublishedRow(f"{SC21}: {program}, {kind}", f"n = {n}", how, what, published, expected, fitted)


def checked_plans() -> list[Table]:
    """Return products and factorisations beside their predictions, with the errors of each program's other rows."""
    tables = (
        ("Seconds of factorisations; *: a constant of the machine was fitted to the row", factorisation_times()),
        ("Bytes that all ranks of a factorisation receive, in which no constant has a part", factorisation_bytes()),
    )
    return checked_products() + [published_table(title, rows, "matrix", "ranks") for title, rows in tables]
