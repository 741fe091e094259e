"""Programs are planned: their code runs on matrices without elements, and their operations are recorded as stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass, replace
from typing import Any

import numpy as np

from pdgemm.algorithms.product_options import Streamed
from pdgemm.grids.planned_grid import Draft, PlannedGrid
from pdgemm.local.arrays import device as devices
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.planning.machines.machine import Machine, machine_at_hand, on_nodes
from pdgemm.planning.program import Program


def program_of(
    function: Callable[..., Any],
    /,
    *arguments: Any,
    machine: Machine | None = None,
    iterations: int | None = None,
    **options: Any,
) -> Program:
    """Return the stages of `function(*arguments, **options)` as a program.  Local: nothing is sent.

    arguments  : the arguments of the function: matrices, values with matrices in their fields, and others.
    machine    : the machine of the time model; by default the machine at hand.
    iterations : the number of iterations to plan if it depends on the elements; None: as many as most matrices need.
    Raises the errors of the function, on this rank.
    """
    matrix = matrices_in(*arguments, *options.values())[0][0]
    on_device = isinstance(matrix, DistMatrix) and matrix.device != devices.HOST
    where = machine or on_nodes(machine_at_hand(on_device), matrix.grid.ranks_per_node)
    draft, known = Draft(machine, iterations), dict[int, DistMatrix]()
    operands = [_without_elements(x, draft, known) for x in arguments]
    function(*operands, **{name: _without_elements(x, draft, known) for name, x in options.items()})
    return Program(tuple(draft.stages), matrix.grid.size, where)


def matrices_in(*arguments: Any) -> tuple[list[DistMatrix | Streamed], list[np.ndarray]]:
    """Return the matrices and the NumPy arrays among some arguments and the fields of the arguments."""
    parts = [part for x in arguments for part in (_fields(x).values() or (x,))]
    matrices = [x for x in parts if isinstance(x, DistMatrix) or hasattr(x, "planned_on")]
    return matrices, [x for x in parts if isinstance(x, np.ndarray)]


def _fields(x: Any) -> dict[Any, Any]:
    """Return the fields of a tuple, or of a dataclass such as the factors of a matrix; {} for other values."""
    return dict(enumerate(x)) if isinstance(x, tuple) else vars(x) if is_dataclass(x) else {}


def _without_elements(x: Any, draft: Draft, known: dict[int, DistMatrix]) -> Any:
    """Return an argument with its matrices replaced by matrices without elements.  Local.

    known : the replacements so far, by id(matrix): a matrix that is passed twice stays one matrix.
    """
    if isinstance(x, DistMatrix):
        if id(x) not in known:
            nothing, grid = devices.empty((0, 0), x.dtype, x.order, devices.of(x.stored)), PlannedGrid(x.grid, draft)
            how = x.order, x.conjugated, x.shared, x.mpi_addressable
            known[id(x)] = DistMatrix(nothing, grid, x.distribution, *how)
        return known[id(x)]
    if hasattr(x, "planned_on"):
        return x.planned_on(PlannedGrid(x.grid, draft))
    parts = {name: _without_elements(y, draft, known) for name, y in _fields(x).items() if matrices_in(y)[0]}
    if not parts:
        return x
    if isinstance(x, tuple):
        return tuple(parts.get(at, y) for at, y in enumerate(x))
    return replace(x, **parts)
