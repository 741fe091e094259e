"""A device without hardware: arrays that the host cannot read, and four streams whose work is done late.

What is begun in a stream is done when somebody waits for it, and not before; streams named in `eager` do theirs at
once, ahead of the others.  A synchronisation that is missing therefore gives wrong numbers in one of the schedules
"late", "transfer first" and "compute first", the same in every run.

It is also told in words.  The host, each stream and each message of MPI have a clock of what they have seen (vector
clocks: Lamport 1978, Mattern 1989); two accesses to the same elements, one of them writing, of which neither is known
to come first, are a race, and are kept in `races`.  Signals carry the clock of their sender, and when the ranks of a
node meet they compare what they have read and written in each other's memory since they last met.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI
from numpy.lib.array_utils import byte_bounds
from scipy.linalg.lapack import get_lapack_funcs

from pdgemm.errors import DeviceError
from pdgemm.grids.node_memory import NodeMemory
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.activations import Finish
from pdgemm.local.arrays.device import Pinned, Reach
from pdgemm.local.arrays.dtypes import arithmetic
from pdgemm.local.arrays.element_functions import KnownFunction, fill
from pdgemm.local.arrays.elementwise import Combine
from pdgemm.local.blas.local_gemm import leading
from pdgemm.transport.block_copy import copy_blocks

SCHEDULES = {"late": (), "transfer first": ("transfer", "upload"), "compute first": ("compute",)}
Clock = dict[str, int]


HALF = np.dtype(ml_dtypes.bfloat16)  # in CuPy, some functions and casts take it, and others do not


class FakeArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array of the device: cut, transposed and reshaped like NumPy's, but its elements are out of reach.

    NumPy's functions of it are launches, as they are CuPy's, and only of what CuPy 14.2 has and what it takes: no array
    of the host beside one of the device.
    """

    __hash__ = None  # type: ignore[assignment]

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        """Elementwise, as CuPy does it: the result is in C order, whatever the operands are."""
        if method != "__call__" or ufunc.signature is not None or ufunc.__name__ in _LACKING:
            return NotImplemented
        assert options.keys() <= {"dtype", "casting"}, f"CuPy's functions do not take {options}"
        _check_mixture(inputs)
        assert HALF not in [x.dtype for x in inputs if isinstance(x, FakeArray)], f"{ufunc.__name__} of bfloat16"
        if ufunc.__name__.startswith("logical_") and any(np.iscomplexobj(_empty(x)) for x in inputs):
            raise TypeError(f"cupy_{ufunc.__name__} has no loop for complex numbers")
        return _evaluated(self.device, ufunc.__name__, partial(ufunc, **options), inputs, out[0] if out else None)

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Any:
        """Functions of which `pdgemm` knows that CuPy has them, and what it makes of them."""
        name = function.__name__
        if name in ("ndim", "shape"):
            return getattr(self, name)
        assert name in _FUNCTIONS, f"is numpy.{name} one of CuPy's functions, and does it do the same?"
        joined = isinstance(arguments[0], (list, tuple))
        arrays = arguments[0] if joined else arguments[: _FUNCTIONS[name][1]]
        others = arguments[1:] if joined else arguments[_FUNCTIONS[name][1] :]
        _check_mixture((*arrays, *others, *options.values()))
        halves = HALF in [x.dtype for x in arrays if isinstance(x, FakeArray)]
        assert not halves or name in ("concatenate", "take", "expand_dims"), f"{name} of bfloat16"
        if name == "expand_dims":
            return self._like(function(self.x, *others, **options))
        if name == "where":
            assert isinstance(arrays[0], FakeArray), "cupy.where calls condition.astype"
        if name == "argmax":
            assert self.dtype == bool, "of several NaN CuPy's argmax finds any one"
        act = lambda *parts: _FUNCTIONS[name][0](*((parts,) if joined else parts), *others, **options)  # noqa: E731
        return _evaluated(self.device, name, act, arrays, None)

    def astype(self, dtype: Any, order: str = "K", copy: bool = True) -> FakeArray:
        """As CuPy's, which also converts complex numbers to real ones."""
        dtype, (row_first, col_first) = np.dtype(dtype), (self.flags.c_contiguous, self.flags.f_contiguous)
        if not copy and dtype == self.dtype and {"C": row_first, "F": col_first}.get(order, True):
            return self
        by_columns = order == "F" or (order == "K" and col_first and not row_first)
        made = self.device.empty(self.shape, dtype, "F" if by_columns else "C")
        act = lambda: _quietly(np.copyto, made.x, self.x, "unsafe")  # noqa: E731
        self.device._launch("astype", (self,), (made,), act)
        return made

    def __matmul__(self, other: Any) -> FakeArray:
        _check_mixture((self, other))
        assert HALF not in (self.dtype, other.dtype)
        return _evaluated(self.device, "matmul", np.matmul, (self, other), None)

    def __bool__(self) -> bool:
        raise AssertionError("CuPy waits here: copy the number to the host where the host needs it")

    real = property(lambda self: self if self.dtype.kind != "c" else self._like(self.x.real))

    @property
    def imag(self) -> FakeArray:
        assert self.dtype.kind == "c"
        return self._like(self.x.imag)

    def __init__(self, x: np.ndarray, device: FakeDevice, managed: bool = False) -> None:
        self.x, self.device, self.managed = x, device, managed

    shape = property(lambda self: self.x.shape)
    strides = property(lambda self: self.x.strides)
    dtype = property(lambda self: self.x.dtype)
    size = property(lambda self: self.x.size)
    ndim = property(lambda self: self.x.ndim)
    nbytes = property(lambda self: self.x.nbytes)
    itemsize = property(lambda self: self.x.itemsize)
    flags = property(lambda self: self.x.flags)

    def _like(self, x: np.ndarray) -> FakeArray:
        assert x.base is not None or x is self.x or not x.size, "the device does not copy by itself"
        made = object.__new__(type(self))
        vars(made).update(vars(self), x=x)
        return made

    @property
    def T(self) -> FakeArray:
        return self._like(self.x.T)

    def __getitem__(self, key: Any) -> FakeArray:
        keys = key if isinstance(key, tuple) else (key,)
        assert all(k in (..., None) or isinstance(k, (slice, int, np.integer)) for k in keys), "no indexing by arrays"
        found = self.x[key]
        assert isinstance(found, np.ndarray), "no reading of elements"
        return self._like(found)

    def __setitem__(self, key: Any, value: complex) -> None:
        part = self[key]
        self.device._launch("fill", (), (part,), lambda: part.x.fill(value))

    def reshape(self, *shape: Any, order: Any = "C") -> FakeArray:
        made = self.x.reshape(*shape, order=order)
        assert np.shares_memory(made, self.x) or not made.size, "reshape would copy"
        return self._like(made)

    def ravel(self, order: Any = "C") -> FakeArray:
        made = self.x.ravel(order)
        assert np.shares_memory(made, self.x) or not made.size, "ravel would copy"
        return self._like(made)

    def swapaxes(self, *axes: int) -> FakeArray:
        return self._like(self.x.swapaxes(*axes))

    def sort(self) -> None:
        assert self.ndim == 1 and self.flags.c_contiguous, "CuPy sorts contiguous arrays in place"
        assert self.dtype != HALF, "sort of bfloat16"
        self.device._launch("sort", (self,), (self,), lambda: self.x.sort())

    def view(self, dtype: Any) -> FakeArray:
        return self._like(self.x.view(dtype))

    def __len__(self) -> int:
        return len(self.x)

    def __array__(self, *args: Any, **options: Any) -> np.ndarray:
        raise TypeError("an array of the device is not converted to NumPy's without being asked")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        seen: Any = self.x.__array_interface__
        return {"version": 3, "shape": self.shape, "typestr": self.dtype.str, "strides": self.strides} | {
            "data": seen["data"]
        }

    def get(self) -> np.ndarray:
        return self.device.to_host(self)


_LACKING = {"spacing", "isnat", "matvec", "vecmat", "vecdot"}  # ufuncs of NumPy's that CuPy 14.2 has not


def _in_any_order(x: np.ndarray, axis: int | None = None, dtype: Any = None) -> np.ndarray:
    """The sum from the last element to the first, one after the other: an order that NumPy would not choose."""
    x = x if dtype is None else x.astype(dtype)
    last_first = np.moveaxis(np.atleast_2d(x), -1 if x.ndim < 2 or axis is None else axis, 0)[::-1]
    total = np.zeros(last_first.shape[1:], x.dtype)
    for part in last_first:
        total = total + part
    return total.sum() if x.ndim < 2 or axis is None else total


# by name: what it does, and how many of its arguments may be arrays of the device
_FUNCTIONS: dict[str, tuple[Callable[..., Any], int]] = {
    "sum": (_in_any_order, 1),
    "where": (np.where, 3),
    "take": (np.take, 2),
    **{name: (getattr(np, name), 1) for name in ("prod", "min", "max", "any", "all", "argmax", "concatenate")},
    **{name: (getattr(np, name), 1) for name in ("full_like", "round", "nan_to_num", "expand_dims", "sort", "cumsum")},
    "searchsorted": (np.searchsorted, 2),
}


def _check_mixture(operands: Sequence[Any]) -> None:
    if any(isinstance(x, np.ndarray) for x in operands):
        raise TypeError("CuPy's functions take its arrays and numbers, and no arrays of the host")


def _empty(x: Any) -> Any:
    """An array of zeros of the same shape and type, in place of one whose elements are not there yet."""
    return np.broadcast_to(np.zeros((), x.dtype), x.shape) if isinstance(x, FakeArray) else x


def _evaluated(device: Any, name: str, act: Callable[..., Any], inputs: Sequence[Any], out: Any) -> FakeArray:
    """Launch a function of arrays of the device and numbers; its result depends in shape and type on theirs alone."""
    with np.errstate(all="ignore"):
        like = np.asarray(act(*map(_empty, inputs)))
    made = device.empty(like.shape, like.dtype) if out is None else out
    arrays = [x.x if isinstance(x, FakeArray) else x for x in inputs]
    reads = [x for x in inputs if isinstance(x, FakeArray)]
    device._launch(name, reads, (made,), lambda: _quietly(lambda: np.copyto(made.x, act(*arrays))))
    return made


class Access(NamedTuple):
    """Of elements, by the host, a stream or a message, at a tick of its clock."""

    x: np.ndarray
    writes: bool
    who: str
    tick: int
    what: str
    request: MPI.Request | None = None


class Shown(NamedTuple):
    """An access to the memory of the node, as another rank sees it: the part, the bytes of it, and the clock then."""

    part: int
    start: int
    stop: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    access: tuple[bool, str, int, str]  # writes, who, tick, told
    clock: Clock

    def races_with(self, other: Shown, memory: FakeMemory) -> bool:
        """Two of a pair of `_overlapping`."""
        (_, who, tick, _), (_, them, then, _) = self.access, other.access
        if self.clock.get(them, 0) >= then or other.clock.get(who, 0) >= tick:
            return False
        return np.shares_memory(memory.shown(self), memory.shown(other))


def _overlapping(some: Sequence[Shown], others: Sequence[Shown]) -> Iterator[tuple[Shown, Shown]]:
    """Pairs of which one or both write, and whose ranges of bytes overlap; most of thousands of pairs do not."""
    if some and others:
        part, start, stop, writes = _columns(some)[..., None]
        their_part, their_start, their_stop, they_write = _columns(others)
        pairs = (part == their_part) & (start < their_stop) & (their_start < stop) & (writes | they_write > 0)
        yield from ((some[i], others[j]) for i, j in np.argwhere(pairs))


def _columns(shown: Sequence[Shown]) -> np.ndarray:
    return np.array([(x.part, x.start, x.stop, x.access[0]) for x in shown]).T


class FakeEvent:
    def __init__(self, stream: FakeStream, position: int, clock: Clock) -> None:
        self.stream, self.position, self.clock = stream, position, clock
        self._asked = False

    def happened(self) -> bool:
        """Not the first time: who asks has to ask again."""
        asked, self._asked = self._asked, True
        if asked:
            self.synchronize()
        return asked

    def synchronize(self) -> None:
        self.stream.run(self.position)
        self.stream.device.host_sees(self.clock)


class FakeStream:
    """Work in order, done when it is waited for."""

    def __init__(self, device: FakeDevice, name: str) -> None:
        self.device, self.name, self.who = device, name, f"{name} on rank {MPI.COMM_WORLD.rank}"
        self.clock: Clock = {}
        self.begun = self.finished = 0
        self._waiting: deque[Callable[[], object]] = deque()
        self._before: list[FakeStream] = []

    def launch(self, what: str, reads: Sequence[np.ndarray], writes: Sequence[np.ndarray], act: Any) -> None:
        self.device.join(self.clock, self.device.clock)  # nothing is done before it is begun
        self.begun += 1
        self.clock[self.who] = self.begun
        for x, writing in (*((x, False) for x in reads), *((x, True) for x in writes)):
            self.device.access(Access(x, writing, self.who, self.begun, what), self.clock)
        self._waiting.append(act)
        if self.name in self.device.eager:
            self.run(self.begun)

    def run(self, position: int) -> None:
        while self.finished < position:
            act = self._waiting.popleft()
            self.finished += 1
            act()

    def record(self) -> FakeEvent:
        self.device.events += 1
        return FakeEvent(self, self.begun, dict(self.clock))

    def wait_event(self, event: FakeEvent) -> None:
        self.launch("wait", (), (), lambda: event.stream.run(event.position))
        self.device.join(self.clock, event.clock)

    def synchronize(self) -> None:
        self.record().synchronize()

    def __enter__(self) -> FakeStream:
        self._before.append(self.device.current)
        self.device.current = self
        return self

    def __exit__(self, *error: object) -> None:
        self.device.current = self._before.pop()


class FakeDevice:
    """One device of this process.   eager : the streams that work at once."""

    name = "fake"

    def __init__(self, eager: Sequence[str] = (), reach: Reach = Reach("shared", staged=False)) -> None:  # noqa: B008
        self._reach = reach
        self.eager = tuple(eager)
        self.clock: Clock = {}
        self.races: list[str] = []
        self.launches: list[str] = []
        self.copied: list[int] = []  # bytes of each copy to the host
        self.events = 0
        self._live: list[Access] = []
        self._shown: list[tuple[FakeMemory, Shown]] = []  # accesses since the ranks of that node have met
        self._many = 64  # accesses after which those that are over are dropped
        self.messages = 0
        self.callers, self.compute = FakeStream(self, "caller's"), FakeStream(self, "compute")
        self.transfer, self.upload = FakeStream(self, "transfer"), FakeStream(self, "upload")
        self.current = self.callers
        self._memory: WeakKeyDictionary[NodeMemory, FakeMemory] = WeakKeyDictionary()
        self.held = 0

    # ---------------------------------------------------------------- races
    @staticmethod
    def join(clock: Clock, other: Clock) -> None:
        for who, tick in other.items():
            clock[who] = max(clock.get(who, 0), tick)

    def host_sees(self, clock: Clock) -> None:
        self.join(self.clock, clock)
        self._live = [x for x in self._live if self._open(x)]

    def _open(self, x: Access) -> bool:
        if x.request is not None:
            return x.request != MPI.REQUEST_NULL
        return self.clock.get(x.who, 0) < x.tick

    def access(self, new: Access, clock: Clock) -> None:
        if len(self._live) > self._many:
            self._live = [x for x in self._live if self._open(x)]
            self._many = 64 + 2 * len(self._live)
        if not new.x.size:
            return
        if new.request is None:
            self._shown += [(at, x) for at in self._memory.values() if (x := at.show(new, clock)) is not None]
        for old in self._live:
            if old.who == new.who or not (old.writes or new.writes) or clock.get(old.who, 0) >= old.tick:
                continue
            if not self._open(old):
                continue
            if np.may_share_memory(old.x, new.x) and np.shares_memory(old.x, new.x):
                self.races.append(f"{_told(new)} while {_told(old)} may not be done")
        self._live.append(new)

    def met(self, memory: FakeMemory) -> None:
        for x in [x for x in self._live if x.request is None and self._open(x)]:
            if memory.show(x, {}):
                self.races.append(f"{_told(x)} may not be done when the ranks of the node meet")
        mine = [x for at, x in self._shown if at is memory]
        self._shown = [x for x in self._shown if x[0] is not memory]
        for rank, (clock, theirs) in enumerate(memory.node.allgather((self.clock, mine))):
            for x, y in _overlapping(mine, theirs) if rank != memory.node.rank else ():
                if x.races_with(y, memory):
                    self.races.append(f"{x.access[3]} while {y.access[3]} may not be done")
            self.join(self.clock, clock)

    def message(self, x: Any, writes: bool, what: str, request: MPI.Request | None) -> None:
        """MPI is given x: the host has to know that it is ready, until the request is done."""
        memory = x.x if isinstance(x, FakeArray) else x
        if getattr(x, "managed", False):
            self.races.append(f"{what}: MPI is given the address of managed memory")
        if isinstance(x, FakeArray) and self._reach.staged:
            self.races.append(f"{what}: MPI takes no memory of this device")
        self.messages += 1
        who = f"message {self.messages}"
        self.access(Access(memory, writes, who, 1, what, request or MPI.Request(MPI.REQUEST_NULL)), self.clock)

    # ---------------------------------------------------------------- what pdgemm asks of a device
    def empty(self, shape: Sequence[int], dtype: Any, order: str = "C") -> FakeArray:
        return FakeArray(_spoilt(np.empty(shape, dtype, order)), self)  # type: ignore[call-overload]

    def pinned(self, words: int, dtype: Any) -> Pinned:
        host = _spoilt(np.empty(words, dtype))
        return Pinned(host, FakeArray(host, self))

    def _launch(self, what: str, reads: Sequence[Any], writes: Sequence[Any], act: Callable[[], object]) -> None:
        for x in (*reads, *writes):
            assert isinstance(x, FakeArray), f"{what}: an array of the host where one of the device is meant"
        self.launches.append(what)
        self.current.launch(what, [x.x for x in reads], [x.x for x in writes], act)

    def multiply(
        self,
        alpha: Any,
        A: FakeArray,
        B: FakeArray,
        C: FakeArray,
        conjugate_a: bool,
        conjugate_b: bool,
        tf32: bool,
    ) -> Callable[[Any], None]:
        assert A.shape[1] == B.shape[0] and C.shape == (A.shape[0], B.shape[1])

        for x, conjugate in ((A, conjugate_a), (B, conjugate_b), (C, False)):
            leading(x.x, conjugate and False)
        wide = np.result_type(C.dtype, np.float32)

        def act(beta: Any) -> None:
            a, b = (y.conj() if c else y for y, c in ((A.x.astype(wide), conjugate_a), (B.x.astype(wide), conjugate_b)))
            product = alpha * (a @ b)
            C.x[...] = product if beta == 0 else product + beta * C.x

        return lambda beta: self._launch(
            "product", (A, B) if beta == 0 else (A, B, C), (C,), lambda: _quietly(act, beta)
        )

    def multiply_stack(self, alpha: Any, A: FakeArray, B: FakeArray, beta: Any, C: FakeArray) -> None:
        assert A.dtype == B.dtype == C.dtype
        assert len(A) == len(B) == len(C) > 0

        def act() -> None:
            product = alpha * (A.x @ B.x)
            C.x[...] = product if beta == 0 else product + beta * C.x

        self._launch("products", (A, B) if beta == 0 else (A, B, C), (C,), lambda: _quietly(act))

    def multiply_each(self, alpha: Any, products: Sequence[tuple[FakeArray, FakeArray, FakeArray]], beta: Any) -> None:
        assert products
        for A, B, C in products:
            assert A.dtype == B.dtype == C.dtype == products[0][2].dtype
            assert A.size and B.size and A.shape[1] == B.shape[0] and C.shape == (A.shape[0], B.shape[1])

        def act() -> None:
            for A, B, C in products:
                product = alpha * (A.x @ B.x)
                C.x[...] = product if beta == 0 else product + beta * C.x

        reads = [x for A, B, C in products for x in ((A, B) if beta == 0 else (A, B, C))]
        self._launch("unequal products", reads, [C for *_, C in products], lambda: _quietly(act))

    def solve_triangular(self, how: tuple[str, str, str, str], alpha: Any, A: FakeArray, X: FakeArray) -> None:
        leading(A.x), leading(X.x)
        act = lambda: _quietly(solve_triangular, how, alpha, A.x, X.x)  # noqa: E731
        self._launch("triangle", (A, X), (X,), act)

    def load_factorisations(self) -> None:
        pass

    def potrf(self, A: FakeArray, lower: bool) -> tuple[int, np.ndarray]:
        info, diagonal = self.empty((1,), np.intc), self.empty((len(A),), A.dtype)

        def act() -> None:
            info.x[0] = lapack_potrf(A.x, lower)
            diagonal.x[...] = A.x.diagonal()

        assert _column_major(A) and A.shape[0] == A.shape[1] > 0
        self._launch("potrf", (A,), (A, info, diagonal), act)
        return int(self.to_host(info)[0]), self.to_host(diagonal)

    def getrf(self, A: FakeArray, pivots: np.ndarray) -> int:
        info, rows = self.empty((1,), np.intc), self.empty((min(A.shape),), np.intc)

        def act() -> None:
            info.x[0], rows.x[...] = lapack_getrf(A.x)

        assert _column_major(A) and A.size and pivots.dtype == np.intc and pivots.shape == rows.shape
        self._launch("getrf", (A,), (A, info, rows), act)
        pivots[...] = self.to_host(rows)
        return int(self.to_host(info)[0])

    def geqrf(self, A: FakeArray) -> FakeArray:
        tau = self.empty((min(A.shape),), A.dtype)

        def act() -> None:
            tau.x[...] = lapack_geqrf(A.x)

        assert _column_major(A) and A.size
        self._launch("geqrf", (A,), (A, tau), act)
        return tau

    def keep_triangle(self, A: FakeArray, lower: bool, unit: bool) -> None:
        def act() -> None:
            A.x[...] = np.tril(A.x) if lower else np.triu(A.x)
            if unit:
                np.fill_diagonal(A.x, 1)

        assert A.shape[0] == A.shape[1] > 0
        self._launch("keep a triangle", (A,), (A,), act)

    def combine(self, how: Combine, target: FakeArray, source: FakeArray) -> None:
        reads = [source] * (how.alpha != 0) + [target] * (how.beta != 0)
        self._launch("combine", reads, (target,), lambda: _quietly(_combine, how, target.x, source.x))

    def combine_blocks(self, how: Combine, target: FakeArray, source: FakeArray, rows: Any, cols: Any) -> None:
        def act() -> None:
            copy_blocks(source.x, target.x, rows, cols, lambda y, x: _combine(how, y, x))

        there = _parts(source, rows.source, cols.source, rows.lengths, cols.lengths)
        here = _parts(target, rows.target, cols.target, rows.lengths, cols.lengths)
        self._launch("blocks", there + here * (how.beta != 0), here, lambda: _quietly(act))

    def combine_within(self, how: Combine, target: FakeArray, source: FakeArray, within: Any) -> None:
        def act() -> None:
            inside, value = within.mask(target.shape[0 if within.flipped else 1]), target.x.copy()
            _combine(how, value, source.x)
            np.copyto(target.x, value, where=inside)

        self._launch("within", [source] * (how.alpha != 0) + [target], (target,), lambda: _quietly(act))

    def finish(self, how: Finish, C: FakeArray, sums: FakeArray) -> None:
        arrays = [x for x in how[2:] if isinstance(x, FakeArray)]
        operands = [x.x if isinstance(x, FakeArray) else x for x in how[2:]]
        written = [how.aux] if how.aux is not None and not how.gradient else []
        act = lambda: _quietly(Finish(how.activation, how.gradient, *operands), C.x, sums.x)  # noqa: E731
        self._launch("finish", [sums, *(x for x in arrays if x is not (written or [None])[0])], (C, *written), act)

    def generate(self, target: FakeArray, rows: np.ndarray, cols: np.ndarray, f: Any) -> bool:
        if not isinstance(f, KnownFunction):
            return False
        self._launch("generate", (), (target,), lambda: fill(target.x, rows, cols, f))
        return True

    def pick(self, x: FakeArray, rows: np.ndarray, cols: np.ndarray) -> FakeArray:
        made = self.empty((len(rows),), x.dtype)
        self._launch("pick", (x,), (made,), lambda: np.copyto(made.x, x.x[rows, cols]))
        return made

    def copy(self, target: FakeArray, source: FakeArray) -> None:
        assert source.flags.forc and target.flags.forc and source.shape == target.shape
        self._launch("copy", (source,), (target,), lambda: np.copyto(target.x, source.x))

    def broadcast(self, comm: MPI.Comm, x: FakeArray, root: int) -> None:
        """In the order of the stream, as NCCL does: the ranks meet when they get there."""
        memory = x.x.ravel(order="K")
        reads, writes = ((x,), ()) if comm.rank == root else ((), (x,))
        self._launch("broadcast", reads, writes, lambda: comm.Bcast([memory, MPI.BYTE], root=root))

    def use(self) -> None:
        pass

    def exchange(
        self, comm: MPI.Comm, sends: Sequence[tuple[FakeArray, int]], receives: Sequence[tuple[FakeArray, int]]
    ) -> None:
        """Likewise; messages between two ranks are matched in their order, and large ones do not leave before that."""
        going, coming = ([(_bytes(x), peer) for x, peer in some] for some in (sends, receives))

        def act() -> None:
            requests = [MPI.Comm.Irecv(comm, x, peer, _BY_NCCL) for x, peer in coming]
            requests += [MPI.Comm.Issend(comm, x, peer, _BY_NCCL) for x, peer in going]
            MPI.Request.Waitall(requests)

        self._launch("exchange", [x for x, _ in sends], [x for x, _ in receives], act)

    def reduce(self, comm: MPI.Comm, parts: Sequence[tuple[FakeArray, FakeArray, int]]) -> None:
        def act() -> None:
            for part, total, root in parts:
                there = total.x if comm.rank == root else None
                in_place = there is not None and there.ctypes.data == part.x.ctypes.data
                MPI.Comm.Reduce(comm, MPI.IN_PLACE if in_place else part.x, there, MPI.SUM, root)

        mine = [total for _, total, root in parts if root == comm.rank]
        self._launch("reduce", [part for part, *_ in parts], mine, act)

    def current_stream(self) -> FakeStream:
        return self.current

    def product_stream(self) -> FakeStream:
        return self.compute

    def transfer_stream(self) -> FakeStream:
        return self.transfer

    def upload_stream(self) -> FakeStream:
        return self.upload

    def happened(self, event: FakeEvent) -> bool:
        return event.happened()

    def wait(self, work: FakeEvent | FakeStream) -> None:
        work.synchronize()

    def release_memory(self) -> None:
        pass

    def abandon_nccl(self, reason: str) -> None:
        pass

    def elapsed(self, begin: FakeEvent, end: FakeEvent) -> float:
        assert end.stream.finished >= end.position >= begin.position
        return 1e-6 * (end.position - begin.position)

    def to_host(self, x: FakeArray) -> np.ndarray:
        self.current.synchronize()
        self.copied.append(x.nbytes)
        self.access(Access(x.x, False, "host", 0, "copy to the host"), self.clock)
        return x.x.copy("K")

    def to_device(self, x: np.ndarray, order: str = "C") -> FakeArray:
        made = self.empty(x.shape, x.dtype, order)
        self._launch("upload", (), (made,), lambda: np.copyto(made.x, x))
        self.current.synchronize()
        return made

    def check(self, x: FakeArray) -> None:
        if x.device is not self:
            raise DeviceError("the local array is on another device")

    def addressable(self, x: FakeArray) -> bool:
        return not x.managed

    def takes(self, x: Any) -> FakeArray | None:
        return None

    def discover_peers(self, grid: ProcessGrid) -> None:
        if grid.memory not in self._memory:
            self._memory[grid.memory] = FakeMemory(grid.memory, self)

    def reach(self, grid: ProcessGrid) -> Reach:
        return self._reach._replace(reads=self._reach.reads if grid.shares_memory else "")

    def memory(self, grid: ProcessGrid) -> FakeMemory:
        return self._memory[grid.memory]  # of ranks that have met


def solve_triangular(how: tuple[str, str, str, str], alpha: Any, A: np.ndarray, X: np.ndarray) -> None:
    """X := alpha op(A)^-1 X, or X op(A)^-1, as BLAS's trsm."""
    side, uplo, trans, diagonal = how
    triangle = np.tril(A) if uplo == "L" else np.triu(A)
    if diagonal == "U":
        np.fill_diagonal(triangle, 1)
    triangle = {"N": triangle, "T": triangle.T, "C": triangle.conj().T}[trans]
    X[...] = alpha * (np.linalg.solve(triangle, X) if side == "L" else np.linalg.solve(triangle.T, X.T).T)


def lapack_potrf(A: np.ndarray, lower: bool) -> int:
    """One triangle of A becomes its Cholesky factor, the other stays; return info."""
    factor, info = get_lapack_funcs("potrf", dtype=A.dtype)(A, lower=lower, clean=False)
    A[...] = factor
    return int(info)


def lapack_getrf(A: np.ndarray) -> tuple[int, np.ndarray]:
    """A becomes L and U; return info, and the pivots, counted from 1."""
    factors, pivots, info = get_lapack_funcs("getrf", dtype=A.dtype)(A)
    A[...] = factors
    return int(info), pivots + 1


def lapack_geqrf(A: np.ndarray) -> np.ndarray:
    """A becomes R and reflectors; return tau."""
    A[...], tau, _, info = get_lapack_funcs("geqrf", dtype=A.dtype)(A)
    assert info == 0
    return tau


class FakeMemory:
    """Device memory that the ranks of a node reach: the host's, seen as the device's."""

    def __init__(self, memory: NodeMemory, device: FakeDevice) -> None:
        self._memory, self._device = memory, device
        self.node, self.alone, self.window, self.size = memory.node, memory.alone, memory.window, memory.size
        self.fence, self.failed = memory.fence, False
        parts = [np.frombuffer(part, np.uint8) for part in (self.window.parts if self.window else [])]
        self._bounds = [byte_bounds(part) for part in parts]

    def show(self, x: Access, clock: Clock) -> Shown | None:
        """What other ranks are told of an access to the memory of the node; None: it is an access to other memory."""
        start, stop = byte_bounds(x.x)
        for part, (first, last) in enumerate(self._bounds):
            if first <= start and stop <= last:
                told = x.writes, x.who, x.tick, _told(x)
                where = start - first, stop - first, x.x.shape, x.x.strides, x.x.itemsize
                return Shown(part, *where, told, dict(clock))
        return None

    def shown(self, x: Shown) -> np.ndarray:
        assert self.window is not None
        return np.ndarray(x.shape, f"V{x.itemsize}", self.window.parts[x.part], x.start, x.strides)

    def gather(self, words: np.ndarray) -> np.ndarray:
        self._device.met(self)
        return self._memory.gather(words)

    def map_all(self, places: object) -> None:
        self._memory.map_all(places)

    def sync(self) -> None:
        """The ranks meet: what they read of each other must be there, and must have been read."""
        self._device.met(self)
        self._memory.sync()

    def empty(self, shape: Sequence[int], dtype: Any, order: str = "C") -> FakeArray:
        return FakeArray(_spoilt(self._memory.empty(shape, dtype, order)), self._device)

    def where(self, x: FakeArray) -> list[int]:
        return self._memory.where(x.x)

    def lies_here(self, x: FakeArray) -> bool:
        return self._memory.lies_here(x.x)

    def array(self, rank: int, shape: Sequence[int], dtype: np.dtype, where: list[int], strides: Any) -> FakeArray:
        assert rank != self.node.rank, "no rank maps its own memory"
        return FakeArray(self._memory.array(rank, shape, dtype, where, strides), self._device)


class FakeSignal:
    """The request of a signal: the host then sees what its sender saw."""

    def __init__(self, device: FakeDevice, request: MPI.Request) -> None:
        self._device, self._request = device, request

    def Test(self) -> bool:
        arrived, clock = self._request.test()
        self._device.host_sees(clock or {})
        return bool(arrived)

    def Wait(self) -> None:
        self._device.host_sees(self._request.wait() or {})


def _is_signal(buf: Any) -> bool:
    return isinstance(buf, np.ndarray) and buf.dtype == np.uint8 and not buf.size


class WatchedComm(MPI.Intracomm):
    """A communicator that tells the device what MPI reads and writes, and until when."""

    device: Any = None  # of a duplicate, until it is watched itself

    def __new__(cls, comm: MPI.Comm | None = None, device: FakeDevice | None = None) -> WatchedComm:
        made = super().__new__(cls, comm)
        made.device = getattr(comm, "device", None) if device is None else device
        return made

    def Isend(self, buf: Any, dest: int, tag: int = 0) -> MPI.Request:
        if _is_signal(buf):
            return super().isend(self.device.clock, dest, tag)
        request = super().Isend(buf, dest, tag)
        self.device.message(buf, False, "send", request)
        return request

    def Irecv(self, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG) -> Any:
        if _is_signal(buf):
            return FakeSignal(self.device, super().irecv(source=source, tag=tag))
        request = super().Irecv(buf, source, tag)
        self.device.message(buf, True, "receive", request)
        return request

    def Ibcast(self, buf: Any, root: int = 0) -> MPI.Request:
        request = super().Ibcast(buf, root)
        self.device.message(buf, self.rank != root, "broadcast", request)
        return request

    def Split(self, color: int = 0, key: int = 0) -> WatchedComm:
        return WatchedComm(super().Split(color, key), self.device)

    def _refuse(self, *args: Any, **options: Any) -> Any:
        raise AssertionError("no blocking or reducing call of MPI with arrays of the device")

    Reduce = Ireduce = Reduce_scatter = _refuse


@contextmanager
def fake_device(schedule: str = "late", kind: type[FakeDevice] | None = None, **options: Any) -> Iterator[Any]:
    """A device for arrays made on "fake", whose communicators are watched."""
    device = (kind or FakeDevice)(SCHEDULES[schedule], **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(devices._devices, FakeArray, device)
        connect, watching = ProcessGrid._connect, list[tuple[Any, str, Any]]()

        def watched(grid: ProcessGrid, *args: Any) -> None:
            connect(grid, *args)
            for name in ("row", "col", "depth"):
                comm = getattr(grid, name)
                if comm != MPI.COMM_NULL:
                    watching.append((grid, name, comm))
                    setattr(grid, name, WatchedComm(comm, device))
            if getattr(grid._shared.comm, "device", None) is not device:
                watching.extend((grid._shared, name, getattr(grid._shared, name)) for name in ("comm", "node"))
                grid._shared.comm = grid.comm = WatchedComm(grid._shared.comm, device)
                grid._shared.node = WatchedComm(grid._shared.node, device)

        work_grid, looked_at = ProcessGrid.work_grid, list[Any]()

        def fresh(grid: ProcessGrid, *args: Any) -> ProcessGrid:
            """Those that are kept from before are not watched."""
            if grid._shared not in looked_at:
                looked_at.append(grid._shared)
                for kept in grid._shared.work_grids.values():
                    kept._disconnect()
                grid._shared.work_grids.clear()
            return work_grid(grid, *args)

        patch.setattr(ProcessGrid, "_connect", watched)
        patch.setattr(ProcessGrid, "work_grid", fresh)
        try:
            yield device
        finally:
            for owner, name, comm in watching:  # which a grid that was left behind, or is kept, would go on with
                if getattr(owner, name) != MPI.COMM_NULL:
                    setattr(owner, name, comm)


_BY_NCCL = 77  # tag of messages


def _bytes(x: FakeArray) -> Any:
    assert x.flags.forc
    return [x.x.ravel(order="K"), x.nbytes, MPI.BYTE]


def _column_major(x: FakeArray) -> bool:
    return leading(x.x)[0] == b"N"


def _combine(how: Combine, Y: np.ndarray, X: np.ndarray) -> None:
    wide = np.dtype(np.int64) if Y.dtype.kind == "i" else arithmetic(X.dtype, Y.dtype)
    value = np.zeros(Y.shape, wide)
    if how.alpha != 0:
        value += _times(how.alpha, (X.conj() if how.conjugated else X).astype(wide))
    if how.beta != 0:
        value += _times(how.beta, Y.astype(wide))
    Y[...] = value.astype(Y.dtype)


def _times(number: Any, x: np.ndarray) -> np.ndarray:
    """No factor 1 makes a NaN of a complex infinity."""
    return x if number == 1 else number * x


def _parts(x: FakeArray, rows: Any, cols: Any, high: Any, wide: Any) -> list[FakeArray]:
    """The runs of rows times the runs of columns."""
    return [x[r : r + h, c : c + w] for r, h in zip(rows, high) for c, w in zip(cols, wide)]


def _spoilt(x: np.ndarray) -> np.ndarray:
    """Memory that nobody has written to."""
    x.ravel(order="K").view(np.uint8).fill(0xFF)
    return x


def _quietly(act: Callable[..., object], *args: Any) -> None:
    with np.errstate(all="ignore"):
        act(*args)


def _told(x: Access) -> str:
    return f"{x.what} of {x.who} {'writes' if x.writes else 'reads'} {x.x.size} elements"
