"""Outputs replace files of pdgemm, and other data only with --force; file names that a storage loses."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from stored_files import by_rank_0, contents, edited, only_file, refused, unchanged, write

from pdgemm import DistMatrix, linalg
from pdgemm.errors import ArgumentError, DTypeError, FileError, LayoutError
from pdgemm.io import hdf5, npy, safetensors, scaled_files, source
from pdgemm.tools import calibrate
from pdgemm.tools.cli.commands import cli
from pdgemm.tools.profiling.trace_file import trace

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("everyone")]
REFUSED = r"exists, and .*: it is replaced only with overwrite=True"


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


DOORS: dict[str, tuple[Callable[[Path], None], Callable[[Path, Any, Any], Callable[..., object]]]] = {
    "hdf5.save": (hdf5_of_another, lambda path, eye, grid: partial(hdf5.save, path, "x", eye)),
    "hdf5.save of a vector": (hdf5_of_another, lambda path, eye, grid: partial(hdf5.save, path, "x", np.ones(3))),
    "hdf5.save_all": (hdf5_of_another, lambda path, eye, grid: partial(hdf5.save_all, path, {"x": eye})),
    "save_all over text": (text_of_another, lambda path, eye, grid: partial(hdf5.save_all, path, {"x": eye})),
    "save_scaled": (hdf5_of_another, lambda path, eye, grid: partial(scaled_files.save_scaled, path, {"x": eye})),
    "npy.save": (npy_of_another, lambda path, eye, grid: partial(npy.save, path, eye)),
    "npy.save over text": (text_of_another, lambda path, eye, grid: partial(npy.save, path, eye)),
    "safetensors": (tensors_of_another, lambda path, eye, grid: partial(safetensors.save_all, path, {"x": eye})),
    "trace": (text_of_another, lambda path, eye, grid: partial(traced, path, grid)),
}


@pytest.mark.parametrize("name", DOORS)
def test_other_data_is_replaced_only_on_request(comm: Any, grid: Any, shared_tmp_path: Path, name: str) -> None:
    path, (other, door) = shared_tmp_path / "file", DOORS[name]
    save = door(path, DistMatrix.eye(4, grid=grid), grid)
    by_rank_0(comm, lambda: other(path))
    with unchanged(comm, shared_tmp_path):
        for _ in range(2):
            refused(comm, ArgumentError, f"{path}.* {REFUSED}", save)
    save(overwrite=True)
    save()  # replaces a file of pdgemm
    by_rank_0(comm, lambda: path.write_bytes(b""))  # an empty file may be replaced
    if not name.startswith("hdf5.save") or name == "hdf5.save_all":  # formats that do not open the old file
        save()
    if comm.size > 1:
        refused(comm, ArgumentError, "different arguments", save, overwrite=comm.rank > 0)


def never(*arguments: Any, **how: Any) -> None:
    raise AssertionError("elements were read, or links measured")


def test_commands_replace_other_data_only_with_force(
    comm: Any, grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command refuses each of its outputs, naming --force, before anything is read or measured."""
    monkeypatch.chdir(shared_tmp_path)
    hdf5.save("a.h5", "x", DistMatrix.eye(4, grid=grid))

    def others() -> None:
        for name in ("t.json", "r.html", "p.png", "p.svg", "m.json", "s.html"):
            text_of_another(Path(name))
        hdf5_of_another(Path("o.h5"))
        hdf5_of_another(Path("parts.h5"))
        Path("s.jsonl").touch()

    by_rank_0(comm, others)
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
    ]
    alone = [
        ["plan", *question, "--plot", "p.png"],
        ["simulate", *question, "--plot", "p.svg"],
        ["profile", "none.json", "--plot", "p.svg"],
        ["plot", "s.jsonl", "--out", "s.html"],
    ]
    with monkeypatch.context() as patched, unchanged(comm, shared_tmp_path):
        patched.setattr(source.Source, "read", never)
        patched.setattr(calibrate, "calibrate", never)
        for words in [*commands, ["calibrate", "-o", "m.json"], *(alone if comm.size == 1 else [])]:
            with pytest.raises(ArgumentError, match=r"exists, and was not written by pdgemm: .* with --force$"):
                cli.main(words, standalone_mode=False)
    for words in commands:
        cli.main([*words, "--force"], standalone_mode=False)
        cli.main(words, standalone_mode=False)  # replaces its own output
    refused(comm, ArgumentError, REFUSED, hdf5.save, "parts.h5", "x", np.ones(3))  # messages no longer name --force


def test_messages_name_options_of_the_command(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "i.h5"
    write(comm, path, i=(np.ones((3, 3), bool), {}), text=(np.full((3, 3), b"abc"), {}), x=(np.eye(3), {}))
    for name, there, typed in (("i", r"convert with dtype=$", "convert with --dtype$"), ("text", "uint64$", "uint64$")):
        refused(comm, DTypeError, there, hdf5.load, path, name, grid)
        with pytest.raises(DTypeError, match=typed):
            cli.main(["gram", f"{path}:/{name}", "-o", f"{path}:/new"], standalone_mode=False)
    with pytest.raises(LayoutError, match=r"x\[:, None\] of a vector x is one column"):
        DistMatrix.from_global(np.ones(3), grid=grid)


# ------------------------------------------------------------------ names
def test_impossible_outputs_are_refused_before_anything_is_read(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent of the output is not a group, or the output is not a dataset."""
    monkeypatch.chdir(shared_tmp_path)

    def make() -> None:
        with h5py.File("a.h5", "w") as file:
            file["X"], file["group/in"], file["type"] = np.eye(4), np.eye(4), np.dtype("f8")
            file["dangling"], file["round"] = h5py.SoftLink("/none"), h5py.SoftLink("/round")
            file["soft"], file["to_group"] = h5py.SoftLink("/X"), h5py.SoftLink("/group")
        Path("folder").mkdir()

    by_rank_0(comm, make)
    product, gram = ["multiply", "a.h5:/X", "a.h5:/X", "-o"], ["gram", "a.h5:/X", "-o"]
    with monkeypatch.context() as patched, unchanged(comm, shared_tmp_path):
        patched.setattr(source.Source, "read", never)
        for name, said in {
            "X/q": "X is not a group", "X/q/r": "X is not a group", "group/in/q": "group/in is not a group",
            "to_group/in/q": "to_group/in is not a group", "type/q": "type is not a group",
            "dangling/q": "dangling is not a group", "soft/q": "soft is not a group", "/X//./q": "X is not a group",
            "round/q": "too many links", "group": "group exists already, and is not a dataset",
            "type": "type exists already, and is not a dataset", "to_group": "exists already, and is not a dataset",
        }.items():  # fmt: skip
            for words in (gram, product) if name == "X/q" else (gram,):
                for more in ([], ["--memory", "64MiB"]) if words is product else ([],):
                    with pytest.raises(FileError, match=said):
                        cli.main([*words, f"a.h5:{name}", "--force", *more], standalone_mode=False)
        for path in ("folder:/x", "none/a.h5:/x", "a.h5/x.h5:/x"):
            with pytest.raises(FileError):
                cli.main([*gram, path], standalone_mode=False)
    cli.main([*gram, "a.h5:/to_group/new/er"], standalone_mode=False)
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
        refused(comm, ArgumentError, "elements of checksum", hdf5.save, h5, "s", s + comm.rank)


# ------------------------------------------------------------------ a storage that drops names
DROPPED = "the storage reported a new file under this name, but the name leads to another file"


def save_state(grid: Any, path: Path, step: int) -> None:
    hdf5.save_all(path, {"w": DistMatrix.full((3, 3), float(step), grid=grid)}, attrs={"step": step}, keep=3)


@pytest.mark.parametrize("call", ["replace", "link"])
def test_a_name_that_a_storage_drops(
    comm: Any, grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """If a rename or link has no effect, all ranks raise an error, no generation is lost, and later saves succeed."""
    state = shared_tmp_path / "state.h5"

    def save_others(step: int, call: Any) -> None:
        A, folder = DistMatrix.full((3, 3), float(step), grid=grid), shared_tmp_path
        call("a.h5", lambda: hdf5.save(folder / "a.h5", "x", A))
        call("a.npy", lambda: npy.save(folder / "a.npy", A))
        call("a.tensors", lambda: safetensors.save_all(folder / "a.tensors", {"x": A}))

    def is_dropped(name: str, save: Callable[[], object]) -> None:
        refused(comm, FileError, f"{name}: {DROPPED}", save)

    for step in range(3):
        save_state(grid, state, step)
    save_others(0, lambda name, save: save())
    before = by_rank_0(comm, lambda: contents(shared_tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(os, call, lambda old, new, **how: None)
        is_dropped("state.h5", lambda: save_state(grid, state, 3))
        if call == "replace":
            save_others(1, is_dropped)
        after = by_rank_0(comm, lambda: contents(shared_tmp_path))
    assert {*before.values()} == {*after.values()}
    assert all(after[x] == before[x] for x in ("state.h5", "a.h5", "a.npy", "a.tensors"))
    for step in (3, 4):
        save_state(grid, state, step)
        assert hdf5.load_all(state, grid).attrs["step"] == step
    files_there = [x for x in only_file(shared_tmp_path, comm) if x.startswith("state")]
    assert files_there == ["state.h5", "state.h5.1", "state.h5.2"]


def test_the_last_rename_alone_is_dropped(
    comm: Any, grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older states were renamed before the last rename was lost: no state is lost, and none is renamed again."""
    path, replace = shared_tmp_path / "state.h5", os.replace

    def steps() -> list[int]:
        return [int(h5py.File(f"{path}{x}").attrs["step"]) for x in ("", ".1", ".2")]

    for step in range(3):
        save_state(grid, path, step)
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", lambda old, new: str(old).endswith(".partial") or replace(old, new))
        for _ in range(3):
            refused(comm, FileError, DROPPED, save_state, grid, path, 3)
    assert hdf5.load_all(path, grid).attrs["step"] == 2
    save_state(grid, path, 4)
    assert by_rank_0(comm, steps) == [4, 2, 1]


def test_additions_of_another_program_to_a_state_stay(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    path, A = shared_tmp_path / "state.h5", DistMatrix.eye(3, grid=grid)

    hdf5.save_all(path, {"w": A}, keep=1)
    with edited(comm, path, "a") as file:
        file["mine/x"] = np.arange(3)
    with pytest.raises(ArgumentError, match=r"datasets that pdgemm did not write, mine/x: it is replaced only with"):
        hdf5.save_all(path, {"w": A}, keep=1)
    hdf5.save_all(path, {"w": A}, keep=1, overwrite=True)
    hdf5.save_all(path, {"w": A}, keep=1)
