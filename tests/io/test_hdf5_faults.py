"""Matrices in files: errors for bad input, impossible outputs, full disks, and lost writes."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
from stored_files import by_rank_0, dropped, edited, only_file, refused, unchanged

from pdgemm import DistMatrix
from pdgemm.errors import ArgumentError, DTypeError, FileError, LayoutError, PdgemmError
from pdgemm.io import dataset_access, hdf5, many_datasets, new_dataset
from pdgemm.support import files

pytestmark = pytest.mark.mpi


def test_unreadable_input_is_refused_on_all_ranks_alike(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    path, text = shared_tmp_path / "a.h5", shared_tmp_path / "a.txt"
    by_rank_0(comm, lambda: text.write_text("not HDF5\n" * 100))
    with edited(comm, path, "w") as file:
        file["x"], file["number"], file["cube"] = np.eye(3), 3.0, np.zeros((2, 2, 2))
        file["integers"], file["complex"] = np.zeros((2, 2), "i8"), np.zeros((2, 2), "c16")
        file["flags"] = np.ones((2, 2), bool)
        file["strings"], file["group/inner"] = np.array([[b"a"]]), np.eye(2)
    for name in ("damaged", "old"):
        hdf5.save(path, name, DistMatrix.random((6, 5), grid=grid))
    with edited(comm, path) as file:
        file["damaged"][3, 4] += 1e-12
        file["old"].attrs["pdgemm_checksum"] = "bilinear64:0123456789abcdef"
    cases: list[tuple[Path, str, dict[str, Any], type[PdgemmError], str]] = [
        (path, "y", {}, FileError, r"has no dataset y; it has .*/x \(3 x 3 float64\)"),
        (path, "group", {}, FileError, r"a.h5:group is a group; it has /group/inner \(2 x 2 float64\)$"),
        (shared_tmp_path / "none.h5", "x", {}, FileError, "no such file"),
        (text, "x", {}, FileError, "a.txt is not an HDF5 file"),
        (path, "number", {}, LayoutError, r"neither a matrix nor a vector: its shape is \(\)"),
        (
            path,
            "cube",
            {"block": 2},
            ArgumentError,
            "tensor of 3 dimensions: block, source, rows and cols are",
        ),
        (path, "flags", {}, DTypeError, "bool; a matrix can be of float16, float32.*convert with dtype="),
        (path, "strings", {"dtype": "float64"}, DTypeError, "cannot become float64"),
        (path, "complex", {"dtype": "float64"}, DTypeError, "complex128, which cannot become float64"),
        (path, "x", {"dtype": "bool"}, DTypeError, "dtype=bool"),
        (path, "x", {"dtype": "int8"}, DTypeError, "float64, which cannot become int8"),
        (path, "integers", {"dtype": "int8"}, DTypeError, "int64, which cannot become int8"),
        (path, "x", {"block": 0}, LayoutError, "block size must be >= 1, got 0"),
        (path, "x", {"source": (99, 0)}, LayoutError, "source 99"),
        (path, "x", {"verify": True}, FileError, "no checksum"),
        (path, "damaged", {"verify": True}, FileError, "damaged"),
        (path, "old", {"verify": True}, FileError, "a checksum of another version of pdgemm: load it without verify"),
        (path, "old", {"rows": slice(0, 6, 2)}, ArgumentError, r"rows are taken in steps of 1, got slice\(0, 6, 2\)"),
        (path, "old", {"cols": slice(None, None, -1)}, ArgumentError, "cols are taken in steps of 1"),
        (path, "old", {"cols": range(0, 5, 3)}, ArgumentError, "cols are taken in steps of 1"),
        (path, "old", {"rows": 3}, ArgumentError, r"rows are a pair \(start, stop\), a slice or a range, got 3"),
        (path, "old", {"rows": (2, 7)}, ArgumentError, "rows 2:7 are not within 0:6"),
        (path, "old", {"rows": (3, 2)}, ArgumentError, "the stop of rows must be >= 3, got 2"),
        (path, "old", {"rows": slice("a", None)}, ArgumentError, "rows are .* of whole numbers"),
        (path, "old", {"rows": (0, 3), "verify": True}, ArgumentError, "verify needs the whole dataset, not rows 0:3"),
    ]
    if comm.size > 1:
        cases.append((path, "old", {"rows": (comm.rank, 6)}, ArgumentError, "different arguments"))
    for file, name, options, kind, message in cases:
        refused(comm, kind, message, hdf5.load, file, name, grid, **options)
    for name in ("damaged", "old"):
        assert hdf5.load(path, name, grid).shape == (6, 5)
    hdf5.save(path, "whole", DistMatrix.random((6, 5), grid=grid))
    assert hdf5.load(path, "whole", grid, rows=(0, 6), verify=True).shape == (6, 5)  # the whole dataset can be verified
    A = hdf5.load(path, "whole", grid, rows=(1, 3), cols=slice(2))
    assert str(A.report).startswith(f"read {path}:whole (rows 1:3, columns 0:2 of 6 x 5 float64, 32 B) by mpi")
    assert hdf5.save(path, "whole", A, replaces=A.report).shape == (2, 2)  # no other job has saved since
    refused(comm, FileError, "was replaced after it was read", hdf5.save, path, "whole", A, replaces=A.report)


def test_unwritable_output_is_refused_and_nothing_is_lost(
    comm: Any, grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    A, old = DistMatrix.random((30, 30), grid=grid), shared_tmp_path / "old.h5"
    hdf5.save(old, "x", A)
    hdf5.save(old, "g/y", A)
    for path, name, message in [
        (shared_tmp_path / "none" / "a.h5", "x", "does not exist"),
        (old, "x/y", "old.h5: "),  # a dataset, not a group
        (old, "g", "old.h5: g exists already"),  # a group, not a dataset
        (old, "/", "'/' is not the name of a dataset"),
        (Path("/proc/a.h5"), "x", "proc"),
    ]:
        refused(comm, FileError, message, hdf5.save, path, name, A)
    refused(comm, DTypeError, "bfloat16 cannot be saved", hdf5.save, old, "b", A.astype("bfloat16"))
    monkeypatch.setattr(files.os, "access", lambda path, mode: False)
    refused(comm, FileError, "no permission", hdf5.save, old, "x", A)
    assert only_file(shared_tmp_path, comm) == ["old.h5"]
    assert np.array_equal(hdf5.load(old, "x", grid, verify=True).local, A.local)


@contextmanager
def small_files() -> Iterator[None]:
    """Let the operating system limit files of this process to 150 kB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_larger_than_the_free_space(
    comm: Any, grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel: bool
) -> None:
    """A full disk or a size limit is an error before the first write, or else during a write; the old file stays."""
    path, old = shared_tmp_path / "a.h5", DistMatrix.eye(5, grid=grid)
    hdf5.save(path, "x", old)
    usage = files.shutil.disk_usage(shared_tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(files.shutil, "disk_usage", lambda path: usage._replace(free=1000))
        with pytest.raises(FileError, match="No space left on device: 7200 bytes are needed, 1000 are free"):
            hdf5.save(shared_tmp_path / "b.h5", "x", DistMatrix.zeros((30, 30), grid=grid))
    with small_files():
        with pytest.raises(FileError, match="a.h5: File too large: 320000 bytes are needed"):
            hdf5.save(path, "x", DistMatrix.random((200, 200), grid=grid))
        if not parallel:  # HDF5 1.10 crashes when it cannot close a file that it failed to write
            for module in (files, new_dataset):  # if free space is unknown, MPI-IO's writes fail on some ranks
                monkeypatch.setattr(module, "reserve", lambda file, size: None)
            with pytest.raises(FileError, match="a.h5"):
                hdf5.save(path, "x", DistMatrix.random((200, 200), grid=grid, block=(200, 20)))
    assert only_file(shared_tmp_path, comm) == ["a.h5"]
    assert np.array_equal(hdf5.load(path, "x", grid, verify=True).local, old.local)


def damaging(change: Callable[..., None], *arguments: Any) -> Callable[[Path, Any], None]:
    """Return a replacement of `to_disk` that changes the file by plain h5py instead of flushing it to disk."""

    def to_disk(partial: Path, _: Any) -> None:
        with h5py.File(partial, "r+") as file:
            change(file, *arguments)

    return to_disk


def without_checksum(file: h5py.File, name: str) -> None:
    del file[name].attrs["pdgemm_checksum"]


def of_another_shape(file: h5py.File, name: str) -> None:
    del file[name]
    file[name] = np.zeros((30, 29))


def elsewhere(file: h5py.File) -> None:
    """Replace dataset a by other elements with the same shape, type and checksum attribute."""
    file.move("a", "c")
    file["a"] = np.zeros((30, 30))
    file["a"].attrs.update(file["c"].attrs)
    del file["c"]


def test_a_storage_that_drops_metadata_of_a_dataset(
    comm: Any, grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If superblock, headers, attributes or the end of the new file are lost, saving fails, and the old file stays."""
    path, A = shared_tmp_path / "a.h5", DistMatrix.random((30, 30), grid=grid)
    of_one, of_two = ([damaging(x, name) for x in (without_checksum, of_another_shape)] for name in "xa")
    hdf5.save(path, "kept", A)
    hdf5.save(path, "x", A)
    lost = "h5: the file does not hold the bytes that were written"
    with unchanged(comm, shared_tmp_path):
        for fault in (*dropped, *of_one, damaging(h5py.File.__delitem__, "kept")):
            monkeypatch.setattr(new_dataset, "to_disk", fault)
            for check in (True, False):
                refused(comm, FileError, rf"a\.{lost}", hdf5.save, path, "x", A, check=check)
        for fault in (*dropped, *of_two, damaging(elsewhere)):
            monkeypatch.setattr(many_datasets, "to_disk", fault)
            state = shared_tmp_path / "state.h5"
            refused(comm, FileError, rf"state\.{lost}", hdf5.save_all, state, {"a": A, "b": A})


@pytest.mark.parametrize("fault", ["lost", "fails"])
def test_a_write_of_one_rank_that_is_lost_or_fails(
    comm: Any, grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel: bool, fault: str
) -> None:
    """If a write of one rank is lost without an error, or raises one, all ranks raise an error."""
    path, A = shared_tmp_path / "a.h5", DistMatrix.random((30, 30), grid=grid)
    module, name = (dataset_access, "opened_by_hdf5") if parallel else (dataset_access, "opened_by_mpi_io")
    original = getattr(module, name)

    @contextmanager
    def opened(*arguments: Any, write: bool = False) -> Iterator[Any]:
        with original(*arguments, write=write) as transfer:

            def faulty(row: int, col: int, part: np.ndarray) -> None:
                here = comm.rank == comm.size // 2
                transfer(row, col, part * (fault == "fails" or not here))  # the write is collective
                if here and fault == "fails":
                    raise files.file_error(path, OSError(28, "No space left on device"))

            yield faulty if write else transfer

    monkeypatch.setattr(module, name, opened)
    said = "the file does not hold the bytes that were written" if fault == "lost" else "No space left on device"
    refused(comm, FileError, f"a.h5: {said}", hdf5.save, path, "x", A)
    assert only_file(shared_tmp_path, comm) == []
    if fault == "lost":
        hdf5.save(path, "x", A, check=False)  # without the check the loss is not noticed
        refused(comm, FileError, "damaged", hdf5.load, path, "x", grid, verify=True)


@pytest.mark.parametrize("where", ["ascontiguousarray", "empty"])
def test_one_writer_and_a_rank_without_memory(
    comm: Any, grid: Any, parallel: bool, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """If one rank runs out of memory, all ranks raise; the writer does not wait for its elements."""

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("no memory left")

    if parallel:
        pytest.skip("every rank writes")
    names = {x: getattr(np, x) for x in ("ascontiguousarray", "empty", "uint8", "ndarray")}
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(dataset_access, "np", SimpleNamespace(**{**names, where: failing}))
    A = DistMatrix.random((50, 40), grid=grid, block=(7, 6))
    with pytest.raises(MemoryError):
        hdf5.save(shared_tmp_path / "z.h5", "x", A, compression="gzip")
    assert by_rank_0(comm, lambda: list(shared_tmp_path.iterdir())) == []
