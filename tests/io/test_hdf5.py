"""Matrices in HDF5 files: all methods of writing and reading, all layouts, whole or in part; and checksums."""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from problems import BLOCKS, DTYPES, grid_shapes, sources
from stored_files import by_rank_0, edited, elements, only_file, read, refused, unchanged
from tiers import everything, pairs

from pdgemm import DistMatrix, ProcessGrid, pdgemm
from pdgemm.algorithms.protection.checksum import bilinear, checksum, text
from pdgemm.errors import ArgumentError, FileError, LayoutError
from pdgemm.io import dataset_access, hdf5, npy, pieces
from pdgemm.io.dataset_access import parallel_h5py

pytestmark = pytest.mark.mpi

SHAPES = [(0, 0), (0, 5), (4, 0), (1, 1), (7, 5), (13, 8), (29, 61)]
TYPES = (*DTYPES, "float16", "int8", "int32")


@pytest.fixture(params=["best", "without a parallel h5py"])
def collective(request: pytest.FixtureRequest, parallel: bool, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether HDF5 moves the elements (else MPI-IO).  With a parallel h5py both methods are tested."""
    if request.param == "best":
        return parallel
    if not parallel:
        pytest.skip("h5py is not parallel: this is the best method")
    monkeypatch.setattr(dataset_access, "parallel_h5py", lambda: False)
    return False


@pytest.mark.on_ranks(2, 4)
def test_saved_matrices_are_loaded_in_any_layout(
    comm: Any, shared_tmp_path: Path, collective: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one transfer, and by many."""
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
                    assert report.method == ("mpio" if collective else "mpi-io")
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
        ("c8", {"compression": "gzip" if parallel else "lzf"}),  # HDF5 1.10 cannot read lzf in parallel
        ("f2", {"chunks": True}),
    ):
        A = DistMatrix.random((50, 40), grid=grid, block=(7, 6), dtype=dtype)
        whole = A.allgather()
        report = hdf5.save(path, "g/x", A, **options)  # type: ignore[arg-type]
        assert report.method == ("mpio" if parallel else "one writer")
        hdf5.save(path, "empty", empty, **options)  # type: ignore[arg-type]
        with edited(comm, path, "r") as file:
            x = file["g/x"]
            assert x.compression == options.get("compression") and file["empty"].shape == (0, 4)
            assert x.chunks == (8, 9) if dtype == "f8" else x.chunks
            assert np.array_equal(x, whole)
        assert np.array_equal(hdf5.load(path, "g/x", grid, 3, verify=True).allgather(), whole)
    v = DistMatrix.random((50, 1), grid=grid)
    hdf5.save(path, "v", v, chunks=(20, 1), compression="gzip", ndim=1)
    assert np.array_equal(hdf5.load(path, "v", grid, verify=True).allgather(), v.allgather())

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with unchanged(comm, shared_tmp_path):
        for wrong in ({"compression": "zzz"}, {"chunks": (60, 60)}, {"chunks": "x"}):
            with pytest.raises(FileError):
                hdf5.save(path, "g/x", A, **wrong)  # type: ignore[arg-type]
        if not parallel:  # rank 0 fails to write after the others have sent elements
            monkeypatch.setattr(dataset_access, "_selected", full)
            refused(comm, FileError, "No space left on device", hdf5.save, path, "g/x", A, compression="gzip")


def test_a_dataset_of_one_dimension_is_a_column(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    """By every method of reading; it is saved with one dimension again.  Without `grid`, all ranks are used."""
    path, v = shared_tmp_path / "v.h5", np.arange(37.0)
    # ROMIO takes `a:` for the name of a file system
    here = shared_tmp_path / ("ab.h5" if parallel_h5py() else "a:b.h5")
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
        assert np.array_equal(read(comm, path, "again"), v)
        assert hdf5.load(path, "again", grid, verify=True).allclose(A.redistribute(grid=grid))
    assert hdf5.load(path, "none", grid).shape == (0, 1)
    B = DistMatrix.random((6, 37), grid=grid)
    C = pdgemm(1, B, hdf5.dataset(path, "zipped", grid))
    assert np.allclose(C.allgather()[:, 0], B.allgather() @ v)
    for where in ((path, "plain"), (f"{path}:/plain",), (f"{here}:plain",)):
        A = hdf5.load(*where)
        assert A.grid.size == comm.size and np.array_equal(A.allgather()[:, 0], v)
    assert hdf5.load(*where).grid is A.grid
    assert hdf5.dataset(f"{path}:/plain").shape == (37, 1)
    refused(comm, LayoutError, r"\(37, 1\) cannot be saved with ndim=3", hdf5.save, path, "x", A, ndim=3)
    refused(comm, LayoutError, r"\(6, 37\) cannot be saved with ndim=1", hdf5.save, path, "x", B, ndim=1)
    for unnamed in ((path,), (f"{path}:/plain", grid)):
        refused(comm, ArgumentError, "pass the grid after these arguments", hdf5.load, *unnamed)
    group = r"v.h5:many is a group; it has (/many/inner/\d+ .*){10}, \.\.\.$"
    refused(comm, FileError, group, hdf5.load, path, "many")
    refused(comm, FileError, "v.h5 has no dataset x; it has .*, ...$", hdf5.load, path, "x")


def test_an_exception_in_a_callback_is_raised_at_the_end(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
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
    whole = A.allgather()

    def add_header() -> None:
        with path.open("rb+") as file:
            file.write(b"a header of 512 bytes")
        path.chmod(0o640)

    with edited(comm, path, "w", userblock_size=512) as file:
        file.attrs["title"], file["top"] = "mine", "text"
        file["g/other"], file["g/x"] = np.arange(5), np.zeros((9, 9))
        file["g"].attrs["unit"] = "m"
        file["soft"], file["hard"] = h5py.SoftLink("/g"), file["g/other"]
        file["reference"] = np.array([file["g/other"].ref], h5py.ref_dtype)
    by_rank_0(comm, add_header)
    for name in ("/g/x", "y", "soft/z"):
        hdf5.save(path, name, A, overwrite=True)
    assert path.read_bytes().startswith(b"a header of 512 bytes") and path.stat().st_mode & 0o777 == 0o640
    with edited(comm, path, "r") as file:
        assert (file.attrs["title"], file["g"].attrs["unit"], file["top"].asstr()[()]) == ("mine", "m", "text")
        assert isinstance(file.get("soft", getlink=True), h5py.SoftLink) and file["hard"] == file["g/other"]
        assert file[file["reference"][0]][:].tolist() == [0, 1, 2, 3, 4]
        assert all(np.array_equal(file[name], whole) for name in ("g/x", "y", "g/z"))
        assert file["y"].attrs["pdgemm_dtype"] == b"float64"
        assert json.loads(file["y"].attrs["pdgemm_layout"])["grid"] == list(grid.shape)
    assert only_file(shared_tmp_path, comm) == ["a.h5"]


def test_the_space_of_a_replaced_dataset_is_used_again(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    path, sizes = shared_tmp_path / "a.h5", []
    hdf5.save(path, "other", DistMatrix.eye(7, grid=grid))
    for seed in range(4):
        hdf5.save(path, "x", DistMatrix.random((80, 80), grid=grid, seed=seed))
        sizes.append(by_rank_0(comm, lambda: path.stat().st_size))
    assert sizes[-1] - sizes[0] < 80 * 80 * 8  # HDF5's metadata may grow by a few kilobytes


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


def test_the_checksum_equals_that_of_older_files(grid: Any) -> None:
    """Files contain checksums: the function must never change; another function needs another name."""
    for x, recorded in (
        (np.arange(12.0).reshape(4, 3), "mixed64:520ad58aef8c0000"),
        (np.arange(6, dtype="F").reshape(2, 3), "mixed64:39ef3aa80f200000"),
    ):
        assert checksum(DistMatrix.from_global(x, grid=grid)) == recorded


def test_the_checksum_sees_bits_of_several_elements() -> None:
    """The same bit flips in an even number of elements: plain sums modulo 2^64 would miss high bits."""
    x = np.random.default_rng(3).standard_normal((30, 20))
    rows, cols = np.arange(30), np.arange(20)
    right = int(bilinear(x, rows, cols)[0])
    for bit in range(64):
        for number in (2, 4, 6, 600):
            changed = x.copy()
            changed.view(np.uint64).ravel()[:number] ^= np.uint64(1 << bit)
            assert int(bilinear(changed, rows, cols)[0]) != right, (bit, number)


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
    """Write a matrix in every storage: chunked, compressed, big-endian, in other types, as pieces of other datasets."""
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
def test_parts_of_every_storage(
    comm: Any, shared_tmp_path: Path, collective: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shared_tmp_path / "parts.h5"
    x = np.random.default_rng(3).standard_normal((M, N)) * 100
    by_rank_0(comm, lambda: write_in_every_storage(path, x))
    types = {"integers": "i2", "half": "f2", "single": "f4"}
    names = ["contiguous", "chunked", "growing", "gzip", "big_endian", *types, "virtual"]
    in_place = dict.fromkeys(("contiguous", "integers", "half", "single"), "mpi-io")
    expected = dict.fromkeys(names[:-1], "mpio") if collective else in_place
    turn = itertools.cycle(itertools.product([False, True], [None, (3, 2)], [1 << 12, 0]))
    grids = [ProcessGrid(comm, shape) for shape in grid_shapes(comm.size)]
    for made, name, (rows, cols) in pairs(grids, names, PARTS):
        transpose, block, gap = next(turn)
        monkeypatch.setattr(dataset_access, "_GAP", gap)  # reads of single rows, and of several rows
        dtype = "complex64" if name == "contiguous" and made is grids[0] else "float64" if name in types else None
        A = hdf5.load(path, name, made, block, rows=rows, cols=cols, transpose=transpose, dtype=dtype)
        part = x[as_slice(rows), as_slice(cols)].astype(types.get(name, "f8"))
        assert np.array_equal(A.allgather(), (part.T if transpose else part).astype(dtype)), (name, rows, cols)
        assert A.report.method == expected.get(name, "independent")
        assert (A.report.bytes, A.report.shape) == (part.nbytes, (M, N))
        assert (A.report.part is None) == (part.shape == x.shape)
    for made in grids:
        made.free()


def test_only_the_part_is_read(comm: Any, grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes that a rank reads from a dataset of 8 GiB, as counted by Linux; the file is sparse."""
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
    loads: list[Any] = [partial(hdf5.load, h5, "x", grid), partial(npy.load, plain, grid)]
    for load, parallel in itertools.product(loads, dict.fromkeys((dataset_access.parallel_h5py(), False))):
        monkeypatch.setattr(dataset_access, "parallel_h5py", lambda parallel=parallel: parallel)
        for part in ({"rows": (1000, 1100), "cols": (5, 15)}, {"rows": slice(32760, None), "cols": (32000, 32700)}):
            load(rows=(0, 1), cols=(0, 1))  # loads modules and libraries
            before = counted()
            A = load(**part)
            read = comm.allreduce(counted() - before)
            # a collective read also reads bytes between the rows, up to the size of its buffers
            between = 0 if A.report.method != "mpio" else A.shape[0] * (1 << 15) * A.dtype.itemsize
            assert read < A.nbytes + between + comm.size * 300_000
