"""Plans of docs/examples/gpt, `pdgemm model`, beside its runs: bytes and words of drawn layouts, to the last one."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from example_programs import example
from mpi4py import MPI
from tiers import examples

from pdgemm.planning.machines.machine import Machine
from pdgemm.planning.models.kept_arrays import activation_bytes
from pdgemm.planning.models.model_plan import ModelPlan
from pdgemm.planning.models.model_shape import ModelShape
from pdgemm.planning.models.training_layout import TrainingLayout

pytestmark = [pytest.mark.mpi, pytest.mark.on_ranks(2, 4)]
LAYERS, HIDDEN, HEADS, VOCABULARY, SEQUENCE, BATCH = 6, 48, 12, 48, 12, 12  # which all meshes divide
STEPS, DRAWN = 1, examples(12)


def layouts(ranks: int) -> list[tuple[TrainingLayout, bool]]:
    """Return layouts of so many ranks, and whether the table is tied: of two stages with ZeRO-3, and drawn ones."""
    draw, drawn = random.Random(ranks), list[tuple[TrainingLayout, bool]]()
    if ranks % 2 == 0:
        dp = ranks // 2
        drawn.append(
            (TrainingLayout(dp, pp=2, zero=3, microbatch=BATCH // dp // 2, fused=False, dtype="float32"), True)
        )
    while len(drawn) < DRAWN:
        dp, tp, pp, cp = (draw.choice([1, 2, 3, 4, 6]) for _ in range(4))
        batches = draw.choice([1, 2, 3, 4])
        if dp * tp * pp * cp != ranks or BATCH % (dp * batches) or cp > 3 or 6 % pp or (SEQUENCE * BATCH) % (4 * ranks):
            continue
        schedule = draw.choice(["gpipe", "1f1b", "zero_bubble", "interleaved"])
        chunks = draw.choice([2, 3]) if schedule == "interleaved" else 1
        if chunks > 1 and (batches % pp or pp * chunks > LAYERS):
            continue
        how: dict[str, Any] = {"recompute": draw.choice(["none", "selective", "full"]), "zero": draw.choice(range(4))}
        layout = TrainingLayout(
            dp, tp, pp, cp, microbatch=BATCH // (dp * batches), chunks=chunks, schedule=schedule,
            sequence=draw.random() < 0.7, fused=False, dtype="float32",
            optimizer=("muon", "adamw")[len(drawn) % 2], **how,
        )  # fmt: skip
        drawn.append((layout, draw.random() < 0.5))
    return drawn


def words_of(layout: TrainingLayout, tied: bool) -> list[str]:
    """Return the options of the example."""
    sizes = {"layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "vocabulary": VOCABULARY, "sequence": SEQUENCE}
    axes = {name: getattr(layout, name) for name in ("dp", "tp", "pp", "cp", "zero", "chunks", "schedule")}
    axes |= {name: getattr(layout, name) for name in ("recompute", "optimizer")}
    microbatches = {"batch": BATCH, "microbatches": layout.microbatches(BATCH), "steps": STEPS}
    words = [f"--{name}={value}" for name, value in {**sizes, **axes, **microbatches}.items()]
    return words + ["--no-sequence-parallel"] * (not layout.sequence) + ["--untied"] * (not tied)


def test_bytes_and_words_of_a_run_are_those_of_its_plan(comm: Any) -> None:
    train, accounting = example("gpt/train"), example("gpt/accounting")
    data = np.random.default_rng(0).integers(0, VOCABULARY, 700)
    for drawn, tied in layouts(comm.size):
        run = train.Run(train.parsed(words_of(drawn, tied)), comm)
        layout = replace(drawn, bucket_words=accounting.bucket_words(run))
        assert all(np.isfinite(loss) for _, loss, _ in run.steps(data))
        shape = ModelShape(LAYERS, HIDDEN, HEADS, VOCABULARY, SEQUENCE, tied=tied)
        plan, stage = ModelPlan(shape, layout, BATCH, Machine()), run.mesh.index("pp")
        report = run.times.report()
        assert report.planned == accounting.plan_of(run).times.of_phases()
        if drawn.optimizer == "muon":
            run.optimizer.rule = replace(run.optimizer.rule, steps=2)
            assert accounting.plan_of(run).layout == replace(layout, muon_steps=2)
        counted = {kind: x.words_received for kind, x in report.counted.items() if kind != "decisions"}
        planned = {kind: STEPS * words for kind, words in plan.words_of(stage).items()}
        kept, loads = run.optimizer.bytes, plan.homes(stage)
        if loads:  # of which ranks have unequal shares, and a plan those of the fullest one
            line = run.mesh.line("dp+cp+tp")
            assert np.array_equal(loads.homes, run.optimizer.homes.loads.homes), layout
            most = line.comm.allreduce(counted.get("homes", 0), MPI.MAX)
            assert most == planned.pop("homes", 0) and counted.pop("homes", 0) == STEPS * loads.received[line.rank]
            kept |= {kind: line.comm.allreduce(kept[kind], MPI.MAX) for kind in ("optimizer", "homes")}
        assert {kind: x for kind, x in counted.items() if x} == pytest.approx(planned, rel=1e-12), (layout, tied)
        del kept["buffers"]
        assert kept == {kind: plan.bytes_of(stage)[kind] for kind in kept}, (layout, tied)
        rows = len(run.model.batches[0].order)
        own = accounting.activation_bytes(run.model, layout.microbatch, rows)
        assert own == pytest.approx(activation_bytes(shape, layout), rel=1e-12), layout
        assert plan.in_flight(stage) == run.schedule.in_flight(stage)
