"""Local checks of matrices and their types: no function here communicates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from inspect import signature
from numbers import Number
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from pdgemm.errors import ArgumentError, DeviceError, DTypeError, LayoutError
from pdgemm.local.arrays import dtypes
from pdgemm.local.arrays.arguments import as_name, shown
from pdgemm.local.arrays.device import HOST, Array, address, shadow, writeable
from pdgemm.local.arrays.emulation import EMULATIONS
from pdgemm.local.blas.local_gemm import BLAS_INT, largest_extent
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.support.agreement import check_not_freed
from pdgemm.support.text import typed

F = TypeVar("F", bound=Callable[..., Any])
_NUMBERS: Any = (Number, np.number, *(x.type for x in dtypes.NARROW))
_KINDS = "sums must be of the same kind (integer, real, complex) as C, and A and B of no wider kind"


def communicator(**matrices: object) -> MPI.Intracomm:
    """Return the communicator over which the ranks compare their arguments: that of the first grid that is not freed.

    Raises DTypeError where no argument is a matrix: only on this rank, because there is no communicator to agree over.
    """
    communicators = [x.grid.comm for x in matrices.values() if isinstance(x, DistMatrix)]
    if communicators:
        return next(filter(None, communicators), communicators[0])
    name, x = next(iter(matrices.items()))
    raise _no_matrix(name, x)


def _no_matrix(name: str, x: object) -> DTypeError:
    distribute = f"; DistMatrix.from_global({name}, grid=grid) distributes it" if isinstance(x, np.ndarray) else ""
    return DTypeError(f"{name} must be a DistMatrix, got {type(x).__name__}{distribute}")


def check_matrices(**matrices: object) -> None:
    """Raise DTypeError for an argument that is not a matrix, GridError for a matrix whose grid was freed."""
    for name, x in matrices.items():
        if not isinstance(x, DistMatrix):
            raise _no_matrix(name, x)
        check_not_freed(x.grid.comm)


def last_may_be_missing(function: F) -> F:
    """Let callers omit the last required argument of a function: it is then None.  The signature shows no default.

    So the function's own checks report the mistake: in `pdgemm(A, B)` alpha is missing, but Python would report B.
    """
    changed: Any = function
    changed.__signature__ = signature(function)
    changed.__defaults__ = (None, *(changed.__defaults__ or ()))
    return function


def check_alpha(alpha: object) -> None:
    """Raise DTypeError for a matrix in place of alpha, the commonest first mistake."""
    if isinstance(alpha, DistMatrix) or hasattr(alpha, "__pdgemm__"):
        arguments = "the arguments are pdgemm(alpha, A, B), or matmul(A, B)"
        raise DTypeError(f"alpha must be a number, got {type(alpha).__name__}; {arguments}")


def as_scalar(value: Any, dtype: np.dtype, name: str) -> Any:
    """Return alpha or beta as a number of the kind of `dtype`.

    Raises DTypeError for another kind, ArgumentError for a finite number that overflows in the arithmetic of the type.
    """
    value = value[()] if type(value) is np.ndarray and value.ndim == 0 else value
    if dtype.kind == "f" and type(value) in (int, float) and abs(value) < 1e38:
        return float(value)
    if not isinstance(value, _NUMBERS):
        raise DTypeError(f"{name} must be a number, got {type(value).__name__}")
    kind, wide = dtypes.kind_rank(dtype), dtypes.arithmetic(dtype)
    if kind < 2 and np.iscomplexobj(value):
        raise DTypeError(f"{name} = {shown(value)} is complex, but the result is {dtype}")
    try:
        number: Any = complex(value) if kind == 2 else float(value)
        with np.errstate(over="ignore"):
            overflow = np.isfinite(number) and kind > 0 and not np.isfinite(wide.type(number))
    except OverflowError:
        number, overflow = None, True
    if overflow or (np.isinf(number) and number != value):
        raise ArgumentError(f"{name} = {shown(value)} is too large for a result of {dtype}")
    if kind > 0:
        return number
    if not np.isfinite(number) or value != int(value):
        raise DTypeError(f"{name} = {shown(value)} is not an integer, but the result is {dtype}")
    modulus = 2 ** (8 * wide.itemsize)
    return (int(value) + modulus // 2) % modulus - modulus // 2


def op(A: DistMatrix, letter: str) -> DistMatrix:
    """Return op(A): A, its transpose or its conjugate transpose, for "N", "T" or "C" (`op_letter`)."""
    return A if letter == "N" else A.T if letter == "T" else A.H


def accumulation(
    a: np.dtype, b: np.dtype, c: np.dtype, requested: Any, compute_type: Any = None
) -> tuple[np.dtype, str]:
    """Return the type in which products are accumulated, and the type to which A and B are rounded, "" for none.

    a, b, c : the types of A, B and C.   requested : the argument accumulate_dtype.
    """
    if compute_type is not None:
        as_name(compute_type, "compute_type", dtypes.COMPUTE)
    return _accumulation(a, b, c, None if requested is None else dtypes.element_type(requested), compute_type)


@lru_cache(maxsize=256)
def _accumulation(
    a: np.dtype, b: np.dtype, c: np.dtype, requested: np.dtype | None, compute_type: str | None
) -> tuple[np.dtype, str]:
    """Return the result of `accumulation` for a requested type that was checked.  Raises DTypeError."""
    if compute_type is None:
        accumulate = dtypes.arithmetic(a, b, c) if requested is None else requested
    else:
        real = np.dtype(EMULATIONS[compute_type].sums if compute_type in EMULATIONS else np.float32)
        accumulate = np.result_type(real, np.complex64) if dtypes.kind_rank(c) == 2 else real
        if dtypes.kind_rank(c) == 0 or (dtypes.kind_rank(c) == 2 and compute_type in dtypes.HALF_NAMES):
            raise DTypeError(f"compute_type {compute_type!r} is not for products of type {c}")
        if requested is not None and requested != accumulate:
            raise DTypeError(f"with compute_type {compute_type!r} sums are {accumulate}, not {requested}")
    if accumulate not in dtypes.SUMS:
        raise DTypeError(f"accumulate_dtype {accumulate}: products are accumulated in {dtypes.names(dtypes.SUMS)}")
    if dtypes.kind_rank(accumulate) != dtypes.kind_rank(c) or not dtypes.can_convert(dtypes.common(a, b), c):
        raise DTypeError(f"A {a} times B {b}, accumulated in {accumulate}, cannot be stored in C {c}: {_KINDS}")
    return accumulate, compute_type if compute_type not in (None, "float32") else ""


def check_result(name: str, C: DistMatrix, operands: Mapping[str, DistMatrix]) -> None:
    """Raise ArgumentError where C cannot be written to, or shares memory with an operand."""
    if C.conjugated:
        raise ArgumentError(f"{name} is the conjugate of another matrix, and cannot be written to")
    local = C.stored
    if not writeable(local):
        raise ArgumentError(f"{name} is read-only")
    for other, x in operands.items():
        if overlap(local, x.stored):
            instead = "A = A @ B in place of A @= B" if name == "C" else f"{other}.copy()"
            raise ArgumentError(
                f"{name} shares memory with {other}, which is read while {name} is written: use a separate matrix, "
                f"or {instead}"
            )


def same_places(X: DistMatrix, Y: DistMatrix) -> bool:
    """Return whether this rank has each element of X at the address of the same element of Y, or has no element."""
    x, y = X.stored, Y.stored
    same = (address(x), x.shape, x.strides, x.dtype) == (address(y), y.shape, y.strides, y.dtype)
    return X.same_layout(Y) and (same or x.size == y.size == 0)


def overlap(x: Array, y: Array) -> bool:
    """Return whether two arrays share memory; True if the exact test takes too long and their bounds overlap."""
    x, y = shadow(x), shadow(y)
    try:
        return np.shares_memory(x, y, max_work=10_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return np.may_share_memory(x, y)  # compares address bounds only


def check_devices(A: DistMatrix, B: DistMatrix, C: DistMatrix | None) -> None:
    """Raise DeviceError where the matrices of a product are not all on the host, or all on one device."""
    device = A.device
    if B.device != device or (C is not None and C.device != device):
        where = ", ".join(f"{name} on {x.device}" for name, x in (("A", A), ("B", B), ("C", C)) if x is not None)
        raise DeviceError(f"matrices of one product must be on one device, these are {where}: copy them with to_device")


def check_product(A: DistMatrix, B: DistMatrix, C: DistMatrix) -> None:
    """Raise where C cannot be the result of A B: DTypeError, LayoutError or ArgumentError."""
    check_dtype("C", C, dtypes.RESULTS)
    if C.shape != (A.shape[0], B.shape[1]):
        raise LayoutError(
            f"shape mismatch: C is {shape_of(C)}, op(A) op(B) is {A.shape[0]} x {B.shape[1]}: "
            f"op(A) is {shape_of(A)}, op(B) is {shape_of(B)}, on grids {C.grid}, {A.grid} and {B.grid}"
        )
    check_result("C", C, {"A": A, "B": B})


def check_dtype(name: str, x: DistMatrix, supported: tuple[np.dtype, ...]) -> None:
    """Raise DTypeError or DeviceError for an unsupported type, LayoutError for a local array too large for BLAS."""
    local = x.stored
    if local.dtype not in supported or not local.dtype.isnative:
        instead = f"convert it with {typed('--dtype', f'{name}.astype(float)')}"
        raise DTypeError(f"{name} has dtype {local.dtype}; supported: {dtypes.names(supported)}; {instead}")
    if x.device != HOST and not dtypes.multiplies_on_device(x.dtype, supported is dtypes.RESULTS):
        raise DeviceError(f"{name} of {x.dtype} can only be multiplied on the host; it is on {x.device}: use to_host")
    if (extent := largest_extent(local)) > BLAS_INT:
        raise LayoutError(
            f"{name} has a local part of shape {local.shape} and strides of {local.strides} bytes: a dimension or the "
            f"row stride is {extent} elements, BLAS takes up to {BLAS_INT}"
        )


def shape_of(x: DistMatrix) -> str:
    """Return the shape as text."""
    return f"{x.shape[0]} x {x.shape[1]}"
