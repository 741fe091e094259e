"""The operands and the options of a product as a caller passes them, and the planning problem that they define."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Protocol, get_args

import numpy as np

import pdgemm
from pdgemm.algorithms.epilogue import Epilogue, ending_of
from pdgemm.errors import ArgumentError, DeviceError, DTypeError, LayoutError
from pdgemm.grids.distribution import Distribution
from pdgemm.grids.layout import Order
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.local.arrays import device as devices, dtypes
from pdgemm.local.arrays.arguments import as_name, as_optional, as_shape, op_letter
from pdgemm.local.arrays.device import REMEDY, Device, Reach
from pdgemm.local.arrays.emulation import EMULATIONS
from pdgemm.matrix import argument_checks as checks
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import new_array
from pdgemm.names import Protection, Transpose
from pdgemm.planning.algorithm_registry import algorithm_choices, is_algorithm
from pdgemm.planning.machines.machine import Machine, machine_at_hand, on_nodes
from pdgemm.planning.planner import panel_width, panels_ahead
from pdgemm.planning.problem import Problem, nothing_to_multiply
from pdgemm.schedules.mover_registry import AUTO, BY_MPI, MOVERS, NCCL, POLICIES, RING, SHARED, STAGED, mover_choices
from pdgemm.schedules.products.scales import Scales
from pdgemm.schedules.schedule import Schedule
from pdgemm.schedules.staircase import TriangleName
from pdgemm.support.text import op_name

_ON_HOST, _BY_MESSAGES = Reach(SHARED.name, staged=False), Reach("", staged=False)


def mover_and_access(mover: object, shared: bool, A: DistMatrix, *others: DistMatrix) -> tuple[str, Reach]:
    """Return the mover to plan with, and the access that this mover has to the panels of other ranks.

    shared : ranks may read each other's panels in place.
    """
    if not isinstance(mover, str) or (mover not in MOVERS and mover not in POLICIES):
        raise ArgumentError(f"mover {mover!r} is not one of {', '.join(mover_choices())}")
    device, alone, entry = devices.of(A.stored), A.grid.size == 1, MOVERS.get(mover)
    sends = entry is not None and entry.by == "messages"
    if device is None:
        reach = _ON_HOST if shared and not alone and A.grid.shares_memory else _BY_MESSAGES
        if entry and not entry.on_host:
            raise ArgumentError(f"mover {mover!r} is for matrices on a device, these are on the host")
    else:
        reach = device.reach(A.grid)
        managed = not all(x.mpi_addressable for x in (A, *others))
        reach = reach._replace(staged=reach.staged or managed, nccl=reach.nccl and not managed)
        if not shared or A.grid.ranks_per_node is not None:
            reach = reach._replace(reads="")
    if alone:
        return mover if sends else AUTO, reach._replace(reads="") if reach.reads else reach
    if entry and entry.reads:
        if not reach.reads:
            raise ArgumentError(f"mover {mover!r} requires ranks that share memory with others of their node")
        return mover, reach._replace(reads=mover)
    if entry is NCCL and not reach.nccl:
        raise ArgumentError(f"mover {mover!r} requires cupy.cuda.nccl and one GPU per rank: choose another mover")
    if device and (mover == BY_MPI or sends) and reach.staged:
        raise ArgumentError(
            f"mover {mover!r} passes pointers to device memory to MPI, but {_untaken(device, A.grid)}: "
            f"use mover={STAGED.name!r}"
        )
    if mover == AUTO:
        return (NCCL.name if reach.nccl and not reach.reads else AUTO), reach
    by_message = {BY_MPI: (AUTO, False), STAGED.name: (RING.name, True)}
    mover, staged = by_message.get(mover, (mover, reach.staged))
    return mover, reach._replace(reads="", staged=staged)


def _untaken(device: Device, grid: ProcessGrid) -> str:
    """Return why MPI cannot access the memory of the matrices."""
    reach = device.reach(grid)
    if not reach.staged:
        return "a matrix is in managed memory, or was allocated by cudaMallocAsync"
    return f"this MPI library is not GPU-aware ({reach.why}; {REMEDY})"


def outside_node_memory(A: DistMatrix, B: DistMatrix) -> tuple[str, ...]:
    """Return the names of the operands that are not in node-shared memory."""
    device = devices.of(A.stored)
    window = devices.shared_memory(device, A.grid).window
    return tuple(
        name
        for name, x in (("A", A), ("B", B))
        if not (x.shared and devices.shared_memory(device, x.grid).window is window)
    )


def nodes(grid: ProcessGrid) -> tuple[int, ...]:
    """Return the node of each rank; () if all ranks are on one node."""
    return () if grid.ranks_per_node is None else grid.nodes


class ProductCall(NamedTuple):
    """The arguments of a call of `pdgemm`, with its options in one value."""

    alpha: complex
    A: Any
    B: Any
    beta: complex
    C: DistMatrix | None
    transa: Transpose
    transb: Transpose
    options: ProductOptions
    progress: Callable[[int, int], object] | None


class Multiplicand(Protocol):
    """A matrix of another kind than DistMatrix that has its own method for `pdgemm`, such as `pdgemm.Scaled`."""

    __array_ufunc__: Any = None  # NumPy defers `array @ A` to `__rmatmul__`
    shape: tuple[int, int]
    ndim: int = 2

    @staticmethod
    def __pdgemm__(call: ProductCall) -> DistMatrix:
        """Compute C := alpha op(A) op(B) + beta C."""

    def __len__(self) -> int:
        return self.shape[0]

    def __matmul__(self, other: Any) -> DistMatrix:
        return pdgemm.pdgemm(1, self, other)

    def __rmatmul__(self, other: Any) -> DistMatrix:
        return pdgemm.pdgemm(1, other, self)


class Streamed(Multiplicand, Protocol):
    """A matrix that is not in memory, such as `pdgemm.StoredMatrix`.

    planned_on : returns the matrix on a planned grid; nothing is read from the file.
    """

    grid: ProcessGrid
    planned_on: Callable[[ProcessGrid], Streamed]


@dataclass(frozen=True, kw_only=True)
class ProductOptions:
    """The options of `pdgemm` as a caller passes them, not checked yet.   triangle : the triangle of C to compute."""

    algorithm: str = "auto"
    shape: tuple[int, int] | None = None
    layers: int | None = None
    lookahead: int | None = None
    panel_width: int | None = None
    memory_limit: int | None = None
    mover: str = "auto"
    accumulate_dtype: Any = None
    compute_type: Any = None
    protect: str | None = None
    machine: Machine | None = None
    epilogue: Epilogue | None = None
    triangle: TriangleName = ""

    @property
    def arguments(self) -> dict[str, Any]:
        """The options as arguments of `pdgemm`, which computes all of C and has no `triangle`."""
        return {x.name: getattr(self, x.name) for x in fields(self) if x.name != "triangle"}


# a schedule, and the function that allocates its buffers and returns an object with the method `run` of `Prepared`
Alternative = tuple[Schedule, Callable[[], Any]] | None


class OperandScales(NamedTuple):
    """The matrix of scales of an operand, and the shape of the block of elements that one scale multiplies."""

    matrix: DistMatrix
    block: tuple[int, int]


class Operands(NamedTuple):
    """op(A), op(B) and C of one product.

    new_result : C was allocated for this product.   mirrored : op(B) is op(A)^H or op(A)^T.
    scales : the scales of op(A) and op(B).   names : the names of op(A) and op(B) in the report.
    """

    A: DistMatrix
    B: DistMatrix
    C: DistMatrix
    new_result: bool
    mirrored: bool = False
    scales: tuple[OperandScales | None, OperandScales | None] = (None, None)
    names: tuple[str, str] = ("A", "B")


class ProductForm(Protocol):
    """The rule by which a function forms the operands of a product from its arguments, such as `pdgemm` or `herk`."""

    def operands(self, alpha: Any, A: DistMatrix, B: DistMatrix, beta: Any, C: DistMatrix | None) -> Operands:
        """Return the operands after checking that they fit; C is allocated if it is None.  Local."""


class FullProduct(NamedTuple):
    """The form of a product op(A) op(B) that computes all elements of the result, not only a triangle."""

    transa: str
    transb: str
    dtype: np.dtype | None = None  # the type of a new C; None: that of unscaled operands of these types

    def operands(self, alpha: Any, A: DistMatrix, B: DistMatrix, beta: Any, C: DistMatrix | None) -> Operands:
        """Return op(A), op(B) and C after checking that they match.  Local."""
        checks.check_matrices(A=A, B=B, **({} if C is None else {"C": C}))
        transa, transb = op_letter(self.transa, "transa"), op_letter(self.transb, "transb")
        left, right = checks.op(A, transa), checks.op(B, transb)
        checks.check_devices(left, right, C)
        for name, x in (("A", left), ("B", right)):
            checks.check_dtype(name, x, dtypes.OPERANDS)
        if left.shape[1] != right.shape[0]:
            raise LayoutError(
                f"inner dimensions do not agree: op(A) is {checks.shape_of(left)} on a {left.grid} grid, "
                f"op(B) is {checks.shape_of(right)} on a {right.grid} grid"
            )
        if C is None:
            result = _result(left, right, self.dtype)
            checks.check_dtype("C", result, dtypes.RESULTS)
        else:
            checks.check_product(left, right, result := C)
        return Operands(left, right, result, C is None, names=(op_name("A", transa), op_name("B", transb)))


def _result(A: DistMatrix, B: DistMatrix, dtype: np.dtype | None = None) -> DistMatrix:
    """Allocate C with the rows of op(A) and the columns of op(B), over A's untransposed grid."""
    grid, dtype = A.grid.base, dtype or dtypes.product(A.dtype, B.dtype)
    rows = A.distribution.rows if grid.same_as(A.grid) else A.distribution.rows.over(grid.shape[0])
    cols = B.distribution.cols if grid.same_as(B.grid) else B.distribution.cols.over(grid.shape[1])
    order: Order = "F" if all((x.order == "F") != x.grid.transposed for x in (A, B)) else "C"
    layout = Distribution(rows, cols)
    local = new_array(layout.local_shape(grid.coords), dtype, order, grid, devices.of(A.stored))
    return DistMatrix(local, grid, layout, order)


def problem_of(operands: Operands, options: ProductOptions, alpha: Any, beta: Any, shared: bool) -> Problem:
    """Return the problem to plan.   shared : ranks may read each other's panels in place."""
    A, B, C, *_ = operands
    nothing = alpha == 0 or A.shape[1] == 0  # C := beta C
    if not is_algorithm(options.algorithm):
        raise ArgumentError(f"algorithm {options.algorithm!r} is not one of {', '.join(algorithm_choices())}")
    mover, reach = mover_and_access(options.mover, shared, A, B, C)
    accumulate, compute = checks.accumulation(A.dtype, B.dtype, C.dtype, options.accumulate_dtype, options.compute_type)
    if options.protect is not None and accumulate.kind in "iu" and {A.dtype, B.dtype} != {np.dtype(np.int8)}:
        raise DTypeError(f"protect={options.protect!r}: checksums of integers are those of int8, not of {A.dtype}")
    ending = ending_of(options.epilogue, {"A": A, "B": B, "C": C}, accumulate) if options.epilogue is not None else None
    a, b, c = (x.layout_in(A.grid) for x in (A, B, C))
    c = replace(c, dtype=accumulate) if ending else c
    algorithm, shape, layers = options.algorithm, as_shape(options.shape), as_optional(options.layers, "layers", 1)
    width, on_device = as_optional(options.panel_width, "panel_width", 1), A.device != devices.HOST
    if on_device and compute in EMULATIONS:
        raise DeviceError(f"compute_type {compute!r} is for matrices on the host, these are on {A.device}")
    itemsize = on_device * max(A.dtype.itemsize, B.dtype.itemsize)
    machine = _machine(options.machine or (A.grid.draft and A.grid.draft.machine), A.grid, on_device, reach.staged)
    if nothing:
        a, b = nothing_to_multiply(a, b, c)
        algorithm, shape, layers = "summa", c.distribution.grid_shape, 1
    of_a, of_b = (
        None if x is None or nothing else Scales(x.matrix.layout_in(A.grid), x.block) for x in operands.scales
    )
    if any(operands.scales) and compute in EMULATIONS:
        raise ArgumentError(f"compute_type {compute!r} does not take a Scaled operand: decode() it")
    return Problem(
        a,
        b,
        c,
        size=A.grid.size,
        beta_is_zero=bool(beta == 0),
        accumulate=accumulate,
        width=panel_width(width, accumulate, machine, itemsize, bool(options.triangle), compute),
        lookahead=panels_ahead(as_optional(options.lookahead, "lookahead", 0), machine, on_device),
        mover=mover,
        algorithm=algorithm,
        shape=shape,
        layers=layers,
        memory_limit=as_optional(options.memory_limit, "memory_limit", 0),
        width_asked=width is not None,
        shared=bool(reach.reads),
        reads=reach.reads or SHARED.name,
        outside_node_memory=outside_node_memory(A, B) if reach.reads and not nothing else (),
        nodes=nodes(A.grid) if reach.reads else (),
        device=A.device if on_device else "",
        staged=reach.staged and mover != NCCL.name,
        compute=compute,
        triangle=options.triangle,
        ending=ending,
        scales=(of_a, of_b),
        protect=as_protection(options.protect, on_device),
        machine=machine,
    )


def as_protection(protect: object, on_device: bool) -> str:
    """Return the protection of a product by checksums, "" for none.  Raises DeviceError or ArgumentError."""
    if protect is None:
        return ""
    if on_device:
        raise DeviceError(f"protect={protect!r}: products on GPUs are not compared with checksums yet")
    return as_name(protect, "protect", get_args(Protection))


def _machine(machine: object, grid: ProcessGrid, gpus: bool, staged: bool) -> Machine:
    """Return the caller's machine; if it is None, the machine at hand with the grid's number of ranks per node."""
    if machine is None:
        return on_nodes(machine_at_hand(gpus, staged), grid.ranks_per_node)
    if not isinstance(machine, Machine):
        raise ArgumentError(f"machine must be a Machine, got {type(machine).__name__}")
    return machine
