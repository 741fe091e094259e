"""Products that go on where an earlier job was ended: right, bit for bit on the same grid, and nobody's work lost."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from flips import changed_after_the_product, larger
from problems import DTYPES, gemm_error, grid_shapes, op
from stored_files import STORAGE, by_rank_0, elements, read, refused, write
from tiers import everything, in_turn, square_grid

from pdgemm import DistMatrix, ProcessGrid
from pdgemm.errors import ArgumentError, FileError, MemoryLimitError
from pdgemm.io import generations, hdf5
from pdgemm.io.source import source
from pdgemm.io.streamed import checkpoints
from pdgemm.io.streamed.checkpoints import Checkpoints, When
from pdgemm.io.streamed.files_product import FilesProduct
from pdgemm.io.streamed.unfinished import Complete, OutputPlace, place_of
from pdgemm.support import files

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("small")]
TOLERANCE, WHEN = 3 * 8**0.5, When(0)
M, N, K = 83, 61, 97


class Ended(Exception):
    """The job is over."""


@pytest.fixture
def after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Let jobs end after so many checkpoints."""
    save, saved = Checkpoints.save, itertools.count(1)

    def end(self: Any, *arguments: Any) -> None:
        save(self, *arguments)
        if next(saved) == limit[0]:
            raise Ended

    limit: list[int | None] = [None]
    monkeypatch.setattr(Checkpoints, "save", end)

    def set_limit(number: int | None) -> None:
        nonlocal saved
        limit[0], saved = number, itertools.count(1)

    return set_limit


def product(
    grid: Any, path: Path, memory: int | None, alpha: Any = 1, beta: Any = 0, ops: str = "NN", **more: Any
) -> Any:
    a, b = (source(grid, name.upper(), (str(path), name), None, letter) for name, letter in zip("ab", ops))
    entry = source(grid, "C on entry", (str(path), "c")) if beta else None
    return FilesProduct(grid, alpha, a, b, beta, entry, memory, most_flops=2e5, **more)


def enough(grid: Any, path: Path, share: float = 0.3, **more: Any) -> int:
    """Memory for a share of A, B and C, beside what a product must have."""
    with pytest.raises(MemoryLimitError) as raised:
        product(grid, path, 1, **more)
    least = int(str(raised.value).split("(")[-1].split()[0])
    return int(1.2 * least + share * 8 * (M * K + K * N + M * N) / grid.size)


def beside(comm: Any, path: Path) -> list[str]:
    """What there is beside the file of A, B and C."""
    names: list[str] = by_rank_0(comm, lambda: sorted({x.name for x in path.parent.iterdir()} - {path.name}))
    return names


class Problem:
    """A file of A, B and C, and products of them to a dataset of another file."""

    def __init__(self, grid: Any, folder: Path, dtype: str = "d") -> None:
        self.grid, self.comm, self.path, self.out = grid, grid.comm, folder / "x.h5", folder / "out.h5"
        self.A, self.B, self.C = (elements(x, dtype, at) for at, x in enumerate(((M, K), (K, N), (M, N)), 1))
        self.write()

    def write(self) -> None:
        write(self.comm, self.path, a=(self.A, {}), b=(self.B, {}), c=(self.C, {}))

    def run(self, little: bool = False, when: Any = WHEN, **more: Any) -> Any:
        """little : is there memory for a third of the matrices alone?"""
        how = {key: more.pop(key) for key in ("begun", "progress", "seed") if key in more}
        made = product(self.grid, self.path, enough(self.grid, self.path, **more) if little else None, **more)
        return made.run((str(self.out), "c"), when=when, **how)

    def is_right(self, beta: float = 0) -> bool:
        found = read(self.comm, self.out, "c")
        return gemm_error(found, 1, self.A, self.B, beta, self.C) <= TOLERANCE


@pytest.fixture
def problem(grid: Any, shared_tmp_path: Path) -> Problem:
    return Problem(grid, shared_tmp_path)


def replaced(file: Path, how: str, change: Any) -> None:
    """Change a file, or a copy that takes its place, and put its times back, as cp -p, tar and rsync -t do."""
    before = file.stat()
    there = file if how == "in place" else file.with_name("copy.h5")
    if there != file:
        shutil.copy2(file, there)
    change(there)
    os.utime(there, ns=(before.st_atime_ns, before.st_mtime_ns))
    there.replace(file)
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def added(number: float, name: str, *place: int) -> Any:
    """Add to an element, and leave the checksum that the dataset carries."""

    def change(file: Path) -> None:
        with h5py.File(file, "r+") as opened:
            opened[name][place] += number

    return change


@square_grid
@pytest.mark.parametrize(("case", "dtype"), in_turn(range(6) if everything() else (0, 1, 2, 3), DTYPES))
def test_on_every_grid(comm: Any, shared_tmp_path: Path, after: Any, dtype: str, case: int) -> None:
    """Each job on another grid and with other memory, less too; the last reads and writes what is left."""
    path, shapes = shared_tmp_path / "x.h5", grid_shapes(comm.size)
    opa, opb, of_a = "NTC"[case % 3], "NTN"[case // 2], STORAGE[case % 3]
    beta = (0, -2.0)[case % 2]
    A, B, C0 = elements((M, K), dtype, 1), elements((K, N), dtype, 2), elements((M, N), dtype, 3)
    ends = [*enumerate(((1, 1), (3, 2), (2, 7), (9, 1)))]  # after so many checkpoints
    for at, counts in ends if everything() else ends[case % 4 : case % 4 + 1]:
        write(comm, path, a=(op(A, opa), of_a), b=(op(B, opb), {}), c=(C0, {}))
        more: dict[str, Any] = {"beta": beta, "ops": opa + opb}
        for number, count in enumerate((*counts, None)):
            with ProcessGrid(comm, shapes[(at + number) % len(shapes)]) as grid:
                share = (0.0, 0.4, 0.3, 0.2)[(case + at + number) % 4]
                memory, when = enough(grid, path, share, **more) if share else None, When(0 if count else 1e9)
                after(count)
                try:
                    try:
                        made = product(grid, path, memory, 1.5, **more)
                        report, residual, wrote = made.run((str(path), "c"), when=when, seed=1)
                    except MemoryLimitError as small:  # the job before read whole chunks
                        made = product(grid, path, int(str(small).split("(")[-1].split()[0]), 1.5, **more)
                        report, residual, wrote = made.run((str(path), "c"), when=when, seed=1)
                    break
                except Ended:
                    assert np.array_equal(read(comm, path, "c"), C0)
                    assert "x.h5.c.checkpoint" in beside(comm, path)
        assert residual.passed and wrote.checksum
        assert gemm_error(read(comm, path, "c"), 1.5, A, B, beta, C0) <= TOLERANCE, (case, at)
        assert (report.bytes_read, report.bytes_written) == (report.plan["bytes_read"], report.plan["bytes_written"])
        assert report.plan["bytes_per_rank"] <= report.plan["memory"]
        assert beside(comm, path) == []


def test_a_job_that_goes_on_repeats_products(
    comm: Any, problem: Problem, after: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit flips before and after the checkpoint from which it goes on; the result is that of an undisturbed job."""
    results = []
    for flips in (False, True):
        for count in (2, None):
            with monkeypatch.context() as patch:
                if flips:
                    changed_after_the_product(patch, larger, after=2)
                after(count)
                with nullcontext() if count is None else pytest.raises(Ended):
                    report, _, _ = problem.run(little=True, when=When(0 if count else 1e9), protect="repair")
        assert report.checks.repeats == flips and report.as_predicted
        results.append(read(comm, problem.out, "c"))
    assert np.array_equal(*results) and problem.is_right()


@pytest.mark.parametrize(("share", "dtype"), in_turn([0.5, None, 0.25], DTYPES))
def test_the_result_is_that_of_an_undisturbed_job(
    comm: Any, grid: Any, shared_tmp_path: Path, after: Any, dtype: str, share: float | None
) -> None:
    """Bit for bit on the same grid, and no step is done twice."""
    problem = Problem(grid, shared_tmp_path, dtype)
    path = problem.out = problem.path

    def run(when: Any) -> int:
        """How many steps it takes."""
        memory = None if share is None else enough(grid, path, share, beta=2)
        done: list[int] = []
        with suppress(Ended):
            product(grid, path, memory, beta=2).run((str(path), "c"), when=when, progress=lambda *x: done.append(x[0]))
        return len(done)

    steps, undisturbed = run(None), read(comm, path, "c")
    for count in range(1, steps + 1) if everything() else {1, steps // 3, steps}:
        problem.write()
        after(count)
        first = run(WHEN)
        after(None)
        assert (first, run(When(1e9))) == (count, steps - count)
        assert np.array_equal(read(comm, path, "c"), undisturbed), count


def test_what_other_jobs_save_meanwhile_is_kept(comm: Any, problem: Problem, after: Any) -> None:
    """To the file of C: finished tiles are moved to a copy of what it holds now."""

    def add(name: str) -> None:
        with h5py.File(problem.out, "a") as file:
            file[name] = np.arange(9.0)

    for count, name in ((2, "one"), (2, "two"), (None, "three")):
        after(count)
        by_rank_0(comm, lambda name=name: add(name))
        with nullcontext() if count is None else pytest.raises(Ended):
            problem.run(little=True)
        assert (beside(comm, problem.path) == ["out.h5"]) == (count is None)
    assert problem.is_right()
    for name in ("one", "two", "three"):
        assert read(comm, problem.out, name)[8] == 8


def test_another_problem_or_other_inputs_are_refused(
    comm: Any, grid: Any, problem: Problem, shared_tmp_path: Path, after: Any
) -> None:
    """In one line, and the checkpoint stays; whatever sizes and times files have, and A and B exchanged, too."""

    def refuses(said: str, call: Any, *arguments: Any, **more: Any) -> None:
        refused(comm, ArgumentError, rf"{said}.*finish that one, or delete", call, *arguments, **more)
        assert any(x.endswith(".checkpoint") for x in beside(comm, problem.path))

    after(3)
    with pytest.raises(Ended):
        problem.run()
    refuses("whose alpha is 1.0 and not 2.0", problem.run, alpha=2)
    refuses("whose sums is float64 and not float32", problem.run, accumulate_dtype="float32")
    problem.B += 1
    problem.write()
    refuses(r"x\.h5:b is not what it was when .*out\.h5\.c\.checkpoint was saved", problem.run)
    assert not problem.out.exists()

    path, X = problem.path, [elements((M, M), "d", seed) for seed in range(3)]
    write(comm, path, a=(X[0], {}), b=(X[1], {}), other=(X[2], {}))

    def run(a: str, b: str) -> Any:
        of = [source(grid, what, (str(path), name), None) for what, name in (("A", a), ("B", b))]
        out = str(shared_tmp_path / "others.h5"), "c"
        return FilesProduct(grid, 1, *of, 0, None, None, most_flops=2e5).run(out, when=WHEN)

    after(2)
    with pytest.raises(Ended):
        run("a", "b")
    after(None)
    for names in (("other", "b"), ("a", "other"), ("b", "a")):
        refuses("is not what it was", run, *names)
    run("a", "b")
    assert gemm_error(read(comm, shared_tmp_path / "others.h5", "c"), 1, X[0], X[1]) <= TOLERANCE


@pytest.mark.parametrize(("little", "how"), [(False, "another inode"), (True, "in place")])
def test_inputs_that_change_and_keep_their_times(
    comm: Any, grid: Any, problem: Problem, shared_tmp_path: Path, after: Any, how: str, little: bool
) -> None:
    """What was read of A, B or C on entry must be what it was; what was not read yet may be new, and is right."""
    path = problem.out = problem.path
    inputs = {"a": problem.A, "b": problem.B, "c": problem.C}
    for name in inputs:
        for other, x in inputs.items():
            hdf5.save(path, other, DistMatrix.from_global(x, grid=grid), overwrite=True)
        after(2)
        with pytest.raises(Ended):
            problem.run(little, beta=2)
        by_rank_0(comm, lambda name=name: replaced(path, how, added(1, name, 0, 0)))
        with pytest.raises(ArgumentError, match=rf"x\.h5:{name} is not what it was when .*checkpoint was saved"):
            problem.run(little, beta=2)
        by_rank_0(comm, lambda name=name: replaced(path, how, stored(name, inputs[name])))
        after(1)
        with pytest.raises(Ended):  # it is again what it was
            problem.run(little, beta=2)
        by_rank_0(comm, lambda: [x.unlink() for x in shared_tmp_path.glob("*checkpoint*")])
    after(1)  # the last panel of A was not read yet: the product is that of the new one
    with pytest.raises(Ended):
        problem.run(little, beta=2)
    by_rank_0(comm, lambda: replaced(path, how, added(1, "a", M - 1, K - 1)))
    begun: list[Any] = []
    after(None)
    problem.run(little, beta=2, begun=begun.append)
    problem.A[M - 1, K - 1] += 1
    assert begun[0].share > 0 and problem.is_right(2) and beside(comm, path) == []


def stored(name: str, x: np.ndarray) -> Any:
    def change(file: Path) -> None:
        with h5py.File(file, "r+") as opened:
            opened[name][0, 0] = x[0, 0]

    return change


def test_what_only_touches_the_files_costs_no_progress(
    comm: Any, grid: Any, shared_tmp_path: Path, after: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """chmod, another hard link, a copy, a new name, a moved folder; and while the product runs."""
    by_rank_0(comm, (shared_tmp_path / "here").mkdir)
    problem = Problem(grid, shared_tmp_path / "here")
    there = shared_tmp_path / "there"

    def moved_folder() -> None:
        problem.path.parent.rename(there)
        (there / "x.h5").chmod(0o640)

    touches: dict[str, Any] = {
        "nothing": lambda: None,
        "mode": lambda: problem.path.chmod(0o600),
        "link": lambda: os.link(problem.path, shared_tmp_path / "second.h5"),
        "copy": lambda: replaced(problem.path, "another inode", lambda file: None),
        "folder": moved_folder,
    }
    begun: list[Any] = []
    after(1)
    with pytest.raises(Ended):
        problem.run(little=True)
    for number, (what, touch) in enumerate(touches.items(), 1):
        by_rank_0(comm, touch)
        if what == "folder":
            problem.path, problem.out = there / "x.h5", there / "out.h5"
        capfd.readouterr()
        after(1)
        with pytest.raises(Ended):
            problem.run(little=True, begun=begun.append)
        said = capfd.readouterr().err
        assert begun[-1].saved.token.generation == number
        assert comm.rank or said.count("is read again and compared") == (0 if what == "nothing" else 2), what

    def meddle(done: int, total: int) -> None:
        if comm.rank == 0 and done == 1:
            problem.path.chmod(0o644)

    after(None)
    problem.run(little=True, progress=meddle)
    assert problem.is_right()


@pytest.mark.parametrize(("when", "how"), [(WHEN, "in place"), (None, "in place"), (WHEN, "another inode")])
def test_an_input_that_is_rewritten_while_the_job_runs(
    comm: Any, problem: Problem, shared_tmp_path: Path, after: Any, when: Any, how: str
) -> None:
    """And gets its times back: an error, and nothing is written; or the right product, if none of it was read yet."""
    for place, little in (((0, 0), False), ((0, 0), True), ((M - 1, K - 1), False), ((M - 1, K - 1), True)):
        problem.write()

        def meddle(done: int, total: int, place: Any = place) -> None:
            if comm.rank == 0 and done == 1:
                replaced(problem.path, how, added(1, "a", *place))
            comm.Barrier()

        try:
            problem.run(little, progress=meddle, when=when)
        except FileError as error:
            assert "was changed while it was read" in str(error) and not by_rank_0(comm, problem.out.exists)
        else:
            assert how == "in place" and place != (0, 0)
            A = read(comm, problem.path, "a")
            assert gemm_error(read(comm, problem.out, "c"), 1, A, problem.B) <= TOLERANCE
            by_rank_0(comm, problem.out.unlink)
        by_rank_0(comm, lambda: [x.unlink() for x in shared_tmp_path.glob("*checkpoint*")])


def test_outputs_with_like_names_have_checkpoints_of_their_own(
    comm: Any, grid: Any, problem: Problem, shared_tmp_path: Path, after: Any
) -> None:
    """No job goes on with another's, or removes it."""
    path, long = problem.path, "n" * 240 + ".h5"
    outputs = [("c.h5", "/q/z"), (long, "/z"), ("c.h5", "q.z"), ("c.h5", "q%2Fz"), ("c.h5", "/x.z"), ("c.h5.x", "/z")]
    outputs += [(long, "/y"), *(("c.h5", name) for name in ("z" * 300 + "1", "z" * 300 + "2", "é" * 120, "\x01\x7f"))]
    places = [place_of(str(shared_tmp_path / file), name) for file, name in outputs]
    assert len({x.checkpoint for x in places}) == len(outputs)
    assert place_of(str(path), "//q/./z/").checkpoint == place_of(str(path), "q/z").checkpoint
    assert place_of("c.h5", "/z").checkpoint.name == "c.h5.z.checkpoint"
    if comm.rank == 0:  # the job scripts look for the same files
        script = (Path(__file__).parents[2] / "slurm" / "job.sh").read_text()
        function = script[script.index("checkpoint_of() {") :]
        function = function[: function.index("\n}\n") + 3] + 'for x; do checkpoint_of "${x%%|*}" "${x#*|}"; done'
        words = [f"{shared_tmp_path / file}|{name}" for file, name in outputs[:-1]]
        said = subprocess.run(["bash", "-ec", function, "-", *words], capture_output=True, text=True, check=True)
        assert said.stdout.splitlines() == [str(x.checkpoint) for x in places[:-1]]
    outputs = outputs[:3]
    for count, file_and_name in ((count, x) for count in (2, 1, None) for x in outputs):
        after(count)
        begun: list[Any] = []
        out = str(shared_tmp_path / file_and_name[0]), file_and_name[1]
        with nullcontext() if count is None else pytest.raises(Ended):
            product(grid, path, None).run(out, when=WHEN, begun=begun.append)
        assert begun[0] is None if count == 2 else begun[0].saved.token.generation == (2 if count else 3)
        if count is None:
            assert gemm_error(read(comm, Path(out[0]), out[1]), 1, problem.A, problem.B) <= TOLERANCE
    assert set(beside(comm, path)) == {file for file, _ in outputs}


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("tiles", r"out\.h5\.c\.checkpoint-tiles: No such file"),
        ("folder", r"checkpoint-tiles: No such file .*there is no folder .*/out: was it moved or removed\?"),
    ],
)
def test_a_missing_file_is_named(
    comm: Any, problem: Problem, shared_tmp_path: Path, after: Any, what: str, said: str
) -> None:
    """The tiles or the folder that somebody has moved while the job runs, and not the output."""
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
    elif what == "keys":  # of another version
        attrs = generations.inspect(first).attrs
        left = json.loads(attrs["product"])
        del left["parts"]
        generations.create(first, generations.Token("job", 3), attrs | {"product": json.dumps(left)}, [])
    elif what in ("job", "no UTF-8", "bias"):
        file, text, bit = {
            "job": (first, b"pdgemm_job", 3),  # it is not an attribute of this name
            "no UTF-8": (first, b"pdgemm_checksum", 7),
            "bias": (tiles, b"\x40\x00\x34\x0b\x00\x34\xff\x03", 41),  # of the exponents of float64
        }[what]
        data = bytearray(file.read_bytes())
        data[data.find(text) + bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
    else:
        added(1, "c" if what == "tiles" else "sums", 1, 1)(tiles if what == "tiles" else first)


@pytest.mark.parametrize("what", ["checkpoint", "tiles", "sums", "no tiles", "job", "no UTF-8", "keys", "bias"])
def test_what_is_damaged_is_computed_again(
    comm: Any, grid: Any, problem: Problem, after: Any, capfd: pytest.CaptureFixture[str], what: str
) -> None:
    steps = product(grid, problem.path, enough(grid, problem.path)).tiling
    of_a_tile = len(steps.cuts[2])
    assert of_a_tile > 1 and steps.count > 2 * of_a_tile
    after(of_a_tile + 1)  # a tile is finished, and another one is not
    with pytest.raises(Ended):
        problem.run(little=True)
    first = problem.out.with_name("out.h5.c.checkpoint")
    by_rank_0(comm, lambda: damaged(what, first, first.with_name(f"{first.name}-tiles")))
    after(None)
    begun: list[Any] = []
    capfd.readouterr()
    problem.run(little=True, when=When(1e9), begun=begun.append)
    said = capfd.readouterr().err
    assert begun == [None]
    assert comm.rank or ("begins again" in said and said.count("\n") == 1)
    assert problem.is_right() and beside(comm, problem.path) == ["out.h5"]


def test_a_product_is_not_applied_twice(
    comm: Any, problem: Problem, after: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C := A B + 2 C in place, by a job that was killed when it had replaced C, and not yet removed its checkpoint."""
    problem.out, remove = problem.path, OutputPlace.remove

    def killed(place: OutputPlace) -> None:
        if place.checkpoint.exists():
            raise OSError
        remove(place)

    with monkeypatch.context() as patch:
        patch.setattr(OutputPlace, "remove", killed)
        with pytest.raises(FileError):
            problem.run(beta=2)
    assert problem.is_right(2) and "x.h5.c.checkpoint" in beside(comm, problem.path)
    with pytest.raises(Complete):
        problem.run(beta=2)
    assert problem.is_right(2) and beside(comm, problem.path) == []


def test_a_full_disk_keeps_the_last_checkpoint_and_the_product(
    comm: Any, problem: Problem, after: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    saves, save, reserve = itertools.count(1), hdf5.save_all, files.reserve

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def save_all(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(files, "reserve", reserve if next(saves) < 3 else full)
        return save(*arguments, **options)

    monkeypatch.setattr(hdf5, "save_all", save_all)
    after(5)
    with pytest.raises(Ended):
        problem.run(little=True)
    said = capfd.readouterr().err
    assert comm.rank or said.count("no checkpoint was saved, and the product goes on: ") == 3
    begun: list[Any] = []
    after(None)
    monkeypatch.setattr(files, "reserve", reserve)
    report, _, _ = problem.run(little=True, begun=begun.append)
    assert begun[0].saved.token.generation == 2 and report.saves == 0 and problem.is_right()


def test_how_often_checkpoints_are_saved(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the interval; with --mtbf by Young's formula, as soon as a save was measured."""
    at, save, saved = 0.0, hdf5.save_all, []

    def perf_counter() -> float:
        nonlocal at
        at += 1.0  # a second passes at each look
        return at

    def save_all(*arguments: Any, **options: Any) -> Any:
        nonlocal at
        at += 100.0 if options["attrs"] else 0  # it takes so long
        saved.append(json.loads(options["attrs"]["product"])["share"])
        return save(*arguments, **options)

    steps = product(problem.grid, problem.path, enough(problem.grid, problem.path)).tiling.count
    monkeypatch.setattr(hdf5, "save_all", save_all)
    monkeypatch.setattr(checkpoints, "perf_counter", perf_counter)
    for of, expected in (((1e9, None), 0), ((3, None), steps // 3), ((3, 1e9), 1), ((3, 0.045), steps // 3)):
        saved.clear()
        report, _, _ = problem.run(little=True, when=When(*of))
        assert report.saves == len(saved) and abs(len(saved) - expected) <= 1 + expected // 2, (of, saved, steps)


def test_an_obstacle_is_no_damage(comm: Any, problem: Problem, after: Any) -> None:
    """A checkpoint that another program has locked for a while is not thrown away; nor are files of other names."""
    saved = problem.out.with_name("out.h5.c.checkpoint")
    mine, tiles = (saved.with_name(f"{saved.name}-{x}") for x in ("backup", "tiles"))
    opened: list[Any] = []
    after(3)
    with pytest.raises(Ended):
        problem.run(little=True)
    after(None)
    by_rank_0(comm, lambda: mine.write_bytes(b"mine"))
    for file in (saved, tiles):
        by_rank_0(comm, lambda file=file: opened.append(os.open(file, os.O_RDWR)))
        by_rank_0(comm, lambda: fcntl.flock(opened[0], fcntl.LOCK_EX))
        refused(comm, FileError, "unable to lock file", problem.run, little=True)
        by_rank_0(comm, lambda: os.close(opened.pop()))
    begun: list[Any] = []
    problem.run(little=True, begun=begun.append)
    assert begun[0].saved.token.generation == 3
    assert beside(comm, problem.path) == ["out.h5", mine.name]
