"""Published numbers beside predictions, and times of distributed products with one set of constants a machine.

Predictions are of a program that sends messages between all ranks, in nodes, too, and that chooses its grid whatever
the user's layouts, as CA3DMM and COSMA do; `pdgemm` itself would often be faster.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from pdgemm.grids.distribution import Distribution
from pdgemm.planning.machines.known_machines import machine_of
from pdgemm.planning.product_plan import with_moves
from pdgemm.planning.question import Question
from pdgemm.planning.search.candidate_table import Candidate
from pdgemm.schedules.mover_registry import BY_MPI
from pdgemm.support.text import Table, sides


class PublishedRow(NamedTuple):
    """A published number and its prediction.

    case : the model or the product.   how : its layout, or the program and the ranks.   what : it is, with its unit.
    fitted : a constant of the machine was chosen by this row, so the row says nothing about other predictions.
    """

    source: str
    case: str
    how: str
    what: str
    published: float
    predicted: float
    fitted: bool = False

    @property
    def difference(self) -> float:
        return self.predicted / self.published - 1


def read_table(name: str) -> list[dict[str, str]]:
    """Return the rows of a published table by the names of its columns."""
    with (Path(__file__).parent / f"{name}.csv").open() as file:
        return list(csv.DictReader(file))


def errors(rows: Iterable[PublishedRow]) -> tuple[float, float]:
    """Return the mean and the largest difference, without sign, of the rows to which no constant was fitted."""
    differences = [abs(x.difference) for x in rows if not x.fitted]
    return mean(differences), max(differences)


def published_table(title: str, rows: Iterable[PublishedRow], case: str, how: str) -> Table:
    """Return the rows as a table, and the errors of each source.   case, how : the names of these columns."""
    rows = list(rows)
    cells = [
        (x.source, x.case, x.how, x.what, f"{x.published:.4g}", f"{x.predicted:.4g}",
         f"{100 * x.difference:+.1f}%" + "*" * x.fitted) for x in rows
    ]  # fmt: skip
    for source in dict.fromkeys(x.source for x in rows):
        ours = [x for x in rows if x.source == source]
        usual, most = errors(ours)
        fitted = sum(x.fitted for x in ours)
        number = f"{len(ours) - fitted} rows" + f", and {fitted} fitted*" * (fitted > 0)
        cells.append((source, number, f"at most {100 * most:.1f}%, mean {100 * usual:.1f}%", "", "", "", ""))
    columns = ("source", case, how, "", "published", "predicted", "difference")
    return Table(columns, cells, words=columns[:4], title=title)


_COLUMNS = "columns"  # layouts of A, B and C: a block of columns on each rank
# sources and machines of the tables; CTF's times, 1.3 to 14 times those of the other two, are not of such products
_TABLES = {
    "ca3dmm_sc22_figure3": ("Huang & Chow, SC 2022, figure 3", "xeon-24"),
    "ca3dmm_sc22_figure4": ("Huang & Chow, SC 2022, figure 4", "xeon-24"),
    "cosma_2018_draft": ("draft of COSMA, 2018", "piz-daint-mc"),
}
_FITTED = {  # the rows by which the constants of the machines were chosen: table, program, layouts, ranks and shape
    ("ca3dmm_sc22_figure3", "CA3DMM", "native", 192, (50000, 50000, 50000)),
    ("ca3dmm_sc22_figure3", "CA3DMM", "native", 384, (50000, 50000, 50000)),
    ("ca3dmm_sc22_figure3", "CA3DMM", _COLUMNS, 1536, (1200000, 6000, 6000)),
    *(("cosma_2018_draft", "COSMA", "native", ranks, (16384, 16384, 16384)) for ranks in (128, 1024, 4096)),
}
# mean and largest error, in percent, of the rows that were not fitted, without and with redistribution
ERRORS = {False: (10, 39), True: (14, 66)}


def product_times() -> Iterator[PublishedRow]:
    """Yield the seconds of products: the mean of the repetitions that the authors print."""
    for table, (source, machine) in _TABLES.items():
        for row in (row for row in read_table(table) if row["program"] != "CTF"):
            program, layouts = row["program"], row["layouts"]
            m, n, k, ranks, per_node = (int(row[x]) for x in ("m", "n", "k", "ranks", "ranks_per_node"))
            runs = [float(x) for name, x in row.items() if name.startswith("ms_")]
            seconds = mean(runs) / 1000 if runs else float(row["seconds"])
            predicted = predicted_seconds(machine, per_node, (m, n, k), ranks, layouts == _COLUMNS)
            fitted = (table, program, layouts, ranks, (m, n, k)) in _FITTED
            how = f"{ranks} ranks, {per_node} a node of {machine}"
            yield PublishedRow(f"{source}: {program}, {layouts}", sides(m, n, k), how, "s", seconds, predicted, fitted)


@lru_cache(maxsize=256)
def predicted_seconds(
    machine: str, ranks_per_node: int, mnk: tuple[int, int, int], ranks: int, in_columns: bool
) -> float:
    """Return the predicted time of C (m x n) := A (m x k) B (k x n) on a known machine.

    in_columns : A, B and C are in blocks of columns before and after the product; else in the layouts of its grid.
    """
    plan = Question(*mnk, ranks, layouts="ideal", mover=BY_MPI, machine=machine_of(machine, ranks_per_node)).plan()
    if in_columns:
        m, n, k = mnk
        A, B, C = (
            replace(x, distribution=Distribution.over((1, ranks), shape), rank_map=tuple(range(ranks)))
            for x, shape in zip(plan.problem.layouts, ((m, k), (k, n), (m, n)))
        )
        plan = with_moves(plan.arrangement, replace(plan.problem, A=A, B=B, C=C, ideal=False))
    return plan.seconds


def known_errors(candidate: Candidate, machine: str) -> dict[str, int] | None:
    """Return the mean and the largest error, in percent, of predictions of published products like this candidate.

    None for a machine on which none of them ran.
    """
    if machine not in {name for _, name in _TABLES.values()}:
        return None
    return dict(zip(("mean", "max"), ERRORS[bool(candidate.moves)]))


def checked_products() -> list[Table]:
    """Return all products beside their predictions, with the errors of each source without its fitted rows."""
    title = "Seconds of products; *: a constant of the machine was fitted to the row"
    return [published_table(title, product_times(), "product", "ranks")]
