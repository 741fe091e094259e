"""Parameters of every division, without a network, and gradients by a formula, of which each rank has an addend."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any
from zlib import crc32

import numpy as np

from pdgemm.parallel import AdamW, Buckets, Part, ShardedOptimizer

BLOCKS = 8  # blocks of the model; neighbouring blocks form a pipeline stage
SUM = "sum"


@cache
def divisions() -> dict[str, tuple[tuple[int, ...], dict[str, Any]]]:
    """Shape and division of each parameter; "BLOCK/NAME" belongs to one block, the others to both ends of the model.

    No number of ranks from 2 to 8 divides all of them, and some ranks have no elements of some.
    """
    whole: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
        "table": ((7, 5), {"tp": 0, "tied": True}),
        "positions": ((3, 5), {"tp": SUM, "tied": True}),
    }
    for block in range(BLOCKS):
        whole |= (
            {
                f"{block}/experts": ((5, 3, 2), {"ep": 0, "tp": SUM if block % 4 == 1 else None}),
                f"{block}/rows": ((3 + block, 5), {"tp": 0}),
            }
            if block % 2
            else {
                f"{block}/norm": ((5,), {"tp": SUM}),
                f"{block}/columns": ((5, 2 + block), {"tp": 1}),
                f"{block}/bias": ((4,), {}),
            }
        )
    return whole


def names_of(mesh: Any, rank: int) -> list[str]:
    """Return the parameters of the pipeline stage of a rank, in the order of the forward pass."""
    stage, stages = mesh.index("pp", rank), mesh.pp
    blocks = range(BLOCKS * stage // stages, BLOCKS * (stage + 1) // stages)
    ends = [x for x in divisions() if "/" not in x] if stage in (0, stages - 1) else []
    inner = [x for x in divisions() if "/" in x and int(x.split("/")[0]) in blocks]
    return [*ends, *inner] if stage == 0 else [*inner, *ends]


@cache
def values(name: str, *numbers: int) -> np.ndarray:
    """Return the initial values of a whole parameter, or its gradient in a step and microbatch.

    They are multiples of 1/64, so that sums of gradients, and of their squares, have the same bits in any order.
    """
    rng = np.random.default_rng([crc32(name.encode()), *numbers])
    x: np.ndarray = np.round(64 * rng.standard_normal(divisions()[name][0])) / 64
    return x


def parts(mesh: Any) -> dict[str, Any]:
    return {x: Part(values(x), **divisions()[x][1]) for x in names_of(mesh.shape, mesh.rank)}


def addend(mesh: Any, name: str, step: int, microbatch: int) -> np.ndarray:
    """Return this rank's addend of a gradient: of n addends, about 1/n of it and noise that cancels in the sum."""
    division = divisions()[name][1]
    experts = "ep" in division
    axes = ["ends"] * division.get("tied", False) + ["edp" if experts else "dp", "cp"]
    axes += ["tp"] * (experts or division.get("tp") == SUM)
    index, length = mesh.index("+".join(axes)), mesh.length("+".join(axes))
    noise = [values(name, step, microbatch, 7, at % length) for at in (index, index + 1)]
    whole = values(name, step, microbatch)
    share = np.floor(64 * whole / length) / 64
    whole = (share if index else whole - (length - 1) * share) + (noise[0] - noise[1])
    part: np.ndarray = whole[window(mesh.shape, mesh.rank, name)]
    return part


def window(mesh: Any, rank: int, name: str) -> tuple[slice, ...]:
    """Return the window of a rank if it is divided into blocks of ceil(n/P)."""
    shape, division = divisions()[name]
    ranges = [slice(0, n) for n in shape]
    for axis in ("tp", "ep"):
        if isinstance(at := division.get(axis), int):
            block = -(-shape[at] // mesh.length(axis))
            start = block * mesh.index(axis, rank)
            ranges[at] = slice(min(start, shape[at]), min(start + block, shape[at]))
    return tuple(ranges)


def meshes(size: int) -> Iterator[dict[str, int]]:
    """Yield the sizes of all meshes of this many ranks that have at most as many stages as blocks."""
    for dp in range(1, size + 1):
        for tp in range(1, size // dp + 1):
            for pp in range(1, min(BLOCKS, size // dp // tp) + 1):
                cp, rest = divmod(size, dp * tp * pp)
                for ep in (x for x in range(1, dp + 1) if dp % x == 0 and rest == 0):
                    yield {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "ep": ep}


def run(
    mesh: Any,
    steps: int,
    first: int = 0,
    microbatches: int = 1,
    clip: float | None = 3.0,
    state: Any = None,
    chunks: int = 1,
    rule: Any = None,
    **how: Any,
) -> tuple[list[float], Any]:
    """Take steps of a rule, by default AdamW; return the norms and the optimizer.

    state : called with the optimizer before the steps.   chunks : of parameters, with passes; some may be empty.
    """
    own = parts(mesh)
    model = [{name: own[name] for name in some} for some in np.array_split([*own], chunks)] if chunks > 1 else own
    buckets = Buckets(mesh, model, microbatches=microbatches, **how)
    optimizer = ShardedOptimizer(buckets, rule or AdamW(), decays=lambda name: not name.endswith("bias"))
    if state:
        state(optimizer)
    return [one_step(optimizer, step, clip).norm for step in range(first, steps)], optimizer


def one_step(optimizer: Any, step: int, clip: float | None = 3.0) -> Any:
    buckets, whole = optimizer.buckets, optimizer.buckets.layouts.whole
    chunks = range(1 + whole.parameters[-1].chunk)
    passes = [(chunk, microbatch) for chunk in chunks for microbatch in range(whole.microbatches)]
    for chunk, _ in passes:
        with buckets.forward(chunk):
            for name in (x.name for x in whole.parameters if x.chunk == chunk):
                own = window(buckets.mesh.shape, buckets.mesh.rank, name)
                x = buckets.parameters[name]
                assert x.shape == values(name)[own].shape and np.isfinite(x).all()
    for chunk, microbatch in sorted(passes, key=lambda x: -x[0]):
        with buckets.backward(chunk):
            for name in (x.name for x in whole.parameters[::-1] if x.chunk == chunk):
                assert np.isfinite(buckets.parameters[name]).all()
                buckets.gradients[name] += addend(buckets.mesh, name, step, microbatch)
                buckets.ready(name)
    return optimizer.step(0.01, clip)


def own_values(buckets: Any) -> dict[str, np.ndarray]:
    """Return copies of this rank's parts of the parameters."""
    with buckets.forward():
        return {name: buckets.parameters[name].copy() for name in buckets.parameters}
