"""DistMatrix: a block-cyclic matrix, one plain array on each rank."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

import pdgemm
from pdgemm.arrays import device as devices
from pdgemm.arrays import element_functions
from pdgemm.arrays.device import Array, Device, to_host
from pdgemm.arrays.dtypes import element_type
from pdgemm.arrays.elementwise import CONJUGATE, CONVERT, set_elements
from pdgemm.arrays.integers import as_whole, shown
from pdgemm.blas.local_gemm import leading
from pdgemm.errors import ArgumentError, DeviceError, GridError, LayoutError, NodeMemoryError, OutOfMemoryError
from pdgemm.grids.distribution import Distribution
from pdgemm.grids.layout import Layout, Order
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.matrix import numpy_functions
from pdgemm.matrix.gather import block_index, collect, collect_everywhere, deal
from pdgemm.matrix.norms import norm
from pdgemm.support.agreement import check_not_freed, together

Block = int | tuple[int, int] | None


class DistMatrix(np.lib.mixins.NDArrayOperatorsMixin):
    """A dense matrix dealt block-cyclically over a ProcessGrid.

    grid         : the ranks; row block b of the matrix lies on grid row (b + rsrc) mod Pr.
    distribution : who owns what (`pdgemm.grids.distribution.Distribution`).
    local        : this rank's elements, a plain array of shape `distribution.local_shape(coords)`;
                   local row l is global row `distribution.rows.to_global(l, i)`.  Changing it changes
                   the matrix.
    order        : "C" or "F", the memory order of the local arrays, one for all ranks.
    device       : "host", or where the local arrays are instead, such as "cuda"; the same on all ranks.
    shared       : do the local arrays of all ranks lie in memory that the ranks of a node share?  Products read
                   them there; what lies elsewhere (copies, results of operators, your own arrays) is copied there in
                   each product.  Shared elements end with MPI_Finalize, and are the same in a forked process.
    report       : what the product, load or redistribution that made this matrix did, or None.

    Views share the elements, cost nothing and send nothing: `A[i0:i1, j0:j1]` any submatrix, `A.T` the
    transpose, `A.H` the conjugate transpose.  They are matrices like any other, and may be written to
    (but for the conjugate of a complex matrix).  `A[i0:i1, j0:j1] = B` brings B there, from any layout.

    Make one by `empty, zeros, eye, random, from_function, from_global, from_local` (all collective
    over the grid) or `pdgemm.io.hdf5.load`.  `A @ B` and `numpy.matmul(A, B)` are `pdgemm(1.0, A, B)`.
    NumPy's elementwise operators and functions act on each rank's elements: with scalars, and among
    matrices of one layout.  Its other functions raise TypeError, which says what to use instead.
    """

    __array_priority__ = 1000
    __hash__ = None  # type: ignore[assignment]  # `==` is elementwise, as for arrays

    def __init__(
        self,
        stored: Array,
        grid: ProcessGrid,
        distribution: Distribution,
        order: Order = "C",
        conjugated: bool = False,
        shared: bool = False,
        plain: bool = True,
    ) -> None:
        """Not collective and unchecked: use `from_local`."""
        check_not_freed(grid.comm)
        self._stored = stored
        self.grid = grid
        self.distribution = distribution
        self.order = order
        self.conjugated = conjugated
        self.shared = shared
        self.plain = plain  # may MPI be given the address of the local arrays of all ranks?
        self._report: Any = None
        self._layout: tuple[Any, Layout] | None = None
        self._last_run: Any = None  # `pdgemm.algorithms.prepared` remembers by it how to form this matrix again

    # ------------------------------------------------------------------ making
    @classmethod
    def empty(
        cls,
        shape: tuple[int, int],
        *,
        grid: ProcessGrid,
        block: Block = None,
        dtype: Any = np.float64,
        source: tuple[int, int] = (0, 0),
        order: Order = "C",
        device: str = devices.HOST,
    ) -> DistMatrix:
        """A matrix whose elements are not set.  Collective over the grid.

        dtype  : bool, int8 to int64, uint8 to uint64, float16, bfloat16, float32, float64, complex64 or complex128.
        block  : mb = nb, or (mb, nb); by default one block per rank.
        source : grid coordinates (rsrc, csrc) of the rank that owns the first block.
        order  : memory order of the local arrays, "C" (rows contiguous) or "F" (columns contiguous).
        device : "host" or "cuda": NumPy's arrays, or CuPy's on the GPU of each rank.
        Raises LayoutError, ArgumentError, DTypeError, DeviceError or MemoryError, on every rank.
        """
        where = meet(grid, device)
        with together(grid.comm) as said:
            layout = layout_on(grid, shape, block, source)
            if order not in ("C", "F"):
                raise ArgumentError(f'order {order!r} is neither "C" nor "F"')
            local = new_array(layout.local_shape(grid.coords), dtype, order, grid, where)
            said += ["DistMatrix.empty", layout, local.dtype, order]
        return cls(local, grid, layout, order, shared=all_shared(local, grid))

    @classmethod
    def zeros(cls, shape: tuple[int, int], *, grid: ProcessGrid, **layout: Any) -> DistMatrix:
        """All elements 0.  Arguments as for `empty`."""
        return cls._filled("zeros", element_functions.element_function("zeros", 0, np.dtype("d")), shape, grid, layout)

    @classmethod
    def eye(cls, n: int | tuple[int, int], *, grid: ProcessGrid, **layout: Any) -> DistMatrix:
        """1 on the main diagonal, 0 elsewhere; n x n, or of a given shape."""
        shape = n if isinstance(n, tuple) else (n, n)
        return cls._filled("eye", element_functions.element_function("eye", 0, np.dtype("d")), shape, grid, layout)

    @classmethod
    def random(
        cls,
        shape: tuple[int, int],
        *,
        grid: ProcessGrid,
        seed: int = 0,
        kind: str = "uniform",
        dtype: Any = np.float64,
        **layout: Any,
    ) -> DistMatrix:
        """Random elements, for a seed the same numbers on every grid and layout.

        kind : "uniform" on [0, 1), or "normal" with mean 0 and variance 1.
        """
        with together(communicator_of(grid)) as said:
            f = element_functions.element_function(kind, seed, element_type(dtype))
            said += ["DistMatrix.random", seed, kind]
        return cls.from_function(f, shape, grid=grid, dtype=dtype, **layout)

    @classmethod
    def from_function(
        cls, f: element_functions.ElementFunction, shape: tuple[int, int], *, grid: ProcessGrid, **layout: Any
    ) -> DistMatrix:
        """A[i, j] = f(i, j).  Nothing is sent.

        f : called with integer arrays i of shape (r, 1) and j of shape (1, c); returns something that
            broadcasts to (r, c).  An exception in f on any rank is raised on all.
        """
        return cls._filled("from_function", f, shape, grid, layout)

    @classmethod
    def _filled(
        cls,
        name: str,
        f: element_functions.ElementFunction,
        shape: tuple[int, int],
        grid: ProcessGrid,
        layout: dict[str, Any],
    ) -> DistMatrix:
        matrix = cls.empty(shape, grid=grid, **layout)
        with together(grid.comm) as said:
            said.append(f"DistMatrix.{name}")
            host = matrix.local if matrix.device == devices.HOST else np.empty(matrix.local.shape, matrix.dtype)
            if host.size:
                element_functions.fill(host, *matrix.indices(), f)
            if host is not matrix.local:
                set_elements(matrix.local, host)
        return matrix

    @classmethod
    def from_local(
        cls,
        local: Any,
        shape: tuple[int, int],
        *,
        grid: ProcessGrid,
        block: Block = None,
        source: tuple[int, int] = (0, 0),
    ) -> DistMatrix:
        """Each rank's own array as its part of a matrix: no copy.  Collective over the grid.

        local : of shape `local_shape` for this layout, rows or columns contiguous, the same dtype on all ranks.
                An array of NumPy's or CuPy's, or of any library that hands out its memory by DLPack or
                `__cuda_array_interface__` (PyTorch, JAX): the matrix lies where it does.
        """
        comm = communicator_of(grid)
        with together(comm) as said:
            layout = layout_on(grid, shape, block, source)
            array = devices.adopted(local)
            if found := devices.of(array):
                found.check(array)
            said += ["DistMatrix.from_local", layout, element_type(array.dtype), devices.name_of(array)]
            if array.shape != layout.local_shape(grid.coords):
                raise LayoutError(
                    f"the local array has shape {array.shape}, but {layout} on a {grid} grid gives "
                    f"{layout.local_shape(grid.coords)} to rank {grid.rank} at {grid.coords}"
                )
            try:
                leading(array)
            except ValueError as bad:
                raise LayoutError(f"{bad}; pass numpy.ascontiguousarray(local)") from bad
        where = meet(grid, devices.name_of(array))
        memory = devices.memory(where, grid)
        # an empty array, a row or a column is of both orders: the other ranks decide
        lying = comm.allgather(
            (_order(array), not array.size or memory.lies_here(array), where is None or where.plain(array))
        )
        orders = sorted({order for order, *_ in lying if order})
        if len(orders) > 1:
            raise LayoutError("local arrays in C order on some ranks and in Fortran order on others")
        _, shared, plain = zip(*lying)
        return cls(array, grid, layout, orders[0] if orders else "C", shared=all(shared), plain=all(plain))

    @classmethod
    def from_global(
        cls,
        array: np.ndarray | None,
        *,
        grid: ProcessGrid,
        root: int | None = None,
        block: Block = None,
        source: tuple[int, int] = (0, 0),
        device: str = devices.HOST,
    ) -> DistMatrix:
        """Deal out a whole matrix.  Collective over the grid.

        array : (m, n) on every rank, each taking its part; or, with `root`, only on that rank,
                which sends the others theirs.  Numbers in any byte order; a masked array is refused.
        """
        with together(communicator_of(grid)) as said:
            if root is not None:
                _check_root(grid, root)
            said += ["DistMatrix.from_global", f"root={root}", device]  # the layout is compared when it is made
            whole = _as_matrix(array) if root in (None, grid.rank) else np.empty((0, 0))
            if root is None:
                said += [whole.shape, whole.dtype]
        if root is None:
            matrix = cls.empty(whole.shape, grid=grid, block=block, dtype=whole.dtype, source=source, device=device)
            with together(grid.comm):
                set_elements(matrix.local, whole[block_index(*matrix.indices())])
            return matrix
        shape, dtype = grid.comm.bcast((whole.shape, whole.dtype), root=root)
        matrix = cls.empty(shape, grid=grid, block=block, dtype=dtype, source=source, device=device)
        host = matrix.local if matrix.device == devices.HOST else np.empty(matrix.local.shape, dtype)
        deal(whole, host, matrix.distribution, grid, root)
        with together(grid.comm):
            if host is not matrix.local:
                set_elements(matrix.local, host)
        return matrix

    # ------------------------------------------------------------------ looking
    @property
    def report(self) -> Any:
        """A Report, MoveReport or IOReport of what made this matrix; None if nothing is known."""
        if callable(self._report):
            self._report = self._report()
        return self._report

    @report.setter
    def report(self, report: Any) -> None:
        """report : or what makes it, when somebody looks."""
        self._report = report

    @property
    def local(self) -> Array:
        """This rank's elements: change them in place; `from_local` adopts another array.

        Of the conjugate of a complex matrix: a copy, read-only.
        """
        if not self.conjugated:
            return self._stored
        where = devices.of(self._stored)
        local = devices.empty(self._stored.shape, self.dtype, self.order, where)
        CONJUGATE(local, self._stored)
        if where is None:
            local.flags.writeable = False
        return local

    @property
    def stored(self) -> Array:
        """The elements as they lie in memory: of a conjugated view, not conjugated."""
        return self._stored

    @property
    def shape(self) -> tuple[int, int]:
        return self.distribution.shape

    @property
    def block(self) -> tuple[int, int]:
        return self.distribution.block

    @property
    def dtype(self) -> np.dtype:
        dtype: np.dtype = self._stored.dtype
        return dtype

    @property
    def device(self) -> str:
        """Where the local arrays are: "host", "cuda"."""
        return devices.name_of(self._stored)

    @property
    def ndim(self) -> int:
        return 2

    @property
    def size(self) -> int:
        """Number of elements, of all ranks together."""
        return self.shape[0] * self.shape[1]

    def indices(self) -> tuple[np.ndarray, np.ndarray]:
        """Global row and column numbers of the local array."""
        i, j = self.grid.coords
        return self.distribution.rows.indices(i), self.distribution.cols.indices(j)

    def same_layout(self, other: DistMatrix) -> bool:
        """Does every rank hold the same elements of both?  Local."""
        return self.distribution.canonical == other.distribution.canonical and self.grid.same_as(other.grid)

    def layout_in(self, grid: ProcessGrid) -> Layout:
        """What a plan needs to know of the matrix, its ranks numbered as in the communicator of `grid`.

        Raises GridError where the two grids are not over the same ranks.
        """
        check_not_freed(self.grid.comm)
        if self._layout is not None and self._layout[0] is grid.comm:
            return self._layout[1]
        place = self.grid.place_in(grid)
        if place is None:
            raise GridError(f"grids over different ranks: {self.grid!r} and {grid!r}; use ProcessGrid(comm, ranks=...)")
        layout = Layout(self.distribution, place, self.dtype, self.order, self.conjugated)
        self._layout = grid.comm, layout
        return layout

    def __repr__(self) -> str:
        rows, cols = self._stored.shape
        return (
            f"DistMatrix({self.distribution}, {self.dtype}, on a {self.grid} grid; rank {self.grid.rank} "
            f"at {self.grid.coords} holds {rows} x {cols}, {self._stored.nbytes / 2**20:.1f} MiB"
            f"{'' if self.device == devices.HOST else f' on {self.device}'})"
        )

    # ------------------------------------------------------------------ views
    @property
    def T(self) -> DistMatrix:
        """The transpose, as a view: on the grid seen transposed, `grid.T`.  Local."""
        order: Order = "C" if self.order == "F" else "F"
        return DistMatrix(
            self._stored.T, self.grid.T, self.distribution.transposed, order, self.conjugated, self.shared, self.plain
        )

    @property
    def H(self) -> DistMatrix:
        """The conjugate transpose, as a view.  Local."""
        view = self.T
        view.conjugated = (self.dtype.kind == "c") != self.conjugated
        return view

    def __getitem__(self, key: Any) -> DistMatrix:
        """A[i0:i1, j0:j1] or A[...]: a submatrix as a view, at any offset.  Local; slices as NumPy's."""
        keys = key if isinstance(key, tuple) else (slice(None) if key is ... else key, slice(None))
        try:
            ranges = [x.indices(n) for x, n in zip(keys, self.shape, strict=True)]
        except (AttributeError, TypeError, ValueError):  # not two slices, or not of whole numbers
            ranges = []
        if not ranges or any(step != 1 for *_, step in ranges):
            raise ArgumentError(f"a submatrix is A[i0:i1, j0:j1], rows and columns without gaps; got {shown(key)}")
        rows, cols = ((start, max(start, stop)) for start, stop, _ in ranges)
        part = self._stored[self.distribution.local_window(rows, cols, self.grid.coords)]
        window = self.distribution.window(rows, cols)
        return DistMatrix(part, self.grid, window, self.order, self.conjugated, self.shared, self.plain)

    def __setitem__(self, key: Any, value: DistMatrix | complex) -> None:
        """Set a submatrix: to a number, or to a matrix of any layout.  Collective over the grid."""
        with together(self.grid.comm) as said:
            view, filled = self[key], np.zeros(1, self.dtype)
            said += ["A[i0:i1, j0:j1] = ...", key]
            if isinstance(value, DistMatrix):
                check_not_freed(value.grid.comm)
                said.append("to a matrix")
            elif np.ndim(value) == 0:
                filled[:] = value  # raises what cannot be an element
                said.append(f"to {filled[0]}")
            else:
                raise ArgumentError(
                    "a submatrix is set to a number or a DistMatrix; deal an array out first, from_global"
                )
        if isinstance(value, DistMatrix):
            value.redistribute(view)
        else:
            view.local[...] = filled[0]

    # ------------------------------------------------------------------ moving
    def redistribute(self, out: DistMatrix | None = None, **options: Any) -> DistMatrix:
        """The same elements in another layout: see `pdgemm.redistribute`.  Collective over the grid."""
        return pdgemm.redistribute(self, out, **options)

    def to_device(self, device: str = "cuda") -> DistMatrix:
        """A copy in the memory of a device, or of the host; the matrix itself if it lies there.  Collective.

        Raises DeviceError where there is no such device, OutOfMemoryError where it has no room; on every rank.
        """
        with together(self.grid.comm) as said:  # before some return and others do not
            said += ["to_device", device]
        if device == self.device:
            return self
        where = meet(self.grid, device)
        with together(self.grid.comm) as said:
            said += ["to_device", self.distribution, device]
            local = new_array(self._stored.shape, self.dtype, self.order, self.grid, where)
            set_elements(local, to_host(self._stored))
        shared = all_shared(local, self.grid)
        return DistMatrix(local, self.grid, self.distribution, self.order, self.conjugated, shared)

    def to_host(self) -> DistMatrix:
        """A copy in the memory of the host; the matrix itself if it lies there.  Collective."""
        return self.to_device(devices.HOST)

    # ------------------------------------------------------------------ gathering
    def to_global(self, root: int = 0) -> np.ndarray | None:
        """The whole matrix on `root`, None elsewhere.  Collective over the grid.

        Root needs memory for mn elements and one message of at most 256 MiB.
        """
        with together(self.grid.comm) as said:
            _check_root(self.grid, root)
            said += ["to_global", root, self.distribution, self.dtype]
            whole = np.empty(self.shape, self.dtype) if self.grid.rank == root else None
            here = to_host(self.local)
        collect(here, self.distribution, self.grid, whole, root)
        return whole

    def allgather(self) -> np.ndarray:
        """The whole matrix on every rank.  Collective over the grid."""
        with together(self.grid.comm) as said:
            said += ["allgather", self.distribution, self.dtype]
            whole, here = np.empty(self.shape, self.dtype), to_host(self.local)
        collect_everywhere(here, self.distribution, self.grid, whole)
        return whole

    # ------------------------------------------------------------------ computing
    def copy(self) -> DistMatrix:
        """A matrix of its own memory, same layout.  Local."""
        return self.astype(self.dtype)

    def astype(self, dtype: Any) -> DistMatrix:
        """A copy with another element type.  Local."""
        local = devices.empty(self._stored.shape, element_type(dtype), self.order, devices.of(self._stored))
        (CONJUGATE if self.conjugated else CONVERT)(local, self._stored)
        return DistMatrix(local, self.grid, self.distribution, self.order)

    def norm(self, kind: str | int | float = "fro") -> float:
        """A matrix norm, the same on every rank.  Collective over the grid.

        kind : "fro" sqrt(sum |a|^2), 1 max column sum, numpy.inf max row sum, "max" max |a|.
        NaN anywhere gives NaN; no overflow in between.
        """
        return norm(self._stored, self.distribution, self.grid, kind)

    def allclose(
        self, other: DistMatrix | complex, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
    ) -> bool:
        """|a - b| <= atol + rtol |b| for all elements; the same answer on every rank.  Collective."""
        differ = together(self.grid.comm)
        with differ as said:
            right: Any = other
            if isinstance(other, DistMatrix):
                self._check_layout(other)
                right = to_host(other.local)
            elif np.ndim(other) != 0:
                raise ArgumentError("a DistMatrix is compared with a number or a DistMatrix; deal an array out first")
            else:
                right = complex(other) if np.iscomplexobj(other) else float(other)  # type: ignore[arg-type]
            rtol, atol, equal_nan = float(rtol), float(atol), bool(equal_nan)
            compared = f"a matrix of {right.dtype}" if isinstance(other, DistMatrix) else right
            said += ["allclose", self.distribution, self.dtype, compared, rtol, atol, equal_nan]
            differ.flag = not np.allclose(to_host(self.local), right, rtol=rtol, atol=atol, equal_nan=equal_nan)
        return not differ.flag

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """Elementwise NumPy functions on the local parts; numpy.matmul as a distributed product."""
        out = options.pop("out", (None,))[0]
        numpy_functions.check_ufunc(ufunc, method, options)
        matrices = [x for x in (*inputs, out) if isinstance(x, DistMatrix)]
        arrays = (np.ndim(x) or isinstance(x, np.ma.MaskedArray) for x in inputs if not isinstance(x, DistMatrix))
        if any(arrays) or not isinstance(out, DistMatrix | None):
            raise TypeError(
                f"{ufunc.__name__} of a DistMatrix and an array: deal the array out first, "
                "DistMatrix.from_global(array, grid=...)"
            )
        if ufunc is np.matmul:
            return pdgemm.matmul(inputs[0], inputs[1], out, **options)
        for other in matrices:
            self._check_layout(other)
            if other.device != self.device:
                raise DeviceError(f"{ufunc.__name__} of matrices on {self.device} and {other.device}: use to_device")
        if out is not None and out.conjugated:
            raise ArgumentError("out is the conjugate of another matrix, and cannot be written to")
        operands = [x.dtype if isinstance(x, DistMatrix) or devices.of(x) else x for x in inputs]
        by_value = numpy_functions.check_elements(ufunc, operands, None if out is None else out.dtype, options)
        parts = [x.local if isinstance(x, DistMatrix) else x for x in inputs]
        parts = [x[()] if isinstance(x, np.ndarray) and not x.ndim else x for x in parts]  # CuPy takes no 0-d arrays
        with together(self.grid.comm, by_value):  # else no rank fails alone, and nothing is sent
            if out is not None:
                ufunc(*parts, out=out.local, **options)
                return out
            order: Order = "F" if all(x.order == "F" for x in matrices) else "C"
            if self.device == devices.HOST:
                options["order"] = order
            else:  # CuPy's functions know no order
                order = "C"
            return DistMatrix(ufunc(*parts, **options), self.grid, self.distribution, order)

    def __bool__(self) -> bool:
        raise ValueError("a DistMatrix is not true or false: compare with allclose")

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Any:
        """NumPy's other functions: TypeError, but for those that look at shape and dtype alone."""
        return numpy_functions.call(function, arguments, options)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        raise TypeError(f"a DistMatrix is not one array: {numpy_functions.WHOLE}")

    def __iter__(self) -> Any:
        raise TypeError(f"a DistMatrix is not iterated over: {numpy_functions.WHOLE}")

    def __copy__(self) -> DistMatrix:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> DistMatrix:
        """On the same grid, which belongs to all ranks and is never copied."""
        return self.copy()

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a DistMatrix is dealt out to ranks and is not pickled: save it by hdf5.save, or {numpy_functions.WHOLE}"
        )

    def _check_layout(self, other: DistMatrix) -> None:
        for matrix in (self, other):
            check_not_freed(matrix.grid.comm)
        if not self.same_layout(other):
            raise LayoutError(
                f"layouts differ: {self.distribution} on a {self.grid} grid and "
                f"{other.distribution} on a {other.grid} grid; bring one to the other's with redistribute"
            )


def new_array(
    shape: tuple[int, int], dtype: Any, order: Order, grid: ProcessGrid, device: Device | None = None
) -> Array:
    """An array whose elements are not set, where the ranks of the node can read it if there is room.  Local."""
    dtype = element_type(dtype)
    try:
        try:
            return devices.memory(device, grid).empty(shape, dtype, order)
        except NodeMemoryError:
            return devices.empty(shape, dtype, order, device)
    except ValueError as bad:  # NumPy's own limit
        raise OutOfMemoryError(f"no rank has room for {shape[0]} x {shape[1]} elements of {dtype}: {bad}") from bad


def all_shared(local: Array, grid: ProcessGrid) -> bool:
    """Do the arrays of all ranks lie where the ranks of their nodes can read them?  Collective over the grid."""
    if grid.comm.size == 1:
        return False
    here = not local.size or devices.memory(devices.of(local), grid).lies_here(local)
    return bool(grid.comm.allreduce(here, MPI.LAND))


def communicator_of(grid: ProcessGrid) -> MPI.Intracomm:
    """Where ranks agree on a matrix to be made."""
    if not isinstance(grid, ProcessGrid):  # nobody to agree with
        raise GridError(f"grid is a ProcessGrid, got {type(grid).__name__}")
    return grid.comm


def meet(grid: ProcessGrid, name: str) -> Device | None:
    """The device of a name, when the ranks know how they reach its memory.  Collective over the grid."""
    comm = communicator_of(grid)
    check_not_freed(comm)
    if isinstance(name, str) and name == devices.HOST:
        return None
    with together(comm) as said:
        said += ["device", name]
        device = devices.named(name)
    if device:
        device.meet(grid)
    return device


def layout_on(grid: ProcessGrid, shape: tuple[int, int], block: Block, source: tuple[int, int]) -> Distribution:
    if grid.layers != 1:
        plane = grid.shape[0] * grid.shape[1]
        raise GridError(
            f"a matrix lies on a grid of one layer, this one is {grid}; products make layers themselves; "
            f"for layer 0 alone: ProcessGrid(comm, {grid.shape}, ranks=range({plane}))"
        )
    return Distribution.over(grid.shape, shape, block, source)


def _as_matrix(array: Any) -> np.ndarray:
    whole = devices.adopted(array)
    if devices.of(whole):
        raise DeviceError("a whole matrix is dealt out from the host: bring it there, or use DistMatrix.from_local")
    if not whole.dtype.isnative:
        whole = whole.astype(whole.dtype.newbyteorder("="))
    element_type(whole.dtype)
    if whole.ndim != 2:
        raise LayoutError(f"a matrix has two dimensions, got an array of shape {whole.shape}")
    return whole


def _order(array: np.ndarray) -> Order | None:
    """ "C" or "F", or None for an array that is of both orders."""
    (rows, cols), (down, right) = array.shape, array.strides
    if array.size <= 1 or (rows == 1 and right == array.itemsize) or (cols == 1 and down == array.itemsize):
        return None
    if 1 in (rows, cols):  # one row of a column-major array, or one column of a row-major one
        return "F" if rows == 1 else "C"
    return "C" if right == array.itemsize else "F"


def _check_root(grid: ProcessGrid, root: int) -> None:
    if as_whole(root, "root") not in range(grid.size):
        raise ArgumentError(f"root {root} is not a rank of the {grid} grid")
