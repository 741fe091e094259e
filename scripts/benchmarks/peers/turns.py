"""All contenders multiply one shape, one after the other, with NumPy in between."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import median
from time import perf_counter, sleep
from typing import Any, Protocol

import numpy as np
from bench_gemm import SETTLE

from peers.job import Job, Unable

MNK = tuple[int, int, int]


@dataclass
class Result:
    """seconds: of each product.  numpy: the mean of NumPy's right before and after it.  trouble: why there are none.

    kernel: what its BLAS uses.  unlike: why its times are not held against NumPy's.
    """

    layout: str
    shape: str
    mnk: MNK
    contender: str
    seconds: list[float] = field(default_factory=list)
    numpy: list[float] = field(default_factory=list)
    kernel: str = ""
    unlike: str = ""
    note: str = ""
    trouble: str = ""

    @property
    def ratios(self) -> list[float]:
        return [] if self.unlike else [a / b for a, b in zip(self.numpy, self.seconds)]

    @property
    def summary(self) -> str:
        """In a line."""
        if not self.seconds:
            return f"{self.contender:20} {self.trouble}"
        ratio = f"{median(self.ratios):6.2f}" if self.ratios else 6 * " "
        said = "; ".join(filter(None, (self.kernel, self.unlike and f"no ratio: {self.unlike}", self.note)))
        return f"{self.contender:20} {1e3 * median(self.seconds):9.2f} ms {ratio}  {said}"

    def plain(self) -> dict[str, Any]:
        """As JSON has it: median, least and most beside all of them."""
        found = asdict(self)
        for name, values in (("seconds", self.seconds), ("ratio", self.ratios)):
            found |= dict(zip((f"{name}_median", f"{name}_min", f"{name}_max"), spread(values) or [None] * 3))
        return found


def spread(values: list[float]) -> tuple[float, float, float] | None:
    """Median, least and most."""
    return (median(values), min(values), max(values)) if values else None


class Ceiling:
    """NumPy's product in this process, with all its threads."""

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


class Timed(Protocol):
    """What stands between the contenders."""

    def seconds(self) -> float: ...


def measure(
    jobs: dict[str, Job], results: list[Result], dtype: str, repeats: int, between: Timed | None = None
) -> None:
    """A first round, in which each chooses its layout and is checked, and then `repeats` that count.

    results : of one layout and shape, still without numbers; those with a trouble are left alone.
    between : what is measured before and after each, and as results[0]; by default NumPy's product.
    """
    numpy, mnk = results[0], results[0].mnk
    ceiling = between or Ceiling(mnk, dtype)
    running = [result for result in results[1:] if not result.trouble]
    for turn in range(repeats + 1):
        before = ceiling.seconds()
        for result in list(running):
            job = jobs[result.contender]
            try:
                seconds, note = job.multiply(*mnk)
            except Unable as failed:
                result.trouble = str(failed)
                running.remove(result)
                continue
            after = ceiling.seconds()
            result.kernel, result.unlike = job.kernel, job.unlike
            result.note = ", ".join(filter(None, (note, job.nearest)))
            if turn:
                result.seconds.append(seconds)
                result.numpy.append((before + after) / 2)
                numpy.seconds.append(after)
            before = after
        if turn and not running:
            numpy.seconds.append(before)
