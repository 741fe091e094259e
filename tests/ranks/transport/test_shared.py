"""Memory that the ranks of a node share: what lies there is read in place, at the right time, and given back."""

from __future__ import annotations

import itertools
import math
import mmap
import os
import subprocess
import sys
import threading
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import jobs
import numpy as np
import pytest
from checked_product import check_summa
from mpi4py import MPI
from problems import BLOCKS, TOLERANCE, gemm_error, grid_shapes
from tiers import every_grid, in_turn, pairs, square_grid, thorough

from pdgemm import DistMatrix, Plan, ProcessGrid, pdgemm, plan
from pdgemm.algorithms.products import layer_sums as run
from pdgemm.algorithms.products import summa
from pdgemm.algorithms.products.accumulator import Accumulator
from pdgemm.errors import ArgumentError, LayoutError, MemoryLimitError, NodeMemoryError
from pdgemm.grids import mpi_variables, node_memory
from pdgemm.grids import shared_heap as place
from pdgemm.grids.distribution import Distribution
from pdgemm.grids.node_memory import LOCK_EX, LOCK_NB, LOCK_SH, LOCK_UN, _turn, flock
from pdgemm.grids.shared_heap import Heap
from pdgemm.planning import planner
from pdgemm.schedules.products import reduction
from pdgemm.support.launcher import outside_job
from pdgemm.transport.movers import panel_views as where
from pdgemm.transport.movers.node_arrays import NodeArrays

pytestmark = square_grid

PAGE = mmap.PAGESIZE


@pytest.mark.mpi(min_size=2)
def test_a_neighbour_sees_the_array_itself(comm: Any, grid: Any) -> None:
    A = DistMatrix.from_function(lambda i, j: 100 * i + j, (23, 31), grid=grid, block=(3, 4), order="F")
    view = A[2:20, 5:30].T
    assert A.shared and view.shared and A.H.shared
    assert not A.copy().shared
    again = DistMatrix.from_local(A.local, A.shape, grid=grid, block=A.block)
    assert again.shared
    near = NodeArrays(grid, A=(A.stored, A.layout_in(grid)), V=(view.stored, view.layout_in(grid)))
    for rank in range(comm.size):
        i, j = grid.coords_of(rank)
        rows, cols = A.distribution.rows.indices(i), A.distribution.cols.indices(j)
        assert np.array_equal(near("A", rank), 100 * rows[:, None] + cols)
        rows, cols = view.distribution.rows.indices(j), view.distribution.cols.indices(i)
        assert np.array_equal(near("V", rank), 100 * (cols + 2) + rows[:, None] + 5)
    near.sync()
    if A.local.size:
        A.local[0, 0] = -1
    grid.memory.sync()
    assert all(near("A", rank)[0, 0] == -1 for rank in range(comm.size) if near("A", rank).size)
    near.sync()


@pytest.mark.mpi(min_size=2)
def test_who_waits_long_for_ranks_without_a_core_sleeps(comm: Any, grid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(node_memory, "sleep", lambda seconds: (naps.append(seconds), sleep(seconds)))
    assert grid.memory.oversubscribed == (grid.node.size > len(set().union(*comm.allgather(os.sched_getaffinity(0)))))
    for oversubscribed in (False, True):
        monkeypatch.setattr(grid.memory, "oversubscribed", oversubscribed)
        comm.Barrier()
        if comm.rank == 0:
            sleep(20 * node_memory._PATIENCE)
        grid.memory.sync()
        if comm.rank or not oversubscribed:  # rank 0 may have to wait for others, too
            assert bool(naps) == oversubscribed


@pytest.mark.mpi(min_size=2)
def test_panels_are_multiplied_where_they_lie(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No copy, no buffer, no message: every panel that BLAS gets is a part of somebody's matrix."""
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    prepared = Accumulator.prepared

    def multiplied(self: Accumulator, A: np.ndarray, B: np.ndarray, *inner: Any) -> Any:
        seen.append((A, B))
        return prepared(self, A, B, *inner)

    monkeypatch.setattr(Accumulator, "prepared", multiplied)
    copies: list[object] = []
    for module in (summa, where):
        monkeypatch.setattr(module, "copy_blocks", lambda *args: copies.append(args))
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            for block in (None, 64) if shape[0] == shape[1] else (None,):
                n = 300 * max(shape)
                A, B, C = (DistMatrix.random((n, n), grid=grid, block=block, seed=s) for s in (1, 2, 3))
                pdgemm(1, A, B, 0, C, algorithm="summa", shape=shape)
                assert C.report.mover == "shared"
                assert C.report.counted.messages_received == C.report.extra_bytes == 0
                assert C.report.counted.words_read == C.local.shape[0] * (n - A.local.shape[1]) + C.local.shape[1] * (
                    n - B.local.shape[0]
                )
                assert len(seen) == sum(shape) - math.gcd(*shape)  # one for each pair of owners, however wide
                window = [np.frombuffer(part, np.uint8) for part in grid.memory.window.parts]
                assert all(any(np.may_share_memory(x, part) for part in window) for pair in seen for x in pair)
                seen.clear()
    assert not copies


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("late", ["reader", "writer"])
def test_nobody_reads_too_early_or_writes_too_soon(comm: Any, late: str) -> None:
    """A rank that comes late still writes before the others read; one that reads late has not been overtaken."""

    def dawdle(*_: int) -> None:
        if late == "reader" and comm.rank == comm.size - 1:
            sleep(0.01)

    n = 16
    with ProcessGrid(comm, (1, comm.size)) as grid:
        A, B, C, D = (DistMatrix.zeros((n, n), grid=grid, block=2) for _ in "ABCD")
        for turn in range(1, 4):
            if late == "writer" and comm.rank == 0:
                sleep(0.03)
            A.local[...] = B.local[...] = turn
            options: dict[str, Any] = {"mover": "shared", "algorithm": "summa", "shape": grid.shape, "check": False}
            pdgemm(1, A, B, 0, C, panel_width=2, progress=dawdle, **options)
            A.local[...] = B.local[...] = np.nan
            assert (C.local == n * turn**2).all()
            A.local[...] = turn
            A.redistribute(D, check=False)
            A.T.redistribute(D, check=False)
            A.local[...] = np.nan
            assert (D.local == turn).all()


@pytest.mark.mpi(min_size=2)
def test_without_room_matrices_are_private_and_products_send_messages(
    comm: Any, grid: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank without room is enough: all take the same way.

    A caller may vouch for arguments, but not for memory that others use, too.
    """
    S, C = (DistMatrix.random((40, 40), grid=grid, seed=s) for s in (1, 3))
    A, B = (DistMatrix.random((40, 40), grid=grid, seed=s).copy() for s in (1, 2))
    assert S.shared and not A.shared
    asked: dict[str, Any] = {"algorithm": "summa", "shape": grid.shape}
    p = plan(A, B, C, **asked)
    tight = plan(*(DistMatrix.zeros((40, 40), grid=grid) for _ in "ABC"), memory_limit=1000, **asked)
    with pytest.raises(MemoryLimitError, match="memory limit 1000 bytes per rank is too small for matrices"):
        tight.execute(A, B, C)
    if comm.rank == 0:
        monkeypatch.setattr(grid.memory._heap, "block", lambda *_: None)
    for check in (True, False):
        pdgemm(1, A, B, 0, C, check=check, **asked)
        assert C.report.mover == "ibcast"
        assert gemm_error(C.allgather(), 1, A.allgather(), B.allgather()) <= TOLERANCE
        before = C.local.copy()
        for carry_out in (p.execute, p.prepare):
            with pytest.raises(NodeMemoryError):
                carry_out(A, B, C, check=check)
        with pytest.raises(NodeMemoryError, match="no room for .* that the ranks of the node share"):
            pdgemm(1, A, B, 0, C, mover="shared", check=check, **asked)
        assert np.array_equal(C.local, before)
    D = pdgemm(1, S, S, **asked)
    assert D.report.mover == "shared" and not D.shared


@pytest.mark.mpi(min_size=3)
def test_a_plan_is_not_carried_out_on_other_nodes(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def matrices(per_node: int) -> tuple[Any, ...]:
        monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", str(per_node))
        grid = ProcessGrid(comm.Dup())
        return tuple(DistMatrix.random((30, 30), grid=grid, block=4, seed=s) for s in range(3))

    one, two, three = matrices(comm.size), matrices(2), matrices(3)
    for given, other in ((one, two), (two, one), (two, three)):
        p = Plan.from_json(plan(*given, algorithm="summa").to_json())
        p.execute(*given)
        if given[0].grid.nodes != other[0].grid.nodes:
            with pytest.raises(LayoutError, match="on other nodes"):
                p.execute(*other)


@pytest.mark.mpi(min_size=2)
def test_threads_multiply_on_communicators_of_their_own(comm: Any) -> None:
    """Over the same ranks, in the same window, at the same time."""
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("this MPI was started for one thread at a time")
    grids = [ProcessGrid(comm.Dup()) for _ in range(2)]
    wrong = []

    def work(grid: Any, value: int) -> None:
        A, B = (DistMatrix.from_function(lambda i, j: value, (30, 30), grid=grid, block=3) for _ in "AB")
        for _ in range(20):
            C = pdgemm(1, A, B, check=False)
            wrong.append(not (C.local == 30 * value**2).all())

    threads = [threading.Thread(target=work, args=(grid, number)) for number, grid in enumerate(grids, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 40 and not any(wrong)


def filled(heap: Any, nbytes: int, value: int) -> np.ndarray:
    block: np.ndarray = heap.block(nbytes)
    block[:] = value
    return block


def test_blocks_are_used_again_and_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any order of taking and giving back: no two blocks overlap, a view keeps its block, in the end all is free."""
    memory, rng = mmap.mmap(-1, 1 << 27), np.random.default_rng(0)
    heap = place.Heap(memory, lambda part: True)
    held: list[np.ndarray] = []
    for turn in range(600):
        if held and rng.random() < 0.5:
            held.pop(rng.integers(len(held)))
        else:
            size = int(rng.choice([1, 4096, 100_000, 5 << 20]))
            held.append(filled(heap, size, turn % 256)[size // 2 :])  # only a view is kept
        if turn % 100 == 0:
            assert all((x == x[0]).all() for x in held)
    ends = sorted((x.ctypes.data, x.ctypes.data + x.size) for x in held)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
    assert heap.block(1 << 27) is None
    held.clear()
    assert heap.used == 0 and len(heap._gaps) == 1
    assert sum(end - start for start, end in heap._warm) <= place.KEPT


def test_what_is_not_kept_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is taken again, no more than that, before it is handed out."""
    monkeypatch.setattr(place, "KEPT", 6 << 20)
    taken: list[int] = []
    heap = place.Heap(mmap.mmap(-1, 1 << 26), lambda part: not taken.append(len(part)))
    blocks = [filled(heap, 4 << 20, 7) for _ in "abc"]
    starts = [block.ctypes.data for block in blocks]
    assert taken == [4 << 20] * 3
    while blocks:
        del blocks[0]
    taken.clear()
    again = [heap.block(size) for size in (4 << 20, 4 << 20, 6 << 20)]
    assert [x.ctypes.data for x in again if x is not None] == starts
    assert taken == [4 << 20, 4 << 20, 2 << 20]  # of the third block the first 4 MiB were kept
    assert [x.any() for x in again if x is not None] == [
        False,
        False,
        True,
    ]  # the system had the other pages in between


@pytest.mark.parametrize("failed", [False, KeyboardInterrupt()])
def test_of_a_block_that_cannot_be_had_nothing_is_kept(failed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was taken of it is given back, and what was kept before is still known to be there."""
    monkeypatch.setattr(place, "PAGE", PAGE)
    file = os.memfd_create("memory")
    os.ftruncate(file, 16 * PAGE)
    answers = iter([True, True, True, failed, True])

    def take(part: memoryview) -> bool:
        part[:] = bytes([7]) * len(part)
        answer = next(answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    heap = place.Heap(mmap.mmap(file, 16 * PAGE), take)
    held = [heap.block(2 * PAGE) for _ in "abc"]
    del held[2], held[0]  # the next block begins where the third was, and goes beyond
    with pytest.raises(KeyboardInterrupt) if failed else nullcontext():
        assert heap.block(5 * PAGE) is None
    assert pages(file) == 6 and heap.used == 2 * PAGE and len(heap._gaps) == 2
    held.append(heap.block(5 * PAGE))
    assert held[1] is not None and pages(file) == 9
    os.close(file)


def pages(file: int) -> int:
    """How many a file takes."""
    return os.fstat(file).st_blocks * 512 // PAGE


def test_a_forked_process_gives_nothing_back() -> None:
    heap = Heap(mmap.mmap(-1, 1 << 28), lambda part: True)
    block = filled(heap, 100 << 20, 7)
    child = os.fork()
    if child == 0:
        del block
        os._exit(heap.block(1) is not None)
    assert os.waitpid(child, 0)[1] == 0
    assert (block == 7).all()


@pytest.mark.mpi
def test_where_the_system_has_no_page_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the end of a file, as in a full /dev/shm, there are none, and whoever writes there dies of SIGBUS."""
    for module in (place, node_memory):
        monkeypatch.setattr(module, "PAGE", PAGE)
    file = os.memfd_create("memory")
    os.ftruncate(file, 8 * PAGE)
    memory = mmap.mmap(file, 8 * PAGE)
    os.ftruncate(file, 4 * PAGE)
    heap = place.Heap(memory, partial(node_memory._take, spare=0))
    first = filled(heap, PAGE, 7)
    assert pages(file) == 1
    assert heap.block(5 * PAGE) is None  # 3 of its pages are there
    assert pages(file) == 1 and heap.used == PAGE and len(heap._gaps) == 1
    second = filled(heap, 3 * PAGE, 8)
    assert pages(file) == 4 and (first == 7).all()
    assert heap.block(1) is None
    del second
    monkeypatch.setattr(os, "open", None)  # what is kept is not asked for again
    assert heap.block(3 * PAGE) is not None
    os.close(file)


@pytest.mark.mpi
def test_some_memory_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they take it meanwhile, and where nothing can be found out."""

    def taken(*free: int) -> int:
        """How many of 3 pages are taken, where so many were free before each, and one is to be left."""
        file, left = os.memfd_create("memory"), iter(free)
        os.ftruncate(file, 3 * PAGE)
        monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_bavail=next(left), f_frsize=PAGE))
        done = node_memory._take(memoryview(mmap.mmap(file, 3 * PAGE)), PAGE)
        there = pages(file)
        os.close(file)
        assert done == (there == 3)
        return there

    monkeypatch.setattr(node_memory, "PAGE", PAGE)
    assert taken(4, 3, 2) == 3
    assert taken(3) == 0
    assert taken(9, 9, 1) == 2
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)  # as where it may only be read
        assert taken(9) == 0
    monkeypatch.setattr(node_memory, "WHERE", "/dev/null/shm")
    assert taken(9) == 0


@pytest.mark.mpi(min_size=2)
def test_no_job_takes_memory_while_another_makes_a_window(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI would find less than it was told, and wait forever.  Who has to wait for too long leaves enough for it."""
    make, held = node_memory._Window, []
    monkeypatch.setattr(node_memory, "_patience", {})

    def watched(*args: Any) -> Any:
        comm.Barrier()
        with monkeypatch.context() as patch:
            patch.setattr(node_memory, "_TURN", 0.0)
            for free in (5, 6):
                there = SimpleNamespace(f_blocks=8, f_bavail=free, f_frsize=PAGE)
                patch.setattr(os, "fstatvfs", lambda _, there=there: there)
                held.append(not node_memory._take(memoryview(bytearray(1)), 0))
        comm.Barrier()
        return make(*args)

    monkeypatch.setattr(node_memory, "_Window", watched)
    monkeypatch.setattr(node_memory, "_windows", {})
    memory = node_memory.NodeMemory(comm, comm.size * node_memory._LEAST, False)
    assert held == [True, False] and memory.size == node_memory._LEAST
    assert memory.empty((10, 10), "float64").shape == (10, 10)
    with node_memory._turn(node_memory.LOCK_SH) if comm.rank == 0 else nullcontext():
        monkeypatch.setattr(node_memory, "_MAKING", 0.0)
        monkeypatch.setattr(node_memory, "_patience", {})
        node_memory._windows.clear()
        assert node_memory.NodeMemory(comm, comm.size * node_memory._LEAST, False).size == 0


@pytest.fixture
def door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of their own for the locks of this rank; the door stands before the lock of the folder."""
    path = tmp_path / "door"
    path.write_bytes(bytes(9))
    monkeypatch.setattr(node_memory, "WHERE", str(tmp_path))
    monkeypatch.setattr(node_memory, "ZERO", str(path))
    monkeypatch.setattr(node_memory, "_patience", {})
    return path


@pytest.mark.mpi
def test_who_makes_a_window_is_not_kept_waiting_by_those_who_come_later(door: Path) -> None:
    """Though there be always somebody who takes memory."""
    made: list[int] = []

    def make() -> None:
        with _turn(LOCK_EX) as free:
            made.append(free)

    maker = threading.Thread(target=make)
    with door.open() as file, _turn(LOCK_SH) as first, _turn(LOCK_SH) as second:
        assert first and second
        maker.start()
        shut = False
        while not shut and not made:
            try:
                flock(file, LOCK_SH | LOCK_NB)
                flock(file, LOCK_UN)
            except BlockingIOError:
                shut = True
        assert shut and not made
    maker.join()
    assert made[0] > 0


@pytest.mark.mpi
@pytest.mark.parametrize("name", ["ZERO", "WHERE"])
def test_locks_that_others_keep_are_not_waited_for_again(
    name: str, door: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Anybody may lock what anybody may read.  Who only found the door shut has the lock that counts."""
    now, free, needed = [0.0], [8], 3

    def nap(seconds: float) -> None:
        now[0] += seconds

    def spent(lock: int) -> tuple[float, int]:
        start = now[0]
        with _turn(lock, needed) as there:
            return round(now[0] - start, 1), there

    monkeypatch.setattr(node_memory, "_windows", {})
    monkeypatch.setattr(node_memory, "sleep", nap)
    monkeypatch.setattr(node_memory, "perf_counter", lambda: now[0])
    monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_blocks=8, f_bavail=free[0], f_frsize=1))
    node_memory._tell_of_lock.cache_clear()
    file = os.open(getattr(node_memory, name), os.O_RDONLY)
    flock(file, LOCK_EX)
    shared, alone = (8, 8) if name == "ZERO" else (3, 0)  # what a window may want is left
    making = 1.0 if name == "ZERO" else 10.0
    assert node_memory._take(memoryview(bytearray(1)), 0) and round(now[0], 1) == 1
    assert [spent(LOCK_SH) for _ in range(2)] == [(0, shared)] * 2
    assert not capfd.readouterr().err
    assert [spent(LOCK_EX) for _ in range(2)] == [(making, alone), (0, alone)]
    now[0] += 61
    assert [spent(lock) for lock in (LOCK_SH, LOCK_SH, LOCK_EX, LOCK_EX)] == [
        (1, shared), (0, shared), (1, alone), (0, alone),
    ]  # fmt: skip
    free[0] = 5
    assert node_memory._take(memoryview(bytearray(1)), 0) == (name == "ZERO")
    told = capfd.readouterr().err.splitlines()
    assert len(told) == (name == "WHERE") and all(
        f"{door.parent} locked" in line for line in told
    )  # ZERO costs nothing
    os.close(file)
    with _turn(LOCK_EX) as there, door.open() as shut:
        assert there == 5
        with pytest.raises(BlockingIOError):
            flock(shut, LOCK_SH | LOCK_NB)


@pytest.mark.mpi
def test_a_forked_process_keeps_no_lock(door: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it has the file open, as where another thread started a process meanwhile."""
    copies: list[int] = []
    opened = node_memory._opened

    def copied(*args: Any) -> int:
        file = opened(*args)
        copies.append(os.dup(file))  # as fork does
        return file

    monkeypatch.setattr(node_memory, "_opened", copied)
    with _turn(LOCK_EX) as free:
        assert free
    for path, copy in zip((door, door.parent), copies, strict=True):
        file = os.open(path, os.O_RDONLY)
        flock(file, LOCK_EX | LOCK_NB)
        os.close(file)
        os.close(copy)


FILLED = """
import os, sys
import numpy as np
from pdgemm import DistMatrix, ProcessGrid, pdgemm
from pdgemm.io import hdf5
n = 600
with ProcessGrid() as grid:
    made = {"grid": grid, "block": (8, 8)}
    A = DistMatrix.random((n, n), seed=1, **made)
    if grid.rank == 0 and A.shared:
        there = os.statvfs("/dev/shm")
        with open("/dev/shm/filler", "wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, there.f_bavail * there.f_frsize - (1 << 21))  # some is MPI's
    grid.comm.Barrier()
    B = DistMatrix.random((n, n), seed=2, **made)
    C = pdgemm(1, A, B)
    if grid.rank == 0 and A.shared:
        os.unlink("/dev/shm/filler")
    grid.comm.Barrier()
    D = DistMatrix.random((n, n), seed=3, **made)
    hdf5.save(sys.argv[1], "C", C)
    right = np.allclose(hdf5.load(sys.argv[1], "C", grid).allgather(), A.allgather() @ B.allgather())
    print(grid.memory.size > 0, A.shared, B.shared, C.shared, D.shared, right)
"""


def with_own_memory(options: str, *command: str, other_mpis: bool) -> Any:
    """A command on two ranks that have a /dev/shm of their own."""
    if not other_mpis and "Open MPI" not in subprocess.getoutput("mpiexec --version"):
        pytest.skip("other MPIs do not start with less than a few MiB of /dev/shm, and make windows unseen")
    apart = ["unshare", "--mount", *(["--user", "--map-root-user"] if os.getuid() else [])]
    apart += ["sh", "-c", f'mount -t tmpfs -o {options} tmpfs /dev/shm && exec "$@"', "sh"]
    try:
        subprocess.run([*apart, "true"], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as bad:
        pytest.skip(f"no /dev/shm of one's own: {getattr(bad, 'stderr', bad)}")
    started = [*apart, "mpiexec", "-n", "2", sys.executable, "-c", *command]
    return subprocess.run(started, env=outside_job(), capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("size=64m", "True True False False True True"),  # half of it for the window, and then others come
        ("size=4k", "False False False False False True"),
        pytest.param("size=64m,ro", "False False False False False True", marks=thorough),
    ],
)
def test_where_shared_memory_is_small_or_full_matrices_are_private(tmp_path: Path, options: str, said: str) -> None:
    """And files are opened: Open MPI keeps semaphores for them there."""
    run = with_own_memory(options, FILLED, str(tmp_path / "c.h5"), other_mpis=options == "size=64m")
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n") == [said, said, ""]


TAKEN = """
import os
from pdgemm import ProcessGrid
from pdgemm.grids import node_memory
class Window(node_memory._Window):
    def __init__(self, node, size):
        if node.rank == 0:
            with open("/dev/shm/filler", "wb") as filler:
                os.posix_fallocate(filler.fileno(), 0, 55 << 20)
        super().__init__(node, size)
node_memory._Window = Window
ProcessGrid()
"""


def test_a_window_that_another_program_prevents_ends_the_job() -> None:
    """One rank hears of it; the others are in MPI."""
    run = with_own_memory("size=64m", TAKEN, other_mpis=False)
    assert run.returncode == 3, run.stderr
    assert run.stderr.count("pdgemm: error: MPI made no window of ") == 1  # mpirun mixes lines
    assert "PDGEMM_NODE_MEMORY=0" in run.stderr


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(("RANKS_PER_NODE", text) for text in ("0", "-1", "two", "9" * 5000)),
        *(("NODE_MEMORY", text) for text in ("1G", "9" * 5000)),
    ],
)
def test_wrong_words_about_nodes_are_refused(comm: Any, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if comm.rank == comm.size - 1:
        monkeypatch.setenv(f"PDGEMM_{name}", text)
    with pytest.raises(ArgumentError, match=f"PDGEMM_{name} is a .*number"):
        ProcessGrid(comm)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("limit", "mover"), [(0, "ibcast"), (1 << 24, "shared")])
def test_the_user_may_limit_the_memory_of_the_node(
    comm: Any, limit: int, mover: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDGEMM_NODE_MEMORY", str(limit))
    monkeypatch.setattr(node_memory, "_windows", {})
    own = comm.Dup()
    with ProcessGrid(own) as grid:
        A = DistMatrix.random((40, 40), grid=grid)
        C = pdgemm(1, A, A, algorithm="summa", shape=grid.shape)
        assert (A.shared, C.report.mover, grid.memory.size <= limit / 2) == (limit > 0, mover, True)
    assert A.local.sum() > 0  # it outlives its grid
    own.Free()


@pytest.mark.mpi(min_size=3)
@every_grid
@pytest.mark.parametrize("per_node", [2, 3, 4])
def test_each_panel_crosses_to_each_node_once(comm: Any, per_node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes by message is what no node could do without; the rest is read there."""
    if per_node >= comm.size:
        pytest.skip("all ranks share memory")
    monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", str(per_node))
    own = comm.Dup()
    places = itertools.product(grid_shapes(comm.size), [1, -1])
    with ExitStack() as stack:
        grids = [stack.enter_context(ProcessGrid(own, x, ranks=range(own.size)[::order])) for x, order in places]
        assert grids[0].nodes == tuple(rank - rank % per_node for rank in range(comm.size))
        assert grids[0].node.size == min(per_node, comm.size - grids[0].nodes[comm.rank])
        assert grids[0].ranks_per_node == per_node
        varied = pairs(grids, BLOCKS, [(13, 8, 40), (29, 61, 300)])
        for number, (grid, blocks, mnk) in enumerate(varied[:: 1 if comm.size < 6 else 3]):
            orders = ("CCC", "FFF", "CFC")[number % 3]
            report = check_summa(grid, mnk, blocks, (0, 0), "float64", mover="shared", orders=orders)
            assert report.mover == "shared"
            crossing = own.allreduce(report.counted.words_received - report.counted.words_read)
            shape, k = grid.shape, mnk[2]
            nodes = np.array(grid.nodes)[np.array(grid.rank_map).reshape(shape)]
            rows = [len(set(x)) - 1 for x in nodes.tolist()]
            cols = [len(set(x)) - 1 for x in nodes.T.tolist()]
            high, wide = (own.allgather(x) for x in size_of_c(grid, mnk, blocks))
            assert crossing == sum(k * rows[i] * high[grid.rank_of(i, 0)] for i in range(shape[0])) + sum(
                k * cols[j] * wide[grid.rank_of(0, j)] for j in range(shape[1])
            )
    own.Free()


def size_of_c(grid: Any, mnk: tuple[int, int, int], blocks: tuple[Any, ...]) -> tuple[int, int]:
    """Rows and columns of C that this rank holds."""
    block = None if blocks[0] is None else (blocks[0], blocks[1])
    return Distribution.over(grid.shape, mnk[:2], block).local_shape(grid.coords)


@pytest.mark.mpi(min_size=2)
@every_grid
@pytest.mark.parametrize(("rows", "order"), in_turn([3, 40], "CF"))
def test_sums_are_read_where_they_lie(
    comm: Any, grid: Any, rows: int, order: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By "inner" and "2.5d" with SUMMA inside, in one window of rows or several: no message, with idle ranks too."""
    monkeypatch.setattr(reduction, "LARGEST_MESSAGE_BYTES", rows * 29 * 8)
    planner.best_plan.cache_clear()
    grids = [("inner", None, None)]
    grids += [("2.5d", (pr, pc), c) for c in (2, 3) for pr in (1, 2, 3) for pc in (1, 2) if pr * pc * c <= comm.size]
    for algorithm, shape, layers in grids:
        made: dict[str, Any] = {"grid": grid, "block": 4, "order": order}
        A, B, C = (DistMatrix.random(x, seed=s, **made) for s, x in enumerate(((37, 90), (90, 29), (37, 29))))
        a, b, c = A.allgather(), B.allgather(), C.allgather()
        pdgemm(2, A, B, 1, C, algorithm=algorithm, shape=shape, layers=layers)
        assert gemm_error(C.allgather(), 2, a, b, 1, c) <= TOLERANCE
        report = C.report
        assert report.counted == report.predicted
        if report.inside != "cannon":
            assert report.mover == "shared"
            assert report.counted.messages_received == report.counted.messages_sent == 0
            assert algorithm == "2.5d" or report.panels == (13 if rows == 3 else 1)
    planner.best_plan.cache_clear()


@pytest.mark.mpi(min_size=2)
def test_sums_wait_for_late_ranks(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank adds up late, and the first multiplies late: nobody reads too early, nobody writes too early."""
    monkeypatch.setattr(reduction, "LARGEST_MESSAGE_BYTES", 4 * 20 * 8)  # windows of 4 rows
    planner.best_plan.cache_clear()
    copy, add = run.copy_blocks, Accumulator.add_wide

    def late_reader(*args: Any) -> None:
        sleep(0.003 * (comm.rank == comm.size - 1))
        copy(*args)

    def late_writer(self: Accumulator, *args: Any) -> None:
        sleep(0.003 * (comm.rank == 0))
        add(self, *args)

    with ProcessGrid(comm, (1, comm.size)) as grid:
        A, B, C = (DistMatrix.random((20, 20), grid=grid, seed=seed) for seed in range(3))
        a, b = A.allgather(), B.allgather()
        for algorithm in ("inner", "2.5d"):
            for name in ("reader", "writer"):
                with monkeypatch.context() as patch:
                    if name == "reader":
                        patch.setattr(run, "copy_blocks", late_reader)
                    else:
                        patch.setattr(Accumulator, "add_wide", late_writer)
                    for alpha in (1, -2):
                        pdgemm(alpha, A, B, 0, C, algorithm=algorithm)
                        errors = comm.allgather(gemm_error(C.allgather(), alpha, a, b))
                        assert max(errors) <= TOLERANCE
    planner.best_plan.cache_clear()


@jobs.needs_mpiexec
def test_the_window_is_made_without_a_word_from_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody has told Open MPI to leave UCX out; and the level of threads is what it was."""
    program = """
from mpi4py import MPI
before = MPI.Query_thread()
from pdgemm import ProcessGrid
grid = ProcessGrid(MPI.COMM_WORLD)
print(before == MPI.Query_thread(), grid.memory.size > 0)
"""
    environment = {name: value for name, value in outside_job().items() if name != "OMPI_MCA_osc"}
    command = jobs.python(2, "-c", program)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["True"] * 4, "")
    monkeypatch.setenv("OMPI_MCA_opal_common_ucx_verbose", "3")  # who asks for UCX's words gets them
    monkeypatch.setattr(mpi_variables, "_exchange", None)
    with mpi_variables.ucx_says_nothing():
        pass
