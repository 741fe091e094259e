"""The functions of numpy.linalg for tensors: of a matrix, and of the matrices along the last two axes of a tensor.

A matrix is factored by all ranks together, by the functions of `pdgemm.linalg`.  Of a stack of matrices, each rank
factors some, by NumPy's function: the stack is moved so that no matrix is divided.  Matrices without elements, and
the eigenvalues of general matrices, which `pdgemm.linalg` does not have, are a stack of one: one rank has the matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

import pdgemm
from pdgemm import linalg
from pdgemm.errors import ArgumentError, LayoutError, LinAlgError
from pdgemm.linalg.work import Work
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.support.agreement import together
from pdgemm.tensors.indexing import tensor_copies
from pdgemm.tensors.indexing.tensor_copies import concatenate
from pdgemm.tensors.tensor_base import Axis, TensorBase, as_operand


class EigResult(NamedTuple):
    """Eigenvalues w (..., n) and eigenvectors V (..., n, n): A V = V diag(w)."""

    eigenvalues: Any
    eigenvectors: Any


class QRResult(NamedTuple):
    """Q, with orthonormal columns, and R, upper triangular: A = Q R."""

    Q: Any
    R: Any


class SlogdetResult(NamedTuple):
    """The sign of the determinant, and the logarithm of its absolute value."""

    sign: Any
    logabsdet: Any


class SVDResult(NamedTuple):
    """U, the singular values in descending order, and V^H: A = U diag(S) Vh."""

    U: Any
    S: Any
    Vh: Any


def _by_rank(function: Callable[..., Any], *operands: Any, cores: Sequence[int] = (2,)) -> tuple[Any, ...]:
    """Return the results of a function of stacks, each rank's items by itself.  Collective.

    function : a generalised function of NumPy: of arrays, whose last axes are those of an item, and whose other axes
               are broadcast; returns an array or a tuple of arrays of the same items.
    cores    : the number of an item's axes, for each operand.

    The axes of the stack are divided as those of a tensor of items.  Words: those of one exchange for each operand of
    another layout, which are in the report of a result.  An exception on a rank is raised on all ranks.
    """
    like = operands[0]
    items = [x.shape[x.ndim - core :] for x, core in zip(operands, cores)]
    with together(like.grid.comm) as arguments:
        arguments += [str(x.layout) for x in operands]
        stack = np.broadcast_shapes(*(x.shape[: x.ndim - core] for x, core in zip(operands, cores)))
        samples = _as_tuple(function(*(np.empty((0, *item), x.dtype) for x, item in zip(operands, items))))
    layout = like.default_layout(stack)

    def wide(item: Sequence[int]) -> Any:
        return layout.expanded(range(len(stack), len(stack) + len(item)), item)

    work, results = Work("stack"), tuple[Any, ...]()
    moved = [type(like)(as_operand(x, wide(item), like, work), wide(item)) for x, item in zip(operands, items)]
    with together(like.grid.comm):
        coords = like.grid.base.reshaped(layout.grid_shape, layout.rank_map).coords
        if min(coords) >= 0:
            try:
                results = _as_tuple(function(*(x.local for x in moved)))
            except np.linalg.LinAlgError as error:
                raise LinAlgError(f"{error}, in a stack of shape {(*stack, *items[0])} on a {like.grid} grid") from None
    tensors = [
        like.with_elements(wide(x.shape[1:]), x.dtype, lambda at=at: results[at]) for at, x in enumerate(samples)
    ]
    for x in () if work.empty else tensors:
        work.reported(x.unfolding, 0)
    return tuple(x._result() for x in tensors)


def _as_tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def _is_matrix(x: Any) -> bool:
    """Return whether all ranks factor x together: it is one matrix, with elements."""
    return x.ndim == 2 and x.size > 0


def _matrix(x: Any) -> DistMatrix:
    return x.matrix((0,), (1,))


def _as_result(x: Any, value: Any) -> Any:
    """Return a matrix, or values that are the same on every rank, as a result of a function of the tensor x."""
    if isinstance(value, DistMatrix):
        return type(x).of_matrix(value, value.shape)
    return type(x).from_global(np.asarray(value), grid=x.grid, device=x.device, check=False)._result()


def _checked(name: str, x: Any, square: bool = False) -> None:
    if x.ndim < 2 or (square and x.shape[-2] != x.shape[-1]):
        raise LayoutError(f"{name} takes {'square ' * square}matrices along the last two axes, got shape {x.shape}")


def _of_matrices(name: str, x: Any, *arguments: Any, square: bool = True, **options: Any) -> tuple[Any, ...]:
    """Return the results of the function of this name in `pdgemm.linalg`, or in numpy.linalg on each rank's items."""
    _checked(name, x, square)
    if _is_matrix(x):
        results = getattr(linalg, name)(_matrix(x), *arguments, **options)
        return tuple(_as_result(x, y) for y in _as_tuple(results))
    return _by_rank(lambda a: getattr(np.linalg, name)(a, *arguments, **options), x)


def cholesky(x: Any, /, *, upper: bool = False) -> Any:
    """Return L, where A = L L^H, or U, where A = U^H U, of each matrix A.  Collective; see `pdgemm.linalg.cholesky`."""
    _checked("cholesky", x, True)
    if _is_matrix(x):
        return _as_result(x, linalg.cholesky(_matrix(x), lower=not upper))
    return _by_rank(lambda a: np.linalg.cholesky(a, upper=upper), x)[0]


def cross(x1: Any, x2: Any, /, *, axis: int = -1) -> Any:
    """Return cross products of vectors of three elements along an axis.  Collective."""
    return tensor_copies.cross(x1, x2, axis)


def det(x: Any, /) -> Any:
    """Return the determinant of each matrix.  Collective; see `pdgemm.linalg.det`."""
    return _of_matrices("det", x)[0]


def diagonal(x: Any, /, *, offset: int = 0) -> Any:
    """Return a diagonal of each matrix; offset > 0 is above the main diagonal.  Collective."""
    return tensor_copies.diagonal(x, offset, -2, -1)


def eig(x: Any, /) -> EigResult:
    """Return eigenvalues and right eigenvectors of each matrix, complex numbers.  Collective.

    One rank has a whole matrix, also where x is one matrix: 24 n^2 words, and about 25 n^3 flops on this rank.
    """
    _checked("eig", x, True)
    return EigResult(*_by_rank(lambda a: tuple(y.astype(_complex(a)) for y in np.linalg.eig(a)), x))


def eigvals(x: Any, /) -> Any:
    """Return eigenvalues of each matrix, complex numbers.  Collective; one rank has a whole matrix, as for `eig`."""
    _checked("eigvals", x, True)
    return _by_rank(lambda a: np.linalg.eigvals(a).astype(_complex(a)), x)[0]


def _complex(a: np.ndarray) -> np.dtype:
    return np.result_type(a.dtype, np.complex64)


def eigh(x: Any, /) -> EigResult:
    """Return ascending eigenvalues and eigenvectors of each Hermitian matrix.  Collective; see `pdgemm.linalg.eigh`."""
    return EigResult(*_of_matrices("eigh", x))


def eigvalsh(x: Any, /) -> Any:
    """Return eigenvalues of each Hermitian matrix, ascending.  Collective; see `pdgemm.linalg.eigvalsh`."""
    return _of_matrices("eigvalsh", x)[0]


def inv(x: Any, /) -> Any:
    """Return the inverse of each matrix.  Collective; see `pdgemm.linalg.inv`."""
    return _of_matrices("inv", x)[0]


def matmul(x1: Any, x2: Any, /) -> Any:
    """Return products of the matrices along the last two axes, as numpy.matmul.  Collective; see `pdgemm.einsum`."""
    a, b = np.shape(x1), np.shape(x2)
    if not (a and b) or a[-1] != b[-2:][0]:
        raise LayoutError(f"matmul takes matrices of equal inner extents along the last two axes, got {a} and {b}")
    (left, i), (right, k) = (("ij", "i"), ("jk", "k"))
    if len(a) == 1:
        left, i = "j", ""
    if len(b) == 1:
        right, k = "j", ""
    return pdgemm.einsum(f"...{left},...{right}->...{i}{k}", x1, x2)


def matrix_norm(x: Any, /, *, keepdims: bool = False, ord: Any = "fro") -> Any:
    """Return a norm of each matrix: "fro", "nuc", 1, -1, 2, -2, inf or -inf.  Collective; see `pdgemm.linalg.norm`."""
    _checked("matrix_norm", x)
    if _is_matrix(x):
        dtype = np.linalg.norm(np.ones((1, 1), x.dtype)).dtype
        norm = np.asarray(linalg.norm(_matrix(x), ord)).astype(dtype)
        return _as_result(x, norm.reshape((1, 1) if keepdims else ()))
    return _by_rank(lambda a: np.linalg.matrix_norm(a, ord=ord, keepdims=keepdims), x)[0]


def matrix_power(x: Any, n: int, /) -> Any:
    """Return the power n of each matrix, of the inverse for n < 0.  Collective; see `pdgemm.linalg.matrix_power`."""
    return _of_matrices("matrix_power", x, n)[0]


def matrix_rank(x: Any, /, *, rtol: Any = None) -> Any:
    """Return the number of singular values above rtol times the largest, for each matrix.  Collective; see `pinv`."""
    return _with_rtol("matrix_rank", x, rtol)


def pinv(x: Any, /, *, rtol: Any = None) -> Any:
    """Return the pseudoinverse of each matrix.  Collective; see `pdgemm.linalg.pinv`.

    rtol : singular values up to rtol times the largest are taken for 0; by default max(m, n) eps; a number, or a
           tensor of numbers, one for each matrix.
    """
    return _with_rtol("pinv", x, rtol)


def _with_rtol(name: str, x: Any, rtol: Any) -> Any:
    """Return the result of a function with a tolerance, which may be a tensor of those of all matrices."""
    if isinstance(rtol, TensorBase) and not _is_matrix(x):
        _checked(name, x)
        return _by_rank(lambda a, each: getattr(np.linalg, name)(a, rtol=each), x, rtol, cores=(2, 0))[0]
    return _of_matrices(name, x, square=False, rtol=float(rtol) if _is_matrix(x) and rtol is not None else rtol)[0]


def matrix_transpose(x: Any, /) -> Any:
    """Return a view with the last two axes exchanged.  Local."""
    _checked("matrix_transpose", x)
    return x.transpose(*range(x.ndim - 2), x.ndim - 1, x.ndim - 2)


def outer(x1: Any, x2: Any, /) -> Any:
    """Return the matrix x1_i x2_j: of each element one product, so that zeros keep their signs.  Collective."""
    if x1.ndim != 1 or x2.ndim != 1:
        raise LayoutError(f"outer takes two vectors, not arrays of shapes {x1.shape} and {x2.shape}")
    return np.multiply(np.expand_dims(x1, 1), np.expand_dims(x2, 0))


def qr(x: Any, /, *, mode: Literal["reduced", "complete"] = "reduced") -> QRResult:
    """Return Q and R of each matrix; "complete": Q (m, m) and R (m, n).  Collective; see `pdgemm.linalg.qr`."""
    _checked("qr", x)
    if mode not in ("reduced", "complete"):
        raise ArgumentError(f"mode is 'reduced' or 'complete', got {mode!r}")
    if not _is_matrix(x):
        return QRResult(*_by_rank(lambda a: tuple(np.linalg.qr(a, mode=mode)), x))
    n, lacking = x.shape[1], x.shape[0] - x.shape[1] if mode == "complete" else 0
    if lacking <= 0:
        return QRResult(*(_as_result(x, y) for y in linalg.qr(_matrix(x))))
    zeros = type(x).zeros((x.shape[0], lacking), dtype=x.dtype, grid=x.grid, device=x.device)
    wide = concatenate([x, zeros], 1)  # further columns of Q are orthonormal to those of x
    Q, R = (_as_result(x, y) for y in linalg.qr(_matrix(wide), method="householder"))
    return QRResult(Q, R[:, :n])


def slogdet(x: Any, /) -> SlogdetResult:
    """Return sign and log |determinant| of each matrix.  Collective; see `pdgemm.linalg.slogdet`."""
    return SlogdetResult(*_of_matrices("slogdet", x))


def solve(x1: Any, x2: Any, /) -> Any:
    """Return the solutions X of A X = B for matrices A = x1 and B = x2, or a vector x2.  Collective.

    See `pdgemm.linalg.solve`, which solves the equations of one matrix.
    """
    _checked("solve", x1, True)
    B = x2.reshape(x2.shape[0], 1) if x2.ndim == 1 else x2
    if x1.shape[-1] != B.shape[-2]:
        raise LayoutError(f"solve: a matrix of shape {x1.shape} and a right-hand side of shape {x2.shape}")
    if _is_matrix(x1) and _is_matrix(B):
        X = _as_result(x1, linalg.solve(_matrix(x1), _matrix(B)))
    else:
        (X,) = _by_rank(np.linalg.solve, x1, B, cores=(2, 2))
    return X.reshape(X.shape[:-1]) if x2.ndim == 1 else X


def svd(x: Any, /, *, full_matrices: bool = True) -> SVDResult:
    """Return U, singular values in descending order, and V^H of each matrix.  Collective; see `pdgemm.linalg.svd`."""
    return SVDResult(*_of_matrices("svd", x, square=False, full_matrices=full_matrices))


def svdvals(x: Any, /) -> Any:
    """Return the singular values of each matrix in descending order.  Collective; see `pdgemm.linalg.svdvals`."""
    return _of_matrices("svdvals", x, square=False)[0]


def tensordot(x1: Any, x2: Any, /, *, axes: Any = 2) -> Any:
    """Return sums of products over pairs of axes.  Collective; see `pdgemm.tensordot`."""
    return pdgemm.tensordot(x1, x2, axes)


def trace(x: Any, /, *, offset: int = 0, dtype: Any = None) -> Any:
    """Return sums of a diagonal of each matrix.  Collective."""
    return tensor_copies.trace(x, offset, -2, -1, dtype)


def vecdot(x1: Any, x2: Any, /, *, axis: int = -1) -> Any:
    """Return sums of conj(x1) x2 over an axis.  Collective."""
    return tensor_copies.vecdot(x1, x2, axis)


def vector_norm(x: Any, /, *, axis: Axis = None, keepdims: bool = False, ord: float = 2) -> Any:
    """Return the norms (sum |x|^ord)^(1/ord) over some axes, all by default; ord may be inf, -inf, or 0.  Collective.

    ord : 0: the number of elements that are not 0.   2: without overflow.
    """
    if ord in (0, 1, 2, np.inf, -np.inf):
        return x.vector_norm(ord, axis, keepdims).astype(np.abs(np.ones(1, x.dtype)).dtype)
    with np.errstate(all="ignore"):
        return (np.abs(x) ** ord).sum(axis, keepdims) ** (1 / ord)


FUNCTIONS: tuple[Callable[..., Any], ...] = (
    *(cholesky, cross, det, diagonal, eig, eigvals, eigh, eigvalsh, inv, matmul, matrix_norm, matrix_power),
    *(matrix_rank, matrix_transpose, outer, pinv, qr, slogdet, solve, svd, svdvals, tensordot, trace, vecdot),
    vector_norm,
)
