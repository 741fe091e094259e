"""The table of the candidates of a plan and their costs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isfinite, prod
from textwrap import fill
from typing import Any

from pdgemm.support.text import Table, algorithm_name, counted, counted_short, in_bytes, in_seconds, in_words, sides

WIDTH = 80  # columns of a terminal


@dataclass(frozen=True)
class Candidate:
    """An algorithm on a grid, and the cost of the product on the busiest rank.

    words_per_rank : elements of A, B and C that the rank receives, redistribution included.
    lower_bound_words : lower bound, for any algorithm, on the elements that the busiest rank receives.
    memory_bytes_per_rank : bytes of all buffers and copies; `pdgemm plan` adds the bytes of A, B and C.
    moves          : names of the matrices that are redistributed, such as "AB".
    node_to_node   : names of those that are redistributed by one message between two nodes (`NodeMessages`).
    inside         : name of the algorithm of a layer.
    collective     : "allgather" or "reduce_scatter" if this is all that the ranks send to each other; else "".
    cost           : the seconds, with redistribution counted twice; the planner compares these costs.
    fits           : does the candidate fit the memory limit?
    verdict        : "chosen", or the reason why the candidate was not chosen.
    """

    algorithm: str
    grid: tuple[int, int]
    layers: int
    words_per_rank: float
    lower_bound_words: float
    messages_per_rank: float
    memory_bytes_per_rank: float
    seconds: float
    chosen: bool = False
    moves: str = ""
    node_to_node: str = ""
    inside: str = ""
    collective: str = ""
    verdict: str = ""
    cost: float = 0.0
    fits: bool = True

    @property
    def ratio(self) -> float:
        """The ratio of words to the lower bound; 1 if both are 0."""
        if self.lower_bound_words:
            return self.words_per_rank / self.lower_bound_words
        return 1.0 if not self.words_per_rank else float("inf")

    @property
    def beside_bound(self) -> str:
        """The ratio of words to the lower bound, as a phrase.

        The bound assumes that all ranks work; a product on fewer ranks may send less.
        """
        idle = self.words_per_rank < 0.999 * self.lower_bound_words
        if not self.lower_bound_words:
            return "none is needed"
        return "below the bound for all ranks: some are idle" if idle else f"{_ratio(self.ratio)} times the lower bound"

    @property
    def name(self) -> str:
        return algorithm_name(self.algorithm, self.inside)

    @property
    def grid_text(self) -> str:
        return sides(*self.grid, self.layers)

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers and strings, for JSON."""
        return asdict(self)

    def summary(self, mnk: tuple[int, int, int], ranks: int) -> str:
        """Return the candidate as one line."""
        m, n, k = mnk
        moved = f", redistributing {', '.join(self.moves)}" if self.moves else ""
        moved += f" ({', '.join(self.node_to_node)} by one message from node to node)" if self.node_to_node else ""
        name = algorithm_name(self.algorithm, self.inside or self.collective)
        idle = ranks - prod(self.grid) * self.layers
        resting = f" ({counted(idle, 'rank')} idle)" if idle > 0 else ""
        return (
            f"C ({m} x {n}) := A ({m} x {k}) B on {counted(ranks, 'rank')} by {name} on "
            f"{self.grid_text}{resting}{moved}: {in_seconds(self.seconds)}, {in_words(self.words_per_rank)} in "
            f"{counted_short(self.messages_per_rank, 'message')} per rank ({self.beside_bound}), "
            f"{in_bytes(self.memory_bytes_per_rank)}"
        )


def wrapped(text: str) -> str:
    """Return the text in lines of at most 80 columns, later lines indented; no line ends between number and unit."""
    tied = re.sub(r"(\d) (?=[a-zA-Z])", "\\1\0", text)
    lines = (fill(line, WIDTH, subsequent_indent="  ", break_long_words=False) for line in tied.split("\n"))
    return "\n".join(lines).replace("\0", " ")


def candidates_table(candidates: Sequence[Candidate]) -> str:
    """Return the candidates, the chosen one first, as a table of 80 columns with one line per candidate."""
    names = ("algorithm", "grid", "moves", "time", "words", "/ bound", "memory", "cost")
    rows = [
        (
            x.name, x.grid_text.replace(" ", ""), x.moves or "-", in_seconds(x.seconds),
            _short(x.words_per_rank), _ratio(x.ratio),
            in_bytes(x.memory_bytes_per_rank), _cost(x, candidates[0]),
        )
        for x in candidates
    ]  # fmt: skip
    return str(Table(names, rows, words=("algorithm", "grid", "moves")))


def _short(number: float) -> str:
    return in_words(number).removesuffix("s").removesuffix(" word")


def _ratio(ratio: float) -> str:
    if ratio >= 1000:
        return _short(ratio) if isfinite(ratio) else "inf"
    return f"{ratio:.3f}" if ratio < 10 else f"{ratio:.1f}"


def _cost(x: Candidate, chosen: Candidate) -> str:
    """Return the ratio of a candidate's cost to the chosen candidate's, or "chosen", or "too big" for the memory."""
    if x.chosen:
        return "chosen"
    if not x.fits:
        return "too big"
    return _ratio(x.cost / chosen.cost) if chosen.cost else "-"
