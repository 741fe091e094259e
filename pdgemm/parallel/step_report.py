"""Where the time of a training step goes, on all ranks, and what moves in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from pdgemm.instrument.recorder import Traffic, slow_among
from pdgemm.parallel.buckets import WAITS
from pdgemm.parallel.data.prefetch import Prefetch
from pdgemm.parallel.pipeline_stages import IDLE
from pdgemm.parallel.updates.sharded_optimizer import ShardedOptimizer
from pdgemm.planning.machines.machine import machine_at_hand
from pdgemm.support.text import Table, counted, in_rate, in_seconds, in_words

LARGE = 1 << 20  # the dimension of a product at the peak of a machine
PHASES = ("data", "forward", "backward", IDLE, "reduce", "optimizer", "other")
_WAITS = tuple(WAITS + phase for phase in PHASES[1:3])


@dataclass(frozen=True)
class StepReport:
    """The steps of all ranks.

    steps, samples : their number, and the samples of all steps and ranks.
    seconds : of all steps together.   p50, p99 : of a step, on the slowest rank of each.
    phases  : (rank, phase) seconds of a step on average; `PHASES` are the columns.  "pipeline" is the time in which a
        stage waits for others.  "reduce" is the exposed part of the reductions: the time in which a rank waits for them
        after its backward pass.
    waits   : (rank, pass) seconds of a step in which the forward and the backward pass wait for messages of layers, and
        with stages 2 and 3 of buckets.
    hidden  : seconds of a step in which messages moved while ranks computed, on average.
    counted, predicted : traffic of this rank in all steps by kind, and by `JointLayout.step` and `Homes.traffic`,
        without that of updates that were skipped.
    expected : words that the caller expects this rank to receive in all steps, of other kinds.
    tokens : of all steps and ranks; 0: unknown.
    model_flops, hardware_flops : of all steps and ranks: those of the model's formula, and with those that are computed
        again; 0: unknown.
    planned : seconds of a step by phase, of a plan; empty: there is none.
    ranks, peak : their number, and the flops per second of the products of one by the model of the machine.
    of_steps : seconds of each step, on the slowest rank of it.
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
    expected: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    model_flops: float = 0.0
    hardware_flops: float = 0.0
    ranks: int = 1
    peak: float = 0.0
    planned: dict[str, float] = field(default_factory=dict)
    of_steps: tuple[float, ...] = ()

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def as_predicted(self) -> bool:
        """Are gradients and parameters moved as predicted, to the word and the message, and other words as expected?"""
        return all(self._agrees(kind) for kind in {**self.predicted, **self.expected} if kind != "decisions")

    def _agrees(self, kind: str) -> bool:
        moved = self.counted.get(kind, Traffic())
        return moved == self.predicted[kind] if kind in self.predicted else moved.words_received == self.expected[kind]

    def words(self) -> dict[str, tuple[int, int | None]]:
        """Return the words that this rank received in all steps by kind: counted, and by formula (None: there is none).

        Those of decisions are left out.
        """
        formulas = {kind: x.words_received for kind, x in self.predicted.items()} | self.expected
        kinds = (kind for kind in {**formulas, **self.counted} if kind != "decisions")
        return {kind: (self.counted.get(kind, Traffic()).words_received, formulas.get(kind)) for kind in kinds}

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def mfu(self) -> float:
        """The share of the machine's peak that the flops of the model take: model_flops / (seconds ranks peak).

        Chowdhery et al., PaLM: Scaling language modeling with pathways, JMLR 24(240), 2023.
        """
        return self._share(self.model_flops)

    @property
    def hfu(self) -> float:
        """The share of the machine's peak that all flops take, also those that are computed again."""
        return self._share(self.hardware_flops)

    def _share(self, flops: float) -> float:
        return flops / (self.seconds * self.ranks * self.peak) if self.seconds and self.peak else 0.0

    @property
    def slow_rank(self) -> int | None:
        """The rank that is busy in its passes much longer than the median of all ranks; None: no rank."""
        return slow_among((self.phases[:, 1:3].sum(axis=1) - self.waits.sum(axis=1)).tolist())

    def __str__(self) -> str:
        mean, most = self.phases.mean(axis=0), self.phases.max(axis=0)
        spread = self.phases.std(axis=0)
        rows = [
            (
                name,
                *([in_seconds(self.planned[name]) if name in self.planned else ""] if self.planned else []),
                in_seconds(mean[at]),
                in_seconds(spread[at]),
                f"{in_seconds(most[at])} on rank {self.phases[:, at].argmax()}",
            )
            for at, name in enumerate(PHASES)
            if name != IDLE or most[at]
        ]
        columns = ("a step", *(["planned"] if self.planned else []), "mean", "deviation", "most")
        table = Table(columns, rows, words=("a step",))
        lines = [
            f"{counted(self.steps, 'step')} in {in_seconds(self.seconds)}: {self.samples_per_second:.4g} samples/s; a "
            f"step takes {in_seconds(self.p50)} in half of the cases, {in_seconds(self.p99)} in 99%"
            + (f"; planned {in_seconds(sum(self.planned.values()))}" if self.planned else ""),
            str(table),
        ]
        for kind, (moved, formula) in self.words().items():
            if not moved and not self.expected.get(kind, kind in self.predicted):
                continue
            words = in_words(moved / max(1, self.steps))
            line = f"{kind}: {words} received a step by rank 0"
            if formula is not None:
                other = f"predicted {in_words(formula / max(1, self.steps))}"
                line += f", {'as predicted' if self._agrees(kind) else other}"
            lines.append(line)
        lines += self._of_flops()
        if self.slow_rank is not None:
            lines.append(f"rank {self.slow_rank} is slow: the others wait for it")
        return "\n".join(lines)

    def _of_flops(self) -> list[str]:
        """Return lines about tokens and flops, where they are known."""
        lines = [f"{self.tokens_per_second:.4g} tokens/s"] if self.tokens else []
        each = self.seconds / max(1, self.steps)
        for name, flops, share in (("MFU", self.model_flops, self.mfu), ("HFU", self.hardware_flops, self.hfu)):
            if flops:
                below = f"({in_seconds(each)} x {counted(self.ranks, 'rank')} x {in_rate(self.peak)})"
                lines.append(f"{name} {share:.1%} = {flops / max(1, self.steps):.4g} flops a step / {below}")
        return lines


class StepTimes:
    """Measures the steps of a training loop.

    ::

        times = StepTimes(optimizer, batches)
        for batch in batches:
            with times.step(len(rows)):
                ...                        # passes, and optimizer.step
        report = times.report()            # collective

    optimizer : whose buckets time their passes.   batches : the `Prefetch`, whose waits are "data"; None: none.
    expected : words that this rank receives in a step by their kind in `mesh.traffic`, beside those of buckets: those
        of layers and pipelines, for example.  A function returns those of the step that has just ended, where they
        depend on its tokens, as those of experts do.
    flops  : of a step on all ranks together: the model's, and those of the hardware, which computes some again.
    tokens : of a step on all ranks together.
    planned : seconds of a step by phase, which the report shows beside those that were measured: of
        `ModelPlan.times.of_phases`, for example.
    """

    def __init__(
        self,
        optimizer: ShardedOptimizer,
        batches: Prefetch | None = None,
        *,
        expected: Mapping[str, int | Callable[[], int]] | None = None,
        flops: tuple[float, float] = (0.0, 0.0),
        tokens: int = 0,
        planned: Mapping[str, float] | None = None,
    ) -> None:
        self._optimizer, self._batches = optimizer, batches
        self._of_step, self._flops, self._tokens = {**(expected or {})}, flops, tokens
        self._planned = {**(planned or {})}
        self._last = batches.seconds if batches else 0.0
        self.restart()

    def restart(self) -> None:
        """Forget all steps so far, such as the first one, which allocates what the others use again.  Local."""
        self._rows, self._samples, self._updates = list[list[float]](), 0, 0
        self._expected, self._traffic = Counter[str](), dict[str, Traffic]()
        self._hidden, self._waits = 0.0, np.zeros(len(_WAITS))

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
        self._expected.update({kind: words() if callable(words) else words for kind, words in self._of_step.items()})
        self._updates += self._optimizer.updates - updates
        spent = {name: seconds.get(name, 0.0) - before.get(name, 0.0) for name in (*PHASES[1:6], "hidden", *_WAITS)}
        waited = self._batches.seconds if self._batches else 0.0
        data, self._last = waited - self._last, waited
        inside = [spent[name] for name in PHASES[1:6]]
        self._rows.append([data, *inside, max(0.0, end - start - sum(inside))])
        self._hidden += spent["hidden"]
        self._waits += [spent[name] for name in _WAITS]
        self._samples += samples

    def report(self) -> StepReport:
        """Return the report of all steps so far.  Collective over the mesh; it is not part of a step."""
        comm, layouts = self._optimizer.buckets.mesh.comm, self._optimizer.buckets.layouts
        own = np.array(self._rows).reshape(-1, len(PHASES))
        number = comm.allreduce(len(own))  # the same on all ranks, else nothing fits together
        steps = number // comm.size
        totals = np.max(comm.allgather(own.sum(axis=1)[:steps]), axis=0)
        phases = np.array(comm.allgather(own.sum(axis=0) / max(1, steps)))
        waits = np.array(comm.allgather(self._waits / max(1, steps)))
        of_buckets, updates = layouts.step(), layouts.updates()  # which steps that overflow do not have
        of_buckets["parameters"] -= updates
        expected = {kind: sum([x] * steps, Traffic()) for kind, x in of_buckets.items()}
        expected["parameters"] += sum([updates] * self._updates, Traffic())
        if homes := self._optimizer.homes:
            expected["homes"] = sum([homes.traffic()] * self._updates, Traffic())
        p50, p99 = np.percentile(totals, [50, 99]) if steps else (0.0, 0.0)
        return StepReport(
            steps, self._samples, float(totals.sum()), float(p50), float(p99), phases,
            waits, self._hidden / max(1, steps), dict(self._traffic), expected,
            dict(self._expected), self._tokens * steps, self._flops[0] * steps, self._flops[1] * steps, comm.size,
            machine_at_hand().rate(str(layouts.whole.wide), LARGE), self._planned, tuple(totals.tolist()),
        )  # fmt: skip
