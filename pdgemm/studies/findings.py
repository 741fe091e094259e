"""What a study says, in sentences made of its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdgemm.studies.curves import Curve, Point, Section, in_flops, in_seconds, relative
from pdgemm.studies.panels import Forecast
from pdgemm.studies.predictions import Predicted
from pdgemm.support.text import counted

FALLS = (0.8, 0.5)  # efficiencies of which it is told where a curve gets below them
_MOST = 4  # curves that are told one by one


def key_results(section: Section, forecast: Forecast) -> list[str]:
    """Three to five sentences."""
    if not section.points:
        return ["Nothing was measured right."]
    told = [_fastest(section), *_efficiencies(section), *_words(section), *_model(section, forecast)]
    return told + _beyond(section, forecast)


def _fastest(section: Section) -> str:
    """Of several sizes, the highest rate."""
    rate = section.kind != "strong"
    best = max(section.points, key=lambda x: x.gflops) if rate else min(section.points, key=lambda x: x.seconds)
    what = "The highest rate is" if rate else "The fastest product runs at"
    crowd = ", which were more than there are cores" if best.crowded else ""
    m, n, k = best.case.mnk
    return (
        f"{what} {in_flops(best.gflops)}, {best.fraction:.0%} of the measured peak: {m} x {n} x {k} in "
        f"{in_seconds(best.seconds)} by {best.ran} on {counted(best.ranks, 'rank')}{crowd}."
    )


def _efficiencies(section: Section) -> list[str]:
    several = [(curve, plain(curve)) for curve in section.curves if len(plain(curve)) > 1]
    if not several:
        return []
    shown = sorted(several, key=lambda x: -x[0].efficiency(x[1][-1]))
    some = ""
    if len(shown) > _MOST:
        shown, some = [shown[0], shown[-1]], f" (the best and the worst of {len(several)} curves)"
    each = []
    for curve, points in shown:
        last = points[-1]
        falls = {_fall(curve.efficiency, points, share): share for share in FALLS}  # of equal numbers, the lower share
        told = [f"below {share:.0%} from {counted(ranks, 'rank')} on" for ranks, share in falls.items() if ranks]
        each.append(
            f"{curve.label}: {curve.efficiency(last):.0%} on {counted(last.ranks, 'rank')}, "
            f"{' and '.join(told) or f'nowhere below {FALLS[0]:.0%}'}"
        )
    crowded = any(point.crowded for point in section.points)
    cores = ", where each rank had a core" if crowded else ""
    fewest = sorted({curve.first.ranks for curve, _ in several})
    base = counted(fewest[0], "rank") if len(fewest) == 1 else "the fewest ranks of each curve"
    return [f"Efficiency relative to {base}{cores}{some}. {'; '.join(each)}."]


def _fall(efficiency: Any, points: Sequence[Any], share: float) -> int | None:
    """The number of ranks from which on the efficiency stays below a share."""
    below = None
    for point in points:
        if efficiency(point) >= share:
            below = None
        elif below is None:
            below = point.ranks
    return below


def _words(section: Section) -> list[str]:
    points = [point for point in section.points if point.bound]
    if not points:
        return []
    least, most = min(points, key=lambda x: x.over_bound), max(points, key=lambda x: x.over_bound)
    if f"{least.over_bound:.2f}" == f"{most.over_bound:.2f}":
        return [f"The busiest rank receives {least.over_bound:.2f} times the words of the lower bound."]
    return [
        f"The busiest rank receives {least.over_bound:.2f} ({_named(section, least)}) to {most.over_bound:.2f} "
        f"({_named(section, most)}) times the words of the lower bound."
    ]


def _named(section: Section, point: Point) -> str:
    curve = next(curve for curve in section.curves if point in curve.points)
    return f"{curve.label} on {counted(point.ranks, 'rank')}"


def _model(section: Section, forecast: Forecast) -> list[str]:
    """How far the predictions are from what was measured."""
    found = list[float]()
    for number, predicted in forecast.items():
        seconds = {x.ranks: x.seconds for x in predicted.formula}
        found += [seconds[x.ranks] / x.seconds for x in plain(section.curves[number]) if x.ranks in seconds]
    if not found:
        return []
    least, most = f"{min(found):.2g}", f"{max(found):.2g}"
    between = f"{least} times" if least == most else f"{least} to {most} times"
    off = max(*found, *(1 / x for x in found)) if len(found) > 1 else max(found[0], 1 / found[0])
    trust = "" if off < 2 else "; a model that is this far off here says little about more ranks"
    return [f"The planner's predictions are {between} the measured medians{trust}."]


def _beyond(section: Section, forecast: Forecast) -> list[str]:
    most = section.counts[-1]
    each = []
    for number, predicted in forecast.items():
        curve, points = section.curves[number], predicted.formula
        base = next((x for x in points if x.ranks == curve.first.ranks), None)
        if base is None or points[-1].ranks <= most:
            continue
        last, half = points[-1], _fall(lambda x, base=base: relative(base, x), points, FALLS[-1])
        falls = f"below {FALLS[-1]:.0%} from {counted(half, 'rank')} on" if half else f"nowhere below {FALLS[-1]:.0%}"
        each.append(
            (last.seconds, f"{curve.label}: {in_seconds(last.seconds)} on {last.ranks} ranks, efficiency {falls}")
        )
    if not each:
        return []
    each.sort()
    some = ""
    if len(each) > _MOST:
        each, some = [each[0], each[-1]], f" (the fastest and the slowest of {len(each)} curves)"
    return [f"Predictions beyond what was measured{some}. {'; '.join(text for _, text in each)}."]


def plain(curve: Curve) -> list[Point]:
    """Without those of more ranks than cores."""
    return [point for point in curve.points if not point.crowded]


def assumptions(forecasts: Sequence[Predicted], gpus: bool) -> list[str]:
    """What the predictions rest on, where it was not measured."""
    notes = []
    if any(not x.calibrated for x in forecasts):
        notes.append("Predictions are not calibrated: an ordinary cluster is assumed (pdgemm calibrate measures one).")
    for size in sorted({x.machine.ranks_per_node or 1 for x in forecasts if x.guessed}):
        notes.append(
            f"Predictions for more than {counted(size, 'rank')} assume nodes of {counted(size, 'rank')} each, as many "
            "as one has cores for; links between nodes were not measured, those of an ordinary cluster are assumed."
        )
    if gpus:
        notes.append("There are no predictions for GPUs: a calibration is of processors.")
    return notes
