"""The candidates of a plan as a picture: the time of each against its memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pdgemm.planning.candidate_table import Candidate
from pdgemm.studies.figures import alone, drawing, form_of, saved
from pdgemm.studies.panels import COLORS, LIMIT, MARKERS, Panel
from pdgemm.support.files import check_writable, write
from pdgemm.support.text import in_bytes, in_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMS = (".png", ".svg")
BESIDE: Any = {"textcoords": "offset points", "fontsize": 7.5, "va": "bottom", "zorder": 1}


def check_picture(out: Path) -> None:
    """Raise ArgumentError or FileError where no picture can be written to a file of this name."""
    form_of(out, FORMS)
    check_writable(out, 0)


def draw_candidates(candidates: Sequence[Candidate], out: Path, title: str, memory: int | None) -> None:
    """Write the picture.   candidates : the chosen one first.   memory : bytes per rank that there are; None: any.

    Raises what `check_picture` raises, and ArgumentError where matplotlib is missing.
    """
    panel = Panel("candidates", title, partial(_draw, candidates, memory), wide=True, height=5.0)
    with drawing():
        data = saved(alone(panel), form_of(out, FORMS)[1:])
    write(out, data)


def _draw(candidates: Sequence[Candidate], memory: int | None, axes: Axes) -> None:
    """Draw a marker for each candidate, a ring around the chosen one, and grids beside the cheapest ones."""
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
    """Return candidates, the cheapest first, with their grids; not those that lie where another text is."""
    at = {x: np.log([max(1, x.memory_bytes_per_rank), max(1e-12, x.seconds)]) for x in candidates}
    wide, high = (max(1e-12, float(np.ptp(x))) for x in zip(*at.values()))
    found = list[Candidate]()
    for x in sorted(candidates, key=lambda x: (not x.chosen, not x.fits, x.cost)):
        apart = [abs(at[x] - at[other]) / (wide, high) for other in found]
        if all(across > 0.25 or up > 0.05 for across, up in apart):
            found.append(x)
    return [(x, x.grid_text + (f", moves {x.moves}" if x.moves else "")) for x in found]
