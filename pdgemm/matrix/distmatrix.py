"""DistMatrix: a block-cyclic matrix, with one local array on each rank, and its methods, most of them collective."""

from __future__ import annotations

from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal, Self, SupportsIndex, overload

import numpy as np

import pdgemm
from pdgemm.errors import ArgumentError
from pdgemm.grids.distribution import Block
from pdgemm.grids.layout import Order
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.alignment import aligned
from pdgemm.local.arrays.arguments import as_count, shown
from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.dtypes import element_type
from pdgemm.local.arrays.elementwise import CONJUGATE, CONVERT, on_host, set_elements
from pdgemm.local.arrays.keys import MASK, is_view, picked
from pdgemm.matrix.constructors import Constructors, check_root
from pdgemm.matrix.gather import allgather, gather, gathering_buffer, planned
from pdgemm.matrix.local_arrays import device_on, new_array, new_shared
from pdgemm.matrix.matrix_base import MatrixBase, public
from pdgemm.matrix.numpy_functions import WHOLE, NumPyFunctions, not_available
from pdgemm.matrix.reductions import Reductions
from pdgemm.names import DeviceName, DType, Norm, Protection
from pdgemm.schedules.collectives.vectors import gathering
from pdgemm.support.agreement import together

_Listed = list[int] | list[bool] | np.ndarray | range  # a list or mask of rows or columns
_NORMS = ("fro", "nuc", 1, -1, 2, -2, np.inf, -np.inf, "max")
_GATHER = {"to_numpy", "numpy", "gather", "compute"}  # methods by which other libraries return a whole array


@public
class DistMatrix(Constructors, Reductions, NumPyFunctions):
    """A dense matrix, distributed block-cyclically over a ProcessGrid.

    grid         : the process grid; block row b of the matrix is on grid row (b + rsrc) mod Pr.
    distribution : which rank owns which elements (`pdgemm.grids.distribution.Distribution`).
    local        : this rank's elements, an array of shape `distribution.local_shape(coords)`;
                   on grid row i, local row l is global row `distribution.rows.to_global(l, i)`.  Changing
                   the array changes the matrix.
    order        : "C" or "F", the memory order of the local arrays, one for all ranks.
    device       : "host", or the device of the local arrays, such as "cuda"; the same on all ranks.
    shared       : whether the local arrays of all ranks are in node-shared memory, where products read them in place.
                   Arrays that are not shared, as in copies, results of operators and matrices of your own arrays, are
                   copied there in each product.  MPI_Finalize frees shared elements; a forked process sees the same
                   elements.
    report       : the report of the product, load or redistribution that computed this matrix, or None.

    Views share the elements, cost nothing and send nothing: `A[i0:i1, j0:j1]` is any submatrix, `A.T` the
    transpose, `A.H` the conjugate transpose.  Views are matrices like any other, and may be written to
    (except the conjugate of a complex matrix).  `A[i0:i1, j0:j1] = B` copies B, of any layout, to the submatrix.

    Make a matrix by `empty, zeros, eye, random, from_function, from_global, from_local` (all collective
    over the grid) or `pdgemm.io.hdf5.load`.  `A @ B` and `numpy.matmul(A, B)` are `pdgemm(1.0, A, B)`.
    NumPy's elementwise operators and functions act on each rank's elements: with scalars, matrices of the same
    shape, and with rows, columns and 1-D arrays, which are broadcast (arrays must be the same on every rank).  The
    result has the layout of the first matrix of its shape; a matrix of another layout is redistributed to this layout,
    and then the report of the result has the words that were sent.  `A.sum(axis=0)` and `numpy.sum(A, axis=0)` are
    among the reductions, see `Reductions`; `A @ x` and `x @ A` take vectors that are the same on every rank.
    NumPy's other functions raise TypeError, which names a replacement.  Operators and methods have exact types for type
    checkers; for `numpy.sqrt(A)` and NumPy's other functions type checkers see NumPy's declaration, an ndarray.
    """

    @overload
    def __getitem__(  # type: ignore[overload-overlap]  # a NumPy array may be an index, too
        self, key: slice | EllipsisType | _Listed | tuple[slice | _Listed, slice | _Listed]
    ) -> Self: ...
    @overload
    def __getitem__(
        self, key: SupportsIndex | tuple[SupportsIndex, slice | _Listed] | tuple[slice | _Listed, SupportsIndex]
    ) -> np.ndarray: ...
    @overload
    def __getitem__(self, key: tuple[SupportsIndex, SupportsIndex]) -> Any: ...
    def __getitem__(self, key: Any) -> Any:
        """Return the submatrix A[i0:i1, j0:j1] or A[...] as a view, or the elements A[i], A[i, :], A[:, j], A[i, j].

        A row or a column is a 1-D array on every rank, an element a number; reading elements is collective over the
        grid.  A[rows], A[:, cols] and A[numpy.ix_(rows, cols)] with lists or masks, and A[::2], are new matrices, not
        views: see `pdgemm.select`; collective.  Raises KeyIndexError (an IndexError) for any other key.
        """
        if is_view(key):
            return super().__getitem__(key)
        with together(self.grid.comm) as arguments:
            rows, cols = picked(MASK if isinstance(key, MatrixBase) else key, self.shape)
            arguments += ["A[...]", rows, cols]
        if isinstance(rows.indices, range) and isinstance(cols.indices, range):
            part = self._window(rows.indices, cols.indices)
        else:
            part = pdgemm.select(self, rows.indices, cols.indices)
        if not rows.dropped and not cols.dropped:
            return part
        return part.allgather()[tuple(0 if x.dropped else slice(None) for x in (rows, cols))]

    def __len__(self) -> int:
        return self.shape[0]

    __reversed__ = None

    def __setitem__(self, key: Any, value: Any) -> None:
        """Set elements to a number, to a matrix of any layout, or to an array that is the same on every rank.

        The key is as for reading, or a mask (m, n), whose elements are set to a number; values are broadcast as
        in NumPy.  Where a key names a row twice, the last value stays.  Collective over the grid.
        """
        pdgemm.assign(self, key, value)

    def fill(self, value: complex) -> None:
        """Set all elements to a number.  Collective."""
        self[...] = value

    @property
    def nbytes(self) -> int:
        """The bytes of the elements of the whole matrix."""
        return self.size * self.dtype.itemsize

    @property
    def real(self) -> Self:
        """The real part: a copy, or the matrix itself if it is not complex.  Local."""
        return self._part("real") if self.dtype.kind == "c" else self

    @property
    def imag(self) -> Self:
        """The imaginary part, a copy.  Local."""
        return self._part("imag")

    def _part(self, name: str) -> Self:
        part = getattr(self.local, name)
        local = aligned(part.shape, part.dtype, self.order, devices.of(self.stored))
        CONVERT(local, part)
        return type(self)(local, self.grid, self.distribution, self.order)

    def conj(self) -> Self:
        """Return the complex conjugate, a copy.  Local.  `A.H` is a view."""
        return np.conj(self)  # type: ignore[return-value]

    conjugate = conj

    def transpose(self) -> Self:
        """Return the transpose, a view.  Local.  `A.T` is the same."""
        return self.T

    def dot(self, other: Any) -> Any:
        """Return A @ other.  Collective."""
        return np.dot(self, other)

    def clip(self, min: Any = None, max: Any = None) -> Self:
        """Return the elements limited to an interval, as `numpy.clip`.  Collective if a limit is a matrix or array."""
        return np.clip(self, min, max)  # type: ignore[return-value]

    def round(self, decimals: int = 0) -> Self:
        """Return the elements rounded to a number of decimals, as `numpy.round`.  Local."""
        return np.round(self, decimals)  # type: ignore[return-value]

    def take(self, indices: Any, axis: int) -> Self:
        """Return rows (axis 0) or columns (axis 1) by their indices, as A[rows] does.  Collective."""
        return np.take(self, indices, axis)

    def cumsum(self, axis: int) -> Self:
        """Return the sums up to each element along an axis: see `pdgemm.statistics.cumsum`.  Collective."""
        return np.cumsum(self, axis)  # type: ignore[return-value]

    if not TYPE_CHECKING:  # with __getattr__, a type checker accepts every attribute

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError; for a method that only other arrays have, the message names a replacement."""
            if name in _GATHER:
                raise AttributeError(f"a DistMatrix has no method {name}: {WHOLE}")
            if not name.startswith("_") and hasattr(np.ndarray, name):
                raise AttributeError(not_available(name))
            raise AttributeError(f"a DistMatrix has no attribute {name!r}", name=name, obj=self)

    def checksum(self) -> str:
        """Return a checksum of the elements that is the same in any layout.  Collective; see `pdgemm.checksum`."""
        return pdgemm.checksum(self)

    # ------------------------------------------------------------------ moving
    def redistribute(
        self,
        out: DistMatrix | None = None,
        *,
        alpha: complex = 1,
        beta: complex = 0,
        like: DistMatrix | None = None,
        grid: ProcessGrid | None = None,
        block: Block | None = None,
        source: tuple[int, int] = (0, 0),
        order: Order = "C",
        dtype: DType | None = None,
        memory_limit: int | None = None,
        protect: Protection | None = None,
        check: bool = True,
    ) -> DistMatrix:
        """Copy the elements to another layout, by `like=B` to that of B: see `pdgemm.redistribute`.  Collective."""
        layout: Any = {"grid": grid, "block": block, "source": source, "order": order, "dtype": dtype}
        limits: Any = {"memory_limit": memory_limit, "protect": protect, "check": check}
        return pdgemm.redistribute(self, out, alpha=alpha, beta=beta, like=like, **layout, **limits)

    def to_device(self, device: DeviceName = "cuda") -> Self:
        """Return a copy in the memory of a device or the host, or the matrix itself if it is there.  Collective.

        Raises DeviceError where the device does not exist, OutOfMemoryError where its memory is full; on every rank.
        """
        with together(self.grid.comm) as arguments:  # compared before a rank returns early
            arguments += ["to_device", device]
        if device == self.device:
            return self
        where = device_on(self.grid, device)

        def allocate(arguments: list[object]) -> Array:
            arguments += ["to_device", self.distribution, device]
            local = new_array(self.stored.shape, self.dtype, self.order, self.grid, where)
            set_elements(local, self.stored)
            return local

        local, shared = new_shared(self.grid, allocate)
        return type(self)(local, self.grid, self.distribution, self.order, self.conjugated, shared)

    def to_host(self) -> Self:
        """Return a copy in the memory of the host, or the matrix itself if it is there.  Collective."""
        return self.to_device(devices.HOST)

    def to_global(self, root: int = 0) -> np.ndarray | None:
        """Return the whole matrix on `root`, None on the other ranks.  Collective over the grid.

        Root needs memory for mn elements and one message of at most 256 MiB.
        """
        with together(self.grid.comm) as arguments:
            check_root(self.grid, root)
            arguments += ["to_global", root, self.distribution, self.dtype]
            if self.grid.draft:
                return _ones(self)
            whole = np.empty(self.shape, self.dtype) if self.grid.rank == root else None
            local = on_host(self.local)
        gather(local, self.distribution, self.grid, whole, root)
        return whole

    def allgather(self) -> np.ndarray:
        """Return the whole matrix on every rank.  Collective over the grid.

        Cost: mn words to every rank.  Up to 32 MiB are sent in log2 P messages.  More are sent in stages of 32 MiB, for
        which every rank allocates a buffer.
        """
        with together(self.grid.comm) as arguments:
            arguments += ["allgather", self.distribution, self.dtype]
            layout = self.layout_in(self.grid)
            if planned(self.grid, "all elements", gathering(layout, self.grid.size)[0]):
                return _ones(self)
            whole, local = np.empty(self.shape, self.dtype), on_host(self.local)
            buffer = gathering_buffer(layout, self.grid.size)
        allgather(local, layout, self.grid, whole, buffer)
        return whole

    def preview(self, edge: int = 3) -> str:
        """Return the elements as NumPy prints them, only the corners of a large matrix.  Collective over the grid.

        The text is the same on every rank: call `text = A.preview()` on all ranks, and print the text on one of them.

        edge : rows and columns to show at each side, where the matrix has more elements than NumPy's print threshold.
        Cost: at most 4 edge^2 elements, or all elements of a small matrix, are gathered on every rank.
        """
        with together(self.grid.comm) as arguments:
            edge = as_count(edge, "edge", 1)
            arguments += ["preview", edge, self.distribution, self.dtype]
        most = np.get_printoptions()["threshold"]
        if self.size <= most:
            return np.array2string(self.allgather())
        kept = [np.r_[:edge, n - edge : n] if n > 2 * edge else np.arange(n) for n in self.shape]
        corners = pdgemm.select(self, *kept)
        # one row and one column in the middle stand for all rows and columns that are left out
        shape = [min(n, 2 * edge + 1) for n in self.shape]
        shown_at = [np.r_[:edge, edge + 1 : 2 * edge + 1] if n > 2 * edge else np.arange(n) for n in self.shape]
        whole = np.zeros(shape, self.dtype)
        whole[np.ix_(*shown_at)] = corners.allgather()
        return np.array2string(whole, threshold=0, edgeitems=edge)

    def tensor(self, shape: Any) -> Any:
        """Return the matrix as a tensor of this shape: see `pdgemm.DistTensor.of_matrix`.  Collective."""
        return pdgemm.DistTensor.of_matrix(self, shape)

    def to_blocks(self, rows: Any = None, cols: Any = None) -> Any:
        """Return A[rows, cols], which may differ between ranks: see `pdgemm.interchange.to_blocks`.  Collective."""
        return pdgemm.interchange.to_blocks(self, rows, cols)

    # ------------------------------------------------------------------ computing
    @overload
    def norm(self, kind: Norm = "fro", axis: None = None, keepdims: Literal[False] = False) -> float: ...
    @overload
    def norm(self, kind: Norm = "fro", *, axis: int, keepdims: Literal[False] = False) -> np.ndarray: ...
    @overload
    def norm(self, kind: Norm, axis: int, keepdims: Literal[False] = False) -> np.ndarray: ...
    @overload
    def norm(self, kind: Norm = "fro", *, axis: int, keepdims: Literal[True]) -> Self: ...
    def norm(self, kind: Norm = "fro", axis: int | None = None, keepdims: bool = False) -> Any:
        """Return a matrix norm, or the norms of columns or rows, the same on every rank.  Collective over the grid.

        kind : "fro" sqrt(sum |a|^2), 1 max column sum, -1 min column sum, numpy.inf max row sum, -numpy.inf min row
            sum, "max" max |a|.  Computed by `pdgemm.linalg.norm`: 2 the largest singular value, -2 the smallest, "nuc"
            the sum of the singular values.
        axis : 0 for the norms of columns, 1 for the norms of rows, as by `vector_norm`, with "fro" as 2.
        A NaN anywhere gives NaN; no intermediate result overflows.
        """
        if axis is not None:
            norms: Any = self.vector_norm
            return norms(2 if kind == "fro" else kind, axis, keepdims)
        with together(self.grid.comm) as arguments:
            arguments += [
                f"norm, {kind}" if isinstance(kind, str) else f"norm, {shown(kind)}",
                self.distribution,
                self.dtype,
            ]
            if not isinstance(kind, (str, int, float)) or kind not in _NORMS:
                raise ArgumentError(
                    f'norm {shown(kind)} is not one of "fro", "nuc", 1, -1, 2, -2, numpy.inf, -numpy.inf, "max"'
                )
            if kind in (-1, -np.inf) and self.shape[kind == -1] == 0:
                raise ArgumentError(f"norm {kind} is a minimum of sums, but this matrix has none: {self.distribution}")
        if kind in (2, -2, "nuc"):
            return pdgemm.linalg.norm(self, kind)
        if kind in ("fro", "max"):
            return float(self.vector_norm(2 if kind == "fro" else np.inf))
        sums = self.vector_norm(1, axis=0 if kind in (1, -1) else 1)
        return float(sums.max(initial=0.0) if kind in (1, np.inf) else sums.min())

    def allclose(
        self, other: DistMatrix | np.ndarray | complex, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
    ) -> bool:
        """Return whether |a - b| <= atol + rtol |b| for all elements, as `numpy.allclose`.  Collective.

        other : a matrix of any layout, a number, or an array that is the same on every rank.
        """
        return np.allclose(self, other, rtol, atol, equal_nan)

    # ------------------------------------------------------------------ copying
    def copy(self) -> Self:
        """Return a copy with the same layout.  Local."""
        return self.astype(self.dtype)

    def astype(self, dtype: DType, copy: bool = True) -> Self:
        """Return a copy with another element type; without `copy`, the matrix itself if it has that type.  Local."""
        if not copy and element_type(dtype) == self.dtype:
            return self
        local = aligned(self.stored.shape, element_type(dtype), self.order, devices.of(self.stored))
        (CONJUGATE if self.conjugated else CONVERT)(local, self.stored)
        return type(self)(local, self.grid, self.distribution, self.order)

    def __copy__(self) -> Self:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> Self:
        """Copy the elements, but not the grid, which all ranks share."""
        return self.copy()

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a DistMatrix is distributed over ranks and cannot be pickled: save it by hdf5.save, or {WHOLE}"
        )


def _ones(A: DistMatrix) -> np.ndarray:
    """Return ones that stand for the elements in a planned program: a broadcast array of one element in memory."""
    return np.broadcast_to(np.ones((), A.dtype), A.shape)
