"""`pdgemm verify-training`: does a distributed training program compute what one process of plain torch computes?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.planning.collective_plan import parts_of
from pdgemm.schedules.collectives.collective import Collective
from pdgemm.support.files import read_file
from pdgemm.support.json_input import decoded
from pdgemm.support.text import Table, counted, ranks_text
from pdgemm.tools.cli import options
from pdgemm.tools.cli.job import OfOneRank


@click.command(cls=OfOneRank, short_help="Compare a training program with one process.")
@click.argument("file", metavar="REFERENCE.py", type=click.Path(path_type=Path))
@click.option("--run", "folder", required=True, type=click.Path(path_type=Path), help="Folder with the recorded run.")
@click.option("--steps", type=options.COUNT, help="Compare only the first steps.")
@click.option("--names", type=click.Path(), help='JSON: {"name of a parameter in the run": "name in the reference"}.')
@options.json_
@options.debug
def verify_training(file: Path, folder: Path, steps: int | None, names: str | None, as_json: bool) -> int:
    """Compare the recorded steps of a training program with a reference, one process of plain torch.  Needs no MPI.

    A program records its steps by the function `record` of pdgemm.tools.verification.training_record.

    REFERENCE.py defines model(), batches(), loss(model, *batch) and optimizer(model).  It is run four times, three
    times with other rounding: a number of the run is wrong if it differs by more than 10 times the effect of rounding.
    The first step with a wrong number is shown.  Exit code 1: a number is wrong, or rounding would hide mistakes.
    """
    try:
        from pdgemm.tools.verification.training_comparison import RecordedRun, Reference, TrainingComparison
    except ImportError as missing:
        raise ArgumentError(f"verify-training needs torch and safetensors: {missing}") from None
    run = RecordedRun(folder, decoded(read_file(names), dict[str, str], names) if names else {})
    steps = steps or max(run.steps)[0]
    comparison = TrainingComparison(Reference(file, steps, run.eps), run)
    lines, wrong = [str(_table(comparison.differences))], comparison.wrong
    lines += [f"{text}: {_listed(sorted(which))}" for text, which in comparison.notes.items() if which]
    for (step, rank), x in [item for item in run.steps.items() if item[1].collectives][-1:]:
        table = Table(("", "ranks", "calls", "words", "pdgemm receives"), [_row(*c) for c in x.collectives], words={""})
        lines += [f"collectives of rank {rank} in step {step}:", *str(table).splitlines()]
    ok = f"ok: no difference in {counted(steps, 'step')} is larger than rounding explains"
    blind = "this check cannot tell: no number is known, or rounding, or dropout, moves most as far as mistakes would"
    lines.append(f"WRONG from step {wrong[0].step} on" if wrong else blind if comparison.is_blind else ok)
    facts = {"passed": not wrong and not comparison.is_blind, "wrong": [x._asdict() for x in wrong]}
    options.show(as_json, facts | {"notes": lines[1:]}, "\n".join(lines))
    return int(not facts["passed"])


def _table(differences: list[Any]) -> Table:
    """Return a row for each kind of numbers, and for wrong ones a row for those of which the same is known."""
    groups = dict[tuple[str, str | None], list[Any]]()
    for x in sorted(differences, key=lambda x: x.known is not None):
        kind = "gradients" if x.name.endswith(".grad") else x.name if x.name in ("loss", "norm") else "parameters"
        groups.setdefault((kind, x.known), []).append(x)
    rows = list[tuple[str, ...]]()
    for (kind, known), these in groups.items():
        same = [max(these, key=lambda x: x.ratio)] if known is None else these
        x, ranks, names = same[0], sorted({x.rank for x in same}), [*dict.fromkeys(x.name for x in same)]
        at = f"step {x.step}, {ranks_text(ranks)}, {_listed(names, 1)}"
        verdict = "ok" if known is None else f"WRONG{': ' * bool(known)}{known}"
        rows.append((kind, str(len(these)), f"{x.difference:.1e}", f"{x.ratio:.2g}", at, verdict))
    return Table(("", "compared", "difference", "/ rounding", "at", " "), rows[:16], words=("", "at", " "))


def _row(kind: str, ranks: int, words: int, calls: int) -> tuple[str, ...]:
    """Return a row of the table of collectives; its last cell has the most words that a rank of pdgemm's receives."""
    algorithm, parts = "tree" if kind == "broadcast" else "pairwise", parts_of(kind, words, ranks)
    ours = Collective(kind, algorithm, (*range(ranks),), parts, np.dtype(np.float64))
    most = max(ours.traffic(rank).words_received for rank in (0, ranks - 1))
    return kind, *(f"{n:,}" for n in (ranks, calls, calls * words, calls * most))


def _listed(names: list[str], shown: int = 8) -> str:
    return ", ".join(names[:shown]) + f" and {len(names) - shown} more" * (len(names) > shown)
