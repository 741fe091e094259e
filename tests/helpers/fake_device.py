"""A simulated device: arrays that the host cannot read, and four streams whose work is delayed.

The work of a stream is carried out only when the host or another stream waits for it; streams named in `eager` carry
out their work immediately.  A missing synchronisation therefore gives wrong numbers in one of the schedules "late",
"transfer first" and "compute first", the same in every run.  It is also reported: fake_streams.py finds races between
the host, the streams and messages, and fake_memory.py finds races of ranks in each other's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from fake_arrays import FakeArray, quietly, spoilt
from fake_cusolver import lapack_geqrf, lapack_getrf, lapack_potrf, solve_triangular
from fake_memory import FakeMemory, WatchedComm
from fake_streams import Access, FakeEvent, FakeStream, Races
from mpi4py import MPI

from pdgemm.errors import DeviceError
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
_BY_NCCL = 77  # tag of its messages


class FakeDevice(Races):
    """The simulated device of this process, with the interface that `pdgemm` uses."""

    name = "fake"

    def empty(self, shape: Sequence[int], dtype: Any, order: str = "C") -> FakeArray:
        return FakeArray(spoilt(np.empty(shape, dtype, order)), self)  # type: ignore[call-overload]

    def pinned(self, words: int, dtype: Any) -> Pinned:
        host = spoilt(np.empty(words, dtype))
        return Pinned(host, FakeArray(host, self))

    def _launch(self, what: str, reads: Sequence[Any], writes: Sequence[Any], act: Callable[[], object]) -> None:
        for x in (*reads, *writes):
            assert isinstance(x, FakeArray), f"{what}: an array of the host where one of the device is meant"
        self.launches.append(what)
        self.current.launch(what, [x.x for x in reads], [x.x for x in writes], act)

    def multiply(
        self, alpha: Any, A: FakeArray, B: FakeArray, C: FakeArray, conjugate_a: bool, conjugate_b: bool, tf32: bool
    ) -> Callable[[Any], None]:
        assert A.shape[1] == B.shape[0] and C.shape == (A.shape[0], B.shape[1])
        assert all(leading(x.x) for x in (A, B, C))
        wide = np.result_type(C.dtype, np.float32)

        def act(beta: Any) -> None:
            a, b = (y.conj() if c else y for y, c in ((A.x.astype(wide), conjugate_a), (B.x.astype(wide), conjugate_b)))
            product = alpha * (a @ b)
            C.x[...] = product if beta == 0 else product + beta * C.x

        return lambda beta: self._launch("product", (A, B, C)[: 2 + (beta != 0)], (C,), partial(quietly, act, beta))

    def multiply_stack(self, alpha: Any, A: FakeArray, B: FakeArray, beta: Any, C: FakeArray) -> None:
        assert len(A) == len(B) == len(C) > 0
        self._multiply("products", alpha, [(A, B, C)], beta)

    def multiply_each(self, alpha: Any, products: Sequence[tuple[FakeArray, FakeArray, FakeArray]], beta: Any) -> None:
        for A, B, C in products:
            assert A.size and B.size and A.shape[1] == B.shape[0] and C.shape == (A.shape[0], B.shape[1])
        self._multiply("unequal products", alpha, products, beta)

    def _multiply(self, what: str, alpha: Any, products: Sequence[tuple[FakeArray, ...]], beta: Any) -> None:
        assert len({x.dtype for arrays in products for x in arrays}) == 1

        def act() -> None:
            for A, B, C in products:
                product = alpha * (A.x @ B.x)
                C.x[...] = product if beta == 0 else product + beta * C.x

        reads = [x for arrays in products for x in arrays[: 2 + (beta != 0)]]
        self._launch(what, reads, [C for *_, C in products], partial(quietly, act))

    def solve_triangular(self, how: tuple[str, str, str, str], alpha: Any, A: FakeArray, X: FakeArray) -> None:
        leading(A.x), leading(X.x)
        act = lambda: quietly(solve_triangular, how, alpha, A.x, X.x)  # noqa: E731
        self._launch("triangle", (A, X), (X,), act)

    def load_factorisations(self) -> FakeDevice:
        return self

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
        assert target.shape == source.shape
        self._launch("combine", reads, (target,), lambda: quietly(_combine, how, target.x, source.x))

    def combine_blocks(self, how: Combine, target: FakeArray, source: FakeArray, rows: Any, cols: Any) -> None:
        def act() -> None:
            copy_blocks(source.x, target.x, rows, cols, lambda y, x: _combine(how, y, x))

        there = _parts(source, rows.source, cols.source, rows.lengths, cols.lengths)
        here = _parts(target, rows.target, cols.target, rows.lengths, cols.lengths)
        self._launch("blocks", there + here * (how.beta != 0), here, lambda: quietly(act))

    def combine_within(self, how: Combine, target: FakeArray, source: FakeArray, within: Any) -> None:
        def act() -> None:
            inside, value = within.mask(target.shape[0 if within.flipped else 1]), target.x.copy()
            _combine(how, value, source.x)
            np.copyto(target.x, value, where=inside)

        self._launch("within", [source] * (how.alpha != 0) + [target], (target,), lambda: quietly(act))

    def finish(self, how: Finish, C: FakeArray, sums: FakeArray) -> None:
        arrays = [x for x in how[2:] if isinstance(x, FakeArray)]
        operands = [x.x if isinstance(x, FakeArray) else x for x in how[2:]]
        written = [how.aux] if how.aux is not None and not how.gradient else []
        act = lambda: quietly(Finish(how.activation, how.gradient, *operands), C.x, sums.x)  # noqa: E731
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
        """Launch a broadcast: as in NCCL, an operation of the stream, which waits for streams of other ranks."""
        memory = x.x.ravel(order="K")
        reads, writes = ((x,), ()) if comm.rank == root else ((), (x,))
        self._launch("broadcast", reads, writes, lambda: comm.Bcast([memory, MPI.BYTE], root=root))

    def exchange(
        self, comm: MPI.Comm, sends: Sequence[tuple[FakeArray, int]], receives: Sequence[tuple[FakeArray, int]]
    ) -> None:
        """Launch messages, as in NCCL: matched in order between two ranks, and a send waits for its receive."""
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

    def happened(self, event: FakeEvent) -> bool:
        return event.happened()

    def wait(self, work: FakeEvent | FakeStream) -> None:
        work.synchronize()

    def _nothing(self, *args: Any) -> None:
        pass

    use = release_memory = abandon_nccl = takes = _nothing

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

    def discover_peers(self, grid: ProcessGrid) -> None:
        if grid.memory not in self._memory:
            self._memory[grid.memory] = FakeMemory(grid.memory, self)

    def reach(self, grid: ProcessGrid) -> Reach:
        return self._reach._replace(reads=self._reach.reads if grid.shares_memory else "")

    def memory(self, grid: ProcessGrid) -> FakeMemory:
        return self._memory[grid.memory]  # after `discover_peers`


@contextmanager
def fake_device(schedule: str = "late", kind: type[FakeDevice] | None = None, **options: Any) -> Iterator[Any]:
    """Simulate the device "fake" in the enclosed block; communicators of grids report their messages to it."""
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
            """Discard work grids cached before: their communicators are not watched.  Then return the work grid."""
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
            for owner, name, comm in watching:  # grids that remain get back their own communicators
                if getattr(owner, name) != MPI.COMM_NULL:
                    setattr(owner, name, comm)


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
    """Return number * x; a factor 1 keeps complex infinities."""
    return x if number == 1 else number * x


def _parts(x: FakeArray, rows: Any, cols: Any, high: Any, wide: Any) -> list[FakeArray]:
    """Return the views of x for each pair of a run of rows and a run of columns."""
    return [x[r : r + h, c : c + w] for r, h in zip(rows, high) for c, w in zip(cols, wide)]
