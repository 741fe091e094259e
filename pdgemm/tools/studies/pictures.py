"""Pictures of one product: the candidates of its plan, its words from rank to rank, and the timeline of a run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pdgemm.planning.search.candidate_table import Candidate
from pdgemm.support.files import check_writable, write_file
from pdgemm.support.text import in_bytes, in_seconds
from pdgemm.tools.profiling.profile import Profile, Rank
from pdgemm.tools.profiling.profile_tables import figures, tables_of
from pdgemm.tools.studies.figures import drawing, figure_of_panel, form_of, saved
from pdgemm.tools.studies.page import run_page
from pdgemm.tools.studies.panels import BOX, COLORS, LIMIT, FigurePanel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMS = (".png", ".svg")
OF_RUNS = (".html", *FORMS)
MOST_SPANS = 20_000  # the most spans of a timeline that are drawn, more than a picture shows
# spans of a timeline: colour, upper edge and height in the row of the rank; later entries cover earlier ones
SPANS = {
    "forward": ("#cfe6f5", -0.4, 0.5), "backward": ("#fbe3b8", -0.4, 0.5), "verify": ("#a6761d", -0.4, 0.5),
    "F": ("#a6cee3", -0.4, 0.5), "B": ("#fdbf6f", -0.4, 0.5), "W": ("#9e9ac8", -0.4, 0.5),
    "redistribute": ("#009E73", -0.4, 0.5), "read": ("#CC79A7", -0.4, 0.5), "write": ("#000000", -0.4, 0.5),
    "plan": ("#F0E442", -0.4, 0.5), "product": ("#0072B2", -0.4, 0.5), "batch": ("#003f63", -0.4, 0.5),
    "epilogue": ("#7b5ea7", -0.4, 0.5), "reduce": ("#66c2a5", -0.4, 0.5), "optimizer": ("#8b1a4a", -0.4, 0.5),
    "pack": ("#56B4E9", -0.4, 0.5), "post": ("#444444", -0.4, 0.5), "wait": ("#E69F00", -0.4, 0.5),
    "sync": ("#D55E00", -0.4, 0.5), "transfer": ("#88888888", 0.14, 0.26),
}  # fmt: skip


def check_picture(out: Path, overwrite: bool = False, forms: Sequence[str] = FORMS) -> None:
    """Raise ArgumentError or FileError where no picture can be written to this file."""
    form_of(out, forms)
    check_writable(out, 0, overwrite)


def check_page(out: Path, overwrite: bool) -> None:
    """Raise ArgumentError or FileError where no page of a run can be written to this file, or packages are missing."""
    check_picture(out, overwrite, OF_RUNS[:1])
    with drawing():
        pass


def _write(panel: FigurePanel, out: Path) -> None:
    """Write a picture.  Raises the errors of `check_picture`, and ArgumentError where matplotlib is missing."""
    with drawing():
        data = saved(figure_of_panel(panel), form_of(out, FORMS)[1:])
    write_file(out, data)


# ------------------------------------------------------------------ candidates
def draw_candidates(candidates: Sequence[Candidate], out: Path, title: str, memory: int | None) -> None:
    """Draw the time and the memory of each candidate.   memory : limit in bytes per rank; None: none."""
    height = 1.2 + 0.21 * len(candidates)
    _write(FigurePanel("candidates", title, partial(_candidates, candidates, memory), True, height), out)


def _candidates(candidates: Sequence[Candidate], memory: int | None, axes: Axes) -> None:
    """Draw a row for each candidate, in the order of the table: its time at the left, its memory at the right."""
    whole: Any = axes.get_subplotspec()
    halves = whole.subgridspec(1, 2)
    axes.set_subplotspec(halves[0])
    right = axes.figure.add_subplot(halves[1], sharey=axes)
    looks = {"chosen": COLORS[0], "not chosen": "#bbbbbb", "does not fit the memory": "white"}
    look_of = [[*looks][0 if x.chosen else 1 if x.fits else 2] for x in candidates]
    for half, name, values, form in (
        (axes, "predicted time", [x.seconds for x in candidates], in_seconds),
        (right, "memory per rank, A, B and C included", [x.memory_bytes_per_rank for x in candidates], in_bytes),
    ):
        for look in dict.fromkeys(look_of):
            rows = [row for row, other in enumerate(look_of) if other == look]
            style: Any = {"color": looks[look], "edgecolor": "black", "linewidth": 0.6, "label": look}
            bars = half.barh(rows, [values[row] for row in rows], **style)
            half.bar_label(bars, [form(values[row]) for row in rows], padding=3, fontsize=8, bbox=BOX)
        half.set_xticks([])  # each bar has its number
        half.margins(x=0.15)
        half.set_xlabel(name)
        half.grid(False)
        half.tick_params(axis="y", length=0, labelleft=half is axes)
    if memory is not None:
        right.axvline(memory, **LIMIT)
        axes.plot([], [], label="memory limit", **LIMIT)  # for the legend
    moves = [f", moves {x.moves}" * bool(x.moves) for x in candidates]
    axes.set_yticks(range(len(candidates)), [f"{x.name}, {x.grid_text}{more}" for x, more in zip(candidates, moves)])
    axes.set_ylim(len(candidates) - 0.4, -0.6)


# ------------------------------------------------------------------ words from rank to rank
def draw_words(words: np.ndarray, out: Path, title: str) -> None:
    """Draw the words that each rank (a row) sends to each other rank (a column), or lets that rank read."""
    _write(_panel_of_words(words, title), out)


def _panel_of_words(words: np.ndarray, title: str) -> FigurePanel:
    return FigurePanel("words", title, partial(_words, words), height=5.0)


def _words(words: np.ndarray, axes: Axes) -> None:
    """Draw a square for each pair of ranks; pairs without words are left white."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    some = np.ma.masked_equal(words, 0)
    image = axes.imshow(some, cmap="viridis_r", vmin=0, vmax=max(1, int(words.max(initial=0))), interpolation="nearest")
    beside = axes.inset_axes((1.04, 0, 0.05, 1))  # as high as the map, whose squares determine its height
    ticks: Any = {"ticks": MaxNLocator(8, integer=True), "format": EngFormatter()}
    axes.figure.colorbar(image, cax=beside, label="words (white: none)", **ticks)
    for axis, name in ((axes.xaxis, "receives, or reads"), (axes.yaxis, "sends, or is read")):
        axis.set_major_locator(MaxNLocator(12, integer=True, min_n_ticks=1))
        axis.set_label_text(f"rank that {name}")
    axes.grid(False)


# ------------------------------------------------------------------ the timeline of a run
def draw_timeline(profile: Profile, out: Path, title: str, said: str = "", words: np.ndarray | None = None) -> None:
    """Draw the timeline of each rank; in HTML with tables and figures of the profile, which must have its spans.

    said : the text that the command has printed.   words : from each rank (a row) to each other; both for the page.
    """
    ranks = profile.ranks
    panel = FigurePanel("timeline", title, partial(_timeline, ranks), True, min(12.0, 1.6 + 0.4 * len(ranks)))
    if out.suffix.lower() != ".html":
        _write(panel, out)
        return
    with drawing():
        panels = (
            [panel] if words is None or not words.any() else [panel, _panel_of_words(words, "words from rank to rank")]
        )
        svgs = {x.name: saved(figure_of_panel(x), "svg").decode() for x in panels}
        text = run_page(title, svgs, tables_of(profile), [*figures(profile)], said)
    write_file(out, text.encode(errors="xmlcharrefreplace"))


def _timeline(ranks: Sequence[Rank], axes: Axes) -> None:
    """Draw a row for each rank: products and waits above, transfers below; of very many spans only the longest."""
    begin = min((x.start for rank in ranks for x in rank.spans), default=0.0)
    end = max((x.start + x.seconds for rank in ranks for x in rank.spans), default=1.0)
    lengths = np.sort([x.seconds for rank in ranks for x in rank.spans if x.name in SPANS])
    shortest = lengths[-MOST_SPANS] if len(lengths) > MOST_SPANS else 0.0
    for name, (color, bottom, high) in SPANS.items():
        drawn = False
        for rank in ranks:
            spans = [(x.start - begin, x.seconds) for x in rank.spans if x.name == name and x.seconds >= shortest]
            if spans:
                label = None if drawn else name
                axes.broken_barh(spans, (rank.number + bottom, high), facecolors=color, linewidth=0, label=label)
                drawn = True
    axes.set_xlim(0, max(end - begin, 1e-9))
    axes.set_ylim(len(ranks) - 0.4, -0.6)
    axes.set_yticks([x.number for x in ranks][:: max(1, len(ranks) // 32)])
    axes.grid(False, axis="y")
    axes.set_ylabel("rank")
    less = f"; only spans of {in_seconds(shortest)} and more are drawn" if shortest else ""
    axes.set_xlabel(f"seconds{less}")
