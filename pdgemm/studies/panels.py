"""The panels of a report: what each draws of a section, and its caption."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from math import isfinite, log2, nan
from typing import TYPE_CHECKING, Any, NamedTuple

from pdgemm.model.formulas import lower_bound
from pdgemm.studies.curves import Curve, Point, Section, columns, flops, ideal, in_seconds, relative, shape_of
from pdgemm.studies.predictions import Predicted, Prediction, at
from pdgemm.support.text import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe & Ito, without yellow, which is too light for lines; Wong, Nature Methods 8, 441 (2011)
COLORS = ("#0072B2", "#E69F00", "#009E73", "#000000", "#CC79A7", "#D55E00", "#56B4E9")  # neighbours differ in grey, too
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
HATCHES = ("", "///", "...")
BOX = {"boxstyle": "square,pad=0.1", "facecolor": "white", "alpha": 0.75, "linewidth": 0}
SMALL: Any = {"textcoords": "offset points", "ha": "center", "fontsize": 7, "zorder": 4, "bbox": BOX}
DASHES: tuple[Any, ...] = (
    (0, (5, 2)),
    (0, (3, 1, 1, 1)),
    (0, (2, 1.2)),
    (0, (7, 2, 1, 2)),
    (0, (9, 3)),
)  # dots are limits
CROWDED = "#c8c8c8"  # the inside of markers of more ranks than cores
GREY = "#444444"
SHADE = "#f0f0f0"  # of what lies beyond the measurements
WIDTH, HEIGHT = 5.6, 3.9  # of a panel, in inches
# of a product's time, from the bottom of a bar: its name, its colour, and what hatches it
SPLIT = (
    ("compute", "#0072B2", "compute"),
    ("wait", "#E69F00", "wait for data"),
    ("sync", "#D55E00", "wait for ranks"),
    ("pack", "#56B4E9", "pack"),
    ("move", "#009E73", "redistribution"),
    ("rest", "#bbbbbb", "rest"),
)
Forecast = dict[int, Predicted]  # by the number of the curve in its section


class Panel(NamedTuple):
    """draw : fills the axes.   caption : in plain words.   wide : takes a row of its own.   height : in inches."""

    name: str
    title: str
    caption: str
    draw: Callable[[Axes], None]
    wide: bool = False
    height: float = HEIGHT


def panels(section: Section, forecast: Forecast) -> list[Panel]:
    """Those that there are data for."""
    if not section.curves:
        return []
    several = any(len(curve.points) > 1 for curve in section.curves)
    lines = several or bool(forecast)
    found = []
    if lines:
        found.append(_time(section, forecast))
        found.append(_efficiency(section, forecast))
    if section.kind == "weak" and lines:
        found.append(_rate(section, forecast))
    if section.kind == "shapes":
        found.append(_bars("fraction", section, "fraction of the measured peak [%]", 100, lambda x: x.fraction))
        if any(x.words and x.bound for x in section.points):
            found.append(_bars("words", section, "words received / lower bound", 1, lambda x: x.over_bound))
    else:
        found.append(_fraction(section))
        if any(x.words or x.bound for x in section.points) or forecast:
            found.append(_words(section, forecast))
    found.append(_split(section))
    return [panel._replace(title=f"({letter}) {panel.title}") for letter, panel in zip("abcdefgh", found)]


def _time(section: Section, forecast: Forecast) -> Panel:
    def draw(axes: Axes) -> None:
        for number, curve in enumerate(section.curves):
            ranks, seconds = columns(lambda x: x.seconds, curve)
            low, high = ([abs(x - y) for x, y in zip(seconds, _ends(curve, end))] for end in (0, 1))
            _measured(axes, number, curve, ranks, seconds, (low, high))
        for first in _ideals(section):
            counts = _span(section, forecast)
            works = [flops(at(first.case, ranks)) for ranks in counts]
            seconds = [ideal(first, ranks, work) for ranks, work in zip(counts, works)]
            axes.plot(counts, seconds, color=GREY, linewidth=1, linestyle=":", zorder=1.5, label=_once(axes, "ideal"))
        _predicted(axes, section, forecast, lambda _, x: x.seconds)
        axes.set_yscale("log")
        _plain(axes)
        _by_ranks(axes, section, forecast, "time of one product [s]")

    work = "the work per rank grows with the square root of their number" if section.kind == "weak" else "the same work"
    caption = (
        "Median time of a whole product, from the call on all ranks to the end on the slowest; error bars are the 95% "
        f"confidence interval of the median. Ideal: {work}, at the rate per rank of the fastest product on the fewest "
        "ranks."
    )
    return Panel("time", "Time", caption, draw)


def _efficiency(section: Section, forecast: Forecast) -> Panel:
    def draw(axes: Axes) -> None:
        for number, curve in enumerate(section.curves):
            ranks, values = columns(lambda x, curve=curve: 100 * curve.efficiency(x), curve)  # type: ignore[misc]
            _measured(axes, number, curve, ranks, values)
        axes.axhline(100, color=GREY, linewidth=1, linestyle=":", zorder=1.5, label="ideal")
        _predicted(axes, section, forecast, lambda first, x: 100 * relative(first, x) if first else nan)
        _from_zero(axes, 110)
        _by_ranks(axes, section, forecast, "efficiency [%]")

    formula = "work per rank and second, relative to" if section.kind == "weak" else "T(p0) p0 / (T(p) p), with p0 for"
    caption = (
        f"Parallel efficiency: {formula} the fewest ranks of the same curve. A predicted curve is relative to its own "
        "prediction for as many ranks, so that a model that is too fast or too slow throughout shows its shape."
    )
    return Panel("efficiency", "Efficiency", caption, draw)


def _rate(section: Section, forecast: Forecast) -> Panel:
    def per_rank(x: Any) -> float:
        return x.flops / x.seconds / x.ranks / 1e9

    def draw(axes: Axes) -> None:
        for number, curve in enumerate(section.curves):
            _measured(axes, number, curve, *columns(per_rank, curve))
        for first in _ideals(section):
            axes.axhline(
                per_rank(first), color=GREY, linewidth=1, linestyle=":", zorder=1.5, label=_once(axes, "ideal")
            )
        _predicted(axes, section, forecast, lambda _, x: per_rank(x))
        _from_zero(axes)
        _by_ranks(axes, section, forecast, "GFLOP/s per rank")

    caption = (
        "Rate per rank at constant memory per rank: A, B and C take the same room on each rank at any number of ranks. "
        "Ideal: the rate of the fastest product on the fewest ranks."
    )
    return Panel("rate", "Rate per rank at constant memory per rank", caption, draw)


def _fraction(section: Section) -> Panel:
    def draw(axes: Axes) -> None:
        for number, curve in enumerate(section.curves):
            _measured(axes, number, curve, *columns(lambda x: 100 * x.fraction, curve))
        axes.axhline(100, color=GREY, linewidth=1, linestyle=":", zorder=1.5, label="measured peak")
        _from_zero(axes, 110)
        _by_ranks(axes, section, {}, "fraction of the measured peak [%]")

    return Panel("fraction", "Fraction of the measured peak", PEAK, draw)


PEAK = (
    "Rate of the product over that of local products on all ranks at the same time, right before and after it, the "
    "better of the two: what communication and load imbalance leave. Products of another size than those may be "
    "above 100%."
)


def _words(section: Section, forecast: Forecast) -> Panel:
    def draw(axes: Axes) -> None:
        for number, curve in enumerate(section.curves):
            _measured(axes, number, curve, *columns(lambda x: x.words or nan, curve))
        for case in {shape_of(curve.case): curve.case for curve in section.curves}.values():
            counts = [ranks for ranks in _span(section, forecast) if ranks > 1]
            bounds = [lower_bound(*at(case, ranks).mnk, ranks) or nan for ranks in counts]
            axes.plot(
                counts, bounds, color=GREY, linewidth=1, linestyle=":", zorder=1.5, label=_once(axes, "lower bound")
            )
        _predicted(axes, section, forecast, lambda _, x: x.words or nan)
        axes.set_yscale("log")
        _ratios(axes, section)
        _plain(axes)
        _by_ranks(axes, section, forecast, "words received by the busiest rank")

    caption = (
        "Words (elements) that the busiest rank receives, those that it reads in the memory of its node and those of "
        "redistributions included, beside the number that no algorithm can do without. Numbers at the points: words "
        "over the bound. On one rank nothing is received."
    )
    return Panel("words", "Communication", caption, draw)


def _split(section: Section) -> Panel:
    bars = [
        (curve, point)
        for curve in section.curves
        for point in curve.points
    ]  # fmt: skip
    hidden = any(point.hidden > 0 for _, point in bars)

    def draw(axes: Axes) -> None:
        places, labels, place = list[float](), list[str](), 0.0
        for curve, point in bars:
            if labels and point is curve.first and len(section.curves) > 1:
                place += 0.6
            places.append(place)
            labels.append(f"{curve.label}, {counted(point.ranks, 'rank')}{'*' if point.crowded else ''}")
            place += 1
        left = [0.0] * len(bars)
        for name, color, told in SPLIT:
            shares = [100 * (point.rest if name == "rest" else point.parts[name]) / _all(point) for _, point in bars]
            if any(share > 0.05 for share in shares):
                axes.barh(places, shares, 0.78, left, color=color, edgecolor="white", linewidth=0.4, label=told)
            left = [x + y for x, y in zip(left, shares)]
            if name == "compute" and hidden:  # behind the products, beside the waits: together they are the transfers
                over = [min(share, 100 * point.hidden / _all(point)) for share, (_, point) in zip(shares, bars)]
                start = [x - y for x, y in zip(left, over)]
                told = "compute, transfers hidden behind it"
                axes.barh(
                    places, over, 0.78, start, color=color, edgecolor="white", hatch="////", linewidth=0, label=told
                )
        for where, (_, point) in zip(places, bars):
            overlap = f", {point.overlap:.0%} of transfers hidden" if point.overlap else ""
            axes.text(101, where, f"{in_seconds(point.whole)}{overlap}", va="center", fontsize=8)
        axes.set_yticks(places, labels)
        axes.set_ylim(place - 0.4, -0.6)
        axes.set_xlim(0, 100)
        axes.grid(False, axis="y")
        axes.tick_params(axis="y", length=0)
        note = "    (* more ranks than cores)" if any(point.crowded for _, point in bars) else ""
        axes.set_xlabel(f"share of the time of a product [%]{note}")

    caption = (
        "Where the time goes, mean over the ranks of a typical repetition, whose seconds stand on the right. Wait for "
        "data: a panel, or a message that has to leave, is not there yet; wait for ranks: for others of the node to "
        "begin or to be done, which brings nothing. Transfers that are hidden behind products are part of compute"
        + (
            " (hatched, at most, as ranks see an arrival when they look; with wait for data they are all transfers)"
            if hidden
            else "; none were seen here"
        )
        + ". Rest: what Python and MPI calls in between take, and what happens before and after."
    )
    if any(point.case.device != "host" for _, point in bars):
        caption += " On a GPU these go on beside each other: shares are of their sum."
    height = 1.5 + 0.24 * len(bars) + 0.15 * len(section.curves)
    return Panel("split", "Where the time goes", caption, draw, wide=True, height=height)


def _all(point: Point) -> float:
    return sum(point.parts.values()) + point.rest


def _bars(name: str, section: Section, title: str, scale: float, get: Callable[[Point], float]) -> Panel:
    """A group of bars for each shape, in it one for each number of ranks and other difference."""
    shapes = list(dict.fromkeys(shape_of(curve.case) for curve in section.curves))
    found: dict[tuple[str, int], dict[str, Point]] = {}
    for curve in section.curves:
        shape = shape_of(curve.case)
        other = ", ".join(x for x in curve.label.split(", ") if x != shape)
        for point in curve.points:
            found.setdefault((other, point.ranks), {})[shape] = point
    keys = sorted(found)
    limit = "measured peak" if name == "fraction" else "lower bound"

    def draw(axes: Axes) -> None:
        width = 0.82 / len(keys)
        for number, key in enumerate(keys):
            points = found[key]
            heights = [scale * get(points[shape]) if shape in points else nan for shape in shapes]
            if not any(map(isfinite, heights)):
                continue
            places = [x + (number - (len(keys) - 1) / 2) * width for x in range(len(shapes))]
            crowded = any(point.crowded for point in points.values())
            label = f"{key[0]}, " * bool(key[0]) + counted(key[1], "rank") + "*" * crowded
            color, hatch = COLORS[number % len(COLORS)], HATCHES[number // len(COLORS) % len(HATCHES)]
            axes.bar(
                places, heights, 0.92 * width, color=color, hatch=hatch, edgecolor="white", linewidth=0, label=label
            )
            for x, y in zip(places, heights):
                if isfinite(y) and len(keys) * len(shapes) <= 24:
                    axes.annotate(f"{y:.0f}" if y >= 10 else f"{y:.2f}", (x, y), (0, 2), **SMALL)
        axes.axhline(scale, color=GREY, linewidth=1, linestyle=":", zorder=1.5, label=limit)
        if name == "words":
            axes.set_yscale("log")
            axes.set_ylim(0.9, 1.25 * axes.get_ylim()[1])
            _plain(axes)
        else:
            _from_zero(axes, 110)
        axes.set_xticks(range(len(shapes)), shapes)
        axes.grid(False, axis="x")
        axes.tick_params(axis="x", length=0)
        axes.set_ylabel(title)
        if any(point.crowded for point in section.points):
            axes.set_xlabel("* more ranks than cores")

    if name == "fraction":
        return Panel(name, "Fraction of the measured peak", PEAK, draw)
    caption = (
        "Words (elements) that the busiest rank receives, over the number that no algorithm can do without for that "
        "shape. On one rank nothing is received."
    )
    return Panel(name, "Communication over its lower bound", caption, draw)


# ------------------------------------------------------------------ what panels have in common
def _measured(axes: Axes, number: int, curve: Curve, ranks: list[int], values: list[float], errors: Any = None) -> None:
    """A solid line with markers, which are grey inside where there were more ranks than cores."""
    color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
    axes.plot(ranks, values, color=color, marker=marker, label=curve.label, zorder=3)
    if errors is not None:
        axes.errorbar(ranks, values, errors, fmt="none", ecolor=color, elinewidth=1.1, capsize=3, zorder=2.9)
    crowded = [place for place, point in enumerate(curve.points) if point.crowded]
    axes.plot(
        [ranks[x] for x in crowded], [values[x] for x in crowded], linestyle="none", color=color, marker=marker,
        markerfacecolor=CROWDED, zorder=3.1, label=f"_{curve.label}, more ranks than cores",
    )  # fmt: skip


def _predicted(
    axes: Axes, section: Section, forecast: Forecast, get: Callable[[Prediction | None, Prediction], float]
) -> None:
    """Broken lines and small hollow markers.  get : of the prediction on the fewest measured ranks, and of another."""
    for number, found in forecast.items():
        curve, color = section.curves[number], COLORS[number % len(COLORS)]
        base = next((x for x in found.formula if x.ranks == curve.first.ranks), None)
        ranks = [x.ranks for x in found.formula]
        axes.plot(
            ranks, [get(base, x) for x in found.formula], color=color, linestyle=DASHES[number % len(DASHES)],
            linewidth=1.2, zorder=2, label=f"_{curve.label}, predicted (formula)",
        )  # fmt: skip
        base = next((x for x in found.simulation if x.ranks == curve.first.ranks), None)
        ranks = [x.ranks for x in found.simulation]
        axes.plot(
            ranks, [get(base, x) for x in found.simulation], color=color, linestyle="none", zorder=2.1,
            marker=MARKERS[number % len(MARKERS)], markersize=3.5, markerfacecolor="white", markeredgewidth=0.9,
            label=f"_{curve.label}, predicted (simulation)",
        )  # fmt: skip
    unknown = ", not calibrated" if any(not found.calibrated for found in forecast.values()) else ""
    if forecast:
        axes.plot([], [], color=GREY, linestyle=DASHES[0], linewidth=1.2, label=f"predicted (formula){unknown}")
    if any(found.simulation for found in forecast.values()):
        marked = {"marker": "o", "markersize": 3.5, "markerfacecolor": "white", "markeredgewidth": 0.9}
        axes.plot([], [], color=GREY, linestyle="none", label="predicted (simulation)", **marked)  # type: ignore[arg-type]


def _beyond(axes: Axes, section: Section, forecast: Forecast) -> None:
    """Shades the numbers of ranks that nobody measured."""
    measured, counts = section.counts, _span(section, forecast)
    if counts[-1] > measured[-1]:
        axes.axvspan(
            measured[-1] * 2**0.25,
            counts[-1] * 2**0.5,
            color=SHADE,
            zorder=0,
            linewidth=0,
            label="beyond what was measured",
        )


def _span(section: Section, forecast: Forecast) -> list[int]:
    """All numbers of ranks in a figure."""
    return sorted({*section.counts, *(x.ranks for found in forecast.values() for x in found.formula)})


def _by_ranks(axes: Axes, section: Section, forecast: Forecast, title: str) -> None:
    from matplotlib.ticker import NullLocator

    counts = _span(section, forecast)
    axes.set_xscale("log", base=2)
    axes.set_xlim(counts[0] / 2**0.5, counts[-1] * 2**0.5)
    low, high = round(log2(counts[0]) - 0.49), round(log2(counts[-1]) + 0.49)
    every = 1 if high - low < 10 else 2
    ticks = [2**x for x in range(low, high + 1) if counts[0] <= 2**x <= counts[-1]] or counts
    axes.set_xticks(ticks, [str(x) if at % every == 0 else "" for at, x in enumerate(ticks)])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("ranks")
    _beyond(axes, section, forecast)
    axes.set_ylabel(title)
    if any(point.crowded for point in section.points):
        axes.plot(
            [], [], linestyle="none", marker="o", color=GREY, markerfacecolor=CROWDED, label="more ranks than cores"
        )


def _plain(axes: Axes) -> None:
    """A logarithmic axis with ticks at 1, 2 and 5 of each decade, or at decades where there are many."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    low, high = axes.get_ylim()
    few = high / low < 1000
    axes.yaxis.set_major_locator(LogLocator(10, (1, 2, 5) if few else (1,), numticks=12))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: _readable(x)))
    axes.yaxis.set_minor_locator(NullLocator() if few else LogLocator(10, (2, 5), numticks=12))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _readable(x: float) -> str:
    """0.05, 20, 3e6."""
    if 1e-4 <= x < 1e5:
        return f"{x:g}"
    return f"{x:.0e}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")


def _from_zero(axes: Axes, least: float = 0) -> None:
    axes.set_ylim(0, max(1.03 * axes.get_ylim()[1], least))


def _ideals(section: Section) -> list[Point]:
    """The fastest of the points on the fewest ranks, for each shape, type and setting."""

    def alike(curve: Curve) -> Any:
        return shape_of(curve.case), curve.case.dtype, curve.settings

    found = []
    for _, group in groupby(sorted(section.curves, key=alike), key=alike):
        curves = [*group]
        fewest = min(curve.first.ranks for curve in curves)
        found.append(min((x.first for x in curves if x.first.ranks == fewest), key=lambda point: point.seconds))
    return found


def _ends(curve: Curve, end: int) -> list[float]:
    return [point.interval[end] if point.interval else point.seconds for point in curve.points]


def _once(axes: Axes, label: str) -> str:
    """A label for the legend, where it is not there yet."""
    return f"_{label}" if label in axes.get_legend_handles_labels()[1] else label


def _ratios(axes: Axes, section: Section) -> None:
    """Words over the bound at the measured points: the highest above, the lowest below, where they are apart."""
    low, high = axes.get_ylim()
    axes.set_ylim(low / 1.2, 1.6 * high)  # room for them
    for ranks in section.counts:
        points = sorted((x for x in section.points if x.ranks == ranks and x.words and x.bound), key=lambda x: x.words)
        if not points:
            continue
        _tell(axes, points[-1], 6, "bottom")
        if f"{points[0].over_bound:.2f}" != f"{points[-1].over_bound:.2f}":
            _tell(axes, points[0], -6, "top")


def _tell(axes: Axes, point: Point, up: int, side: str) -> None:
    axes.annotate(f"{point.over_bound:.2f}", (point.ranks, point.words), (0, up), va=side, **SMALL)
