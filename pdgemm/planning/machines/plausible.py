"""Detect implausible figures of a machine that was busy during the measurement, or whose clock was too coarse."""

from __future__ import annotations

from pdgemm.planning.machines.machine import CUDA, HOST, Link, Machine, Where
from pdgemm.support.text import in_rate, in_seconds

FASTEST = {HOST: 2e12, CUDA: 1e13}  # bytes per second: no memory of two sockets with HBM, or of one GPU, is faster
SOONEST = 5e-8  # seconds of a message: a cache line takes longer from one core to another
FALLS = 0.75  # least ratio of the rate at the largest size to the best rate: BLAS is not slower at larger sizes
LONGEST_CALL = 5e-3  # seconds of an empty product: ranks with a core each need a tenth of this time at most


def is_possible(link: Link, device: Where) -> bool:
    """Is the bandwidth of a link at most `FASTEST`, and its latency at least `SOONEST`?"""
    return 1 / link.beta <= FASTEST[device] and link.alpha >= SOONEST


def impossible_figures(machine: Machine) -> list[str]:
    """Return a line for each figure that is impossible on any machine."""
    lines, fastest = [], FASTEST[machine.device]
    links = [(f"{kind} inside a node", link) for kind, link in machine.intra.items()]
    links += [(f"{kind} between nodes", link) for kind, link in machine.inter.items()]
    rates = [(name, 1 / link.beta) for name, link in links]
    for name, rate in (*rates, ("copy", machine.copy_bandwidth), ("first touch", machine.first_touch_bandwidth)):
        if rate > fastest:
            lines.append(f"{name}: {rate / 1e9:.0f} GB/s is more than any memory has ({fastest / 1e9:.0f})")
    for name, link in links:
        if link.alpha < SOONEST:
            lines.append(f"{name}: a latency of {in_seconds(link.alpha)} is shorter than any memory's")
    return lines


def doubts(machine: Machine) -> list[str]:
    """Return a line for each figure that is possible, but only on a busy machine."""
    lines = []
    for dtype, table in machine.gamma.items():
        sizes = sorted(table)
        best = max(sizes, key=lambda size: table[size])
        last = sizes[-1]
        if table[last] < FALLS * table[best]:
            lines.append(
                f"{dtype}: {in_rate(table[last])} at {last}, but {in_rate(table[best])} at {best}: on an idle "
                "machine rates do not fall with the size"
            )
    if machine.call_overhead > LONGEST_CALL:
        lines.append(f"a call of a product takes {in_seconds(machine.call_overhead)}: its ranks compete for cores")
    return lines
