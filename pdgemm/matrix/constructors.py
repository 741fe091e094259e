"""Constructors: the class methods that make a DistMatrix, all collective over its grid."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any, Self, TypedDict, TypeVar, Unpack, get_args

import numpy as np

import pdgemm
from pdgemm.errors import ArgumentError, DeviceError, LayoutError
from pdgemm.grids.distribution import Block, Distribution
from pdgemm.grids.layout import Order
from pdgemm.grids.process_grid import ProcessGrid, default_grid
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.arguments import as_name, as_whole
from pdgemm.local.arrays.device import Array, to_host
from pdgemm.local.arrays.dtypes import element_type
from pdgemm.local.arrays.element_functions import ElementFunction, KnownFunction, element_function
from pdgemm.local.arrays.elementwise import set_by_function, set_elements
from pdgemm.local.blas.local_gemm import leading
from pdgemm.matrix.gather import block_index, scatter
from pdgemm.matrix.local_arrays import communicator_of, device_on, in_native_order, memory_order, new_local, new_shared
from pdgemm.matrix.matrix_base import MatrixBase
from pdgemm.names import DeviceName, DType, RandomKind
from pdgemm.support.agreement import described_elements, together

F = TypeVar("F", bound=Callable[..., Any])


class Placement(TypedDict, total=False):
    """The layout of a new matrix, as `DistMatrix.empty` explains it, without the type of its elements."""

    grid: ProcessGrid | None
    block: Block | None
    source: tuple[int, int]
    order: Order
    device: DeviceName


class LayoutOptions(Placement, total=False):
    """The layout of a new matrix, and the type of its elements."""

    dtype: DType | None


LAYOUT: LayoutOptions = {
    "grid": None, "block": None, "dtype": np.float64, "source": (0, 0), "order": "C", "device": devices.HOST,
}  # fmt: skip


def _shown(typed: bool = True, **defaults: Any) -> Callable[[F], F]:
    """Show the names, types and default values of LayoutOptions, or of Placement, in the signature of a constructor."""
    types = {name: x.__forward_arg__ for name, x in LayoutOptions.__annotations__.items()}
    of_all = {**LAYOUT, **defaults}.items()
    shown = [Parameter(name, Parameter.KEYWORD_ONLY, default=x, annotation=types[name]) for name, x in of_all]
    shown = [x for x in shown if typed or x.name != "dtype"]

    def decorated(constructor: F) -> F:
        changed: Any = constructor
        *others, _ = signature(constructor).parameters.values()
        changed.__signature__ = signature(constructor).replace(parameters=[*others, *shown])
        return constructor

    return decorated


def _grid_of(layout: Placement) -> ProcessGrid:
    grid = layout.get("grid")
    return default_grid() if grid is None else grid


class Constructors(MatrixBase):
    """The class methods of DistMatrix that make a matrix."""

    @classmethod
    @_shown()
    def empty(cls, shape: tuple[int, int], **layout: Unpack[LayoutOptions]) -> Self:
        """Make a matrix whose elements are not initialised.  Collective over the grid.

        grid   : by default a grid of all ranks, `pdgemm.grids.process_grid.default_grid()`.
        dtype  : bool, int8 to int64, uint8 to uint64, float16, bfloat16, float32, float64, complex64 or complex128; on
                 the host float8_e4m3fn, float8_e5m2 and float8_e8m0fnu.
        block  : mb = nb, or (mb, nb); by default one block per rank.
        source : grid coordinates (rsrc, csrc) of the rank that owns the first block.
        order  : memory order of the local arrays, "C" (rows contiguous) or "F" (columns contiguous).
        device : "host" or "cuda": the local arrays are NumPy's, or CuPy's on the GPU of each rank.
        Raises LayoutError, ArgumentError, DTypeError, DeviceError or MemoryError, on every rank.
        """
        return cls._allocated("empty", shape, **layout)

    @classmethod
    def _allocated(cls, name: str, shape: tuple[int, int], **layout: Unpack[LayoutOptions]) -> Self:
        """Return a matrix as `empty` does.   name : the name of the calling constructor, for messages."""
        if unknown := layout.keys() - LAYOUT.keys():
            raise TypeError(f"DistMatrix.{name}() got an unexpected keyword argument {min(unknown)!r}")
        options: Any = {**LAYOUT, **layout}
        _, block, dtype, source, order, device = options.values()
        grid = _grid_of(layout)
        where = device_on(grid, device)

        def allocate(arguments: list[object]) -> Array:
            local, distribution = new_local(grid, shape, block, source, dtype, order, where)
            arguments += [f"DistMatrix.{name}", distribution, local.dtype, order]
            return local

        local, shared = new_shared(grid, allocate)
        return cls(local, grid, Distribution.over(grid.shape, shape, block, source), order, shared=shared)

    @classmethod
    @_shown()
    def zeros(cls, shape: tuple[int, int], **layout: Unpack[LayoutOptions]) -> Self:
        """Make a matrix of zeros.  Collective over the grid; arguments as for `empty`."""
        matrix = cls._allocated("zeros", shape, **layout)
        return matrix._filled("zeros", element_function("zeros", 0, np.dtype("d")))

    @classmethod
    @_shown()
    def eye(cls, n: int | tuple[int, int], **layout: Unpack[LayoutOptions]) -> Self:
        """Make a matrix with 1 on the main diagonal and 0 elsewhere, n x n or of a given shape.  Collective."""
        shape = n if isinstance(n, tuple) else (n, n)
        matrix = cls._allocated("eye", shape, **layout)
        return matrix._filled("eye", element_function("eye", 0, np.dtype("d")))

    @classmethod
    @_shown()
    def ones(cls, shape: tuple[int, int], **layout: Unpack[LayoutOptions]) -> Self:
        """Make a matrix of ones.  Collective over the grid; arguments as for `empty`."""
        options: LayoutOptions = {"dtype": LAYOUT["dtype"], **layout}
        return cls.full(shape, 1, **options)

    @classmethod
    @_shown(dtype=None)
    def full(cls, shape: tuple[int, int], fill_value: complex, **layout: Unpack[LayoutOptions]) -> Self:
        """Make a matrix of one number.  Collective over the grid; arguments as for `empty`.

        dtype : by default NumPy's type of the number.
        """
        grid, dtype = _grid_of(layout), layout.get("dtype")
        with together(communicator_of(grid)) as arguments:
            if np.ndim(fill_value) != 0:
                raise ArgumentError(f"a matrix is filled with one number, got an array of {np.shape(fill_value)}")
            number = np.zeros(1, element_type(np.asarray(fill_value).dtype if dtype is None else dtype))
            number[:] = fill_value
            arguments += ["DistMatrix.full", number[0]]
        options: LayoutOptions = {**layout, "grid": grid, "dtype": number.dtype}
        return cls.empty(shape, **options)._filled("full", KnownFunction("constant", value=number[0]))

    @classmethod
    @_shown(dtype=None)
    def diag(cls, v: Any, k: int = 0, **layout: Unpack[LayoutOptions]) -> Self:
        """Make the matrix with a vector on its k-th diagonal and 0 elsewhere: A[i, i + k] = v.  Collective.

        v : array-like of one dimension, the same on every rank; the matrix has len(v) + |k| rows and columns.
        dtype : by default that of v.  Other arguments as for `empty`.
        """
        grid, dtype = _grid_of(layout), layout.get("dtype")
        with together(communicator_of(grid)) as arguments:
            vector, k = to_host(devices.adopted(v)), as_whole(k, "k")
            if vector.ndim != 1:
                raise LayoutError(f"a diagonal has one dimension, got an array of shape {vector.shape}")
            wanted = element_type(vector.dtype if dtype is None else dtype)
            arguments += ["DistMatrix.diag", k, described_elements(vector)]
            n = len(vector) + abs(k)

        def element(i: np.ndarray, j: np.ndarray) -> np.ndarray:
            on = j - i == k
            elements = np.zeros(on.shape, wanted)
            elements[on] = vector[np.broadcast_to(np.minimum(i, j), on.shape)[on]]
            return elements

        options: LayoutOptions = {**layout, "grid": grid, "dtype": wanted}
        return cls.empty((n, n), **options)._filled("diag", element)

    @classmethod
    @_shown()
    def random(
        cls,
        shape: tuple[int, int],
        *,
        seed: int = 0,
        kind: RandomKind = "uniform",
        **layout: Unpack[LayoutOptions],
    ) -> Self:
        """Make a matrix of random numbers, which depend on the seed but not on grid and layout.  Collective.

        kind : "uniform" on [0, 1), for integers on all numbers of the type, or "normal" with mean 0 and variance 1;
               other arguments as for `empty`.
        """
        grid, dtype = _grid_of(layout), layout.get("dtype", LAYOUT["dtype"])
        with together(communicator_of(grid)) as arguments:
            f = element_function(as_name(kind, "kind", get_args(RandomKind)), seed, element_type(dtype))
            arguments += ["DistMatrix.random", f"seed={seed}", kind]
        matrix = cls._allocated("random", shape, **layout)
        return matrix._filled("random", f)

    @classmethod
    @_shown()
    def from_function(cls, f: ElementFunction, shape: tuple[int, int], **layout: Unpack[LayoutOptions]) -> Self:
        """Make the matrix A[i, j] = f(i, j).  Collective over the grid; no element is sent; arguments as for `empty`.

        f : called with integer arrays of NumPy, i of shape (r, 1) and j of shape (1, c), always on the
            host; returns a value that broadcasts to (r, c).  An exception in f on any rank is raised on all ranks.
        """
        matrix = cls._allocated("from_function", shape, **layout)
        return matrix._filled("from_function", f)

    def _filled(self, name: str, f: ElementFunction) -> Self:
        """Set the elements of a new matrix by f, and return the matrix.  Collective."""
        with together(self.grid.comm) as arguments:
            arguments.append(f"DistMatrix.{name}")
            if self.local.size:  # a rank without elements may own more indices than fit in memory
                set_by_function(self.local, *self.indices(), f)
        return self

    @classmethod
    def from_local(
        cls,
        local: Any,
        shape: tuple[int, int],
        *,
        grid: ProcessGrid | None = None,
        block: Block | None = None,
        source: tuple[int, int] = (0, 0),
    ) -> Self:
        """Make a matrix of the ranks' local arrays, without copying them.  Collective over the grid.

        local : array of shape `local_shape` for this layout, rows or columns contiguous, the same dtype on all ranks.
                An array of NumPy's or CuPy's, or of any library that exports its memory by DLPack or
                `__cuda_array_interface__` (PyTorch, JAX); the matrix is on the device of the array.
        """
        grid = default_grid() if grid is None else grid
        comm = communicator_of(grid)
        with together(comm) as arguments:
            layout = Distribution.over(grid.shape, shape, block, source)
            array = devices.adopted(local)
            if device := devices.of(array):
                device.check(array)
            arguments += ["DistMatrix.from_local", layout, element_type(array.dtype), devices.name_of(array)]
            if array.shape != layout.local_shape(grid.coords):
                raise LayoutError(
                    f"the local array has shape {array.shape}, but {layout} on a {grid} grid gives "
                    f"{layout.local_shape(grid.coords)} to rank {grid.rank} at {grid.coords}"
                )
            try:
                leading(array)
            except ValueError as bad:
                raise LayoutError(f"{bad}; pass numpy.ascontiguousarray(local)") from None
        where = device_on(grid, devices.name_of(array))
        memory = devices.shared_memory(where, grid)
        # an empty array, a row or a column is in both orders: the arrays of the other ranks decide
        properties = comm.allgather(
            (memory_order(array), not array.size or memory.lies_here(array), where is None or where.addressable(array))
        )
        orders = sorted({order for order, *_ in properties if order})
        if len(orders) > 1:
            raise LayoutError("local arrays are in C order on some ranks and in Fortran order on others; use one order")
        _, shared, addressable = zip(*properties)
        order: Order = orders[0] if orders else "C"
        return cls(array, grid, layout, order, shared=all(shared), mpi_addressable=all(addressable))

    @classmethod
    @_shown(typed=False)
    def from_global(
        cls, array: np.ndarray | None, *, root: int | None = None, check: bool = True, **layout: Unpack[Placement]
    ) -> Self:
        """Distribute a whole matrix.  Collective over the grid.

        array : (m, n), the same on every rank: each rank copies its part.  With `root`, only the root passes the array,
                and sends the other ranks their parts.  Numbers in any byte order; a masked array is refused.
        grid, block, source, order, device : as for `empty`.
        check : without `root`, compare a checksum of the array among the ranks, bit for bit: random numbers without
                a common seed differ between ranks.  Pass False if the arrays are known to be the same.

        Cost per rank: (m n) / P elements are copied, and m n elements are read once by CRC-32 for `check`, which needs
        no further message.  With `root`: each rank receives (m n) / P elements, and the root sends m n elements.
        Raises ArgumentError where arrays, or layouts, differ among the ranks; LayoutError, DTypeError, DeviceError or
        MemoryError; on every rank.
        """
        grid, device = _grid_of(layout), layout.get("device", devices.HOST)
        with together(communicator_of(grid)) as arguments:
            if root is not None:
                check_root(grid, root)
            arguments += ["DistMatrix.from_global", f"root={root}", device]  # `empty` compares the layouts of the ranks
            if array is None and root is None:
                raise ArgumentError("array is None: if only one rank has the array, all ranks must pass root=")
            whole = _as_matrix(array) if root in (None, grid.rank) else np.empty((0, 0))
            if root is None:
                arguments += [f"an array of shape {whole.shape}", whole.dtype, f"check={bool(check)}"]
                if check and grid.size > 1:
                    arguments.append(f"{described_elements(whole)} (with root=0, those of rank 0 are distributed)")
        shape, dtype = whole.shape, whole.dtype
        if root is not None:
            shape, dtype = grid.comm.bcast((shape, dtype), root=root)
        options: LayoutOptions = {**layout, "grid": grid, "dtype": dtype}
        matrix = cls.empty(shape, **options)
        if root is None:
            with together(grid.comm):
                set_elements(matrix.local, whole[block_index(*matrix.indices())])
            return matrix
        in_place = matrix.device == devices.HOST and matrix.order == "C"  # messages have whole rows
        host = matrix.local if in_place else np.empty(matrix.local.shape, dtype)
        scatter(whole, host, matrix.distribution, grid, root)
        with together(grid.comm):
            if host is not matrix.local:
                set_elements(matrix.local, host)
        return matrix

    @classmethod
    @_shown(typed=False)
    def from_blocks(
        cls,
        local: Any,
        *,
        rows: Any = None,
        cols: Any = None,
        axis: int | None = None,
        shape: tuple[int, int] | None = None,
        **layout: Unpack[Placement],
    ) -> Self:
        """Make a matrix of the ranks' blocks, of any sizes: see `pdgemm.interchange.from_blocks`.  Collective.

        `from_blocks(local, grid=grid, axis=0)` stacks the blocks in the order of the ranks; with `rows=(start, stop),
        cols=(start, stop)` each rank passes the place of its block, or of each block in a list.
        """
        options: Any = {**layout, "grid": _grid_of(layout)}
        blocks: Any = pdgemm.interchange.from_blocks
        return blocks(local, rows=rows, cols=cols, axis=axis, shape=shape, **options)


def check_root(grid: ProcessGrid, root: int) -> None:
    """Raise ArgumentError where root is not a rank of the grid.  Local."""
    if as_whole(root, "root") not in range(grid.size):
        raise ArgumentError(f"root {root} is not a rank of the {grid} grid")


def _as_matrix(array: Any) -> np.ndarray:
    """Return the array if it is a matrix on the host, in the byte order of this machine."""
    whole = devices.adopted(array)
    if devices.of(whole):
        raise DeviceError("from_global takes arrays on the host: copy this one there, or use DistMatrix.from_local")
    return in_native_order(whole, "a matrix")
