#!/usr/bin/env python3
"""Pipelines of stages that sleep: the bubble of a run beside that of the walk, for each schedule.

    mpiexec -n 4 python scripts/benchmarks/bench_pipeline.py
    mpiexec -n 4 python scripts/benchmarks/bench_pipeline.py --microbatches 12 --draw

A forward pass takes 20 ms and a backward pass 40 ms of a stage, of which the gradients of weights are half; a chunk
takes its share.  The processors are idle meanwhile, so that there may be more stages than cores.  The bubble is the
time in which the stages wait over the time in which they work.  Of several steps, the one with the median time counts.
"""

from __future__ import annotations

from time import sleep
from typing import Any

import click
import numpy as np


class Sleeping:
    """A stage that sleeps, and sends arrays of so many float32 words.

    seconds : of each kind of action.
    """

    def __init__(self, seconds: dict[str, float], words: int) -> None:
        self.seconds, self.y = seconds, np.zeros(words, "f")

    def shape(self, microbatch: int) -> tuple[tuple[int, ...], Any]:
        return self.y.shape, self.y.dtype

    def forward(self, microbatch: int, chunk: int, x: Any) -> Any:
        sleep(self.seconds["F"])
        return self.y

    def backward(self, microbatch: int, chunk: int, dy: Any) -> Any:
        sleep(self.seconds["B"])
        return self.y

    def weights(self, microbatch: int, chunk: int) -> None:
        sleep(self.seconds["W"])


def measured(mesh: Any, schedule: Any, seconds: dict[str, float], words: int, steps: int) -> Any:
    """Return the timeline of the step of median length; one step comes before."""
    from pdgemm.instrument import spans
    from pdgemm.parallel import Pipeline
    from pdgemm.schedules.training.pipeline_orders import Action
    from pdgemm.schedules.training.pipeline_timeline import TimelineCell

    pipeline, runs = Pipeline(mesh, schedule), []
    for _ in range(steps + 1):
        mesh.comm.Barrier()
        with spans.taking(trace := spans.Trace()):
            pipeline.run(Sleeping(seconds, words))
        own = [(x.facts(), x.start, x.end) for x in trace.spans if x.name in seconds and x.facts]
        every = mesh.comm.allgather(own)  # on one node all ranks have one clock
        begun = min(start for row in every for _, start, _ in row)
        runs.append(
            schedule.timeline([[TimelineCell(Action(**a), s - begun, e - begun) for a, s, e in row] for row in every])
        )
    return sorted(runs[1:], key=lambda run: run.seconds)[steps // 2]


@click.command()
@click.option("--microbatches", default=8, show_default=True, help="Divisible by the ranks, for interleaved.")
@click.option("--chunks", default=2, show_default=True, help="Of each stage, with interleaved.")
@click.option("--forward", default=0.02, show_default=True, help="Seconds of a forward pass.")
@click.option("--words", default=1000, show_default=True, help="Of each message, in float32.")
@click.option("--steps", default=3, show_default=True)
@click.option("--draw", is_flag=True, help="Draw each run.")
def main(microbatches: int, chunks: int, forward: float, words: int, steps: int, draw: bool) -> None:
    """Measure the bubble of each schedule, with one stage on each rank."""
    from pdgemm.parallel import Mesh, PipelineSchedule

    mesh = Mesh(pp=-1)
    for name in ("gpipe", "1f1b", "interleaved", "zero_bubble"):
        schedule = PipelineSchedule(name, mesh.shape.pp, microbatches, chunks if name == "interleaved" else 1)
        length = forward / schedule.chunks
        seconds = {"F": length, "B": length * (1 if schedule.split else 2), "W": length}
        walk, run = schedule.walk(seconds), measured(mesh, schedule, seconds, words, steps)
        if mesh.rank == 0:
            print(
                f"{name:12} bubble {float(run.bubble):6.2%} measured, {float(walk.bubble):6.2%} of the walk, ratio "
                f"{float(run.bubble / walk.bubble) if walk.bubble else 1:.3f}; "
                f"{1e3 * run.seconds:.1f} ms a step, {1e3 * walk.seconds:.1f} ms of the walk",
                flush=True,
            )
            if draw:
                print(run, flush=True)
    mesh.free()


if __name__ == "__main__":
    main()
