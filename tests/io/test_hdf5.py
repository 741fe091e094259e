"""Matrices in files: every way in and out, for every layout; and what may go wrong."""

from __future__ import annotations

import itertools
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
from problems import BLOCKS, DTYPES, grid_shapes, sources
from stored_files import by_rank_0, dropped, edited, elements, only_file, read, refused, unchanged
from tiers import everything, pairs

from pdgemm import DistMatrix, ProcessGrid, pdgemm
from pdgemm.algorithms.protection.checksum import bilinear, checksum, text
from pdgemm.errors import ArgumentError, DTypeError, FileError, LayoutError, PdgemmError
from pdgemm.io import hdf5, hyperslabs, many_datasets, mpi_io, new_dataset, npy, pieces
from pdgemm.io.hyperslabs import parallel_h5py
from pdgemm.support import files

pytestmark = pytest.mark.mpi

SHAPES = [(0, 0), (0, 5), (4, 0), (1, 1), (7, 5), (13, 8), (29, 61)]
TYPES = (*DTYPES, "float16", "int8", "int32")


@pytest.mark.on_ranks(2, 4)
@pytest.mark.parametrize("way", ["best", "mpi-io"])
def test_what_is_saved_is_loaded_in_any_layout(
    comm: Any, shared_tmp_path: Path, parallel: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By MPI-IO too where h5py is parallel: other MPI libraries have other faults; in one transfer, and in many."""
    if way == "mpi-io":
        if not parallel:
            pytest.skip("without a parallel h5py it is the best way")
        monkeypatch.setattr(hyperslabs, "parallel_h5py", lambda: False)
    path, turn = shared_tmp_path / "a.h5", itertools.count()
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as one, ProcessGrid(comm, shape[::-1]) as other:
            for (case, (m, n)), source in itertools.product(enumerate(SHAPES), sources(shape)):
                number = next(turn)
                (mb, nb, ka, kb), order = BLOCKS[number % len(BLOCKS)], "CF"[number % 2]
                monkeypatch.setattr(pieces, "ELEMENTS", (1 << 19, 40)[number % 4 == 1])
                for dtype in TYPES if everything() else [TYPES[number % len(TYPES)]]:
                    x = elements((m, n), dtype, case)
                    A = DistMatrix.from_global(x, grid=one, block=None if mb is None else (mb, nb), source=source)
                    A = A if order == "C" else DistMatrix(np.asfortranarray(A.local), one, A.distribution, "F")
                    part, seen = x[m // 3 :, : n - n // 4], list[tuple[int, int]]()
                    views = (A, x), (A.T, x.T), (A[m // 3 :, : n - n // 4].H, part.conj().T)
                    view, whole = views[number % 3]
                    report = hdf5.save(path, "group/x", view, progress=lambda *x: seen.append(x))  # noqa: B023
                    assert report.method == ("mpio" if parallel and way == "best" else "mpi-io")
                    assert seen == [(x, len(seen)) for x in range(1, len(seen) + 1)]
                    assert len(seen) > 1 or number % 4 != 1 or whole.size <= 40 * comm.size
                    assert np.array_equal(read(comm, path, "group/x"), whole)
                    B = hdf5.load(path, "group/x", other, None if ka is None else (ka, kb), verify=True)
                    assert B.dtype == dtype and np.array_equal(B.allgather(), whole)
                    T = hdf5.load(path, "group/x", one, (3, 2), source=source, transpose=True, verify=True)
                    assert T.order == "F" and np.array_equal(T.allgather(), whole.T)


def test_compressed_chunks_are_written_by_all_ranks_or_by_one_for_all(
    comm: Any, grid: Any, shared_tmp_path: Path, parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shared_tmp_path / "z.h5"
    monkeypatch.setattr(pieces, "ELEMENTS", 150)  # many transfers
    empty = DistMatrix.zeros((0, 4), grid=grid)
    for dtype, options in (
        ("f8", {"chunks": (8, 9), "compression": "gzip"}),
        ("c8", {"compression": "gzip" if parallel else "lzf"}),  # HDF5 1.10 cannot read lzf on several ranks
        ("f2", {"chunks": True}),
    ):
        A = DistMatrix.random((50, 40), grid=grid, block=(7, 6), dtype=dtype)
        report = hdf5.save(path, "g/x", A, **options)  # type: ignore[arg-type]
        assert report.method == ("mpio" if parallel else "one writer")
        hdf5.save(path, "empty", empty, **options)  # type: ignore[arg-type]

        def look() -> Any:
            with h5py.File(path, "r") as file:
                return file["g/x"].chunks, file["g/x"].compression, np.array(file["g/x"]), file["empty"].shape

        chunks, compression, values, shape = by_rank_0(comm, look)
        assert compression == options.get("compression") and shape == (0, 4)
        assert chunks == (8, 9) if dtype == "f8" else chunks
        assert np.array_equal(values, A.allgather())
        assert np.array_equal(hdf5.load(path, "g/x", grid, 3, verify=True).allgather(), values)
    v = DistMatrix.random((50, 1), grid=grid)
    hdf5.save(path, "v", v, chunks=(20, 1), compression="gzip", ndim=1)
    assert np.array_equal(hdf5.load(path, "v", grid, verify=True).allgather(), v.allgather())

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with unchanged(comm, shared_tmp_path):
        for wrong in ({"compression": "zzz"}, {"chunks": (60, 60)}, {"chunks": "x"}):
            with pytest.raises(FileError):
                hdf5.save(path, "g/x", A, **wrong)  # type: ignore[arg-type]
        if not parallel:  # rank 0 cannot write, when others have sent their elements
            monkeypatch.setattr(hyperslabs, "_selected", full)
            refused(comm, FileError, "No space left on device", hdf5.save, path, "g/x", A, compression="gzip")


@pytest.mark.parametrize("where", ["ascontiguousarray", "empty"])
def test_one_writer_and_a_rank_without_memory(
    comm: Any, grid: Any, parallel: bool, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Nobody waits for the elements of another rank, which raises."""

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("no memory left")

    if parallel:
        pytest.skip("every rank writes")
    names = {x: getattr(np, x) for x in ("ascontiguousarray", "empty", "uint8", "ndarray")}
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(hyperslabs, "np", SimpleNamespace(**{**names, where: failing}))
    A = DistMatrix.random((50, 40), grid=grid, block=(7, 6))
    with pytest.raises(MemoryError):
        hdf5.save(shared_tmp_path / "z.h5", "x", A, compression="gzip")
    assert by_rank_0(comm, lambda: list(shared_tmp_path.iterdir())) == []


def test_a_dataset_of_one_dimension_is_a_column(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    """Whatever the way that it is read; written as one again; and a grid of all ranks where none is given."""
    path, v = shared_tmp_path / "v.h5", np.arange(37.0)
    here = shared_tmp_path / ("ab.h5" if parallel_h5py() else "a:b.h5")  # ROMIO takes a: for a kind of file system

    for each in (path, here):
        with edited(comm, each, "w") as file:
            file["plain"], file["big"], file["g/i"], file["none"] = v, v.astype(">f8"), v.astype("i4"), v[:0]
            file.create_dataset("zipped", data=v, chunks=(5,), compression="gzip")
            layout = h5py.VirtualLayout((37,), "f8")
            layout[:] = h5py.VirtualSource(".", "plain", (37,))
            file.create_virtual_dataset("virtual", layout)
            for at in range(12):
                file[f"many/inner/{at}"] = v[:at]
    for name in ("plain", "big", "g/i", "zipped", "virtual"):
        A = hdf5.load(path, name, grid, 4, dtype="f8")
        assert A.shape == (37, 1) and np.array_equal(A.allgather()[:, 0], v), name
        assert np.array_equal(hdf5.load(path, name, grid, transpose=True, dtype="f8").allgather(), [v]), name
        part = hdf5.load(path, name, grid, rows=slice(5, 20), dtype="f8")
        assert np.array_equal(part.allgather()[:, 0], v[5:20]), name
        report = hdf5.save(path, "again", A, ndim=1)
        assert report.shape == (37,) and "again (37 float64, " in str(report)
        assert np.array_equal(by_rank_0(comm, lambda: h5py.File(path)["again"][()]), v)
        assert hdf5.load(path, "again", grid, verify=True).allclose(A.redistribute(grid=grid))
    assert hdf5.load(path, "none", grid).shape == (0, 1)
    B = DistMatrix.random((6, 37), grid=grid)
    C = pdgemm(1, B, hdf5.dataset(path, "zipped", grid))
    assert np.allclose(C.allgather()[:, 0], B.allgather() @ v)
    for load in (
        lambda: hdf5.load(path, "plain"),
        lambda: hdf5.load(f"{path}:/plain"),
        lambda: hdf5.load(f"{here}:plain"),
    ):
        A = load()
        assert A.grid.size == comm.size and np.array_equal(A.allgather()[:, 0], v)
    assert load().grid is A.grid
    assert hdf5.dataset(f"{path}:/plain").shape == (37, 1)
    wrong: list[tuple[type[Exception], str, Any]] = [
        (LayoutError, r"\(37, 1\) is not saved with ndim=3", lambda: hdf5.save(path, "x", A, ndim=3)),
        (LayoutError, r"\(6, 37\) is not saved with ndim=1", lambda: hdf5.save(path, "x", B, ndim=1)),
        (ArgumentError, "the name of the dataset, and the grid", lambda: hdf5.load(path)),
        (ArgumentError, "the name of the dataset, and the grid", lambda: hdf5.load(f"{path}:/plain", grid)),
        (FileError, r"v.h5:many is a group; it has (/many/inner/\d+ .*){10}, \.\.\.$", lambda: hdf5.load(path, "many")),
        (FileError, "v.h5 has no dataset x; it has .*, ...$", lambda: hdf5.load(path, "x")),
    ]
    for kind, message, use in wrong:
        refused(comm, kind, message, use)


def test_a_callback_that_raises_is_heard_when_all_is_done(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    def boom(done: int, total: int) -> None:
        raise KeyError("mine")

    path, A = shared_tmp_path / "a.h5", DistMatrix.random((20, 20), grid=grid)
    with pytest.raises(KeyError):
        hdf5.save(path, "x", A, progress=boom if comm.rank == 0 else None)
    assert only_file(shared_tmp_path, comm) == []
    hdf5.save(path, "x", A)
    with pytest.raises(KeyError):
        hdf5.load(path, "x", grid, progress=boom if comm.rank == comm.size - 1 else None)


def test_everything_else_in_the_file_stays(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    path, A = shared_tmp_path / "a.h5", DistMatrix.random((9, 9), grid=grid)

    def add_header() -> None:
        with path.open("rb+") as file:
            file.write(b"a header of 512 bytes")
        path.chmod(0o640)

    def look() -> Any:
        assert path.read_bytes().startswith(b"a header of 512 bytes")
        with h5py.File(path, "r") as file:
            assert (file.attrs["title"], file["g"].attrs["unit"], file["top"].asstr()[()]) == ("mine", "m", "text")
            assert isinstance(file.get("soft", getlink=True), h5py.SoftLink) and file["hard"] == file["g/other"]
            assert file[file["reference"][0]][:].tolist() == [0, 1, 2, 3, 4]
            found = [np.array(file[name]) for name in ("g/x", "y", "g/z")]
            return found, dict(file["y"].attrs), path.stat().st_mode & 0o777

    with edited(comm, path, "w", userblock_size=512) as file:
        file.attrs["title"], file["top"] = "mine", "text"
        file["g/other"], file["g/x"] = np.arange(5), np.zeros((9, 9))
        file["g"].attrs["unit"] = "m"
        file["soft"], file["hard"] = h5py.SoftLink("/g"), file["g/other"]
        file["reference"] = np.array([file["g/other"].ref], h5py.ref_dtype)
    by_rank_0(comm, add_header)
    for name in ("/g/x", "y", "soft/z"):
        hdf5.save(path, name, A, overwrite=True)
    found, attributes, mode = by_rank_0(comm, look)
    assert all(np.array_equal(x, A.allgather()) for x in found) and mode == 0o640
    assert attributes["pdgemm_dtype"] == b"float64"
    assert json.loads(attributes["pdgemm_layout"])["grid"] == list(grid.shape)
    assert only_file(shared_tmp_path, comm) == ["a.h5"]


def test_the_space_of_a_replaced_dataset_is_used_again(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    path, sizes = shared_tmp_path / "a.h5", []
    hdf5.save(path, "other", DistMatrix.eye(7, grid=grid))
    for seed in range(4):
        hdf5.save(path, "x", DistMatrix.random((80, 80), grid=grid, seed=seed))
        sizes.append(by_rank_0(comm, lambda: path.stat().st_size))
    assert sizes[-1] - sizes[0] < 80 * 80 * 8  # what grows are a few kilobytes of HDF5's own


# ------------------------------------------------------------------ the checksum
def test_the_checksum_does_not_depend_on_the_layout_and_sees_any_change(comm: Any) -> None:
    for dtype in DTYPES:
        sums = set()
        for shape, block in itertools.product(grid_shapes(comm.size), (None, 1, (2, 3))):
            with ProcessGrid(comm, shape) as grid:
                A = DistMatrix.random((13, 8), grid=grid, block=block, dtype=dtype)
                sums.add(checksum(A))
                rows, cols = A.indices()
                swapped = np.where(rows == 0, 1, np.where(rows == 1, 0, rows))
                changed = [text(grid.comm, bilinear(A.local, swapped, cols))]
                if np.dtype(dtype).kind == "c":
                    exchanged = A.local.imag + 1j * A.local.real
                    changed.append(text(grid.comm, bilinear(exchanged.astype(dtype), rows, cols)))
                if A.distribution.owner(12, 7) == grid.coords:
                    A.local[-1, -1] = np.nextafter(A.local[-1, -1].real, 2, dtype=A.local.real.dtype)
                assert not sums & {checksum(A), *changed}
        assert len(sums) == 1


def test_the_checksum_is_that_of_files_written_before(grid: Any) -> None:
    """Files record it, so it stays the same in all versions; another one would need another name."""
    for x, recorded in (
        (np.arange(12.0).reshape(4, 3), "mixed64:520ad58aef8c0000"),
        (np.arange(6, dtype="F").reshape(2, 3), "mixed64:39ef3aa80f200000"),
    ):
        assert checksum(DistMatrix.from_global(x, grid=grid)) == recorded


def test_the_checksum_sees_bits_of_several_elements() -> None:
    """One bit of each of an even number of elements: high ones alone would cancel modulo 2^64."""
    x = np.random.default_rng(3).standard_normal((30, 20))
    rows, cols = np.arange(30), np.arange(20)
    right = int(bilinear(x, rows, cols)[0])
    for bit in range(64):
        for number in (2, 4, 6, 600):
            changed = x.copy()
            changed.view(np.uint64).ravel()[:number] ^= np.uint64(1 << bit)
            assert int(bilinear(changed, rows, cols)[0]) != right, (bit, number)


# ------------------------------------------------------------------ bad input
def test_unreadable_input_is_refused_on_all_ranks_alike(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    path, text = shared_tmp_path / "a.h5", shared_tmp_path / "a.txt"

    by_rank_0(comm, lambda: text.write_text("not HDF5\n" * 100))
    with edited(comm, path, "w") as file:
        file["x"], file["number"], file["cube"] = np.eye(3), 3.0, np.zeros((2, 2, 2))
        file["integers"], file["complex"] = np.zeros((2, 2), "i8"), np.zeros((2, 2), "c16")
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
        (shared_tmp_path, "x", {}, FileError, "."),
        (path, "number", {}, LayoutError, r"neither a matrix nor a vector: its shape is \(\)"),
        (path, "cube", {}, LayoutError, r"neither a matrix nor a vector: its shape is \(2, 2, 2\)"),
        (path, "integers", {}, DTypeError, "int64; a matrix can be of float16, float32.*convert with dtype="),
        (path, "strings", {"dtype": "float64"}, DTypeError, "cannot become float64"),
        (path, "complex", {"dtype": "float64"}, DTypeError, "complex128, which cannot become float64"),
        (path, "x", {"dtype": "int16"}, DTypeError, "dtype=int16"),
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
        (path, "old", {"rows": (0, 3), "verify": True}, ArgumentError, "the whole dataset, and not a part of it"),
    ]
    if comm.size > 1:
        cases.append((path, "old", {"rows": (comm.rank, 6)}, ArgumentError, "different arguments"))
    for file, name, options, kind, message in cases:
        refused(comm, kind, message, hdf5.load, file, name, grid, **options)
    for name in ("damaged", "old"):
        assert hdf5.load(path, name, grid).shape == (6, 5)
    hdf5.save(path, "whole", DistMatrix.random((6, 5), grid=grid))
    assert hdf5.load(path, "whole", grid, rows=(0, 6), verify=True).shape == (6, 5)  # which is all
    A = hdf5.load(path, "whole", grid, rows=(1, 3), cols=slice(2))
    assert str(A.report).startswith(f"read {path}:whole (rows 1:3, columns 0:2 of 6 x 5 float64, 32 B) by mpi")
    assert hdf5.save(path, "whole", A, replaces=A.report).shape == (2, 2)  # nobody has saved meanwhile
    refused(comm, FileError, "was replaced after it was read", hdf5.save, path, "whole", A, replaces=A.report)


def test_unwritable_output_is_refused_and_nothing_is_lost(
    comm: Any, grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    A, old = DistMatrix.random((30, 30), grid=grid), shared_tmp_path / "old.h5"
    hdf5.save(old, "x", A)
    hdf5.save(old, "g/y", A)
    for path, name, message in [
        (shared_tmp_path / "none" / "a.h5", "x", "does not exist"),
        (shared_tmp_path, "x", "is a folder"),
        (old, "x/y", "old.h5: "),  # a dataset stands where a group is needed
        (old, "g", "old.h5: g exists already"),  # and the reverse
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
    """The operating system lets no file of this process grow beyond 150 kB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_has_no_room(
    comm: Any, grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel: bool
) -> None:
    """A full disk and a limit are met before the first byte; else a write fails half-way, and what was there stays."""
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
            for module in (files, new_dataset):  # where the file system cannot tell, MPI-IO's writes fail on some ranks
                monkeypatch.setattr(module, "reserve", lambda file, size: None)
            with pytest.raises(FileError, match="a.h5"):
                hdf5.save(path, "x", DistMatrix.random((200, 200), grid=grid, block=(200, 20)))
    assert only_file(shared_tmp_path, comm) == ["a.h5"]
    assert np.array_equal(hdf5.load(path, "x", grid, verify=True).local, old.local)


def test_a_storage_that_drops_what_describes_a_dataset(
    comm: Any, grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The elements are there; superblock, headers, attributes or the end of the file are not: nothing is published."""
    path, A = shared_tmp_path / "a.h5", DistMatrix.random((30, 30), grid=grid)

    def without_checksum(partial: Path, _: Any, name: str = "x") -> None:
        with h5py.File(partial, "r+") as file:
            del file[name].attrs["pdgemm_checksum"]

    def another(partial: Path, _: Any, name: str = "x") -> None:
        with h5py.File(partial, "r+") as file:
            del file[name]
            file[name] = np.zeros((30, 29))

    def without_others(partial: Path, _: Any) -> None:
        with h5py.File(partial, "r+") as file:
            del file["kept"]

    def elsewhere(
        partial: Path, _: Any
    ) -> None:  # shape, type and checksum are right, and other elements were compared
        with h5py.File(partial, "r+") as file:
            file.move("a", "c")
            file["a"] = np.zeros((30, 30))
            file["a"].attrs.update(file["c"].attrs)
            del file["c"]

    hdf5.save(path, "kept", A)
    hdf5.save(path, "x", A)
    lost = "h5: what was written is not what the file holds"
    with unchanged(comm, shared_tmp_path):
        for fault in (*dropped, without_checksum, another, without_others):
            monkeypatch.setattr(new_dataset, "to_disk", fault)
            for check in (True, False):
                refused(comm, FileError, rf"a\.{lost}", hdf5.save, path, "x", A, check=check)
        for fault in (
            *dropped,
            partial(without_checksum, name="a"),
            partial(another, name="a"),
            elsewhere,
        ):  # of one of two
            monkeypatch.setattr(many_datasets, "to_disk", fault)
            state = shared_tmp_path / "state.h5"
            refused(comm, FileError, rf"state\.{lost}", hdf5.save_all, state, {"a": A, "b": A})


@pytest.mark.parametrize("fault", ["lost", "fails"])
def test_a_write_of_one_rank_that_is_lost_or_fails(
    comm: Any, grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel: bool, fault: str
) -> None:
    """An MPI library that keeps a failed write to itself; and an error that all ranks have to hear of."""
    path, A = shared_tmp_path / "a.h5", DistMatrix.random((30, 30), grid=grid)
    module, name = (hyperslabs, "opened_by_hdf5") if parallel else (mpi_io, "opened_by_mpi_io")
    original = getattr(module, name)

    @contextmanager
    def opened(*arguments: Any, write: bool = False) -> Iterator[Any]:
        with original(*arguments, write=write) as transfer:

            def faulty(row: int, col: int, part: np.ndarray) -> None:
                here = comm.rank == comm.size // 2
                transfer(row, col, part * (fault == "fails" or not here))  # nobody is left alone in it
                if here and fault == "fails":
                    raise files.file_error(path, OSError(28, "No space left on device"))

            yield faulty if write else transfer

    monkeypatch.setattr(module, name, opened)
    said = "what was written is not what the file holds" if fault == "lost" else "No space left on device"
    refused(comm, FileError, f"a.h5: {said}", hdf5.save, path, "x", A)
    assert only_file(shared_tmp_path, comm) == []
    if fault == "lost":
        hdf5.save(path, "x", A, check=False)  # the check was what found it
        refused(comm, FileError, "damaged", hdf5.load, path, "x", grid, verify=True)


# ------------------------------------------------------------------ parts of datasets
M, N = 43, 37
PARTS: list[tuple[Any, Any]] = [
    (None, None),
    (slice(5, 31), None),
    (None, slice(7, 29)),
    ((3, 40), (1, 2)),
    (range(10, 11), range(N)),
    (slice(-9, None), slice(None, -30)),
    (slice(20, 20), None),
    (slice(30, 1000), (36, 37)),
]


def as_slice(given: Any) -> slice:
    if given is None or isinstance(given, slice):
        return given or slice(None)
    return slice(given[0], given[1]) if isinstance(given, tuple) else slice(given.start, given.stop)


def write_in_every_storage(path: Path, x: np.ndarray) -> None:
    """A matrix in every storage: in chunks, compressed, big-endian, in other types, in pieces of other datasets."""
    with h5py.File(path, "w", userblock_size=512) as file:
        file["contiguous"] = x
        file.create_dataset("chunked", data=x, chunks=(7, 9))
        file.create_dataset("growing", data=x, maxshape=(None, N))
        file.create_dataset("gzip", data=x, chunks=(8, 8), compression="gzip", shuffle=True, fletcher32=True)
        file["big_endian"] = x.astype(">f8")
        file["integers"], file["half"], file["single"] = x.astype("i2"), x.astype("f2"), x.astype("f4")
        layout = h5py.VirtualLayout(x.shape, x.dtype)
        layout[:20] = h5py.VirtualSource(path, "contiguous", x.shape)[:20]
        layout[20:] = h5py.VirtualSource(path, "chunked", x.shape)[20:]
        file.create_virtual_dataset("virtual", layout)


@pytest.mark.on_ranks(2, 4)
@pytest.mark.parametrize("way", ["best", "without a parallel h5py"])
def test_parts_of_every_storage(
    comm: Any, shared_tmp_path: Path, parallel: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way != "best":
        if not parallel:
            pytest.skip("without a parallel h5py it is the best way")
        monkeypatch.setattr(hyperslabs, "parallel_h5py", lambda: False)
    path = shared_tmp_path / "parts.h5"
    x = np.random.default_rng(3).standard_normal((M, N)) * 100
    by_rank_0(comm, lambda: write_in_every_storage(path, x))
    types = {"integers": "i2", "half": "f2", "single": "f4"}
    names = ["contiguous", "chunked", "growing", "gzip", "big_endian", *types, "virtual"]
    in_place = dict.fromkeys(("contiguous", "half", "single"), "mpi-io")
    expected = in_place if way != "best" or not parallel else dict.fromkeys(names[:-1], "mpio")
    turn = itertools.cycle(itertools.product([False, True], [None, (3, 2)], [1 << 12, 0]))
    grids = [ProcessGrid(comm, shape) for shape in grid_shapes(comm.size)]
    for made, name, (rows, cols) in pairs(grids, names, PARTS):
        transpose, block, gap = next(turn)
        monkeypatch.setattr(mpi_io, "_GAP", gap)  # each row alone, and many together
        dtype = "complex64" if name == "contiguous" and made is grids[0] else "float64" if name in types else None
        A = hdf5.load(path, name, made, block, rows=rows, cols=cols, transpose=transpose, dtype=dtype)
        part = x[as_slice(rows), as_slice(cols)].astype(types.get(name, "f8"))
        assert np.array_equal(A.allgather(), (part.T if transpose else part).astype(dtype)), (name, rows, cols)
        assert A.report.method == expected.get(name, "independent")
        assert A.report.bytes == part.nbytes
        assert A.report.shape == (M, N)
        assert (A.report.part is None) == (part.shape == x.shape)
    for made in grids:
        made.free()


def test_only_the_part_is_read(comm: Any, grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a dataset of 8 GiB without any blocks on disk, as the system counts the bytes that each rank reads."""
    h5, plain = shared_tmp_path / "large.h5", shared_tmp_path / "large.npy"

    def sparse() -> None:
        with h5py.File(h5, "w") as file:
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plist.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            plist.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            file.create_dataset("x", (1 << 15, 1 << 15), "f8", dcpl=plist)
        np.lib.format.open_memmap(plain, "w+", "f8", (1 << 15, 1 << 15))

    def counted() -> int:
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(dict(line.split(": ") for line in lines)["rchar"])

    by_rank_0(comm, sparse)
    loads: list[Any] = [
        lambda **part: hdf5.load(h5, "x", grid, **part),
        lambda **part: npy.load(plain, grid, **part),
    ]
    for load, parallel in itertools.product(loads, dict.fromkeys((hyperslabs.parallel_h5py(), False))):
        monkeypatch.setattr(hyperslabs, "parallel_h5py", lambda parallel=parallel: parallel)
        for part in ({"rows": (1000, 1100), "cols": (5, 15)}, {"rows": slice(32760, None), "cols": (32000, 32700)}):
            load(rows=(0, 1), cols=(0, 1))  # modules, libraries
            before = counted()
            A = load(**part)
            read = comm.allreduce(counted() - before)
            assert isinstance(A, DistMatrix)
            # a collective read takes what lies between the rows, too, as far as its buffers go
            between = 0 if A.report.method != "mpio" else A.shape[0] * (1 << 15) * A.dtype.itemsize
            assert read < A.nbytes + between + comm.size * 300_000
