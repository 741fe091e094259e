"""What outputs replace: what pdgemm wrote, and the data of others only when told; names that a storage drops."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from stored_files import by_rank_0, only_file, write

from pdgemm import DistMatrix, ProcessGrid, linalg
from pdgemm.errors import ArgumentError, DTypeError, FileError, LayoutError
from pdgemm.io import hdf5, npy, safetensors, scaled_files, source
from pdgemm.parallel import Buckets, Initial, Mesh, export_parameters
from pdgemm.tools import calibrate
from pdgemm.tools.cli.commands import cli
from pdgemm.tools.profiling.trace_file import trace

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("everyone")]
REFUSED = r"exists, and .*: it is replaced only with overwrite=True"


@pytest.fixture
def grid(comm: Any) -> Any:
    with ProcessGrid(comm) as grid:
        yield grid


def hdf5_of_another(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(12).reshape(3, 4)


def npy_of_another(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.arange(12).reshape(3, 4))


def tensors_of_another(path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"x": np.arange(12.0)}, path, metadata={"format": "pt", "note": "written by me"})


def text_of_another(path: Path) -> None:
    path.write_text("measured by hand, and compared with what pdgemm wrote\n")


def traced(path: Path, grid: Any, **how: Any) -> None:
    with trace(path, grid, **how):
        pass


def exported(path: Path, grid: Any, **how: Any) -> None:
    mesh = Mesh(grid.comm, dp=grid.size)
    export_parameters(path, Buckets(mesh, {"w": Initial((3, 4))}), **how)


def doors() -> dict[str, tuple[Callable[[Path], None], Callable[..., object]]]:
    """By name: how another program writes the file, and how the package does."""

    def eye(grid: Any) -> Any:
        return DistMatrix.eye(4, grid=grid)

    return {
        "hdf5.save": (hdf5_of_another, lambda path, grid, **how: hdf5.save(path, "x", eye(grid), **how)),
        "hdf5.save of a vector": (hdf5_of_another, lambda path, grid, **how: hdf5.save(path, "x", np.ones(3), **how)),
        "hdf5.save_all": (hdf5_of_another, lambda path, grid, **how: hdf5.save_all(path, {"x": eye(grid)}, **how)),
        "save_all over text": (text_of_another, lambda path, grid, **how: hdf5.save_all(path, {"x": eye(grid)}, **how)),
        "save_scaled": (
            hdf5_of_another, lambda path, grid, **how: scaled_files.save_scaled(path, {"x": eye(grid)}, **how)
        ),
        "npy.save": (npy_of_another, lambda path, grid, **how: npy.save(path, eye(grid), **how)),
        "npy.save over text": (text_of_another, lambda path, grid, **how: npy.save(path, eye(grid), **how)),
        "safetensors": (
            tensors_of_another, lambda path, grid, **how: safetensors.save_all(path, {"x": eye(grid)}, **how)
        ),
        "export": (tensors_of_another, exported),
        "trace": (text_of_another, traced),
    }  # fmt: skip


@pytest.mark.parametrize("name", [
    "hdf5.save", "hdf5.save of a vector", "hdf5.save_all", "save_all over text", "save_scaled", "npy.save",
    "npy.save over text", "safetensors", "export", "trace",
])  # fmt: skip
def test_the_data_of_others_is_replaced_only_when_told(comm: Any, grid: Any, shared_tmp_path: Path, name: str) -> None:
    path, (other, save) = shared_tmp_path / "file", doors()[name]
    by_rank_0(comm, lambda: other(path))
    before = by_rank_0(comm, path.read_bytes)
    for _ in range(2):
        with pytest.raises(ArgumentError, match=f"{path}.* {REFUSED}"):
            save(path, grid)
        assert by_rank_0(comm, path.read_bytes) == before and only_file(shared_tmp_path, comm) == ["file"]
    save(path, grid, overwrite=True)
    assert by_rank_0(comm, path.read_bytes) != before
    save(path, grid)  # what pdgemm wrote
    by_rank_0(comm, lambda: path.write_bytes(b""))  # nothing is lost with an empty file
    if not name.startswith("hdf5.save") or name == "hdf5.save_all":  # which HDF5 does not open
        save(path, grid)
    if comm.size > 1:
        with pytest.raises(ArgumentError, match="different arguments"):
            save(path, grid, overwrite=comm.rank > 0)


def test_a_report_of_a_load_says_what_it_replaces(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    """C on entry is replaced though another program wrote it, as by `multiply --beta`."""
    path = shared_tmp_path / "c.h5"
    by_rank_0(comm, lambda: hdf5_of_another(path))
    C = hdf5.load(path, "x", grid, dtype="float64")
    with pytest.raises(ArgumentError, match=REFUSED):
        hdf5.save(path, "x", C)
    hdf5.save(path, "x", C, replaces=C.report)


def test_commands_replace_the_data_of_others_only_when_told(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command, with each of its outputs; the message names its option, and nothing is read or measured before."""
    monkeypatch.chdir(shared_tmp_path)
    with ProcessGrid(comm) as grid:
        hdf5.save("a.h5", "x", DistMatrix.eye(4, grid=grid))
    mine = ("t.json", "r.html", "p.png", "p.svg", "m.json", "s.html")

    def others() -> None:
        for name in mine:
            text_of_another(Path(name))
        hdf5_of_another(Path("o.h5"))
        hdf5_of_another(Path("parts.h5"))
        Path("s.jsonl").touch()

    def never(*arguments: Any, **how: Any) -> None:
        raise AssertionError("elements were read, or links measured")

    by_rank_0(comm, others)
    before = by_rank_0(comm, contents(shared_tmp_path))
    product, question = ["multiply", "a.h5:/x", "a.h5:/x"], ["--shape", "9,9,9", "--ranks", "4"]
    commands = [
        ["generate", "o.h5:/x", "--shape", "4x4"],
        [*product, "-o", "o.h5:/x"],
        [*product, "-o", "o.h5:/x", "--memory", "64MiB"],
        [*product, "-o", "new.h5:/x", "--trace", "t.json"],
        [*product, "-o", "new.h5:/x", "--report", "r.html"],
        ["gram", "a.h5:/x", "-o", "o.h5:/x"],
        ["solve", "a.h5:/x", "a.h5:/x", "-o", "o.h5:/x"],
        ["lstsq", "a.h5:/x", "a.h5:/x", "-o", "o.h5:/x"],
        ["rank", "a.h5:/x", "--trace", "t.json"],
        ["calibrate", "-o", "m.json"],
        *([] if comm.size > 1 else [
            ["plan", *question, "--plot", "p.png"],
            ["simulate", *question, "--plot", "p.svg"],
            ["profile", "none.json", "--plot", "p.svg"],
            ["plot", "s.jsonl", "--out", "s.html"],
        ]),
    ]  # fmt: skip
    with monkeypatch.context() as patched:
        patched.setattr(source.Source, "read", never)
        patched.setattr(calibrate, "calibrate", never)
        for words in commands:
            with pytest.raises(ArgumentError, match=r"exists, and was not written by pdgemm: .* with --force$"):
                cli.main(words, standalone_mode=False)
    assert by_rank_0(comm, contents(shared_tmp_path)) == before
    for words in commands[:9]:
        cli.main([*words, "--force"], standalone_mode=False)
        cli.main(words, standalone_mode=False)  # over its own output
    with pytest.raises(ArgumentError, match=REFUSED):  # the command has ended
        hdf5.save("parts.h5", "x", np.ones(3))


def test_messages_name_what_the_user_can_type(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "i.h5"
    write(comm, path, i=(np.ones((3, 3), "i8"), {}), text=(np.full((3, 3), b"abc"), {}), x=(np.eye(3), {}))
    for name, there, typed in (("i", r"convert with dtype=$", "convert with --dtype$"), ("text", "int32$", "int32$")):
        with pytest.raises(DTypeError, match=there):
            hdf5.load(path, name, grid)
        with pytest.raises(DTypeError, match=typed):
            cli.main(["gram", f"{path}:/{name}", "-o", f"{path}:/new"], standalone_mode=False)
    with pytest.raises(LayoutError, match=r"x\[:, None\] of a vector x is one column"):
        DistMatrix.from_global(np.ones(3), grid=grid)


# ------------------------------------------------------------------ names
def test_an_output_that_cannot_be_there_is_refused_before_anything_is_read(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below what is no group, whatever it is, and over what is no dataset."""
    monkeypatch.chdir(shared_tmp_path)

    def make() -> None:
        with h5py.File("a.h5", "w") as file:
            file["X"], file["group/in"], file["type"] = np.eye(4), np.eye(4), np.dtype("f8")
            file["dangling"], file["round"] = h5py.SoftLink("/none"), h5py.SoftLink("/round")
            file["soft"] = h5py.SoftLink("/X")
            file["to_group"] = h5py.SoftLink("/group")
        Path("folder").mkdir()

    def never(*arguments: Any, **how: Any) -> None:
        raise AssertionError("elements were read")

    by_rank_0(comm, make)
    before = by_rank_0(comm, Path("a.h5").read_bytes)
    with monkeypatch.context() as patched:
        patched.setattr(source.Source, "read", never)
        for name, said in {
            "X/q": "X is not a group", "X/q/r": "X is not a group", "group/in/q": "group/in is not a group",
            "to_group/in/q": "to_group/in is not a group", "type/q": "type is not a group",
            "dangling/q": "dangling is not a group", "soft/q": "soft is not a group", "/X//./q": "X is not a group",
            "round/q": "too many links", "group": "group exists already, and is not a dataset",
            "type": "type exists already, and is not a dataset", "to_group": "exists already, and is not a dataset",
        }.items():  # fmt: skip
            for words in (
                ["multiply", "a.h5:/X", "a.h5:/X", "-o"], ["gram", "a.h5:/X", "-o"],
                ["multiply", "a.h5:/X", "a.h5:/X", "--memory", "64MiB", "-o"],
            ):  # fmt: skip
                with pytest.raises(FileError, match=said):
                    cli.main([*words, f"a.h5:{name}", "--force"], standalone_mode=False)
        for path in ("folder:/x", "none/a.h5:/x", "a.h5/x.h5:/x"):
            with pytest.raises(FileError):
                cli.main(["gram", "a.h5:/X", "-o", path], standalone_mode=False)
    assert by_rank_0(comm, Path("a.h5").read_bytes) == before
    cli.main(["gram", "a.h5:/X", "-o", "a.h5:/to_group/new/er"], standalone_mode=False)
    assert by_rank_0(comm, lambda: "er" in h5py.File("a.h5")["group/new"])


# ------------------------------------------------------------------ vectors
def test_a_vector_of_all_ranks_is_saved_as_one(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    h5, alone = shared_tmp_path / "s.h5", shared_tmp_path / "s.npy"
    s = linalg.svdvals(DistMatrix.random((9, 5), grid=grid))
    for vector in (s, s.astype("f4"), s[:0], s * 1j):
        reports = hdf5.save(h5, "s", vector), npy.save(alone, vector, grid=grid)
        read = by_rank_0(comm, lambda: (h5py.File(h5)["s"][()], np.load(alone)))
        for report, there in zip(reports, read):
            assert report.shape == there.shape == vector.shape and f"({len(vector)} {vector.dtype}" in str(report)
            assert there.dtype == vector.dtype and np.array_equal(there, vector)
    loaded = hdf5.load(h5, "s", grid, verify=True)
    assert loaded.shape == (5, 1) and "s (5 complex128" in str(loaded.report)
    if comm.size > 1:
        with pytest.raises(ArgumentError, match="elements of checksum"):
            hdf5.save(h5, "s", s + comm.rank)


# ------------------------------------------------------------------ a storage that drops names
DROPPED = "the storage reported that the new file has this name, but it does not lead there"


def contents(folder: Path) -> Callable[[], dict[str, bytes]]:
    return lambda: {x.name: x.read_bytes() for x in folder.iterdir()}


@pytest.mark.parametrize("call", ["replace", "link"])
def test_a_name_that_a_storage_drops(
    comm: Any, grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """One error on all ranks, with all generations where they were, and the next save succeeds."""
    state = shared_tmp_path / "state.h5"

    def save(step: int) -> None:
        hdf5.save_all(state, {"w": DistMatrix.full((3, 3), float(step), grid=grid)}, attrs={"step": step}, keep=3)

    for step in range(3):
        save(step)
    others: dict[str, Callable[[int], object]] = {
        "a.h5": lambda step: hdf5.save(shared_tmp_path / "a.h5", "x", DistMatrix.full((3, 3), float(step), grid=grid)),
        "a.npy": lambda step: npy.save(shared_tmp_path / "a.npy", DistMatrix.full((3, 3), float(step), grid=grid)),
        "a.tensors": lambda step: safetensors.save_all(
            shared_tmp_path / "a.tensors", {"x": DistMatrix.full((3, 3), float(step), grid=grid)}
        ),
    }
    for write_other in others.values():
        write_other(0)
    before = by_rank_0(comm, contents(shared_tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(os, call, lambda old, new, **how: None)
        with pytest.raises(FileError, match=f"state.h5: {DROPPED}"):
            save(3)
        for name, write_other in others.items() if call == "replace" else ():
            with pytest.raises(FileError, match=f"{name}: {DROPPED}"):
                write_other(1)
        after = by_rank_0(comm, contents(shared_tmp_path))
    assert {*before.values()} == {*after.values()} and all(after[x] == before[x] for x in ("state.h5", *others))
    for step in (3, 4):
        save(step)
        assert hdf5.load_all(state, grid).attrs["step"] == step
    files_there = [x for x in only_file(shared_tmp_path, comm) if x.startswith("state")]
    assert files_there == ["state.h5", "state.h5.1", "state.h5.2"]


def test_the_last_rename_alone_is_dropped(
    comm: Any, grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the chain of older states has moved: no state is lost, and the chain does not move again."""
    path, replace = shared_tmp_path / "state.h5", os.replace

    def save(step: int) -> None:
        hdf5.save_all(path, {"w": DistMatrix.full((3, 3), float(step), grid=grid)}, attrs={"step": step}, keep=3)

    def dropping(old: Any, new: Any) -> None:
        if not str(old).endswith(".partial"):
            replace(old, new)

    def steps() -> list[int]:
        names = "state.h5", "state.h5.1", "state.h5.2"
        return [int(h5py.File(shared_tmp_path / name).attrs["step"]) for name in names]

    for step in range(3):
        save(step)
    monkeypatch.setattr(os, "replace", dropping)
    for _ in range(3):
        with pytest.raises(FileError, match=DROPPED):
            save(3)
    monkeypatch.setattr(os, "replace", replace)
    assert hdf5.load_all(path, grid).attrs["step"] == 2
    save(4)
    assert by_rank_0(comm, steps) == [4, 2, 1]


def test_what_another_program_adds_to_a_state_stays(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    path, A = shared_tmp_path / "state.h5", DistMatrix.eye(3, grid=grid)

    def add() -> None:
        with h5py.File(path, "a") as file:
            file["mine/x"] = np.arange(3)

    hdf5.save_all(path, {"w": A}, keep=1)
    by_rank_0(comm, add)
    with pytest.raises(
        ArgumentError, match=r"has datasets that pdgemm did not write, mine/x: it is replaced only with"
    ):
        hdf5.save_all(path, {"w": A}, keep=1)
    hdf5.save_all(path, {"w": A}, keep=1, overwrite=True)
    hdf5.save_all(path, {"w": A}, keep=1)
