"""pdgemm(): check together, plan, run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from numbers import Number
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from pdgemm import device as devices
from pdgemm import dtypes
from pdgemm.arguments import (
    accumulation,
    as_optional,
    as_scalar,
    as_shape,
    check_matrices,
    check_result,
    communicator,
    op,
)
from pdgemm.candidates import Problem, Way
from pdgemm.device import REMEDY, Device, Reach
from pdgemm.errors import (
    ArgumentError,
    DeviceError,
    DTypeError,
    GridError,
    LayoutError,
    MemoryLimitError,
    NodeMemoryError,
    together,
)
from pdgemm.families import ALGORITHMS
from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.grids.layout import Layout, Order
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.local import BLAS_INT
from pdgemm.machine import Machine, machine_at_hand, on_nodes
from pdgemm.matrix import DistMatrix, all_shared, new_array
from pdgemm.movers import ASKED, BY_MPI, ON_DEVICES, SHARED
from pdgemm.planner import Plan, fits, panel_width, plan_product, with_moves
from pdgemm.prepared import Buffers, Prepared, beta_of, unchecked
from pdgemm.products.product import READ
from pdgemm.whole import as_count


def pdgemm(
    alpha: complex,
    A: DistMatrix,
    B: DistMatrix,
    beta: complex = 0.0,
    C: DistMatrix | None = None,
    *,
    transa: str = "N",
    transb: str = "N",
    algorithm: str = "auto",
    shape: tuple[int, int] | None = None,
    layers: int | None = None,
    lookahead: int = 1,
    panel_width: int | None = None,
    memory_limit: int | None = None,
    mover: str = "auto",
    accumulate_dtype: Any = None,
    compute_type: str | None = None,
    machine: Machine | None = None,
    progress: Callable[[int, int], object] | None = None,
    check: bool = True,
) -> DistMatrix:
    """C := alpha op(A) op(B) + beta C.  Collective over the grid; arguments in the order of SciPy's BLAS.

    alpha, beta : scalars of C's type.  beta == 0: C is not read.  alpha == 0 or k == 0: A and B are not.
    A, B : DistMatrix with op(A) (m, k) and op(B) (k, n), of any blocks, sources and grids over the same ranks;
        views too: A.T, A.H, A[i0:i1, j0:j1]; all of A, B and C on the host, or all on GPUs.  float16, bfloat16,
        float32, float64, complex64, complex128 or int8, not necessarily the same.
    C : DistMatrix (m, n) of any layout, overwritten; a view is overwritten where it lies, and nothing around it.
        None: C is made, with the row layout of op(A) and the column layout of op(B) on the grid of A.
    transa, transb : "N" op(A) = A, "T" op(A) = A^T, "C" op(A) = A^H; the same as handing over A.T or A.H.
    algorithm    : "auto": what takes the least time by the model, from the layouts of A, B and C as they are to that
        of C, redistribution included; that has to pay off, for copies take memory.  Or one of
        "summa"         C stays, panels of A and B are broadcast; takes any blocks as they lie;
        "stationary_a"  A stays, for thin B and C; panels of B are broadcast, panels of C added up;
        "stationary_b"  B stays, for flat A and C;
        "cannon"        C stays, A and B go around a torus; grids where one side divides the other;
        "2.5d"          layers that share the inner dimension, each by SUMMA or Cannon, whichever takes less time;
        "row", "column" "summa" or "cannon" on a P x 1 or 1 x P grid;
        "inner"         local products and one reduction, for huge k.
    shape, layers : of the grid of the product, Pr x Pc x layers <= ranks; by default the best ones.  It need not be
        that of the matrices; communicators of new grids are kept for later products.
    lookahead    : panels in flight behind the one in use, >= 0.
    panel_width  : widest panel, in inner indices; by default what the model says.
    memory_limit : bytes per rank for all buffers beyond A, B and C: panels, messages, copies of redistributed
        matrices, and sums where C has another type than accumulate_dtype.
    mover        : how panels come from their owners: "shared" (read in place, in memory that the ranks of a node
        share, and so are parts of sums; relayed once to each other node), "ibcast" (MPI_Ibcast), "ring"
        (point-to-point), "mpi" (either of the two, by the model), or "auto": "shared" where ranks share memory, else
        by the model.  Of matrices on GPUs "shared" is for ranks on one GPU; "ipc" copies panels of other GPUs of the
        node, "nccl" broadcasts them with one rank per GPU, "mpi" hands pointers to them to MPI, "staged" sends them
        through memory of the host; "auto" is the first of these that works.
    accumulate_dtype : type in which products are added up.  By default the common type of A, B and C; for 16-bit
        types float32, for int8 int32.  Panels are converted one by one, never whole matrices.
    compute_type : what operands are rounded to, panel by panel, before they are multiplied; sums are in float32
        (complex64) then, and no flops are faster than those of the type: "float32", "tf32" (11 bits, on GPUs; a CPU
        does not round), "float16" or "bfloat16" (real matrices).  None: nothing is rounded.
    machine      : what messages and flops take, by default the file that PDGEMM_MACHINE names (`pdgemm calibrate`
        writes it), or an ordinary cluster.
    progress     : called as progress(done, total) after each panel.
    check        : False skips the allreduce that makes all ranks raise the same exception.

    Returns C; `C.report` says what ran, what was redistributed, how fast, and how many words.

    Cost per rank on Pr x Pc x c = P ranks: 2mnk/P flops; (mk (Pc - 1) + kn (Pr - 1) + mn (c - 1))/P words in; with
    A stationary on Pr x Pc: (kn (Pr - 1) + mn (Pc - 1))/P; "inner": c = P.  `plan` tells the rest beforehand.
    Raises LayoutError, GridError, DTypeError, ArgumentError or MemoryLimitError (with mover "shared" NodeMemoryError,
    too), the same on every rank and before anything is sent.  Error: |C - C^| <= gamma_k |alpha||A||B| in the type of
    accumulation (Higham 2002, 3.5), and one rounding to C's type; int8 exact modulo 2^32.  With a compute_type of unit
    roundoff u (2^-11 float16 and tf32, 2^-8 bfloat16): (2u + u^2 + (1 + u)^2 gamma_k) |alpha||A||B| (Blanchard,
    Higham, Lopez, Mary & Pranesh, SIAM J. Sci. Comput. 42(3), 2020).
    """
    start = perf_counter()
    comm = communicator(A=A, B=B, C=C)
    sums = accumulate_dtype, compute_type
    asked = _Options(algorithm, shape, layers, lookahead, panel_width, memory_limit, mover, *sums, machine)

    product: Prepared | None

    def ready(shared: bool) -> tuple[Prepared, Any, bool]:
        agreement = together(comm, check)
        with agreement as said:
            agreement.flag = progress is not None
            a, b, c, made = _operands(A, B, C, transa, transb)
            scalars = as_scalar(alpha, c.dtype, "alpha"), as_scalar(0 if made else beta, c.dtype, "beta")
            nothing = scalars[0] == 0 or a.shape[1] == 0
            plan = plan_product(_problem(a, b, c, asked, scalars[1] == 0, nothing, shared))
            said += [f"pdgemm, alpha={scalars[0]}", f"beta={scalars[1]}", *["C=None"] * made, plan.description]
            room = Buffers(plan, a, b) if check else None
        room = room or unchecked(plan, a, b)
        return Prepared(plan, scalars[0], a, b, c, room), scalars[1], check and agreement.flag

    try:
        product, beta, agreed = ready(shared=True)
    except NodeMemoryError:
        if mover in READ:
            raise
        product = None
    if product is None:  # outside, where the exception holds no buffers
        product, beta, agreed = ready(shared=False)
    result = product.run(beta, start, progress, agreed)
    if C is None:
        result.shared = all_shared(result.stored, result.grid)
    return result


def plan(
    A: DistMatrix,
    B: DistMatrix,
    C: DistMatrix | None = None,
    *,
    beta: complex = 0.0,
    transa: str = "N",
    transb: str = "N",
    algorithm: str = "auto",
    shape: tuple[int, int] | None = None,
    layers: int | None = None,
    lookahead: int = 1,
    panel_width: int | None = None,
    memory_limit: int | None = None,
    mover: str = "auto",
    accumulate_dtype: Any = None,
    compute_type: str | None = None,
    machine: Machine | None = None,
    check: bool = True,
) -> Plan:
    """What `pdgemm` with these arguments would do, without doing it.  Collective over the grid; nothing is sent.

    C : None: a matrix as `pdgemm` would make it.   beta : 0, or anything else where C is to be read.

    The plan is a value: it prints, compares, tells what it costs (`plan.explain()`, `plan.seconds`,
    `plan.traffic(rank)`, `plan.extra_bytes(rank)`), is saved (`to_json`, `Plan.from_json`), and is carried out by
    `plan.execute(A, B, C)` as often as wanted.
    Raises what `pdgemm` raises, the same on every rank.
    """
    with together(communicator(A=A, B=B, C=C), check) as said:
        A, B, C, made = _operands(A, B, C, transa, transb)
        sums = accumulate_dtype, compute_type
        asked = _Options(algorithm, shape, layers, lookahead, panel_width, memory_limit, mover, *sums, machine)
        found = plan_product(_problem(A, B, C, asked, made or beta == 0, nothing=A.shape[1] == 0, shared=True))
        said += ["plan", found.description]
    return found


def execute(
    plan: Plan,
    A: DistMatrix,
    B: DistMatrix,
    C: DistMatrix,
    *,
    alpha: complex = 1,
    beta: complex = 0,
    check: bool = True,
) -> DistMatrix:
    """`Plan.execute`."""
    start = perf_counter()
    matrices = isinstance(A, DistMatrix) and isinstance(C, DistMatrix) and isinstance(alpha, Number)
    if matrices and (A.shape[1] == 0 or (np.ndim(alpha) == 0 and alpha == 0)):  # nothing to multiply
        return pdgemm(alpha, A, B, beta, C, check=check)
    product, beta = _prepared("execute", plan, A, B, C, alpha, beta, check)
    return product.run(beta, start)


def prepare(
    plan: Plan, A: DistMatrix, B: DistMatrix, C: DistMatrix, *, alpha: complex = 1, check: bool = True
) -> Prepared:
    """`Plan.prepare`."""
    return _prepared("prepare", plan, A, B, C, alpha, 0, check)[0]


def _prepared(
    caller: str, plan: Plan, A: DistMatrix, B: DistMatrix, C: DistMatrix, alpha: Any, beta: Any, check: bool
) -> tuple[Prepared, Any]:
    """The product of matrices that lie as planned, and beta as a number of C's kind.  Collective where it checks."""
    with together(communicator(A=A, B=B, C=C), check) as said:
        check_matrices(A=A, B=B, C=C)
        alpha, beta = as_scalar(alpha, C.dtype, "alpha"), beta_of(beta, C, plan)
        _check_result(A, B, C)
        _check_devices(A, B, C)
        meant = plan.problem.device or devices.HOST
        if meant != A.device:
            raise DeviceError(f"the plan was made for matrices on {meant}, these are on {A.device}")
        if plan.problem.size != A.grid.size:
            raise GridError(f"the plan was made for {plan.problem.size} ranks, but these are {A.grid.size}")
        for name, x, planned in zip("ABC", (A, B, C), plan.problem.given):
            if x.layout_in(A.grid) != planned and (name == "C" or A.shape[1]):
                raise LayoutError(f"{name} is {x.layout_in(A.grid)}, but the plan was made for {planned}")
        shares = _reached("auto", True, A, B, C)[1].reads != ""
        if plan.problem.shared and (_nodes(A.grid), shares) != (plan.problem.nodes, True):
            raise LayoutError("the plan was made for ranks that are on other nodes, or share memory in another way")
        if plan.problem.shared and A.shape[1] and _private(A, B) != plan.problem.private:
            plan = with_moves(Way(plan.product, plan.transposed), replace(plan.problem, private=_private(A, B)))
            limit = plan.problem.memory_limit
            if not fits(plan, limit):
                raise MemoryLimitError(
                    f"memory limit {limit} bytes per rank is too small for matrices that the ranks of a node do not "
                    f"share: {plan.extra_bytes(None)} bytes are needed"
                )
        said += [f"{caller}, alpha={alpha}", f"beta={beta}", plan.description]
        room = Buffers(plan, A, B) if check else None
    room = room or unchecked(plan, A, B)
    return Prepared(plan, alpha, A, B, C, room), beta


def matmul(A: DistMatrix, B: DistMatrix, out: DistMatrix | None = None) -> DistMatrix:
    """A B, also as `A @ B` and `numpy.matmul(A, B)`.  Collective; see `pdgemm`."""
    return pdgemm(1, A, B, 0, out)


def _result(A: DistMatrix, B: DistMatrix) -> DistMatrix:
    """Where C goes if nobody says: rows as op(A), columns as op(B), on the grid that A was made on."""
    grid, on = A.grid.base, A.grid.base.same_as
    rows = A.distribution.rows if on(A.grid) else A.distribution.rows.over(grid.shape[0])
    cols = B.distribution.cols if on(B.grid) else B.distribution.cols.over(grid.shape[1])
    layout = Distribution(rows, cols)
    order: Order = "F" if all((x.order == "F") != x.grid.transposed for x in (A, B)) else "C"
    dtype = dtypes.product(A.dtype, B.dtype)
    local = new_array(layout.local_shape(grid.coords), dtype, order, grid, devices.of(A.stored))
    return DistMatrix(local, grid, layout, order)


def _private(A: DistMatrix, B: DistMatrix) -> str:
    """Which of them do not lie where the ranks of the node can read them."""
    device = devices.of(A.stored)
    window = devices.memory(device, A.grid).window
    return "".join(
        name for name, x in (("A", A), ("B", B)) if not (x.shared and devices.memory(device, x.grid).window is window)
    )


def _nodes(grid: ProcessGrid) -> tuple[int, ...]:
    """The node of each rank; () where all are on one."""
    return () if grid.ranks_per_node is None else grid.nodes


def _nothing_to_multiply(A: Layout, B: Layout, C: Layout) -> tuple[Layout, Layout]:
    """Operands without inner indices, which fit C wherever it lies."""
    (pr, pc), c = C.distribution.grid_shape, C.distribution
    return (
        replace(C, distribution=Distribution(c.rows, BlockCyclic.even(0, pc)), dtype=A.dtype),
        replace(C, distribution=Distribution(BlockCyclic.even(0, pr), c.cols), dtype=B.dtype),
    )


class _Options(NamedTuple):
    """What a caller asks of a plan."""

    algorithm: str
    shape: tuple[int, int] | None
    layers: int | None
    lookahead: int
    panel_width: int | None
    memory_limit: int | None
    mover: str
    accumulate_dtype: Any
    compute_type: Any
    machine: Machine | None


def _operands(
    A: DistMatrix, B: DistMatrix, C: DistMatrix | None, transa: str, transb: str
) -> tuple[DistMatrix, DistMatrix, DistMatrix, bool]:
    """op(A), op(B) and C, which fit each other, and whether C was made here."""
    check_matrices(A=A, B=B, **({} if C is None else {"C": C}))
    A, B = op(A, transa, "transa"), op(B, transb, "transb")
    _check_devices(A, B, C)
    for name, x in (("A", A), ("B", B)):
        _check_dtype(name, x, dtypes.OPERANDS)
    if A.shape[1] != B.shape[0]:
        raise LayoutError(
            f"inner dimensions do not agree: op(A) is {_size(A)} on a {A.grid} grid, "
            f"op(B) is {_size(B)} on a {B.grid} grid"
        )
    made = C is None
    if C is None:
        C = _result(A, B)
    _check_result(A, B, C)
    return A, B, C, made


def _problem(
    A: DistMatrix, B: DistMatrix, C: DistMatrix, asked: _Options, plain: bool, nothing: bool, shared: bool
) -> Problem:
    """nothing : there is no product to be formed, C := beta C.   shared : may ranks read each other's panels?"""
    if asked.algorithm not in ALGORITHMS:
        raise ArgumentError(f"algorithm {asked.algorithm!r} is not one of {', '.join(ALGORITHMS)}")
    mover, reach = _reached(asked.mover, shared, A, B, C)
    accumulate, compute = accumulation(A.dtype, B.dtype, C.dtype, asked.accumulate_dtype, asked.compute_type)
    a, b, c = (x.layout_in(A.grid) for x in (A, B, C))
    algorithm, shape, layers = asked.algorithm, as_shape(asked.shape), as_optional(asked.layers, "layers", 1)
    width, on_device = as_optional(asked.panel_width, "panel_width", 1), A.device != devices.HOST
    if nothing:
        a, b = _nothing_to_multiply(a, b, c)
        algorithm, shape, layers = "summa", c.distribution.grid_shape, 1
    return Problem(
        a,
        b,
        c,
        size=A.grid.size,
        plain=plain,
        accumulate=accumulate,
        width=panel_width(width, accumulate, on_device),
        lookahead=as_count(asked.lookahead, "lookahead", 0),
        mover=mover,
        algorithm=algorithm,
        shape=shape,
        layers=layers,
        memory_limit=as_optional(asked.memory_limit, "memory_limit", 0),
        width_asked=width is not None,
        shared=bool(reach.reads),
        reads=reach.reads or SHARED,
        private=_private(A, B) if reach.reads and not nothing else "",
        nodes=_nodes(A.grid) if reach.reads else (),
        device=A.device if on_device else "",
        staged=reach.staged,
        compute=compute,
        machine=_machine(asked.machine, A.grid, on_device, reach.staged),
    )


_ON_HOST, _BY_MESSAGES = Reach(SHARED, staged=False), Reach("", staged=False)


def _reached(mover: object, shared: bool, A: DistMatrix, *others: DistMatrix) -> tuple[str, Reach]:
    """The mover that a plan is asked for, and how ranks reach each other's panels by it.

    shared : may they read them?
    """
    if not isinstance(mover, str) or mover not in ASKED:
        raise ArgumentError(f"mover {mover!r} is not one of {', '.join(ASKED)}")
    device, alone = devices.of(A.stored), A.grid.size == 1
    if device is None:
        reach = _ON_HOST if shared and not alone and A.grid.shares_memory else _BY_MESSAGES
        if mover in ON_DEVICES:
            raise ArgumentError(f"mover {mover!r} is for matrices on a device, these are on the host")
    else:
        reach = device.reach(A.grid)
        managed = not all(x.plain for x in (A, *others))
        reach = reach._replace(staged=reach.staged or managed, nccl=reach.nccl and not managed)
        if not shared or A.grid.ranks_per_node is not None:
            reach = reach._replace(reads="")
    if alone:
        return mover if mover in BY_MPI else "auto", reach._replace(reads="") if reach.reads else reach
    if mover in READ:
        if not reach.reads:
            raise ArgumentError(f"mover {mover!r} is for ranks that share memory with others of their node")
        return mover, reach._replace(reads=mover)
    if mover == "nccl" and not reach.nccl:
        raise ArgumentError("mover 'nccl' needs cupy.cuda.nccl and a GPU for each rank; the others do without")
    if device and mover in ("mpi", *BY_MPI) and reach.staged:
        raise ArgumentError(
            f"mover {mover!r} hands pointers to device memory to MPI, but {_untaken(device, A.grid)}: mover='staged'"
        )
    if mover == "auto":
        return ("nccl" if reach.nccl and not reach.reads else "auto"), reach
    by_message = {"mpi": ("auto", False), "staged": ("ring", True)}
    mover, staged = by_message.get(mover, (mover, reach.staged))
    return mover, reach._replace(reads="", staged=staged)


def _untaken(device: Device, grid: ProcessGrid) -> str:
    """Why MPI cannot be given them."""
    reach = device.reach(grid)
    if not reach.staged:
        return "a matrix lies in managed memory, or in that of cudaMallocAsync"
    return f"this one does not take them ({reach.why}; {REMEDY})"


def _machine(asked: object, grid: ProcessGrid, gpus: bool, staged: bool) -> Machine:
    """What was asked for, else the machine at hand with the nodes of the grid."""
    if asked is None:
        return on_nodes(machine_at_hand(gpus, staged), grid.ranks_per_node)
    if not isinstance(asked, Machine):
        raise ArgumentError(f"machine is a Machine, got {type(asked).__name__}")
    return asked


def _check_devices(A: DistMatrix, B: DistMatrix, C: DistMatrix | None) -> None:
    device = A.device
    if B.device != device or (C is not None and C.device != device):
        lying = ", ".join(f"{name} on {x.device}" for name, x in (("A", A), ("B", B), ("C", C)) if x is not None)
        raise DeviceError(f"matrices of one product are on one device, these are {lying}: bring them with to_device")


def _check_result(A: DistMatrix, B: DistMatrix, C: DistMatrix) -> None:
    _check_dtype("C", C, dtypes.RESULTS)
    if C.shape != (A.shape[0], B.shape[1]):
        raise LayoutError(
            f"C is not as high as op(A) and as wide as op(B): op(A) is {_size(A)}, op(B) is {_size(B)}, "
            f"C is {_size(C)}, on grids {A.grid}, {B.grid} and {C.grid}"
        )
    check_result("C", C, {"A": A, "B": B})


def _check_dtype(name: str, x: DistMatrix, supported: tuple[np.dtype, ...]) -> None:
    if x.dtype not in supported or not x.dtype.isnative:
        raise DTypeError(
            f"{name} has dtype {x.dtype}; supported: {dtypes.names(supported)}; convert it (astype, --dtype)"
        )
    if x.stored.size and max(x.stored.shape) > BLAS_INT:
        raise LayoutError(f"{name} has a local part of shape {x.stored.shape}, BLAS takes up to {BLAS_INT}")


def _size(x: DistMatrix) -> str:
    return f"{x.shape[0]} x {x.shape[1]}"
