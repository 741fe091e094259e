"""Only impossible figures of a machine are reported."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdgemm.planning.machines.machine import CUDA, Link, Machine, doubts, gpu_cluster, impossible_figures, is_possible

GOOD = Machine()


@pytest.mark.parametrize("machine", [GOOD, gpu_cluster(False), gpu_cluster(True)])
def test_ordinary_machines_are_not_doubted(machine: Machine) -> None:
    assert doubts(machine) == impossible_figures(machine) == []
    assert all(is_possible(x, machine.device) for links in (machine.intra, machine.inter) for x in links.values())


@pytest.mark.parametrize(
    ("figures", "told"),
    [
        (
            {"intra": {**GOOD.intra, "exchange": Link(3e-6, 1e-13)}},
            "exchange inside a node: 10000 GB/s is more than any memory has (2000)",
        ),
        (
            {"inter": {**GOOD.inter, "shift": Link(1e-8, 1e-10)}},
            "shift between nodes: a latency of 10 ns is shorter than any memory's",
        ),
        ({"copy_bandwidth": 3e12}, "copy: 3000 GB/s is more than any memory has (2000)"),
        ({"first_touch_bandwidth": 2.5e12}, "first touch: 2500 GB/s is more than any memory has (2000)"),
        (
            {"gamma": {**GOOD.gamma, "float64": {8: 3e9, 32: 49e9, 512: 8.7e9}}},
            "float64: 8.7 GFLOP/s at 512, but 49 GFLOP/s at 32: on an idle machine rates do not fall with the size",
        ),
        ({"call_overhead": 0.0154}, "a call of a product takes 15 ms: its ranks compete for cores"),
    ],
)
def test_impossible_and_implausible_figures_are_reported(figures: dict[str, Any], told: str) -> None:
    machine = replace(GOOD, **figures)
    never = not {"gamma", "call_overhead"} & {*figures}
    assert (impossible_figures(machine), doubts(machine)) == (([told], []) if never else ([], [told]))
    links = [*machine.intra.values(), *machine.inter.values()]
    assert all(is_possible(x, machine.device) for x in links) == (not {"intra", "inter"} & {*figures})


def test_a_gpu_may_copy_faster_than_a_host() -> None:
    fast = replace(gpu_cluster(False), copy_bandwidth=8e12)
    assert (
        impossible_figures(fast) == [] != impossible_figures(replace(fast, copy_bandwidth=2e13)) and fast.device == CUDA
    )
