"""Memory that the ranks of a node share: limits, and too little of it."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from typing import Any

import jobs
import pytest
from tiers import square_grid, thorough

from pdgemm import DistMatrix, ProcessGrid, pdgemm
from pdgemm.errors import ArgumentError
from pdgemm.grids import node_memory

pytestmark = square_grid

HUGE = "9" * 5000


@pytest.fixture
def no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the shared windows of this process, so that the next grid creates a new one."""
    monkeypatch.setattr(node_memory, "_windows", {})


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
    """Run Python code on two ranks with a private /dev/shm, mounted with these options."""
    if not other_mpis and "open-mpi" not in subprocess.getoutput("mpiexec --version"):
        pytest.skip("other MPIs need a few MiB of /dev/shm to start, and do not show their windows there")
    apart = ["unshare", "--mount", *(["--user", "--map-root-user"] if os.getuid() else [])]
    apart += ["sh", "-c", f'mount -t tmpfs -o {options} tmpfs /dev/shm && exec "$@"', "sh"]
    try:
        subprocess.run([*apart, "true"], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as bad:
        pytest.skip(f"no private /dev/shm: {getattr(bad, 'stderr', bad)}")
    return jobs.run([*apart, *jobs.python(2, "-c", *command)], timeout=60)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("size=64m", "True True False False True True"),  # half of it is for the window; the program fills the rest
        ("size=4k", "False False False False False True"),
        pytest.param("size=64m,ro", "False False False False False True", marks=thorough),
    ],
)
def test_where_shared_memory_is_small_or_full_matrices_are_private(tmp_path: Path, options: str, said: str) -> None:
    """Files can still be opened, although Open MPI creates semaphores for them in /dev/shm."""
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


def test_a_failed_shared_window_ends_the_job() -> None:
    """One rank raises the error while the others wait in MPI: the job ends."""
    run = with_own_memory("size=64m", TAKEN, other_mpis=False)
    assert run.returncode == 3, run.stderr
    assert run.stderr.count("pdgemm: error: MPI made no window of ") == 1  # counted: mpirun mixes lines of ranks
    assert "PDGEMM_NODE_MEMORY=0" in run.stderr


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("name", "text"),
    [*(("RANKS_PER_NODE", x) for x in ("0", "-1", "two", HUGE)), *(("NODE_MEMORY", x) for x in ("1G", HUGE))],
)
def test_wrong_words_about_nodes_are_refused(comm: Any, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if comm.rank == comm.size - 1:
        monkeypatch.setenv(f"PDGEMM_{name}", text)
    with pytest.raises(ArgumentError, match=f"PDGEMM_{name} must be a .*number"):
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
    assert A.local.sum() > 0  # the memory outlives the grid
    own.Free()


@jobs.needs_mpiexec
def test_the_window_is_made_without_messages_of_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows are created without warnings of UCX, unless the user asks for these; the level of threads stays."""
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
    monkeypatch.setenv("OMPI_MCA_opal_common_ucx_verbose", "3")  # messages that the user has asked for are printed
    monkeypatch.setattr(ctypes, "CDLL", None)
    with node_memory.silent_ucx():
        pass
