"""The memory that the ranks of a node share: the locks of other jobs, its limits, and too little of it."""

from __future__ import annotations

import os
import subprocess
import threading
from contextlib import nullcontext
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, LOCK_UN, flock
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jobs
import pytest
from tiers import square_grid, thorough

from pdgemm import DistMatrix, ProcessGrid, pdgemm
from pdgemm.errors import ArgumentError
from pdgemm.grids import node_memory
from pdgemm.grids.node_memory import _turn

pytestmark = square_grid

HUGE = "9" * 5000


@pytest.fixture
def no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has no window yet, and has not waited for any lock."""
    monkeypatch.setattr(node_memory, "_windows", {})
    monkeypatch.setattr(node_memory, "_patience", {})


@pytest.mark.mpi(min_size=2)
def test_no_job_takes_memory_while_another_makes_a_window(
    comm: Any, no_window: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPI would find less than it was told, and wait forever.  Who has to wait for too long leaves enough for it."""
    make, held = node_memory._Window, []

    def watched(*args: Any) -> Any:
        comm.Barrier()
        with monkeypatch.context() as patch:
            patch.setattr(node_memory, "_TURN", 0.0)
            for free in (5, 6):
                there = SimpleNamespace(f_blocks=8, f_bavail=free, f_frsize=4096)
                patch.setattr(os, "fstatvfs", lambda _, there=there: there)
                held.append(not node_memory._take(memoryview(bytearray(1)), 0))
        comm.Barrier()
        return make(*args)

    monkeypatch.setattr(node_memory, "_Window", watched)
    memory = node_memory.NodeMemory(comm, comm.size * node_memory._LEAST, False)
    assert held == [True, False] and memory.size == node_memory._LEAST
    assert memory.empty((10, 10), "float64").shape == (10, 10)
    with _turn(LOCK_SH) if comm.rank == 0 else nullcontext():
        monkeypatch.setattr(node_memory, "_MAKING", 0.0)
        node_memory._patience.clear()
        node_memory._windows.clear()
        assert node_memory.NodeMemory(comm, comm.size * node_memory._LEAST, False).size == 0


@pytest.fixture
def door(tmp_path: Path, no_window: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of their own for the locks of this rank; the door stands before the lock of the folder."""
    path = tmp_path / "door"
    path.write_bytes(bytes(9))
    monkeypatch.setattr(node_memory, "WHERE", str(tmp_path))
    monkeypatch.setattr(node_memory, "ZERO", str(path))
    return path


@pytest.mark.mpi
def test_who_makes_a_window_is_not_kept_waiting_by_those_who_come_later(door: Path) -> None:
    """Though there be always somebody who takes memory."""
    free_bytes: list[int] = []

    def make() -> None:
        with _turn(LOCK_EX) as free:
            free_bytes.append(free)

    maker = threading.Thread(target=make)
    with door.open() as file, _turn(LOCK_SH) as first, _turn(LOCK_SH) as second:
        assert first and second
        maker.start()
        shut = False
        while not shut and not free_bytes:
            try:
                flock(file, LOCK_SH | LOCK_NB)
                flock(file, LOCK_UN)
            except BlockingIOError:
                shut = True
        assert shut and not free_bytes
    maker.join()
    assert free_bytes[0] > 0


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

    monkeypatch.setattr(node_memory, "sleep", nap)
    monkeypatch.setattr(node_memory, "perf_counter", lambda: now[0])
    monkeypatch.setattr(os, "fstatvfs", lambda _: SimpleNamespace(f_blocks=8, f_bavail=free[0], f_frsize=1))
    node_memory._tell_of_lock.cache_clear()
    file = os.open(getattr(node_memory, name), os.O_RDONLY)
    flock(file, LOCK_EX)
    shared, alone = (8, 8) if name == "ZERO" else (3, 0)  # what a window may want is left
    making = 1.0 if name == "ZERO" else 10.0
    assert node_memory._take(memoryview(bytearray(1)), 0) and round(now[0], 1) == 1
    assert [spent(LOCK_SH), spent(LOCK_SH)] == [(0, shared)] * 2
    assert not capfd.readouterr().err
    assert [spent(LOCK_EX), spent(LOCK_EX)] == [(making, alone), (0, alone)]
    now[0] += 61
    assert [spent(LOCK_SH), spent(LOCK_SH)] == [(1, shared), (0, shared)]
    assert [spent(LOCK_EX), spent(LOCK_EX)] == [(1, alone), (0, alone)]
    free[0] = 5
    assert node_memory._take(memoryview(bytearray(1)), 0) == (name == "ZERO")
    warnings = capfd.readouterr().err.splitlines()
    assert len(warnings) == (name == "WHERE")  # without the lock of ZERO there is no less memory
    assert all(f"{door.parent} locked" in line for line in warnings)
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
    layout = {"grid": grid, "block": (8, 8)}
    A = DistMatrix.random((n, n), seed=1, **layout)
    if grid.rank == 0 and A.shared:
        there = os.statvfs("/dev/shm")
        with open("/dev/shm/filler", "wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, there.f_bavail * there.f_frsize - (1 << 21))  # some is MPI's
    grid.comm.Barrier()
    B = DistMatrix.random((n, n), seed=2, **layout)
    C = pdgemm(1, A, B)
    if grid.rank == 0 and A.shared:
        os.unlink("/dev/shm/filler")
    grid.comm.Barrier()
    D = DistMatrix.random((n, n), seed=3, **layout)
    hdf5.save(sys.argv[1], "C", C)
    right = np.allclose(hdf5.load(sys.argv[1], "C", grid).allgather(), A.allgather() @ B.allgather())
    seen = grid.comm.gather(f"{grid.memory.size > 0} {A.shared} {B.shared} {C.shared} {D.shared} {right}")
    if grid.rank == 0:
        print(*seen, sep="\\n")
"""


def with_own_memory(options: str, *command: str, other_mpis: bool) -> Any:
    """A command on two ranks that have a /dev/shm of their own."""
    if not other_mpis and "open-mpi" not in subprocess.getoutput("mpiexec --version"):
        pytest.skip("other MPIs do not start with less than a few MiB of /dev/shm, and make windows unseen")
    apart = ["unshare", "--mount", *(["--user", "--map-root-user"] if os.getuid() else [])]
    apart += ["sh", "-c", f'mount -t tmpfs -o {options} tmpfs /dev/shm && exec "$@"', "sh"]
    try:
        subprocess.run([*apart, "true"], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as bad:
        pytest.skip(f"no /dev/shm of one's own: {getattr(bad, 'stderr', bad)}")
    return jobs.run([*apart, *jobs.python(2, "-c", *command)], timeout=60)


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
    [*(("RANKS_PER_NODE", x) for x in ("0", "-1", "two", HUGE)), *(("NODE_MEMORY", x) for x in ("1G", HUGE))],
)
def test_wrong_words_about_nodes_are_refused(comm: Any, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if comm.rank == comm.size - 1:
        monkeypatch.setenv(f"PDGEMM_{name}", text)
    with pytest.raises(ArgumentError, match=f"PDGEMM_{name} is a .*number"):
        ProcessGrid(comm)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("limit", "mover"), [(0, "ibcast"), (1 << 24, "shared")])
def test_the_user_may_limit_the_memory_of_the_node(
    comm: Any, limit: int, mover: str, no_window: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDGEMM_NODE_MEMORY", str(limit))
    own = comm.Dup()
    with ProcessGrid(own) as grid:
        A = DistMatrix.random((40, 40), grid=grid)
        C = pdgemm(1, A, A, algorithm="summa", shape=grid.shape)
        assert (A.shared, C.report.mover, grid.memory.size <= limit / 2) == (limit > 0, mover, True)
    assert A.local.sum() > 0  # it outlives its grid
    own.Free()


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
    monkeypatch.delenv("OMPI_MCA_osc", raising=False)
    done = jobs.run(jobs.python(2, "-c", program), timeout=60)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["True"] * 4, "")
    monkeypatch.setenv("OMPI_MCA_opal_common_ucx_verbose", "3")  # who asks for UCX's words gets them
    monkeypatch.setattr(node_memory, "_exchange_variable", None)
    with node_memory.silent_ucx():
        pass
