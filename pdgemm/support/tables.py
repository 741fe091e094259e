"""A table has named columns and rows of text; here it becomes lines, and in the report of a study HTML."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

_WIDTH = 1 << 16  # characters of a line, more than any has


@dataclass(frozen=True)
class Table:
    """A table for people, whose cells are formatted already.

    columns : the names of the columns; a table whose names are all "" has no heading.
    rows    : for each row a cell of each column.
    words   : the columns that hold words, which are aligned at the left; figures are aligned at the right.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Collection[str] = ()
    title: str = ""

    def __str__(self) -> str:
        """The lines of the table are as long as they must be: none is wrapped or cut."""
        from rich import table
        from rich.console import Console

        drawn = table.Table(box=None, pad_edge=False, show_header=any(self.columns))
        for name in self.columns:
            drawn.add_column(name, justify="left" if name in self.words else "right", no_wrap=True)
        for row in self.rows:
            drawn.add_row(*row)
        console = Console(width=_WIDTH, color_system=None, markup=False, emoji=False, highlight=False)
        with console.capture() as captured:
            console.print(drawn)
        lines = [line.rstrip() for line in captured.get().splitlines()]
        return "\n".join([self.title] * bool(self.title) + lines)
