"""Pipelines of a small network: gradients are those of one process, and words, messages and memory as planned."""

from __future__ import annotations

from contextlib import nullcontext
from time import sleep
from typing import Any, cast

import numpy as np
import pytest
from tiers import in_turn, square_grid

from pdgemm.errors import ArgumentError
from pdgemm.instrument import spans
from pdgemm.instrument.recorder import Traffic
from pdgemm.local.arrays.dtypes import element_type
from pdgemm.parallel import SGD, Buckets, Mesh, Pipeline, PipelineSchedule, ShardedOptimizer, layers_of
from pdgemm.schedules.collectives.collective import Collective
from pdgemm.schedules.training.pipeline_orders import Action
from pdgemm.schedules.training.pipeline_timeline import TimelineCell
from pdgemm.transport.collectives import prepared_collective

pytestmark = pytest.mark.mpi
LAYERS, WIDTH = 12, 5
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("zero_bubble", 1), ("interleaved", 1), ("interleaved", 2), ("interleaved", 3)]
ROWS = (3, 1, 4, 0, 2, 5, 1, 3)  # of each microbatch


def start(layer: int) -> np.ndarray:
    return np.random.default_rng(layer).standard_normal((WIDTH, WIDTH)) / 2


class Layers:
    """The layers x := tanh(x W) of a stage; the loss is half the sum of the squares of the last ones."""

    def __init__(self, schedule: Any, stage: int, dtype: Any = float, first: int = 0) -> None:
        self.schedule, self.dtype, self.first = schedule, np.dtype(dtype), first
        shape = LAYERS, schedule.stages, schedule.chunks, stage
        self.chunks = [layers_of(*shape, chunk) for chunk in range(schedule.chunks)]
        self.w = {layer: start(layer) for chunk in self.chunks for layer in chunk}
        self.gradients = {layer: np.zeros((WIDTH, WIDTH)) for layer in self.w}
        self.kept = dict[tuple[int, int], list[np.ndarray]]()
        self.later = dict[tuple[int, int], list[tuple[int, np.ndarray, np.ndarray]]]()
        self.calls, self.loss, self.buckets = list[tuple[str, int, int]](), 0.0, cast(Any, None)

    def shape(self, microbatch: int) -> tuple[tuple[int, int], Any]:
        return (ROWS[(self.first + microbatch) % len(ROWS)], WIDTH), self.dtype

    def forward(self, microbatch: int, chunk: int, x: Any) -> np.ndarray:
        self.calls.append(("F", microbatch, chunk))
        shape, dtype = self.shape(microbatch)
        if x is None:
            x = np.random.default_rng(self.first + microbatch).standard_normal(shape)
        assert x.shape == shape
        kept = [x.astype(float)]
        with self.buckets.forward(chunk) if self.buckets else nullcontext():
            for layer in self.chunks[chunk]:
                kept.append(np.tanh(kept[-1] @ self.weight(layer)))
        self.kept[microbatch, chunk] = kept
        return kept[-1].astype(dtype)

    def backward(self, microbatch: int, chunk: int, dy: Any) -> np.ndarray:
        self.calls.append(("B", microbatch, chunk))
        kept = self.kept.pop((microbatch, chunk))
        if dy is None:
            dy = kept[-1]
            self.loss += float((dy * dy).sum()) / 2
        later = self.later[microbatch, chunk] = []
        with self.buckets.backward(chunk) if self.buckets else nullcontext():
            for layer, x, y in zip(reversed(self.chunks[chunk]), kept[-2::-1], kept[:0:-1]):
                dz = dy * (1 - y * y)
                later.append((layer, x, dz))
                dy = dz @ self.weight(layer).T
        if not self.schedule.split:
            self.add(microbatch, chunk)
        return dy.astype(self.dtype)

    def weight(self, layer: int) -> np.ndarray:
        weight: np.ndarray = self.buckets.parameters[str(layer)] if self.buckets else self.w[layer]
        return weight

    def weights(self, microbatch: int, chunk: int) -> None:
        self.calls.append(("W", microbatch, chunk))
        self.add(microbatch, chunk)

    def add(self, microbatch: int, chunk: int) -> None:
        for layer, x, dz in self.later.pop((microbatch, chunk)):
            if self.buckets is None:
                self.gradients[layer] += x.T @ dz
            else:
                self.buckets.gradients[str(layer)] += x.T @ dz
                self.buckets.ready(str(layer))


def in_one_process(microbatches: int, first: int = 0, weights: Any = None) -> Layers:
    layers = Layers(PipelineSchedule("gpipe", 1, microbatches), 0, first=first)
    layers.w = weights or layers.w
    for microbatch in range(microbatches):
        layers.forward(microbatch, 0, None)
        layers.backward(microbatch, 0, None)
    return layers


@pytest.mark.on_ranks(2, 3, 4)
@pytest.mark.parametrize(
    ("which", "how"), in_turn(SCHEDULES, [(float, ""), ("bfloat16", "1"), ("float32", ""), (float, "1")]), ids=str
)
def test_gradients_are_those_of_one_process(comm: Any, which: Any, how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Microbatches of uneven sizes, one of them empty, twice with one pipeline; words and memory as planned.

    On one node and on several, in float64 and with few bits.
    """
    ((name, chunks), (kind, per_node)), pp = (which, how), comm.size
    if per_node:
        monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", per_node)
    dtype, mesh = np.dtype(float) if kind is float else element_type(kind), Mesh(comm.Dup(), pp=pp)
    close = {float: 1e-13, "float32": 1e-5, "bfloat16": 0.1}[kind]
    for m in (pp, 2 * pp) if name == "interleaved" else (1, 3, 8):
        schedule, wanted = PipelineSchedule(name, pp, m, chunks), in_one_process(m)
        pipeline = Pipeline(mesh, schedule)
        for _ in range(2):
            before = mesh.traffic["pipeline"] + Traffic()
            stage = Layers(schedule, pipeline.stage, dtype)
            pipeline.run(stage)
            assert stage.calls == [tuple(action) for action in schedule.order(pipeline.stage)]
            for layer, gradient in stage.gradients.items():
                most = max(1, np.abs(wanted.gradients[layer]).max())
                np.testing.assert_allclose(gradient, wanted.gradients[layer], rtol=0, atol=close * most)
            assert abs(comm.allreduce(stage.loss) - wanted.loss) <= close * wanted.loss
            assert pipeline.peak == schedule.in_flight(pipeline.stage)
            moved = mesh.traffic["pipeline"] - before
            words = [x * WIDTH for x in ROWS[:m]]
            assert moved == schedule.traffic(pipeline.stage, words, dtype.itemsize)
            hops = 2 * (pp * chunks - 1)
            assert comm.allreduce(moved.words_received) == comm.allreduce(moved.words_sent) == hops * sum(words)
    mesh.free()


@square_grid
@pytest.mark.parametrize(
    ("which", "how"), in_turn(SCHEDULES, [(2, 0), (0, 0), (3, 0), (1, 0), (3, 1), (2, 1)]), ids=str
)
def test_training_in_pipelines(comm: Any, which: Any, how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On dp x pp ranks of several nodes, gradients are reduced while stages wait: weights are those of one process.

    Words and messages are as planned, of parameters that a pass gathers with stage 3, and where each microbatch is
    reduced, too.
    """
    (name, chunks), (stage, each) = which, how
    monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", "1")
    mesh, m = Mesh(comm.Dup(), dp=-1, pp=2), 4
    schedule = PipelineSchedule(name, 2, m, chunks)
    layers = Layers(schedule, mesh.index("pp"), first=m * mesh.index("dp"))
    model = [{str(layer): start(layer) for layer in own} for own in layers.chunks]
    options: dict[str, Any] = {"reduce_each": bool(each), "bucket_bytes": 600}
    layers.buckets = buckets = Buckets(mesh, model, stage=stage, microbatches=m, **options)
    optimizer, pipeline = ShardedOptimizer(buckets, SGD(momentum=0.5)), Pipeline(mesh, schedule)
    weights, moments = {layer: start(layer) for layer in range(LAYERS)}, dict[int, Any]()
    for _ in range(2):
        pipeline.run(layers)
        optimizer.step(0.01)
        one = in_one_process(m * mesh.shape.dp, weights=weights)
        for layer, gradient in one.gradients.items():
            moments[layer] = 0.5 * moments.get(layer, 0) + gradient
            weights[layer] -= 0.01 * moments[layer]
    for kind, planned in buckets.layouts.step().items():
        assert kind == "decisions" or mesh.traffic[kind] == planned + planned, kind
    with buckets.forward():
        for layer in layers.w:
            np.testing.assert_allclose(buckets.parameters[str(layer)], weights[layer], rtol=0, atol=1e-13)
    mesh.free()


class Silent:
    """Layers that return what they were passed, of one word."""

    def shape(self, microbatch: int) -> tuple[tuple[int], Any]:
        return (1,), np.float64

    def forward(self, microbatch: int, chunk: int, x: Any) -> Any:
        return np.full(1, 10.0 * microbatch) if x is None else x + 1

    def backward(self, microbatch: int, chunk: int, dy: Any) -> Any:
        return np.full(1, -10.0 * microbatch) if dy is None else dy - 1

    def weights(self, microbatch: int, chunk: int) -> None: ...


@square_grid
@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_other_transfers_go_on_while_a_stage_waits(comm: Any, name: str) -> None:
    """A sum of several steps over stages of two pipelines, of which one waits in its pass and one for a gradient."""
    mesh = Mesh(comm.Dup(), dp=2, pp=2)
    ring, x = Collective("all_reduce", "ring", (0, 1), (3, 4), np.dtype(float)), np.ones(7)
    begin = prepared_collective(ring, mesh.line("dp").comm, x, mesh.tags(1)[0])
    schedule, groups = PipelineSchedule(name, 2, 2), list[list[Any]]()

    class Coupled(Silent):
        def forward(self, microbatch: int, chunk: int, x: Any) -> Any:
            if microbatch == 0 and mesh.index("pp") == 0:
                sleep(0.1 * (mesh.index("dp") == 0))  # until the other rank waits
                groups.append(group := [begin(mesh.traffic["sum"])])
                mesh.transfers.expect(group)
                if mesh.index("dp") == 0:
                    mesh.transfers.wait(group)  # for the second step of the other rank, which waits for a gradient
            if microbatch == 0 and mesh.index("pp") == 1:
                mesh.sum(1, axis="dp")  # so the second pipeline cannot go on before the first one
            return super().forward(microbatch, chunk, x)

    Pipeline(mesh, schedule).run(Coupled())
    for group in groups:
        mesh.transfers.wait(group)
    assert (x == (2 if mesh.index("pp") == 0 else 1)).all()
    mesh.free()


@pytest.mark.parametrize(("name", "chunks"), [("zero_bubble", 1), ("interleaved", 2)])
def test_a_traced_run_has_the_actions_of_the_walk(comm: Any, name: str, chunks: int) -> None:
    """A span for each action, in the order of the schedule, between what it needs and what needs it."""
    mesh = Mesh(comm.Dup(), pp=-1)
    schedule = PipelineSchedule(name, comm.size, 2 * comm.size, chunks)
    pipeline, trace = Pipeline(mesh, schedule), spans.Trace()
    with spans.taking(trace):
        pipeline.run(Silent())
    acts = [x for x in trace.spans if x.row == spans.HOST and x.name in ("F", "B", "W")]
    cells = [TimelineCell(Action(**x.facts()), x.start, x.end) for x in acts if x.facts]
    assert [x.action for x in cells] == [x.action for x in schedule.walk().cells[pipeline.stage]]
    assert [x.name for x in acts] == [x.action.kind for x in cells]
    every = mesh.line("pp").comm.allgather([tuple(x) for x in cells])
    begun = min(start for row in every for _, start, _ in row)
    run = schedule.timeline([[TimelineCell(Action(*a), s - begun, e - begun) for a, s, e in row] for row in every])
    if len({*mesh.grid.nodes}) == 1:  # of which all ranks have one clock
        done = [(step, x) for stage, row in enumerate(run.cells) for step, x in zip(schedule.steps(stage), row)]
        ends = {step.gives: x.end for step, x in done}
        assert all(x.start >= ends[step.takes] for step, x in done if step.takes)
    assert f"{comm.size} stage" in str(run) and run.in_flight == schedule.walk().in_flight
    mesh.free()


def test_bad_arguments(comm: Any) -> None:
    """The same error on all ranks where schedules do not fit the mesh, or differ, and of a bad result of one rank."""
    mesh = Mesh(comm.Dup(), pp=-1)
    with pytest.raises(ArgumentError, match=f"a schedule of {comm.size + 1} stages on a mesh with pp {comm.size}"):
        Pipeline(mesh, PipelineSchedule("1f1b", comm.size + 1, 2))
    with pytest.raises(ArgumentError, match="different arguments"):
        Pipeline(mesh, PipelineSchedule("1f1b", comm.size, 2 + comm.rank % 2))
    mesh.free()

    class Wrong(Silent):
        def __init__(self, result: Any) -> None:
            self.result = result

        def forward(self, microbatch: int, chunk: int, x: Any) -> Any:
            return self.result

    mesh = Mesh(comm.Dup(), pp=-1)
    pipeline = Pipeline(mesh, PipelineSchedule("interleaved", comm.size, 2 * comm.size, 2))
    for result, message in (
        (np.zeros(2), r"the output of block 0 for microbatch 0 is of float64 and of shape \(2,\); by shape\(0\)"),
        (np.zeros(1, "f"), "is of float32 and of shape .* it is of float64 and of shape .* on rank 0"),
    ):
        with pytest.raises(ArgumentError, match=message) as raised:  # of rank 0 alone
            pipeline.run(Wrong(result) if comm.rank == 0 else Silent())
        assert len({*comm.allgather(str(raised.value))}) == 1
        pipeline.run(Silent())
    mesh.free()


@square_grid
def test_an_exception_of_a_stage_is_raised_on_all_ranks(comm: Any) -> None:
    """In any pass of any stage, also on a mesh where replicas wait elsewhere; the next run is right."""

    class Fails(Silent):
        def backward(self, microbatch: int, chunk: int, dy: Any) -> Any:
            if microbatch == 1:
                raise ValueError("the layers of this stage fail")
            return super().backward(microbatch, chunk, dy)

    for sizes in ({"pp": comm.size}, {"pp": 2, "dp": comm.size // 2}):
        mesh = Mesh(comm.Dup(), **sizes)
        pipeline = Pipeline(mesh, PipelineSchedule("1f1b", mesh.shape.pp, 3))

        def step(stage: Any, pipeline: Any = pipeline, mesh: Any = mesh) -> float:
            pipeline.run(stage)
            return float(mesh.sum(1.0, axis="pp+dp")[0])  # as optimizer.step

        for failing in range(comm.size):
            with pytest.raises(ValueError, match="the layers of this stage fail"):
                step(Fails() if comm.rank == failing else Silent())
            assert step(Silent()) == comm.size
        mesh.free()
