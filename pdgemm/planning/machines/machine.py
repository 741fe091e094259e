"""The alpha-beta-gamma model of a machine: times of messages inside and between nodes, of bytes, copies and flops."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, lru_cache
from math import exp, log
from os import environ, pathsep
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import msgspec
import numpy as np
from msgspec import Meta

from pdgemm.errors import ArgumentError
from pdgemm.local.arrays.device import Reach
from pdgemm.schedules.formulas import gemm_flops
from pdgemm.schedules.mover_registry import IPC, MOVERS, NCCL, by_messages
from pdgemm.support.files import read_file
from pdgemm.support.json_input import Count, Positive, converted, decoded, jsonable
from pdgemm.support.text import in_rate, in_seconds

KINDS = ("ibcast", "ring", "shift", "reduce", "exchange")  # kinds of transfers that are measured on every machine
Where = Literal["host", "cuda"]
HOST: Where = "host"
CUDA: Where = "cuda"
Share = Annotated[float, Meta(ge=0, le=1)]
Cost = Annotated[float, Meta(ge=0, le=1e6)]  # seconds of a panel or a call


@dataclass(frozen=True)
class Link:
    """A link: its latency `alpha`, in seconds, and its reciprocal bandwidth `beta`, in seconds per byte."""

    alpha: Positive
    beta: Positive


def _links(*figures: tuple[float, float]) -> dict[str, Link]:
    """Return the links of KINDS from the pair (alpha, beta) of each kind."""
    return {kind: Link(*each) for kind, each in zip(KINDS, figures, strict=True)}


@dataclass(frozen=True)
class Machine:
    """The parameters of a machine, which `pdgemm calibrate` measures; the defaults describe an ordinary cluster.

    ranks_per_node : ranks that share memory and a network interface; None: all ranks are on one node.
    device : the memory that holds the matrices, "host" or "cuda".
    staged : MPI does not take pointers to device memory, so its messages are staged through the host.
    intra  : links inside a node, one for each of KINDS, and for movers that were registered and measured; between
        GPUs also "ipc" and "nccl", if these were measured.
    inter  : links between nodes; beta is the time per byte of a whole node, because its ranks share its bandwidth.
    gamma  : real flops per second of a rank by type and by the smallest dimension of a product, copies not included.
    copy_bandwidth : bytes per second at which a rank packs, copies or reduces, and at which BLAS copies operands.
    first_touch_bandwidth : bytes per second when a rank writes newly allocated pages.
    overlap : the fraction of a transfer that is hidden behind a product of the same duration, 0 to 1.
    panel_overhead : seconds of each panel in addition to its transfers and its product.
    call_overhead : seconds of each call in addition to its panels.
    connected : the most ranks of a job among which MPI connects each pair; in larger jobs, the messages of an exchange
        are datagrams, which disturb each other.  None: any number.
    crowding : seconds per byte that each partner of a rank adds to an exchange of datagrams.
    peak   : the maker's flops per second of a rank at 16 bits, to which MFU refers; None: the largest rate of gamma.
    memory : bytes of a rank; None: unknown.
    """

    name: str = "default"
    ranks_per_node: Count | None = None
    device: Where = HOST
    staged: bool = False
    intra: Mapping[str, Link] = field(
        default_factory=lambda: _links((2e-6, 2e-10), (2e-6, 2e-10), (1e-6, 2e-10), (2e-6, 4e-10), (1e-6, 4e-10))
    )
    inter: Mapping[str, Link] = field(
        default_factory=lambda: _links((5e-6, 1e-10), (5e-6, 1e-10), (3e-6, 8e-11), (5e-6, 1e-10), (3e-6, 1e-10))
    )
    gamma: Mapping[str, Mapping[Count, Positive]] = field(
        default_factory=lambda: {
            "float32": {8: 1.2e10, 32: 4e10, 128: 9e10, 256: 1e11},
            "float64": {8: 6e9, 32: 2e10, 128: 4.5e10, 256: 5e10},
            "complex64": {8: 2e10, 32: 5e10, 128: 9e10, 256: 1e11},
            "complex128": {8: 1e10, 32: 2.5e10, 128: 4.5e10, 256: 5e10},
        }
    )
    copy_bandwidth: Positive = 4e9
    first_touch_bandwidth: Positive = 2e9
    overlap: Share = 0.5
    panel_overhead: Cost = 2e-5
    call_overhead: Cost = 2e-4
    connected: Count | None = None
    crowding: Cost = 0.0
    peak: Positive | None = None
    memory: Positive | None = None

    def __post_init__(self) -> None:
        converted(jsonable({x.name: getattr(self, x.name) for x in fields(self)}), _Figures, "not a machine")
        more = [x for x in (*by_messages(), IPC.name, NCCL.name) if x not in KINDS]
        for links in (self.intra, self.inter):
            if not set(KINDS) <= set(links) <= {*KINDS, *more}:
                raise ArgumentError(
                    f"a machine needs links for {', '.join(KINDS)}, and may have links for {', '.join(more)}; "
                    f"got {', '.join(links)}"
                )
        if "float32" not in self.gamma or not all(self.gamma.values()):
            raise ArgumentError(
                f"gamma needs rates for float32, which are used for missing types, too; got {', '.join(self.gamma)}"
            )

    def __hash__(self) -> int:
        return hash((self.name, self.ranks_per_node, self.copy_bandwidth, self.overlap, self.call_overhead))

    def rate(self, dtype: str, *dimensions: int) -> float:
        """Return the flops per second of a local product, interpolated between measured sizes in log-log scale.

        For sizes below the table, the rate is proportional to the size.
        """
        table = self.gamma.get(dtype) or self.gamma["float32"]  # int8 is multiplied as float32
        size, sizes = max(1, min(dimensions)), sorted(table)
        if size >= sizes[-1]:
            return table[sizes[-1]]
        if size <= sizes[0]:
            return table[sizes[0]] * size / sizes[0]
        high = bisect_left(sizes, size)
        lo, hi = sizes[high - 1], sizes[high]
        at = log(size / lo) / log(hi / lo)
        return exp((1 - at) * log(table[lo]) + at * log(table[hi]))

    def multiply(self, dtype: np.dtype, work: tuple[int, int, int], block_mnk: tuple[int, int, int]) -> float:
        """Return the seconds of a local product in blocks of `block_mnk`.

        For each block, BLAS copies its parts of A and B, and updates its part of C.
        """
        m, n, k = work
        if not m * n * k:
            return 0.0
        flops = gemm_flops(m, n, k, dtype.kind == "c")
        copied = touched(work, block_mnk) * dtype.itemsize
        return flops / self.rate(str(dtype), *block_mnk) + copied / self.copy_bandwidth

    def least(self, dtype: np.dtype, mnk: tuple[int, int, int], ranks: int) -> float:
        """Return a lower bound on the seconds in which the slowest rank computes its share, for any partition.

        For a given number of multiplications, BLAS accesses the fewest words if the block is nearly a cube.
        """
        m, n, k = mnk
        if not m * n * k:
            return 0.0
        left, sides = m * n * k / ranks, list[float]()
        for size, further in zip(sorted(mnk), (3, 2, 1)):
            sides.append(min(size, left ** (1 / further)))
            left /= sides[-1]
        a, b, c = sides
        flops = gemm_flops(m, n, k, dtype.kind == "c") / ranks
        return flops / self.rate(str(dtype), *mnk) + (a * b + b * c + c * a) * dtype.itemsize / self.copy_bandwidth

    def transfer(
        self, kind: str, words: float, messages: float, itemsize: int, stride: int, length: int, ranks: int
    ) -> float:
        """Return the seconds in which a rank receives words and messages along one dimension of a grid of `ranks`.

        Nodes are assumed to hold consecutive ranks; ranks along the dimension are `stride` apart.
        """
        mover = MOVERS.get(kind)
        # a relaying mover sends messages between nodes only; its other panels are read in place
        away = 1.0 if mover is not None and mover.relayed else self.away(stride, length, ranks)
        near, far = self.links(kind)
        sharing = self.ranks_per_node or 1
        near_seconds = messages * near.alpha + words * itemsize * near.beta
        far_seconds = messages * far.alpha + words * itemsize * far.beta * sharing
        return (1 - away) * near_seconds + away * far_seconds

    def crowded(self, words: Any, partners: Any, itemsize: int, ranks: int) -> Any:
        """Return the seconds that an exchange among `ranks` takes longer, as it is not `connected`; also for arrays.

        The messages of all partners of a rank are under way at once, and share the card with those of its node's other
        ranks; each disturbs all others, so p messages of b bytes on nodes of r ranks take b p (p + r) `crowding`.
        """
        if self.connected is None or ranks <= self.connected:
            return 0.0
        return self.crowding * words * itemsize * (partners + (self.ranks_per_node or 1))

    def links(self, kind: str) -> tuple[Link, Link]:
        """Return the links inside and between nodes; a mover that was not measured has the links of `Mover.link`."""
        near, far = self.intra.get(kind), self.inter.get(kind)
        return near or self.intra[MOVERS[kind].link], far or self.inter[MOVERS[kind].link]

    def pipeline(
        self, computing: float, moving: float, steps: int, overlapped: bool, first_panel_is_local: bool = False
    ) -> float:
        """Return the seconds of `steps` steps from the total seconds of computing and of moving panels.

        first_panel_is_local : the first step needs no transfer; otherwise its transfer is not overlapped.
        """
        hidden = 0.0
        if overlapped and steps:
            later = (steps - 1) / steps
            hidden = self.overlap * min(computing * later, moving if first_panel_is_local else moving * later)
        return computing + moving - hidden + steps * self.panel_overhead

    def away(self, stride: int, length: int, ranks: int) -> float:
        """Return the fraction of pairs of ranks of a line that are on different nodes, the largest of all lines.

        A line is `length` ranks, `stride` apart; each group of stride x length ranks has `stride` lines.  On nodes of
        8 ranks, groups of 6 may span two nodes: ranks 0 to 5 are on one node, but 6 to 11 are on two.
        """
        return _away(self.ranks_per_node, stride, length, ranks) if self.ranks_per_node and length > 1 else 0.0

    def __str__(self) -> str:
        """Return the parameters as text in microseconds, GB/s and GFLOP/s."""
        on = "" if self.device == HOST else f", on {self.device}{', messages staged through the host' * self.staged}"
        lines = [f"{self.name}: {self.ranks_per_node or 'all'} ranks on a node{on}"]
        for level, links in (("inside a node", self.intra), ("between nodes", self.inter)):
            each = (f"{kind} {x.alpha * 1e6:.1f} us {1e-9 / x.beta:.3g} GB/s" for kind, x in links.items())
            lines.append(f"  {level}: {', '.join(each)}")
        for name, table in self.gamma.items():
            rates = ", ".join(f"{rate / 1e9:.1f} at {size}" for size, rate in sorted(table.items()))
            lines.append(f"  {name}: GFLOP/s {rates}")
        lines.append(
            f"  copy {self.copy_bandwidth / 1e9:.1f} GB/s, first touch {self.first_touch_bandwidth / 1e9:.1f} GB/s, "
            f"overlap {self.overlap:.2f}, "
            f"panel {self.panel_overhead * 1e6:.0f} us, call {self.call_overhead * 1e6:.0f} us"
        )
        return "\n".join(lines)

    def as_json(self) -> str:
        return json.dumps(jsonable(self), indent=2)

    @classmethod
    def from_dict(cls, members: Any, what: str = "not a machine") -> Machine:
        """Return the machine with the members that `as_json` wrote; missing parameters have defaults.

        what : beginning of the message of the ArgumentError for wrong members.
        """
        if isinstance(members, dict):
            default = jsonable(cls())
            tables = {name for name in ("intra", "inter", "gamma") if isinstance(members.get(name), dict)}
            members = {**members, **{name: {**default[name], **members[name]} for name in tables}}
        return converted(members, cls, what, exact=True)


MACHINE = rb'^\{\s*"name": ".{0,200}?",\s*"ranks_per_node": '  # the beginning of a file of `as_json`
_Figures = msgspec.defstruct(
    "Machine", [(x.name, get_type_hints(Machine, include_extras=True)[x.name]) for x in fields(Machine)]
)


def touched(work: tuple[int, int, int], block_mnk: tuple[int, int, int]) -> float:
    """Return the words of A, B and C that are accessed by a local product in blocks of `block_mnk`."""
    m, n, k = work
    return m * n * k * sum(1 / size for size in block_mnk)


@lru_cache(maxsize=1 << 12)
def _away(node: int, stride: int, length: int, ranks: int) -> float:
    """Return `Machine.away` for nodes of `node` ranks."""
    group = stride * length
    groups = np.arange(max(1, ranks // group))[:, None] * group
    firsts = np.unique((groups + np.arange(stride)) % node)[:, None]  # the place of a line's first rank on its node
    ends = np.arange(0, group + 2 * node, node)  # the ends of nodes, from the node where a line begins
    counts = np.diff((-((firsts - ends) // stride)).clip(0, length))  # ranks of a line on each node
    return 1 - float((counts * (counts - 1)).sum(axis=1).min()) / (length * (length - 1))


@lru_cache(maxsize=8)
def on_nodes(machine: Machine, ranks_per_node: int | None) -> Machine:
    """Return the machine with another number of ranks per node."""
    return replace(machine, ranks_per_node=ranks_per_node)


@lru_cache(maxsize=8)
def with_reach(machine: Machine, reach: Reach) -> Machine:
    """Return a machine with GPUs whose links are those by which the ranks of a grid reach each other's memory."""
    reached = {IPC.name: bool(reach.reads), NCCL.name: reach.nccl}
    links = [
        {kind: machine.links(kind)[at] for kind in dict.fromkeys((*known, *reached)) if reached.get(kind, True)}
        for at, known in enumerate((machine.intra, machine.inter))
    ]
    return replace(machine, staged=reach.staged, intra=links[0], inter=links[1])


@cache
def machine_at_hand(gpus: bool = False, staged: bool = False) -> Machine:
    """Return the machine that PDGEMM_MACHINE names, read once; by default an ordinary cluster, with or without GPUs.

    staged : messages between GPUs of the default cluster are staged through the host.
    """
    return named_by_variable(gpus) or (gpu_cluster(staged) if gpus else Machine())


def named_by_variable(gpus: bool) -> Machine | None:
    """Return the first machine with GPUs (if not `gpus`, without GPUs) in the files that PDGEMM_MACHINE names.

    None if there is no such machine.
    """
    return next((machine for machine in _named() if (machine.device == CUDA) == gpus), None)


def gpu_cluster(staged: bool) -> Machine:
    """Return an ordinary cluster with GPUs: unmeasured orders of magnitude, for choosing between algorithms."""
    alpha, near, far = (4e-5, 5e-11, 1e-10) if staged else (1.5e-5, 5e-12, 4e-11)
    rates = {"float32": 4e13, "float64": 4e13, "complex64": 4e13, "complex128": 4e13, "float16": 5e14, "bfloat16": 5e14}
    return Machine(
        name="GPUs",
        device=CUDA,
        staged=staged,
        intra=_links(*[(alpha, near)] * len(KINDS)),
        inter=_links(*[(alpha, far)] * len(KINDS)),
        gamma={name: {64: 0.03 * rate, 256: 0.2 * rate, 1024: 0.7 * rate, 4096: rate} for name, rate in rates.items()},
        copy_bandwidth=1.5e12,
        first_touch_bandwidth=1e12,
        overlap=0.9,
        panel_overhead=6e-5,
        call_overhead=3e-4,
    )


def load_machine(path: str | Path | None = None) -> Machine:
    """Return the machine of a JSON file; by default of the first file in PDGEMM_MACHINE, or else the built-in one."""
    return _loaded(path) if path else next(_named(), Machine())


def _named() -> Iterator[Machine]:
    paths = environ.get("PDGEMM_MACHINE", "").split(pathsep)
    return (_loaded(path, " (PDGEMM_MACHINE)") for path in paths if path)


def _loaded(path: str | Path, by: str = "") -> Machine:
    named = f"machine file {path}{by}"
    return Machine.from_dict(decoded(read_file(path, what=named), dict[str, Any], named), named)


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
