"""What is read and written: files only, complete or not there, and nobody's work lost to another job's."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from pdgemm import DistMatrix, ProcessGrid
from pdgemm.errors import ArgumentError, FileError
from pdgemm.io import hdf5
from pdgemm.planning.machines.machine import Machine, load_machine
from pdgemm.support import file_states, files
from pdgemm.tools.cli.commands import cli
from pdgemm.tools.profiling.profile import load_profile
from pdgemm.tools.profiling.trace_file import trace
from pdgemm.tools.studies import plot, records

KINDS = ("folder", "character device", "block device", "FIFO", "socket")


def make(kind: str, path: Path) -> Path:
    """Something that is not a file."""
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    else:
        mode, number = (stat.S_IFCHR, (1, 3)) if kind == "character device" else (stat.S_IFBLK, (7, 200))
        try:
            os.mknod(path, mode | 0o666, os.makedev(*number))  # the numbers of /dev/null, and of no disk
        except PermissionError:
            pytest.skip("making devices takes root")
    return path


@pytest.fixture(params=[*((kind, False) for kind in KINDS), ("FIFO", True)], ids=str)
def strange(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A path, and what the error says; the thing itself must be there afterwards."""
    kind, linked = request.param
    path = real = make(kind, tmp_path / "strange.svg")
    if linked:
        path = tmp_path / "link.svg"
        path.symlink_to(real)
    before = real.lstat()
    yield path, f"it is a {kind}, not a file"
    after = real.lstat()
    assert (before.st_ino, before.st_mode, before.st_rdev) == (after.st_ino, after.st_mode, after.st_rdev)
    assert len([*tmp_path.iterdir()]) == 1 + linked


def refused(error: type[Exception], said: str, work: Callable[..., Any], *arguments: Any) -> None:
    """In one line."""
    with pytest.raises(error) as caught:
        work(*arguments)
    assert said in str(caught.value) and "\n" not in str(caught.value)


# ------------------------------------------------------------------ ordinary files
@pytest.mark.timeout(30)  # a FIFO that is opened waits for ever
def test_only_files_are_read_and_written(
    strange: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, said = strange
    for work in (load_machine, load_profile, records.read_study, records.open_study):
        refused(FileError, said, work, path)
    refused(FileError, said, plot.report, [path], tmp_path / "r.svg", None, 8)
    monkeypatch.setenv("PDGEMM_MACHINE", str(path))
    refused(FileError, said, load_machine)
    refused(FileError, said, plot.report, [], path, None, 8)
    refused(FileError, said, records.append, path, {})
    refused(FileError, said, records.study_lock(path).__enter__)
    refused(FileError, said, files.write_file, path, "text")


@pytest.mark.timeout(30)
def test_a_blas_is_a_file(tmp_path: Path) -> None:
    path = make("FIFO", tmp_path / "libblas.so")
    code = """
from pdgemm.local.blas import library as blas
try: blas.library()
except blas.ArgumentError as bad: print(bad)
"""
    env = os.environ | {"PDGEMM_BLAS": str(path)}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=20, check=True)
    assert "not a file" in run.stdout


@pytest.mark.timeout(60)
@pytest.mark.mpi
@pytest.mark.parametrize("kind", ["folder", "FIFO"])
def test_commands_read_and_write_files_only(
    comm: Any, grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(shared_tmp_path)
    path, said = shared_tmp_path / "strange", f"it is a {kind}, not a file"
    if comm.rank == 0:
        make(kind, path)
        Path("loop").symlink_to("loop")
    comm.Barrier()
    A = DistMatrix.eye(4, grid=grid)
    hdf5.save("a.h5", "x", A)
    refused(FileError, said, hdf5.save, path, "x", A)
    refused(FileError, said, hdf5.load, path, "x", grid)
    refused(FileError, said, trace(path, grid).__enter__)
    product = ["multiply", "a.h5:/x", "a.h5:/x", "-o"]
    commands = [
        ["generate", "strange:/x", "--shape", "4x4"],
        ["multiply", "strange:/x", "a.h5:/x", "-o", "c.h5:/x"],
        [*product, "strange:/x"],
        [*product, "c.h5:/x", "--c", "strange:/x", "--beta", "1"],
        ["verify", "a.h5:/x", "a.h5:/x", "strange:/x"],
    ]
    if kind != "folder":  # which click refuses
        commands += [[*product, "c.h5:/x", "--trace", "strange"], ["calibrate", "-o", "strange"]]
    for command in commands:
        refused(FileError, said, lambda words=command: cli.main(words, standalone_mode=False))
    circle = [*product, "c.h5:/x", "--trace", "loop"]
    refused(FileError, "loop: Too many levels", lambda: cli.main(circle, standalone_mode=False))
    comm.Barrier()
    assert sorted(os.listdir()) == ["a.h5", "loop", "strange"]
    comm.Barrier()


# ------------------------------------------------------------------ names
def test_names_as_long_as_names_may_be(tmp_path: Path) -> None:
    for name in ("n" * 255, "é" * 127):
        files.write_file(tmp_path / name, "one")
        files.write_file(tmp_path / name, "two")
        assert (tmp_path / name).read_text() == "two"
    assert len([*tmp_path.iterdir()]) == 2
    held = files.Output(tmp_path / ("n" * 255), tmp_path / ("n" * 255))
    assert held.begin() is not None
    files.write_file(tmp_path / ("n" * 254 + "m"), "has a lock of its own")
    held.end()
    refused(FileError, "File name too long", files.write_file, tmp_path / ("n" * 256), "text")


def test_names_that_no_file_can_have(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    for name, said in [
        ("file/x", f"{tmp_path / 'file'} is not a folder"),
        ("none/x", f"the folder {tmp_path / 'none'} does not exist"),
        ("loop", "symbolic links"),
        ("a\0b", "null"),
        ("a\ud800b", "surrogates not allowed"),
        ("", "it is a folder, not a file"),
    ]:
        refused(FileError, said, files.write_file, tmp_path / name, "text")
    with (tmp_path / "gone").open("w+") as file:
        (tmp_path / "gone").unlink()
        refused(FileError, "no name", files.write_file, Path(f"/dev/fd/{file.fileno()}"), "text")
    assert sorted(x.name for x in tmp_path.iterdir()) == ["file", "loop"]
    assert (tmp_path / "file").read_text() == "mine"


def test_a_link_that_leads_nowhere_gets_its_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    link = tmp_path / "link"
    link.symlink_to("folder/file")
    files.write_file(link, "text")
    assert link.is_symlink() and (tmp_path / "folder" / "file").read_text() == "text"
    (tmp_path / "folder" / "file").unlink()
    with records.study_lock(link):
        pass
    assert link.is_symlink() and not link.exists()  # the empty study went, and not the link to it


def test_owner_and_mode_stay(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    if os.getuid() == 0:
        os.chown(path, 12345, 23456)
    path.chmod(0o604)
    before = path.stat()
    files.write_file(path, "new")
    after = path.stat()
    assert before.st_ino != after.st_ino
    assert (before.st_uid, before.st_gid, before.st_mode) == (after.st_uid, after.st_gid, after.st_mode)


def test_a_report_takes_the_place_of_no_study(tmp_path: Path) -> None:
    study = tmp_path / "s.html"
    study.write_text("measured")
    refused(ArgumentError, "one of the studies", plot.report, [study], tmp_path / "." / "s.html", None, 8)
    assert study.read_text() == "measured"


@pytest.mark.mpi
def test_names_that_are_no_text(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    """To Linux a name is bytes; the file is read and written by MPI-IO as well."""
    path = shared_tmp_path / os.fsdecode(b"\xff.h5")
    for name in "xy":
        hdf5.save(path, name, DistMatrix.eye(5, grid=grid))
    assert hdf5.load(path, "x", grid, verify=True).norm(1) == 1


# ------------------------------------------------------------------ two jobs and one file
def without_locks(descriptor: int, operation: int) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("locks", [True, False])
def test_two_jobs_save_to_one_file_at_once(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], locks: bool
) -> None:
    """The second begins when the first has copied the old file; the first goes on when the second waits, or is done.

    Without locks the first finds the file changed.
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
        expected = f"{path}: another program changed it meanwhile, and it was left like that: try again"
        assert errors == [expected] * second + [None] * (comm.size - second) and names == ["new1", "old"]
        assert "cannot be locked (No locks available)" in said or comm.rank not in (0, second)
    assert os.listdir(shared_tmp_path) == ["a.h5"]
    comm.Barrier()


@pytest.mark.mpi
def test_what_another_job_saved_since_it_was_read_is_not_lost(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "a.h5"
    hdf5.save(path, "x", DistMatrix.eye(5, grid=grid))
    for foreign in (False, True):  # written by another program, which leaves no checksum
        if foreign and comm.rank == 0:
            with h5py.File(path, "w") as file:
                file["x"] = np.eye(5)
        comm.Barrier()
        mine, others = hdf5.load(path, "x", grid), hdf5.load(path, "x", grid)
        hdf5.save(path, "x", others * 2, replaces=others.report)
        with pytest.raises(FileError, match=f"{path}:x was replaced after it was read here"):
            hdf5.save(path, "x", mine * 3, replaces=mine.report)
        assert (hdf5.load(path, "x", grid) - others * 2).norm("max") == 0
        hdf5.save(path, "x", mine * 3)  # who does not say what it was made from means to replace it
        comm.Barrier()
        assert os.listdir(shared_tmp_path) == ["a.h5"]
        comm.Barrier()


@pytest.mark.mpi
def test_a_sum_in_a_file_loses_nothing(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job saves C of `multiply --beta 1` between our reading and our saving."""
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
        refused(FileError, "C was replaced after it was read here", add, *more)
    # what is not made from the old C replaces it
    for more in ("--c", f"{path}A"), ("--beta", "0"):
        monkeypatch.setattr(hdf5, "save", late)
        add(*more)


@pytest.mark.mpi
def test_ranks_stop_waiting_together(
    comm: Any, grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shared_tmp_path / "a.h5"
    held = files.lock(shared_tmp_path / ".a.h5.pdgemm-lock") if comm.rank == 0 else None
    monkeypatch.setattr(files, "_TURN", 0.05)
    monkeypatch.setenv("PDGEMM_LOCK_WAIT", "0.3")
    refused(FileError, "was not done in 0.3 s; try again", hdf5.save, path, "x", DistMatrix.eye(3, grid=grid))
    monkeypatch.setenv("PDGEMM_LOCK_WAIT", "soon" if comm.rank == 0 else "1")
    refused(ArgumentError, "a number of seconds, got 'soon'", hdf5.save, path, "x", DistMatrix.eye(3, grid=grid))
    if held is not None:
        os.close(held)
    monkeypatch.delenv("PDGEMM_LOCK_WAIT")
    hdf5.save(path, "x", DistMatrix.eye(3, grid=grid))
    comm.Barrier()
    assert os.listdir(shared_tmp_path) == ["a.h5"]
    comm.Barrier()


SAVE = """
import shutil, time
from pdgemm import DistMatrix, ProcessGrid
from pdgemm.io import hdf5
copy = shutil.copyfile
shutil.copyfile = lambda *given: (copy(*given), print("copied", flush=True), time.sleep(100))
with ProcessGrid() as grid:
    hdf5.save("a.h5", "first", DistMatrix.eye(5, grid=grid))
"""


def test_the_lock_of_a_killed_job_goes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9 between the copy and the rename, while another job waits for the file."""
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
    assert [*tmp_path.iterdir()] == [path]  # the second job has removed what the first one left


def test_two_descriptors_never_have_one_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who had the lock removes the file when another has opened it already; a third makes a new one."""
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

    def forbidden(at: Any, flags: int) -> int:  # to root all files are readable
        if Path(at) == beside:
            raise PermissionError(errno.EACCES, "Permission denied")
        return opener(at, flags)

    if fault == "mode":
        monkeypatch.setattr(files, "ordinary", forbidden)
    elif comm.rank == 0:
        make("FIFO", beside) if fault == "FIFO" else beside.symlink_to("none")
    comm.Barrier()
    message = f"{path}: its lock file {beside}: {said}"
    refused(FileError, message, hdf5.save, path, "x", DistMatrix.eye(3, grid=grid))
    assert not path.exists()
    comm.Barrier()


def test_whoever_may_write_beside_a_file_may_lock_it(tmp_path: Path) -> None:
    output, before = files.Output(tmp_path / "file", tmp_path / "file"), os.umask(0o077)
    try:
        output.begin()
        assert stat.S_IMODE((tmp_path / ".file.pdgemm-lock").stat().st_mode) == 0o666
        with records.study_lock(tmp_path / "s.jsonl"):  # a lock on a file of ours, which stays ours
            assert stat.S_IMODE((tmp_path / "s.jsonl").stat().st_mode) == 0o600
    finally:
        os.umask(before)
        output.end()


def test_the_lock_file_of_another_user_goes_while_we_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, opener, asked = tmp_path / "lock", files.ordinary, list[int]()

    def ordinary(at: Any, flags: int) -> int:
        asked.append(flags)
        if len(asked) == 1:  # the second looks for a file to read, and there is none
            raise PermissionError(errno.EACCES, "Permission denied")
        return opener(at, flags)

    monkeypatch.setattr(files, "ordinary", ordinary)
    held = files.lock(path)
    assert held is not None
    os.close(held)
    path.unlink()

    def never(at: Any, flags: int) -> int:  # as in a folder where nothing may be made
        raise (PermissionError if flags & os.O_CREAT else FileNotFoundError)(errno.EACCES, "not here")

    monkeypatch.setattr(files, "ordinary", never)
    with pytest.raises(PermissionError):
        files.lock(path)


@pytest.mark.parametrize("change", ["replaced", "written", "written and put back", "appeared", "removed"])
def test_nothing_of_others_is_overwritten(tmp_path: Path, change: str) -> None:
    """By programs that know nothing of the lock."""
    path = tmp_path / "file"
    if change != "appeared":
        path.write_text("old")
    output = files.Output(path, files.check_writable(path, 3))
    partial = output.begin()
    assert partial is not None
    partial.write_text("new")
    if change == "written and put back":
        before = path.stat()
        path.write_text("his")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif change == "replaced":
        shutil.copy2(path, tmp_path / "other")
        (tmp_path / "other").rename(path)
    elif change == "removed":
        path.unlink()
    else:
        path.write_text("their")
    refused(FileError, "another program changed it meanwhile", output.publish)
    output.end()
    expected = {"replaced": ["old"], "removed": [], "written and put back": ["his"]}.get(change, ["their"])
    assert [x.read_text() for x in tmp_path.iterdir()] == expected


@pytest.mark.parametrize(("nanoseconds", "wait"), [(123_456_789, 0.01), (0, 1.9)])
def test_two_writes_in_one_tick_of_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nanoseconds: int, wait: float
) -> None:
    """A file that was just written is looked at when the clock of its file system has gone on."""
    path, slept, now = tmp_path / "file", list[float](), 1_700_000_000 * 10**9 + nanoseconds
    path.write_text("old")
    look = file_states.state_of

    def ticking(descriptor: int) -> file_states.State:
        """The time of changes stands still, as that of a coarse clock."""
        return look(descriptor)._replace(changed=now if not slept else now + 10**10)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        path.write_text("new")  # by another program, in the same tick

    monkeypatch.setattr(file_states, "state_of", ticking)
    monkeypatch.setattr(file_states, "sleep", sleep)
    monkeypatch.setattr(file_states, "time_ns", lambda: now + 1_000_000)
    state = file_states.settled(path)
    assert slept == [pytest.approx(wait, rel=0.2)] and state is not None and state.changed == now + 10**10
    monkeypatch.setattr(file_states, "time_ns", lambda: now + 10**11)
    assert file_states.settled(path) == file_states.state(path) and len(slept) == 1
    assert file_states.settled(tmp_path / "none") is None


def test_what_killed_jobs_have_left_goes_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Temporary files of this name only; none where files cannot be locked, for another job may be writing."""
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
    (said,) = capsys.readouterr().err.splitlines()  # once
    assert said.startswith("pdgemm: ") and "cannot be locked (No locks available)" in said
    assert left() == {"file", *kept}


def test_text_that_a_storage_drops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    files.write_file(path, "old")
    monkeypatch.setattr(files, "to_disk", lambda partial: os.truncate(partial, 2))
    refused(FileError, "what was written is not what the file holds", files.write_file, path, "new")
    assert [x.read_text() for x in tmp_path.iterdir()] == ["old"]


def test_what_is_beside_the_file_goes_when_a_job_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "file"
    output = files.Output(path, path)
    partial = output.begin()
    assert partial is not None
    partial.write_text("half")
    assert {*tmp_path.iterdir()} == {x for x in files.UNFINISHED if x.parent == tmp_path}
    output.end()
    assert not {*tmp_path.iterdir()} and not {x for x in files.UNFINISHED if x.parent == tmp_path}


# ------------------------------------------------------------------ studies
def test_a_long_line_that_was_not_finished_goes_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    machine = {"machine": json.loads(Machine().as_json())}
    records.append(path, machine)
    first = path.read_bytes()
    path.write_bytes(first + b'{"format": 1, "case": "' + b"x" * (3 << 20))
    records.append(path, machine)
    assert path.read_bytes() == first * 2
