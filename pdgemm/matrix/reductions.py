"""Reductions of a DistMatrix, over all elements or along an axis: sums, extrema, moments and norms.

Each rank reduces its local elements where they are: by NumPy, in slabs that fit its cache, or on a device, in large
slabs; sums are pairwise.  Only the partial results of rows or columns leave a device.  The ranks of a grid column (of a
grid row, for axis 1) reduce their partial results up a binary tree, in the same order on every run, and the root
broadcasts the result.  An all-gather along the other grid axis follows.  So a result is the same on every rank, to the
bit.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, overload

import numpy as np

from pdgemm.errors import ArgumentError, LayoutError
from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.instrument import spans
from pdgemm.instrument.recorder import Recorder, Traffic
from pdgemm.instrument.run_report import VectorTraffic, count_vectors, report_of_move
from pdgemm.local.arrays import device as devices, folds
from pdgemm.local.arrays.arguments import as_count, shown
from pdgemm.local.arrays.device import to_host
from pdgemm.local.arrays.dtypes import element_type
from pdgemm.local.arrays.elementwise import set_elements
from pdgemm.matrix.gather import planned
from pdgemm.matrix.matrix_base import MatrixBase, on_diagonal
from pdgemm.schedules.collectives.vectors import ToAllRanks, diagonal_gather, reduction_stages
from pdgemm.support.agreement import described_elements, together
from pdgemm.transport.collectives import carry_out

Whole = tuple[int, int] | None  # axis of a reduction of all elements
M = TypeVar("M")
Scalar = TypeVar("Scalar")
if TYPE_CHECKING:

    class _Bound(Generic[M, Scalar]):
        """A reduction of a matrix of type M: a scalar, an array along an axis, a matrix with keepdims."""

        @overload
        def __call__(self, axis: Whole = None, keepdims: Literal[False] = False) -> Scalar: ...
        @overload
        def __call__(self, axis: int, keepdims: Literal[False] = False) -> np.ndarray: ...
        @overload
        def __call__(self, axis: int | Whole = None, *, keepdims: Literal[True]) -> M: ...
        @overload
        def __call__(self, axis: int | Whole, keepdims: Literal[True]) -> M: ...
        def __call__(self, axis: int | Whole = None, keepdims: bool = False) -> Any: ...

    class _Method(Generic[Scalar]):
        def __get__(self, matrix: M, kind: type[M]) -> _Bound[M, Scalar]: ...


def reduction(name: str, result: str) -> Any:
    """Return a method that reduces elements by a Fold.   name : the class, and the Fold, such as "Reductions.sum".

    The method calls `_reduced` of its class.   result : what it returns, for its documentation.
    """

    fold = folds.FOLDS[name.partition(".")[2]]

    def method(self: Any, axis: Any = None, keepdims: bool = False) -> Any:
        return self._reduced(fold, axis, keepdims)

    method.__qualname__, method.__name__ = name, name.partition(".")[2]
    method.__doc__ = f"Return {result}.  Collective."
    method.__code__ = method.__code__.replace(co_qualname=name)  # shown by the watchdog
    return method


class Reductions(MatrixBase):
    """The reductions of a matrix.

    All are collective over the grid and take `axis` (None: all elements; 0: over rows, one result for each column; 1:
    over columns) and `keepdims`.  A reduction of all elements is a scalar, a reduction along an axis a 1-D NumPy array;
    both are the same on every rank.  With keepdims the result is a DistMatrix of one row, of one column or 1 x 1, whose
    report has the words that were sent.  Types of results and NaN are as in NumPy; 16-bit numbers are added in float32.

    Cost along axis 0 of m x n on Pr x Pc: mn/(Pr Pc) elements are read, and n/Pc log2(Pr) words received in a
    tree, then n in the broadcast and the all-gather.
    Error of a sum: at most (128 + log2 m) eps sum |a| to first order (Higham 2002, 4.2: blocked, pairwise).

    A matrix on a device is reduced on the device, in slabs of about 2^24 elements, with temporaries of a few slabs.
    At most the partial results of each local row or column are copied to the host.  A result has the type and the
    meaning that it has on the host and is the same on every rank, but a sum may differ from the host's in its last
    digits: runs of 128 elements are added in any order, then the sums of 128 runs, and so on.  The error of a sum along
    axis 0 is at most (64 ceil(log128 m) + log2 m) eps sum |a| to first order; for the sum of all elements,
    with mn in place of m.  On CUDA devices subnormal float32 numbers count as 0, as in all kernels that CuPy compiles.
    Raises ArgumentError for an axis that is not None, 0, 1, -1 or -2, and for extrema of no elements.
    """

    sum: _Method[Any] = reduction("Reductions.sum", "the sum of the elements")
    mean: _Method[Any] = reduction("Reductions.mean", "the mean of the elements")
    prod: _Method[Any] = reduction("Reductions.prod", "the product of the elements")
    min: _Method[Any] = reduction("Reductions.min", "the least element; NaN if any element is NaN")
    max: _Method[Any] = reduction("Reductions.max", "the largest element; NaN if any element is NaN")
    any: _Method[np.bool] = reduction("Reductions.any", "whether any element is not 0")
    all: _Method[np.bool] = reduction("Reductions.all", "whether all elements are not 0")
    argmin: _Method[np.intp] = reduction(
        "Reductions.argmin", "the index of the first least element or first NaN, in row-major order or along axis"
    )
    argmax: _Method[np.intp] = reduction(
        "Reductions.argmax", "the index of the first largest element or first NaN, in row-major order or along axis"
    )

    @overload
    def var(self, axis: Whole = None, ddof: int = 0, keepdims: Literal[False] = False) -> Any: ...
    @overload
    def var(self, axis: int, ddof: int = 0, keepdims: Literal[False] = False) -> np.ndarray: ...
    @overload
    def var(self, axis: int | Whole = None, ddof: int = 0, *, keepdims: Literal[True]) -> Self: ...
    def var(self, axis: Any = None, ddof: int = 0, keepdims: bool = False) -> Any:
        """Return the variance sum |a - mean|^2 / (N - ddof), computed without cancellation of digits.  Collective.

        Source: Chan, Golub & LeVeque, The American Statistician 37(3), 1983, (1.5).
        """
        return self._reduced(lambda: folds.variance("var", as_count(ddof, "ddof", 0), folds.same), axis, keepdims)

    @overload
    def std(self, axis: Whole = None, ddof: int = 0, keepdims: Literal[False] = False) -> Any: ...
    @overload
    def std(self, axis: int, ddof: int = 0, keepdims: Literal[False] = False) -> np.ndarray: ...
    @overload
    def std(self, axis: int | Whole = None, ddof: int = 0, *, keepdims: Literal[True]) -> Self: ...
    def std(self, axis: Any = None, ddof: int = 0, keepdims: bool = False) -> Any:
        """Return the standard deviation, the root of `var`.  Collective."""
        return self._reduced(lambda: folds.variance("std", as_count(ddof, "ddof", 0), np.sqrt), axis, keepdims)

    @overload
    def vector_norm(self, ord: float = 2, axis: Whole = None, keepdims: Literal[False] = False) -> Any: ...
    @overload
    def vector_norm(self, ord: float = 2, *, axis: int, keepdims: Literal[False] = False) -> np.ndarray: ...
    @overload
    def vector_norm(self, ord: float = 2, axis: int | Whole = None, *, keepdims: Literal[True]) -> Self: ...
    @overload
    def vector_norm(self, ord: float, axis: int, keepdims: Literal[False] = False) -> np.ndarray: ...
    def vector_norm(self, ord: Any = 2, axis: Any = None, keepdims: bool = False) -> Any:
        """Return norms of the columns (axis 0), of the rows (1), or of all elements as one vector.  Collective.

        ord : 2 sqrt(sum |a|^2), without overflow; 1 sum |a|; numpy.inf max |a|; -numpy.inf min |a|; 0 count of a != 0.
        """
        return self._reduced(lambda: folds.vector_norm(ord), axis, keepdims)

    def matvec(self, x: Any) -> np.ndarray:
        """Return A x for a vector x that is the same on every rank, as a 1-D NumPy array on every rank.  Collective.

        `A @ x` is the same, and `x @ A` is `A.T.matvec(x)`.  For an x of one column, (n, 1), the result is one
        column, (m, 1), as in SciPy's operators.  Raises LayoutError where x does not have one number for each column of
        A, ArgumentError where x differs among the ranks.
        """
        with together(self.grid.comm) as arguments:
            vector = to_host(devices.adopted(x))
            if one_column := vector.shape == (self.shape[1], 1):
                vector = vector[:, 0]
            if vector.shape != self.shape[1:]:
                wanted = f"{self.shape[1]} numbers for {self.distribution}"
                raise LayoutError(f"the vector must have {wanted}, got an array of shape {vector.shape}")
            arguments += ["matvec", element_type(vector.dtype), described_elements(vector)]
        product: np.ndarray = self._reduced(folds.weighted_sums(vector), 1, False)
        return product[:, None] if one_column else product

    def rmatvec(self, x: Any) -> np.ndarray:
        """Return A^H x, as `matvec` returns A x.  SciPy's `aslinearoperator` takes a matrix with both methods."""
        product: np.ndarray = self.H.matvec(x)
        return product

    def trace(self) -> Any:
        """Return the sum of the diagonal, on every rank.  Collective."""
        return self.diagonal().sum()

    def diagonal(self, offset: int = 0) -> np.ndarray:
        """Return the elements a_i,i+offset as a 1-D NumPy array on every rank.  Collective."""
        with together(self.grid.comm) as arguments:
            offset = as_count(offset, "offset", -(1 << 62))
            arguments += ["diagonal", offset, self.distribution, self.dtype]
            mine = own_diagonal(self, offset)
        length = max(0, min(self.shape[0] + min(offset, 0), self.shape[1] - max(offset, 0)))
        gather, order = diagonal_gather(self.layout_in(self.grid), self.grid.size, offset, length)
        if planned(self.grid, "diagonal", gather):
            return np.ones(length, self.dtype)
        ((collective,),) = (stage.parts for stage in gather.stages)
        parts, start, counted = np.empty(length, self.dtype), int(collective.offsets[self.grid.rank]), Traffic()
        parts[start : start + len(mine)] = mine
        carry_out(collective, self.grid.comm, [parts], counted)
        count_vectors(VectorTraffic(counted, gather.traffic(self.grid.rank)))
        whole = np.empty(length, self.dtype)
        whole[order] = parts
        return whole

    def _reduced(self, reduction: folds.Fold | Callable[[], folds.Fold], axis: Any, keepdims: bool) -> Any:
        """Reduce by a Fold, or by the Fold that a function returns; errors of this function are raised on all ranks."""
        grid, layout, start = self.grid, self.distribution, perf_counter()
        with together(grid.comm) as arguments:
            fold = reduction() if callable(reduction) else reduction
            axis, keepdims = _axis(axis), bool(keepdims)
            arguments += [fold.name, axis, keepdims, layout, self.dtype]
            count = layout.shape[0] * layout.shape[1] if axis is None else layout.shape[axis]
            if count == 0 and fold.empty is None:
                raise ArgumentError(f"{fold.name} of no element: the matrix is {layout}")
            with np.errstate(all="ignore"):
                kind = folds.result_type(fold, self.dtype)
        recorder = Recorder()
        counted = recorder.traffic
        schedule = _schedule(self, folds.of_one_element(fold, self.dtype), axis) if count else None
        with np.errstate(all="ignore"), spans.timed("reduce", self.stored.nbytes):
            if schedule is None:
                length = 1 if axis is None else layout.shape[1 - axis]
                values = np.full(length, fold.empty, kind)
            elif planned(grid, fold.name, schedule):
                values = np.ones(1 if axis is None else layout.shape[1 - axis], kind)
            else:
                parts = _over_all(self, fold, counted) if axis is None else _along(self, fold, axis, counted)
                values = fold.result(parts, count).astype(kind)
        traffic = VectorTraffic(counted, schedule.traffic(grid.rank) if schedule else Traffic())
        if not grid.draft:
            count_vectors(traffic)
        if not keepdims:
            return values[0] if axis is None else values
        matrix, schedules = self._kept(values, axis), [schedule] if schedule else []
        others: dict[str, Any] = {"source": str(layout), "target": "every rank", "vectors": traffic}
        matrix.report = report_of_move(recorder, schedules, grid, perf_counter() - start, name=fold.name, **others)
        return matrix

    def _kept(self, vector: np.ndarray, axis: int | None) -> Self:
        """Return a matrix of one row or of one column from a result that is on every rank."""
        grid, (i, j), (pr, pc) = self.grid, self.grid.coords, self.grid.shape
        rows = self.distribution.rows if axis == 1 else BlockCyclic(1, 1, pr)
        cols = self.distribution.cols if axis == 0 else BlockCyclic(1, 1, pc)
        whole = vector.reshape(-1, 1) if axis == 1 else vector.reshape(1, -1)
        mine = np.ascontiguousarray(whole[np.ix_(rows.indices(i), cols.indices(j))])
        local = devices.empty(mine.shape, mine.dtype, device=devices.of(self.stored))
        set_elements(local, mine)
        return type(self)(local, grid, Distribution(rows, cols), "C")


# ---------------------------------------------------------------- on all ranks
def _schedule(A: Reductions, empty: folds.Parts, axis: int | None) -> ToAllRanks:
    return reduction_stages(A.distribution, A.grid.rank_map, A.grid.size, axis, len(empty), empty[0].dtype)


def _along(A: Reductions, fold: folds.Fold, axis: int, counted: Traffic) -> folds.Parts:
    """Return the accumulators of each column (axis 0) or row (axis 1), on every rank.  Collective."""
    grid, layout, empty = A.grid, A.distribution, folds.of_one_element(fold, A.dtype)
    (reduced, i), (kept, j) = [*zip((layout.rows, layout.cols), grid.coords)][:: 1 - 2 * axis]
    starts = np.cumsum([0, *(kept.count(part) for part in range(kept.parts))])
    vectors: folds.Parts = tuple(np.empty(kept.n, x.dtype) for x in empty)  # ordered by owner
    own: folds.Parts = tuple(x[starts[j] : starts[j + 1]] if j >= 0 else x[:0] for x in vectors)
    with together(grid.comm, devices.of(A.stored) is not None):  # a device may lack memory on one rank
        if kept.count(j) and reduced.count(i):
            for x, y in zip(own, folds.parts_along(A.local, axis, fold, reduced.indices(i))):
                x[:] = y
    for stage, parts in zip(_schedule(A, empty, axis).stages, (own, own, vectors, vectors)):
        carry_out(stage.of(grid.rank), grid.comm, parts, counted, fold.join)
    order = np.concatenate([kept.indices(part) for part in range(kept.parts)])
    whole: folds.Parts = tuple(map(np.empty_like, vectors))
    for x, y in zip(whole, vectors):
        x[order] = y
    return whole


def _over_all(A: Reductions, fold: folds.Fold, counted: Traffic) -> folds.Parts:
    """Return the accumulators of all elements together, on every rank.  Collective."""
    grid, vectors = A.grid, folds.of_one_element(fold, A.dtype)
    up, down = _schedule(A, vectors, None).stages
    with together(grid.comm, devices.of(A.stored) is not None):
        if up.of(grid.rank):
            vectors = tuple(np.ascontiguousarray(x) for x in folds.halved(_of_all_elements(A, fold), fold))
    for stage in (up, down):
        carry_out(stage.of(grid.rank), grid.comm, vectors, counted, fold.join)
    return vectors


def _of_all_elements(A: Reductions, fold: folds.Fold) -> folds.Parts:
    """Return the accumulators of this rank's elements, on the host: one for each row, or for all elements.  Local."""
    x, (rows, cols) = A.local, A.indices()
    if fold.indexed:
        values, places = folds.parts_along(x, 1, fold, cols)
        return values, rows * A.shape[1] + places
    line = x.reshape(1, -1) if x.flags.c_contiguous else x.T.reshape(1, -1) if x.flags.f_contiguous else None
    if line is None:
        return folds.parts_along(x, 1, fold, cols)
    return folds.parts_along(line, 1, fold, cols[:0])


def _axis(axis: Any) -> int | None:
    axes = axis if isinstance(axis, tuple) else (axis,)
    known = all(isinstance(x, (int, np.integer)) and not isinstance(x, bool) and -2 <= x < 2 for x in axes)
    numbers = [int(x) % 2 for x in axes] if known else []
    if axis is None or sorted(numbers) == [0, 1]:
        return None
    if len(numbers) != 1 or isinstance(axis, tuple):
        raise ArgumentError(f"axis must be None, 0 or 1, got {shown(axis)}")
    return numbers[0]


def own_diagonal(A: MatrixBase, offset: int) -> np.ndarray:
    """Return this rank's elements of a diagonal, on the host."""
    (i, j), device = on_diagonal(A, offset), devices.of(A.stored)
    if device is None or not len(i):
        return A.local[i, j] if device is None else np.empty(0, A.dtype)
    elements = device.to_host(device.pick(A.stored, i, j))
    return elements.conj() if A.conjugated else elements
