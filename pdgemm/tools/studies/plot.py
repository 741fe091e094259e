"""`pdgemm plot` makes a report of studies, or a picture of their figures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pdgemm.errors import ArgumentError, PdgemmError
from pdgemm.planning.machines.machine import Machine, load_machine
from pdgemm.support.files import check_writable, write_file
from pdgemm.support.text import counted, echo
from pdgemm.tools.studies.curves import Results, Section, per_node, read_all
from pdgemm.tools.studies.figures import (
    drawing,
    figure_of_panel,
    figure_of_sections,
    form_of,
    legend,
    saved,
    shared_entries,
)
from pdgemm.tools.studies.page import Drawn, DrawnSection, page
from pdgemm.tools.studies.panels import FigurePanel, Forecast, panels
from pdgemm.tools.studies.predictions import assumptions, predict
from pdgemm.tools.studies.records import AnyCase, read_study
from pdgemm.tools.studies.training.training_cases import TrainingCase
from pdgemm.tools.studies.training.training_curves import TrainingPoint, agreement
from pdgemm.tools.studies.training.training_panels import panels_of_training
from pdgemm.tools.studies.training.training_tables import DrawnTraining

FORMS = (".html", ".png", ".svg")
_FAR = 1 << 17  # ranks beyond which no time is predicted
_MOST = 10  # the most faults that are printed one by one


def check_report(page: Path, study: Path, overwrite: bool) -> None:
    """Raise ArgumentError or FileError where a report cannot be written beside a study that has not begun."""
    form_of(page, FORMS)
    if os.path.realpath(page) == os.path.realpath(study):
        raise ArgumentError(f"{page} takes the measurements: name another file for the report")
    check_writable(page, 0, overwrite)


def finished(path: Path, page: Path | None, wanted: Sequence[AnyCase]) -> int:
    """Write the report of a study, say whether the losses of training agree, and return the exit code: 1 if not."""
    study = read_study(path)
    measured = [study.measured[case] for case in wanted if case in study.done and isinstance(case, TrainingCase)]
    losses = agreement([TrainingPoint.of(record, path) for record in measured])
    with suppress(BrokenPipeError):
        if measured and (page is None or not losses.agree):  # a report says it, too
            echo(losses.text, err=not losses.agree)
        try:
            if page is not None and study.measured:
                report([path], page, None, None, overwrite=True)  # as `check_report` has decided
        except PdgemmError as bad:
            echo(f"pdgemm: the measurements are in {path}, but there is no page: {bad}", err=True)
    return 0 if losses.agree else 1


def report(
    studies: Sequence[Path], out: Path, machine_file: str | None, predict_to: int | None, overwrite: bool = False
) -> None:
    """Read studies, predict, draw, and write the report.  Raises FileError or ArgumentError.

    machine_file : the machine of the predictions; None: the calibration of each study.
    predict_to   : the most ranks of a prediction; None: so many that measurements take half of the axis of ranks.
    overwrite    : also replace a file that pdgemm did not write.
    """
    form = form_of(out, FORMS)
    if os.path.realpath(out) in map(os.path.realpath, studies):
        raise ArgumentError(f"{out} is one of the studies: name another file for the report")
    check_writable(out, 0, overwrite)
    machine = load_machine(machine_file) if machine_file else None
    results = read_all(studies)
    for place, fault in results.unread[:_MOST]:
        echo(f"pdgemm: warning: {place}: {fault}; left out", err=True)
    if len(results.unread) > _MOST:
        echo(f"pdgemm: warning: {len(results.unread) - _MOST} more were left out", err=True)
    if not results.measurements and form != ".html":
        raise ArgumentError(
            f"there is nothing to draw: {counted(len(results.bad), 'case')} failed or wrong, none right"
        )
    forecasts = [_forecast(section, results, machine, predict_to) for section in results.sections]
    predicted = [each for forecast in forecasts for each in forecast.values()]
    notes = assumptions(predicted, gpus=any(point.case.device != "host" for point in results.points))
    with drawing():
        if form == ".html":
            data = _page(results, forecasts, notes).encode(errors="xmlcharrefreplace")
        else:
            drawn = [(x.title, panels(x, forecast)) for x, forecast in zip(results.sections, forecasts) if x.points]
            drawn += [(x.title, panels_of_training(x)) for x in results.trainings]
            data = saved(figure_of_sections(drawn), form[1:])
    write_file(out, data)
    echo(f"{out}: {counted(len(results.measurements), 'measurement')}, {len(results.bad)} failed or wrong")
    for note in [*results.notes, *notes]:
        echo(f"  {note}")


def _forecast(section: Section, results: Results, requested: Machine | None, to: int | None) -> Forecast:
    """Return the predictions of each curve for which there are any."""
    forecast: Forecast = {}
    first, last = (section.counts[0], section.counts[-1]) if section.counts else (1, 1)
    to = to or min(last * max(4, last // first), _FAR)
    for number, curve in enumerate(section.curves):
        machine = requested or results.machines.get(curve.first.source)
        alike = [point for point in results.points if point.settings == curve.first.settings]
        counts = [point.ranks for point in curve.points]
        predicted = predict(curve.case, counts, max(to, counts[-1]), machine, per_node(alike))
        if predicted and predicted.formula:
            forecast[number] = predicted
    return forecast


def _page(results: Results, forecasts: Sequence[Forecast], notes: Sequence[str]) -> str:
    drawn = list[DrawnSection]()
    for section, forecast in zip(results.sections, forecasts):
        drawn.append(Drawn(section, forecast, *_svgs(panels(section, forecast))))
    drawn += [DrawnTraining(section, *_svgs(panels_of_training(section))) for section in results.trainings]
    machines = dict.fromkeys(str(x.machine) for forecast in forecasts for x in forecast.values())
    planned = {x.source for section in results.trainings for x in section.points if x.training.mfu is not None}
    machines |= {str(machine): None for source, machine in results.machines.items() if source in planned}
    return page(results, drawn, notes, [*machines])


def _svgs(every: Sequence[FigurePanel]) -> tuple[list[tuple[FigurePanel, str]], str]:
    """Return the figures of panels, and the legend of what several of them show."""
    shared = shared_entries(every)
    figures = [(panel, saved(figure_of_panel(panel, shared), "svg").decode()) for panel in every]
    return figures, saved(legend(shared), "svg").decode() if shared else ""
