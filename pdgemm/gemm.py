"""pdgemm() checks its arguments on all ranks, plans the product and runs the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from numbers import Number
from time import perf_counter
from typing import Any

import numpy as np

from pdgemm.algorithms.epilogue import Epilogue, ending_of
from pdgemm.algorithms.plan_workspace import Workspace
from pdgemm.algorithms.prepared import Prepared, beta_of
from pdgemm.algorithms.product_options import (
    Alternative,
    FullProduct,
    Multiplicand,
    Operands,
    ProductCall,
    ProductForm,
    ProductOptions,
    mover_and_access,
    nodes,
    outside_node_memory,
    problem_of,
)
from pdgemm.errors import ArgumentError, DeviceError, GridError, LayoutError, MemoryLimitError
from pdgemm.local.arrays import device as devices
from pdgemm.matrix.argument_checks import (
    as_scalar,
    check_alpha,
    check_devices,
    check_matrices,
    check_product,
    communicator,
    last_may_be_missing,
)
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import all_shared, is_readable, shared_or_sent
from pdgemm.names import AlgorithmName, ComputeType, DType, MoverName, Protection, Transpose
from pdgemm.planning.machines.machine import Machine
from pdgemm.planning.planner import considered, explain, fit, fits_in_memory, plan_product
from pdgemm.planning.product_plan import ProductPlan, with_moves
from pdgemm.planning.search.candidate_table import Candidate
from pdgemm.schedules.mover_registry import AUTO, NCCL
from pdgemm.support.agreement import together


@last_may_be_missing
def pdgemm(
    alpha: complex,
    A: DistMatrix | Multiplicand,
    B: DistMatrix | Multiplicand,
    beta: complex = 0.0,
    C: DistMatrix | None = None,
    *,
    transa: Transpose = "N",
    transb: Transpose = "N",
    algorithm: AlgorithmName = "auto",
    shape: tuple[int, int] | None = None,
    layers: int | None = None,
    lookahead: int | None = None,
    panel_width: int | None = None,
    memory_limit: int | None = None,
    mover: MoverName = "auto",
    accumulate_dtype: DType | None = None,
    compute_type: ComputeType | None = None,
    protect: Protection | None = None,
    epilogue: Epilogue | None = None,
    machine: Machine | None = None,
    progress: Callable[[int, int], object] | None = None,
    check: bool = True,
) -> DistMatrix:
    """Compute C := alpha op(A) op(B) + beta C.  Collective over the grid; arguments are in the order of SciPy's BLAS.

    alpha, beta : scalars of C's type.  beta == 0: C is not read.  alpha == 0 or k == 0: A and B are not read.
    A, B : DistMatrix with op(A) (m, k) and op(B) (k, n), of any blocks, sources and grids over the same ranks;
        also views: A.T, A.H, A[i0:i1, j0:j1]; A, B and C are all on the host or all on GPUs.  float16, bfloat16,
        float32, float64, complex64, complex128, int8, and on the host float8_e4m3fn, float8_e5m2, int16, int32, int64,
        uint8, uint16, uint32 and uint64; A and B may have different types.  A and B may also be `pdgemm.Scaled`, 8-bit
        values with scales; or matrices in files (`io.hdf5.dataset`): then two panels of a file at a time are in memory.
    C : DistMatrix (m, n) of any layout, overwritten; of a view, only its own elements are written, in place.
        None: C is allocated, with the row layout of op(A) and the column layout of op(B) on the grid of A.
    transa, transb : "N" op(A) = A, "T" op(A) = A^T, "C" op(A) = A^H; the same as passing A.T or A.H.
    algorithm    : "auto": the algorithm of least modelled time for the layouts of A, B and C, redistribution included;
        redistribution is chosen only where it pays off, because copies take memory.  Or one of
        "summa"         C is stationary, panels of A and B are broadcast; any blocks, without redistribution;
        "stationary_a"  A is stationary, for thin B and C; panels of B are broadcast, panels of C are reduced;
        "stationary_b"  B is stationary, for flat A and C;
        "cannon"        C is stationary, A and B are shifted on a torus; grids where one side divides the other;
        "2.5d"          layers split the inner dimension; each layer runs SUMMA or Cannon, whichever takes less time;
        "row", "column" "summa" or "cannon" on a P x 1 or 1 x P grid;
        "allgather"     A or B is gathered on all ranks, then multiplied, by one of the above on a P x 1 or 1 x P grid;
        "reduce_scatter"  the product and a reduce-scatter of C, by "inner" or "stationary_a" or "stationary_b";
        "inner"         local products and one reduction, for huge k.
    shape, layers : shape and layers of the product's grid, Pr x Pc x layers <= ranks; by default the best ones.  This
        need not be the grid of the matrices; communicators of new grids are cached for later products.
    lookahead    : later panels in flight while one is multiplied, >= 0; by default 1 on one node, 4 across nodes.
    panel_width  : largest panel width, in inner indices; by default chosen by the model.
    memory_limit : bytes per rank for all buffers beyond A, B and C: panels, messages, copies of redistributed
        matrices, and partial sums where the type of C is not accumulate_dtype.  By default no limit; 256 MiB if A or B
        is in a file.
    mover        : how panels are transferred from their owners: "shared" (panels and partial sums are read in place in
        node-shared memory, and each panel is relayed once to each other node), "ibcast" (MPI_Ibcast), "ring"
        (point-to-point), "mpi" ("ibcast" or "ring", chosen by the model), or "auto": "shared" where ranks share memory,
        else chosen by the model.  For matrices on GPUs "shared" is for ranks on one GPU; "ipc" copies panels from other
        GPUs of the node, "nccl" broadcasts panels with one rank per GPU, "mpi" passes device pointers to MPI, "staged"
        sends panels through host memory; "auto" is the first of these that is available.
    accumulate_dtype : type in which products are accumulated.  By default the common type of A, B and C; for 16-bit
        types float32, for integers int32 or int64.  Panels are converted one by one, never whole matrices.
    compute_type : type to which operands are rounded, panel by panel, before they are multiplied; products are then
        accumulated in float32 (complex64): "float32", "tf32" (11 bits, on GPUs; a CPU does not round), "float16" or
        "bfloat16" (real matrices).  Or products of slices (`docs/emulated.md`), on the host: "bf16x9", with sums in
        float32 (complex64), and "ozaki", with sums in float64 (complex128), of 8 slices of 7 bits; other numbers
        of slices: "ozaki-4", "ozaki-5", "ozaki-6", "ozaki-7", "ozaki-8", "ozaki-9", "ozaki-10", "ozaki-11", "ozaki-12".
        None: nothing is rounded.
    protect      : compare the rows of C with checksums that the owners of A and B compute (`docs/bit-flips.md`):
        "detect" raises CorruptionError where rows of C differ from their checksums, "repair" repeats the product, three
        times at most, and names ranks if the repetition has other bits; where beta is not 0, "repair" keeps a copy of
        C.  Where A or B is in a file, each product of two panels is compared and repeated.  On the host only.
    epilogue     : an `Epilogue`: C := f(scale (alpha op(A) op(B) + beta C) + bias) + residual.
    machine      : parameters of the model, by default from the file that PDGEMM_MACHINE names (`pdgemm calibrate`
        writes this file), or those of an ordinary cluster.
    progress     : called as progress(done, total) after each panel.
    check        : False skips the allreduce that makes all ranks raise the same exception.

    Returns C; `C.report` has the algorithm that ran, redistributions, times and words.

    Cost per rank on Pr x Pc x c = P ranks: 2mnk/P flops; (mk (Pc - 1) + kn (Pr - 1) + mn (c - 1))/P words in; with
    A stationary on Pr x Pc: (kn (Pr - 1) + mn (Pc - 1))/P; "inner": c = P.  `plan` returns exact counts.
    Raises LayoutError, GridError, DTypeError, DeviceError, ArgumentError or MemoryLimitError (with mover "shared" also
    NodeMemoryError), the same on every rank and before any message is sent.
    Error: |C - C^| <= gamma_k |alpha||A||B| in the type of accumulation (Higham 2002, 3.5), and one rounding to C's
    type; integers exact modulo 2^32, of 64 bits modulo 2^64.  With a compute_type of unit roundoff u (2^-11 float16 and
    tf32, 2^-8 bfloat16): (2u + u^2 + (1 + u)^2 gamma_k) |alpha||A||B| (Blanchard, Higham, Lopez, Mary & Pranesh, SIAM
    J. Sci. Comput. 42(3), 2020).  "bf16x9": 1.04 gamma_(k+4) |alpha||A||B|; "ozaki" with S slices, of p panels and
    partial sums: |alpha| k (4 (S + 1) 2^-7S + gamma_(p+3)) max_l |a_il| max_l |b_lj| (Ozaki, Ogita, Oishi & Rump,
    Numer. Algorithms 59, 2012; Ootomo, Ozaki & Yokota, Int. J. High Perform. Comput. Appl. 38(4), 2024;
    `pdgemm/local/blas/slices.py`).
    """
    options = ProductOptions(
        algorithm=algorithm, shape=shape, layers=layers, lookahead=lookahead, panel_width=panel_width,
        memory_limit=memory_limit, mover=mover, accumulate_dtype=accumulate_dtype, compute_type=compute_type,
        protect=protect, epilogue=epilogue, machine=machine,
    )  # fmt: skip
    if not isinstance(A, DistMatrix) or not isinstance(B, DistMatrix):
        streamed = getattr(A, "__pdgemm__", None) or getattr(B, "__pdgemm__", None)
        if streamed is not None:
            result: DistMatrix = streamed(ProductCall(alpha, A, B, beta, C, transa, transb, options, progress))
            return result
    return carried_out(FullProduct(transa, transb), alpha, A, B, beta, C, options, progress, check)  # type: ignore[arg-type]


def carried_out(
    form: ProductForm,
    alpha: complex,
    A: DistMatrix,
    B: DistMatrix,
    beta: complex,
    C: DistMatrix | None,
    options: ProductOptions,
    progress: Callable[[int, int], object] | None = None,
    check: bool = True,
    instead: Callable[[ProductPlan, Operands, Any], Alternative] = lambda plan, operands, alpha: None,
) -> DistMatrix:
    """Compute C := alpha op(A) op(B) + beta C, or only `options.triangle` of C.  Collective over the ranks of A.

    instead : returns a product to compute instead of the planned one, or None.
    """
    start, comm = perf_counter(), communicator(A=A, B=B, C=C)

    def set_up(shared: bool) -> tuple[Operands, Any, Any, int]:
        """Return operands, beta, the product, and what any rank has: 2 `progress`, 1 an unreadable new C.  Collective.

        If a program is planned on this grid, it is only a plan or a schedule, and nothing runs.
        """
        agreement = together(comm, check)
        with agreement as description:
            check_alpha(alpha)
            operands = form.operands(alpha, A, B, beta, C)
            unreadable = operands.new_result and comm.size > 1 and not is_readable(operands.C.stored, operands.C.grid)
            agreement.flag = int(unreadable) if progress is None else 2
            plan, scalars = _planned(operands, alpha, beta, options, shared)
            description += [f"pdgemm, alpha={scalars[0]}", f"beta={scalars[1]}", *["C=None"] * operands.new_result]
            description += [options.epilogue.described()] if options.epilogue else []
            if other := instead(plan, operands, scalars[0]):
                description.append(repr(other[0]))
                return operands, scalars[1], other[0] if operands.A.grid.draft else other[1](), agreement.flag
            description.append(plan.description)
            agreement.check |= plan.needs_node_memory  # which may be exhausted on some ranks
            workspace = None if operands.A.grid.draft else Workspace(plan, operands.A, operands.B)
        product = Prepared(plan, scalars[0], operands, workspace, options.epilogue) if workspace else plan
        return operands, scalars[1], product, agreement.flag

    operands, beta, product, most = shared_or_sent(comm, set_up, required=options.mover != AUTO)
    if operands.A.grid.draft:
        operands.A.grid.draft.add("C", product)
    else:
        product.run(beta, start, progress, agreed=check and most == 2)
    if operands.new_result and comm.size > 1:
        operands.C.shared = not most if check and most < 2 else all_shared(operands.C.stored, operands.C.grid)
    return operands.C


def _planned(
    operands: Operands, alpha: complex, beta: complex, options: ProductOptions, shared: bool
) -> tuple[ProductPlan, tuple[Any, Any]]:
    """Return the plan of a product, and alpha and beta as numbers of the kind of C.  Local.

    shared : whether ranks may read each other's panels.
    """
    dtype = operands.C.dtype
    scalars = as_scalar(alpha, dtype, "alpha"), as_scalar(0 if operands.new_result else beta, dtype, "beta")
    return plan_product(problem_of(operands, options, *scalars, shared)), scalars


class Plan(ProductPlan):
    """The plan of a product: a value that describes the work of `pdgemm`, and can be executed.

    A plan can be printed and compared, states its cost (`explain()`, `seconds`, `traffic(rank)`, `extra_bytes(rank)`),
    is saved by `to_json` and loaded by `from_json`, and is executed any number of times by `execute` or `prepare`.
    """

    def candidates(self) -> list[Candidate]:
        """Return all candidates, best first: this plan, and the others with the reason why they were not chosen."""
        return considered(self)

    def explain(self, all: bool = False) -> str:
        """Return the first five candidates, or all, as a table, and the rule by which the plan was chosen."""
        return explain(self, all)

    def execute(
        self,
        A: DistMatrix,
        B: DistMatrix,
        C: DistMatrix,
        *,
        alpha: complex = 1,
        beta: complex = 0,
        epilogue: Epilogue | None = None,
        check: bool = True,
    ) -> DistMatrix:
        """Compute C := alpha A B + beta C as planned.  Collective; nothing is planned again.  alpha 0: C := beta C.

        A, B, C, epilogue : operands in the planned layouts; A and B are op(A) and op(B), such as A.T.
        Where node-shared memory is exhausted or GPU memory cannot be mapped, the best plan by messages is executed
        instead, unless the caller of `plan` requested a mover: then NodeMemoryError or DeviceError is raised.
        Raises LayoutError on all ranks where the layouts of the matrices or the nodes of the ranks differ from the
        plan's, and MemoryLimitError where copies in node-shared memory exceed the memory limit.
        """
        start = perf_counter()
        matrices = isinstance(A, DistMatrix) and isinstance(C, DistMatrix) and isinstance(alpha, Number)
        if matrices and (A.shape[1] == 0 or (np.ndim(alpha) == 0 and alpha == 0)):  # nothing to multiply
            protect: Any = self.problem.protect or None
            return pdgemm(alpha, A, B, beta, C, protect=protect, epilogue=epilogue, check=check)
        product, beta = self._set_up("execute", A, B, C, alpha, beta, epilogue, check)
        return product.run(beta, start)

    def prepare(
        self,
        A: DistMatrix,
        B: DistMatrix,
        C: DistMatrix,
        *,
        alpha: complex = 1,
        epilogue: Epilogue | None = None,
        check: bool = True,
    ) -> Prepared:
        """Set up C := alpha A B + beta C as planned, to be computed any number of times.  Collective.

            product = plan.prepare(A, B, C)
            for step in range(1000):
                ...                         # change the elements of A and B
                product()                   # C := A B;  product(beta=1): C := A B + C

        The result holds the plan's buffers, A, B and C; `execute` allocates buffers in each call.  `prepare` creates
        communicators, on GPUs also those of NCCL, and compiles common kernels.  Raises the errors of `execute`.
        """
        return self._set_up("prepare", A, B, C, alpha, 0, epilogue, check)[0].warm_up()

    def _set_up(
        self, caller: str, A: DistMatrix, B: DistMatrix, C: DistMatrix, alpha: Any, beta: Any,
        epilogue: Epilogue | None, check: bool,
    ) -> tuple[Prepared, Any]:  # fmt: skip
        """Return the prepared product, and beta as a number of C's kind.  Collective over the grid."""
        comm = communicator(A=A, B=B, C=C)

        def set_up(shared: bool) -> tuple[Prepared, Any]:
            agreement = together(comm, check)
            with agreement as description:
                check_matrices(A=A, B=B, C=C)
                scalars = as_scalar(alpha, C.dtype, "alpha"), beta_of(beta, C, self)
                plan = self._for(A, B, C, epilogue, shared)
                description += [f"{caller}, alpha={scalars[0]}", f"beta={scalars[1]}", plan.description]
                description += [epilogue.described()] if epilogue else []
                agreement.check |= plan.needs_node_memory
                workspace = Workspace(plan, A, B)
            return Prepared(plan, scalars[0], Operands(A, B, C, False), workspace, epilogue), scalars[1]

        return shared_or_sent(comm, set_up, required=self.problem.mover != AUTO or not self.problem.shared)

    def _for(self, A: DistMatrix, B: DistMatrix, C: DistMatrix, epilogue: Epilogue | None, shared: bool) -> ProductPlan:
        """Return the plan of this product for these matrices, which must have the planned layouts.  Local.

        If the plan expects matrices in node-shared memory, and they are outside of it, another plan is returned.
        """
        plan: ProductPlan = self
        check_product(A, B, C)
        check_devices(A, B, C)
        problem, meant = self.problem, self.problem.device or devices.HOST
        if meant != A.device:
            raise DeviceError(f"the plan was made for matrices on {meant}, these are on {A.device}")
        if problem.size != A.grid.size:
            raise GridError(f"the plan was made for {problem.size} ranks, but these are {A.grid.size}")
        ending = ending_of(epilogue, {"A": A, "B": B, "C": C}, problem.accumulate)
        if ending != problem.ending:
            raise ArgumentError(f"epilogue: {ending}; the plan was made for: {problem.ending}")
        for name, x, planned in zip("ABC", (A, B, C), problem.layouts):
            layout = x.layout_in(A.grid)
            if ending and name == "C":  # the plan has the layout of the sums
                layout = replace(layout, dtype=planned.dtype)
            if layout != planned and (name == "C" or A.shape[1]):
                raise LayoutError(f"{name} is {layout}, but the plan was made for {planned}{layout.unlike(planned)}")
        if not problem.shared:
            return plan
        mover, reach = mover_and_access(AUTO, shared, A, B, C)
        if problem.mover == AUTO and (not shared or devices.shared_memory(devices.of(A.stored), A.grid).failed):
            staged = reach.staged and mover != NCCL.name
            sent = replace(problem, mover=mover, staged=staged, shared=False, outside_node_memory=(), nodes=())
            return plan_product(replace(sent, beta_is_zero=self.needs_beta_zero))
        if not reach.reads or nodes(A.grid) != problem.nodes:
            raise LayoutError("the plan was made for other nodes, or for ranks that share memory in another way")
        outside = outside_node_memory(A, B)
        if A.shape[1] and outside != problem.outside_node_memory:
            plan = fit(
                with_moves(self.arrangement, replace(problem, outside_node_memory=outside)), problem.memory_limit
            )
            if not fits_in_memory(plan, problem.memory_limit):
                raise MemoryLimitError(
                    f"memory limit {problem.memory_limit} bytes per rank is too small for matrices that the ranks of a "
                    f"node do not share: {plan.extra_bytes(None)} bytes are needed"
                )
        return plan


def plan(
    A: DistMatrix,
    B: DistMatrix,
    C: DistMatrix | None = None,
    *,
    alpha: complex = 1.0,
    beta: complex = 0.0,
    transa: Transpose = "N",
    transb: Transpose = "N",
    algorithm: AlgorithmName = "auto",
    shape: tuple[int, int] | None = None,
    layers: int | None = None,
    lookahead: int | None = None,
    panel_width: int | None = None,
    memory_limit: int | None = None,
    mover: MoverName = "auto",
    accumulate_dtype: DType | None = None,
    compute_type: ComputeType | None = None,
    protect: Protection | None = None,
    epilogue: Epilogue | None = None,
    machine: Machine | None = None,
    check: bool = True,
) -> Plan:
    """Return the plan of `pdgemm` with these arguments without executing it.  Collective over the grid.

    C : None: the plan is for a matrix as `pdgemm` would allocate it.
    alpha, beta : only whether they are 0 matters: if alpha is 0, A and B are not read; if beta is 0, C is not read.

    The plan is a value: it can be printed and compared, states its cost (`plan.explain()`, `plan.seconds`,
    `plan.traffic(rank)`, `plan.extra_bytes(rank)`), is saved (`to_json`, `Plan.from_json`), and is executed any number
    of times by `plan.execute(A, B, C)`.
    Raises the errors of `pdgemm`, the same on every rank.
    """
    options = ProductOptions(
        algorithm=algorithm, shape=shape, layers=layers, lookahead=lookahead, panel_width=panel_width,
        memory_limit=memory_limit, mover=mover, accumulate_dtype=accumulate_dtype, compute_type=compute_type,
        protect=protect, epilogue=epilogue, machine=machine,
    )  # fmt: skip
    with together(communicator(A=A, B=B, C=C), check) as description:
        operands = FullProduct(transa, transb).operands(alpha, A, B, beta, C)
        planned, _ = _planned(operands, alpha, beta, options, shared=True)
        description += ["plan", planned.description]
    return Plan(planned.product, planned.transposed, planned.moves, planned.problem)


def matmul(A: DistMatrix, B: DistMatrix, out: DistMatrix | None = None) -> DistMatrix:
    """Return A B; `A @ B` and `numpy.matmul(A, B)` are the same.  Collective; see `pdgemm`."""
    return pdgemm(1, A, B, 0, out)
