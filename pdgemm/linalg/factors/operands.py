"""Arguments of the functions of `pdgemm.linalg`: checks, types, new matrices, and vectors as right-hand sides."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from inspect import signature
from typing import Any, Literal, TypeVar

import numpy as np

from pdgemm.algorithms.panels.panel_run import run_on_one_rank, working_copy
from pdgemm.algorithms.planned_program import matrices_in
from pdgemm.algorithms.redistribution import redistribute
from pdgemm.errors import DeviceError, DTypeError, LayoutError
from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.grids.layout import Order
from pdgemm.instrument.run_report import RunReport
from pdgemm.instrument.step_reports import Steps
from pdgemm.local.arrays import device as devices, dtypes
from pdgemm.local.arrays.device import to_host
from pdgemm.local.arrays.element_functions import element_function
from pdgemm.local.arrays.elementwise import set_elements
from pdgemm.matrix.argument_checks import (
    check_devices,
    check_dtype,
    check_matrices,
    check_result,
    communicator,
    shape_of,
)
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import empty_like
from pdgemm.schedules.mover_registry import SHARED
from pdgemm.schedules.panels.panel_schedule import diagonal_panels, is_balanced
from pdgemm.support.agreement import described_elements, together

SMALL = 512  # largest order that LAPACK factors faster on one rank, to which the matrix is moved, than all ranks
ON_NODE = 4  # factor on the orders up to which LAPACK on one rank is faster, where it uses the cores of all ranks
F = TypeVar("F", bound=Callable[..., Any])
_OPERANDS = ("A", "B", "L")
# functions that take matrices of integers as they are; the others convert integers to float64
_OF_INTEGERS = ("kron", "matrix_power", "matvec", "norm", "outer")


def takes_arrays(function: F) -> F:
    """Return the function, extended to lists and arrays as operands, as for `@`; all ranks pass the same ones.

    A list becomes an array.  A 2-D array is distributed over the grid of the first matrix; a 1-D array stays a vector.
    A matrix of integers is converted to float64, as in NumPy, except for the functions in _OF_INTEGERS.
    """
    names, name = tuple(signature(function).parameters), function.__name__

    @wraps(function)
    def taking(*arguments: Any, **options: Any) -> Any:
        matrices = [x for x in matrices_in(*arguments, *options.values())[0] if isinstance(x, DistMatrix)]

        def taken(operand: str, x: Any) -> Any:
            if operand not in _OPERANDS or not isinstance(x, (list, np.ndarray, DistMatrix)):
                return x
            if isinstance(x, list) or (x.ndim != 1 and not isinstance(x, DistMatrix)):
                with together(matrices[0].grid.comm) as described:
                    described += [name, f"{operand} is an array"]
                    x = to_host(devices.adopted(x))
                if x.ndim == 2:
                    x = DistMatrix.from_global(x, grid=matrices[0].grid.base, device=matrices[0].device)
            whole = isinstance(x, DistMatrix) and x.dtype.kind in "biu" and name not in _OF_INTEGERS
            return in_type(x, np.dtype(float)) if whole else x

        if not matrices:
            return function(*arguments, **options)
        operands = [*map(taken, names, arguments), *arguments[len(names) :]]
        return function(*operands, **{key: taken(key, x) for key, x in options.items()})

    changed: Any = taking
    changed.__code__ = changed.__code__.replace(co_qualname=function.__qualname__)  # shown by the watchdog
    return changed


def check_operand(
    name: str, A: Any, square: bool = False, supported: Any = dtypes.BLAS, panels: bool = False, factored: bool = False
) -> None:
    """Raise where A is not a DistMatrix of a `supported` type, or not `square`.  Local, inside `together`.

    panels : raise DeviceError where ranks cannot exchange panels of a matrix on a device.
    factored : also raise it where the device has no library to factor panels.
    """
    check_matrices(**{name: A})
    check_dtype(name, A, supported)
    if (panels or factored) and not is_reachable(A):
        reach = devices.of(A.stored).reach(A.grid)  # type: ignore[union-attr]
        raise DeviceError(f"{name} is on {A.device}, and {reach}: factor it on the host, {name}.to_host()")
    if square and A.shape[0] != A.shape[1]:
        raise LayoutError(f"{name} must be square, but it is {shape_of(A)} on a {A.grid} grid")
    if factored and (device := devices.of(A.stored)):
        device.load_factorisations()  # here, where an error of one rank is raised on all ranks


def is_reachable(A: DistMatrix) -> bool:
    """Can ranks exchange panels of a matrix?  On a device: by reads in place, or by MPI with device pointers."""
    device = devices.of(A.stored)
    reach = device.reach(A.grid) if device and A.grid.size > 1 else None
    return reach is None or not reach.staged or reach.reads == SHARED.name


def check_right_side(A: DistMatrix, B: object, side: str = "L") -> None:
    """Raise where B is not a right-hand side of A X = B (side "L") or X A = B ("R"): a matrix or a vector.  Local."""
    n, name = A.shape[0], "B"
    if isinstance(B, DistMatrix):
        check_dtype(name, B, dtypes.BLAS)
        check_devices(A, B, None)
        if B.shape[side == "R"] != n:
            lines = "rows" if side == "L" else "columns"
            raise LayoutError(f"A is {shape_of(A)}, so B must have {n} {lines}, but it is {shape_of(B)}")
        B.layout_in(A.grid)
        return
    if not isinstance(B, np.ndarray) or B.ndim != 1:
        raise DTypeError(f"B must be a DistMatrix, or an array that is the same on every rank, got {type(B).__name__}")
    if len(B) != n:
        raise LayoutError(f"A is {shape_of(A)}, so B must have {n} elements, but it has {len(B)}")


def operand_description(*operands: Any) -> list[str]:
    """Return texts by which ranks compare operands: a matrix's layout, a vector's type and checksum.  Local.

    The list is empty where a matrix is on a grid of one rank, which has nothing to compare.
    """
    if any(isinstance(x, DistMatrix) and x.grid.comm.size == 1 for x in operands):
        return []
    return [
        repr(x.layout_in(x.grid)) if isinstance(x, DistMatrix) else f"{x.dtype} {described_elements(x)}"
        for x in operands
    ]


def solved_on_one_rank(
    F: DistMatrix, B: Any, overwrite: bool, solve: Callable[[np.ndarray, np.ndarray], object]
) -> Any:
    """Return X of A X = B, by factors F for which `has_one_rank` is true, in the layout of B.  Collective.

    solve : overwrites a local array of B, in the memory order of F, with X.   overwrite : X may be stored in B.
    """
    steps, dtype, there = Steps(what=solution(F, B)), common_dtype(F, B), F.grid
    F = in_type(F, dtype)
    if not isinstance(B, DistMatrix):
        X = column(B, F, dtype)
    elif F.layout_in(F.grid).grid == B.layout_in(F.grid).grid:
        X = working_copy(B, 0, True, overwrite, F.order, dtype)[0]
    else:
        X = steps.did(redistribute(B, grid=there, order=F.order, dtype=dtype))
    extents, work = (len(F), X.shape[1], len(F)), partial(solve, F.stored, X.stored)
    steps.ran(run_on_one_rank("solve", F, extents, work, None, solution(F, B))[1])
    if not isinstance(B, DistMatrix):
        return X.allgather()[:, 0]
    if X.layout_in(there).grid != B.layout_in(there).grid:
        X = steps.did(X.redistribute(B if overwrite and B.dtype == dtype else empty_like(B, dtype)))
    return steps.reported(X)


def solution(A: DistMatrix, B: Any) -> str:
    """Return the title of the report of a solution of A X = B."""
    return f"Solution of {shape_of(A)}, {' x '.join(map(str, B.shape))}"


def common_dtype(*arrays: Any) -> np.dtype:
    """Return the common type of arrays, float64 for integers.  Raises DTypeError for a type that BLAS does not have."""
    dtype = np.result_type(*(x.dtype for x in arrays))
    dtype = np.dtype(float) if dtype.kind in "biu" else dtype
    if dtype not in dtypes.BLAS:
        raise DTypeError(f"the common type of the operands is {dtype}, which is not one of {dtypes.names(dtypes.BLAS)}")
    return dtype


def has_one_rank(A: DistMatrix) -> bool:
    """Return whether LAPACK can read all of A as it is stored, on a grid of one rank on the host.  Local."""
    return A.distribution.grid_shape == (1, 1) and A.device == devices.HOST and not A.conjugated


def to_factor(
    name: str,
    A: DistMatrix,
    block: int,
    overwrite: bool,
    *others: object,
    order: Order | None = None,
    small: Literal["", "rank", "node"] = "",
    aligned: bool = False,
    square: bool = False,
    transposed: bool = False,
) -> tuple[DistMatrix, list[RunReport]]:
    """Check A; return A or a copy, for a panel algorithm to overwrite, and the reports of copying.  Collective.

    The copy has the layout of A if this shares the work evenly, else square blocks of size `block`.
    small : "rank": the copy of a matrix up to order SMALL is on a grid of one rank, with order "F", which LAPACK
        factors; "node": also that of a larger one, where LAPACK gains from the cores of other ranks.
    others : other arguments that the ranks compare.
    order : memory order of the copy, on one rank of the host "F"; None: that of A.
    aligned : all panels of `block` columns must begin at multiples of `block`, so that each is in one block.
    square : A must be square.   transposed : A^T is returned, or a copy of it.
    """
    with together(communicator(A=A)) as arguments:
        check_operand("A", A, square, factored=True)
        if overwrite:
            check_result("A", A, {})
        A = in_joined_blocks(A)
        fits = is_balanced(A.layout_in(A.grid), block)
        if aligned:
            starts = [x.start for x in diagonal_panels(A.distribution.rows, A.distribution.cols, block)]
            fits = fits and starts == [*range(0, min(A.shape), block)]
        on_host, one = A.device == devices.HOST, A.distribution.grid_shape == (1, 1)
        most = most_on_one_rank(A, SMALL) if small == "node" else SMALL
        on_one_rank = small and max(A.shape) <= most and on_host and not one
        arguments += [name, bool(overwrite), *others, *operand_description(A)]
    A = A.T if transposed else A
    if on_one_rank:
        W = redistribute(A, grid=A.grid.base.reshaped((1, 1), A.grid.rank_map[:1]), order="F")
        return W, [W.report] if W.report else []
    return working_copy(A, block, fits, overwrite, "F" if order and one and on_host else order)


def in_joined_blocks(A: DistMatrix) -> DistMatrix:
    """Return a view of A in one block along a dimension that is not divided, so that panels do not end there.  Local.

    Its layout is that of A.  On a device it is A: the synchronisations of panels are tested with these panels.
    """
    if A.device != devices.HOST:
        return A
    return A._view(A.stored, A.grid, A.distribution.canonical, A.order)


def to_one(size: float, dtype: np.dtype) -> tuple[float, float]:
    """Return two powers of four that scale a number > 0 to between 1/2 and 2; their product may overflow."""
    exponent, most = 2 * round(np.log2(size) / 2), dtypes.largest_power(dtype) // 2 * 2
    near = max(-most, min(-exponent, most))
    return 2.0**near, 2.0 ** (-exponent - near)


def identity_like(A: DistMatrix) -> DistMatrix:
    """Return a matrix with the elements of the identity in the layout of A.  Collective."""
    return empty_like(A)._filled("eye", element_function("eye", 0, np.dtype("d")))


def in_type(A: DistMatrix, dtype: np.dtype) -> DistMatrix:
    """Return A, or a copy in another type.  Collective."""
    return A if A.dtype == dtype else working_copy(A, 0, True, False, dtype=dtype)[0]


def most_on_one_rank(A: DistMatrix, order: int) -> int:
    """Return the largest order for LAPACK on one rank, where a routine gains from the cores of other ranks.  Local.

    order : the largest order without these cores, which is right where A's ranks are on several nodes.
    """
    one_node = A.grid.ranks_per_node is None and A.device == devices.HOST
    return order * ON_NODE if one_node else order


def in_whole_columns(X: DistMatrix, A: DistMatrix) -> DistMatrix:
    """Return a copy of X, of A's type, whose columns are not divided among the ranks of A's grid.  Collective."""
    ranks = A.grid.rank_map
    return redistribute(X, grid=A.grid.work_grid((1, len(ranks)), 1, ranks), dtype=A.dtype)


def column(b: np.ndarray, A: DistMatrix, dtype: np.dtype) -> DistMatrix:
    """Return a vector or a few columns, held by every rank, as a matrix with rows distributed as A's.  Collective."""
    whole = b if b.ndim == 2 else b[:, None]
    cols = BlockCyclic.even(whole.shape[1], A.grid.shape[1])
    X = empty_like(A, dtype, Distribution(A.distribution.rows, cols), "F")
    set_elements(X.stored, np.asarray(whole[np.ix_(*X.indices())], dtype))
    return X
