"""What a machine takes for a message, a word, a copied byte and a flop: the alpha-beta-gamma model on two levels."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, lru_cache
from math import exp, log
from os import environ
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
import numpy as np
from msgspec import Meta

from pdgemm.errors import ArgumentError
from pdgemm.model.formulas import gemm_flops
from pdgemm.support.files import read
from pdgemm.support.json_input import Count, Positive, converted, decoded, plain

KINDS = ("ibcast", "ring", "shift", "reduce", "exchange")  # how words travel
Share = Annotated[float, Meta(ge=0, le=1)]
Cost = Annotated[float, Meta(ge=0, le=1e6)]  # seconds of a step or a call


@dataclass(frozen=True)
class Link:
    """alpha : seconds of a message.   beta : seconds of a byte."""

    alpha: Positive
    beta: Positive


def _links(*figures: tuple[float, float]) -> dict[str, Link]:
    """Alpha and beta of each of KINDS."""
    return {kind: Link(*each) for kind, each in zip(KINDS, figures, strict=True)}


@dataclass(frozen=True)
class Machine:
    """Times of one machine; the defaults are of an ordinary cluster, `pdgemm calibrate` measures them.

    ranks_per_node : ranks that share memory and one way to the network; None: all ranks are on one node.
    intra  : links inside a node, one for each kind of transfer.
    inter  : between nodes; a byte takes beta seconds of the node, whose ranks share its bandwidth.
    gamma  : real flops per second of a rank by type and by the smallest dimension of a product, without `copy`.
    copy   : bytes per second that a rank packs, copies or adds up; so does BLAS with the operands of a product.
    fresh  : bytes per second of new memory that a rank touches for the first time.
    overlap: which part of a transfer is hidden behind a product that takes as long, 0 to 1.
    step   : seconds that each panel costs beside its transfers and its product.
    call   : seconds that each call costs.
    """

    name: str = "default"
    ranks_per_node: Count | None = None
    intra: Mapping[str, Link] = field(
        default_factory=lambda: _links((2e-6, 2e-10), (2e-6, 2e-10), (1e-6, 2e-10), (2e-6, 4e-10), (1e-6, 4e-10))
    )
    inter: Mapping[str, Link] = field(
        default_factory=lambda: _links((5e-6, 1e-10), (5e-6, 1e-10), (3e-6, 8e-11), (5e-6, 1e-10), (3e-6, 1e-10))
    )
    gamma: Mapping[str, Mapping[Count, Positive]] = field(
        default_factory=lambda: {
            "float32": {8: 1.2e10, 32: 4e10, 128: 8e10, 512: 1e11},
            "float64": {8: 6e9, 32: 2e10, 128: 4e10, 512: 5e10},
            "complex64": {8: 2e10, 32: 5e10, 128: 8e10, 512: 1e11},
            "complex128": {8: 1e10, 32: 2.5e10, 128: 4e10, 512: 5e10},
        }
    )
    copy: Positive = 4e9
    fresh: Positive = 2e9
    overlap: Share = 0.5
    step: Cost = 2e-5
    call: Cost = 2e-4

    def __post_init__(self) -> None:
        converted(plain({x.name: getattr(self, x.name) for x in fields(self)}), _Figures, "not a machine")
        for links in (self.intra, self.inter):
            if set(links) != set(KINDS):
                raise ArgumentError(f"a machine has one Link each for {', '.join(KINDS)}, got {', '.join(links)}")
        if "float32" not in self.gamma or not all(self.gamma.values()):
            raise ArgumentError(
                f"a machine has rates for float32 at least, which stand for other types, got {', '.join(self.gamma)}"
            )

    def __hash__(self) -> int:
        return hash((self.name, self.ranks_per_node, self.copy, self.fresh, self.overlap, self.step, self.call))

    def rate(self, dtype: str, *dimensions: int) -> float:
        """Flops per second of a local product; between measured sizes on a line in log-log scale."""
        table = self.gamma.get(dtype) or self.gamma["float32"]  # int8 numbers are multiplied as float32
        sizes = sorted(table)
        size = max(1, min(dimensions))
        if size >= sizes[-1]:
            return table[sizes[-1]]
        if size <= sizes[0]:
            return table[sizes[0]] * size / sizes[0]
        high = bisect_left(sizes, size)
        lo, hi = sizes[high - 1], sizes[high]
        at = log(size / lo) / log(hi / lo)
        return exp((1 - at) * log(table[lo]) + at * log(table[hi]))

    def multiply(self, dtype: np.dtype, work: tuple[int, int, int], at_once: tuple[int, int, int]) -> float:
        """Seconds of a local product in pieces of the sizes `at_once`: BLAS copies A and B of each and updates C."""
        m, n, k = work
        if not m * n * k:
            return 0.0
        flops = gemm_flops(m, n, k, dtype.kind == "c")
        return flops / self.rate(str(dtype), *at_once) + touched(work, at_once) * dtype.itemsize / self.copy

    def least(self, dtype: np.dtype, mnk: tuple[int, int, int], ranks: int) -> float:
        """Seconds that some rank needs for its share of a product, however it is shared.

        Of all blocks with so many multiplications BLAS goes through the fewest words of one that is nearest to a cube.
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
        return flops / self.rate(str(dtype), *mnk) + (a * b + b * c + c * a) * dtype.itemsize / self.copy

    def transfer(self, kind: str, words: float, messages: float, itemsize: int, stride: int, length: int) -> float:
        """Seconds in which a rank receives so much along one direction of a grid (see `timing.Transfer`).

        Nodes hold consecutive ranks.
        """
        away = self.away(stride, length)
        if kind == "shared":  # what is not read in place goes around the nodes
            kind, away = "ring", 1.0
        elif kind in ("ipc", "nccl"):
            kind = "ring"
        near, far = self.intra[kind], self.inter[kind]
        sharing = self.ranks_per_node or 1
        near_seconds = messages * near.alpha + words * itemsize * near.beta
        far_seconds = messages * far.alpha + words * itemsize * far.beta * sharing
        return (1 - away) * near_seconds + away * far_seconds

    @staticmethod
    def hops(kind: str, length: int) -> int:
        """Ranks that a panel passes through until the last one of a direction has it; later panels follow behind."""
        if kind == "ring":
            return max(1, length - 1)
        return max(1, (length - 1).bit_length()) if kind == "ibcast" else 1

    def pipeline(self, computing: float, moving: float, steps: int, overlapped: bool, at_hand: bool = False) -> float:
        """Seconds of `steps` steps that take so long to compute and to move in all.

        at_hand : what the first step needs is there; else it has to arrive, and nothing hides that.
        """
        hidden = 0.0
        if overlapped and steps:
            later = (steps - 1) / steps
            hidden = self.overlap * min(computing * later, moving if at_hand else moving * later)
        return computing + moving - hidden + steps * self.step

    def away(self, stride: int, length: int) -> float:
        """Which part of a rank's partners along a direction are on other nodes."""
        if self.ranks_per_node is None or length < 2:
            return 0.0
        together = min(length, max(1, self.ranks_per_node // stride))
        return (length - together) / (length - 1)

    def __str__(self) -> str:
        """For people: microseconds, GB/s, GFLOP/s."""
        lines = [f"{self.name}: {self.ranks_per_node or 'all'} ranks on a node"]
        for level, links in (("inside a node", self.intra), ("between nodes", self.inter)):
            each = (f"{kind} {x.alpha * 1e6:.1f} us {1e-9 / x.beta:.1f} GB/s" for kind, x in links.items())
            lines.append(f"  {level}: {', '.join(each)}")
        for dtype, table in self.gamma.items():
            rates = ", ".join(f"{rate / 1e9:.1f} at {size}" for size, rate in sorted(table.items()))
            lines.append(f"  {dtype}: GFLOP/s {rates}")
        lines.append(
            f"  copy {self.copy / 1e9:.1f} GB/s, new memory {self.fresh / 1e9:.1f} GB/s, overlap {self.overlap:.2f}, "
            f"panel {self.step * 1e6:.0f} us, call {self.call * 1e6:.0f} us"
        )
        return "\n".join(lines)

    def as_json(self) -> str:
        return json.dumps(plain(self), indent=2)

    @classmethod
    def from_dict(cls, given: Any, what: str = "not a machine") -> Machine:
        """What `as_json` wrote; what is missing is as in the default.  Raises ArgumentError."""
        if isinstance(given, dict):
            default = plain(cls())
            tables = {name for name in ("intra", "inter", "gamma") if isinstance(given.get(name), dict)}
            given = {**given, **{name: {**default[name], **given[name]} for name in tables}}
        return converted(given, cls, what, exact=True)


_Figures = msgspec.defstruct(
    "Machine", [(x.name, get_type_hints(Machine, include_extras=True)[x.name]) for x in fields(Machine)]
)


def touched(work: tuple[int, int, int], at_once: tuple[int, int, int]) -> float:
    """Words of A, B and C that the pieces of a local product go through."""
    m, n, k = work
    return m * n * k * sum(1 / size for size in at_once)


@lru_cache(maxsize=8)
def on_nodes(machine: Machine, ranks_per_node: int | None) -> Machine:
    """The machine with so many ranks on a node."""
    return replace(machine, ranks_per_node=ranks_per_node)


@cache
def machine_at_hand(gpus: bool = False, staged: bool = False) -> Machine:
    """`load_machine()`, read once; for GPUs, whose messages are staged on the host or not, where it says nothing."""
    if gpus and not environ.get("PDGEMM_MACHINE"):
        return _gpus(staged)
    return load_machine()


def _gpus(staged: bool) -> Machine:
    """An ordinary cluster with GPUs: orders of magnitude, to choose by; nobody measured it."""
    alpha, near, far = (4e-5, 5e-11, 1e-10) if staged else (1.5e-5, 5e-12, 4e-11)
    rates = {"float32": 4e13, "float64": 4e13, "complex64": 4e13, "complex128": 4e13, "float16": 5e14, "bfloat16": 5e14}
    return Machine(
        name="GPUs",
        intra=_links(*[(alpha, near)] * len(KINDS)),
        inter=_links(*[(alpha, far)] * len(KINDS)),
        gamma={name: {64: 0.03 * rate, 256: 0.2 * rate, 1024: 0.7 * rate, 4096: rate} for name, rate in rates.items()},
        copy=1.5e12,
        fresh=1e12,
        overlap=0.9,
        step=6e-5,
        call=3e-4,
    )


def load_machine(path: str | Path | None = None) -> Machine:
    """The machine of a JSON file, by default of the file that PDGEMM_MACHINE names; without one, the default."""
    told = "" if path else environ.get("PDGEMM_MACHINE", "")
    path = path or told
    if not path:
        return Machine()
    named = f"machine file {path}{' (PDGEMM_MACHINE)' * bool(told)}"
    return Machine.from_dict(decoded(read(path, what=named), dict[str, Any], named), named)
