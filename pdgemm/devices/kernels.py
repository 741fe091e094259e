"""Y := alpha op(X) + beta Y on a GPU, by one kernel for arrays of any strides, or by a copy engine; other kernels.

CuPy compiles kernels for float32 with flush-to-zero: results that are subnormal numbers of that type become 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, wraps
from math import gcd
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import cupy
import numpy as np
from cupy.cuda import driver, runtime

from pdgemm.errors import DTypeError, OutOfMemoryError
from pdgemm.grids.index_map import IndexMap
from pdgemm.local.arrays.activations import ACTIVATIONS, Finish
from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.dtypes import NARROW, TYPES, arithmetic
from pdgemm.local.arrays.elementwise import Combine

_FEW = 4  # launches that are cheaper than one launch of the kernel that reads the index of every row and column
_LEAST_ROW = 512  # bytes of the shortest row that the copy engine copies; kernels are faster on shorter rows
_MOST_PITCH = (1 << 31) - 1  # bytes from row to row that a copy engine takes at most, the device property memPitch
_ALIGNED = 16  # bytes; kernels are faster than the engine on rows that do not begin and end at multiples of this
_WORDS: list[np.dtype] = [np.dtype(np.int64), np.dtype(np.int32)]  # the words as which kernels copy smaller elements
_KEPT_INDICES = 1 << 16  # size of the largest index map whose indices stay in device memory
_CUDA: dict[type[Exception], int] = {runtime.CUDARuntimeError: 2, driver.CUDADriverError: 2}


def memory_errors(statuses: Mapping[type[Exception], int]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that raises OutOfMemoryError if CUDA or a library runs out of memory for internal use.

    statuses : the exception of each library, and the status by which the library reports this.
    """
    known = _CUDA | dict(statuses)

    def decorated(launch: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(launch)
        def launched(*args: Any) -> Any:
            try:
                return launch(*args)
            except tuple(known) as error:
                if getattr(error, "status", None) == known[type(error)]:
                    free, total = runtime.memGetInfo()
                    text = f"a launch ran out of memory on the GPU ({free} of {total} bytes are free): {error}"
                    raise OutOfMemoryError(text) from None
                raise

        return launched

    return decorated


def combine(how: Combine, target: Array, source: Array) -> None:
    """Start target := alpha op(source) + beta target in the current stream, in one launch."""
    if not target.size:
        return
    form, sides = _form(how), _by_target(target, source)
    if _only_copies(source.dtype, target.dtype, form):
        if _copied_by_engine(sides):
            return
        target, source = sides.in_words()
    else:
        target, source = sides.arrays(target.dtype, source.dtype)
    _kernel(source.dtype, target.dtype, form)(source, *_numbers(how, source, target), target)


def _copied_by_engine(sides: _Sides) -> bool:
    """Copy by a copy engine where it is fastest, and return True; do nothing and return False elsewhere.

    An engine copies contiguous elements, and long rows if one side is pinned memory or memory of another rank.

    Within one GPU, kernels copy the rows of a matrix at twice the bandwidth of an engine (measured on an H200).
    """
    *outer, length = sides.shape
    itemsize = sides.target.itemsize
    if len(outer) > 1 or not sides.unit or length * itemsize < _LEAST_ROW * len(outer):
        return False
    stream = cupy.cuda.get_current_stream().ptr
    there, here, width = sides.target.data.ptr, sides.source.data.ptr, length * itemsize
    if outer:
        if not any(isinstance(x.data.mem, cupy.cuda.UnownedMemory) for x in (sides.target, sides.source)):
            return False  # neither side is pinned memory or memory of another rank, which may be on another GPU
        pitches = sides.target_strides[0], sides.source_strides[0]
        if min(pitches) < width or max(pitches) > _MOST_PITCH or gcd(there, here, width, *pitches) % _ALIGNED:
            return False
        matrix = there, pitches[0], here, pitches[1], width, outer[0]
        runtime.memcpy2DAsync(*matrix, runtime.memcpyDefault, stream)
    else:
        runtime.memcpyAsync(there, here, width, runtime.memcpyDefault, stream)
    return True


def combine_blocks(how: Combine, target: Array, source: Array, rows: IndexMap, cols: IndexMap) -> None:
    """Start `combine` for rows x columns of both arrays, in at most _FEW launches."""
    if not 0 < len(rows.strided_runs) * len(cols.strided_runs) <= _FEW:
        _combine_each(how, target, source, rows, cols)
        return
    for r in rows.strided_runs:
        for c in cols.strided_runs:
            sides = [
                _view(x, (row, down), (col, right), (r.repeats, r.length, c.repeats, c.length))
                for x, row, down, col, right in (
                    (target, r.target, r.target_stride, c.target, c.target_stride),
                    (source, r.source, r.source_stride, c.source, c.source_stride),
                )
            ]
            combine(how, *sides)


def _combine_each(how: Combine, target: Array, source: Array, rows: IndexMap, cols: IndexMap) -> None:
    """Combine rows and columns by index in one launch, for index maps of many strided runs."""
    if target.strides[0] < target.strides[1]:  # neighbouring threads write neighbouring elements
        target, source, rows, cols = target.T, source.T, cols, rows
    (from_rows, to_rows), (from_cols, to_cols) = _indices(rows), _indices(cols)
    kernel, size = _kernel(source.dtype, target.dtype, _form(how), "combine_each"), rows.size * cols.size
    where = from_rows, from_cols, to_rows, to_cols, np.int64(cols.size)
    kernel(source, *where, *_numbers(how, source, target), target, size=size)


def combine_within(how: Combine, target: Array, source: Array, within: Any) -> None:
    """Start `combine` for the elements in `within`, a `Staircase`.

    These are the first ends[r] elements of each row r, or, if it is flipped, the first ends[c] of each column c.
    """
    flipped = within.flipped
    if not target.size:
        return
    if target.strides[0] < target.strides[1]:  # neighbouring threads write neighbouring elements
        target, source, flipped = target.T, source.T, not flipped
    kernel = _kernel(source.dtype, target.dtype, _form(how), "combine_cols" if flipped else "combine_rows")
    width, numbers = np.int64(target.shape[1]), _numbers(how, source, target)
    kernel(source, cupy.asarray(within.ends.astype(np.int64)), width, *numbers, target, size=target.size)


def clear_triangle(A: Array, lower: bool, unit: bool) -> None:
    """Start `Device.keep_triangle`, in one launch."""
    if A.strides[0] < A.strides[1]:  # neighbouring threads write neighbouring elements
        A, lower = A.T, not lower
    _triangle_kernel(lower, unit)(np.int64(len(A)), A, size=A.size)


def pick(x: Array, rows: np.ndarray, cols: np.ndarray) -> Array:
    """Return the elements x[rows[l], cols[l]], at least one, by one launch in the current stream."""
    picked = cupy.empty((len(rows),), x.dtype)
    _pick_kernel()(x, *(cupy.asarray(where.astype(np.int64)) for where in (rows, cols)), picked, size=len(rows))
    return picked


def finish(how: Finish, C: Array, sums: Array) -> None:
    """Start the operation of an `activations.Finish` in the current stream, in one launch."""
    operands = {name: x for name, x in zip(how._fields[2:], how[2:]) if x is not None}
    types = tuple((name, x.dtype if np.ndim(x) else sums.dtype) for name, x in operands.items())
    arguments = [x if np.ndim(x) else sums.dtype.type(x) for x in operands.values()]
    if how.aux is not None and not how.gradient:  # the last operand; the kernel writes it
        arguments = [*arguments[:-1], C, arguments[-1]]
    else:
        arguments.append(C)
    _finish_kernel(how.activation, how.gradient, types, sums.dtype, C.dtype)(sums, *arguments)


_known: WeakKeyDictionary[IndexMap, tuple[Array, Array]] = WeakKeyDictionary()


def _indices(runs: IndexMap) -> tuple[Array, Array]:
    """Return all indices of a map in device memory; the indices of small maps stay there, because maps are reused."""
    indices = _known.get(runs)
    if indices is None:
        source, target = (cupy.asarray(x.astype(np.int64)) for x in runs.indices())
        indices = source, target
        if runs.size <= _KEPT_INDICES:
            cupy.cuda.get_current_stream().synchronize()  # the next call may be in another stream
            _known[runs] = indices
    return indices


def _view(x: Array, rows: tuple[int, int], cols: tuple[int, int], shape: tuple[int, int, int, int]) -> Array:
    """Return a view of x with four dimensions: row runs, rows of a run, column runs, columns of a run.

    rows, cols : the first index, and the distance between the starts of two runs.
    """
    (row, down), (col, right), (ds, rs) = rows, cols, x.strides
    return cupy.lib.stride_tricks.as_strided(x[row:, col:], shape, (down * ds, ds, right * rs, rs))


class _Sides(NamedTuple):
    """The target and the source of a copy, with axes in the order of the target's strides, joined where possible.

    Neighbouring threads then access neighbouring elements of the target.
    """

    target: Array
    source: Array
    shape: list[int]
    target_strides: list[int]
    source_strides: list[int]

    @property
    def unit(self) -> bool:
        """Whether the elements of the last axis are adjacent on both sides."""
        return self.target_strides[-1] == self.source_strides[-1] == self.target.itemsize

    def arrays(self, of_target: np.dtype, of_source: np.dtype) -> tuple[Array, Array]:
        """Return target and source as arrays of these types, with the shape and the strides of this object."""
        sides = (of_target, self.target, self.target_strides), (of_source, self.source, self.source_strides)
        there, here = (cupy.ndarray(self.shape, dtype, x.data, strides) for dtype, x, strides in sides)
        return there, here

    def in_words(self) -> tuple[Array, Array]:
        """Return target and source as arrays of words of up to eight bytes, where their alignment allows it."""
        itemsize, word = self.target.itemsize, self.target.dtype
        if self.unit:
            rows = [*self.target_strides[:-1], *self.source_strides[:-1], self.shape[-1] * itemsize]
            apart = gcd(*rows, self.target.data.ptr, self.source.data.ptr)
            word = next((x for x in _WORDS if itemsize < x.itemsize and apart % x.itemsize == 0), word)
        shape = [*self.shape[:-1], self.shape[-1] * itemsize // word.itemsize]
        strides = ([*x[:-1], x[-1] * word.itemsize // itemsize] for x in (self.target_strides, self.source_strides))
        return _Sides(self.target, self.source, shape, *strides).arrays(word, word)


def _by_target(target: Array, source: Array) -> _Sides:
    """Return the `_Sides` of a copy between two arrays of the same shape: sort axes by the target's strides."""
    shape, there, here = list[int](), list[int](), list[int]()
    axes = zip(target.shape, target.strides, source.strides)
    for n, t, s in sorted((x for x in axes if x[0] > 1), key=lambda x: -x[1]):
        if shape and (there[-1], here[-1]) == (n * t, n * s):
            shape[-1], there[-1], here[-1] = n * shape[-1], t, s
        else:
            shape, there, here = [*shape, n], [*there, t], [*here, s]
    if not shape:
        return _Sides(target, source, [1], [target.itemsize], [source.itemsize])
    return _Sides(target, source, shape, there, here)


class _Form(NamedTuple):
    """A form says which terms of alpha op(x) + beta y a kernel computes."""

    alpha: str  # "": alpha is 0, x is not read; "1": alpha is 1, x is not multiplied: 1 (inf + 0i) has a NaN
    beta: str  # likewise
    conjugates: bool


def _form(how: Combine) -> _Form:
    alpha, beta = ("" if x == 0 else "1" if x == 1 else name for x, name in ((how.alpha, "alpha"), (how.beta, "beta")))
    return _Form(alpha, beta, how.conjugated)


def _only_copies(X: np.dtype, Y: np.dtype, form: _Form) -> bool:
    return X == Y and form[:2] == ("1", "") and not (form.conjugates and X.kind == "c")


def _numbers(how: Combine, source: Array, target: Array) -> tuple[Any, Any]:
    wide = _wide(source.dtype, target.dtype)
    return wide.type(how.alpha), wide.type(how.beta)


def _wide(X: np.dtype, Y: np.dtype) -> np.dtype:
    """Return the type of the arithmetic; integers are computed in int64."""
    return np.dtype(np.int64) if Y.kind in "iub" else arithmetic(X, Y)


_C_NAMES = {x.name: x.c_name for x in TYPES if x.c_name}


def _operation(X: np.dtype, Y: np.dtype, form: _Form, x: str, y: str) -> str:
    """Return the C statement of y := alpha op(x) + beta y."""
    if _only_copies(X, Y, form):
        return f"{y} = {x}"
    if not {X.name, Y.name} <= set(_C_NAMES):
        raise DTypeError(f"{X} elements cannot be converted to {Y} on a GPU; its kernels support {', '.join(_C_NAMES)}")
    wide = _C_NAMES[_wide(X, Y).name]
    read = _widened(x, X, wide)
    if form.conjugates and X.kind == "c":
        read = f"conj({read})"
    terms = [(form.alpha, read), (form.beta, _widened(y, Y, wide))]
    value = " + ".join(z if number == "1" else f"{number} * {z}" for number, z in terms if number)
    value = value or f"static_cast<{wide}>(0)"
    if Y.kind != "c" and wide.startswith("complex"):
        value = f"({value}).real()"
    return f"{y} = static_cast<{_C_NAMES[Y.name]}>({value})"


def _widened(element: str, dtype: np.dtype, wide: str) -> str:
    """Return the C expression of an element in the type of the arithmetic."""
    element = f"static_cast<float>({element})" if dtype in NARROW else element
    element = f"{element}.real()" if dtype.kind == "c" and not wide.startswith("complex") else element
    return f"static_cast<{wide}>({element})"


@lru_cache(64)
def _finish_kernel(
    activation: str, gradient: bool, operands: tuple[tuple[str, np.dtype], ...], S: np.dtype, C: np.dtype
) -> Any:
    """Return the kernel of `finish`.   operands : the names and types of the operands that are present."""
    types, wide = dict(operands), _C_NAMES[S.name]
    f = ACTIVATIONS.get(activation)
    value = {name: _widened(name, dtype, wide) for name, dtype in operands}
    written = "aux" in types and not gradient
    lines = ["R z = s"]
    lines += [f"z = z * {value['scale']}"] if "scale" in types else []
    lines += [f"z = z + {value['bias']}"] if "bias" in types else []
    if gradient:
        assert f is not None
        lines += ["R product = z", f"z = {value['aux']}", f.slope_in_c, "z = z * product"]
    else:
        lines += [f"aux = static_cast<{_C_NAMES[types['aux'].name]}>(z)"] if written else []
        lines += [f.in_c] if f else []
    lines += [f"z = z + {value['residual']}"] if "residual" in types else []
    lines.append(f"y = static_cast<{_C_NAMES[C.name]}>(z)")
    read = [name for name in types if name != "aux" or gradient]
    sources = ", ".join(["R s", *(f"{letter} {name}" for letter, name in zip("ABDE", read))])
    return cupy.ElementwiseKernel(sources, "Y y, X aux" if written else "Y y", "; ".join(lines), "pdgemm_finish")


_AT = "ptrdiff_t row = i / width, col = i % width; ptrdiff_t at[] = {row, col}; "
_ACCESS = {  # by kernel: its parameters, the statements before its operation, and the elements x and y
    "combine": ("T x", "", "x", "y"),
    "combine_each": (
        "raw T x, raw int64 from_rows, raw int64 from_cols, raw int64 to_rows, raw int64 to_cols, int64 cols",
        "ptrdiff_t row = i / cols, col = i % cols; "
        "ptrdiff_t from[] = {from_rows[row], from_cols[col]}, to[] = {to_rows[row], to_cols[col]}; ",
        "x[from]",
        "y[to]",
    ),
    "combine_rows": ("raw T x, raw int64 ends, int64 width", _AT + "if (col < ends[row]) ", "x[at]", "y[at]"),
    "combine_cols": ("raw T x, raw int64 ends, int64 width", _AT + "if (row < ends[col]) ", "x[at]", "y[at]"),
}


@lru_cache(768)
def _kernel(X: np.dtype, Y: np.dtype, form: _Form, access: str = "combine") -> Any:
    """Return the kernel of y := alpha op(x) + beta y for arrays of any strides.

    access : which elements the kernel combines: all of both arrays, those given by indices, or those in a `Staircase`.
    """
    wide, (parameters, before, x, y) = _wide(X, Y).name, _ACCESS[access]
    result, operation = "R y" if y == "y" else "raw R y", before + _operation(X, Y, form, x, y)
    return cupy.ElementwiseKernel(f"{parameters}, {wide} alpha, {wide} beta", result, operation, f"pdgemm_{access}")


@lru_cache(4)
def _triangle_kernel(lower: bool, unit: bool) -> Any:
    """Return the kernel of `clear_triangle`; elements of the other triangle are not read."""
    operation = "ptrdiff_t row = i / n, col = i % n; ptrdiff_t at[] = {row, col}; " + (
        f"if (row {'<' if lower else '>'} col) y[at] = R(0)" + "; if (row == col) y[at] = R(1)" * unit
    )
    return cupy.ElementwiseKernel("int64 n", "raw R y", operation, "pdgemm_clear_triangle")


@lru_cache(1)
def _pick_kernel() -> Any:
    """Return the kernel that reads elements by row and column index; it is compiled for each type of elements."""
    read = "ptrdiff_t from[] = {rows[i], cols[i]}; y[i] = x[from]"
    return cupy.ElementwiseKernel("raw T x, raw int64 rows, raw int64 cols", "raw T y", read, "pdgemm_pick")
