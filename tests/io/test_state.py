"""The state of a program in one file: loaded in any layout; generations of the file; killed jobs."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from stored_files import by_rank_0, refused
from tiers import everything

from pdgemm import DistMatrix, ProcessGrid
from pdgemm.errors import ArgumentError, DTypeError, FileError, GridError, PdgemmError
from pdgemm.io import generations, hdf5, many_datasets
from pdgemm.support import files

pytestmark = pytest.mark.mpi


@pytest.fixture
def path(shared_tmp_path: Path) -> Path:
    return shared_tmp_path / "state.h5"


def distributed(grid: Any, X: np.ndarray, block: Any = 4) -> Any:
    return DistMatrix.from_global(X, grid=grid, block=block)


def same(grid: Any, X: Any, Y: np.ndarray) -> bool:
    found = X.to_global()
    return bool(grid.comm.bcast(found is not None and found.dtype == Y.dtype and np.array_equal(found, Y)))


def full(grid: Any, step: float) -> Any:
    return distributed(grid, np.full((9, 9), float(step)))


def save(grid: Any, path: Path, step: int, **how: Any) -> Any:
    return hdf5.save_all(path, {"w": full(grid, step)}, attrs={"step": step}, **how)


def test_so_many_generations_are_kept_and_a_damaged_one_is_not_loaded(
    comm: Any, grid: Any, path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = path.with_name("[state].h5")  # with special characters of glob

    def damage(file: Path) -> None:
        data = file.read_bytes()
        at = data.find(np.full(3, file_step(file)).tobytes())
        file.write_bytes(data[:at] + b"\1" + data[at + 1 :])

    def file_step(file: Path) -> float:
        with h5py.File(file) as opened:
            return float(opened.attrs["step"])

    for step, keep in enumerate((3, 3, 3, 3, 3, 2, 1, 4, 4, 4), 1):
        save(grid, path, step, keep=keep)
        files = by_rank_0(comm, lambda: sorted(x.name for x in path.parent.iterdir()))
        kept = {6: 2, 7: 1, 8: 2, 9: 3, 10: 4}.get(step, min(step, 3))
        assert files == sorted(["[state].h5", *(f"[state].h5.{x}" for x in range(1, kept))])
        steps = by_rank_0(comm, lambda files=files: [file_step(path.with_name(x)) for x in files])
        assert steps == [step - x for x in range(kept)]
    capfd.readouterr()
    for newest in (10, 9, 8):
        state = hdf5.load_all(path, grid)
        assert (state.attrs["step"], state.generation) == (newest, newest)
        assert same(grid, state.matrices["w"], np.full((9, 9), float(newest)))
        said = capfd.readouterr().err
        assert ("is damaged" in said and f"generation {newest} of " in said) == (newest < 10 and comm.rank == 0)
        there = path if newest == 10 else path.with_name(f"{path.name}.{10 - newest}")
        by_rank_0(comm, lambda there=there: damage(there))
    by_rank_0(comm, lambda: (path.unlink(), path.with_name(f"{path.name}.3").write_bytes(b"nothing")))
    with pytest.raises(FileError, match=r"No such file.*\.3 is not an HDF5 file.*\.1:w is damaged.*\.2:w is damaged"):
        hdf5.load_all(path, grid)


def test_ranks_of_a_killed_job_cannot_replace_later_states(
    comm: Any, grid: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memories: dict[str, dict[str, Any]] = {x: {} for x in ("first", "second", "third")}

    def job(name: str) -> None:
        monkeypatch.setattr(generations, "_myself", name)
        monkeypatch.setattr(generations, "_last", memories[name])

    def saved(name: str, step: int) -> int:
        job(name)
        generation: int = save(grid, path, step).generation
        return generation

    def load(name: str) -> Any:
        job(name)
        return hdf5.load_all(path, grid).attrs["step"]

    assert saved("first", 1) == 1
    assert load("second") == 1
    assert saved("first", 2) == 2  # the first job still runs, and saves
    assert saved("second", 20) == 3  # the second job resumes from generation 1
    with pytest.raises(FileError, match=r"process \d+ on .* has saved generation 3 since this job was at generation 2"):
        saved("first", 3)
    assert load("third") == 20
    assert saved("third", 30) == 4
    for name in ("first", "second"):
        refused(comm, FileError, "this job should end", saved, name, 4)
    assert load("first") == 30  # after loading, it may save again
    assert saved("first", 31) == 5


@pytest.mark.parametrize(("after", "often"), [("look", 1), ("inspection", 1), ("reading", 1), ("reading", 99)])
def test_generations_saved_meanwhile_are_loaded_whole_or_not_at_all(
    comm: Any, grid: Any, path: Path, monkeypatch: pytest.MonkeyPatch, after: str, often: int
) -> None:
    """All matrices of a load are of one generation, whenever another job replaces the file."""
    left = [often]

    def save_both(step: int) -> None:
        hdf5.save_all(path, {"w": full(grid, step), "m": full(grid, step)}, attrs={"step": step}, keep=2)

    def disturbed(original: Any) -> Any:
        def with_another_job(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            if left[0] > 0:
                left[0] -= 1
                save_both(often - left[0] + 2)
            return found

        return with_another_job

    save_both(1)
    save_both(2)
    if after == "reading":
        monkeypatch.setattr(hdf5, "load_datasets", disturbed(hdf5.load_datasets))
    else:
        original, module = hdf5.on_root, hdf5 if after == "look" else many_datasets

        def looked(comm: Any, path: Any, action: Any) -> Any:
            looks = {"saved_generations", "stored_datasets"} & {*action.__code__.co_names}
            return (disturbed(original) if looks else original)(comm, path, action)

        monkeypatch.setattr(module, "on_root", looked)
    monkeypatch.setattr(generations, "_last", {})
    if often > 1:
        refused(comm, FileError, "was changed while it was read", hdf5.load_all, path, grid)
        return
    state = hdf5.load_all(path, grid)
    assert state.attrs["step"] == state.generation == 3
    assert all(same(grid, x, np.full((9, 9), 3.0)) for x in state.matrices.values())


def test_a_full_disk_leaves_the_last_generation(
    comm: Any, grid: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def no_room(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    save(grid, path, 1)
    for module in (files, many_datasets):  # before the first write, and after it
        with monkeypatch.context() as patch:
            patch.setattr(module, "reserve", no_room)
            refused(comm, FileError, r"state\.h5: No space left on device", save, grid, path, 2, keep=3)
        assert by_rank_0(comm, lambda: [x.name for x in path.parent.iterdir()]) == ["state.h5"]
        assert hdf5.load_all(path, grid).attrs == {"step": 1}


def test_bad_arguments_are_refused_on_all_ranks(comm: Any, grid: Any, path: Path) -> None:
    X = distributed(grid, np.ones((3, 3)))
    bad: list[tuple[type[PdgemmError], str, dict[str, Any], dict[str, Any]]] = [
        (ArgumentError, "matrices is empty", {}, {}),
        (DTypeError, "must be a DistMatrix", {"a": X, "b": 3}, {}),
        (ArgumentError, "'/' is not the name of a dataset", {"/": X}, {}),
        (FileError, "is not the name of a dataset", {"a\0": X}, {}),
        (FileError, "state.h5: ", {"a": X, "a/b": X}, {}),  # a dataset cannot be a group
        (ArgumentError, "keep must be >= 1, got 0", {"a": X}, {"keep": 0}),
        (ArgumentError, r"attrs\['x'\] is \[\[1\], \[2, 3\]\]", {"a": X}, {"attrs": {"x": [[1], [2, 3]]}}),
        (ArgumentError, "name the same dataset", {"a": X, "/a": X}, {}),
        (ArgumentError, r"attrs\['x'\] is None", {"a": X}, {"attrs": {"x": None}}),
        (ArgumentError, r"attrs\['x'\] is list of 78.1 KiB", {"a": X}, {"attrs": {"x": [0] * 10_000}}),
        (ArgumentError, "is not a name", {"a": X}, {"attrs": {"pdgemm_job": 1}}),
        (FileError, "the folder .* does not exist", {"a": X}, {}),
    ]
    for error, said, matrices, options in bad:
        where = path.parent / "no" / "state.h5" if "folder" in said else path
        refused(comm, error, said, hdf5.save_all, where, matrices, **options)
    if comm.size > 1:
        refused(comm, ArgumentError, "hdf5.save_all", hdf5.save_all, path, {"a": X}, attrs={"x": comm.rank})
        half = comm.Split(comm.rank % 2)
        with ProcessGrid(half) as other:
            alone = distributed(other, np.ones((3, 3)))
            with pytest.raises(GridError, match="b is on other ranks than the first matrix"):
                hdf5.save_all(path, {"a": X, "b": alone})
        half.Free()
    assert not by_rank_0(comm, lambda: [*path.parent.iterdir()])
    hdf5.save_all(path, {"a": X})
    wrong: list[tuple[str, Any]] = [
        ("has no b; it has a", {"b": {"block": 3}}),
        (r"layouts\['a'\]: load has no option rows", {"a": {"rows": 3}}),
        *(("layouts must be of the form", layouts) for layouts in ({"a": 64}, {"a": None}, [1])),
    ]
    if comm.size > 1:
        wrong += [("hdf5.load_all", {"a": {"device": "cuda" if comm.rank else "host"}})]
        wrong += [
            ("hdf5.load_all", {"a": options}) for options in ({"block": 1 + comm.rank}, {"transpose": comm.rank > 0})
        ]
    for said, layouts in wrong:
        refused(comm, ArgumentError, said, hdf5.load_all, path, grid, layouts)
    other_file = path.with_name("other.h5")
    hdf5.save(other_file, "a", X)
    refused(comm, FileError, r"other\.h5 was not written by save_all", hdf5.load_all, other_file, grid)
    with pytest.raises(ArgumentError, match=r"exists, and was not written by save_all: .* overwrite=True"):
        hdf5.save_all(other_file, {"a": X})  # perhaps a file of another program
    assert same(grid, hdf5.load(other_file, "a", grid), np.ones((3, 3)))
    for folder in (path.parent, ".", "/"):
        for call in (lambda: hdf5.load_all(folder, grid), lambda: hdf5.save_all(folder, {"a": X})):  # noqa: B023
            refused(comm, FileError, "it is a folder, not a file", call)


def test_jobs_continue_after_a_damaged_generation(
    comm: Any, grid: Any, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that loaded an older generation, because the newest is damaged, saves; the damaged file is removed."""

    def job(name: str) -> None:
        monkeypatch.setattr(generations, "_myself", name)
        monkeypatch.setattr(generations, "_last", {})

    def damage(how: str) -> None:
        data = path.read_bytes()
        at = data.find(np.full(3, 2.0).tobytes())
        path.write_bytes(data[:100] if how == "cut" else flipped(data, 8 * at))

    for how in ("cut", "flip"):
        by_rank_0(comm, lambda: [x.unlink() for x in path.parent.iterdir()])
        for step, name in ((1, "one"), (2, "two")):
            job(name)
            save(grid, path, step, keep=2)
        by_rank_0(comm, lambda how=how: damage(how))
        job("three")
        assert hdf5.load_all(path, grid).attrs["step"] == 1
        for step in (5, 6):
            save(grid, path, step, keep=2)
            older = by_rank_0(comm, lambda: generations.inspect(path.with_name("state.h5.1")).attrs["step"])
            assert (hdf5.load_all(path, grid).attrs["step"], older) == (step, 1 if step == 5 else 5)


def test_files_of_others_are_not_changed(comm: Any, grid: Any, path: Path) -> None:
    """Files with numbers that are not generations stay; a folder with the name of a generation is an error."""
    X = {"w": distributed(grid, np.ones((5, 5)))}
    hdf5.save_all(path, X)
    for name in ("state.h5.20251124", "state.h5.7"):
        by_rank_0(comm, lambda name=name: (path.parent / name).write_bytes(b"notes"))
    for _ in range(4):
        hdf5.save_all(path, X, keep=2)
    hdf5.save_all(path, X)
    by_rank_0(comm, lambda: (path.parent / "state.h5.1").mkdir())
    hdf5.save_all(path, X, attrs={"step": 3})
    with pytest.raises(FileError, match=r"state\.h5\.1 was not written by save_all, and is in the way"):
        hdf5.save_all(path, X, keep=2)
    assert hdf5.load_all(path, grid).attrs == {"step": 3}
    names = by_rank_0(comm, lambda: sorted(x.name for x in path.parent.iterdir()))
    assert names == ["state.h5", "state.h5.1", "state.h5.20251124", "state.h5.7"]


@pytest.mark.on_ranks(1)
def test_a_flipped_bit_of_metadata_never_loses_a_matrix(
    comm: Any, grid: Any, path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each flip, all matrices are loaded, or the older generation with a warning; then the job can save."""
    X = [{"w": np.full((3, 2), 1.0 + step), "a/b": np.full((2, 2), step, "f4")} for step in range(2)]
    for step, arrays in enumerate(X):
        state = {name: distributed(grid, x) for name, x in arrays.items()}
        hdf5.save_all(path, state, attrs={"step": step, "name": "größe", "n": np.zeros(3)}, keep=2)
    good = path.read_bytes()
    assert b"GCOL" not in good  # no global heap: a flipped bit in it lets HDF5 read for ever

    def places(text: bytes) -> list[int]:
        return [at for at in range(len(good)) if good.startswith(text, at)]

    def next_generation() -> int:
        """Return the number of the generation that a new job would write."""
        monkeypatch.setattr(generations, "_last", {})
        monkeypatch.setattr(generations, "_rejected", set())
        return generations.next_token(path).generation

    names = [at for name in (b"pdgemm_checksum", b"pdgemm_job") for at in places(name)]
    assert len(names) >= 3
    chosen = [8 * at + bit for at in names for bit in (5, 7 * 8, 8 * 8 + 7)]  # the last flip makes invalid UTF-8
    bias = [at + 5 for at in places(b"\x40\x00\x34\x0b\x00\x34\xff\x03")]  # in the exponent bias of the type float64
    assert bias
    chosen += [8 * at + 1 for at in bias]
    chosen += range(3, 8 * len(good), 1 if everything() else 1709)
    for bit in chosen:
        monkeypatch.setattr(generations, "_last", {})
        monkeypatch.setattr(generations, "_rejected", set())
        path.unlink()
        path.write_bytes(flipped(good, bit))
        capfd.readouterr()
        found = hdf5.load_all(path, grid)
        step = found.attrs["step"]
        assert {*found.matrices} == {*X[step]} and found.attrs["name"] == "größe", bit
        assert all(same(grid, found.matrices[name], x) for name, x in X[step].items()), bit
        assert step == 1 or "generation 1 of" in capfd.readouterr().err, bit
        assert generations.next_token(path).generation == (3 if step else 2), bit
        assert step == 1 or bit not in chosen[: 3 * len(names)] or next_generation() == 2, bit


def flipped(data: bytes, bit: int) -> bytes:
    made = bytearray(data)
    made[bit // 8] ^= 1 << bit % 8
    return bytes(made)


def test_damaged_states_are_replaced_and_other_files_are_not(comm: Any, grid: Any, path: Path) -> None:
    """A job replaces its own damaged files; other files stay.  Two names of one dataset are an error."""
    X = {"w": distributed(grid, np.ones((5, 5))), "a//b": distributed(grid, np.zeros((1, 2)))}
    with pytest.raises(ArgumentError, match="name the same dataset"):
        hdf5.save_all(path, {"a/b": X["w"], "a//b": X["w"]})
    for step in range(6):  # flip a bit in the signature of HDF5, or in an attribute's name
        where = b"\x89HDF" if step % 2 else b"pdgemm_job"
        hdf5.save_all(path, X, attrs={"step": step}, keep=3)

        def damage(where: bytes = where) -> None:
            data = path.read_bytes()
            path.write_bytes(flipped(data, 8 * data.find(where) + 3))

        if step > 2:
            by_rank_0(comm, damage)
    files = by_rank_0(comm, lambda: sorted(x.name for x in path.parent.iterdir()))
    assert files == ["state.h5", "state.h5.1", "state.h5.2"]
    found = hdf5.load_all(path, grid)
    assert found.attrs["step"] == 2 and {*found.matrices} == {"w", "a/b"}
    other = path.parent / "other.h5"
    for damaged in (False, True):  # damaged: its owner is unknown

        def others(damaged: bool = damaged) -> bytes:
            with h5py.File(other, "w") as file:
                file["x"] = np.arange(99.0)
                file.attrs["pdgemm_job"] = "my own"
            data = other.read_bytes()
            other.write_bytes(data[:1000] if damaged else data)
            return other.read_bytes()

        kept = by_rank_0(comm, others)
        for _ in range(2):
            with pytest.raises(ArgumentError, match="truncated" if damaged else "was not written by save_all"):
                hdf5.save_all(other, X)
        assert by_rank_0(comm, other.read_bytes) == kept
