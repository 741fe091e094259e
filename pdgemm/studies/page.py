"""The report of a study as one page of HTML, which needs no network and no script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import isfinite
from typing import Any

from pdgemm.studies.curves import TITLES, Findings, Point, Section
from pdgemm.studies.findings import key_results
from pdgemm.studies.panels import Forecast
from pdgemm.studies.records import Record
from pdgemm.support.text import counted

STYLE = """
:root { color-scheme: light dark; --text: #1a1a1a; --page: #fff; --soft: #666; --line: #d5d5d5; --band: #f5f5f5; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e6e6; --page: #16181b; --soft: #a5a5a5; --line: #44474b; --band: #1f2226; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); margin: 0 auto;
  max-width: 74rem; padding: 1.5rem; }
h1 { font-size: 1.7rem; line-height: 1.25; } h2 { font-size: 1.3rem; margin-top: 2.5rem; border-top: 1px solid
  var(--line); padding-top: 1.2rem; } h3 { font-size: 1.05rem; margin: 1.6rem 0 .5rem; }
p, li { max-width: 60rem; } li { margin: .25rem 0; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1.2rem; }
figure { margin: 0; break-inside: avoid; } figure.wide { grid-column: 1 / -1; }
figure svg { width: 100%; height: auto; background: #fff; border-radius: 4px; }
figcaption { font-size: .86rem; color: var(--soft); max-width: 60rem; }
.wider { overflow-x: auto; }
table { border-collapse: collapse; font-size: .8rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); padding-bottom: .3rem; }
th, td { padding: .22rem .5rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line); }
thead th { vertical-align: bottom; white-space: normal; }
th[scope=row], .words td, .words th { text-align: left; }
.words td { white-space: normal; overflow-wrap: anywhere; } tbody tr:nth-child(even) { background: var(--band); }
pre { background: var(--band); padding: .7rem; overflow-x: auto; font-size: .84rem; white-space: pre-wrap; }
h2, h3 { break-after: avoid; } tr { break-inside: avoid; } @page { size: A4 landscape; margin: 12mm; }
@media print { body { font-size: 10pt; max-width: none; padding: 0; } .figures { grid-template-columns: 1fr 1fr; }
  .wider { overflow: visible; } table { font-size: 6.5pt; } th, td { padding: .1rem .25rem; }
  td:last-child { white-space: normal; } }
"""
METHOD = (
    "A repetition is a whole call of pdgemm, planning included, between two barriers, on matrices of random numbers "
    "that lie as DistMatrix lays them out by default: in one block for each rank of a near-square grid. Its time is "
    "that of the slowest rank. The median of all repetitions is given, after the warm-up.",
    "The interval is the 95% confidence interval of the median, by order statistics, without assumptions about the "
    "distribution; it takes six repetitions or more (Hoefler & Belli, Scientific benchmarking of parallel computing "
    "systems, SC15, 2015, section 3.1.3).",
    "GFLOP/s: 2 m n k operations (8 m n k of complex numbers) over the median. The measured peak is the rate of local "
    "products of one size on all ranks at the same time, without communication, the better of one right before and "
    "one right after the repetitions.",
    "Efficiency is the rate per rank over that on the fewest ranks of the same curve; of the same work that is "
    "T(p0) p0 / (T(p) p).",
    "Words are elements that a rank receives, in messages or by reading a neighbour's memory, counted where they are "
    "moved. The lower bound is that of Al Daas, Ballard, Grigori, Kumar & Rouse, SPAA 2022, theorem 3, for matrices "
    "that are shared out over all ranks; redistributions are counted, but not in the bound.",
    "Each result is checked by a residual with random vectors; a case whose residual is above its bound is wrong, and "
    "is not shown as measured. Core-hours are the median times the threads of all ranks; energy is that of one "
    "product on all nodes, from the counters of the processors, where they can be read.",
    "Predictions. Formula: what the planner expects of the product that a run itself would choose, redistribution "
    "included, on the same layouts. Simulation: the schedule of the same product walked through for all ranks, message "
    "by message; there the ranks of a node send messages too, where a run reads its neighbours' memory. Both assume "
    "an idle machine with a core for each thread, and neither knows of contention between jobs or of slow nodes.",
)


@dataclass(frozen=True)
class Drawn:
    """A section, its predictions, and its figures: caption, SVG, and whether it takes a row of its own."""

    section: Section
    forecast: Forecast
    figures: Sequence[tuple[str, str, bool]]


def page(findings: Findings, drawn: Sequence[Drawn], notes: Sequence[str], machines: Sequence[str]) -> str:
    """notes : what the predictions rest on.   machines : the models, as text."""
    *others, last = (TITLES[section.kind].lower() for section in findings.sections)
    kinds = f"{', '.join(others)} and {last}" if others else last
    title = f"Distributed matrix multiplication: {kinds}"
    return "".join(
        (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n",
            f"<h1>{escape(title)}</h1>\n",
            *(_key(each) for each in drawn),
            _list("Notes", [*findings.notes, *notes]),
            _measured(findings.points),
            *(_section(each) for each in drawn),
            _bad(findings),
            _list("Lines that could not be used", [f"{place}: {fault}" for place, fault in findings.unread]),
            "<h2>Method</h2>\n" + "".join(f"<p>{escape(text)}</p>\n" for text in METHOD),
            "".join(f"<h3>The machine of the predictions</h3>\n<pre>{escape(text)}</pre>\n" for text in machines),
            "</body>\n</html>\n",
        )
    )


def _key(drawn: Drawn) -> str:
    return _list(drawn.section.title, key_results(drawn.section, drawn.forecast))


def _section(drawn: Drawn) -> str:
    if not drawn.section.points:
        return ""
    figures = "".join(
        f'<figure class="{"wide" if wide else "one"}">{inline(svg, f"{drawn.section.kind}{number}-")}'
        f"<figcaption>{escape(caption)}</figcaption></figure>\n"
        for number, (caption, svg, wide) in enumerate(drawn.figures)
    )
    return (
        f'<h2>{escape(drawn.section.title)}</h2>\n<div class="figures">\n{figures}</div>\n'
        f"<h3>All measurements</h3>\n{_table(*rows(drawn.section, drawn.forecast))}"
    )


def inline(svg: str, prefix: str) -> str:
    """An SVG file as a part of a page, with names of its own."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}", svg)


# ------------------------------------------------------------------ tables
def rows(section: Section, forecast: Forecast) -> tuple[list[str], list[list[str]]]:
    """The measurements of a section: the names of the columns, and the lines."""
    names = [
        "curve", "ranks", "m x n x k", "algorithm", "grid", "median [s]", "95% interval [s]", "GFLOP/s", "% of peak",
        "efficiency [%]", "words received", "words /\u00a0bound", "hidden [%]", "predicted [s]", "residual",
        "core-hours", "energy [J]",
    ]  # fmt: skip
    gpus = any(point.gpu_hours for point in section.points)
    lines = []
    for number, curve in enumerate(section.curves):
        seconds = {x.ranks: x.seconds for x in forecast[number].formula} if number in forecast else {}
        for point in curve.points:
            line = [
                curve.label,
                f"{point.ranks}{'*' * point.crowded}",
                " x ".join(map(str, point.case.mnk)),
                point.ran,
                point.grid,
                f"{point.seconds:.4g}",
                f"{point.interval[0]:.4g} to {point.interval[1]:.4g}" if point.interval else "-",
                f"{point.gflops:.4g}" if point.gflops < 1e4 else f"{point.gflops:.0f}",
                f"{100 * point.fraction:.0f}",
                f"{100 * curve.efficiency(point):.0f}",
                f"{point.words:.0f}",
                f"{point.over_bound:.3f}" if isfinite(point.over_bound) else "-",
                "-" if point.overlap is None else f"{100 * point.overlap:.0f}",
                f"{seconds[point.ranks]:.4g}" if point.ranks in seconds else "-",
                f"{point.residual:.2g}",
                f"{point.core_hours:.3g}",
                point.energy,
            ]
            lines.append(line + [f"{point.gpu_hours:.3g}"] * gpus)
    return names + ["GPU-hours"] * gpus, lines


def _table(names: Sequence[str], lines: Iterable[Sequence[str]], words: bool = False) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in rest)}</tr>\n'
        for first, *rest in lines
    )
    kind = ' class="words"' if words else ""
    top = f"<thead><tr>{head}</tr></thead>\n" if names else ""
    return f'<div class="wider"><table{kind}>\n{top}<tbody>\n{body}</tbody></table></div>\n'


def _measured(points: Sequence[Point]) -> str:
    """Where, by what and when."""
    if not points:
        return ""
    all_of = [point.record for point in points]
    settings = [record["setting"] for record in all_of]
    hosts = sorted({str(host) for setting in settings for host in setting["nodes"]})
    most = max(len(setting["nodes"]) for setting in settings)
    repeats = sorted({len(record["seconds"]) for record in all_of})
    dates = sorted(str(record["date"])[:16].replace("T", " ") for record in all_of if record.get("date"))
    facts = [
        ("nodes", f"{counted(most, 'node')} at most: {', '.join(hosts)}"),
        ("ranks on a node", _each(settings, "ranks_per_node")),
        ("processor", _each(settings, "cpu")),
        ("threads per rank", _each(settings, "threads_per_rank")),
        ("MPI", _each(settings, "mpi_library")),
        ("BLAS", _each(settings, "multiplies")),
        ("versions", "; ".join(f"{name} {_each(settings, name)}" for name in ("pdgemm", "python", "numpy", "mpi4py"))),
        ("kernel", _each(settings, "kernel")),
        ("repetitions, warm-ups", f"{', '.join(map(str, repeats))}; {_each(all_of, 'warmup')}"),
        ("date (UTC)", dates[0] + (f" to {dates[-1]}" if dates[-1] != dates[0] else "") if dates else "not recorded"),
        ("files", ", ".join(dict.fromkeys(str(point.source) for point in points))),
    ]
    if any(point.case.device == "cuda" for point in points):
        facts.insert(6, ("CuPy", _each(settings, "cupy")))
    commands = "\n".join(dict.fromkeys(filter(None, map(command, all_of))))
    again = f"<h3>To repeat it</h3>\n<pre>{escape(commands)}</pre>\n" if commands else ""
    return f"<h2>What was measured, and where</h2>\n{_table((), facts, words=True)}{again}"


def _each(records: Iterable[dict[str, Any]], name: str) -> str:
    values = (record.get(name, "not recorded") for record in records)
    texts = ("-".join(map(str, value)) if isinstance(value, list) else str(value) for value in values)
    return ", ".join(dict.fromkeys(texts))


def command(record: Record) -> str:
    """The command of the user that led to a record, in the terms of a shell."""
    words = record.get("command")
    if not isinstance(words, list) or not words:
        return ""
    environment = record.get("environment")
    threads = environment.get("OMP_NUM_THREADS") if isinstance(environment, dict) else None
    before = f"OMP_NUM_THREADS={shlex.quote(str(threads))} " if threads else ""
    return before + shlex.join(map(str, words))


def _bad(findings: Findings) -> str:
    if not findings.bad:
        return ""
    lines = [
        (str(case), str(record["status"]), str(record.get("error") or _wrong(record)), str(path))
        for path, case, record in findings.bad
    ]
    names = ("case", "status", "error", "file")
    return f"<h2>Cases that failed or are wrong</h2>\n{_table(names, lines, words=True)}"


def _wrong(record: Record) -> str:
    return f"residual {record.get('residual')}, at most {record.get('residual_bound')} is right"


def _list(title: str, texts: Sequence[str]) -> str:
    if not texts:
        return ""
    return f"<h3>{escape(title)}</h3>\n<ul>\n" + "".join(f"<li>{escape(text)}</li>\n" for text in texts) + "</ul>\n"
