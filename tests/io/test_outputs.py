"""Inputs and outputs are regular files, written completely or not at all; no job loses another job's result."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from stored_files import only_file

from pdgemm import DistMatrix
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
    """Create a path that is not a regular file."""
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
            os.mknod(path, mode | 0o666, os.makedev(*number))  # numbers of /dev/null, and of an absent disk
        except PermissionError:
            pytest.skip("only root can create devices")
    return path


@pytest.fixture(params=[*((kind, False) for kind in KINDS), ("FIFO", True)], ids=str)
def strange(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A path that is not a regular file, and the expected error; the path must not change."""
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
    """Check that a call raises this error, with a message of one line."""
    with pytest.raises(error) as caught:
        work(*arguments)
    assert said in str(caught.value) and "\n" not in str(caught.value)


# ------------------------------------------------------------------ ordinary files
@pytest.mark.timeout(30)  # opening a FIFO would wait for ever
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
    if kind != "folder":  # click itself refuses folders
        commands += [[*product, "c.h5:/x", "--trace", "strange"], ["calibrate", "-o", "strange"]]
    run = partial(cli.main, standalone_mode=False)
    for words in commands:
        refused(FileError, said, run, words)
    refused(FileError, "loop: Too many levels", run, [*product, "c.h5:/x", "--trace", "loop"])
    assert only_file(shared_tmp_path, comm) == ["a.h5", "loop", "strange"]


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


def test_impossible_file_names(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    for name, said in [
        ("file/x", f"{tmp_path / 'file'} is not a folder"),
        ("none/x", f"the folder {tmp_path / 'none'} does not exist"),
        ("loop", "symbolic links"),
        ("a\0b", "null"),
        ("a\ud800b", "surrogates not allowed"),
    ]:
        refused(FileError, said, files.write_file, tmp_path / name, "text")
    with (tmp_path / "gone").open("w+") as file:
        (tmp_path / "gone").unlink()
        refused(FileError, "no name", files.write_file, Path(f"/dev/fd/{file.fileno()}"), "text")
    assert sorted(x.name for x in tmp_path.iterdir()) == ["file", "loop"]
    assert (tmp_path / "file").read_text() == "mine"


def test_a_dangling_link_gets_its_file(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    link = tmp_path / "link"
    link.symlink_to("folder/file")
    files.write_file(link, "text")
    assert link.is_symlink() and (tmp_path / "folder" / "file").read_text() == "text"
    (tmp_path / "folder" / "file").unlink()
    with records.study_lock(link):
        pass
    assert link.is_symlink() and not link.exists()  # the empty study was removed, not the link


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
    refused(ArgumentError, "holds the measurements", plot.report, [study], tmp_path / "." / "s.html", None, 8)
    assert study.read_text() == "measured"


@pytest.mark.mpi
def test_names_that_are_not_unicode(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    """Linux file names are bytes: HDF5 and MPI-IO read and write a file whose name is not valid UTF-8."""
    path = shared_tmp_path / os.fsdecode(b"\xff.h5")
    for name in "xy":
        hdf5.save(path, name, DistMatrix.eye(5, grid=grid))
    assert hdf5.load(path, "x", grid, verify=True).norm(1) == 1


@pytest.mark.parametrize("change", ["replaced", "written", "written and put back", "appeared", "removed"])
def test_changes_of_other_programs_are_not_overwritten(tmp_path: Path, change: str) -> None:
    """Programs that ignore the lock change the file; temporary files are then removed."""
    path = tmp_path / "file"

    def unfinished() -> set[Path]:
        return {x for x in files.UNFINISHED if x.parent == tmp_path}

    if change != "appeared":
        path.write_text("old")
    output = files.Output(path, files.check_writable(path, 3))
    new = output.begin()
    assert new is not None
    new.write_text("new")
    assert {*tmp_path.iterdir()} - {path} == unfinished()
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
    assert not unfinished()
    expected = {"replaced": ["old"], "removed": [], "written and put back": ["his"]}.get(change, ["their"])
    assert [x.read_text() for x in tmp_path.iterdir()] == expected


@pytest.mark.parametrize(("nanoseconds", "wait"), [(123_456_789, 0.01), (0, 1.9)])
def test_two_writes_in_one_tick_of_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nanoseconds: int, wait: float
) -> None:
    """The state of a file that was just written is read again after the clock of its file system has advanced."""
    path, slept, now = tmp_path / "file", list[float](), 1_700_000_000 * 10**9 + nanoseconds
    path.write_text("old")
    look = file_states.state_of

    def ticking(descriptor: int) -> file_states.State:
        """Return the state with a change time that stands still until `sleep` is called, as with a coarse clock."""
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


def test_text_lost_by_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    files.write_file(path, "old")
    monkeypatch.setattr(files, "to_disk", lambda partial: os.truncate(partial, 2))
    refused(FileError, "the file does not hold the bytes that were written", files.write_file, path, "new")
    assert [x.read_text() for x in tmp_path.iterdir()] == ["old"]


# ------------------------------------------------------------------ studies
def test_a_long_unfinished_line_is_removed_entirely(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    machine = {"machine": json.loads(Machine().as_json())}
    records.append(path, machine)
    first = path.read_bytes()
    path.write_bytes(first + b'{"format": 1, "case": "' + b"x" * (3 << 20))
    records.append(path, machine)
    assert path.read_bytes() == first * 2
