"""The options of a product as a caller gives them, and the problem that they pose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, get_args

from pdgemm.algorithms.transport import nodes, outside_node_memory, reached
from pdgemm.arrays import device as devices
from pdgemm.arrays.integers import as_name
from pdgemm.errors import ArgumentError, DeviceError
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.matrix.argument_checks import accumulation, as_optional, as_shape
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.model.machine import Machine, machine_at_hand, on_nodes
from pdgemm.model.mover_registry import NCCL, SHARED
from pdgemm.names import Protection
from pdgemm.planning.algorithm_registry import choices, known
from pdgemm.planning.planner import panel_width, panels_ahead
from pdgemm.planning.problem import Problem, nothing_to_multiply
from pdgemm.schedules.staircase import TriangleName


class Streamed(Protocol):
    """A matrix that is not in memory, and does itself what `pdgemm` does with it (`pdgemm.StoredMatrix`)."""

    __pdgemm__: Callable[..., DistMatrix]


class Options(NamedTuple):
    """Holds the options of a plan, as given by the caller."""

    algorithm: str
    shape: tuple[int, int] | None
    layers: int | None
    lookahead: int | None
    panel_width: int | None
    memory_limit: int | None
    mover: str
    accumulate_dtype: Any
    compute_type: Any
    machine: Machine | None
    protect: str | None = None
    triangle: TriangleName = ""  # of C that is computed


def problem_of(
    A: DistMatrix, B: DistMatrix, C: DistMatrix, asked: Options, beta_is_zero: bool, nothing: bool, shared: bool
) -> Problem:
    """Return the problem to plan.  nothing : C := beta C only.   shared : ranks may read each other's panels."""
    if not known(asked.algorithm):
        raise ArgumentError(f"algorithm {asked.algorithm!r} is not one of {', '.join(choices())}")
    mover, reach = reached(asked.mover, shared, A, B, C)
    accumulate, compute = accumulation(A.dtype, B.dtype, C.dtype, asked.accumulate_dtype, asked.compute_type)
    a, b, c = (x.layout_in(A.grid) for x in (A, B, C))
    algorithm, shape, layers = asked.algorithm, as_shape(asked.shape), as_optional(asked.layers, "layers", 1)
    width, on_device = as_optional(asked.panel_width, "panel_width", 1), A.device != devices.HOST
    machine = _machine(asked.machine, A.grid, on_device, reach.staged)
    if nothing:
        a, b = nothing_to_multiply(a, b, c)
        algorithm, shape, layers = "summa", c.distribution.grid_shape, 1
    return Problem(
        a,
        b,
        c,
        size=A.grid.size,
        beta_is_zero=beta_is_zero,
        accumulate=accumulate,
        width=panel_width(width, accumulate, machine, on_device, bool(asked.triangle)),
        lookahead=panels_ahead(as_optional(asked.lookahead, "lookahead", 0), machine, on_device),
        mover=mover,
        algorithm=algorithm,
        shape=shape,
        layers=layers,
        memory_limit=as_optional(asked.memory_limit, "memory_limit", 0),
        width_asked=width is not None,
        shared=bool(reach.reads),
        reads=reach.reads or SHARED.name,
        outside_node_memory=outside_node_memory(A, B) if reach.reads and not nothing else "",
        nodes=nodes(A.grid) if reach.reads else (),
        device=A.device if on_device else "",
        staged=reach.staged and mover != NCCL.name,
        compute=compute,
        triangle=asked.triangle,
        protect=as_protection(asked.protect, on_device),
        machine=machine,
    )


def as_protection(asked: object, on_device: bool) -> str:
    """Return how products are compared with checksums, "" for not at all.  Raises DeviceError or ArgumentError."""
    if asked is None:
        return ""
    if on_device:
        raise DeviceError(f"protect={asked!r}: products on GPUs are not compared with checksums yet")
    return as_name(asked, "protect", get_args(Protection))


def _machine(asked: object, grid: ProcessGrid, gpus: bool, staged: bool) -> Machine:
    """Return the given machine, else the machine file or default with the ranks per node of the grid."""
    if asked is None:
        return on_nodes(machine_at_hand(gpus, staged), grid.ranks_per_node)
    if not isinstance(asked, Machine):
        raise ArgumentError(f"machine must be a Machine, got {type(asked).__name__}")
    return asked
