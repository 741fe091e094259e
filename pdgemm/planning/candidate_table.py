"""The table of the candidates of a plan, with what each of them costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pdgemm.support.tables import Table
from pdgemm.support.text import counted, in_bytes, in_seconds, in_words, named, sides


@dataclass(frozen=True)
class Candidate:
    """An algorithm on a grid, and what the product costs the busiest rank.

    words_per_rank : elements of A, B and C that the rank receives, redistribution included.
    lower_bound_words : elements that the busiest rank receives at least, by any algorithm.
    memory_bytes_per_rank : bytes of all buffers and copies; `pdgemm plan` adds those of A, B and C.
    moves          : names of the matrices that are redistributed, such as "AB".
    inside         : name of the algorithm of a layer.
    verdict        : "chosen", or why it was not chosen.
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
    inside: str = ""
    verdict: str = ""

    @property
    def ratio(self) -> float:
        """The ratio of words to the lower bound; 1 where nothing needs to be sent and nothing is sent."""
        if self.lower_bound_words:
            return self.words_per_rank / self.lower_bound_words
        return 1.0 if not self.words_per_rank else float("inf")

    @property
    def beside_bound(self) -> str:
        """The ratio as a phrase; the bound assumes that all ranks take part, and fewer ranks may send less."""
        idle = self.words_per_rank < 0.999 * self.lower_bound_words
        if not self.lower_bound_words:
            return "none is needed"
        return "below the bound for all ranks: some are idle" if idle else f"{self.ratio:.3g} times the lower bound"

    @property
    def name(self) -> str:
        return named(self.algorithm, self.inside)

    @property
    def grid_text(self) -> str:
        return sides(*self.grid, self.layers)

    def as_dict(self) -> dict[str, Any]:
        """Return plain numbers and strings, for JSON."""
        return asdict(self)

    def summary(self, mnk: tuple[int, int, int], ranks: int) -> str:
        """Return the candidate as one line."""
        (m, n, k), messages = mnk, counted(round(self.messages_per_rank), "message")
        moved = f", redistributing {', '.join(self.moves)}" if self.moves else ""
        return (
            f"C ({m} x {n}) := A ({m} x {k}) B on {counted(ranks, 'rank')} by {self.name} on "
            f"{self.grid_text}{moved}: {in_words(self.words_per_rank)} in {messages} per rank ({self.beside_bound}), "
            f"{in_bytes(self.memory_bytes_per_rank)}, {in_seconds(self.seconds)}"
        )


def table(candidates: Sequence[Candidate]) -> str:
    """Return the candidates as a table with a line for each."""
    names = ("algorithm", "grid", "moves", "seconds", "words", "/ bound", "messages", "memory", "verdict")
    rows = [
        (
            x.name, x.grid_text, x.moves or "-", f"{x.seconds:.3g}", f"{x.words_per_rank:.4g}", f"{x.ratio:.3f}",
            f"{x.messages_per_rank:.0f}", in_bytes(x.memory_bytes_per_rank), x.verdict,
        )
        for x in candidates
    ]  # fmt: skip
    return str(Table(names, rows, words=("algorithm", "grid", "moves", "verdict")))
