"""The run of a pipeline: a stage does what its schedule says, and sends activations and gradients to its neighbours."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.instrument import spans
from pdgemm.parallel.mesh import Mesh
from pdgemm.parallel.parts import of_host
from pdgemm.schedules.training.pipeline_orders import Action
from pdgemm.schedules.training.pipeline_schedule import PipelineSchedule
from pdgemm.schedules.training.pipeline_timeline import LOOKAHEAD, Handover, PipelineStep
from pdgemm.support.agreement import together
from pdgemm.transport.collectives import byte_requests
from pdgemm.transport.movers.arrivals import Arrival

TRAFFIC = "pipeline"  # of a mesh: the words and messages between stages
IDLE = "pipeline"  # of the recorder: seconds in which a stage waits for the messages of others
Array = np.ndarray


class Stage(Protocol):
    """The layers of a stage, which are the caller's.

    x, y, dy, dx are arrays of NumPy of the shape and type that `shape` says; what is returned is not changed later.
    """

    def forward(self, microbatch: int, chunk: int, x: Any) -> Any:
        """Return the output of a chunk.   x : its input; None for the first block, which takes the samples.

        What the last block returns is ignored.
        """

    def backward(self, microbatch: int, chunk: int, dy: Any) -> Any:
        """Return the gradient of the input of a chunk.   dy : that of its output; None for the last block.

        What the first block returns is ignored.  Where the schedule has "W", this computes the gradient of the input
        alone, else those of the weights, too.
        """

    def weights(self, microbatch: int, chunk: int) -> None:
        """Add the gradients of the weights of a chunk, where the schedule has "W"."""

    def shape(self, microbatch: int) -> tuple[tuple[int, ...], Any]:
        """Return the shape and the type of what travels between the blocks; the same on all stages."""


class Pipeline:
    """The stages of a pipeline on the pp axis of a mesh.  Collective over the mesh.

    ::

        pipeline = Pipeline(mesh, PipelineSchedule("1f1b", stages=4, microbatches=8))
        pipeline.run(stage)               # once a step; `stage` has the layers of this rank, see `Stage`
        optimizer.step(rate)

    schedule : with as many stages as the mesh has ranks along pp.

    peak : the most microbatches (of a chunk) in flight in a run: those of which `forward` has begun, and the backward
        pass with the gradients of the weights has not ended; at most `schedule.in_flight(stage)`.

    Each rank sends to the ranks of the neighbouring stages with the same other indices, and counts it in
    `mesh.traffic["pipeline"]`, which is `schedule.traffic`: all stages together receive 2 (v p - 1) times the words of
    all microbatches.  Memory: `LOOKAHEAD` messages, beside what the layers keep.
    Raises ArgumentError on all ranks, and GridError where MPI has not so many message tags (`Mesh.step_tags`).
    """

    def __init__(self, mesh: Mesh, schedule: PipelineSchedule) -> None:
        self.mesh, self.schedule, self.peak = mesh, schedule, 0
        with together(mesh.comm) as arguments:
            if schedule.stages != (stages := mesh.shape.length("pp")):
                raise ArgumentError(
                    f"a schedule of {schedule.stages} stages on a mesh with pp {stages} ({mesh.shape.sizes})"
                )
            arguments += ["Pipeline", repr(schedule)]
        self.comm, self.stage = mesh.checks(mesh.line("pp")).messages, mesh.index("pp")
        self.tags = mesh.step_tags(2 * schedule.microbatches * schedule.blocks)

    def run(self, stage: Stage) -> None:
        """Do all passes of one step.  Collective over the pp line; there is no barrier.

        Messages are received and sent while the stage works, and while it waits, all other transfers of the mesh go on.
        An exception of a stage, or ArgumentError for a result of another shape or type than `shape` says, is raised on
        all ranks of the mesh, as by `Mesh.raised_together`.
        """
        with self.mesh.raised_together():
            self.tags = self.mesh.step_tags(len(self.tags))
            _Run(self, stage).run()


class _Run:
    """One step of a pipeline on a rank."""

    def __init__(self, pipeline: Pipeline, stage: Stage) -> None:
        self.pipeline, self.mesh, self.schedule, self.stage = pipeline, pipeline.mesh, pipeline.schedule, stage
        self.steps, self.traffic = self.schedule.steps(pipeline.stage), self.mesh.traffic[TRAFFIC]
        self.last = "W" if self.schedule.split else "B"  # of the actions with a microbatch
        self.arriving = dict[Handover, tuple[Array, list[Arrival]]]()
        self.kept = dict[Handover, Any]()  # for the next block, on this stage
        self.sent = list[list[Arrival]]()
        self.live = set[tuple[int, int]]()  # the microbatches, with their chunks, of which there are activations

    def run(self) -> None:
        """Do all steps of the stage."""
        self.pipeline.peak = 0
        try:
            self._receive(self.steps[:LOOKAHEAD])
            for at, (action, takes, gives) in enumerate(self.steps):
                result = self._act(action, None if takes is None else self._taken(takes))
                self._receive(self.steps[at + 1 : at + 1 + LOOKAHEAD])
                if gives is not None:
                    self._hand_over(gives, result)
                self.mesh.transfers.poll()  # arrays that have left are freed
                self.sent = [group for group in self.sent if group]
            for group in self.sent:
                self._wait(group)
        except BaseException:
            for group in [*(group for _, group in self.arriving.values()), *self.sent]:  # what may never arrive
                self.mesh.transfers.leave(group)
            raise

    def _act(self, action: Action, x: Any) -> Any:
        """Do an action, which is part of the trace, and return its result."""
        kind, microbatch, chunk = action
        start, trace, result = perf_counter(), spans.active(), None
        if kind == "F":
            self.live.add((microbatch, chunk))
            self.pipeline.peak = max(self.pipeline.peak, len(self.live))
            result = self.stage.forward(microbatch, chunk, x)
        elif kind == "B":
            result = self.stage.backward(microbatch, chunk, x)
        else:
            self.stage.weights(microbatch, chunk)
        if kind == self.last:
            self.live.remove((microbatch, chunk))
        if trace:
            trace.add((spans.HOST, kind, start, perf_counter(), 0, action._asdict))
        return result

    # ---------------------------------------------------------------- messages
    def _receive(self, steps: tuple[PipelineStep, ...]) -> None:
        """Begin to receive what these steps take from other stages."""
        for _, takes, _ in steps:
            if takes is not None and takes.travels and takes not in self.arriving:
                x = np.empty(*self._shape(takes))
                self.arriving[takes] = x, self._requests(self.pipeline.comm.Irecv, x, takes.source, takes)
                self.traffic.words_received += x.size
                self.traffic.messages_received += len(self.arriving[takes][1])

    def _taken(self, x: Handover) -> Any:
        """Return what another block hands over, after waiting for it."""
        if not x.travels:
            return self.kept.pop(x)
        array, group = self.arriving[x]
        self._wait(group)
        del self.arriving[x]
        return array

    def _hand_over(self, x: Handover, result: Any) -> None:
        """Begin to send a result, or keep it for the next block of this stage.  Raises ArgumentError on this rank."""
        shape, dtype = self._shape(x)
        array = np.asarray(of_host(result, _described(x)), order="C")
        if array.shape != shape or array.dtype != dtype:
            raise ArgumentError(
                f"{_described(x)} is of {array.dtype} and of shape {array.shape}; by shape({x.microbatch}) of its stage"
                f" it is of {dtype} and of shape {shape}, on rank {self.mesh.rank} of {self.mesh.shape.sizes}"
            )
        if not x.travels:
            self.kept[x] = result
            return
        group = self._requests(self.pipeline.comm.Isend, array, x.target, x)
        self.traffic.words_sent += array.size
        self.traffic.messages_sent += len(group)
        self.mesh.transfers.expect(group)
        self.sent.append(group)

    def _shape(self, x: Handover) -> tuple[tuple[int, ...], np.dtype]:
        """Return the shape and the type of what is handed over."""
        shape, dtype = self.stage.shape(x.microbatch)
        return tuple(shape), np.dtype(dtype)

    def _requests(self, start: Callable[..., Any], x: Array, rank: int, what: Handover) -> list[Arrival]:
        """Start to send or to receive an array, as a message that no other one of this step can be taken for."""
        tag = self.pipeline.tags[self.schedule.number(what)]
        return byte_requests(start, x.reshape(-1).view(np.uint8), rank, tag)

    def _wait(self, group: list[Arrival]) -> None:
        """Wait for messages; all other transfers of the mesh go on meanwhile."""
        if group:
            with self.mesh.recorder.phase(IDLE), spans.timed("wait"):
                self.mesh.transfers.wait(group)


def _described(x: Handover) -> str:
    """Return what is handed over, and by which block, as text."""
    what, block = ("the output", x.block - 1) if x.kind == "F" else ("the gradient of the input", x.block + 1)
    return f"{what} of block {block} for microbatch {x.microbatch}"
