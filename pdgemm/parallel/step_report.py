"""Where the time of a training step goes, on all ranks, and what moves in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from pdgemm.instrument.recorder import Traffic, slow_among
from pdgemm.parallel.buckets import WAITS
from pdgemm.parallel.data.prefetch import Prefetch
from pdgemm.parallel.updates.sharded_optimizer import ShardedOptimizer
from pdgemm.support.text import Table, counted, in_seconds, in_words

PHASES = ("data", "forward", "backward", "reduce", "optimizer", "other")


@dataclass(frozen=True)
class StepReport:
    """The steps of all ranks.

    steps, samples : their number, and the samples of all steps and ranks.
    seconds : of all steps together.   p50, p99 : of a step, on the slowest rank of each.
    phases  : (rank, phase) seconds of a step on average; `PHASES` are the columns.  "reduce" is the exposed part of the
        reductions: the time in which a rank waits for them after its backward pass.
    waits   : of each rank, the seconds of a step in which its passes wait for buckets, with stages 2 and 3.
    hidden  : seconds of a step in which messages moved while ranks computed, on average.
    counted, predicted : traffic of this rank in all steps by kind, and by `FlatLayout.step`, without parameters of
        updates that were skipped.
    """

    steps: int
    samples: int
    seconds: float
    p50: float
    p99: float
    phases: np.ndarray
    waits: np.ndarray
    hidden: float
    counted: dict[str, Traffic]
    predicted: dict[str, Traffic]

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def as_predicted(self) -> bool:
        """Are gradients and parameters moved as the layout says, to the word and the message?"""
        return all(self.counted.get(kind, Traffic()) == self.predicted[kind] for kind in ("gradients", "parameters"))

    @property
    def slow_rank(self) -> int | None:
        """The rank that is busy in its passes much longer than the median of all ranks; None: no rank."""
        return slow_among((self.phases[:, 1:3].sum(axis=1) - self.waits).tolist())

    def __str__(self) -> str:
        mean, most = self.phases.mean(axis=0), self.phases.max(axis=0)
        spread = self.phases.std(axis=0)
        rows = [
            (
                name,
                in_seconds(mean[at]),
                in_seconds(spread[at]),
                f"{in_seconds(most[at])} on rank {self.phases[:, at].argmax()}",
            )
            for at, name in enumerate(PHASES)
        ]
        table = Table(("a step", "mean", "deviation", "most"), rows, words=("a step",))
        lines = [
            f"{counted(self.steps, 'step')} in {in_seconds(self.seconds)}: {self.samples_per_second:.4g} samples/s; a "
            f"step takes {in_seconds(self.p50)} in half of the cases, {in_seconds(self.p99)} in 99%",
            str(table),
        ]
        for kind, expected in self.predicted.items():
            moved = self.counted.get(kind, Traffic())
            as_planned = "as predicted" if moved == expected else f"predicted {in_words(expected.words_received)}"
            if kind != "decisions":
                each = moved.words_received / max(1, self.steps)
                lines.append(f"{kind}: {in_words(each)} received a step by rank 0, {as_planned}")
        if self.slow_rank is not None:
            lines.append(f"rank {self.slow_rank} is slow: the others wait for it")
        return "\n".join(lines)


class StepTimes:
    """Measures the steps of a training loop.

    ::

        times = StepTimes(optimizer, batches)
        for batch in batches:
            with times.step(len(rows)):
                ...                        # passes, and optimizer.step
        report = times.report()            # collective

    optimizer : whose buckets time their passes.   batches : the `Prefetch`, whose waits are "data"; None: none.
    """

    def __init__(self, optimizer: ShardedOptimizer, batches: Prefetch | None = None) -> None:
        self._optimizer, self._batches, self._rows, self._samples = optimizer, batches, list[list[float]](), 0
        self._traffic, self._last = dict[str, Traffic](), batches.seconds if batches else 0.0
        self._hidden, self._waits, self._updates = 0.0, 0.0, 0

    def _so_far(self) -> dict[str, Traffic]:
        return {kind: x + Traffic() for kind, x in self._optimizer.buckets.mesh.traffic.items()}

    @contextmanager
    def step(self, samples: int) -> Iterator[None]:
        """Measure a step of this many samples of all ranks, and the wait for its data, which came before."""
        seconds, start = self._optimizer.buckets.recorder.seconds, perf_counter()
        before, moved, updates = dict(seconds), self._so_far(), self._optimizer.updates
        yield
        end = perf_counter()
        for kind, x in self._so_far().items():
            self._traffic[kind] = self._traffic.get(kind, Traffic()) + (x - moved.get(kind, Traffic()))
        self._updates += self._optimizer.updates - updates
        spent = {name: seconds.get(name, 0.0) - before.get(name, 0.0) for name in (*PHASES[1:5], "hidden", WAITS)}
        waited = self._batches.seconds if self._batches else 0.0
        data, self._last = waited - self._last, waited
        inside = [spent[name] for name in PHASES[1:5]]
        self._rows.append([data, *inside, max(0.0, end - start - sum(inside))])
        self._hidden += spent["hidden"]
        self._waits += spent[WAITS]
        self._samples += samples

    def report(self) -> StepReport:
        """Return the report of all steps so far.  Collective over the mesh; it is not part of a step."""
        comm, layout = self._optimizer.buckets.mesh.comm, self._optimizer.buckets.layout
        own = np.array(self._rows).reshape(-1, len(PHASES))
        number = comm.allreduce(len(own))  # the same on all ranks, else nothing fits together
        steps = number // comm.size
        totals = np.max(comm.allgather(own.sum(axis=1)[:steps]), axis=0)
        phases = np.array(comm.allgather(own.sum(axis=0) / max(1, steps)))
        waits = np.array(comm.allgather(self._waits / max(1, steps)))
        times = dict.fromkeys(kinds := layout.step(self._optimizer.buckets.index), steps)
        if layout.stage in (1, 2):  # parameters come in after updates, which steps that overflow do not have
            times["parameters"] = self._updates
        expected = {kind: sum([x] * times[kind], Traffic()) for kind, x in kinds.items()}
        p50, p99 = np.percentile(totals, [50, 99]) if steps else (0.0, 0.0)
        return StepReport(
            steps, self._samples, float(totals.sum()), float(p50), float(p99), phases,
            waits, self._hidden / max(1, steps), dict(self._traffic), expected,
        )  # fmt: skip
