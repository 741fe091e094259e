"""The measurement of a case, contenders in turns with a yardstick in between; and the report of the results."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any, Protocol

import click
import numpy as np
from runner import in_unit, machine, machine_line, spread

from pdgemm.local.blas import processors
from pdgemm.support.files import write_file
from peers.job import Job, Unable

MNK = tuple[int, int, int]
SETTLE = 0.1  # seconds; OpenBLAS's threads go on spinning for tens of milliseconds after a product


@dataclass
class Result:
    """The seconds of a contender for one case, or the reason why it does not take part (`trouble`).

    yardstick : for each run, the mean of the yardstick's seconds right before and right after it.
    over : ratios are seconds / yardstick; otherwise they are scale * yardstick / seconds.
    kernel : the kernel of its BLAS.   unlike : the reason why its times are not compared with the yardstick.
    """

    layout: str
    shape: str
    mnk: MNK
    contender: str
    seconds: list[float] = field(default_factory=list)
    yardstick: list[float] = field(default_factory=list)
    scale: float = 1.0
    over: bool = False
    kernel: str = ""
    unlike: str = ""
    note: str = ""
    trouble: str = ""

    @property
    def ratios(self) -> list[float]:
        pairs = [] if self.unlike else zip(self.yardstick, self.seconds)
        return [b / a if self.over else self.scale * a / b for a, b in pairs]

    @property
    def summary(self) -> str:
        """The result in a line: the median time, and the median ratio with the least and the greatest one."""
        if not self.seconds:
            return f"{self.contender:20} {self.trouble}"
        numbers = spread(self.ratios)
        ratio = f"{numbers[0]:8.3f} ({numbers[1]:.3f} to {numbers[2]:.3f})" if numbers else ""
        said = "; ".join(filter(None, (self.kernel, self.unlike and f"no ratio: {self.unlike}", self.note)))
        return f"{self.contender:20} {in_unit(median(self.seconds)):>12} {ratio:26} {said}".rstrip()

    def plain(self) -> dict[str, Any]:
        """Return the result for JSON, with the median, the least and the greatest of seconds and ratios."""
        plain = asdict(self) | {"ratio": self.ratios}
        for name, values in (("seconds", self.seconds), ("ratio", self.ratios)):
            plain |= dict(zip((f"{name}_median", f"{name}_min", f"{name}_max"), spread(values) or [None] * 3))
        return plain


class Yardstick(Protocol):
    """A measurement before and after each contender.

    `bound` takes the yardstick's seconds and a contender's note, and returns the seconds to compare the contender with.
    """

    note: str

    def seconds(self) -> float: ...

    def bound(self, seconds: float, note: str) -> float: ...


class NumPyProduct:
    """NumPy's product in this process, with all its threads."""

    note = ""

    def __init__(self, mnk: MNK, dtype: str) -> None:
        m, n, k = mnk
        rng = np.random.default_rng(0)
        self.A, self.B = rng.random((m, k)).astype(dtype), rng.random((k, n)).astype(dtype)
        self.C = np.zeros((m, n), dtype)
        self.seconds()

    def seconds(self) -> float:
        sleep(SETTLE)
        start = perf_counter()
        np.matmul(self.A, self.B, out=self.C)
        taken = perf_counter() - start
        sleep(SETTLE)
        return taken

    def bound(self, seconds: float, note: str) -> float:
        return seconds


def measure(jobs: dict[str, Job], results: list[Result], repeats: int, between: Yardstick) -> None:
    """Run one round in which each contender chooses its layout and is checked, then `repeats` rounds that count.

    results : the results of one case, still without numbers; the first is the yardstick's.  Results with a `trouble`
        are not changed.
    """
    own, running = results[0], [result for result in results[1:] if not result.trouble]
    for turn in range(repeats + 1):
        before = between.seconds()
        for result in list(running):
            job = jobs[result.contender]
            try:
                seconds, note = job.multiply(*own.mnk)
            except Unable as failed:
                result.trouble = str(failed)
                running.remove(result)
                continue
            after = between.seconds()
            result.kernel, result.unlike = job.kernel, job.unlike
            result.note = ", ".join(filter(None, (note, job.nearest)))
            if turn:
                result.seconds.append(seconds)
                result.yardstick.append(between.bound((before + after) / 2, note))
                own.seconds.append(between.bound(after, ""))
            before = after
        if turn and not running:
            own.seconds.append(between.bound(before, ""))
    own.note = between.note


def options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that all comparisons have."""
    for option in (
        click.option("--json", "json_file", type=click.Path(dir_okay=False)),
        click.option("--quick", is_flag=True, help="Use small sizes, once or twice each, to test the benchmark."),
        click.option("--repeats", default=5, show_default=True),
    ):
        command = option(command)
    return command


def report(
    cases: Iterator[list[Result]], title: str, compares: str, about: dict[str, Any], json_file: str | None
) -> None:
    """Print the results of each case, and write all results after each, so that an interruption loses nothing.

    compares : a line that explains the ratios.   about : facts for JSON, in addition to those of the machine.
    """
    command = [x for x in sys.argv[1:] if x != "--inside"]
    about = machine() | {"warnings": processors.warnings(), "command": command, "title": title} | about
    print(title, machine_line(about), *(f"Warning: {x}." for x in about["warnings"]), compares, sep="\n", flush=True)
    results: list[Result] = []
    for here in cases:
        results += here
        print(f"{here[0].layout}, {here[0].shape}", *(f"  {x.summary}" for x in here), sep="\n", flush=True)
        if json_file:
            write_file(Path(json_file), json.dumps(about | {"results": [x.plain() for x in results]}, indent=1) + "\n")
