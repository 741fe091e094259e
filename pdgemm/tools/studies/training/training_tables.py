"""The tables of a report that are about training."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdgemm.support.text import Table, in_seconds
from pdgemm.tools.studies.training.training_curves import TrainingPoint, TrainingSection

# the columns: each function returns a cell for a section and one of its points
COLUMNS_OF_TRAINING: dict[str, Callable[[TrainingSection, TrainingPoint], str]] = {
    "case": lambda section, x: x.name,
    "ranks": lambda section, x: f"{x.ranks}{'*' * x.oversubscribed}",
    "layout": lambda section, x: x.training.layout,
    "samples": lambda section, x: str(x.case.batch),
    "micro-batches": lambda section, x: str(x.training.microbatches),
    "a step": lambda section, x: in_seconds(x.seconds),
    "median [s]": lambda section, x: f"{x.seconds:.4g}",
    "95% interval [s]": lambda section, x: f"{x.interval[0]:.4g} to {x.interval[1]:.4g}" if x.interval else "-",
    "tokens/s": lambda section, x: f"{x.tokens_per_second:,.0f}",
    "efficiency [%]": lambda section, x: f"{100 * section.efficiency(x):.0f}",
    "planned": lambda section, x: in_seconds(x.planned.seconds),
    "planned [s]": lambda section, x: f"{x.planned.seconds:.4g}",
    "plan's error [%]": lambda section, x: _error(x),
    "planned bubble [%]": lambda section, x: f"{100 * x.training.bubble / (1 + x.training.bubble):.0f}",
    "waiting [%]": lambda section, x: f"{100 * x.parts['wait'] / sum(x.parts.values()):.0f}",
    "MFU [%]": lambda section, x: _percent(x.training.mfu),
    "HFU [%]": lambda section, x: _percent(x.training.hfu),
    "words by formulas": lambda section, x: x.words_verdict,
    "last loss": lambda section, x: f"{x.training.losses[-1]:.6f}",
    "core-hours": lambda section, x: f"{x.cost.core_hours:.3g}",
}
KEYS_OF_TRAINING = (
    "ranks", "layout", "samples", "a step", "tokens/s", "efficiency [%]", "planned", "plan's error [%]", "MFU [%]",
    "words by formulas",
)  # fmt: skip
COLUMNS_OF_WORDS = (
    "case", "kind", "received by the busiest rank", "its formula", "received by all ranks", "counted and formula",
)  # fmt: skip


def tables_of_training(section: TrainingSection) -> dict[str, Table]:
    """Return the tables of a section, by their headings."""
    left_out = {"ranks", "layout", "a step", "planned", "words by formulas"}
    columns = [name for name in COLUMNS_OF_TRAINING if name not in left_out]
    words = [
        (x.name, y.kind, f"{y.counted:,.0f}", "-" if y.formula is None else f"{y.formula:,.0f}",
         f"{y.all_ranks:,.0f}", y.verdict)
        for x in section.points
        for y in x.training.words
    ]  # fmt: skip
    of_words = Table(COLUMNS_OF_WORDS, words, words=("case", "kind", "counted and formula"))
    return {
        "the fastest layout on each number of ranks": _table(section, KEYS_OF_TRAINING, section.fastest),
        "All measurements": _table(section, columns, section.points),
        **({"Words received in a step, by kind": of_words} if words else {}),
    }


def _table(section: TrainingSection, names: Sequence[str], points: Sequence[TrainingPoint]) -> Table:
    rows = [[COLUMNS_OF_TRAINING[name](section, x) for name in names] for x in points]
    return Table(names, rows, words=("case", "layout", "words by formulas"))


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}"


def _error(x: TrainingPoint) -> str:
    unknown = " (uncalibrated)" if x.training.mfu is None else ""
    return f"{100 * (x.planned.seconds / x.seconds - 1):+.0f}{unknown}"
