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
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from flips import changed_after_the_product, larger
from problems import DTYPES, gemm_error, grid_shapes, op
from stored_files import STORAGE, by_rank_0, elements, read, write
from tiers import everything, in_turn, square_grid

from pdgemm import DistMatrix, ProcessGrid
from pdgemm.errors import ArgumentError, FileError, MemoryLimitError
from pdgemm.io import generations, hdf5
from pdgemm.io.source import source
from pdgemm.io.streamed import checkpoints, files_product
from pdgemm.io.streamed.checkpoints import Checkpoints, When
from pdgemm.io.streamed.files_product import FilesProduct
from pdgemm.io.streamed.unfinished import Complete, OutputPlace, place_of
from pdgemm.support import files

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("small")]
TOLERANCE = 3 * 8**0.5
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


def when(every: float = 0, mtbf: float | None = None) -> Any:
    return When(every, mtbf)


def beside(comm: Any, path: Path) -> list[str]:
    """What there is beside the file of A, B and C."""
    names: list[str] = by_rank_0(comm, lambda: sorted({x.name for x in path.parent.iterdir()} - {path.name}))
    return names


@square_grid
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", range(6))
def test_on_every_grid(comm: Any, shared_tmp_path: Path, after: Any, dtype: str, case: int) -> None:
    """Each job on another grid and with other memory, less too; the last reads and writes what is left."""
    if not everything() and case % 4 != DTYPES.index(dtype):
        pytest.skip("with --all")
    path, shapes = shared_tmp_path / "x.h5", grid_shapes(comm.size)
    opa, opb, of_a = "NTC"[case % 3], "NTN"[case // 2], STORAGE[case % 3]
    beta = (0, -2.0)[case % 2]
    A, B, C0 = elements((M, K), dtype, 1), elements((K, N), dtype, 2), elements((M, N), dtype, 3)
    ends = [*enumerate(((1, 1), (3, 2), (2, 7), (9, 1)))]  # after so many checkpoints
    for at, counts in ends if everything() else ends[case % 2 :: 2]:
        write(comm, path, a=(op(A, opa), of_a), b=(op(B, opb), {}), c=(C0, {}))
        more: dict[str, Any] = {"beta": beta, "ops": opa + opb}
        for number, count in enumerate((*counts, None)):
            with ProcessGrid(comm, shapes[(at + number) % len(shapes)]) as grid:
                share = (0.0, 0.4, 0.3, 0.2)[(case + at + number) % 4]
                memory = enough(grid, path, share, **more) if share else None
                made = product(grid, path, memory, 1.5, **more)
                after(count)
                try:
                    try:
                        report, residual, wrote = made.run((str(path), "c"), when=when(0 if count else 1e9), seed=1)
                    except MemoryLimitError as small:  # the job before read whole chunks
                        made = product(grid, path, int(str(small).split("(")[-1].split()[0]), 1.5, **more)
                        report, residual, wrote = made.run((str(path), "c"), when=when(0 if count else 1e9), seed=1)
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
    comm: Any, shared_tmp_path: Path, after: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bit flips before and after the checkpoint from which it goes on; the result is that of an undisturbed job."""
    path = shared_tmp_path / "x.h5"
    A, B = elements((M, K), "float64", 1), elements((K, N), "float64", 2)
    results = []
    for flips in (False, True):
        write(comm, path, a=(A, {}), b=(B, {}))
        with ProcessGrid(comm) as grid:
            memory = enough(grid, path, protect="repair")
            for count in (2, None):
                with monkeypatch.context() as patch:
                    if flips:
                        changed_after_the_product(patch, larger, after=2)
                    made = product(grid, path, memory, protect="repair")
                    after(count)
                    try:
                        report, _, _ = made.run((str(path), "c"), when=when(0 if count else 1e9))
                    except Ended:
                        assert "x.h5.c.checkpoint" in beside(comm, path)
        assert report.checks.repeats == flips and report.as_predicted
        results.append(read(comm, path, "c"))
    assert np.array_equal(*results) and gemm_error(results[0], 1, A, B) <= TOLERANCE


@pytest.mark.parametrize(("dtype", "share"), in_turn(DTYPES, [0.5, None, 0.25]))
def test_the_result_is_that_of_an_undisturbed_job(
    comm: Any, shared_tmp_path: Path, after: Any, dtype: str, share: float | None
) -> None:
    """Bit for bit on the same grid, and no step is done twice."""
    path, A, B = shared_tmp_path / "x.h5", elements((M, K), dtype, 1), elements((K, N), dtype, 2)
    C0 = elements((M, N), dtype, 3)
    with ProcessGrid(comm) as grid:

        def run(every: Any) -> tuple[int, Any]:
            """How many steps it takes."""
            memory = None if share is None else enough(grid, path, share, beta=2)
            done: list[int] = []
            made = product(grid, path, memory, beta=2)
            try:
                report, _, _ = made.run((str(path), "c"), when=every, progress=lambda step, _: done.append(step))
            except Ended:
                report = None
            return len(done), report

        write(comm, path, a=(A, {}), b=(B, {}), c=(C0, {}))
        steps, _ = run(None)
        undisturbed = read(comm, path, "c")
        for count in range(1, steps + 1) if everything() else {1, steps // 3, steps}:
            write(comm, path, a=(A, {}), b=(B, {}), c=(C0, {}))
            after(count)
            first, _ = run(when())
            after(None)
            rest, _ = run(when(1e9))
            assert (first, rest) == (count, steps - count)
            assert np.array_equal(read(comm, path, "c"), undisturbed), count


def test_what_other_jobs_save_meanwhile_is_kept(comm: Any, shared_tmp_path: Path, after: Any) -> None:
    """To the file of C: finished tiles are moved to a copy of what it holds now."""
    path, A, B = shared_tmp_path / "x.h5", elements((M, K), "d", 1), elements((K, N), "d", 2)

    def add(name: str) -> None:
        with h5py.File(shared_tmp_path / "out.h5", "a") as file:
            file[name] = np.arange(9.0).reshape(3, 3)

    with ProcessGrid(comm) as grid:
        write(comm, path, a=(A, {}), b=(B, {}))
        for count, name in ((2, "one"), (2, "two"), (None, "three")):
            after(count)
            by_rank_0(comm, lambda name=name: add(name))
            try:
                product(grid, path, enough(grid, path)).run((str(shared_tmp_path / "out.h5"), "c"), when=when())
            except Ended:
                assert beside(comm, path) != ["out.h5"]
    assert beside(comm, path) == ["out.h5"]
    assert gemm_error(read(comm, shared_tmp_path / "out.h5", "c"), 1, A, B) <= TOLERANCE
    for name in ("one", "two", "three"):
        assert read(comm, shared_tmp_path / "out.h5", name)[2, 2] == 8


def test_another_problem_or_other_inputs_are_refused(comm: Any, shared_tmp_path: Path, after: Any) -> None:
    """In one line, and the checkpoint stays; a file that was only copied is the same."""
    path, A, B = shared_tmp_path / "x.h5", elements((M, K), "d", 1), elements((K, N), "d", 2)
    out = str(shared_tmp_path / "out.h5"), "c"

    def refused(said: str, **more: Any) -> None:
        with pytest.raises(ArgumentError, match=said) as raised:
            product(grid, path, None, **more).run(out, when=when())
        assert "\n" not in str(raised.value) and "finish that one, or delete" in str(raised.value)
        assert "out.h5.c.checkpoint" in beside(comm, path)

    def store(A: np.ndarray) -> None:
        """With a checksum."""
        write(comm, path, b=(B, {}))
        hdf5.save(path, "a", DistMatrix.from_global(A, grid=grid))

    with ProcessGrid(comm) as grid:
        from pdgemm import DistMatrix

        store(A)
        after(3)
        with pytest.raises(Ended):
            product(grid, path, None).run(out, when=when())
        refused("whose alpha is 1.0 and not 2.0", alpha=2)
        refused("whose sums is float64 and not float32", accumulate_dtype="float32")
        store(A)  # written again: the same
        write(comm, path, a=(A, {}), b=(B + 1, {}))
        refused(r"x\.h5:b is not what it was when .*out\.h5\.c\.checkpoint was saved")
    assert not (shared_tmp_path / "out.h5").exists()


def test_inputs_with_checksums_may_be_copied_and_not_changed(comm: Any, shared_tmp_path: Path, after: Any) -> None:
    path, A = shared_tmp_path / "x.h5", elements((M, M), "d", 1)
    out = str(shared_tmp_path / "out.h5"), "c"

    def change() -> None:
        """One element, and not the checksum that the dataset carries."""
        with h5py.File(path, "r+") as file:
            file["a"][3, 4] += 1

    with ProcessGrid(comm) as grid:
        for name in "ab":
            hdf5.save(path, name, DistMatrix.from_global(A, grid=grid))
        after(3)
        with pytest.raises(Ended):
            product(grid, path, None).run(out, when=when())
        by_rank_0(comm, change)
        after(None)
        with pytest.raises(ArgumentError, match=r"x\.h5:a is not what it was"):
            product(grid, path, None).run(out, when=when())
        for name in "ab":
            hdf5.save(path, name, DistMatrix.from_global(A, grid=grid))
        begun: list[Any] = []
        product(grid, path, None).run(out, when=when(), begun=begun.append)
        assert begun[0].share > 0
        assert gemm_error(read(comm, Path(out[0]), "c"), 1, A, A) <= TOLERANCE


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


def one_more(name: str, *place: int) -> Any:
    """Add 1 to an element, and leave the checksum that the dataset carries."""

    def change(file: Path) -> None:
        with h5py.File(file, "r+") as opened:
            opened[name][place] += 1

    return change


@pytest.mark.parametrize(("share", "how"), [(None, "another inode"), (0.3, "in place")])
def test_inputs_that_change_and_keep_their_times(
    comm: Any, shared_tmp_path: Path, after: Any, how: str, share: float | None
) -> None:
    """What was read of A, B or C on entry must be what it was; what was not read yet may be new, and is right."""
    shapes = {"a": (M, K), "b": (K, N), "c": (M, N)}
    inputs = {name: elements(shape, "d", seed) for seed, (name, shape) in enumerate(shapes.items())}
    path = shared_tmp_path / "x.h5"
    with ProcessGrid(comm) as grid:

        def run(count: int | None, begun: Any = lambda left: None) -> None:
            after(count)
            memory = None if share is None else enough(grid, path, share, beta=2)
            product(grid, path, memory, beta=2).run((str(path), "c"), when=when(), begun=begun)

        for name in inputs:
            for other, x in inputs.items():
                hdf5.save(path, other, DistMatrix.from_global(x, grid=grid))
            with pytest.raises(Ended):
                run(2)
            by_rank_0(comm, lambda name=name: replaced(path, how, one_more(name, 0, 0)))
            with pytest.raises(ArgumentError, match=rf"x\.h5:{name} is not what it was when .*checkpoint was saved"):
                run(2)
            by_rank_0(comm, lambda name=name: replaced(path, how, lambda file: write_element(file, name, inputs[name])))
            with pytest.raises(Ended):  # it is again what it was
                run(1)
            by_rank_0(comm, lambda: [x.unlink() for x in shared_tmp_path.glob("*checkpoint*")])
        # the last panel of A was not read yet: the product is that of the new one
        with pytest.raises(Ended):
            run(1)
        by_rank_0(comm, lambda: replaced(path, how, one_more("a", M - 1, K - 1)))
        begun: list[Any] = []
        run(None, begun.append)
    inputs["a"][M - 1, K - 1] += 1
    assert begun[0].share > 0
    assert gemm_error(read(comm, path, "c"), 1, inputs["a"], inputs["b"], 2, inputs["c"]) <= TOLERANCE
    assert beside(comm, path) == []


def write_element(file: Path, name: str, x: np.ndarray) -> None:
    with h5py.File(file, "r+") as opened:
        opened[name][0, 0] = x[0, 0]


def test_what_only_touches_the_files_costs_no_progress(
    comm: Any, shared_tmp_path: Path, after: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """chmod, another hard link, a copy, a new name, a moved folder; and while the product runs."""

    def moved_folder() -> None:
        (shared_tmp_path / "here").rename(shared_tmp_path / "there")
        (shared_tmp_path / "there" / "x.h5").chmod(0o640)

    A, B = elements((M, K), "d", 1), elements((K, N), "d", 2)
    folder = shared_tmp_path / "here"
    path = folder / "x.h5"
    touches: dict[str, Any] = {
        "nothing": lambda: None,
        "mode": lambda: path.chmod(0o600),
        "link": lambda: os.link(path, shared_tmp_path / "second.h5"),
        "copy": lambda: replaced(path, "another inode", lambda file: None),
        "folder": moved_folder,
    }
    by_rank_0(comm, folder.mkdir)
    with ProcessGrid(comm) as grid:
        write(comm, path, a=(A, {}), b=(B, {}))
        for number, (what, touch) in enumerate(touches.items(), 1):
            after(1)
            with pytest.raises(Ended):
                product(grid, path, enough(grid, path)).run((str(folder / "out.h5"), "c"), when=when())
            capfd.readouterr()
            by_rank_0(comm, touch)
            if what == "folder":
                folder = shared_tmp_path / "there"
                path = folder / "x.h5"
            begun: list[Any] = []
            after(1)
            with pytest.raises(Ended):
                product(grid, path, enough(grid, path)).run(
                    (str(folder / "out.h5"), "c"), when=when(), begun=begun.append
                )
            said = capfd.readouterr().err
            assert begun[0].saved.token.generation == 2 * number - 1
            assert comm.rank or said.count("is read again and compared") == (0 if what == "nothing" else 2), what

        def meddle(done: int, total: int) -> None:
            if comm.rank == 0 and done == 1:
                path.chmod(0o644)

        after(None)
        product(grid, path, enough(grid, path)).run((str(folder / "out.h5"), "c"), when=when(), progress=meddle)
    assert gemm_error(read(comm, folder / "out.h5", "c"), 1, A, B) <= TOLERANCE


@pytest.mark.parametrize(("every", "how"), [(0, "in place"), (None, "in place"), (0, "another inode")])
def test_an_input_that_is_rewritten_while_the_job_runs(
    comm: Any, shared_tmp_path: Path, after: Any, every: int | None, how: str
) -> None:
    """And gets its times back: an error, and nothing is written; or the right product, if none of it was read yet."""
    path, A, B = shared_tmp_path / "x.h5", elements((M, K), "d", 1), elements((K, N), "d", 2)
    out = shared_tmp_path / "out.h5"
    with ProcessGrid(comm) as grid:
        for place in ((0, 0), (M - 1, K - 1)):
            for share in (None, 0.3):
                write(comm, path, a=(A, {}), b=(B, {}))

                def meddle(done: int, total: int, place: Any = place) -> None:
                    if comm.rank == 0 and done == 1:
                        replaced(path, how, one_more("a", *place))
                    comm.Barrier()

                made = product(grid, path, None if share is None else enough(grid, path, share))
                try:
                    made.run((str(out), "c"), progress=meddle, when=None if every is None else when(every))
                except FileError as error:
                    assert "was changed while it was read" in str(error) and not by_rank_0(comm, out.exists)
                else:
                    assert how == "in place" and place != (0, 0)
                    assert gemm_error(read(comm, out, "c"), 1, read(comm, path, "a"), B) <= TOLERANCE
                    by_rank_0(comm, out.unlink)
                by_rank_0(comm, lambda: [x.unlink() for x in shared_tmp_path.glob("*checkpoint*")])


def test_outputs_with_like_names_have_checkpoints_of_their_own(comm: Any, shared_tmp_path: Path, after: Any) -> None:
    """No job goes on with another's, or removes it."""
    path, A, B = shared_tmp_path / "x.h5", elements((M, K), "d", 1), elements((K, N), "d", 2)
    long = "n" * 240 + ".h5"
    outputs = [("c.h5", "/q/z"), ("c.h5", "q.z"), ("c.h5", "q%2Fz"), ("c.h5", "/x.z"), ("c.h5.x", "/z")]
    outputs += [
        (long, "/z"),
        (long, "/y"),
        ("c.h5", "z" * 300 + "1"),
        ("c.h5", "z" * 300 + "2"),
        ("c.h5", "é" * 120),
        ("c.h5", "\x01\x7f"),
    ]
    places = [place_of(str(shared_tmp_path / file), name) for file, name in outputs]
    assert len({x.checkpoint for x in places}) == len(outputs)
    assert place_of(str(path), "//q/./z/").checkpoint == place_of(str(path), "q/z").checkpoint
    assert place_of("c.h5", "/z").checkpoint.name == "c.h5.z.checkpoint"
    if comm.rank == 0:  # the job scripts look for the same files
        script = (Path(__file__).parents[2] / "slurm" / "job.sh").read_text()
        function = script[script.index("checkpoint_of() {") :]
        function = function[: function.index("\n}\n") + 3]
        for (file, name), place in [*zip(outputs, places)][:-1]:
            said = subprocess.run(
                ["bash", "-ec", f'{function}checkpoint_of "$1" "$2"', "-", shared_tmp_path / file, name],
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            assert said.stdout == f"{place.checkpoint}\n"
    with ProcessGrid(comm) as grid:
        write(comm, path, a=(A, {}), b=(B, {}))
        outputs = [outputs[number] for number in (0, 1, 3, 4, 5)]
        for count, number in ((2, 1), (1, 3)):
            for file, name in outputs:
                after(count)
                begun: list[Any] = []
                out = str(shared_tmp_path / file), name
                with pytest.raises(Ended):
                    product(grid, path, None).run(out, when=when(), begun=begun.append)
                assert begun[0] is None if number == 1 else begun[0].saved.token.generation == 2, (file, name)
        after(None)
        for file, name in outputs:
            product(grid, path, None).run((str(shared_tmp_path / file), name), when=when(1e9))
            assert gemm_error(read(comm, shared_tmp_path / file, name), 1, A, B) <= TOLERANCE
    assert set(beside(comm, path)) == {file for file, _ in outputs}


def test_a_missing_file_is_named(comm: Any, shared_tmp_path: Path, after: Any) -> None:
    """The tiles, the checkpoint or the folder that somebody has moved while the job runs, and not the output."""
    A, B = elements((M, K), "d", 1), elements((K, N), "d", 2)
    path, folder = shared_tmp_path / "x.h5", shared_tmp_path / "out"
    with ProcessGrid(comm) as grid:
        write(comm, path, a=(A, {}), b=(B, {}))
        for what, said in (
            ("tiles", r"out\.h5\.c\.checkpoint-tiles: No such file"),
            ("folder", r"checkpoint-tiles: No such file .*there is no folder .*/out: was it moved or removed\?"),
        ):
            by_rank_0(comm, folder.mkdir)

            def meddle(done: int, total: int, what: str = what) -> None:
                if comm.rank == 0 and done == 1:
                    if what == "folder":
                        folder.rename(shared_tmp_path / "away")
                    else:
                        (folder / "out.h5.c.checkpoint-tiles").unlink()
                comm.Barrier()

            with pytest.raises(FileError, match=said):
                product(grid, path, None).run((str(folder / "out.h5"), "c"), when=when(), progress=meddle)
            comm.Barrier()
            by_rank_0(comm, lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.mark.parametrize("what", ["checkpoint", "tiles", "sums", "no tiles", "job", "no UTF-8", "keys", "bias"])
def test_what_is_damaged_is_computed_again(
    comm: Any, shared_tmp_path: Path, after: Any, capfd: pytest.CaptureFixture[str], what: str
) -> None:
    path, A, B = shared_tmp_path / "x.h5", elements((M, K), "d", 1), elements((K, N), "d", 2)
    out = str(shared_tmp_path / "out.h5"), "c"

    def damage() -> None:
        first = shared_tmp_path / "out.h5.c.checkpoint"
        tiles = first.with_name(f"{first.name}-tiles")
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
            with h5py.File(tiles if what == "tiles" else first, "r+") as file:
                file["c" if what == "tiles" else "sums"][1, 1] += 1

    with ProcessGrid(comm) as grid:
        write(comm, path, a=(A, {}), b=(B, {}))
        memory = enough(grid, path)
        steps = product(grid, path, memory).tiling
        of_a_tile = len(steps.cuts[2])
        assert of_a_tile > 1 and steps.count > 2 * of_a_tile
        after(of_a_tile + 1)  # a tile is finished, and another one is not
        with pytest.raises(Ended):
            product(grid, path, memory).run(out, when=when())
        by_rank_0(comm, damage)
        after(None)
        begun: list[Any] = []
        capfd.readouterr()
        product(grid, path, memory).run(out, when=when(1e9), begun=begun.append)
        said = capfd.readouterr().err
    assert begun == [None]
    assert comm.rank or ("begins again" in said and said.count("\n") == 1)
    assert gemm_error(read(comm, Path(out[0]), "c"), 1, A, B) <= TOLERANCE
    assert beside(comm, path) == ["out.h5"]


def test_a_product_is_not_applied_twice(
    comm: Any, shared_tmp_path: Path, after: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C := A B + 2 C in place, by a job that was killed when it had replaced C, and not yet removed its checkpoint."""
    path, A, B = shared_tmp_path / "x.h5", elements((M, K), "d", 1), elements((K, N), "d", 2)
    C0, remove = elements((M, N), "d", 3), OutputPlace.remove

    def killed(place: OutputPlace) -> None:
        if place.checkpoint.exists():
            raise OSError
        remove(place)

    with ProcessGrid(comm) as grid:
        write(comm, path, a=(A, {}), b=(B, {}), c=(C0, {}))
        monkeypatch.setattr(OutputPlace, "remove", killed)
        with pytest.raises(FileError):
            product(grid, path, None, beta=2).run((str(path), "c"), when=when())
        monkeypatch.setattr(OutputPlace, "remove", remove)
        assert gemm_error(read(comm, path, "c"), 1, A, B, 2, C0) <= TOLERANCE
        assert "x.h5.c.checkpoint" in beside(comm, path)
        with pytest.raises(Complete):
            product(grid, path, None, beta=2).run((str(path), "c"), when=when())
        assert gemm_error(read(comm, path, "c"), 1, A, B, 2, C0) <= TOLERANCE
        assert beside(comm, path) == []


def test_a_full_disk_keeps_the_last_checkpoint_and_the_product(
    comm: Any, shared_tmp_path: Path, after: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path, A, B = shared_tmp_path / "x.h5", elements((M, K), "d", 1), elements((K, N), "d", 2)
    saves, save, reserve = itertools.count(1), hdf5.save_all, files.reserve

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def save_all(*arguments: Any, **options: Any) -> Any:
        monkeypatch.setattr(files, "reserve", reserve if next(saves) < 3 else full)
        return save(*arguments, **options)

    with ProcessGrid(comm) as grid:
        write(comm, path, a=(A, {}), b=(B, {}))
        memory, out = enough(grid, path), (str(shared_tmp_path / "out.h5"), "c")
        monkeypatch.setattr(hdf5, "save_all", save_all)
        after(5)
        with pytest.raises(Ended):
            product(grid, path, memory).run(out, when=when())
        said = capfd.readouterr().err
        assert comm.rank or said.count("no checkpoint was saved, and the product goes on: ") == 3
        begun: list[Any] = []
        after(None)
        monkeypatch.setattr(files, "reserve", reserve)
        report, _, _ = product(grid, path, memory).run(out, when=when(), begun=begun.append)
    assert begun[0].saved.token.generation == 2 and report.saves == 0
    assert gemm_error(read(comm, Path(out[0]), "c"), 1, A, B) <= TOLERANCE


def test_a_wrong_result_is_not_gone_on_with(
    comm: Any, shared_tmp_path: Path, after: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, A, B = shared_tmp_path / "x.h5", elements((M, K), "d", 1), elements((K, N), "d", 2)
    multiply = files_product.pdgemm

    def wrong(alpha: Any, A: Any, B: Any, beta: Any, C: Any, **options: Any) -> Any:
        multiply(alpha, A, B, beta, C, **options)
        if C.grid.rank == 0 and C.local.size:
            C.local[0, 0] += 9
        return C

    with ProcessGrid(comm) as grid:
        write(comm, path, a=(A, {}), b=(B, {}))
        monkeypatch.setattr(files_product, "pdgemm", wrong)
        _, residual, wrote = product(grid, path, None).run((str(path), "c"), when=when(), seed=3)
    assert not residual.passed and wrote is None
    assert beside(comm, path) == []


def test_how_often_checkpoints_are_saved(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the interval; with --mtbf by Young's formula, as soon as a save was measured."""
    path, A, B = shared_tmp_path / "x.h5", elements((M, K), "d", 1), elements((K, N), "d", 2)
    at = 0.0

    def perf_counter() -> float:
        nonlocal at
        at += 1.0  # a second passes at each look
        return at

    with ProcessGrid(comm) as grid:
        write(comm, path, a=(A, {}), b=(B, {}))
        memory, out = enough(grid, path), (str(shared_tmp_path / "out.h5"), "c")
        steps = product(grid, path, memory).tiling.count
        save, saved = hdf5.save_all, []

        def save_all(*arguments: Any, **options: Any) -> Any:
            nonlocal at
            at += 100.0 if options["attrs"] else 0  # it takes so long
            saved.append(json.loads(options["attrs"]["product"])["share"])
            return save(*arguments, **options)

        monkeypatch.setattr(hdf5, "save_all", save_all)
        monkeypatch.setattr(checkpoints, "perf_counter", perf_counter)
        for of, expected in ((when(1e9), 0), (when(3), steps // 3), (when(3, 1e9), 1), (when(3, 0.045), steps // 3)):
            saved.clear()
            report, _, _ = product(grid, path, memory).run(out, when=of)
            assert report.saves == len(saved) and abs(len(saved) - expected) <= 1 + expected // 2, (of, saved, steps)


def test_other_datasets_of_the_same_file_are_other_inputs(comm: Any, shared_tmp_path: Path, after: Any) -> None:
    """Whatever sizes and times their files have; A and B exchanged, too."""
    path, X = shared_tmp_path / "x.h5", [elements((M, M), "d", seed) for seed in range(3)]
    out = str(shared_tmp_path / "out.h5"), "c"
    with ProcessGrid(comm) as grid:
        write(comm, path, a=(X[0], {}), b=(X[1], {}), other=(X[2], {}))

        def run(a: str, b: str) -> Any:
            of = [source(grid, what, (str(path), name), None) for what, name in (("A", a), ("B", b))]
            return FilesProduct(grid, 1, *of, 0, None, None, most_flops=2e5).run(out, when=when())

        after(2)
        with pytest.raises(Ended):
            run("a", "b")
        after(None)
        for names in (("other", "b"), ("a", "other"), ("b", "a")):
            with pytest.raises(ArgumentError, match="is not what it was"):
                run(*names)
        run("a", "b")
    assert gemm_error(read(comm, Path(out[0]), "c"), 1, X[0], X[1]) <= TOLERANCE


def test_an_obstacle_is_no_damage(comm: Any, shared_tmp_path: Path, after: Any) -> None:
    """A checkpoint that another program has locked for a while is not thrown away; nor are files of other names."""
    path, A, B = shared_tmp_path / "x.h5", elements((M, K), "d", 1), elements((K, N), "d", 2)
    out, saved = (str(shared_tmp_path / "out.h5"), "c"), shared_tmp_path / "out.h5.c.checkpoint"
    mine, tiles = (saved.with_name(f"{saved.name}-{x}") for x in ("backup", "tiles"))
    opened: list[Any] = []
    with ProcessGrid(comm) as grid:
        write(comm, path, a=(A, {}), b=(B, {}))
        after(3)
        with pytest.raises(Ended):
            product(grid, path, enough(grid, path)).run(out, when=when())
        after(None)
        by_rank_0(comm, lambda: mine.write_bytes(b"mine"))
        for file in (saved, tiles):
            by_rank_0(comm, lambda file=file: opened.append(os.open(file, os.O_RDWR)))
            by_rank_0(comm, lambda: fcntl.flock(opened[0], fcntl.LOCK_EX))
            with pytest.raises(FileError, match="unable to lock file"):
                product(grid, path, enough(grid, path)).run(out, when=when())
            by_rank_0(comm, lambda: os.close(opened.pop()))
        begun: list[Any] = []
        product(grid, path, enough(grid, path)).run(out, when=when(), begun=begun.append)
        assert begun[0].saved.token.generation == 3
    assert beside(comm, path) == ["out.h5", mine.name]
