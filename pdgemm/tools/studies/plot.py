"""`pdgemm plot` makes a report of studies: a page of HTML that needs no network and no script, or only its figures."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from pdgemm.errors import ArgumentError, PdgemmError
from pdgemm.planning.machines.known_machines import machine_of
from pdgemm.planning.machines.machine import Machine
from pdgemm.support.files import write_file
from pdgemm.support.text import Table, algorithm_name, counted, echo, in_seconds, sides
from pdgemm.tools.studies import figures
from pdgemm.tools.studies.cases import TrainingCase
from pdgemm.tools.studies.curves import (
    CALLED,
    TITLES,
    Curve,
    Results,
    Section,
    TrainingPoint,
    agreement,
    per_node,
    read_all,
)
from pdgemm.tools.studies.figures import FigurePanel
from pdgemm.tools.studies.predictions import Predicted, Prediction, assumptions, predict
from pdgemm.tools.studies.records import AnyCase, Measurement, Record, read_study, relative

_FAR = 1 << 17  # ranks beyond which no time is predicted
# the columns of tables: each function returns a cell for a curve and a point of the curve
COLUMNS: dict[str, Callable[[Curve, Any], str]] = {
    "curve": lambda curve, x: curve.label,
    "ranks": lambda curve, x: f"{x.ranks}{'*' * x.oversubscribed}",
    "m x n x k": lambda curve, x: " x ".join(map(str, x.case.mnk)),
    "algorithm": lambda curve, x: algorithm_name(x.product.algorithm, x.product.inside),
    "grid": lambda curve, x: sides(x.product.grid[0], x.product.grid[1], x.product.layers),
    "time": lambda curve, x: in_seconds(x.seconds),
    "median [s]": lambda curve, x: f"{x.seconds:.4g}",
    "95% interval [s]": lambda curve, x: f"{x.interval[0]:.4g} to {x.interval[1]:.4g}" if x.interval else "-",
    "GFLOP/s": lambda curve, x: f"{x.gflops:.4g}" if x.gflops < 1e4 else f"{x.gflops:.0f}",
    "% of peak": lambda curve, x: f"{100 * x.fraction:.0f}",
    "efficiency [%]": lambda curve, x: f"{100 * relative(curve.first, x):.0f}",
    "words received": lambda curve, x: f"{x.words:.0f}",
    "words / bound": lambda curve, x: f"{x.over_bound:.3f}" if isfinite(x.over_bound) else "-",
    "hidden [%]": lambda curve, x: "-" if x.product.overlap is None else f"{100 * x.product.overlap:.0f}",
    "predicted [s]": lambda curve, x: f"{curve.predicted(x):.4g}" if isfinite(curve.predicted(x)) else "-",
    "model error [%]": lambda curve, x: _error(curve, x),
    "residual": lambda curve, x: f"{x.residual:.2g}",
    "core-hours": lambda curve, x: f"{x.cost.core_hours:.3g}",
    "GPU-hours": lambda curve, x: f"{x.cost.gpu_hours:.3g}",
}
KEY = (
    "curve", "ranks", "m x n x k", "algorithm", "grid", "time", "GFLOP/s", "% of peak", "efficiency [%]",
    "words / bound", "model error [%]",
)  # fmt: skip
COLUMNS_OF_TRAINING: dict[str, Callable[[Curve, Any], str]] = {
    "layout": lambda curve, x: x.training.layout,
    "samples": lambda curve, x: str(x.case.batch),
    "tokens/s": lambda curve, x: f"{x.case.tokens / x.seconds:,.0f}",
    "MFU [%]": lambda curve, x: "-" if x.training.mfu is None else f"{100 * x.training.mfu:.0f}",
    "waiting [%]": lambda curve, x: f"{100 * x.training.waited / x.seconds:.0f}",
    "last loss": lambda curve, x: f"{x.training.losses[-1]:.6f}",
    "words received in a step": lambda curve, x: "; ".join(map(str, x.training.words)) or "none",
}
OF_TRAINING = (  # the first nine are those of the first table
    "curve", "ranks", "layout", "samples", "time", "tokens/s", "efficiency [%]", "model error [%]", "MFU [%]",
    "median [s]", "95% interval [s]", "predicted [s]", "waiting [%]", "last loss", "core-hours",
    "words received in a step",
)  # fmt: skip
_WORDS = "curve", "layout", "words received in a step"  # columns of words


class ReportSection(NamedTuple):
    """A section of a report.

    groups : the panels of each figure.   tables : tables by their headings; the first one is at the top of the page.
    """

    title: str
    kind: str
    groups: Sequence[Sequence[FigurePanel]]
    tables: Mapping[str, Table]


def finished(path: Path, page: Path | None, wanted: Sequence[AnyCase]) -> int:
    """Write the report of a study, and print whether the losses of training agree; return 1 if not, otherwise 0."""
    study = read_study(path)
    measured = [study.measured[case] for case in wanted if case in study.done and isinstance(case, TrainingCase)]
    agree, said = agreement([TrainingPoint.of(record, path) for record in measured])
    if measured and (page is None or not agree):  # a report says it, too
        echo(said, err=not agree)
    try:
        if page is not None and study.measured:
            report([path], page, None, None, overwrite=True)  # as `check_output` has decided
    except PdgemmError as bad:
        echo(f"pdgemm: the measurements are in {path}, but there is no page: {bad}", err=True)
    return 0 if agree else 1


def report(
    studies: Sequence[Path], out: Path, machine_file: str | None, predict_to: int | None, overwrite: bool = False
) -> None:
    """Read studies, predict, draw, and write the report.  Raises FileError or ArgumentError.

    machine_file : the machine of the predictions; None: the calibration of each study.
    predict_to   : the most ranks of a prediction; None: so many that measurements take half of the axis of ranks.
    overwrite    : also replace a file that pdgemm did not write.
    """
    form = figures.check_output(out, figures.FORMS, overwrite, studies)
    machine = machine_of(machine_file) if machine_file else None
    results = read_all(studies)
    for place, fault in results.unread:
        echo(f"pdgemm: warning: {place}: {fault}; left out", err=True)
    if not results.points and form != ".html":
        raise ArgumentError(
            f"there is nothing to draw: {counted(len(results.bad), 'case')} failed or wrong, none right"
        )
    predict_curves(results, machine, predict_to)
    forecasts = [curve.forecast for section in results.sections for curve in section.curves if curve.forecast]
    results.notes += assumptions(forecasts, gpus=any(point.case.device != "host" for point in results.points))
    with figures.drawing():
        sections = [
            ReportSection(x.title, x.kind, figures.groups_of(figures.panels(x)), tables_of_section(x))
            for x in results.sections
        ]
        if form == ".html":
            data = page(results, sections)
        else:
            groups = [(x.title * (group is x.groups[0]), group) for x in sections for group in x.groups]
            data = figures.saved(figures.figure_of(groups), form[1:])
    write_file(out, data)
    echo(f"{out}: {counted(len(results.points), 'measurement')}, {len(results.bad)} failed or wrong")
    for note in results.notes:
        echo(f"  {note}")


def predict_curves(results: Results, machine: Machine | None, to: int | None) -> None:
    """Add the predictions of all curves to the results; the arguments are those of `report`."""
    for section in results.sections:
        counts = section.counts
        last = to or min(counts[-1] * max(4, counts[-1] // counts[0]), _FAR)
        for curve in section.curves:
            known = (None if section.training else machine) or results.machines.get(curve.first.source)
            if section.training:  # by the plans of the runs
                calibrated = all(x.training.mfu is not None for x in curve.line)
                planned = tuple(Prediction(x.case, x.training.planned) for x in curve.line)
                curve.forecast = Predicted(planned, known or Machine(), calibrated, guessed=False)
                continue
            nodes = per_node(point for point in results.points if point.settings == curve.first.settings)
            measured = [point.ranks for point in curve.points]
            curve.forecast = predict(curve.case, measured, max(last, measured[-1]), known, nodes)


# ------------------------------------------------------------------ the page
def page(results: Results, sections: Sequence[ReportSection]) -> bytes:
    """Return the page of a report."""
    svgs = [
        [
            figures.svg_of(figures.figure_of([("", group)]), f"section{number}-{at}-")
            for at, group in enumerate(x.groups)
        ]
        for number, x in enumerate(sections)
    ]
    bad = [
        (str(case), str(record["status"]), str(record.get("error") or _wrong(record)), str(path))
        for path, case, record in results.bad
    ]
    names = ("case", "status", "error", "file")
    machines = [x.forecast.machine for section in results.sections for x in section.curves if x.forecast]
    return figures.html_page(
        "report.html",
        title="; ".join(dict.fromkeys(TITLES[x.kind] for x in sections)) or "A study",
        sections=[*zip(sections, svgs)],
        products=any(not x.training for x in results.sections),
        training=any(x.training for x in results.sections),
        notes=results.notes,
        setting=_setting(results.points),
        commands=[*dict.fromkeys(filter(None, (command_of_record(x.record) for x in results.points)))],
        bad=Table(names, bad, words=names),
        unread=[f"{place}: {fault}" for place, fault in results.unread],
        machines=[*dict.fromkeys(map(str, machines))],
    )


def tables_of_section(section: Section) -> dict[str, Table]:
    """Return the tables of a section, by their headings."""
    gpus = any(point.cost.gpu_hours for point in section.points)
    cells, every, key, heading = COLUMNS, [*COLUMNS], [*KEY], "the fastest product of each curve"
    rows = [(curve, max(curve.points, key=lambda x: x.flops / x.seconds)) for curve in section.curves]
    if section.training:
        cells, every, key = COLUMNS | COLUMNS_OF_TRAINING, [*OF_TRAINING], [*OF_TRAINING[:9]]
        heading = "the fastest layout on each number of ranks"
        faster_last = sorted(section.rows, key=lambda row: (row[1].ranks, -row[1].seconds))
        rows = [*{(id(curve.first), x.ranks): (curve, x) for curve, x in faster_last}.values()]
    columns = [name for name in every if name != "time" and (gpus or name != "GPU-hours")]
    return {
        title: Table(names, [[cells[name](curve, x) for name in names] for curve, x in shown], _WORDS)
        for title, names, shown in ((heading, key, rows), ("All measurements", columns, section.rows))
    }


def _error(curve: Curve, point: Measurement) -> str:
    """Return the error of the predicted seconds of a point."""
    if curve.forecast is None or not isfinite(curve.predicted(point)):
        return "-"
    unknown = "" if curve.forecast.calibrated else " (uncalibrated)"
    return f"{100 * (curve.predicted(point) / point.seconds - 1):+.0f}{unknown}"


def command_of_record(record: Record) -> str:
    """Return the command of the user that led to a record, as a line for a shell."""
    words = record.get("command")
    return shlex.join(map(str, words)) if isinstance(words, list) else ""


def _setting(points: Sequence[Measurement]) -> Table:
    """Return the table of the nodes, the software and the dates of the measurements."""
    all_of = [point.record for point in points]
    settings = [record["setting"] for record in all_of]
    names = dict.fromkeys(chain(*settings))
    dates = sorted(str(record["date"])[:16].replace("T", " ") for record in all_of if record.get("date"))
    facts = [
        *((CALLED.get(name, name.replace("_", " ")), _each(settings, name)) for name in names),
        ("repetitions", ", ".join(map(str, sorted({len(point.repetitions) for point in points})))),
        ("warm-ups", _each(all_of, "warmup")),
        ("date (UTC)", " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]])) or "not recorded"),
        ("files", ", ".join(dict.fromkeys(point.source for point in points))),
    ]
    return Table(("", ""), facts if points else [], words=("",))


def _each(records: Iterable[dict[str, Any]], name: str) -> str:
    values = (record.get(name, "not recorded") for record in records)
    texts = (", ".join(map(str, value)) if isinstance(value, list) else str(value) for value in values)
    return ", ".join(dict.fromkeys(texts))


def _wrong(record: Record) -> str:
    if "training" in record:
        return "a loss is infinite or not a number"
    return f"residual {record.get('residual')}, at most {record.get('residual_bound')} is right"
