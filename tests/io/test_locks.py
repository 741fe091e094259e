"""Two jobs that write one file: locks, killed jobs, and no lost results."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from stored_files import edited, only_file, refused

from pdgemm import DistMatrix, ProcessGrid
from pdgemm.errors import ArgumentError, FileError
from pdgemm.io import hdf5
from pdgemm.support import files
from pdgemm.tools.cli.commands import cli
from pdgemm.tools.studies import records


def without_locks(descriptor: int, operation: int) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("locks", [True, False])
def test_two_jobs_save_to_one_file_at_once(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], locks: bool
) -> None:
    """The second job starts when the first has copied the old file; the first continues when the second waits or ends.

    Without locks the first job finds the file changed, and fails.
    """
    path, second = shared_tmp_path / "a.h5", comm.size // 2
    mine = int(comm.rank >= second)
    copy, flock, signalled = shutil.copyfile, fcntl.flock, list[int]()

    def paused(source: Path, target: Path) -> None:
        copy(source, target)
        if comm.rank == 0:
            comm.send(None, dest=second)
            comm.recv(source=second)

    def signal_first() -> None:
        if comm.rank == second and not signalled:
            signalled.append(1)
            comm.send(None, dest=0)

    def watched(descriptor: int, operation: int) -> None:
        try:
            flock(descriptor, operation)
        except BlockingIOError:
            signal_first()
            raise

    part = comm.Split(mine)
    with ProcessGrid(part) as grid:
        A = DistMatrix.eye(5, grid=grid)
        if not mine:
            hdf5.save(path, "old", A)
        comm.Barrier()
        monkeypatch.setattr(shutil, "copyfile", paused)
        monkeypatch.setattr(fcntl, "flock", watched if locks else without_locks)
        if comm.rank == second:
            comm.recv(source=0)
        error = None
        try:
            hdf5.save(path, f"new{mine}", A)
        except FileError as bad:
            error = str(bad)
        signal_first()
    part.Free()
    comm.Barrier()
    said = capfd.readouterr().err
    errors = comm.allgather(error)
    with h5py.File(path) as file:
        names = sorted(file)
    if locks:
        assert errors == [None] * comm.size and names == ["new0", "new1", "old"]
        assert f"a.h5: waiting for process {comm.bcast(os.getpid())} on " in said or comm.rank != second
    else:
        expected = f"{path}: another program changed it meanwhile, so it was not replaced: try again"
        assert errors == [expected] * second + [None] * (comm.size - second) and names == ["new1", "old"]
        assert "cannot be locked (No locks available)" in said or comm.rank not in (0, second)
    assert only_file(shared_tmp_path, comm) == ["a.h5"]


@pytest.mark.mpi
def test_datasets_saved_by_another_job_since_the_read_are_not_lost(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "a.h5"
    hdf5.save(path, "x", DistMatrix.eye(5, grid=grid))
    for foreign in (False, True):  # foreign: a file of another program, without a checksum
        if foreign:
            with edited(comm, path, "w") as file:
                file["x"] = np.eye(5)
        mine, others = hdf5.load(path, "x", grid), hdf5.load(path, "x", grid)
        hdf5.save(path, "x", others * 2, replaces=others.report)
        said = f"{path}:x was replaced after it was read here"
        refused(comm, FileError, said, hdf5.save, path, "x", mine * 3, replaces=mine.report)
        assert (hdf5.load(path, "x", grid) - others * 2).norm("max") == 0
        hdf5.save(path, "x", mine * 3)  # without `replaces`, nothing is compared
        assert only_file(shared_tmp_path, comm) == ["a.h5"]


@pytest.mark.mpi
def test_a_sum_in_a_file_loses_nothing(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If another job saves C between the read and the save of `multiply --beta 1`, the product is refused."""
    path = f"{shared_tmp_path}/a.h5:/"
    save = hdf5.save

    def run(*words: str) -> None:
        cli.main(words, standalone_mode=False)

    def add(*more: str) -> None:
        run("multiply", f"{path}A", f"{path}A", "-o", f"{path}C", "--beta", "1", *more)

    def late(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(hdf5, "save", save)
        add()
        return save(*arguments, **options)

    run("generate", f"{path}A", "--shape", "4x4", "--kind", "eye")
    run("generate", f"{path}C", "--shape", "4x4", "--kind", "ones")
    add()
    for more in (), ("--c", f"{shared_tmp_path}/../{shared_tmp_path.name}/a.h5:C"):
        monkeypatch.setattr(hdf5, "save", late)
        refused(comm, FileError, "C was replaced after it was read here", add, *more)
    # a result that is not computed from the old C replaces it
    for more in ("--c", f"{path}A"), ("--beta", "0"):
        monkeypatch.setattr(hdf5, "save", late)
        add(*more)


@pytest.mark.mpi
def test_ranks_stop_waiting_together(
    comm: Any, grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, A = shared_tmp_path / "a.h5", DistMatrix.eye(3, grid=grid)
    held = files.lock(shared_tmp_path / ".a.h5.pdgemm-lock") if comm.rank == 0 else None
    monkeypatch.setattr(files, "_TURN", 0.05)
    monkeypatch.setenv("PDGEMM_LOCK_WAIT", "0.3")
    refused(comm, FileError, "was not done in 0.3 s; try again", hdf5.save, path, "x", A)
    monkeypatch.setenv("PDGEMM_LOCK_WAIT", "soon" if comm.rank == 0 else "1")
    refused(comm, ArgumentError, "a number of seconds, got 'soon'", hdf5.save, path, "x", A)
    if held is not None:
        os.close(held)
    monkeypatch.delenv("PDGEMM_LOCK_WAIT")
    hdf5.save(path, "x", A)
    assert only_file(shared_tmp_path, comm) == ["a.h5"]


SAVE = """
import shutil, time
from pdgemm import DistMatrix, ProcessGrid
from pdgemm.io import hdf5
copy = shutil.copyfile
shutil.copyfile = lambda *given: (copy(*given), print("copied", flush=True), time.sleep(100))
with ProcessGrid() as grid:
    hdf5.save("a.h5", "first", DistMatrix.eye(5, grid=grid))
"""


def test_the_lock_of_a_killed_job_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job is killed between copy and rename, while another job waits for the lock."""
    path, flock = tmp_path / "a.h5", fcntl.flock
    with h5py.File(path, "w") as file:
        file["old"] = np.eye(2)
    before = path.read_bytes()
    with subprocess.Popen([sys.executable, "-c", SAVE], cwd=tmp_path, text=True, stdout=subprocess.PIPE) as job:

        def blocked(descriptor: int, operation: int) -> None:
            try:
                flock(descriptor, operation)
            except BlockingIOError:
                job.kill()
                assert job.wait(30) == -signal.SIGKILL and path.read_bytes() == before
                raise

        assert job.stdout is not None and "copied\n" in job.stdout
        monkeypatch.setattr(fcntl, "flock", blocked)
        with ProcessGrid() as grid:
            hdf5.save(path, "second", DistMatrix.eye(5, grid=grid))
    with h5py.File(path) as file:
        assert job.returncode == -signal.SIGKILL and sorted(file) == ["old", "second"]
    assert [*tmp_path.iterdir()] == [path]  # the second job has removed the files that the first one left


def test_two_descriptors_never_have_one_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock file is removed after it was opened, and another process creates a new one: only one lock is granted."""
    path, flock, others = tmp_path / "lock", fcntl.flock, list[int | None]()

    def removed_meanwhile(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        path.unlink()
        others.append(files.lock(path))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
    assert files.lock(path) is None
    assert others[0] is not None
    os.close(others[0])
    again = files.lock(path)
    assert again is not None and files.lock(path) is None
    os.close(again)


@pytest.mark.mpi
@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("fault", "said"),
    [("FIFO", "it is a FIFO"), ("link", "Too many levels of symbolic links"), ("mode", "Permission denied")],
)
def test_messages_name_a_lock_file_with_a_fault(
    comm: Any, grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, said: str
) -> None:
    path, beside, opener = shared_tmp_path / "a.h5", shared_tmp_path / ".a.h5.pdgemm-lock", files.ordinary

    def forbidden(at: Any, flags: int) -> int:  # simulated, because root can open all files
        if Path(at) == beside:
            raise PermissionError(errno.EACCES, "Permission denied")
        return opener(at, flags)

    if fault == "mode":
        monkeypatch.setattr(files, "ordinary", forbidden)
    elif comm.rank == 0:
        os.mkfifo(beside) if fault == "FIFO" else beside.symlink_to("none")
    comm.Barrier()
    message = f"{path}: its lock file {beside}: {said}"
    refused(comm, FileError, message, hdf5.save, path, "x", DistMatrix.eye(3, grid=grid))
    assert path.name not in only_file(shared_tmp_path, comm)


def test_lock_files_may_be_locked_by_all_users(tmp_path: Path) -> None:
    output, before = files.Output(tmp_path / "file", tmp_path / "file"), os.umask(0o077)
    try:
        output.begin()
        assert stat.S_IMODE((tmp_path / ".file.pdgemm-lock").stat().st_mode) == 0o666
        with records.study_lock(tmp_path / "s.jsonl"):  # the study itself is locked, and keeps its mode
            assert stat.S_IMODE((tmp_path / "s.jsonl").stat().st_mode) == 0o600
    finally:
        os.umask(before)
        output.end()


def test_only_files_of_killed_jobs_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Temporary files of this output are removed, but not without locks: their job may still be writing."""
    ending, mine = ".0123456789ab.partial", ["other", ".file.x.partial", ".file.0123456789abc.partial", "file.partial"]
    kept = [*mine, f".file.h5{ending}", f"file{ending}"]
    gone = [f".file{ending}", f".file{ending}.data.17"]

    def left() -> set[str]:
        for name in (*kept, *gone):
            (tmp_path / name).touch()
        files.write_file(tmp_path / "file", "text")
        files.write_file(tmp_path / "file", "text")
        with records.study_lock(tmp_path / "s.jsonl"):
            pass
        return {x.name for x in tmp_path.iterdir()}

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", without_locks)
        assert left() == {"file", *kept, *gone}
    (said,) = capsys.readouterr().err.splitlines()  # one warning for all locks
    assert said.startswith("pdgemm: ") and "cannot be locked (No locks available)" in said
    assert left() == {"file", *kept}
