"""Products that resume after an earlier job ended: right results, equal bits on the same grid, no lost results."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from checkpointed import EACH_STEP, NEVER, Problem, ended_after, ending_after
from flips import changed_after_the_product, larger
from problems import DTYPES, grid_shapes, op
from stored_files import STORAGE, by_rank_0, read, refused, write
from tiers import everything, in_turn, square_grid

from pdgemm import ProcessGrid
from pdgemm.errors import FileError
from pdgemm.io import generations, hdf5
from pdgemm.io.streamed import checkpoints
from pdgemm.io.streamed.checkpoints import When
from pdgemm.io.streamed.unfinished import place_of
from pdgemm.support import files

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("small")]


@square_grid
@pytest.mark.parametrize(("case", "dtype"), in_turn(range(6) if everything() else (0, 1, 2, 3), DTYPES))
def test_on_every_grid(comm: Any, grid: Any, shared_tmp_path: Path, dtype: str, case: int) -> None:
    """Each job runs on another grid, with the tiles of the first job; the last completes the product."""
    problem, shapes = Problem(grid, shared_tmp_path, dtype), grid_shapes(comm.size)
    path = problem.out = problem.path
    opa, opb, of_a = "NTC"[case % 3], "NTN"[case // 2], STORAGE[case % 3]
    beta = (0, -2.0)[case % 2]
    more: dict[str, Any] = {"alpha": 1.5, "beta": beta, "ops": opa + opb}
    ends = [*enumerate(((1, 1), (3, 2), (2, 7), (9, 1)))]  # jobs end after so many checkpoints
    for at, counts in ends if everything() else ends[case % 4 : case % 4 + 1]:
        write(comm, path, a=(op(problem.A, opa), of_a), b=(op(problem.B, opb), {}), c=(problem.C, {}))
        for number, count in enumerate((*counts, None)):
            with ProcessGrid(comm, shapes[(at + number) % len(shapes)]) as problem.grid, ending_after(count):
                share, when = (0.0, 0.4, 0.3, 0.2)[(case + at) % 4], EACH_STEP if count else NEVER
                memory = problem.enough(share, **more) * (2 if number else 1) if share else None
                report, residual, wrote = problem.run(when=when, memory=memory, seed=1, **more)
                break
            assert (problem.begun[0] is None) == (number == 0)
            assert np.array_equal(read(comm, path, "c"), problem.C)
            assert "x.h5.c.checkpoint" in problem.files()
        assert residual.passed and wrote.checksum
        assert problem.is_right(beta, 1.5), (case, at)
        assert (report.bytes_read, report.bytes_written) == (report.plan["bytes_read"], report.plan["bytes_written"])
        assert report.plan["bytes_per_rank"] <= report.plan["memory"]
        assert problem.files() == ["x.h5"]


def test_a_resumed_job_repeats_wrong_products(comm: Any, problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong products before and after the resumed checkpoint are repeated; the result has the bits of a correct job."""
    results = []
    for flips in (False, True):
        for count in (2, None):
            with monkeypatch.context() as patch, ended_after(count):
                if flips:
                    changed_after_the_product(patch, larger, after=2)
                report, _, _ = problem.run(little=True, when=EACH_STEP if count else NEVER, protect="repair")
        assert report.checks.repeats == flips and report.as_predicted
        results.append(read(comm, problem.out, "c"))
    assert np.array_equal(*results) and problem.is_right()


@pytest.mark.parametrize(("share", "dtype"), in_turn([0.5, None, 0.25], DTYPES))
def test_the_result_is_that_of_an_undisturbed_job(
    comm: Any, grid: Any, shared_tmp_path: Path, dtype: str, share: float | None
) -> None:
    """The result has the same bits on the same grid, and no step is done twice."""
    problem = Problem(grid, shared_tmp_path, dtype)
    path = problem.out = problem.path

    def run(when: Any, count: int | None = None) -> int:
        """Run the product, ended after `count` steps; return the number of steps done."""
        done: list[int] = []
        memory = None if share is None else problem.enough(share, beta=2)
        with ending_after(count):
            problem.run(when=when, beta=2, memory=memory, progress=lambda *x: done.append(x[0]))
        return len(done)

    steps, undisturbed = run(None), read(comm, path, "c")
    for count in range(1, steps + 1) if everything() else {1, steps // 3, steps}:
        problem.write()
        assert (run(EACH_STEP, count), run(NEVER)) == (count, steps - count)
        assert np.array_equal(read(comm, path, "c"), undisturbed), count


def test_datasets_that_other_jobs_save_meanwhile_are_kept(
    comm: Any, problem: Problem, capfd: pytest.CaptureFixture[str]
) -> None:
    """If other datasets in C's file have changed since the checkpoint, the product starts again and keeps them."""

    def add(name: str) -> None:
        with h5py.File(problem.out, "a") as file:
            file[name] = np.arange(9.0)

    for count, name in ((2, "one"), (2, "two"), (None, "three")):
        by_rank_0(comm, lambda name=name: add(name))
        capfd.readouterr()
        with ended_after(count):
            problem.run(little=True)
        said = capfd.readouterr().err
        assert problem.begun == [None] and (problem.files() == ["out.h5", "x.h5"]) == (count is None)
        again = "out.h5 has changed since .*checkpoint was saved: the product begins again"
        assert comm.rank or bool(re.search(again, said)) == (name != "one")
    assert problem.is_right()
    for name in ("one", "two", "three"):
        assert read(comm, problem.out, name)[8] == 8


def test_outputs_with_similar_names_have_separate_checkpoints(
    comm: Any, problem: Problem, shared_tmp_path: Path
) -> None:
    """No job resumes or removes the checkpoint of another output."""
    path, long = problem.path, "n" * 240 + ".h5"
    outputs = [("c.h5", "/q/z"), (long, "/z"), ("c.h5", "q.z"), ("c.h5", "q%2Fz"), ("c.h5", "/x.z"), ("c.h5.x", "/z")]
    outputs += [(long, "/y"), *(("c.h5", name) for name in ("z" * 300 + "1", "z" * 300 + "2", "é" * 120, "\x01\x7f"))]
    places = [place_of(str(shared_tmp_path / file), name) for file, name in outputs]
    assert len({x.checkpoint for x in places}) == len(outputs)
    assert place_of(str(path), "//q/./z/").checkpoint == place_of(str(path), "q/z").checkpoint
    assert place_of("c.h5", "/z").checkpoint.name == "c.h5.z.checkpoint"
    if comm.rank == 0:  # job scripts compute the same names of checkpoints
        script = (Path(__file__).parents[2] / "slurm" / "job.sh").read_text()
        function = script[script.index("checkpoint_of() {") :]
        function = function[: function.index("\n}\n") + 3] + 'for x; do checkpoint_of "${x%%|*}" "${x#*|}"; done'
        words = [f"{shared_tmp_path / file}|{name}" for file, name in outputs[:-1]]
        said = subprocess.run(["bash", "-ec", function, "-", *words], capture_output=True, text=True, check=True)
        assert said.stdout.splitlines() == [str(x.checkpoint) for x in places[:-1]]
    outputs = [outputs[0], outputs[1], outputs[5]]
    for count, (file, name) in itertools.product((2, 1, None), outputs):
        problem.out, problem.name = shared_tmp_path / file, name
        with ended_after(count):
            problem.run()
        (left,) = problem.begun
        assert left is None if count == 2 else left.saved.token.generation == (2 if count else 3)
        assert count or problem.is_right()
    assert {*problem.files()} == {"x.h5", *(file for file, _ in outputs)}


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("tiles", r"out\.h5\.c\.checkpoint-tiles: No such file"),
        ("folder", r"checkpoint-tiles: No such file .*the folder .*/out does not exist: was it moved or removed\?"),
    ],
)
def test_a_missing_file_is_named(comm: Any, problem: Problem, shared_tmp_path: Path, what: str, said: str) -> None:
    """If the tiles or the folder are moved while the job runs, the error names them, not the output."""
    folder = shared_tmp_path / "out"
    problem.out = folder / "out.h5"
    by_rank_0(comm, folder.mkdir)

    def meddle(done: int, total: int) -> None:
        if comm.rank == 0 and done == 1:
            (folder / "out.h5.c.checkpoint-tiles").unlink() if what == "tiles" else folder.rename(f"{folder}.away")
        comm.Barrier()

    refused(comm, FileError, said, problem.run, progress=meddle)


def damaged(what: str, first: Path, tiles: Path) -> None:
    if what == "no tiles":
        tiles.unlink()
    elif what == "checkpoint":
        first.write_bytes(first.read_bytes()[:100])
    elif what == "keys":  # attributes of another version
        attrs = generations.inspect(first).attrs
        left = json.loads(attrs["product"])
        del left["counts"]
        generations.create(first, generations.Token("job", 3), attrs | {"product": json.dumps(left)}, [])
    elif what in ("job", "no UTF-8", "bias"):
        file, text, bit = {
            "job": (first, b"pdgemm_job", 3),  # a flip in the attribute's name or type
            "no UTF-8": (first, b"pdgemm_checksum", 7),
            "bias": (tiles, b"\x40\x00\x34\x0b\x00\x34\xff\x03", 41),  # in the exponent bias of the type float64
        }[what]
        data = bytearray(file.read_bytes())
        data[data.find(text) + bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
    else:  # an element; the checksum in the dataset is not updated
        with h5py.File(tiles if what == "tiles" else first, "r+") as opened:
            opened["c" if what == "tiles" else "sums"][1, 1] += 1


@pytest.mark.parametrize("what", ["checkpoint", "tiles", "sums", "no tiles", "job", "no UTF-8", "keys", "bias"])
def test_damaged_tiles_are_computed_again(
    comm: Any, problem: Problem, capfd: pytest.CaptureFixture[str], what: str
) -> None:
    steps = problem.product(problem.enough()).tiling
    of_a_tile = len(steps.cuts[2])
    assert of_a_tile > 1 and steps.count > 2 * of_a_tile
    with ended_after(of_a_tile + 1):  # the second tile is unfinished
        problem.run(little=True)
    first = problem.out.with_name("out.h5.c.checkpoint")
    by_rank_0(comm, lambda: damaged(what, first, first.with_name(f"{first.name}-tiles")))
    capfd.readouterr()
    problem.run(little=True, when=NEVER)
    said = capfd.readouterr().err
    assert problem.begun == [None]
    assert comm.rank or ("begins again" in said and said.count("\n") == 1)
    assert problem.is_right() and problem.files() == ["out.h5", "x.h5"]


def test_tiles_that_do_not_fit_the_memory_are_computed_again(
    comm: Any, problem: Problem, capfd: pytest.CaptureFixture[str]
) -> None:
    with ended_after(1):
        problem.run(memory=problem.enough(0.9))
    capfd.readouterr()
    problem.run(little=True)
    again = "the tiles of .*checkpoint do not fit the memory: the product begins again"
    assert problem.begun == [None] and (comm.rank or re.search(again, capfd.readouterr().err))
    assert problem.is_right() and problem.files() == ["out.h5", "x.h5"]


def test_a_product_is_not_applied_twice(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """C := A B + 2 C in place, killed after its checkpoint is removed and before C is replaced, starts again."""
    problem.out, replace = problem.path, files.rename

    def killed(old: Path, new: Path) -> None:
        if new == problem.path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        replace(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(files, "rename", killed)
        with pytest.raises(FileError):
            problem.run(beta=2)
    assert problem.files() == ["x.h5", "x.h5.c.checkpoint-tiles"]
    problem.run(beta=2)
    assert problem.begun == [None] and problem.is_right(2) and problem.files() == ["x.h5"]


def test_a_full_disk_keeps_the_last_checkpoint_and_the_product(
    comm: Any, problem: Problem, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    saves, save, reserve = itertools.count(1), hdf5.save_all, files.reserve

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def save_all(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(files, "reserve", reserve if next(saves) < 3 else full)
        return save(*arguments, **options)

    monkeypatch.setattr(hdf5, "save_all", save_all)
    with ended_after(5):
        problem.run(little=True)
    said = capfd.readouterr().err
    assert comm.rank or said.count("no checkpoint was saved, and the product continues: ") == 3
    monkeypatch.setattr(files, "reserve", reserve)
    report, _, _ = problem.run(little=True)
    assert problem.begun[0].saved.token.generation == 2 and report.saves == 0 and problem.is_right()


def test_how_often_checkpoints_are_saved(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each interval; with --mtbf, at intervals by Young's formula when the time of a save is known."""
    at, save, saved = 0.0, hdf5.save_all, []

    def perf_counter() -> float:
        nonlocal at
        at += 1.0  # each call advances the clock by a second
        return at

    def save_all(*arguments: Any, **options: Any) -> Any:
        nonlocal at
        at += 100.0 if options["attrs"] else 0  # a save takes 100 s
        saved.append(json.loads(options["attrs"]["product"])["share"])
        return save(*arguments, **options)

    steps = problem.product(problem.enough()).tiling.count
    monkeypatch.setattr(hdf5, "save_all", save_all)
    monkeypatch.setattr(checkpoints, "perf_counter", perf_counter)
    for of, expected in (((1e9, None), 0), ((3, None), steps // 3), ((3, 1e9), 1), ((3, 0.045), steps // 3)):
        saved.clear()
        report, _, _ = problem.run(little=True, when=When(*of))
        assert report.saves == len(saved) and abs(len(saved) - expected) <= 1 + expected // 2, (of, saved, steps)


def test_a_locked_checkpoint_is_not_discarded(comm: Any, problem: Problem) -> None:
    """A checkpoint that another program locks is not discarded; neither are files with similar names."""
    saved = problem.out.with_name("out.h5.c.checkpoint")
    mine, tiles = (saved.with_name(f"{saved.name}-{x}") for x in ("backup", "tiles"))
    opened: list[Any] = []
    with ended_after(3):
        problem.run(little=True)
    by_rank_0(comm, lambda: mine.write_bytes(b"mine"))
    for file in (saved, tiles):
        by_rank_0(comm, lambda file=file: opened.append(os.open(file, os.O_RDWR)))
        by_rank_0(comm, lambda: fcntl.flock(opened[0], fcntl.LOCK_EX))
        refused(comm, FileError, "unable to lock file", problem.run, little=True)
        by_rank_0(comm, lambda: os.close(opened.pop()))
    problem.run(little=True)
    assert problem.begun[0].saved.token.generation == 3
    assert problem.files() == ["out.h5", mine.name, "x.h5"]
