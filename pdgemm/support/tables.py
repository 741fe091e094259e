"""A table has named columns and rows of text; here it becomes lines, and in the report of a study HTML."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

WIDTH = 160  # characters of a line


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
        """The lines of the table; only words in the last column are wrapped."""
        from rich import table
        from rich.console import Console

        drawn = table.Table(
            box=None, pad_edge=False, title=self.title or None, title_justify="left", show_header=any(self.columns)
        )
        for number, name in enumerate(self.columns, 1):
            left = name in self.words
            drawn.add_column(name, justify="left" if left else "right", no_wrap=not left or number < len(self.columns))
        for row in self.rows:
            drawn.add_row(*row)
        console = Console(width=WIDTH, color_system=None, markup=False, emoji=False, highlight=False)
        with console.capture() as captured:
            console.print(drawn)
        return "\n".join(line.rstrip() for line in captured.get().splitlines())
