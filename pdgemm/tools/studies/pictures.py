"""Pictures of one product: the candidates of its plan, its words from rank to rank, and the timeline of a run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pdgemm.planning.search.candidate_table import Candidate
from pdgemm.support.files import check_writable, write_file
from pdgemm.support.text import in_bytes, in_seconds, in_words
from pdgemm.tools.profiling.profile import Profile, Rank
from pdgemm.tools.profiling.profile_tables import figures, tables_of
from pdgemm.tools.studies.figures import drawing, figure_of_panel, form_of, saved
from pdgemm.tools.studies.page import run_page
from pdgemm.tools.studies.panels import COLORS, LIMIT, MARKERS, FigurePanel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMS = (".png", ".svg")
OF_RUNS = (".html", *FORMS)
MOST_SPANS = 20_000  # the most spans of a timeline that are drawn, more than a picture shows
# spans of a timeline: colour, upper edge and height in the row of the rank; later entries cover earlier ones
SPANS = {
    "redistribute": ("#009E73", -0.4, 0.5), "read": ("#CC79A7", -0.4, 0.5), "write": ("#000000", -0.4, 0.5),
    "plan": ("#bbbbbb", -0.4, 0.5), "product": ("#0072B2", -0.4, 0.5), "pack": ("#56B4E9", -0.4, 0.5),
    "post": ("#444444", -0.4, 0.5), "wait": ("#E69F00", -0.4, 0.5), "sync": ("#D55E00", -0.4, 0.5),
    "transfer": ("#88888888", 0.14, 0.26),
}  # fmt: skip
BESIDE: Any = {"textcoords": "offset points", "fontsize": 7.5, "va": "bottom", "zorder": 1}


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
    """Draw time against memory for candidates, the chosen one first.   memory : limit in bytes per rank; None: none."""
    _write(FigurePanel("candidates", title, partial(_candidates, candidates, memory), wide=True, height=5.0), out)


def _candidates(candidates: Sequence[Candidate], memory: int | None, axes: Axes) -> None:
    """Draw a marker for each candidate, a ring around the chosen one, and the grids of the cheapest ones as text."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for number, name in enumerate(dict.fromkeys(x.name for x in candidates)):
        for fits in (True, False):
            alike = [x for x in candidates if x.name == name and x.fits == fits]
            style: Any = {"color": COLORS[number % len(COLORS)], "marker": MARKERS[number % len(MARKERS)]}
            style |= {"linestyle": "none", "markerfacecolor": style["color"] if fits else "white"}
            label = name if fits else f"{name}, too big"
            if alike:
                axes.plot([x.memory_bytes_per_rank for x in alike], [x.seconds for x in alike], label=label, **style)
    chosen = candidates[0]
    ring: Any = {"linestyle": "none", "marker": "o", "markersize": 15, "markerfacecolor": "none", "color": "black"}
    axes.plot([chosen.memory_bytes_per_rank], [chosen.seconds], label="chosen", **ring)
    for x, text in _beside(candidates):
        axes.annotate(text, (x.memory_bytes_per_rank, x.seconds), (5, 6), **BESIDE)
    if memory is not None:
        axes.axvline(memory, label="memory", **LIMIT)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    for axis, form in ((axes.xaxis, in_bytes), (axes.yaxis, in_seconds)):
        axis.set_major_formatter(FuncFormatter(lambda value, _, form=form: form(value)))
        axis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.2, y=0.15)
    axes.set_xlabel("memory per rank, A, B and C included")
    axes.set_ylabel("predicted time")


def _beside(candidates: Sequence[Candidate]) -> list[tuple[Candidate, str]]:
    """Return candidates, the cheapest first, with their grids as text, if the text does not cover an earlier text."""
    at = {x: np.log([max(1, x.memory_bytes_per_rank), max(1e-12, x.seconds)]) for x in candidates}
    wide, high = (max(1e-12, float(np.ptp(x))) for x in zip(*at.values()))
    annotated = list[Candidate]()
    for x in sorted(candidates, key=lambda x: (not x.chosen, not x.fits, x.cost)):
        apart = [abs(at[x] - at[other]) / (wide, high) for other in annotated]
        if all(across > 0.25 or up > 0.05 for across, up in apart):
            annotated.append(x)
    return [(x, x.grid_text + (f", moves {x.moves}" if x.moves else "")) for x in annotated]


# ------------------------------------------------------------------ words from rank to rank
def draw_words(words: np.ndarray, out: Path, title: str) -> None:
    """Draw the words that each rank (a row) sends to each other rank (a column), or lets that rank read."""
    _write(_panel_of_words(words, title), out)


def _panel_of_words(words: np.ndarray, title: str) -> FigurePanel:
    return FigurePanel("words", title, partial(_words, words), height=5.0)


def _words(words: np.ndarray, axes: Axes) -> None:
    """Draw a square for each pair of ranks; pairs without words are left white."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    some = np.ma.masked_equal(words, 0)
    image = axes.imshow(some, cmap="viridis_r", vmin=0, vmax=max(1, int(words.max(initial=0))), interpolation="nearest")
    bar = axes.figure.colorbar(image, ax=axes, format=FuncFormatter(lambda value, _: in_words(value)))
    bar.set_label("words, none: white")
    for axis, name in ((axes.xaxis, "receives, or reads"), (axes.yaxis, "sends, or is read")):
        axis.set_major_locator(MaxNLocator(12, integer=True))
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
