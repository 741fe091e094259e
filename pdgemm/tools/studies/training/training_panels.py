"""The panels of a report that draw a section of training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from pdgemm.support.text import in_seconds
from pdgemm.tools.studies import figures
from pdgemm.tools.studies.figures import FigurePanel
from pdgemm.tools.studies.training.training_curves import TrainingPoint, TrainingSection

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# the parts of a step, from the beginning of a bar, and their colours
PARTS = {"forward": "C0", "backward": "C6", "transfers": "C2", "wait": "C1", "update": "C4", "rest": "#bbbbbb"}


def panels_of_training(section: TrainingSection) -> list[FigurePanel]:
    """Return the panels of a section: rate, efficiency, and where the time of a step goes, beside its plan."""
    parts = FigurePanel(
        "parts", "Where the time of a step goes, beside its plan", partial(_parts, section), True,
        1.4 + 0.42 * len(section.points),
    )  # fmt: skip
    if len(section.counts) == 1:
        return [parts._replace(title=f"(a) {parts.title}")]
    return [
        FigurePanel("tokens", "(a) Tokens per second", partial(_tokens, section)),
        FigurePanel("training_efficiency", "(b) Efficiency", partial(_efficiency, section)),
        parts._replace(title=f"(c) {parts.title}"),
    ]


def _tokens(section: TrainingSection, axes: Axes) -> None:
    _lines(section, axes, lambda x: x.tokens_per_second, lambda x: x.case.tokens / x.planned.seconds)
    first = section.first
    ideal = [first.tokens_per_second * ranks / first.ranks for ranks in section.counts]
    axes.plot(section.counts, ideal, label="ideal", **figures.LIMIT)
    axes.set_ylabel("tokens/s")
    figures.log_axis(axes)


def _efficiency(section: TrainingSection, axes: Axes) -> None:
    _lines(section, axes, lambda x: 100 * section.efficiency(x), lambda x: 100 * section.planned_efficiency(x))
    axes.plot(section.counts, [100] * len(section.counts), label="ideal", **figures.LIMIT)
    axes.set_ylabel(f"{section.kind} efficiency [%]")
    figures.from_0(axes)


def _lines(
    section: TrainingSection,
    axes: Axes,
    measured: Callable[[TrainingPoint], float],
    planned: Callable[[TrainingPoint], float],
) -> None:
    """Draw a value of each layout against ranks: measured with solid lines and markers, planned with broken lines."""
    for number, (layout, points) in enumerate(section.curves.items()):
        figures.draw_measured(axes, number, layout, points, [*map(measured, points)])
        figures.draw_predicted(axes, number, layout, points, [*map(planned, points)])
    axes.plot([], [], color=figures.GREY, label="planned", **figures.PREDICTED)
    figures.rank_axis(axes, section.points, section.counts)


def _parts(section: TrainingSection, axes: Axes) -> None:
    """Draw two bars for each measurement: the parts of a step in seconds, and below them those of its plan."""
    points = section.points
    places = np.arange(len(points))
    for above, times, seconds, said, style in (
        (0.18, [x.parts for x in points], [x.seconds for x in points], "", {"height": 0.32}),
        (-0.18, [x.training.planned for x in points], [x.planned.seconds for x in points], " planned",
         {"height": 0.25, "alpha": 0.5}),
    ):  # fmt: skip
        bars = figures.draw_parts(axes, places - above, times, PARTS, **style)
        axes.bar_label(bars, [f"{in_seconds(x)}{said}" for x in seconds], padding=3, fontsize=8)
    figures.row_axis(axes, places, [x.name for x in points])
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds of a step" + figures.crowd(points))
