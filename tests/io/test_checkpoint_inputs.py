"""A job resumes from a checkpoint only for the same product of unchanged inputs, even if file times are restored."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import pytest
from checkpointed import EACH_STEP, K, M, Problem, ended_after
from stored_files import by_rank_0, elements, read, refused, write

from pdgemm import DistMatrix
from pdgemm.errors import ArgumentError, FileError
from pdgemm.io import hdf5

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("small")]


def replaced(file: Path, how: str, change: Callable[[Path], object] = lambda file: None) -> None:
    """Change a file, or replace it by a changed copy, and restore its time, as cp -p, tar and rsync -t do."""
    before = file.stat()
    there = file if how == "in place" else file.with_name("copy.h5")
    if there != file:
        shutil.copy2(file, there)
    change(there)
    os.utime(there, ns=(before.st_atime_ns, before.st_mtime_ns))
    there.replace(file)
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def element(name: str, place: tuple[int, int], value: float | None = None) -> Callable[[Path], None]:
    """Return a function of a file that adds 1 to an element, or sets it; the dataset's checksum is not updated."""

    def change(file: Path) -> None:
        with h5py.File(file, "r+") as opened:
            opened[name][place] = opened[name][place] + 1 if value is None else value

    return change


def test_another_problem_or_other_inputs_are_refused(comm: Any, problem: Problem) -> None:
    """The error is one line, and the checkpoint stays; also if A and B are swapped, or sizes and times agree."""

    def refuses(said: str, **more: Any) -> None:
        refused(comm, ArgumentError, rf"{said}.*finish that one, or delete", problem.run, **more)
        assert any(x.endswith(".checkpoint") for x in problem.files())

    with ended_after(3):
        problem.run()
    refuses("whose alpha is 1.0 and not 2.0", alpha=2)
    refuses("whose sums is float64 and not float32", accumulate_dtype="float32")
    problem.B += 1
    problem.write()
    refuses(r"the file of .*x\.h5:a has changed since .*out\.h5\.c\.checkpoint was saved")
    assert not problem.out.exists()

    problem.A, problem.B, other = (elements((M, M), "d", seed) for seed in range(3))
    write(comm, problem.path, a=(problem.A, {}), b=(problem.B, {}), other=(other, {}))
    problem.out = problem.out.with_name("others.h5")
    with ended_after(2):
        problem.run()
    for names in (("other", "b"), ("a", "other"), ("b", "a")):
        refuses("whose [AB] is x.h5:/. and not x.h5:/", names=names)
    problem.run()
    assert problem.is_right()


@pytest.mark.parametrize(("little", "how"), [(False, "another inode"), (True, "in place")])
def test_inputs_that_change_and_keep_their_times(
    comm: Any, grid: Any, problem: Problem, how: str, little: bool
) -> None:
    """A changed A, B or C on entry is noticed by the change time (ctime) of its file, which programs cannot set."""
    path = problem.out = problem.path
    inputs = {"a": problem.A, "b": problem.B, "c": problem.C}
    for name in inputs:
        for other, y in inputs.items():
            hdf5.save(path, other, DistMatrix.from_global(y, grid=grid), overwrite=True)
        with ended_after(2):
            problem.run(little, beta=2)
        by_rank_0(comm, partial(replaced, path, how, element(name, (0, 0))))
        with pytest.raises(ArgumentError, match=r"the file of .*x\.h5:a has changed since"):
            problem.run(little, beta=2)
        problem.forget()


def test_changed_attributes_of_files_are_noticed(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    """After chmod, another hard link or a copy the job is refused; in a renamed folder it resumes."""
    here, there = shared_tmp_path / "here", shared_tmp_path / "there"
    by_rank_0(comm, here.mkdir)
    problem = Problem(grid, here)
    touches: dict[str, Callable[[], object]] = {
        "mode": lambda: problem.path.chmod(0o600),
        "link": lambda: os.link(problem.path, shared_tmp_path / "second.h5"),
        "copy": lambda: replaced(problem.path, "another inode"),
    }
    for touch in touches.values():
        with ended_after(1):
            problem.run(little=True)
        by_rank_0(comm, touch)
        refused(comm, ArgumentError, r"the file of .*x\.h5:a has changed since", problem.run, little=True)
        problem.forget()
    with ended_after(2):
        problem.run(little=True)
    by_rank_0(comm, lambda: here.rename(there))
    problem.path, problem.out = there / "x.h5", there / "out.h5"
    problem.run(little=True)
    assert problem.begun[0].done == 2 and problem.is_right()


def test_a_file_that_is_only_touched_while_the_job_runs(comm: Any, problem: Problem) -> None:
    """If only the change time of an input changes, the job reads it again at the end, and succeeds."""

    def meddle(done: int, total: int) -> None:
        if comm.rank == 0 and done == 1:
            problem.path.chmod(0o644)

    problem.run(little=True, progress=meddle)
    assert problem.is_right()


@pytest.mark.parametrize(("when", "how"), [(EACH_STEP, "in place"), (None, "in place"), (EACH_STEP, "another inode")])
def test_an_input_that_is_rewritten_while_the_job_runs(comm: Any, problem: Problem, when: Any, how: str) -> None:
    """If the rewritten part was read before, the job fails and writes nothing; else the product is right.

    The times of the file are restored.
    """
    for place, little in (((0, 0), False), ((0, 0), True), ((M - 1, K - 1), False), ((M - 1, K - 1), True)):
        problem.write()

        def meddle(done: int, total: int, place: Any = place) -> None:
            if comm.rank == 0 and done == 1:
                replaced(problem.path, how, element("a", place))
            comm.Barrier()

        try:
            problem.run(little, progress=meddle, when=when)
        except FileError as error:
            assert "was changed while it was read" in str(error) and not by_rank_0(comm, problem.out.exists)
        else:
            assert how == "in place" and place != (0, 0)
            problem.A = read(comm, problem.path, "a")
            assert problem.is_right()
            by_rank_0(comm, problem.out.unlink)
        problem.forget()
