"""A published number beside its prediction, and tables of such rows; the numbers are in CSV files of this folder."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from pdgemm.support.text import Table


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
