"""The panels of a report that draw a section of training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pdgemm.tools.studies.panels import (
    DASHES,
    GREY,
    LIMIT,
    MARKERS,
    OVERSUBSCRIBED,
    FigurePanel,
    color_of,
    crowd,
    from_0,
    log_axis,
    rank_axis,
    seconds_label,
)
from pdgemm.tools.studies.training.training_curves import TrainingPoint, TrainingSection

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# the parts of a step, from the beginning of a bar: part, colour, name
PARTS = (
    ("forward", "#0072B2", "forward"),
    ("backward", "#56B4E9", "backward"),
    ("transfers", "#009E73", "transfers"),
    ("wait", "#E69F00", "wait for data or stages"),
    ("update", "#CC79A7", "update"),
    ("rest", "#bbbbbb", "rest"),
)
_HEIGHT = 0.36  # of a bar


def panels_of_training(section: TrainingSection) -> list[FigurePanel]:
    """Return the panels of a section: rate, efficiency, and where the time of a step goes, beside its plan."""
    drawings: list[tuple[str, str, Callable[[TrainingSection, Axes], None]]] = []
    if len(section.counts) > 1:
        drawings = [("tokens", "Tokens per second", _tokens), ("training_efficiency", "Efficiency", _efficiency)]
    drawings.append(("parts", "Where the time of a step goes, beside its plan", _parts))
    figures = [
        FigurePanel(name, f"({letter}) {title}", partial(draw, section))
        for letter, (name, title, draw) in zip("abc", drawings)
    ]
    figures[-1] = figures[-1]._replace(wide=True, height=1.4 + 0.42 * len(section.points))
    return figures


def _tokens(section: TrainingSection, axes: Axes) -> None:
    _lines(section, axes, lambda x: x.tokens_per_second, lambda x: x.case.tokens / x.planned.seconds)
    first = section.first
    ideal = [first.tokens_per_second * ranks / first.ranks for ranks in section.counts]
    axes.plot(section.counts, ideal, label="ideal", **LIMIT)
    axes.set_ylabel("tokens/s")
    log_axis(axes)


def _efficiency(section: TrainingSection, axes: Axes) -> None:
    def measured(x: TrainingPoint) -> float:
        return 100 * section.efficiency(x)

    _lines(section, axes, measured, lambda x: 100 * section.planned_efficiency(x))
    axes.plot(section.counts, [100] * len(section.counts), label="ideal", **LIMIT)
    axes.set_ylabel(f"{section.kind} efficiency [%]")
    from_0(axes, 100)


def _lines(
    section: TrainingSection,
    axes: Axes,
    measured: Callable[[TrainingPoint], float],
    planned: Callable[[TrainingPoint], float],
) -> None:
    """Draw a value of each layout against ranks: measured with solid lines and markers, planned with broken lines."""
    for number, (layout, points) in enumerate(section.curves.items()):
        style: Any = {"color": color_of(number), "marker": MARKERS[number % len(MARKERS)]}
        ranks = [x.ranks for x in points]
        axes.plot(ranks, [measured(x) for x in points], label=layout, zorder=3, **style)
        marked = [x for x in points if x.oversubscribed]
        name = f"_{layout}, more ranks than cores"
        places = [x.ranks for x in marked], [measured(x) for x in marked]
        axes.plot(*places, label=name, zorder=3.1, **style, **OVERSUBSCRIBED)
        broken: Any = {"color": color_of(number), "linestyle": DASHES[number % len(DASHES)], "linewidth": 1.2}
        axes.plot(ranks, [planned(x) for x in points], label=f"_{layout}, planned", **broken)
    axes.plot([], [], color=GREY, linestyle=DASHES[0], linewidth=1.2, label="planned")
    if any(x.oversubscribed for x in section.points):
        axes.plot([], [], color=GREY, marker="o", label="more ranks than cores", **OVERSUBSCRIBED)
    rank_axis(axes, section.counts, section.counts[-1])


def _parts(section: TrainingSection, axes: Axes) -> None:
    """Draw two bars for each measurement: the parts of a step in seconds, and below them those of its plan."""
    points = section.points
    places = np.arange(len(points)) * 1.0
    measured = [x.parts for x in points]
    rows = (
        (places - _HEIGHT / 2, measured, 1.0, 0.9),
        (places + _HEIGHT / 2, [x.training.planned for x in points], 0.5, 0.7),
    )
    for at, parts, alpha, height in rows:
        left = np.zeros(len(points))
        for name, color, label in PARTS:
            widths = np.array([x.get(name, 0.0) for x in parts])
            style: Any = {"color": color, "edgecolor": "white", "linewidth": 0.4, "alpha": alpha}
            if alpha == 1 and widths.any():
                style["label"] = label
            axes.barh(at, widths, height * _HEIGHT, left, **style)
            left += widths
        for place, end in zip(at, left):
            text = f" {seconds_label(end)}{'' if alpha == 1 else ' planned'}"
            axes.text(end, place, text, va="center", fontsize=8, color="black" if alpha == 1 else GREY)
    axes.set_yticks(places, [x.name for x in points])
    axes.set_ylim(places[-1] + 0.6, -0.6)
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("seconds of a step" + crowd(points))
