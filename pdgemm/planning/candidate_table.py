"""The figures of plans side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pdgemm.support.text import counted, in_bytes, named, sides


@dataclass(frozen=True)
class Candidate:
    """What one way to a product costs a rank, the busiest one.

    words_per_rank : received, of A, B and C, redistribution included; words are elements.
    lower_bound_words : what no algorithm can do without.
    memory_bytes_per_rank : for a plan, of all buffers and copies beyond A, B and C; for `pdgemm plan`, with them.
    moves          : the matrices that are redistributed, such as "AB".
    inside         : the algorithm of a layer.
    verdict        : "chosen", or why not.
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
        """Words over the lower bound; 1 where nothing has to be sent and nothing is."""
        if self.lower_bound_words:
            return self.words_per_rank / self.lower_bound_words
        return 1.0 if not self.words_per_rank else float("inf")

    @property
    def beside_bound(self) -> str:
        """The ratio in words; the bound is of matrices shared by all ranks, and fewer ranks may send less."""
        idle = self.words_per_rank < 0.999 * self.lower_bound_words
        return "less than if all ranks took part" if idle else f"{self.ratio:.3f} of the lower bound"

    @property
    def name(self) -> str:
        return named(self.algorithm, self.inside)

    @property
    def grid_text(self) -> str:
        return sides(*self.grid, self.layers)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, for JSON."""
        return asdict(self)

    def summary(self, mnk: tuple[int, int, int], ranks: int) -> str:
        """One line."""
        m, n, k = mnk
        moved = f", redistributing {', '.join(self.moves)}" if self.moves else ""
        return (
            f"C ({m} x {n}) := A ({m} x {k}) B on {counted(ranks, 'rank')} by {self.name} on "
            f"{self.grid_text}{moved}: {self.words_per_rank:.4g} words in {self.messages_per_rank:.0f} messages per "
            f"rank ({self.beside_bound}), {in_bytes(self.memory_bytes_per_rank)}, {self.seconds:.3g} s"
        )


def table(candidates: Sequence[Candidate]) -> str:
    """As lines of equal columns."""
    from rich.console import Console
    from rich.table import Table

    drawn = Table(box=None, pad_edge=False)
    for name in ("algorithm", "grid", "moves"):
        drawn.add_column(name, no_wrap=True)
    for name in ("seconds", "words", "/ bound", "messages", "memory"):
        drawn.add_column(name, justify="right", no_wrap=True)
    drawn.add_column("verdict")
    for x in candidates:
        words, ratio = f"{x.words_per_rank:.4g}", f"{x.ratio:.3f}"
        drawn.add_row(
            x.name, x.grid_text, x.moves or "-", f"{x.seconds:.3g}", words, ratio, f"{x.messages_per_rank:.0f}",
            in_bytes(x.memory_bytes_per_rank), x.verdict,
        )  # fmt: skip
    console = Console(width=140, color_system=None)
    with console.capture() as captured:
        console.print(drawn)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
