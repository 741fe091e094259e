"""Rank-k and rank-2k updates: one triangle of A A^H, A A^T, A B^H + B A^H or A B^T + B A^T; and Gram matrices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import numpy as np

from pdgemm.algorithms.product_options import Alternative, Operands, ProductOptions
from pdgemm.algorithms.products.triangle_run import TriangleRun
from pdgemm.algorithms.redistribution import redistribute
from pdgemm.devices.streams import recorder_of
from pdgemm.errors import ArgumentError, DTypeError, LayoutError
from pdgemm.gemm import carried_out
from pdgemm.grids.distribution import Distribution
from pdgemm.grids.layout import Order
from pdgemm.instrument.step_reports import Steps
from pdgemm.local.arrays import device as devices, dtypes
from pdgemm.local.arrays.arguments import as_name, as_optional, op_letter
from pdgemm.local.arrays.elementwise import CONJUGATE, CONVERT, scale
from pdgemm.matrix.argument_checks import (
    as_scalar,
    check_devices,
    check_dtype,
    check_matrices,
    check_product,
    communicator,
    op,
    shape_of,
)
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import new_array
from pdgemm.matrix.matrix_base import on_diagonal
from pdgemm.names import AlgorithmName, MoverName
from pdgemm.planning.machines.machine import Machine
from pdgemm.planning.planner import TIE
from pdgemm.planning.product_layouts import triangle_block
from pdgemm.planning.product_plan import ProductPlan
from pdgemm.planning.program import stage_seconds
from pdgemm.schedules.products.triangle_blocks import TriangleBlocks, planned_blocks, triangle_shape
from pdgemm.schedules.staircase import Staircase, TriangleName
from pdgemm.support.agreement import together
from pdgemm.support.text import op_name
from pdgemm.transport.store import store

Uplo = Literal["L", "U"]
TRIANGLE = TriangleBlocks.algorithm
MOST_RANKS = 128  # with more ranks, triangle blocks are not compared: counting all messages takes seconds
EVEN = 1.1  # limit of largest share / mean share of a triangle, up to which the shares of ranks count as even


class RankOptions(TypedDict, total=False):
    """The options of `pdgemm` that the functions of this module take for their products."""

    algorithm: AlgorithmName | Literal["triangle"]
    shape: tuple[int, int] | None
    layers: int | None
    lookahead: int | None
    panel_width: int | None
    memory_limit: int | None
    mover: MoverName
    machine: Machine | None
    progress: Callable[[int, int], object] | None
    check: bool


def herk(
    alpha: float,
    A: DistMatrix,
    beta: float = 0.0,
    C: DistMatrix | None = None,
    *,
    uplo: Uplo = "L",
    trans: Literal["N", "C"] = "N",
    **options: Unpack[RankOptions],
) -> DistMatrix:
    """Compute one triangle of C := alpha op(A) op(A)^H + beta C.  Collective over the grid of A.

    alpha, beta : real numbers.  beta == 0: C is not read.
    A : DistMatrix (n, k), or (k, n) with trans="C", float32, float64, complex64 or complex128, of any layout; also a
        view.
    C : DistMatrix (n, n) of the type of A and any layout.  The other triangle is neither read nor written; imaginary
        parts of the diagonal are taken as zero and set to zero, as by BLAS.  None: a new matrix whose other triangle
        is zero, in blocks such that the ranks share the computed triangle evenly, on the grid of A (if A is a
        transposed view, on the grid of the viewed matrix).
    uplo  : "L" or "U", the triangle that is computed, with the diagonal.
    trans : "N" op(A) = A, "C" op(A) = A^H.
    options : algorithm ("summa", "cannon", "2.5d", "inner", "row", "column", "triangle" or "auto"), shape, layers,
        lookahead, panel_width, memory_limit, mover, machine, progress and check, as for `pdgemm`.  "triangle", triangle
        blocks (`docs/algorithms.md`), is for the host, and takes layers, machine, progress and check.

    Returns C; `C.report` is the report of the product.

    Cost per rank on Pr x Pc = P ranks: n^2 k/P flops, half the flops of a product; at most nk (1/Pr + 1/Pc) words in;
    "inner" sends half of C's words, n^2/2; "triangle" with L layers and P = L c (c + 1) receives nk/(L c) words of A,
    and L n^2/(2P) of C.  With fewer than 16 blocks of C per grid row and column the work is uneven.
    Raises LayoutError, DTypeError, ArgumentError and the errors of `pdgemm`, the same on every rank.
    Error: |C - C^| <= gamma_k |alpha||A||A|^H (Higham 2002, 3.5).
    """
    return _rank_k(alpha, A, A, beta, C, uplo, trans, options, hermitian=True, real=("alpha", "beta"))[0]


def syrk(
    alpha: complex,
    A: DistMatrix,
    beta: complex = 0.0,
    C: DistMatrix | None = None,
    *,
    uplo: Uplo = "L",
    trans: Literal["N", "T"] = "N",
    **options: Unpack[RankOptions],
) -> DistMatrix:
    """Compute one triangle of C := alpha op(A) op(A)^T + beta C.  Collective over the grid of A.

    alpha, beta : numbers of C's type.
    trans : "N" op(A) = A, "T" op(A) = A^T.
    Other arguments, cost, errors and result are those of `herk`; the diagonal of C may be complex.
    """
    return _rank_k(alpha, A, A, beta, C, uplo, trans, options, hermitian=False)[0]


def her2k(
    alpha: complex,
    A: DistMatrix,
    B: DistMatrix,
    beta: float = 0.0,
    C: DistMatrix | None = None,
    *,
    uplo: Uplo = "L",
    trans: Literal["N", "C"] = "N",
    **options: Unpack[RankOptions],
) -> DistMatrix:
    """Compute one triangle of C := alpha op(A) op(B)^H + conj(alpha) op(B) op(A)^H + beta C.  Collective.

    alpha : a number of C's type.   beta : a real number.
    A, B : DistMatrix (n, k), or (k, n) with trans="C", of one type and any layouts over the same ranks.
    Other arguments, errors and the result are those of `herk`; the cost is twice as much, and `C.report` is the sum of
    the reports of two products, with an inner dimension of 2k.
    """
    return _rank_2k(alpha, np.conj(alpha), A, B, beta, C, uplo, trans, options, hermitian=True)


def syr2k(
    alpha: complex,
    A: DistMatrix,
    B: DistMatrix,
    beta: complex = 0.0,
    C: DistMatrix | None = None,
    *,
    uplo: Uplo = "L",
    trans: Literal["N", "T"] = "N",
    **options: Unpack[RankOptions],
) -> DistMatrix:
    """Compute one triangle of C := alpha op(A) op(B)^T + alpha op(B) op(A)^T + beta C.  Collective over the grid.

    alpha, beta : numbers of C's type.
    Other arguments, cost, errors and result are those of `her2k`, with trans "N" or "T"; C's diagonal may be complex.
    """
    return _rank_2k(alpha, alpha, A, B, beta, C, uplo, trans, options, hermitian=False)


def _rank_2k(
    alpha: complex, other: complex, A: DistMatrix, B: DistMatrix, beta: complex, C: DistMatrix | None, uplo: str,
    trans: str, options: RankOptions, hermitian: bool,
) -> DistMatrix:  # fmt: skip
    """Compute one triangle of C := alpha op(A) op(B)^H + other op(B) op(A)^H + beta C, or with transposes.

    Both terms are computed by triangle blocks, or one after the other.
    """
    steps, real = Steps(), ("beta",) * hermitian
    C, both = _rank_k(alpha, A, B, beta, C, uplo, trans, options, hermitian, real, terms=2)
    if both:
        return C
    steps.did(C)
    steps.did(_rank_k(other, B, A, 1, C, uplo, trans, options, hermitian)[0])
    n, k = A.shape if trans in ("N", "n") else A.shape[::-1]
    return steps.reported(C, mnk=(n, n, 2 * k))  # [A B] [B A]^H = A B^H + B A^H


def gram(A: DistMatrix, *, uplo: Literal["full", "L", "U"] = "full", **options: Unpack[RankOptions]) -> DistMatrix:
    """Return the Gram matrix A^H A of the columns of A.  Collective over the grid of A.

    A : DistMatrix (m, n), float32, float64, complex64 or complex128, of any layout.
    uplo : "full": both triangles; "L" or "U": this triangle, the other is zero.
    options : the options of `herk`.

    The result has the layout of a new C of `herk`; with "full" it is exactly Hermitian.  `report` is the report
    of the product, and of the redistribution that fills the other triangle.

    Cost per rank: m n^2/P flops, half the flops of a product; words in as for `herk`, and n^2/P for the other triangle.
    Errors are those of `herk`.
    """
    with together(communicator(A=A)) as arguments:
        arguments += ["gram", as_name(uplo, "uplo", ("full", "L", "U"))]
    if uplo != "full":
        return herk(1.0, A, uplo=uplo, trans="C", **options)
    steps = Steps()
    lower = steps.did(herk(1.0, A, uplo="L", trans="C", **options))
    return steps.reported(steps.did(both_triangles(lower, "L")))


def both_triangles(A: DistMatrix, triangle: TriangleName, hermitian: bool = True) -> DistMatrix:
    """Return the Hermitian (or symmetric) matrix that a triangle of A defines, in the layout of A.  Collective.

    The other triangle of A is sent, too, but not used; imaginary parts of the diagonal of a Hermitian matrix are set to
    zero.  `report` is that of the redistribution.
    """
    full = redistribute(A.H if hermitian else A.T, like=A)
    store(full.stored, A.stored, CONVERT if A.conjugated == full.conjugated else CONJUGATE, within=_within(triangle, A))
    if hermitian:
        make_diagonal_real(full)
    return full


def _rank_k(
    alpha: complex,
    A: DistMatrix,
    B: DistMatrix,
    beta: complex,
    C: DistMatrix | None,
    uplo: str,
    trans: str,
    options: RankOptions,
    hermitian: bool,
    real: tuple[str, ...] = (),
    terms: int = 1,
) -> tuple[DistMatrix, bool]:
    """Compute one triangle of C := alpha op(A) op(B)^H + beta C, or with op(B)^T if not `hermitian`.  Collective.

    real : names of the scalars that must be real.
    terms : 2 if conj(alpha) op(B) op(A)^H, or alpha op(B) op(A)^T, will be added to C.
    Returns C, and whether it was computed by triangle blocks, which add both terms.
    """
    arguments = dict[str, Any](options)
    progress, check = arguments.pop("progress", None), arguments.pop("check", True)
    unknown = {*arguments} - ({x.name for x in fields(ProductOptions)} - {"triangle", "epilogue"})
    known = ProductOptions(**{name: value for name, value in arguments.items() if name not in unknown})
    form = RankUpdate(uplo, trans, hermitian, real, (*unknown,), known.protect)
    of_a_triangle = replace(known, protect=None, triangle=uplo)  # type: ignore[arg-type]  # `operands` checks it
    instead = TriangleChoice(known, hermitian, terms)
    if known.algorithm == TRIANGLE:
        of_a_triangle = ProductOptions(machine=known.machine, triangle=uplo)  # type: ignore[arg-type]
    result = carried_out(form, alpha, A, B, beta, C, of_a_triangle, progress, check, instead)
    if hermitian:
        make_diagonal_real(result)
    return result, instead.chosen


@dataclass
class TriangleChoice:
    """The choice between a planned product and triangle blocks, which is the same on all ranks.

    options : those of the caller.   hermitian, terms : as for `_rank_k`.
    chosen : whether triangle blocks were chosen.
    """

    options: ProductOptions
    hermitian: bool
    terms: int
    chosen: bool = False

    def __call__(self, plan: ProductPlan, operands: Operands, alpha: Any) -> Alternative:
        """Return triangle blocks if the caller requests them or they take less time, else None.  Local."""
        self.chosen = False  # a product may be set up twice: see `shared_or_sent`
        (n, _, k), size, problem, x = plan.mnk, plan.problem.size, plan.problem, self.options
        required, layers = x.algorithm == TRIANGLE, as_optional(x.layers, "layers", 1)
        free = ("machine", *("algorithm", "layers") * required)
        refused = [y.name for y in fields(x) if y.name not in free and getattr(x, y.name) != y.default]
        refused += ["matrices on a device"] * bool(problem.device) + [f"layers={layers}"] * ((layers or 1) > size)
        if required and refused:
            takes = f"layers <= {size}, machine, progress and check, but not {', '.join(refused)}"
            raise ArgumentError(f'algorithm "triangle" takes {takes}')
        in_place = problem.shared and not problem.nodes  # panels are read without copies: fewer words save nothing
        if not n * k or alpha == 0 or not (required or (not refused and not in_place and 1 < size <= MOST_RANKS)):
            return None
        second = [("B", operands.B.H if self.hermitian else operands.B.T)] * (self.terms - 1)
        sources = dict([("A", operands.A), *second])
        layouts = {name: x.layout_in(operands.A.grid) for name, x in (sources | {"C": operands.C}).items()}
        shape = triangle_shape(n, k, size, self.terms, layers)
        schedule: TriangleBlocks = planned_blocks(*map(layouts.get, "ABC"), (*range(size),), problem.triangle, *shape)
        if not required and stage_seconds(schedule, problem.machine, size) * TIE > self.terms * plan.seconds:
            return None
        self.chosen = True
        return schedule, partial(TriangleRun, schedule, alpha, sources, operands, self.hermitian, problem.machine)


class RankUpdate(NamedTuple):
    """A product of which one triangle is computed: op(A) op(B)^H, or op(A) op(B)^T if not `hermitian`.

    real : names of the scalars that must be real.   unknown : names of unknown options.   protect : must be None.
    """

    uplo: str
    trans: str
    hermitian: bool
    real: tuple[str, ...]
    unknown: tuple[str, ...]
    protect: str | None

    def operands(self, alpha: Any, A: DistMatrix, B: DistMatrix, beta: Any, C: DistMatrix | None) -> Operands:
        """Return op(A), op(B)^H or op(B)^T, and C, after checking that they match; C is allocated if None.  Local."""
        check_matrices(A=A, B=B, **({} if C is None else {"C": C}))
        if self.unknown:
            raise ArgumentError(f"unknown options: {', '.join(self.unknown)}")
        if self.protect is not None:
            raise ArgumentError(
                "protect compares whole rows of a product, and this is a triangle: use pdgemm(alpha, A, A.H)"
            )
        uplo: Any = as_name(self.uplo, "uplo", ("L", "U"))
        letter, other = op_letter(self.trans, "trans"), "C" if self.hermitian else "T"
        if letter not in ("N", other):
            raise ArgumentError(f'trans is "N" or "{other}", got {self.trans!r}')
        left, right = op(A, letter), op(B, letter)
        if left.shape != right.shape:
            raise LayoutError(f"op(A) is {shape_of(left)}, op(B) is {shape_of(right)}: their shapes must be the same")
        check_devices(left, right, C)
        for name, x in (("A", A), ("B", B)):
            check_dtype(name, x, dtypes.BLAS)
        right = right.H if self.hermitian else right.T
        result = _new(left, right, uplo) if C is None else C
        check_product(left, right, result)
        if not A.dtype == B.dtype == result.dtype:
            raise DTypeError(f"A is {A.dtype}, B {B.dtype} and C {result.dtype}: all must be of one type")
        for name, scalar in (("alpha", alpha), ("beta", beta)):
            if name in self.real:
                as_scalar(scalar, np.dtype(np.float64), name)
        names = op_name("A", letter), op_name("A" if A is B else "B", other if letter == "N" else "N")
        return Operands(left, right, result, C is None, A is B, names=names)


def _new(A: DistMatrix, B: DistMatrix, triangle: TriangleName) -> DistMatrix:
    """Return a C of zeros on the base grid of A, in the layout of A B or in square blocks.

    The blocks are square if the layout of A B would give the ranks very different parts of the triangle.
    """
    grid, n = A.grid.base, A.shape[0]
    C = Distribution(A.distribution.rows, B.distribution.cols) if grid.same_as(A.grid) else None
    if C is None or C.grid_shape != grid.shape or not _even(C, triangle):
        C = Distribution.over(grid.shape, (n, n), triangle_block(n, *grid.shape))
    order: Order = "F" if all((x.order == "F") != x.grid.transposed for x in (A, B)) else "C"
    local = new_array(C.local_shape(grid.coords), A.dtype, order, grid, devices.of(A.stored))
    scale(0, local)
    return DistMatrix(local, grid, C, order)


def _even(C: Distribution, triangle: TriangleName) -> bool:
    """Do all ranks of the grid have about the same number of elements of a triangle of C?"""
    rows, cols = ([x.indices(part) for part in range(x.parts)] for x in (C.rows, C.cols))
    areas = [Staircase.of(triangle, r, c).area for r in rows for c in cols]
    return max(areas) * len(areas) <= EVEN * sum(areas)


def _within(triangle: TriangleName, C: DistMatrix) -> Staircase:
    """Return the elements of this rank's local array of C that are in a triangle.  Local."""
    return Staircase.of(triangle, *C.indices())


def make_diagonal_real(C: DistMatrix) -> None:
    """Set the imaginary parts of the diagonal elements to zero.  Local."""
    if C.dtype.kind != "c":
        return
    rows, cols = on_diagonal(C)
    if devices.of(C.stored) is None:
        C.stored[rows, cols] = C.stored[rows, cols].real
        return
    x = C.stored if C.stored.strides[1] == C.stored.itemsize else C.stored.T
    if x is not C.stored:
        rows, cols = cols, rows
    recorder = recorder_of(C.stored)
    with recorder.phase("compute"):
        for i, j in zip(rows.tolist(), cols.tolist()):
            x[i : i + 1, j : j + 1].view(x.dtype.char.lower())[:, 1:] = 0
    recorder.finish()
