"""Numbers, names and tables as text for people."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from math import isfinite

# control characters of terminals, and characters that reverse the order of letters; not line feeds and tabs
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")

_WIDTH = 1 << 16  # characters; no line of a table is longer


_interface = ["Python"]  # or "command line", while a command runs


@contextmanager
def on_command_line() -> Iterator[None]:
    """Run a block as a command, whose messages name its options."""
    _interface.append("command line")
    try:
        yield
    finally:
        _interface.pop()


def typed(option: str, argument: str) -> str:
    """Return the name of an argument for a message: the option of a command, or the argument of a function."""
    return option if _interface[-1] == "command line" else argument


def printable(text: str) -> str:
    """Return a text with control characters escaped: names in files may hold characters that a terminal would obey."""
    return _OBEYED.sub(lambda x: ascii(x[0])[1:-1], text)


def echo(text: object, err: bool = False) -> None:
    """Print lines to standard output, or to standard error; the program continues where the stream is closed."""
    import click

    try:
        click.echo(printable(str(text)), err=err)
    except BrokenPipeError:
        setattr(sys, "stderr" if err else "stdout", open(os.devnull, "w"))  # noqa: SIM115


def algorithm_name(algorithm: str, inside: str) -> str:
    """Return the name of an algorithm, with the name of the algorithm inside its layers in brackets."""
    return f"{algorithm} ({inside})" if inside else algorithm


def op_name(name: str, letter: str) -> str:
    """Return the name of op(matrix): 'A', 'A^T' or 'A^H' for the letters "N", "T" and "C"."""
    return name + {"N": "", "T": "^T", "C": "^H"}[letter]


def sides(pr: int, pc: int, layers: int) -> str:
    """Return the sides of a grid: '2 x 3', or '2 x 3 x 4' where it has several layers."""
    return " x ".join(map(str, (pr, pc, layers) if layers > 1 else (pr, pc)))


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: '1 rank', '3 ranks'."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def counted_short(number: float, noun: str = "word") -> str:
    """Return a large number with its noun in three digits: '604 M words'.  Below 10,000 it is written in full."""
    if abs(number) < 9999.5:
        return counted(round(number), noun)
    value, prefix = _in_unit(number, _PREFIXES)
    return f"{_digits(value, 3)} {prefix}{' ' if prefix else ''}{noun}s"


def in_words(words: float) -> str:
    """Return a number of words (elements) as text: '604 M words', '3072 words'."""
    return counted_short(words, "word")


def in_seconds(seconds: float) -> str:
    """Return a time in the unit that fits it: '12 us', '3.4 ms', '1.2 s', '18 min', '5.5 h', '3.0 days'."""
    value, unit = _in_unit(seconds, _TIMES)
    return f"{_digits(value, 2)} {unit}" if seconds else "0 s"


def in_rate(flops_per_second: float) -> str:
    """Return a rate of arithmetic in the unit that fits it: '3.1 MFLOP/s', '84 GFLOP/s'."""
    value, prefix = _in_unit(flops_per_second, _PREFIXES)
    return f"{_digits(value, 2)} {prefix}FLOP/s"


def in_bytes(size: float) -> str:
    """Return a number of bytes in the unit that fits it: 1536 is '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


# the least value that is written in a unit, the value of the unit, and its name
_PREFIXES = (
    (1e18, 1e18, "E"), (1e15, 1e15, "P"), (1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e3, 1e3, "k"),
    (0, 1, ""),
)  # fmt: skip
_TIMES = (
    (48 * 3600, 24 * 3600, "days"), (7200, 3600, "h"), (120, 60, "min"), (1, 1, "s"), (1e-3, 1e-3, "ms"),
    (1e-6, 1e-6, "us"), (0, 1e-9, "ns"),
)  # fmt: skip


def _in_unit(number: float, units: tuple[tuple[float, float, str], ...]) -> tuple[float, str]:
    """Return a number in the largest unit that fits its rounded value, and the unit: 999,960 is 1.0 M, not 1000 k."""
    rounded = abs(float(f"{number:.3g}")) if isfinite(number) else 1.0
    value, unit = next((value, unit) for least, value, unit in units if rounded >= least)
    return number / value, unit


def _digits(number: float, digits: int) -> str:
    """Return a number with at least `digits` significant digits, without an exponent: '0.34', '3.4', '34', '340'."""
    if not number or not isfinite(number):
        return f"{number:.0f}"
    before = int(f"{number:.{digits - 1}e}".split("e")[1])  # the exponent after rounding
    return f"{number:.{max(digits - 1 - before, 0)}f}"


def ranks_text(ranks: list[int]) -> str:
    """Return a list of ranks as text: [0, 1, 2, 5] -> 'ranks 0-2, 5'."""
    # consecutive ranks differ from their positions in the list by the same number
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), key=lambda x: x[1] - x[0])]
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def short_name(name: str, size: int) -> str:
    """Return a file name of at most `size` bytes: `name`, or its beginning and a hash of the whole name."""
    encoded = os.fsencode(name)
    if len(encoded) <= size:
        return name
    ending = f"~{hashlib.sha256(encoded).hexdigest()[:16]}"
    return encoded[: size - len(ending)].decode(errors="ignore") + ending


@dataclass(frozen=True)
class Table:
    """A table for people, whose cells are formatted already.

    columns : the names of the columns; a table whose names are all "" has no heading.
    rows    : rows of cells, one cell for each column.
    words   : the columns of words, which are aligned at the left; columns of numbers are aligned at the right.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Collection[str] = ()
    title: str = ""

    def __str__(self) -> str:
        """Return the lines of the table; no line is wrapped or cut."""
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
