"""Pages of HTML that need no network and no script: reports (report.html) and traced runs (run.html)."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from math import isfinite
from typing import Any

from pdgemm.support.text import Table, counted, in_seconds
from pdgemm.tools.studies.curves import TITLES, Curve, Point, Results, Section
from pdgemm.tools.studies.panels import FigurePanel, Forecast
from pdgemm.tools.studies.records import Measurement, Record, relative

ERROR = "model error [%]"
# the columns of tables: each function returns a cell for a curve, a point of the curve and its predicted seconds
COLUMNS: dict[str, Callable[[Curve, Point, float | None], str]] = {
    "curve": lambda curve, x, _: curve.label,
    "ranks": lambda curve, x, _: f"{x.ranks}{'*' * x.oversubscribed}",
    "m x n x k": lambda curve, x, _: " x ".join(map(str, x.case.mnk)),
    "algorithm": lambda curve, x, _: x.ran,
    "grid": lambda curve, x, _: x.grid,
    "time": lambda curve, x, _: in_seconds(x.seconds),
    "median [s]": lambda curve, x, _: f"{x.seconds:.4g}",
    "95% interval [s]": lambda curve, x, _: f"{x.interval[0]:.4g} to {x.interval[1]:.4g}" if x.interval else "-",
    "GFLOP/s": lambda curve, x, _: f"{_gflops(x):.4g}" if _gflops(x) < 1e4 else f"{_gflops(x):.0f}",
    "% of peak": lambda curve, x, _: f"{100 * x.fraction:.0f}",
    "efficiency [%]": lambda curve, x, _: f"{100 * relative(curve.first, x):.0f}",
    "words received": lambda curve, x, _: f"{x.words:.0f}",
    "words / bound": lambda curve, x, _: f"{x.over_bound:.3f}" if isfinite(x.over_bound) else "-",
    "hidden [%]": lambda curve, x, _: "-" if x.product.overlap is None else f"{100 * x.product.overlap:.0f}",
    "predicted [s]": lambda curve, x, predicted: f"{predicted:.4g}" if predicted else "-",
    ERROR: lambda curve, x, predicted: f"{100 * (predicted / x.seconds - 1):+.0f}" if predicted else "-",
    "residual": lambda curve, x, _: f"{x.residual:.2g}",
    "core-hours": lambda curve, x, _: f"{x.cost.core_hours:.3g}",
    "GPU-hours": lambda curve, x, _: f"{x.cost.gpu_hours:.3g}",
}
KEY = (
    "curve", "ranks", "m x n x k", "algorithm", "grid", "time", "GFLOP/s", "% of peak", "efficiency [%]",
    "words / bound", ERROR,
)  # fmt: skip


class DrawnSection:
    """A section of the page: its figures (each a panel and its SVG), the legend of all figures, and its tables."""

    section: Any
    figures: Sequence[tuple[FigurePanel, str]]
    legend: str
    key_title = "the fastest product of each curve"

    @property
    def key_figures(self) -> Table:
        """The table at the top of the page."""
        raise NotImplementedError

    @property
    def measurements(self) -> Table:
        """The table of all measurements."""
        raise NotImplementedError

    @property
    def words(self) -> Table:
        """The table of words by kind, where a section has one."""
        return Table((), [])

    @property
    def legend_svg(self) -> str:
        return inline(self.legend, f"{self.section.anchor}-legend-") if self.legend else ""

    @property
    def svgs(self) -> list[tuple[FigurePanel, str]]:
        return [(panel, inline(svg, f"{self.section.anchor}{at}-")) for at, (panel, svg) in enumerate(self.figures)]


@dataclass(frozen=True)
class Drawn(DrawnSection):
    """A section of products, with its predictions."""

    section: Section
    forecast: Forecast
    figures: Sequence[tuple[FigurePanel, str]]
    legend: str = ""

    @property
    def key_figures(self) -> Table:
        return self._table(KEY, [(curve, [max(curve.points, key=_gflops)]) for curve in self.section.curves])

    @property
    def measurements(self) -> Table:
        gpus = any(point.cost.gpu_hours for point in self.section.points)
        names = [name for name in COLUMNS if name != "time" and (gpus or name != "GPU-hours")]
        return self._table(names, [(curve, curve.points) for curve in self.section.curves])

    def _table(self, names: Sequence[str], chosen: Iterable[tuple[Curve, Sequence[Point]]]) -> Table:
        rows = []
        for number, (curve, points) in enumerate(chosen):
            formula = self.forecast[number].formula if number in self.forecast else ()
            seconds = {x.ranks: x.seconds for x in formula}
            unknown = " (uncalibrated)" if formula and not self.forecast[number].calibrated else ""
            for x in points:
                cells = {name: COLUMNS[name](curve, x, seconds.get(x.ranks)) for name in names}
                error = cells[ERROR]
                rows.append([*(cells | {ERROR: error if error == "-" else error + unknown}).values()])
        return Table(names, rows, words=("curve",))


def page(results: Results, drawn: Sequence[DrawnSection], notes: Sequence[str], machines: Sequence[str]) -> str:
    """Return the page of a report.   notes : the assumptions of predictions.   machines : machine models, as text."""
    bad = [
        (str(case), str(record["status"]), str(record.get("error") or _wrong(record)), str(path))
        for path, case, record in results.bad
    ]
    names = ("case", "status", "error", "file")
    return _filled(
        "report.html",
        title=_title(results),
        drawn=drawn,
        products=bool(results.sections),
        training=bool(results.trainings),
        notes=[*results.notes, *notes],
        setting=_setting(results.measurements),
        commands=list(dict.fromkeys(filter(None, (command_of_record(point.record) for point in results.measurements)))),
        bad=Table(names, bad, words=names),
        unread=[f"{place}: {fault}" for place, fault in results.unread],
        machines=machines,
    )


def _title(results: Results) -> str:
    """Return the title of a report: what was measured, and the kinds of studies."""
    products = ", ".join(TITLES[x.kind].lower() for x in results.sections)
    training = ", ".join(dict.fromkeys(TITLES[x.kind].lower() for x in results.trainings))
    parts = [f"Distributed matrix multiplication: {products}"] * bool(products)
    parts += [f"{'training' if products else 'Training'} of a transformer: {training}"] * bool(training)
    return "; ".join(parts) or "A study"


def run_page(
    title: str, pictures: Mapping[str, str], tables: Sequence[Table], figures: Sequence[str], said: str
) -> str:
    """Return the page of a traced run.

    pictures : the SVG of its "timeline", and of the "words" from rank to rank.   figures : further facts, as text.
    said : the text that the command has printed.
    """
    svgs = {name: inline(svg, f"{name}-") for name, svg in pictures.items()}
    return _filled("run.html", title=title, svgs=svgs, tables=tables, figures=figures, said=said)


def _filled(name: str, **facts: Any) -> str:
    """Return the template `name`, filled with the facts."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    loader = FunctionLoader(lambda name: files("pdgemm.tools.studies").joinpath(name).read_text(encoding="utf-8"))
    rules: Any = {"autoescape": True, "undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    return Environment(loader=loader, **rules).get_template(name).render(**facts)


def inline(svg: str, prefix: str) -> str:
    """Return an SVG file as a part of a page, with `prefix` before its names, which must be unique on the page."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}", svg)


def command_of_record(record: Record) -> str:
    """Return the command of the user that led to a record, as a line for a shell."""
    words = record.get("command")
    if not isinstance(words, list) or not words:
        return ""
    environment = record.get("environment")
    threads = environment.get("OMP_NUM_THREADS") if isinstance(environment, dict) else None
    before = f"OMP_NUM_THREADS={shlex.quote(str(threads))} " if threads else ""
    return before + shlex.join(map(str, words))


def _setting(points: Sequence[Measurement]) -> Table:
    """Return the table of the nodes, the software and the dates of the measurements."""
    all_of = [point.record for point in points]
    settings = [record["setting"] for record in all_of]
    nodes = sorted({node for point in points for node in point.setting.nodes})
    repeats = sorted({len(point.repetitions) for point in points})
    dates = sorted(str(record["date"])[:16].replace("T", " ") for record in all_of if record.get("date"))
    facts = [
        ("nodes", f"{counted(max((len(x.setting.nodes) for x in points), default=0), 'node')}: {', '.join(nodes)}"),
        ("ranks on a node", _each(settings, "ranks_per_node")),
        ("processor", _each(settings, "cpu")),
        ("threads per rank", _each(settings, "threads_per_rank")),
        ("MPI", _each(settings, "mpi_library")),
        ("BLAS", _each(settings, "multiplies")),
        *[("CuPy", _each(settings, "cupy"))] * any(point.case.device == "cuda" for point in points),
        ("versions", "; ".join(f"{name} {_each(settings, name)}" for name in ("pdgemm", "python", "numpy", "mpi4py"))),
        ("kernel", _each(settings, "kernel")),
        ("repetitions, warm-ups", f"{', '.join(map(str, repeats))}; {_each(all_of, 'warmup')}"),
        ("date (UTC)", " to ".join(dict.fromkeys([*dates[:1], *dates[-1:]])) or "not recorded"),
        ("files", ", ".join(dict.fromkeys(point.source for point in points))),
    ]
    return Table(("", ""), facts if points else [], words=("",))


def _each(records: Iterable[dict[str, Any]], name: str) -> str:
    values = (record.get(name, "not recorded") for record in records)
    texts = ("-".join(map(str, value)) if isinstance(value, list) else str(value) for value in values)
    return ", ".join(dict.fromkeys(texts))


def _gflops(point: Point) -> float:
    return point.flops / point.seconds / 1e9


def _wrong(record: Record) -> str:
    if "training" in record:
        return "a loss is infinite or not a number"
    return f"residual {record.get('residual')}, at most {record.get('residual_bound')} is right"
