"""Plans of transformers: published numbers, schedules of a run, the best layouts, and bad questions.  No MPI."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from fractions import Fraction
from itertools import product
from statistics import mean
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import examples, third

from pdgemm.errors import ArgumentError, MeshError
from pdgemm.planning.machines.accelerators import accelerator
from pdgemm.planning.machines.machine import HOST, KINDS, Link
from pdgemm.planning.models import published_rows
from pdgemm.planning.models.kept_arrays import activation_bytes
from pdgemm.planning.models.layout_search import LayoutSearch
from pdgemm.planning.models.model_plan import ModelPlan
from pdgemm.planning.models.model_shape import PRESETS, ModelShape
from pdgemm.planning.models.stage_state import state_of_stage
from pdgemm.planning.models.step_seconds import NETWORK, NODE, StepSeconds
from pdgemm.planning.models.training_layout import TrainingLayout
from pdgemm.schedules.training.linear_schedule import LinearSchedule
from pdgemm.schedules.training.mesh_shape import MeshShape
from pdgemm.schedules.training.pipeline_schedule import PipelineSchedule
from pdgemm.schedules.training.vocabulary_schedule import VocabularySchedule
from pdgemm.tools.cli.commands import cli

A100, H100 = accelerator("a100-80"), accelerator("h100")
GPT3 = ModelShape(**PRESETS["gpt3-175b"])
SMALL = ModelShape(8, 64, 4, 256, 32)
QUESTION = shlex.split(
    "model --layers 96 --hidden 12288 --heads 96 --sequence 2048 --vocabulary 51200 --batch 1536 --ranks 128 "
    "--ranks-per-node 8 --machine a100-80"
)


def output(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli, [*words])
    assert result.exit_code == code or (code == 2 and isinstance(result.exception, ArgumentError)), result.output
    return str(result.exception) if isinstance(result.exception, ArgumentError) else result.output


# ------------------------------------------------------------------ published numbers
def test_published_step_times() -> None:
    for sources, number, most, usual in (
        ((published_rows.SC21, published_rows.KORTHIKANTI), 24, 0.12, 0.06),
        ((published_rows.MEGATRON_CORE,), 9, 0.15, 0.06),
        ((published_rows.MT_NLG,), 3, 0.17, 0.16),
    ):
        rows = [abs(x.difference) for x in published_rows.step_times() if x.source.startswith(sources)]
        assert len(rows) == number
        assert max(rows) <= most and mean(rows) <= usual


def test_published_sizes() -> None:
    """Activations: 0.2 GiB and 0.3 points; state of ZeRO, and parameters, to their rounding; days of runs."""
    kept, state, sizes, days = (
        [*rows()] for rows in (
            published_rows.kept_bytes, published_rows.zero_bytes, published_rows.parameters, published_rows.days
        )
    )  # fmt: skip
    assert [*map(len, (kept, state, sizes, days))] == [24, 54, 10, 12]
    assert all(abs(x.predicted - x.published) <= {"GiB": 0.2, "%": 0.3}[x.what] for x in kept)
    assert all(abs(x.predicted - x.published) <= 5.1e-5 for x in state)
    assert all(abs(x.predicted - x.published) <= 0.0501 for x in sizes)
    assert all(abs(x.difference) <= 0.013 for x in days)


def test_measured_functions_take_the_place_of_passes() -> None:
    """Seconds an element, forward and backward; others go on as bytes that pass through memory."""
    layout = TrainingLayout(tp=2, microbatch=3, fused=False, dtype="float32")
    alone = replace(A100, gamma={"float32": {1: 1e30}}, copy_bandwidth=1e30)
    rows, h = 3 * SMALL.sequence / 2, SMALL.hidden  # with `sequence`
    widths = {"normalization": h, "activation": SMALL.ffn / 2, "softmax": SMALL.heads / 2 * SMALL.sequence}
    for (name, width), (size, dtype) in product(widths.items(), ((1, "float32"), (0.5, "bfloat16"))):
        plan = ModelPlan(SMALL, replace(layout, dtype=dtype), 12, A100)
        seconds = StepSeconds(plan, replace(alone, functions={name: 1e-3}))
        both = sum(x[part] for x in (seconds.forward, seconds.backward) for part in ("elementwise", "softmax"))
        assert both == pytest.approx(size * 1e-3 * 2 * rows * width), (name, dtype)
    for factor, dtype in ((1, "float32"), (2, "float64"), (1, "bfloat16")):  # whose state is float32
        how = replace(layout, dtype=dtype)
        plan = ModelPlan(SMALL, how, 12, replace(alone, functions={"update": 1e-3}))
        words = sum(x.words for x in state_of_stage(SMALL, how, 0))
        assert StepSeconds(plan, plan.machine).of_step()["optimizer"] == pytest.approx(factor * 1e-3 * words)


def test_muon_takes_the_time_of_the_fullest_home() -> None:
    """8 layers of 4 matrices: (4 n m^2 + 2 m^3) flops in each step of its own; one moment, and words of homes."""
    rate, size = 1e9, SMALL.hidden
    machine = replace(A100, gamma={"float32": {1: rate}}, copy_bandwidth=1e30)
    for dp, tp, zero, steps in ((1, 1, 0, 5), (4, 1, 1, 5), (2, 2, 0, 3), (3, 1, 2, 1), (8, 8, 1, 9)):
        layout = TrainingLayout(dp=dp, tp=min(4, tp), zero=zero, optimizer="muon", muon_steps=steps)
        costs = [steps * (4 * n * size**2 + 2 * size**3) / rate for n in (3 * size, size, 4 * size, 4 * size)]
        plan = ModelPlan(SMALL, layout, 24, machine)
        other = ModelPlan(SMALL, replace(layout, optimizer="adamw"), 24, machine)
        load = np.zeros(layout.ranks)
        for cost in sorted(8 * costs, reverse=True):  # each to the rank with the least work so far
            load[load.argmin()] += cost
        assert plan.seconds["newton_schulz"] == pytest.approx(load.max()), layout
        words, h = 8 * 12 * size**2, layout.ranks
        own = 1 if zero or dp == 1 else dp  # with stage 0 ranks along dp update the same elements
        if loads := plan.homes(0):
            assert loads.received.sum() == own * words + words - 2 * sum(loads.own[range(32), loads.homes])
            assert loads.updated.sum() == own * words
        assert plan.words.get("homes", 0) == (loads.received.max() if loads and h > 1 else 0)
        assert other.bytes["optimizer"] - plan.bytes["optimizer"] == 4 * (loads.updated.min() if loads else 0)
        phases, parts = plan.times.of_phases(), plan.times.of_parts()
        assert sum(phases.values()) == pytest.approx(plan.step_seconds) == pytest.approx(sum(parts.values()))
        assert phases["optimizer"] >= load.max() * (1 - 1e-12)


def test_the_bytes_of_an_update() -> None:
    """Adam reads a gradient and reads and writes three numbers; the norm reads, clipping reads and writes gradients.

    With 16 bits gradients are also copied to 32 bits, unscaled, and parameters are copied back: 6, 8 and 6 bytes.
    """
    memory = 2 * A100.copy_bandwidth
    for dtype, size in (("float32", 4 * (7 + 1 + 2)), ("bfloat16", 4 * (7 + 1 + 2) + 6 + 8 + 6)):
        plan = ModelPlan(GPT3, TrainingLayout(tp=2, dtype=dtype), 8, A100)
        words = sum(x.words for x in state_of_stage(GPT3, plan.layout, 0))
        assert plan.seconds["optimizer"] == pytest.approx(words * size / memory), dtype


def test_the_flops_of_megatrons_formulas() -> None:
    """72 B s l h^2 (1 + s/(6h) + V/(12 l h)), and 96 (...) with V/(16 l h) where all layers are computed again."""
    l, h, v, s, batch = GPT3.layers, GPT3.hidden, GPT3.vocabulary, GPT3.sequence, 1536
    model = 72 * batch * s * l * h * h * (1 + s / (6 * h) + v / (12 * l * h))
    hardware = 96 * batch * s * l * h * h * (1 + s / (6 * h) + v / (16 * l * h))
    assert GPT3.flops(batch * s) == pytest.approx(model, rel=1e-12)
    assert GPT3.hardware_flops(batch * s, "full") == pytest.approx(hardware, rel=1e-12)
    plan = ModelPlan(GPT3, TrainingLayout(dp=1, tp=8, pp=16, recompute="full"), batch, A100)
    assert plan.hfu == pytest.approx(plan.mfu * hardware / model)
    assert plan.mfu == pytest.approx(model / plan.step_seconds / 128 / 312e12)


# ------------------------------------------------------------------ schedules of a run
@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2)])
def test_bubbles_and_what_is_kept_are_those_of_schedules(name: str, chunks: int) -> None:
    for p, m in ((2, 4), (4, 8)):
        layout = TrainingLayout(pp=p, chunks=chunks, schedule=name)
        plan = ModelPlan(SMALL, layout, m, A100)
        schedule = PipelineSchedule(layout.schedule, p, m, layout.chunks)
        assert isinstance(plan.bubble, Fraction) and plan.bubble == schedule.bubble(), (p, m)
        assert [plan.in_flight(x) for x in range(p)] == [schedule.in_flight(x) for x in range(p)], (p, m)


@pytest.mark.parametrize(("t", "sequence", "recompute"), [*product((1, 2, 4), (True, False), ("none", "full"))])
def test_words_are_those_of_layers(t: int, sequence: bool, recompute: Any) -> None:
    """Where tokens, heads and the vocabulary divide: all layers, the embedding, the scores and the cross-entropy."""
    layout = TrainingLayout(tp=t, sequence=sequence, recompute=recompute, microbatch=2)
    tokens, kind, line = 2 * SMALL.sequence, np.dtype("f4"), tuple(range(t))
    h, again = SMALL.hidden, 2 if recompute == "full" else 1

    def linear(split: Any, d_in: int, d_out: int, forward: int = again) -> int:
        own, *back = LinearSchedule(split, sequence, tokens, d_in, d_out, kind, line).words(0).values()
        return forward * own + sum(back)

    layer = linear("columns", h, 3 * h) + linear("rows", h, h) + linear("columns", h, 4 * h) + linear("rows", 4 * h, h)
    ends = linear("columns", h, SMALL.vocabulary, 1)
    ends += sum(VocabularySchedule(tokens, h, sequence, kind, line).words(0).values())
    plan = ModelPlan(SMALL, layout, 6, A100)
    assert plan.words.get("tensor", 0) == pytest.approx(3 * (SMALL.layers * layer + ends))


def test_where_words_travel() -> None:
    """tp inside a node, stages between nodes; rings that leave a node share its cards."""
    plan, cards = ModelPlan(GPT3, TrainingLayout(dp=4, tp=4, pp=8), 64, A100), 8 * 0.9 * 25e9
    assert plan.links == {"tensor": NODE, "pipeline": NETWORK, "gradients": NETWORK}
    other = replace(plan, layout=TrainingLayout(dp=16, tp=1, pp=8))
    seconds = [x.times.transfer("gradients", cards) for x in (plan, other)]
    assert seconds == pytest.approx([4, 1])  # four rings, one for each rank of a tp line
    assert plan.times.transfer("pipeline", cards) == pytest.approx(8)
    plan = ModelPlan(GPT3, TrainingLayout(dp=1000, tp=10, pp=10), 10**6, H100)  # of a hundred thousand ranks
    assert all(np.isfinite([*plan.seconds.values(), *plan.bytes.values(), *plan.words.values(), plan.mfu]))


def test_groups_that_end_on_two_nodes_travel() -> None:
    """Words stay on a node where all lines of the mesh do: six ranks are fewer than eight, but 6 and 7 | 8 ... 11."""
    axes = {
        "tensor": "tp", "context": "cp", "gradients": "dp+cp", "experts": "ep", "homes": "dp+cp+tp", "pipeline": "pp"
    }  # fmt: skip
    sizes = ((24, 1, 1, 1, 6), (2, 2, 1, 3, 1), (4, 3, 2, 1, 2), (3, 1, 4, 2, 3), (8, 2, 2, 1, 4), (2, 3, 1, 1, 1))
    for (dp, tp, pp, cp, ep), node in product(sizes, (2, 3, 4, 6, 8, 12)):
        layout, machine = TrainingLayout(dp, tp, pp, cp, ep), replace(A100, ranks_per_node=node)
        mesh = replace(layout.mesh, nodes=tuple(rank // node for rank in range(layout.ranks)))
        times = ModelPlan(SMALL, layout, 24, machine).times
        for kind, axis in axes.items():
            assert (times.link(kind) == NETWORK) == mesh.crosses(axis), (kind, layout, node)


def test_rings_and_exchanges_share_the_cards_of_a_node() -> None:
    """The rings that enter a node, counted in the mesh; and in an exchange all that its ranks receive."""
    for (dp, tp, ep), node in product(((24, 1, 6), (12, 2, 6), (24, 1, 3), (16, 1, 16), (9, 2, 3)), (4, 8)):
        machine = replace(A100, ranks_per_node=node, inter=dict.fromkeys(KINDS, Link(1e-6, 1.0)))
        layout = TrainingLayout(dp, tp, ep=ep)
        times = ModelPlan(replace(SMALL, experts=ep, topk=1), layout, dp, machine).times
        lines = [[rank // node for rank in line] for line in layout.mesh.lines("ep")]
        away = max(sum(x != y for x in line for y in line) / ep / (ep - 1) for line in lines)
        assert times.transfer("experts", 1) == pytest.approx(node * away), (layout, node)
        # a line along cp lies where one of experts does, and its ranks are a ring
        times = ModelPlan(SMALL, TrainingLayout(dp // ep, tp, cp=ep), dp, machine).times
        entering = [y for line in lines for x, y in zip([line[-1], *line], line, strict=False) if x != y]
        most = max(map(entering.count, entering))
        assert most <= times.transfer("context", 1) <= (2 if dp > ep else 1) * most, (layout, node)


def test_the_bytes_and_words_of_zero() -> None:
    """18 bytes of a parameter with 16 bits, and what ZeRO divides; gradients of several microbatches are added whole.

    Words are those of ZeRO's section 7: as many as an all-reduce, and half as many more where parameters are gathered.
    """
    words, share = GPT3.parameters, 7 / 8 * GPT3.parameters
    for zero, m, each, size, gradients, parameters in (
        (0, 1, False, 18, 2, 0), (1, 1, False, 6 + 12 / 8, 1, 1), (2, 1, False, 2 + 16 / 8, 1, 1),
        (3, 1, False, 18 / 8, 1, 2), (2, 2, False, 6 + 12 / 8, 1, 1), (2, 2, True, 2 + 16 / 8, 2, 1),
        (3, 2, False, 4 + 14 / 8, 1, 4), (3, 2, True, 18 / 8, 2, 4),
    ):  # fmt: skip
        plan = ModelPlan(GPT3, TrainingLayout(dp=8, zero=zero, reduce_each=each), 8 * m, A100)
        assert sum(plan.bytes[kind] for kind in ("parameters", "gradients", "optimizer")) == pytest.approx(size * words)
        moved = [plan.words.get(kind, 0) for kind in ("gradients", "parameters")]
        assert moved == pytest.approx([gradients * share, parameters * share]), (zero, m, each)


def test_the_nearest_miss_needs_the_least() -> None:
    search = LayoutSearch(ModelShape(**PRESETS["llama3-8b"]), 64, 4, replace(A100, memory=24e9))
    choice = search.best()
    assert choice.nearest and not choice.best
    assert choice.nearest.all_bytes == min(x.all_bytes for x in search.plans())


def test_llama_3() -> None:
    """Parameters as its files have them; layouts of its table 4 fit 80 GB: 16,384 GPUs, 131,072 positions along cp."""
    published = {"llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496, "llama3-405b": 405_853_388_800}
    assert {name: ModelShape(**PRESETS[name]).parameters for name in published} == published
    shape = ModelShape(**PRESETS["llama3-405b"])
    for dp, cp, batch in ((64, 1, 2048), (128, 1, 2048), (8, 16, 128)):
        layout = TrainingLayout(dp=dp, tp=8, pp=16, cp=cp, zero=2, reduce_each=True)
        plan = ModelPlan(replace(shape, sequence=8192 * cp), layout, batch, H100)
        assert not plan.refused, plan.refused


def test_what_layers_keep() -> None:
    """s b h (34 + 5 a s/h) bytes with dropout, and its parts with tp; the input alone with full recomputation."""
    s, h, a, t = GPT3.sequence, GPT3.hidden, GPT3.heads, 8
    scales = 2 * 2 * s  # of two norms, of 16 bits for each row, which the formulas leave out
    early = TrainingLayout(tp=t, fused=False, dropout=True)
    assert activation_bytes(GPT3, early) == pytest.approx((s * h * (34 + 5 * a * s / h) + scales) / t)
    apart = replace(early, sequence=False)
    assert activation_bytes(GPT3, apart) == pytest.approx(s * h * (10 + (24 + 5 * a * s / h) / t) + scales)
    assert activation_bytes(GPT3, replace(apart, recompute="full")) == 2 * s * h
    assert activation_bytes(GPT3, replace(early, recompute="selective")) == pytest.approx((34 * s * h + scales) / t)


def test_each_collective_has_its_links() -> None:
    """All-gathers and reduce-scatters differ where messages are added; an all-reduce is one of each."""
    beta = {"ring": 1e-9, "reduce": 3e-9, "shift": 5e-9, "exchange": 7e-9, "ibcast": 1e9}
    machine = replace(A100, intra={kind: Link(1e-6, each) for kind, each in beta.items()}, ranks_per_node=None)
    one = {"dp": 2, "tp": 2, "pp": 2, "cp": 2, "ep": 2}
    for zero, gradients in ((0, 2.0), (1, 3.0)):
        times = StepSeconds(ModelPlan(SMALL, TrainingLayout(**one, zero=zero), 8, machine), machine)
        kinds = {"tensor": 2.0, "context": 1.0, "parameters": 1.0, "pipeline": 5.0, "experts": 7.0}
        for kind, seconds in {**kinds, "gradients": gradients}.items():
            assert times.transfer(kind, 1e9) == pytest.approx(seconds), (kind, zero)


def test_gradients_of_one_stage_are_reduced_behind_the_backward_pass() -> None:
    """On GPUs, behind all layers but the first; with several stages, and on hosts, after them."""
    network = replace(A100, inter=dict.fromkeys(KINDS, Link(1e-6, 1e-6)), ranks_per_node=1)
    for zero, each, pp, m in ((0, False, 1, 1), (2, False, 1, 4), (3, True, 1, 4), (0, False, 2, 1), (2, False, 2, 4)):
        layout = TrainingLayout(dp=2, pp=pp, zero=zero, reduce_each=each)
        for machine in (network, replace(network, device=HOST, overlap=0.5)):
            plan = ModelPlan(SMALL, layout, 2 * m, machine)
            moving = (1 - machine.overlap) * plan.times.transfer("gradients", 4 * plan.words["gradients"])
            hidden = (m if each else 1) * (SMALL.layers - 1) * sum(plan.times.backward.values())
            hidden *= pp == 1 and machine.device != HOST
            assert moving > hidden, "the test is of what is left"
            assert plan.seconds["gradients"] == pytest.approx(moving - hidden), (layout, machine.device)
    fast = ModelPlan(GPT3, TrainingLayout(dp=2, microbatch=4), 8, A100)
    assert "gradients" in fast.words and "gradients" not in fast.seconds


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2 + 4 + 4), ("float32", 4 + 4 + 4)])
def test_gradients_that_are_added_apart(dtype: str, size: int) -> None:
    """Those of all microbatches but the first: one is read, the sum read and written, and stages wait for it."""
    for pp, m in ((1, 1), (1, 4), (2, 4)):
        layout = TrainingLayout(tp=2, pp=pp, dtype=dtype)
        plan, apart = (ModelPlan(GPT3, replace(layout, apart=x), m, A100) for x in (False, True))
        words = sum(x.words for x in state_of_stage(GPT3, layout, 0))
        sums = (m - 1) * words * size / (2 * A100.copy_bandwidth)
        assert apart.seconds.get("sums", 0) == pytest.approx(sums) and "sums" not in plan.seconds
        assert apart.step_seconds - plan.step_seconds == pytest.approx((1 + float(plan.bubble)) * sums)
        backward = [x.times.of_phases()["backward"] for x in (plan, apart)]
        assert backward[1] - backward[0] == pytest.approx(sums)
        assert sum(apart.times.of_parts().values()) == pytest.approx(apart.step_seconds)


def test_calls_and_copies_of_hosts() -> None:
    """Calls forward half as long as backward, those of lines where ranks share the layers; three copies of own rows."""
    free = replace(
        A100, gamma={"float32": {1: 1e30}}, intra=dict.fromkeys(KINDS, Link(1e-9, 1e-30)), copy_bandwidth=1e3
    )
    own, line = {"layer": 3.0, "ends": 5.0, "update": 7.0}, {"layer": 6.0, "ends": 50.0, "update": 70.0}
    host, m = replace(free, device=HOST, calls=own, line_calls=line), 12 // 3
    for t, dp in ((1, 1), (2, 1), (4, 1), (1, 2)):
        layout = TrainingLayout(tp=t, dp=dp, microbatch=3, dtype="float32")
        calls = line if t > 1 else own
        plans = [ModelPlan(SMALL, layout, 12 * dp, x) for x in (host, replace(host, calls={}, line_calls={}), free)]
        times, without, gpu = (x.times for x in plans)
        assert times.forward["calls"] == times.backward["calls"] / 2 == calls["layer"] / 3
        assert without.forward["calls"] == gpu.forward["calls"] == 0
        copied = 2 * 3 * (3 * SMALL.sequence * SMALL.hidden / t) * 4 / 1e3
        assert times.forward["tensor"] == times.backward["tensor"] == pytest.approx((t > 1) * copied)
        assert gpu.forward["tensor"] == pytest.approx(0, abs=1e-9)
        assert plans[0].seconds["calls"] == pytest.approx(m * SMALL.layers * calls["layer"])
        more = [plans[0].seconds[x] - plans[1].seconds[x] for x in ("scores", "optimizer")]
        assert more == pytest.approx([m * calls["ends"], (line if t * dp > 1 else own)["update"]])


def test_the_ends_of_a_model_on_a_host() -> None:
    """A last norm, a softmax of all scores, and two tables; on the first or the last stage alone no tables."""
    seconds: dict[Any, float] = {"normalization": 1.0, "softmax": 1e-3, "embedding": 1e-6}
    machine = replace(A100, gamma={"float32": {1: 1e30}}, copy_bandwidth=1e30, functions=seconds)
    for t, pp in ((1, 1), (2, 1), (1, 2)):
        plan = ModelPlan(SMALL, TrainingLayout(tp=t, pp=pp, microbatch=3, dtype="float32"), 12, machine)
        rows, scores = 3 * SMALL.sequence * SMALL.hidden / t, 3 * SMALL.sequence * SMALL.vocabulary / t
        assert plan.seconds["scores"] == pytest.approx(4 * (rows + 1e-3 * scores), rel=1e-12)
        assert plan.seconds.get("embedding", 0) == pytest.approx((pp == 1) * 4 * 2e-6 * rows)
        for parts in (plan.times.of_phases(), plan.times.of_parts()):
            assert sum(parts.values()) == pytest.approx(plan.step_seconds)


def test_products_of_layers_have_their_own_rates() -> None:
    """By the least dimension, float64 as much slower as panels are; without rates of layers those of panels."""
    gamma: Any = {"float32": {64: 4e9}, "float64": {64: 1e9}}
    panels = replace(A100, gamma=gamma, copy_bandwidth=1e9)
    machine = replace(panels, linear={64: 2e9, 256: 8e9})
    for dtype, slower in (("float32", 1), ("float64", 4), ("bfloat16", 1)):
        kind = ModelPlan(SMALL, TrainingLayout(dtype=dtype), 8, A100).layout.element
        for mnk, rate in (((512, 64, 256), 2e9), ((512, 256, 256), 8e9), ((32, 64, 64), 1e9)):
            m, n, k = mnk
            copied = (m * n + n * k + m * k) * kind.itemsize / 1e9
            assert machine.of_layer(kind, *mnk) == pytest.approx(2 * m * n * k * slower / rate + copied)
            assert panels.of_layer(kind, *mnk) == panels.multiply(kind, mnk, mnk)
        assert machine.of_layer(kind, 0, 64, 64) == 0
    free = replace(panels, copy_bandwidth=1e30)
    machines = (free, replace(free, linear={64: 4e9}), replace(free, linear={64: 2e9}))
    plain, one, half = (ModelPlan(SMALL, TrainingLayout(dtype="float32"), 8, x).seconds for x in machines)
    for part in ("products", "scores"):
        assert [half[part], plain[part]] == pytest.approx([2 * one[part], one[part]])


# ------------------------------------------------------------------ the best layouts
def test_published_layouts_are_near_the_best() -> None:
    """SC 2021's ten are within 10% of the best of what ran there: no ZeRO, and at most as many blocks a stage."""
    early = published_rows._OF_2021
    for row in third([*published_rows._rows("megatron_sc21_table1")]):
        shape, batch, chunks = published_rows._shape(row), int(row["batch_sequences"]), int(row["virtual_stages"])
        layout = published_rows._layout(row, chunks, microbatch=int(row["microbatch"]), **early)
        plan = ModelPlan(shape, layout, batch, A100)
        assert not plan.refused
        plans = LayoutSearch(shape, batch, layout.ranks, A100, ("full",), (0,), TrainingLayout(**early)).plans()
        best = min(x.step_seconds for x in plans if not x.refused and x.layout.chunks <= chunks)
        assert plan.step_seconds <= 1.1 * best, row


def test_an_all_reduce_that_is_hidden_is_tried() -> None:
    """With one stage on GPUs, where stage 1 or 2 of ZeRO hides half of its words; never with several, or on hosts."""
    search = LayoutSearch(ModelShape(24, 4096, 32, 51200, 2048), 512, 64, A100)
    best = {x.layout.mesh: x.layout for x in search.best(100).best}
    assert best[MeshShape(dp=16, tp=4)].zero == 0 and best[MeshShape(dp=64)].zero == 2
    for machine in (A100, replace(A100, device=HOST)):
        whole = {x.layout.mesh for x in replace(search, machine=machine).plans() if not x.layout.zero}
        assert all((x.pp == 1) == (machine.device != HOST) for x in whole if x.dp > 1)


def test_tensor_parallelism_stays_on_a_node() -> None:
    for machine, ranks in ((A100, 512), (H100, 128)):
        best = LayoutSearch(GPT3, 1536, ranks, machine).best().best
        assert best and all(x.links.get("tensor", NODE) == NODE for x in best[:3]), (machine.name, ranks)
    assert sum(1 for _ in LayoutSearch(GPT3, 1536, 1024, A100).plans()) <= 2500  # each takes some 100 us


@settings(max_examples=examples(20), deadline=None)
@given(
    st.sampled_from([16, 64, 256]), st.sampled_from([64, 512]), st.floats(20e9, 200e9), st.floats(1.0, 4.0),
    st.sampled_from(["a100-40", "h100"]),
)  # fmt: skip
def test_more_memory_is_never_worse(ranks: int, batch: int, memory: float, factor: float, name: str) -> None:
    shape, machine = ModelShape(24, 4096, 32, 51200, 2048), accelerator(name)
    little, much = (
        LayoutSearch(shape, batch, ranks, replace(machine, memory=size)).best(1) for size in (memory, factor * memory)
    )
    if little.best:
        assert much.best and much.best[0].step_seconds <= little.best[0].step_seconds * (1 + 1e-12)
        plan = little.best[0]
        assert plan.all_bytes >= 16 * shape.layers * shape.layer.total / ranks


# ------------------------------------------------------------------ the command
def test_the_command() -> None:
    text = output(*QUESTION, "--tokens", "300e9", "--price", "2")
    for part in (r"layout", "MFU", "174,615,846,912 parameters", "GB of a rank:", "tensor", "days", "a million tokens"):
        assert part in text, text
    facts = json.loads(output(*QUESTION, "--json"))
    seconds = [sum(x["seconds"].values()) for x in facts["layouts"]]
    assert len(seconds) == 10
    assert seconds == sorted(seconds)
    one = json.loads(output(*QUESTION, "--json", "--layout", facts["layouts"][0]["layout"]))
    assert one["layouts"] == facts["layouts"][:1]
    ways = (("", "--no-fused"), (",fused=no", ""), ("", ""))
    apart = [output(*QUESTION, "--layout", f"tp=8,pp=16{more}", *words.split()) for more, words in ways]
    assert apart[0] == apart[1] != apart[2]
    muon = output(*QUESTION, "--layout", "tp=8,pp=16", "--optimizer", "muon")
    assert "newton_schulz" in muon and "homes" in muon and "homes" not in apart[2]
    assert "at most" in output("model", "--check")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--ranks 0", "0 is not in the range"),
        ("--heads 7", "heads 7 does not divide hidden 12288"),
        ("--machine b200", "the machines are a100-40, a100-80, h100 and files"),
        ("--memory 80", "'80' is not of the form 80GB or 40GiB, with its unit"),
        ("--memory 1GB", "no layout of 128 ranks fits: "),
        ("--preset gpt5", "the presets are gpt3-175b, "),
        ("--layout dp=3", "is one of 3 ranks, not of 128"),
        ("--layout dp=128,colour=1", "the names are dp, tp, pp"),
        ("--layout dp=128,zero=x", "zero of a layout is a whole number"),
        ("--layout tp=8,pp=16,microbatch=5", "does not divide the 1536 samples"),
        ("--layout dp=128,fused=perhaps", "fused of a layout is yes or no, got 'perhaps'"),
        ("--layout dp=128,schedule=2f2b", "2f2b"),
        ("--layout pp=128,chunks=2,schedule=1f1b", "2 blocks of layers a stage take an interleaved schedule"),
        ("--layout dp=2,pp=64,chunks=1,microbatch=256,schedule=interleaved", "interleaved "),
        ("--layout tp=64,pp=2", "tp 64 does not divide 96 heads"),
        ("--layout pp=128", "128 blocks of layers are more than 96 layers"),
        ("--batch 7 --ranks 11 --layers 1", "dp may be 1"),
        ("model", "--layers, --hidden, --heads, --vocabulary, --sequence (or --preset, which has all sizes), --ranks"),
        ("model --preset llama3-8b", "missing options: --ranks (or --layout)"),
        ("model --layers 2 --heads 2 --ranks 3", "missing options: --hidden, --vocabulary, --sequence (or --preset"),
    ],
)
def test_bad_questions(words: str, message: str) -> None:
    """One line with the possible values or all that is missing, and exit code 2."""
    asked = words.split() if words.startswith("model") else [*QUESTION, *words.split()]
    assert message in " ".join(output(*asked, code=2).split())


def test_a_step_has_a_million_tokens_unless_a_batch_is_named() -> None:
    """Of 8192 tokens a sample; each rank has as many samples, and one at least."""
    for words, batch in (
        ("--ranks 8", 128),
        ("--layout dp=24,zero=3,recompute=full", 120),
        ("--layout dp=1000,zero=3,recompute=full", 1000),
    ):
        facts = json.loads(output(*shlex.split(f"model --preset llama3-8b {words} --json")))
        assert facts["batch"] == batch and facts["layouts"]


def test_what_does_not_fit_is_told_in_words() -> None:
    text = output(*shlex.split("model --preset llama3-8b --ranks 8"))
    assert re.search(r"^\d+ layouts fit. Of \d+ others, dp=\S+ comes closest: [\d.]+ GB, [\d.]+% too much$", text, re.M)
    assert re.search(r"^dp=\S+: \d+ microbatches of \d+ per rank, \d+ in flight$", text, re.M)
    one = output(*shlex.split("model --preset llama3-8b --batch 8 --layout dp=8,zero=3,microbatch=1"))
    assert ": 1 microbatch of 1 per rank, 1 in flight" in one


def test_bad_values() -> None:
    for make, error in (
        (lambda: ModelShape(1, 0, 1, 1, 1), "hidden"),
        (lambda: ModelShape(1, 8, 4, 1, 1, kv_heads=3), "kv_heads 3 does not divide heads 4"),
        (lambda: ModelShape(1, 8, 4, 1, 1, experts=2, topk=3), "3 experts of 2"),
        (lambda: TrainingLayout(zero=4), "zero is 0, 1, 2 or 3"),
        (lambda: TrainingLayout(optimizer="sgd"), "optimizer is adamw, muon, got 'sgd'"),  # type: ignore[arg-type]
        (lambda: TrainingLayout(bucket_words=0), "bucket_words"),
        (lambda: TrainingLayout(recompute="all"), "recompute is none, selective, full"),  # type: ignore[arg-type]
        (lambda: TrainingLayout(dp=3, ep=2), "ep 2 does not divide dp 3"),
    ):
        with pytest.raises((ArgumentError, MeshError), match=error):
            make()
