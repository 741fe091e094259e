"""Matrices in files: every way in and out, for every layout; and what may go wrong."""

from __future__ import annotations

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
from stored_files import by_rank_0, dropped, only_file
from tiers import square_grid

from pdgemm import DistMatrix, ProcessGrid, pdgemm
from pdgemm.algorithms.protection.checksum import bilinear, checksum, text
from pdgemm.errors import ArgumentError, DTypeError, FileError, LayoutError, PdgemmError
from pdgemm.io import hdf5, hyperslabs, many_datasets, mpi_io, new_dataset, pieces
from pdgemm.io.hyperslabs import parallel_h5py
from pdgemm.support import files

pytestmark = [pytest.mark.mpi, square_grid]

SHAPES = [(0, 0), (0, 5), (4, 0), (1, 1), (7, 5), (13, 8), (29, 61)]


@pytest.mark.parametrize("way", ["best", "mpi-io"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_saved_is_loaded_in_any_layout(
    comm: Any, shared_tmp_path: Path, parallel: bool, dtype: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By MPI-IO too where h5py is parallel: other MPI libraries have other faults."""
    if way == "mpi-io":
        if not parallel:
            pytest.skip("without a parallel h5py it is the best way")
        monkeypatch.setattr(hyperslabs, "parallel_h5py", lambda: False)
    path = shared_tmp_path / "a.h5"
    for number, shape in enumerate(grid_shapes(comm.size)):
        with ProcessGrid(comm, shape) as one, ProcessGrid(comm, shape[::-1]) as other:
            for case, (m, n) in enumerate(SHAPES):
                mb, nb, ka, kb = BLOCKS[(case + number) % len(BLOCKS)]
                for source in sources(shape):
                    block = None if mb is None else (mb, nb)
                    order = "CF"[case % 2]
                    A = DistMatrix.random((m, n), grid=one, block=block, source=source, dtype=dtype, seed=case)
                    A = A if order == "C" else DistMatrix(np.asfortranarray(A.local), one, A.distribution, "F")
                    whole = A.allgather()
                    report = hdf5.save(path, "group/x", A)
                    assert report.method == ("mpio" if parallel and way == "best" else "mpi-io")

                    def read_plainly() -> np.ndarray:
                        with h5py.File(path, "r") as file:
                            return np.array(file["group/x"])

                    assert np.array_equal(by_rank_0(comm, read_plainly), whole)
                    B = hdf5.load(path, "group/x", other, None if ka is None else (ka, kb), verify=True)
                    assert B.dtype == dtype
                    assert np.array_equal(B.allgather(), whole)
                    T = hdf5.load(path, "group/x", one, (3, 2), source=source, transpose=True, verify=True)
                    assert np.array_equal(T.allgather(), whole.T)
                    assert T.order == "F"


def test_files_of_others(comm: Any, grid: Any, shared_tmp_path: Path, parallel: bool) -> None:
    """Chunked, compressed, big-endian, other integers, scattered: each rank reads its own blocks."""
    path = shared_tmp_path / "theirs.h5"
    x = np.random.default_rng(3).standard_normal((43, 37)) * 100

    def write() -> None:
        with h5py.File(path, "w", userblock_size=512) as file:
            file["contiguous"] = x
            file.create_dataset("chunked", data=x, chunks=(7, 9))
            file.create_dataset("gzip", data=x, chunks=(8, 8), compression="gzip", shuffle=True, fletcher32=True)
            file.create_dataset("growing", data=x, maxshape=(None, 37))
            file["big_endian"] = x.astype(">f8")
            file["integers"] = x.astype("i2")
            file["half"] = x.astype("f2")
            file["single"] = x.astype("f4")
            file["compact"] = x[:3, :3]

    by_rank_0(comm, write)
    for name in ("contiguous", "chunked", "gzip", "growing", "big_endian", "integers", "half", "single"):
        expected = {"integers": x.astype("i2"), "half": x.astype("f2"), "single": x.astype("f4")}.get(name, x)
        for transpose in (False, True):
            A = hdf5.load(path, name, grid, (4, 5), dtype="float64", transpose=transpose)
            assert np.array_equal(A.allgather(), expected.T if transpose else expected), name
            in_place = "mpi-io" if name in ("contiguous", "single", "half") else "independent"
            assert A.report.method == ("mpio" if parallel else in_place)
    complex_ = hdf5.load(path, "contiguous", grid, dtype="complex128")
    assert np.array_equal(complex_.allgather(), x)


@pytest.mark.parametrize("dtype", ["float16", "int8", "int32", "complex64"])
def test_views_of_every_type_are_saved_as_matrices_of_their_own(
    comm: Any, grid: Any, shared_tmp_path: Path, dtype: str
) -> None:
    x = (np.random.default_rng(5).standard_normal((40, 31)) * 40).astype(dtype)
    x = x * (1 + 2j) if dtype == "complex64" else x
    x = x.astype(dtype)
    A = DistMatrix.from_global(x, grid=grid, block=(4, 3))
    views = [(A, x), (A.T, x.T), (A[5:33, 2:30], x[5:33, 2:30]), (A[7:8, :].T, x[7:8].T), (A[3:3, 4:9], x[3:3, 4:9])]
    for number, (view, expected) in enumerate([*views, (A[1:9, 5:].H, x[1:9, 5:].conj().T)]):
        hdf5.save(shared_tmp_path / "views.h5", f"v{number}", view)
        found = hdf5.load(shared_tmp_path / "views.h5", f"v{number}", grid, 3, verify=True)
        assert found.dtype == dtype
        assert np.array_equal(found.allgather(), expected)
    with pytest.raises(TypeError, match="bfloat16 cannot be saved"):
        hdf5.save(shared_tmp_path / "views.h5", "b", DistMatrix.zeros((3, 3), grid=grid, dtype="bfloat16"))


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
    before = by_rank_0(comm, path.read_bytes)
    for wrong in ({"compression": "zzz"}, {"chunks": (60, 60)}, {"chunks": "x"}):
        with pytest.raises(FileError):
            hdf5.save(path, "g/x", A, **wrong)  # type: ignore[arg-type]
    if not parallel:  # rank 0 cannot write, when others have sent their elements
        from pdgemm.io import hyperslabs

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(hyperslabs, "_selected", full)
            with pytest.raises(FileError, match="No space left on device"):
                hdf5.save(path, "g/x", A, compression="gzip")
    assert by_rank_0(comm, path.read_bytes) == before
    assert only_file(shared_tmp_path, comm) == ["z.h5"]


@pytest.mark.parametrize("where", ["ascontiguousarray", "empty"])
def test_one_writer_and_a_rank_without_memory(
    grid: Any,
    comm: Any,
    parallel: bool,
    shared_tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
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

    def write() -> None:
        for each in (path, here):
            with h5py.File(each, "w") as file:
                file["plain"], file["big"], file["g/i"], file["none"] = v, v.astype(">f8"), v.astype("i4"), v[:0]
                file.create_dataset("zipped", data=v, chunks=(5,), compression="gzip")
                layout = h5py.VirtualLayout((37,), "f8")
                layout[:] = h5py.VirtualSource(file["plain"])
                file.create_virtual_dataset("virtual", layout)
                file.create_group("many/inner")
                for at in range(12):
                    file[f"many/inner/{at}"] = v[:at]

    by_rank_0(comm, write)
    for name in ("plain", "big", "g/i", "zipped", "virtual"):
        dtype = "f8"
        A = hdf5.load(path, name, grid, 4, dtype=dtype)
        assert A.shape == (37, 1) and np.array_equal(A.allgather()[:, 0], v), name
        assert np.array_equal(hdf5.load(path, name, grid, transpose=True, dtype=dtype).allgather(), [v]), name
        part = hdf5.load(path, name, grid, rows=slice(5, 20), dtype=dtype)
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
        with pytest.raises(kind, match=message):
            use()


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


def test_many_small_transfers_make_the_same_file(
    comm: Any, grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "ELEMENTS", 40)
    path, seen = shared_tmp_path / "a.h5", []
    A = DistMatrix.random((57, 31), grid=grid, block=(5, 4))
    hdf5.save(path, "x", A, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == len(seen) > 1
    assert np.array_equal(hdf5.load(path, "x", grid, (5, 4), verify=True).local, A.local)


def test_everything_else_in_the_file_stays(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "a.h5"

    def write() -> None:
        with h5py.File(path, "w", userblock_size=512) as file:
            file.attrs["title"] = "mine"
            file["g/other"] = np.arange(5)
            file["g/x"] = np.zeros((9, 9))
            file["g"].attrs["unit"] = "m"
            file["top"] = "text"
            file["soft"] = h5py.SoftLink("/g")
            file["hard"] = file["g/other"]
            file["reference"] = np.array([file["g/other"].ref], h5py.ref_dtype)
        with path.open("rb+") as file:
            file.write(b"a header of 512 bytes")
        path.chmod(0o640)

    by_rank_0(comm, write)
    A = DistMatrix.random((9, 9), grid=grid)
    for name in ("/g/x", "y", "soft/z"):
        hdf5.save(path, name, A, overwrite=True)

    def look() -> Any:
        assert path.read_bytes().startswith(b"a header of 512 bytes")
        with h5py.File(path, "r") as file:
            assert file.attrs["title"] == "mine"
            assert file["g"].attrs["unit"] == "m"
            assert file["top"].asstr()[()] == "text"
            assert isinstance(file.get("soft", getlink=True), h5py.SoftLink)
            assert file["hard"] == file["g/other"]
            assert file[file["reference"][0]][:].tolist() == [0, 1, 2, 3, 4]
            found = [np.array(file[name]) for name in ("g/x", "y", "g/z")]
            return found, dict(file["y"].attrs), path.stat().st_mode & 0o777

    found, attributes, mode = by_rank_0(comm, look)
    for x in found:
        assert np.array_equal(x, A.allgather())
    assert mode == 0o640
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


def test_a_symbolic_link_keeps_pointing_to_the_file(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    link = shared_tmp_path / "link.h5"
    by_rank_0(comm, lambda: link.symlink_to(shared_tmp_path / "real.h5"))
    hdf5.save(link, "x", DistMatrix.eye(4, grid=grid))
    assert link.is_symlink()
    assert hdf5.load(shared_tmp_path / "real.h5", "x", grid).norm(1) == 1


# ------------------------------------------------------------------ the checksum
def test_the_checksum_does_not_depend_on_the_layout_and_sees_any_change(comm: Any) -> None:
    for dtype in DTYPES:
        sums = set()
        for shape in grid_shapes(comm.size):
            with ProcessGrid(comm, shape) as grid:
                for block in (None, 1, (2, 3)):
                    A = DistMatrix.random((13, 8), grid=grid, block=block, dtype=dtype)
                    sums.add(checksum(A))
                original = sums.copy()
                if A.distribution.owner(12, 7) == grid.coords:
                    A.local[-1, -1] = np.nextafter(A.local[-1, -1].real, 2, dtype=A.local.real.dtype)
                assert checksum(A) not in original
                rows, cols = A.indices()
                swapped = np.where(rows == 0, 1, np.where(rows == 1, 0, rows))
                assert text(grid.comm, bilinear(A.local, swapped, cols)) not in original
                if np.dtype(dtype).kind == "c":
                    exchanged = A.local.imag + 1j * A.local.real
                    assert text(grid.comm, bilinear(exchanged.astype(dtype), rows, cols)) != checksum(A)
        assert len(sums) == 1


def test_the_checksum_is_that_of_files_written_before(grid: Any) -> None:
    """Files record it, so it stays the same in all versions; another one would need another name."""
    from pdgemm import DistMatrix, checksum

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


def test_damage_is_found_on_request(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "a.h5"
    hdf5.save(path, "x", DistMatrix.random((20, 20), grid=grid))

    def damage() -> None:
        with h5py.File(path, "r+") as file:
            file["x"][3, 4] += 1e-12
            file["plain"] = np.eye(3)

    by_rank_0(comm, damage)
    hdf5.load(path, "x", grid)
    with pytest.raises(FileError, match="damaged"):
        hdf5.load(path, "x", grid, verify=True)
    with pytest.raises(FileError, match="no checksum"):
        hdf5.load(path, "plain", grid, verify=True)

    def of_another_version() -> None:
        with h5py.File(path, "r+") as file:
            file["x"].attrs["pdgemm_checksum"] = "bilinear64:0123456789abcdef"

    by_rank_0(comm, of_another_version)
    with pytest.raises(FileError, match="a checksum of another version of pdgemm: load it without verify"):
        hdf5.load(path, "x", grid, verify=True)
    hdf5.load(path, "x", grid)


# ------------------------------------------------------------------ bad input
def test_unreadable_input_is_refused_on_all_ranks_alike(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    path, text = shared_tmp_path / "a.h5", shared_tmp_path / "a.txt"

    def write() -> None:
        text.write_text("not HDF5\n" * 100)
        with h5py.File(path, "w") as file:
            file["x"] = np.eye(3)
            file["number"] = 3.0
            file["cube"] = np.zeros((2, 2, 2))
            file["integers"] = np.zeros((2, 2), "i8")
            file["strings"] = np.array([[b"a"]])
            file["complex"] = np.zeros((2, 2), "c16")
            file["group/inner"] = np.eye(2)

    by_rank_0(comm, write)
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
    ]
    for file, name, options, kind, message in cases:
        with pytest.raises(kind, match=message) as caught:
            hdf5.load(file, name, grid, **options)
        assert len(set(comm.allgather(str(caught.value)))) == 1


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
        with pytest.raises(FileError, match=message):
            hdf5.save(path, name, A)
    monkeypatch.setattr(files.os, "access", lambda path, mode: False)
    with pytest.raises(FileError, match="no permission"):
        hdf5.save(old, "x", A)
    assert only_file(shared_tmp_path, comm) == ["old.h5"]
    assert np.array_equal(hdf5.load(old, "x", grid, verify=True).local, A.local)


def test_a_full_disk_is_seen_before_the_first_byte(
    comm: Any, grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = files.shutil.disk_usage(shared_tmp_path)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(FileError, match="No space left on device: 7200 bytes are needed, 1000 are free"):
        hdf5.save(shared_tmp_path / "a.h5", "x", DistMatrix.zeros((30, 30), grid=grid))
    assert only_file(shared_tmp_path, comm) == []


@pytest.fixture
def small_files() -> Iterator[None]:
    """The operating system lets no file of this process grow beyond 150 kB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_limit_of_the_system_is_met_before_the_first_byte(
    comm: Any, grid: Any, shared_tmp_path: Path, small_files: None
) -> None:
    path, old = shared_tmp_path / "a.h5", DistMatrix.eye(5, grid=grid)
    hdf5.save(path, "x", old)
    with pytest.raises(FileError, match="a.h5: File too large: 320000 bytes are needed"):
        hdf5.save(path, "x", DistMatrix.random((200, 200), grid=grid))
    assert only_file(shared_tmp_path, comm) == ["a.h5"]
    assert np.array_equal(hdf5.load(path, "x", grid, verify=True).local, old.local)


def test_a_write_that_fails_half_way_leaves_what_was_there(
    comm: Any, grid: Any, shared_tmp_path: Path, small_files: None, monkeypatch: pytest.MonkeyPatch, parallel: bool
) -> None:
    """The same where the file system cannot tell beforehand: MPI-IO's own writes fail on some ranks."""
    if parallel:
        pytest.skip("HDF5 1.10 crashes when it cannot close a file that it failed to write")
    path, old = shared_tmp_path / "a.h5", DistMatrix.eye(5, grid=grid)
    hdf5.save(path, "x", old)
    for module in (files, new_dataset):
        monkeypatch.setattr(module, "reserve", lambda file, size: None)
    with pytest.raises(FileError, match="a.h5"):
        hdf5.save(path, "x", DistMatrix.random((200, 200), grid=grid, block=(200, 20)))
    assert only_file(shared_tmp_path, comm) == ["a.h5"]
    assert np.array_equal(hdf5.load(path, "x", grid, verify=True).local, old.local)


def instead_of_writing(wrong: Any, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transfers that write become `wrong`, which is given the right one."""
    (name,) = (x for x in ("opened_by_hdf5", "opened_by_mpi_io") if hasattr(module, x))
    original = getattr(module, name)

    @contextmanager
    def opened(*arguments: Any, write: bool = False) -> Iterator[Any]:
        with original(*arguments, write=write) as transfer:
            yield partial(wrong, transfer) if write else transfer

    monkeypatch.setattr(module, name, opened)


def test_a_write_that_is_lost_in_silence_is_found(
    comm: Any, grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel: bool
) -> None:
    """An MPI library that keeps a failed write to itself: one rank's data never reach the file."""
    path, A = shared_tmp_path / "a.h5", DistMatrix.random((30, 30), grid=grid)

    def losing(transfer: Any, row: int, col: int, part: np.ndarray) -> None:
        transfer(row, col, part * (comm.rank != comm.size // 2))

    instead_of_writing(losing, hyperslabs if parallel else mpi_io, monkeypatch)
    with pytest.raises(FileError, match="a.h5: what was written is not what the file holds"):
        hdf5.save(path, "x", A)
    assert only_file(shared_tmp_path, comm) == []
    hdf5.save(path, "x", A, check=False)  # the check was what found it
    with pytest.raises(FileError, match="damaged"):
        hdf5.load(path, "x", grid, verify=True)


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

    hdf5.save(path, "kept", A)
    hdf5.save(path, "x", A)
    before = by_rank_0(comm, path.read_bytes)
    for fault in (*dropped, without_checksum, another, without_others):
        monkeypatch.setattr(new_dataset, "to_disk", fault)
        for check in (True, False):
            with pytest.raises(FileError, match=r"a\.h5: what was written is not what the file holds"):
                hdf5.save(path, "x", A, check=check)
        assert by_rank_0(comm, path.read_bytes) == before
    for fault in (*dropped, partial(without_checksum, name="a"), partial(another, name="a")):  # of one of two
        monkeypatch.setattr(many_datasets, "to_disk", fault)
        with pytest.raises(FileError, match=r"state\.h5: what was written is not what the file holds"):
            hdf5.save_all(shared_tmp_path / "state.h5", {"a": A, "b": A})
    assert only_file(shared_tmp_path, comm) == ["a.h5"]


def test_a_rank_that_fails_to_write_is_heard_by_all(
    comm: Any, grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parallel: bool
) -> None:
    path = shared_tmp_path / "a.h5"

    def failing(transfer: Any, *share: Any) -> None:
        transfer(*share)  # the others are not left alone in a collective transfer
        if comm.rank == comm.size - 1:
            raise files.file_error(path, OSError(28, "No space left on device"))

    instead_of_writing(failing, hyperslabs if parallel else mpi_io, monkeypatch)
    with pytest.raises(FileError, match="a.h5: No space left on device"):
        hdf5.save(path, "x", DistMatrix.random((30, 30), grid=grid))
    assert only_file(shared_tmp_path, comm) == []
