"""Plans of transformers: published numbers, and bubbles, words and bytes of the schedules of a run.  No MPI."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product
from statistics import mean
from typing import Any

import pytest
from planned_models import A100, GPT3, H100, SMALL

from pdgemm.errors import ArgumentError, MeshError
from pdgemm.planning.models.model_layers import TrainingLayout
from pdgemm.planning.models.model_plan import ModelPlan
from pdgemm.planning.models.model_shape import PRESETS, ModelShape
from pdgemm.planning.published import published_models
from pdgemm.schedules.training.pipeline_schedule import PipelineSchedule


def test_published_step_times() -> None:
    for sources, number, most, usual in (
        ((published_models.SC21, published_models.KORTHIKANTI), 24, 0.12, 0.06),
        ((published_models.MEGATRON_CORE,), 9, 0.15, 0.06),
        ((published_models.MT_NLG,), 3, 0.17, 0.16),
    ):
        rows = [abs(x.difference) for x in published_models.step_times() if x.source.startswith(sources)]
        assert len(rows) == number and max(rows) <= most and mean(rows) <= usual


def test_published_sizes() -> None:
    """Activations: 0.2 GiB and 0.3 points; state of ZeRO, and parameters, to their rounding; days of runs."""
    names = ("kept_bytes", "zero_bytes", "parameters", "days")
    kept, state, sizes, days = ([*getattr(published_models, name)()] for name in names)
    assert [*map(len, (kept, state, sizes, days))] == [24, 54, 10, 12]
    assert all(abs(x.predicted - x.published) <= {"GiB": 0.2, "%": 0.3}[x.what] for x in kept)
    assert all(abs(x.predicted - x.published) <= 5.1e-5 for x in state)
    assert all(abs(x.predicted - x.published) <= 0.0501 for x in sizes)
    assert all(abs(x.difference) <= 0.013 for x in days)


def test_the_flops_of_megatrons_formulas() -> None:
    """72 B s l h^2 (1 + s/(6h) + V/(12 l h)), and 96 (...) with V/(16 l h) where all layers are computed again."""
    l, h, v, s, batch = GPT3.layers, GPT3.hidden, GPT3.vocabulary, GPT3.sequence, 1536
    model = 72 * batch * s * l * h * h * (1 + s / (6 * h) + v / (12 * l * h))
    hardware = 96 * batch * s * l * h * h * (1 + s / (6 * h) + v / (16 * l * h))
    assert GPT3.flops(batch * s) == pytest.approx(model, rel=1e-12)
    assert GPT3.flops(batch * s, "full") == pytest.approx(hardware, rel=1e-12)
    plan = ModelPlan(GPT3, TrainingLayout(dp=1, tp=8, pp=16, recompute="full"), batch, A100)
    assert plan.hfu == pytest.approx(plan.mfu * hardware / model)
    assert plan.mfu == pytest.approx(model / plan.step_seconds / 128 / 312e12)


@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2)])
def test_bubbles_and_what_is_kept_are_those_of_schedules(name: str, chunks: int) -> None:
    for p, m in ((2, 4), (4, 8)):
        layout = TrainingLayout(pp=p, chunks=chunks, schedule=name)
        plan = ModelPlan(SMALL, layout, m, A100)
        schedule = PipelineSchedule(layout.schedule, p, m, layout.chunks)
        assert isinstance(plan.bubble, Fraction) and plan.bubble == schedule.bubble(), (p, m)
        assert [plan.in_flight(x) for x in range(p)] == [schedule.in_flight(x) for x in range(p)], (p, m)


@pytest.mark.parametrize(("t", "sequence", "recompute"), [*product((1, 2, 4), (True, False), ("none", "full"))])
def test_words_of_tensor_parallel_layers(t: int, sequence: bool, recompute: Any) -> None:
    """Those of Megatron-LM, which gathers inputs once more backward; words of a run: `test_planned_words.py`."""
    plan = ModelPlan(SMALL, TrainingLayout(tp=t, sequence=sequence, recompute=recompute, microbatch=2), 6, A100)
    tokens, again = 2 * SMALL.sequence, 2 if recompute == "full" else 1
    rows = 2 * SMALL.layers * (2 * again + 2 + sequence) + 4 + sequence  # two pairs of linear layers, and both ends
    assert plan.words.get("tensor", 0) == pytest.approx(3 * (t - 1) / t * tokens * (rows * SMALL.hidden + 6))


def test_the_bytes_and_words_of_zero() -> None:
    """18 bytes with 16 bits; words of ZeRO's section 7, with 2 and 3 of each microbatch; a tied table has two users."""
    words, share, table = GPT3.parameters, 7 / 8 * GPT3.parameters, 7 / 8 * GPT3.vocabulary * GPT3.hidden
    for zero, m, size, gradients, parameters in (
        (0, 1, 18, 2, 0), (1, 1, 6 + 12 / 8, 1, 1), (2, 1, 2 + 16 / 8, 1, 1), (3, 1, 18 / 8, 1, 2),
        (1, 2, 6 + 12 / 8, 1, 1), (2, 2, 2 + 16 / 8, 2, 1), (3, 2, 18 / 8, 2, 4),
    ):  # fmt: skip
        plan = ModelPlan(GPT3, TrainingLayout(dp=8, zero=zero), 8 * m, A100)
        assert sum(plan.bytes[kind] for kind in ("parameters", "gradients", "optimizer")) == pytest.approx(size * words)
        moved = [plan.words.get(kind, 0) for kind in ("gradients", "parameters")]
        assert moved == pytest.approx([gradients * share, parameters * share + (zero == 3) * m * table]), (zero, m)


def test_llama_3() -> None:
    """Parameters as its files have them; layouts of its table 4 fit 80 GB: 16,384 GPUs, 131,072 positions along cp."""
    published = {"llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496, "llama3-405b": 405_853_388_800}
    assert {name: ModelShape(**PRESETS[name]).parameters for name in published} == published
    shape = ModelShape(**PRESETS["llama3-405b"])
    for dp, cp, batch in ((64, 1, 2048), (128, 1, 2048), (8, 16, 128)):
        layout = TrainingLayout(dp=dp, tp=8, pp=16, cp=cp, zero=2)
        plan = ModelPlan(replace(shape, sequence=8192 * cp), layout, batch, H100)
        assert not plan.refused, plan.refused


def test_what_layers_keep() -> None:
    """s b h (34 + 5 a s/h) bytes with dropout, and its parts with tp; the input alone with full recomputation."""
    s, h, a, t = GPT3.sequence, GPT3.hidden, GPT3.heads, 8
    scales = 2 * 2 * s  # of two norms, of 16 bits for each row, which the formulas leave out
    early = TrainingLayout(tp=t, fused=False, dropout=True)
    assert GPT3.layers_in(early).block.kept == pytest.approx((s * h * (34 + 5 * a * s / h) + scales) / t)
    apart = replace(early, sequence=False)
    assert GPT3.layers_in(apart).block.kept == pytest.approx(s * h * (10 + (24 + 5 * a * s / h) / t) + scales)
    assert GPT3.layers_in(replace(apart, recompute="full")).block.kept == 2 * s * h
    assert GPT3.layers_in(replace(early, recompute="selective")).block.kept == pytest.approx((34 * s * h + scales) / t)
    whole = GPT3.layers_in(replace(early, autograd=True)).block.kept  # gathered inputs of two linear layers, and means
    assert whole - GPT3.layers_in(early).block.kept == pytest.approx(4 * s * h * (1 - 1 / t) + scales / t)


def test_bad_values() -> None:
    for make, error in (
        (lambda: ModelShape(1, 0, 1, 1, 1), "hidden"),
        (lambda: ModelShape(1, 8, 4, 1, 1, kv_heads=3), "kv_heads 3 does not divide heads 4"),
        (lambda: ModelShape(1, 8, 4, 1, 1, experts=2, topk=3), "3 experts of 2"),
        (lambda: TrainingLayout(zero=4), "zero is 0, 1, 2 or 3"),
        (lambda: TrainingLayout(optimizer="sgd"), "optimizer .sgd. is not one of adamw, muon"),  # type: ignore[arg-type]
        (lambda: TrainingLayout(recompute="all"), "recompute .all. is not one of none, selective, full"),  # type: ignore[arg-type]
        (lambda: TrainingLayout(dp=3, ep=2), "ep 2 does not divide dp 3"),
    ):
        with pytest.raises((ArgumentError, MeshError), match=error):
            make()
