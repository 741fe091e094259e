"""Figures of studies, drawn by matplotlib, which is loaded only for drawing."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.resources import as_file, files
from importlib.util import find_spec
from io import BytesIO
from math import nan
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.support.files import MARK, check_writable
from pdgemm.support.text import counted, in_seconds
from pdgemm.tools.studies.curves import Section
from pdgemm.tools.studies.records import relative

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

IMAGES = (".png", ".svg")
FORMS = (".html", *IMAGES)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
GREY = "#444444"
LIMIT: Any = {"color": GREY, "linewidth": 1, "linestyle": ":", "zorder": 1.5}
PREDICTED: Any = {"linestyle": (0, (5, 2)), "linewidth": 1.2}
OVERSUBSCRIBED: Any = {"linestyle": "none", "markerfacecolor": "#c8c8c8"}
CROWDED = "more ranks than cores"
WIDTH, HEIGHT = 11.2, 3.6  # width of a figure and height of a row of panels, in inches
# the parts of a time, from the beginning of a bar, and their colours
SPLIT = {
    "compute": "C0", "wait for data": "C1", "wait for ranks": "C5", "pack": "C6", "redistribution": "C2",
    "rest": "#bbbbbb",
}  # fmt: skip


class FigurePanel(NamedTuple):
    """A panel: name, title, and the function that draws it.   wide : it takes a whole row.   height : in inches."""

    name: str
    title: str
    draw: Callable[[Axes], None]
    wide: bool = False
    height: float = HEIGHT


class Quantity(NamedTuple):
    """A value of measurements and predictions that a panel shows.

    value : a function of a measurement or prediction, and of the measurement on the fewest ranks of the same curve.
    limit : label of the line that shows the limit.   level : its value; None: the values of ideal scaling.
    """

    name: str
    title: str
    axis: str
    value: Callable[[Any, Any], float]
    limit: str = "ideal"
    level: float | None = None


QUANTITIES = (
    Quantity("tokens", "Tokens per second", "tokens/s", lambda x, _: x.case.tokens / x.seconds),
    Quantity("time", "Time", "time of one product [s]", lambda x, _: x.seconds),
    Quantity("efficiency", "Efficiency", "efficiency [%]", lambda x, first: 100 * relative(first, x) if first else nan),
    Quantity(
        "fraction", "Fraction of the measured peak", "fraction of the measured peak [%]",
        lambda x, _: 100 * x.fraction, "measured peak", 100,
    ),
    Quantity(
        "words", "Communication over its lower bound", "words received / lower bound",
        lambda x, _: x.over_bound or nan, "lower bound", 1,
    ),
)  # fmt: skip


@contextmanager
def drawing() -> Iterator[None]:
    """Provide the style of all figures in the block.  Raises ArgumentError where packages of a report are missing."""
    missing = [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]
    if missing:
        raise ArgumentError(f"a report needs {' and '.join(missing)}: pip install matplotlib jinja2")
    import matplotlib as mpl

    with as_file(files("pdgemm.tools.studies") / "report.mplstyle") as style, mpl.rc_context(fname=style):
        yield


# ------------------------------------------------------------------ whole figures
def check_output(out: Path, forms: Sequence[str], overwrite: bool, studies: Iterable[Path] = ()) -> str:
    """Return the extension of a report or picture in lower case.  Raises FileError or ArgumentError if it is not valid.

    forms : the valid extensions.   studies : the files of measurements, which the report must not replace.
    """
    form = out.suffix.lower()
    if form not in forms:
        some = " or ".join(filter(None, (", ".join(forms[:-1]), forms[-1])))
        raise ArgumentError(f"{out}: a report is a file with the ending {some}")
    if os.path.realpath(out) in map(os.path.realpath, studies):
        raise ArgumentError(f"{out} holds the measurements: name another file for the report")
    check_writable(out, 0, overwrite)
    return form


def groups_of(panels: Sequence[FigurePanel]) -> list[list[FigurePanel]]:
    """Return the panels of each figure: first all narrow panels, then each wide panel in a figure of its own."""
    narrow = [panel for panel in panels if not panel.wide]
    return [group for group in (narrow, *([panel] for panel in panels if panel.wide)) if group]


def figure_of(groups: Sequence[tuple[str, Sequence[FigurePanel]]]) -> Figure:
    """Return a figure of groups of panels, one below the other, each with its heading, which may be "".

    Narrow panels are two in a row, with one legend on their right; a wide panel has its legend below.
    """
    from matplotlib.figure import Figure

    rows = [-(-len(panels) // 2) for _, panels in groups]
    heights = [panels[0].height * row + 0.4 * bool(heading) for row, (heading, panels) in zip(rows, groups)]
    figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(groups), 1, height_ratios=heights, squeeze=False).flat
    for part, row, (heading, panels) in zip(parts, rows, groups):
        if heading:
            part.suptitle(heading, fontsize=11, fontweight="bold")
        every = part.subplots(row, 1 if panels[0].wide else 2, squeeze=False).flat
        for panel, axes in zip(panels, every):
            panel.draw(axes)
            axes.set_title(panel.title)
        for axes in every:  # of an odd number of panels, one place remains empty
            axes.remove()
        if panels[0].wide:
            add_legend(part, "outside lower center", columns=4)
        else:
            add_legend(part, "outside right center")
    return figure


def add_legend(place: Figure | SubFigure, where: Any, columns: int = 1) -> None:
    """Add the legend of all axes of a figure, which has each label once."""
    entries = dict[str, Any]()
    for axes in place.axes:
        for handle, label in zip(*axes.get_legend_handles_labels()):
            entries.setdefault(label, handle)
    if entries:
        place.legend(entries.values(), [fill(label, 36) for label in entries], loc=where, ncols=columns)


def saved(figure: Figure, form: str) -> bytes:
    """Return the image file of a figure, "png" or "svg"; the same figure gives the same bytes."""
    buffer = BytesIO()
    by = MARK.decode()
    metadata = {"Date": None, "Creator": by} if form == "svg" else {"Software": by}
    figure.savefig(buffer, format=form, dpi=200, metadata=metadata)
    return buffer.getvalue()


def svg_of(figure: Figure, prefix: str) -> str:
    """Return a figure as SVG for a page, with `prefix` before its ids, which must be unique on the page."""
    text = saved(figure, "svg").decode()
    svg = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}", svg)


def html_page(template: str, **facts: Any) -> bytes:
    """Return a page of HTML: a template filled with the facts."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    rules: Any = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    pages = Environment(loader=PackageLoader("pdgemm.tools.studies", "."), **rules)
    return pages.get_template(template).render(**facts).encode(errors="xmlcharrefreplace")


# ------------------------------------------------------------------ sections
def panels(section: Section) -> list[FigurePanel]:
    """Return the panels for which there are data."""
    training, words = section.training, not section.training and any(x.over_bound > 0 for x in section.points)
    several = len(section.counts) > 1 or (not training and any(curve.forecast for curve in section.curves))
    shown = {"tokens": training and several, "time": not training and several, "efficiency": several,
             "fraction": not training, "words": words}  # fmt: skip
    quantities = [x for x in QUANTITIES if shown[x.name]]
    figures = [
        FigurePanel(x.name, f"({letter}) {x.title}", partial(_lines, section, x))
        for letter, x in zip("abcd", quantities)
    ]
    title = f"({'abcde'[len(figures)]}) Where the time goes"
    height = 1.5 + 0.24 * len(section.points) + 0.15 * len(section.curves)
    return [*figures, FigurePanel("waits" if training else "split", title, partial(_split, section), True, height)]


def _lines(section: Section, quantity: Quantity, axes: Axes) -> None:
    """Draw a quantity of all points and predictions against ranks, and its limit."""
    forecasts = [] if quantity.name == "fraction" else [x.forecast for x in section.curves if x.forecast]
    counts = sorted({*section.counts, *(x.ranks for forecast in forecasts for x in forecast.predictions)})

    def line(points: Sequence[Any], first: Any, label: str, **style: Any) -> None:
        axes.plot([x.ranks for x in points], [quantity.value(x, first) for x in points], label=label, **style)

    for number, curve in enumerate(section.curves):
        color, marker = {"color": f"C{number}"}, {"marker": MARKERS[number % len(MARKERS)]}
        line(curve.line, curve.first, curve.label, zorder=3, **color, **marker)
        if crowded := [x for x in curve.line if x.oversubscribed]:
            line(crowded, curve.first, f"_{curve.label}, {CROWDED}", zorder=3.1, **color, **marker, **OVERSUBSCRIBED)
        if curve.forecast in forecasts:
            predictions = curve.forecast.predictions
            first = next((x for x in predictions if x.ranks == curve.first.ranks), None)
            line(predictions, first, f"_{curve.label}, predicted", **color, **PREDICTED)
        if quantity.name == "time":  # with the confidence intervals
            seconds = [x.seconds for x in curve.points]
            ends = np.array([x.interval or (x.seconds, x.seconds) for x in curve.points]).T
            style: Any = {"fmt": "none", "ecolor": f"C{number}", "elinewidth": 1.1, "capsize": 3}
            axes.errorbar([x.ranks for x in curve.points], seconds, np.abs(ends - seconds), **style)
    ideals = [[first.ideal(ranks) for ranks in counts] for first in section.fastest]
    for ideal in ideals if quantity.level is None else ideals[:1]:
        limits = [quantity.level or quantity.value(x, ideal[0]) for x in ideal]
        axes.plot(counts, limits, label=quantity.limit, **LIMIT)
    if forecasts:
        unknown = "" if all(x.calibrated for x in forecasts) else ", not calibrated"
        axes.plot([], [], color=GREY, label=f"predicted{unknown}", **PREDICTED)
    _scale(axes, section, counts, logarithmic=quantity.name in ("time", "tokens"))
    axes.set_ylabel(quantity.axis)


def _scale(axes: Axes, section: Section, counts: Sequence[int], logarithmic: bool) -> None:
    """Scale the axis of ranks by powers of two, and the other one from 0 on, or logarithmically with plain numbers.

    The numbers of ranks after the last one that was measured are shaded.
    """
    from matplotlib.ticker import FixedLocator, LogLocator

    axes.set_xscale("log", base=2)
    axes.set_xlim(counts[0] / 2**0.5, counts[-1] * 2**0.5)
    axes.xaxis.set_major_locator(FixedLocator(counts, nbins=10))
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_xlabel("ranks")
    if any(x.oversubscribed for x in section.points):
        axes.plot([], [], color=GREY, marker="o", label=CROWDED, **OVERSUBSCRIBED)
    last = section.counts[-1]
    if counts[-1] > last:
        shade: Any = {"color": "#f0f0f0", "zorder": 0, "linewidth": 0, "label": "beyond measurements"}
        axes.axvspan(last * 2**0.25, counts[-1] * 2**0.5, **shade)
    if logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
    else:
        axes.set_ylim(0, 1.1 * axes.dataLim.ymax)
    axes.minorticks_off()


def _split(section: Section, axes: Axes) -> None:
    """Draw a bar for each measurement: the shares of computing, waiting and so on in its time."""
    points, rows = section.points, section.rows
    # with some space between curves
    places = np.array([place + 0.6 * section.curves.index(curve) for place, (curve, _) in enumerate(rows)])
    wholes = [sum(x.parts.values()) for x in points]
    shares = [{name: 100 * part / whole for name, part in x.parts.items()} for x, whole in zip(points, wholes)]
    left = np.zeros(len(points))
    for name, color in SPLIT.items():
        if any(name in x for x in shares):
            widths = np.array([x.get(name, 0.0) for x in shares])
            bars = axes.barh(places, widths, 0.78, left, color=color, edgecolor="white", linewidth=0.4, label=name)
            left += widths
    compute = np.array([x["compute"] for x in shares])
    hidden = np.minimum(compute, 100 * np.array([x.hidden for x in points]) / wholes)
    if hidden.any():  # next to the waits: together they are the transfers
        style: Any = {"color": SPLIT["compute"], "edgecolor": "white", "hatch": "////", "linewidth": 0}
        axes.barh(places, hidden, 0.78, compute - hidden, label="compute, transfers hidden behind it", **style)
    axes.bar_label(bars, [in_seconds(x.seconds) + x.remark for x in points], padding=4, fontsize=8)
    names = [f"{curve.label}, {counted(x.ranks, 'rank')}{'*' * x.oversubscribed}" for curve, x in rows]
    row_axis(axes, places, names)
    axes.set_xlim(0, 100)
    mark = f"    (* {CROWDED})" if any(x.oversubscribed for x in points) else ""
    axes.set_xlabel(f"share of the time of a {'step' if section.training else 'product'} [%]{mark}")


def row_axis(axes: Axes, places: Sequence[float] | np.ndarray, names: Sequence[str]) -> None:
    """Name the rows of a panel, the first of which is at the top."""
    axes.set_yticks(places, names)
    axes.set_ylim(places[-1] + 0.6, -0.6)
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
