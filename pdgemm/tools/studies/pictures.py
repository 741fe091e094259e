"""Pictures of one product: the candidates of its plan, its words from rank to rank, and the timeline of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pdgemm.planning.search.candidate_table import Candidate
from pdgemm.support.files import write_file
from pdgemm.support.text import in_bytes, in_seconds
from pdgemm.tools.profiling import profile_tables
from pdgemm.tools.profiling.profile import Profile, Rank
from pdgemm.tools.studies import figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BOX = {"boxstyle": "square,pad=0.1", "facecolor": "white", "alpha": 0.75, "linewidth": 0}
MOST_SPANS = 20_000  # the most spans of a timeline that are drawn: more than a picture can resolve
# spans of a timeline: colour, upper edge and height in the row of the rank; later entries cover earlier ones
SPANS = {
    "verify": ("#a6761d", -0.4, 0.5),
    "F": ("#a6cee3", -0.4, 0.5), "B": ("#fdbf6f", -0.4, 0.5), "W": ("#9e9ac8", -0.4, 0.5),
    "redistribute": ("#009E73", -0.4, 0.5), "read": ("#CC79A7", -0.4, 0.5), "write": ("#000000", -0.4, 0.5),
    "plan": ("#F0E442", -0.4, 0.5), "product": ("#0072B2", -0.4, 0.5), "batch": ("#003f63", -0.4, 0.5),
    "epilogue": ("#7b5ea7", -0.4, 0.5),
    "pack": ("#56B4E9", -0.4, 0.5), "post": ("#444444", -0.4, 0.5), "wait": ("#E69F00", -0.4, 0.5),
    "sync": ("#D55E00", -0.4, 0.5), "transfer": ("#88888888", 0.14, 0.26),
}  # fmt: skip


def check_page(out: Path, overwrite: bool) -> None:
    """Raise ArgumentError or FileError where no page of a run can be written to this file, or packages are missing."""
    figures.check_output(out, figures.FORMS[:1], overwrite)
    with figures.drawing():
        pass


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _write(figure: Figure, out: Path) -> None:
    write_file(out, figures.saved(figure, out.suffix.lower()[1:]))


# ------------------------------------------------------------------ candidates
def draw_candidates(candidates: Sequence[Candidate], out: Path, title: str, memory: int | None) -> None:
    """Draw the time and the memory of each candidate.   memory : the limit in bytes per rank; None: no limit."""
    with figures.drawing():
        figure = _figure(figures.WIDTH, 1.2 + 0.21 * len(candidates))
        figure.suptitle(title, fontsize=9.5)
        _candidates(candidates, memory, *figure.subplots(1, 2, sharey=True))
        figures.add_legend(figure, "outside lower center", columns=4)
        _write(figure, out)


def _candidates(candidates: Sequence[Candidate], memory: int | None, left: Axes, right: Axes) -> None:
    """Draw a row for each candidate, in the order of the table: its time at the left, its memory at the right."""
    chosen, other, misfit = ("chosen", "C0"), ("not chosen", "#bbbbbb"), ("does not fit the memory", "white")
    looks = [chosen if x.chosen else other if x.fits else misfit for x in candidates]
    style: Any = {"color": [color for _, color in looks], "label": [name for name, _ in looks]}
    rows = [f"{x.name}, {x.grid_text}" + f", moves {x.moves}" * bool(x.moves) for x in candidates]
    for axes, name, values, form in (
        (left, "predicted time", [x.seconds for x in candidates], in_seconds),
        (right, "memory per rank, A, B and C included", [x.memory_bytes_per_rank for x in candidates], in_bytes),
    ):
        bars = axes.barh(range(len(rows)), values, edgecolor="black", linewidth=0.6, **style)
        axes.bar_label(bars, [*map(form, values)], padding=3, fontsize=8, bbox=BOX)
        figures.row_axis(axes, range(len(rows)), rows)
        axes.set_xticks([])  # each bar has its number
        axes.margins(x=0.15)
        axes.set_xlabel(name)
    if memory is not None:
        right.axvline(memory, label="memory limit", **figures.LIMIT)


# ------------------------------------------------------------------ words from rank to rank
def draw_words(words: np.ndarray, out: Path, title: str) -> None:
    """Draw the words that each rank (a row) sends to each other rank (a column), or lets that rank read."""
    with figures.drawing():
        _write(_words(words, title), out)


def _words(words: np.ndarray, title: str) -> Figure:
    """Return a figure of a square for each pair of ranks; pairs without words are left white."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    figure = _figure(figures.WIDTH / 2, 5.0)
    axes, some = figure.subplots(), np.ma.masked_equal(words, 0)
    image = axes.imshow(some, cmap="viridis_r", vmin=0, vmax=max(1, int(words.max(initial=0))), interpolation="nearest")
    ticks: Any = {"ticks": MaxNLocator(8, integer=True), "format": EngFormatter()}
    figure.colorbar(image, label="words (white: none)", shrink=0.8, **ticks)
    for axis, name in ((axes.xaxis, "receives, or reads"), (axes.yaxis, "sends, or is read")):
        axis.set_major_locator(MaxNLocator(12, integer=True, min_n_ticks=1))
        axis.set_label_text(f"rank that {name}")
    axes.set_title(title)
    axes.grid(False)
    return figure


# ------------------------------------------------------------------ the timeline of a run
def draw_timeline(profile: Profile, out: Path, title: str, said: str = "", words: np.ndarray | None = None) -> None:
    """Draw the timeline of each rank; in HTML with tables and figures of the profile, which must have its spans.

    said : the text that the command has printed.   words : the matrix of `draw_words`; both for the page.
    """
    with figures.drawing():
        timeline = _figure(figures.WIDTH, min(12.0, 1.6 + 0.4 * len(profile.ranks)))
        axes = timeline.subplots()
        _timeline(profile.ranks, axes)
        axes.set_title(title)
        figures.add_legend(timeline, "outside lower center", columns=6)
        if out.suffix.lower() != ".html":
            _write(timeline, out)
            return
        svgs = {"timeline": figures.svg_of(timeline, "timeline-")}
        if words is not None and words.any():
            svgs["words"] = figures.svg_of(_words(words, "words from rank to rank"), "words-")
        tables, facts = profile_tables.tables_of(profile), [*profile_tables.figures(profile)]
        page = figures.html_page("run.html", title=title, svgs=svgs, tables=tables, figures=facts, said=said)
    write_file(out, page)


def _timeline(ranks: Sequence[Rank], axes: Axes) -> None:
    """Draw a row for each rank: products and waits above, transfers below.

    If there are very many spans, only the longest are drawn.
    """
    begin = min((x.start for rank in ranks for x in rank.spans), default=0.0)
    end = max((x.start + x.seconds for rank in ranks for x in rank.spans), default=1.0)
    lengths = np.sort([x.seconds for rank in ranks for x in rank.spans if x.name in SPANS])
    shortest = lengths[-MOST_SPANS] if len(lengths) > MOST_SPANS else 0.0
    for name, (color, bottom, high) in SPANS.items():
        for rank in ranks:
            spans = [(x.start - begin, x.seconds) for x in rank.spans if x.name == name and x.seconds >= shortest]
            if spans:
                axes.broken_barh(spans, (rank.number + bottom, high), facecolors=color, linewidth=0, label=name)
    axes.set_xlim(0, max(end - begin, 1e-9))
    axes.set_ylim(len(ranks) - 0.4, -0.6)
    axes.set_yticks([x.number for x in ranks][:: max(1, len(ranks) // 32)])
    axes.grid(False, axis="y")
    axes.set_ylabel("rank")
    less = f"; only spans of {in_seconds(shortest)} and more are drawn" if shortest else ""
    axes.set_xlabel(f"seconds{less}")
