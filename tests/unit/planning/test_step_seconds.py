"""Seconds of a step of training, part by part: passes, messages, gradients and updates.  No MPI."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from planned_models import A100, GPT3, H100, SMALL

from pdgemm.planning.machines.machine import HOST, KINDS, Link
from pdgemm.planning.models.model_layers import TrainingLayout
from pdgemm.planning.models.model_plan import NETWORK, NODE, ModelPlan


def test_muon_takes_the_time_of_its_owners() -> None:
    """8 layers of 4 matrices: (4 n m^2 + 2 m^3) flops in each step of its own; one moment, and words along tp."""
    rate, size, matrices = 1e9, SMALL.hidden, 8 * 12 * SMALL.hidden**2
    machine = replace(A100, gamma={"float32": {1: rate}}, copy_bandwidth=1e30)
    for dp, tp, zero, steps in ((1, 1, 0, 5), (4, 1, 1, 5), (2, 2, 0, 3), (3, 1, 2, 1), (8, 4, 1, 9), (64, 1, 1, 5)):
        layout = TrainingLayout(dp=dp, tp=tp, zero=zero, optimizer="muon", muon_steps=steps)
        costs = [steps * (4 * n * size**2 + 2 * size**3) / rate for n in (3 * size, size, 4 * size, 4 * size)]
        plan, other = (ModelPlan(SMALL, replace(layout, optimizer=x), 192, machine) for x in ("muon", "adamw"))
        parts = dp if zero else 1
        assert plan.seconds["newton_schulz"] == pytest.approx(max(*costs, 8 * sum(costs) / tp / parts)), layout
        assert plan.words.get("owners", 0) == pytest.approx(2 * (tp - 1) / tp * matrices / tp / parts)
        more = {x: plan.bytes[x] - other.bytes[x] for x in ("optimizer", "gradients")}  # owners along tp have copies
        owned = 4 * matrices / tp / parts
        assert more == pytest.approx({"optimizer": -owned * (tp == 1), "gradients": owned * (tp > 1)}), layout


def test_the_bytes_of_an_update() -> None:
    """Of Adam, the norm, clipping; with 16 bits of copies of gradients, of their scale, and of copies of parameters."""
    memory = 2 * A100.copy_bandwidth
    for dtype, size in (("float32", 4 * (7 + 1 + 2)), ("bfloat16", 4 * (7 + 1 + 2) + 6 + 8 + 6)):
        plan = ModelPlan(GPT3, TrainingLayout(tp=2, dtype=dtype), 8, A100)
        assert plan.seconds["optimizer"] == pytest.approx(sum(x.words for x in plan.state_of(0)) * size / memory), dtype


def test_each_collective_has_its_links() -> None:
    """All-gathers and reduce-scatters differ where messages are added; an all-reduce is one of each."""
    beta = {"ring": 1e-9, "reduce": 3e-9, "shift": 5e-9, "exchange": 7e-9, "ibcast": 1e9}
    machine = replace(A100, intra={kind: Link(1e-6, each) for kind, each in beta.items()}, ranks_per_node=None)
    one = {"dp": 2, "tp": 2, "pp": 2, "cp": 2, "ep": 2}
    for zero, gradients in ((0, 2.0), (1, 3.0)):
        times = ModelPlan(SMALL, TrainingLayout(**one, zero=zero), 8, machine)
        kinds = {"tensor": 2.0, "context": 1.0, "parameters": 1.0, "pipeline": 5.0, "experts": 7.0}
        for kind, seconds in {**kinds, "gradients": gradients}.items():
            assert times.transfer(kind, 1e9) == pytest.approx(seconds), (kind, zero)


def test_where_words_travel() -> None:
    """tp inside a node, stages between nodes; rings that leave a node share its cards."""
    plan, cards = ModelPlan(GPT3, TrainingLayout(dp=4, tp=4, pp=8), 64, A100), 8 * 0.9 * 25e9
    assert {kind: plan.link(kind) for kind in plan.words} == {"tensor": NODE, "pipeline": NETWORK, "gradients": NETWORK}
    other = replace(plan, layout=TrainingLayout(dp=16, tp=1, pp=8))
    seconds = [x.transfer("gradients", cards) for x in (plan, other)]
    assert seconds == pytest.approx([4, 1])  # four rings, one for each rank of a tp line
    assert plan.transfer("pipeline", cards) == pytest.approx(8)
    plan = ModelPlan(GPT3, TrainingLayout(dp=1000, tp=10, pp=10), 10**6, H100)  # of a hundred thousand ranks
    assert all(np.isfinite([*plan.seconds.values(), *plan.bytes.values(), *plan.words.values(), plan.mfu]))


def test_groups_that_end_on_two_nodes_travel() -> None:
    """Words stay on a node where all lines of the mesh do: six ranks are fewer than eight, but 6 and 7 | 8 ... 11."""
    axes = {"tensor": "tp", "context": "cp", "gradients": "dp+cp", "experts": "ep", "owners": "tp", "pipeline": "pp"}
    sizes = ((24, 1, 1, 1, 6), (2, 2, 1, 3, 1), (4, 3, 2, 1, 2), (3, 1, 4, 2, 3), (8, 2, 2, 1, 4), (2, 3, 1, 1, 1))
    for (dp, tp, pp, cp, ep), node in product(sizes, (2, 3, 4, 6, 8, 12)):
        layout, machine = TrainingLayout(dp, tp, pp, cp, ep), replace(A100, ranks_per_node=node)
        mesh = replace(layout.mesh, nodes=tuple(rank // node for rank in range(layout.ranks)))
        times = ModelPlan(SMALL, layout, 24, machine)
        for kind, axis in axes.items():
            assert (times.link(kind) == NETWORK) == mesh.crosses(axis), (kind, layout, node)


def test_rings_and_exchanges_share_the_cards_of_a_node() -> None:
    """The rings that enter a node, counted in the mesh; and in an exchange all that its ranks receive."""
    for (dp, tp, ep), node in product(((24, 1, 6), (12, 2, 6), (24, 1, 3), (16, 1, 16), (9, 2, 3)), (4, 8)):
        machine = replace(A100, ranks_per_node=node, inter=dict.fromkeys(KINDS, Link(1e-6, 1.0)))
        layout = TrainingLayout(dp, tp, ep=ep)
        times = ModelPlan(replace(SMALL, experts=ep, topk=1), layout, dp, machine)
        lines = [[rank // node for rank in line] for line in layout.mesh.lines("ep")]
        away = max(sum(x != y for x in line for y in line) / ep / (ep - 1) for line in lines)
        assert times.transfer("experts", 1) == pytest.approx(node * away), (layout, node)
        # a line along cp lies where one of experts does, and its ranks are a ring
        times = ModelPlan(SMALL, TrainingLayout(dp // ep, tp, cp=ep), dp, machine)
        entering = [y for line in lines for x, y in zip([line[-1], *line], line, strict=False) if x != y]
        most = max(map(entering.count, entering))
        assert most <= times.transfer("context", 1) <= (2 if dp > ep else 1) * most, (layout, node)


def test_gradients_of_one_stage_are_reduced_behind_the_backward_pass() -> None:
    """On GPUs, behind all layers but the first; with several stages, and on hosts, after them."""
    network = replace(A100, inter=dict.fromkeys(KINDS, Link(1e-6, 1e-6)), ranks_per_node=1)
    for zero, pp, m in ((0, 1, 1), (1, 1, 4), (3, 1, 4), (0, 2, 1), (2, 2, 4)):
        layout = TrainingLayout(dp=2, pp=pp, zero=zero)
        for machine in (network, replace(network, device=HOST, overlap=0.5)):
            plan = ModelPlan(SMALL, layout, 2 * m, machine)
            moving = (1 - machine.overlap) * plan.transfer("gradients", 4 * plan.words["gradients"])
            hidden = (m if zero > 1 else 1) * (SMALL.layers - 1) * sum(plan.of_block["backward"].values())
            hidden *= pp == 1 and machine.device != HOST
            assert moving > hidden, "the test is of what is left"
            assert plan.seconds["gradients"] == pytest.approx(moving - hidden), (layout, machine.device)
    fast = ModelPlan(GPT3, TrainingLayout(dp=2, microbatch=4), 8, A100)
    assert "gradients" in fast.words and "gradients" not in fast.seconds


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2 + 4 + 4), ("float32", 4 + 4 + 4)])
def test_gradients_that_are_added_apart(dtype: str, size: int) -> None:
    """Those of all microbatches but the first: one is read, the sum read and written, and stages wait for it."""
    for pp, m in ((1, 1), (1, 4), (2, 4)):
        plan, apart = (
            ModelPlan(GPT3, TrainingLayout(tp=2, pp=pp, dtype=dtype, apart=x), m, A100) for x in (False, True)
        )
        sums = (m - 1) * sum(x.words for x in plan.state_of(0)) * size / (2 * A100.copy_bandwidth)
        assert apart.seconds.get("sums", 0) == pytest.approx(sums) and "sums" not in plan.seconds
        assert apart.step_seconds - plan.step_seconds == pytest.approx((1 + float(plan.bubble)) * sums)
