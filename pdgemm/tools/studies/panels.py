"""The panels of a report, each of which draws one figure of a section."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from math import isfinite, nan
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pdgemm.schedules.formulas import lower_bound
from pdgemm.support.text import counted
from pdgemm.tools.studies.curves import Point, Section
from pdgemm.tools.studies.predictions import Predicted
from pdgemm.tools.studies.records import Measurement, relative

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe & Ito, without yellow, which is too light for lines; Wong, Nature Methods 8, 441 (2011)
COLORS = ("#0072B2", "#E69F00", "#009E73", "#000000", "#CC79A7", "#D55E00", "#56B4E9")  # neighbours differ in grey, too
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
HATCHES = ("", "///", "...")
DASHES: Any = ((0, (5, 2)), (0, (3, 1, 1, 1)), (0, (2, 1.2)), (0, (7, 2, 1, 2)), (0, (9, 3)))  # dotted lines are limits
GREY = "#444444"
LIMIT: Any = {"color": GREY, "linewidth": 1, "linestyle": ":", "zorder": 1.5}
SIMULATED: Any = {"linestyle": "none", "markersize": 3.5, "markerfacecolor": "white", "markeredgewidth": 0.9}
OVERSUBSCRIBED: Any = {"linestyle": "none", "markerfacecolor": "#c8c8c8"}  # more ranks than cores
BOX = {"boxstyle": "square,pad=0.1", "facecolor": "white", "alpha": 0.75, "linewidth": 0}
WIDTH, HEIGHT = 5.6, 3.9  # of a panel, in inches
# the parts of a product's time, from the beginning of a bar: part, colour, name
SPLIT = (
    ("compute", "#0072B2", "compute"),
    ("wait", "#E69F00", "wait for data"),
    ("sync", "#D55E00", "wait for ranks"),
    ("pack", "#56B4E9", "pack"),
    ("move", "#009E73", "redistribution"),
    ("rest", "#bbbbbb", "rest"),
)
PEAK = "Fraction of the measured peak"
Forecast = dict[int, Predicted]  # predictions by the number of the curve in its section
Draw = Callable[["Axes"], None]
Value = Callable[[Any, Any], float]  # arguments: a point or prediction, and that on the fewest ranks of the curve


class FigurePanel(NamedTuple):
    """A panel: name, title, and the function that draws it.   wide : it takes a whole row.   height : in inches."""

    name: str
    title: str
    draw: Draw
    wide: bool = False
    height: float = HEIGHT


def panels(section: Section, forecast: Forecast) -> list[FigurePanel]:
    """Return the panels for which there are data."""
    if not section.curves:
        return []
    drawings: list[tuple[str, str, Callable[[Section, Forecast, Axes], None]]] = []
    words = any(x.over_bound > 0 for x in section.points)
    if forecast or any(len(curve.points) > 1 for curve in section.curves):
        drawings += [("time", "Time", _time), ("efficiency", "Efficiency", _efficiency)]
        drawings += [("rate", "Rate per rank at constant memory per rank", _rate)] * (section.kind == "weak")
    if section.kind == "shapes":
        drawings.append(("fraction", PEAK, _fraction_bars))
        drawings += [("words", "Communication over its lower bound", _words_bars)] * words
    else:
        drawings.append(("fraction", PEAK, _fraction))
        drawings += [("words", "Communication", _words)] * (words or bool(forecast))
    drawings.append(("split", "Where the time goes", _split))
    figures = [
        FigurePanel(name, f"({letter}) {title}", partial(draw, section, forecast))
        for letter, (name, title, draw) in zip("abcdefgh", drawings)
    ]
    figures[-1] = figures[-1]._replace(wide=True, height=1.5 + 0.24 * len(section.points) + 0.15 * len(section.curves))
    return figures


# ------------------------------------------------------------------ figures against ranks
def _time(section: Section, forecast: Forecast, axes: Axes) -> None:
    """Draw times over ranks, with intervals, predictions and ideal lines."""
    _lines(section, forecast, axes, "time of one product [s]", lambda x, _: x.seconds)
    counts = _span(section, forecast)
    for first in _fastest(section):
        work = [first.case.on(ranks).flops / first.flops for ranks in counts]
        ideal = [first.seconds * more * (first.ranks / ranks) for more, ranks in zip(work, counts)]
        axes.plot(counts, ideal, label="ideal", **LIMIT)
    for number, curve in enumerate(section.curves):
        ranks, seconds = [x.ranks for x in curve.points], [x.seconds for x in curve.points]
        ends = np.array([x.interval or (x.seconds, x.seconds) for x in curve.points]).T
        style: Any = {"fmt": "none", "ecolor": color_of(number), "elinewidth": 1.1, "capsize": 3}
        axes.errorbar(ranks, seconds, np.abs(ends - seconds), **style)
    log_axis(axes)


def _efficiency(section: Section, forecast: Forecast, axes: Axes) -> None:
    def value(x: Any, first: Any) -> float:
        return 100 * relative(first, x) if first else nan

    _lines(section, forecast, axes, "efficiency [%]", value)
    _levels(section, forecast, axes, "ideal", [100])


def _rate(section: Section, forecast: Forecast, axes: Axes) -> None:
    def value(x: Any, first: Any = None) -> float:
        return x.flops / x.seconds / x.ranks / 1e9

    _lines(section, forecast, axes, "GFLOP/s per rank", value)
    _levels(section, forecast, axes, "ideal", [value(first) for first in _fastest(section)])


def _fraction(section: Section, forecast: Forecast, axes: Axes) -> None:
    _lines(section, {}, axes, "fraction of the measured peak [%]", lambda x, _: 100 * x.fraction)
    _levels(section, {}, axes, "measured peak", [100])


def _words(section: Section, forecast: Forecast, axes: Axes) -> None:
    """Draw words, with words over the bound as text: above the highest point, and below the lowest if it differs."""
    _lines(section, forecast, axes, "words received by the busiest rank", lambda x, _: x.words or nan)
    counts = [ranks for ranks in _span(section, forecast) if ranks > 1]
    for case in {curve.case.requested: curve.case for curve in section.curves}.values():
        bounds = [lower_bound(*case.on(ranks).mnk, ranks) or nan for ranks in counts]
        axes.plot(counts, bounds, label="lower bound", **LIMIT)
    axes.margins(y=0.15)  # space for the ratios
    style: Any = {"textcoords": "offset points", "ha": "center", "fontsize": 7, "zorder": 4, "bbox": BOX}
    for ranks in section.counts:
        points = [x for x in section.points if x.ranks == ranks and x.words and isfinite(x.over_bound)]
        texts = {f"{x.over_bound:.2f}": x for x in sorted(points, key=lambda x: -x.words)}
        for text, up in zip([*texts][:1] + [*texts][1:][-1:], (6, -12)):
            axes.annotate(text, (ranks, texts[text].words), (0, up), **style)
    log_axis(axes)


def _lines(section: Section, forecast: Forecast, axes: Axes, label: str, value: Value) -> None:
    """Draw a value of all points and predictions against ranks.

    Measurements are solid lines with markers, which are grey inside where there were more ranks than cores; predictions
    by formula are broken lines, and predictions by simulation small hollow markers.
    """
    for number, curve in enumerate(section.curves):
        style: Any = {"color": color_of(number), "marker": MARKERS[number % len(MARKERS)]}
        values = [value(x, curve.first) for x in curve.points]
        axes.plot([x.ranks for x in curve.points], values, label=curve.label, zorder=3, **style)
        marked = [(x.ranks, y) for x, y in zip(curve.points, values) if x.oversubscribed]
        name = f"_{curve.label}, more ranks than cores"
        axes.plot([x for x, _ in marked], [y for _, y in marked], label=name, zorder=3.1, **style, **OVERSUBSCRIBED)
        if number not in forecast:
            continue
        broken: Any = {"color": color_of(number), "linestyle": DASHES[number % len(DASHES)], "linewidth": 1.2}
        predicted = forecast[number]
        ways = ("formula", predicted.formula, broken), ("simulation", predicted.simulation, style | SIMULATED)
        for way, predictions, look in ways:
            first = next((x for x in predictions if x.ranks == curve.first.ranks), None)
            name = f"_{curve.label}, predicted ({way})"
            axes.plot([x.ranks for x in predictions], [value(x, first) for x in predictions], label=name, **look)
    _keys(axes, section, forecast)
    axes.set_ylabel(label)
    rank_axis(axes, _span(section, forecast), section.counts[-1])


def _levels(section: Section, forecast: Forecast, axes: Axes, label: str, heights: Sequence[float]) -> None:
    """Draw limits that are the same on all numbers of ranks, on an axis that begins at 0."""
    counts = _span(section, forecast)
    for height in heights:
        axes.plot(counts, [height] * len(counts), label=label, **LIMIT)
    from_0(axes, max(heights))


def _keys(axes: Axes, section: Section, forecast: Forecast) -> None:
    """Add to the legend the line styles and markers that have the same meaning in all colours."""
    if forecast:
        unknown = ", not calibrated" if any(not x.calibrated for x in forecast.values()) else ""
        axes.plot([], [], color=GREY, linestyle=DASHES[0], linewidth=1.2, label=f"predicted (formula){unknown}")
    if any(x.simulation for x in forecast.values()):
        axes.plot([], [], color=GREY, marker="o", label="predicted (simulation)", **SIMULATED)
    if any(point.oversubscribed for point in section.points):
        axes.plot([], [], color=GREY, marker="o", label="more ranks than cores", **OVERSUBSCRIBED)


def rank_axis(axes: Axes, counts: Sequence[int], last: int) -> None:
    """Scale the axis of ranks by powers of two, and shade the numbers of ranks after the last one that was measured."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xlim(counts[0] / 2**0.5, counts[-1] * 2**0.5)
    axes.xaxis.set_major_locator(FixedLocator(counts, nbins=10))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_xlabel("ranks")
    if counts[-1] > last:
        shade: Any = {"color": "#f0f0f0", "zorder": 0, "linewidth": 0, "label": "beyond what was measured"}
        axes.axvspan(last * 2**0.25, counts[-1] * 2**0.5, **shade)


def log_axis(axes: Axes) -> None:
    """Scale an axis logarithmically, with ticks at 1, 2 and 5 where there are few decades."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high / low < 1000:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def from_0(axes: Axes, limit: float) -> None:
    """Let the vertical axis begin at 0, and end above a limit."""
    axes.set_ylim(0, max(1.03 * axes.get_ylim()[1], 1.1 * limit))


def _span(section: Section, forecast: Forecast) -> list[int]:
    """Return all numbers of ranks that a figure shows."""
    return sorted({*section.counts, *(x.ranks for predicted in forecast.values() for x in predicted.formula)})


def _fastest(section: Section) -> list[Point]:
    """Return the fastest point on the fewest ranks for each shape, type and setting."""

    def alike(point: Point) -> Any:
        return point.case.requested, point.case.dtype, [*point.settings.values()]

    firsts = sorted((curve.first for curve in section.curves), key=alike)
    return [min(group, key=lambda x: (x.ranks, x.seconds)) for _, group in groupby(firsts, key=alike)]


def color_of(number: int) -> str:
    return COLORS[number % len(COLORS)]


# ------------------------------------------------------------------ bars
def _split(section: Section, forecast: Forecast, axes: Axes) -> None:
    """Draw a bar for each measurement: the shares of computing, waiting and so on in its time."""
    points = section.points
    parts = {name: np.array([x.parts[name] for x in points]) for name, *_ in SPLIT}
    whole = sum(parts.values())
    hidden = np.array([x.product.per_rank.hidden_seconds.mean for x in points])
    ends = np.cumsum([len(curve.points) for curve in section.curves])
    places = np.arange(len(points)) + 0.6 * np.searchsorted(ends, np.arange(len(points)), side="right")
    left = np.zeros(len(points))
    for name, color, label in SPLIT:
        shares = 100 * parts[name] / whole
        if (shares > 0.05).any():
            axes.barh(places, shares, 0.78, left, color=color, edgecolor="white", linewidth=0.4, label=label)
        left += shares
        if name == "compute" and hidden.any():  # hidden time next to the waits: together they are the transfers
            over = np.minimum(shares, 100 * hidden / whole)
            style: Any = {"color": color, "edgecolor": "white", "hatch": "////", "linewidth": 0}
            axes.barh(places, over, 0.78, left - over, label="compute, transfers hidden behind it", **style)
    for place, point in zip(places, points):
        overlap = f", {point.product.overlap:.0%} of transfers hidden" if point.product.overlap else ""
        axes.text(101, place, f"{seconds_label(point.seconds)}{overlap}", va="center", fontsize=8)
    labels = [
        f"{curve.label}, {counted(point.ranks, 'rank')}{'*' * point.oversubscribed}"
        for curve in section.curves
        for point in curve.points
    ]
    axes.set_yticks(places, labels)
    axes.set_ylim(places[-1] + 0.6, -0.6)
    axes.set_xlim(0, 100)
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("share of the time of a product [%]" + crowd(points))


def _fraction_bars(section: Section, forecast: Forecast, axes: Axes) -> None:
    _bars(section, axes, lambda x: 100 * x.fraction, "fraction of the measured peak [%]", "measured peak", 100)
    from_0(axes, 100)


def _words_bars(section: Section, forecast: Forecast, axes: Axes) -> None:
    _bars(section, axes, lambda x: x.over_bound or nan, "words received / lower bound", "lower bound", 1)
    log_axis(axes)
    axes.set_ylim(0.9, 1.25 * axes.get_ylim()[1])


def _bars(section: Section, axes: Axes, value: Callable[[Point], float], label: str, limit: str, height: float) -> None:
    """Draw a group of bars for each shape, with one bar for each number of ranks and each other difference."""
    shapes = list(dict.fromkeys(curve.case.requested for curve in section.curves))
    groups: dict[tuple[str, int], dict[str, Point]] = {}
    for curve in section.curves:
        other = ", ".join(x for x in curve.label.split(", ") if x != curve.case.requested)
        for point in curve.points:
            groups.setdefault((other, point.ranks), {})[curve.case.requested] = point
    width = 0.82 / len(groups)
    for number, ((other, ranks), points) in enumerate(sorted(groups.items())):
        heights = [value(points[shape]) if shape in points else nan for shape in shapes]
        if not any(map(isfinite, heights)):
            continue
        places = np.arange(len(shapes)) + (number - (len(groups) - 1) / 2) * width
        crowded = "*" * any(x.oversubscribed for x in points.values())
        entry = ", ".join(filter(None, (other, counted(ranks, "rank")))) + crowded
        hatch = HATCHES[number // len(COLORS) % len(HATCHES)]
        style: Any = {"color": color_of(number), "hatch": hatch, "edgecolor": "white", "linewidth": 0}
        bars = axes.bar(places, heights, 0.92 * width, label=entry, **style)
        if len(groups) * len(shapes) <= 24:
            axes.bar_label(bars, fmt=lambda y: f"{y:.0f}" if y >= 10 else f"{y:.2f}", fontsize=7)
    axes.axhline(height, label=limit, **LIMIT)
    axes.set_xticks(range(len(shapes)), shapes)
    axes.grid(False, axis="x")
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel(label)
    axes.set_xlabel(crowd(section.points).strip())


def crowd(points: Sequence[Measurement]) -> str:
    return "    (* more ranks than cores)" if any(point.oversubscribed for point in points) else ""


def seconds_label(seconds: float) -> str:
    """Return seconds with three digits and a unit."""
    from matplotlib.ticker import EngFormatter

    return EngFormatter("s").format_data(float(f"{seconds:.3g}"))
