"""Datasets behind links, in other files, or virtual; and files that change during a read."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from mpi4py import MPI
from stored_files import by_rank_0, edited, refused, unchanged
from tiers import pairs

from pdgemm import DistMatrix, ProcessGrid
from pdgemm.algorithms.protection import checksum
from pdgemm.errors import FileError
from pdgemm.io import dataset_access, hdf5, new_dataset, pieces, source, stored

pytestmark = pytest.mark.mpi
X = np.arange(35.0).reshape(7, 5)


def linked(folder: Path) -> None:
    """Create main.h5 with all kinds of links to sub/target.h5; main.h5 holds 77 at the offsets of X in target.h5."""
    (folder / "sub").mkdir()
    with h5py.File(folder / "sub" / "target.h5", "w", userblock_size=1024) as file:
        file["g/x"] = X
        file.create_dataset("g/zipped", data=X, chunks=(3, 2), compression="gzip")
    with h5py.File(folder / "sub" / "between.h5", "w") as file:
        file["up"] = h5py.ExternalLink("target.h5", "/g")
    with h5py.File(folder / "main.h5", "w") as file:
        file["decoy"] = np.full(2000, 77.0)
        file["x"] = h5py.ExternalLink("sub/target.h5", "/g/x")
        file["group"] = h5py.ExternalLink("sub/target.h5", "/g")
        file["inner/group"] = h5py.ExternalLink(str(folder / "sub" / "target.h5"), "/g")
        file["chain"] = h5py.ExternalLink("sub/between.h5", "/up")
        file["soft"] = h5py.SoftLink("/group/x")
        file["inner/soft"] = h5py.SoftLink("group")
        file["gone"] = h5py.ExternalLink("none.h5", "/g")
        file["soft_gone"] = h5py.SoftLink("/gone/x")


def virtual(file: Any, name: str, source: Any) -> None:
    layout = h5py.VirtualLayout(X.shape, "f8")
    layout[:] = source
    file.create_virtual_dataset(name, layout)


THROUGH = ("x", "group/x", "/inner//group/./x", "chain/x", "soft", "inner/soft/x")


def test_a_dataset_is_read_in_the_file_that_a_link_leads_to(
    comm: Any, grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_rank_0(comm, lambda: linked(shared_tmp_path))
    by_rank_0(comm, lambda: (shared_tmp_path / "alias.h5").symlink_to("main.h5"))
    monkeypatch.chdir(shared_tmp_path / "sub")
    for parallel in dict.fromkeys((dataset_access.parallel_h5py(), False)):
        monkeypatch.setattr(dataset_access, "parallel_h5py", lambda parallel=parallel: parallel)
        for path in (shared_tmp_path / "main.h5", Path("../main.h5"), Path("../alias.h5")):
            for name in THROUGH:
                A = hdf5.load(path, name, grid, 2)
                assert np.array_equal(A.allgather(), X), (path, name)
                assert A.report.method == ("mpio" if parallel else "mpi-io")
        Z = hdf5.load("../main.h5", "inner/soft/zipped", grid, (2, 3), transpose=True)
        assert np.array_equal(Z.allgather(), X.T)
    refused(comm, FileError, "has no dataset gone/x; the name leads into none.h5", hdf5.load, path, "gone/x", grid)


def test_nothing_is_written_through_a_link_into_another_file(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    by_rank_0(comm, lambda: linked(shared_tmp_path))
    path, A = shared_tmp_path / "main.h5", DistMatrix.zeros((7, 5), grid=grid)
    with edited(comm, shared_tmp_path / "alone.h5", "w") as file:
        file["x"] = h5py.ExternalLink("sub/target.h5", "/g/x")

    names = ("x", "/inner//group/./x", "soft", "group/new/deeper", "chain/new", "inner/soft/new")
    with unchanged(comm, shared_tmp_path):
        for file, name in [(path, name) for name in names] + [(shared_tmp_path / "alone.h5", "x")]:
            refused(comm, FileError, f"{file}: {name} leads .*another file, .*target.h5", hdf5.save, file, name, A)
            refused(comm, FileError, "target.h5", new_dataset.check_savable, file, name, grid, 8)
        for name in ("gone", "gone/x", "soft_gone"):
            refused(comm, FileError, "another file, none.h5", hdf5.save, path, name, A)


def test_a_link_is_replaced_by_the_new_dataset(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    path, only = shared_tmp_path / "a.h5", shared_tmp_path / "only.h5"
    with edited(comm, path, "w") as file:
        file["g/x"] = X
        file["soft"] = h5py.SoftLink("/g/x")
        file["hard"] = file["g/x"]
        file["dangling"] = h5py.SoftLink("/g/none")
        file["round"] = h5py.SoftLink("/round")
    with edited(comm, only, "w") as file:  # a dataset, and a comment on the root group
        file["x"] = X
        h5py.h5o.set_comment(file.id, b"what this is")
    A = DistMatrix.random((4, 6), grid=grid)
    for name in ("soft", "hard", "dangling"):
        hdf5.save(path, name, A, overwrite=True)
    hdf5.save(only, "x", A, overwrite=True)
    refused(comm, FileError, "a.h5: .*too many links", hdf5.save, path, "round", A)

    def look() -> Any:
        with h5py.File(path) as file, h5py.File(only) as other:
            assert np.array_equal(file["g/x"], X)
            assert other["/"].id.get_comment(b".") == b"what this is"
            return [np.array(file[name]) for name in ("soft", "hard", "dangling")] + [np.array(other["x"])]

    for found in by_rank_0(comm, look):
        assert np.array_equal(found, A.allgather())


def test_number_formats_that_numpy_lacks_are_converted(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    """Contiguous datasets in native byte order of types that must be converted, not copied byte by byte."""
    path = shared_tmp_path / "types.h5"

    def kinds() -> dict[str, Any]:
        bfloat16 = h5py.h5t.IEEE_F32LE.copy()
        bfloat16.set_fields(15, 7, 8, 0, 7)
        bfloat16.set_size(2)
        biased = h5py.h5t.IEEE_F64LE.copy()
        biased.set_ebias(1000)
        padded = h5py.h5t.STD_I32LE.copy()
        padded.set_precision(16)
        padded.set_offset(4)
        enumerated = h5py.h5t.enum_create(h5py.h5t.STD_I8LE)
        for value in range(35):
            enumerated.enum_insert(f"v{value}".encode(), value)
        apart = h5py.h5t.create(h5py.h5t.COMPOUND, 24)
        apart.insert(b"r", 0, h5py.h5t.IEEE_F64LE)
        apart.insert(b"i", 16, h5py.h5t.IEEE_F64LE)
        found = {"bfloat16": bfloat16, "biased": biased, "padded": padded, "apart": apart}
        return found | {"long": h5py.h5t.NATIVE_LDOUBLE, "bool": h5py.h5t.py_create(np.dtype(bool)), "enum": enumerated}

    with edited(comm, path, "w") as file:
        for name, kind in kinds().items():
            dataset = h5py.h5d.create(file.id, name.encode(), kind, h5py.h5s.create_simple(X.shape))
            x = X > 7 if name == "bool" else X.astype("i1") if name == "enum" else X
            x = x * (1 + 1j) if name == "apart" else x
            dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, np.ascontiguousarray(x), kind if name == "enum" else None)
        file.create_dataset("unwritten", X.shape, "f8", fillvalue=7.0)
    for name in (*kinds(), "unwritten"):
        expected = X > 7 if name == "bool" else X * (1 + 1j) if name == "apart" else X
        A = hdf5.load(path, name, grid, 2, dtype="complex128" if name == "apart" else "float64")
        assert np.array_equal(A.allgather(), np.full(X.shape, 7) if name == "unwritten" else expected), name
        assert A.report.method != "mpi-io"


def test_virtual_datasets_with_missing_sources_are_refused(
    comm: Any, grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HDF5 itself would return fill values for the missing elements."""
    path, raw = shared_tmp_path / "all.h5", shared_tmp_path / "raw.bin"

    with edited(comm, shared_tmp_path / "part.h5", "w") as file:
        file["x"] = X
        file["small"] = X[:5]
        file["whole"] = np.pad(X, 1)
    by_rank_0(comm, lambda: X.tofile(raw))
    with edited(comm, path, "w") as file:
        file["own"] = X
        file["inner/linked"] = h5py.ExternalLink("part.h5", "/x")
        virtual(file, "apart", h5py.VirtualSource("part.h5", "x", X.shape))
        virtual(file, "absolute", h5py.VirtualSource("/elsewhere/part.h5", "x", X.shape))
        virtual(file, "window", h5py.VirtualSource("part.h5", "whole", (9, 7))[1:8, 1:6])
        virtual(file, "same", h5py.VirtualSource(".", "own", X.shape))
        virtual(file, "through", h5py.VirtualSource(".", "inner/linked", X.shape))
        virtual(file, "nested", h5py.VirtualSource(".", "apart", X.shape))
        virtual(file, "short", h5py.VirtualSource("part.h5", "small", X.shape)[:])
        virtual(file, "shorter", h5py.VirtualSource("part.h5", "small", (9, 5))[2:9, :])
        virtual(file, "nowhere", h5py.VirtualSource("none.h5", "x", X.shape))
        virtual(file, "nothing", h5py.VirtualSource("part.h5", "y", X.shape))
        virtual(file, "nested_nowhere", h5py.VirtualSource(".", "nowhere", X.shape))
        virtual(file, "circle", h5py.VirtualSource(".", "circle", X.shape))
        file.create_dataset("raw", X.shape, "f8", external=[(str(raw), 0, 100), (str(raw), 100, X.nbytes - 100)])
        file.create_dataset("raw_short", X.shape, "f8", external=[(str(raw), 8, h5py.h5f.UNLIMITED)])
        file.create_dataset("raw_gone", X.shape, "f8", external=[("none.bin", 0, X.nbytes)])
    monkeypatch.chdir("/")
    for name in ("apart", "absolute", "window", "same", "through", "nested", "raw"):
        A = hdf5.load(path, name, grid, (2, 1))
        assert np.array_equal(A.allgather(), X), name
        assert A.report.method == "independent"
    for name in ("short", "shorter", "nowhere", "nothing", "nested_nowhere"):
        refused(comm, FileError, "which is missing or too small", hdf5.load, path, name, grid)
    for name in ("raw_short", "raw_gone"):
        refused(comm, FileError, "which is missing or too short", hdf5.load, path, name, grid)
    refused(comm, FileError, "is a virtual dataset that contains itself", hdf5.load, path, "circle", grid)


def test_impossible_names_are_refused(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    """HDF5 ends a name at a NUL: saving x\\0y would replace x.  In a file name \\udc80, the byte 80, is valid."""
    path, A, said = shared_tmp_path / "a.h5", DistMatrix.random((4, 6), grid=grid), "names have no NUL or lone surr"
    hdf5.save(path, "x", A)
    bad = ["a\ud800", "x\0y"]
    for file, dataset in [*((path, x) for x in [*bad, "\udc80"]), *((shared_tmp_path / x, "x") for x in bad)]:
        refused(comm, FileError, said, hdf5.save, file, dataset, A)
        refused(comm, FileError, said, hdf5.load, file, dataset, grid)
        refused(comm, FileError, said, hdf5.save, *((file, dataset) if comm.rank == 0 else (path, "x")), A)
    assert np.array_equal(hdf5.load(path, "x", grid, verify=True).local, A.local)


# ------------------------------------------------------------------ files that change
@pytest.mark.parametrize("moment", ["inspected", "read"])
@pytest.mark.parametrize("way", ["shorter", "longer", "other", "behind a link"])
def test_a_file_that_changes_while_it_is_used_is_refused(
    comm: Any, grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, way: str
) -> None:
    """In a shortened file only one rank reads too few bytes; in another file the same offset has other numbers."""
    path, other, link = (shared_tmp_path / name for name in ("a.h5", "b.h5", "link.h5"))
    opened, inspect = h5py.Dataset.ndim, source.stored_dataset

    def write() -> None:
        for made, pad in ((path, 1000), (other, 3000)):
            with h5py.File(made, "w") as file:
                file["pad"], file["x"] = np.full(pad, 7.0), X
        with h5py.File(link, "w") as file:
            file["x"] = h5py.ExternalLink("a.h5", "/x")

    def change() -> None:
        if way == "shorter":
            os.truncate(path, path.stat().st_size - 3)
        elif way == "longer":
            with path.open("ab") as file:
                file.write(b"more")
        elif other.exists():
            other.replace(path)

    by_rank_0(comm, write)
    if moment == "inspected":  # `ndim` is the first call for the open dataset
        monkeypatch.setattr(h5py.Dataset, "ndim", property(lambda x: (change(), opened.fget(x))[1]))
    else:
        monkeypatch.setattr(source, "stored_dataset", lambda *x: (inspect(*x), change())[0])
    said = "truncated" if way == "shorter" else "a.h5 was changed while it was read"
    refused(comm, FileError, said, hdf5.load, link if way == "behind a link" else path, "x", grid, 3)


def test_all_files_that_a_dataset_needs_are_watched(
    comm: Any, grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program writes to one of these files in place, without a change of its size."""
    path, inspect, changed = shared_tmp_path / "main.h5", source.stored_dataset, ""

    def then_written(*arguments: Any) -> Any:
        found, (file,) = inspect(*arguments), shared_tmp_path.rglob(f"{changed}.h5")
        os.utime(file, ns=(0, file.stat().st_mtime_ns))  # a new change time, as after a write in place
        return found

    raw = shared_tmp_path / "sub" / "raw.h5"
    by_rank_0(comm, lambda: (linked(shared_tmp_path), X.tofile(raw)))
    with edited(comm, path) as file:
        virtual(file, "virtual", h5py.VirtualSource("sub/target.h5", "g/x", X.shape))
        file.create_dataset("raw", X.shape, "f8", external=[(str(raw), 0, X.nbytes)])
    monkeypatch.setattr(source, "stored_dataset", then_written)
    for name, changed in (
        ("x", "main"), ("x", "target"), ("chain/x", "between"), ("virtual", "target"), ("raw", "raw"),
    ):  # fmt: skip
        refused(comm, FileError, f"{changed}.h5 was changed while it was read", hdf5.load, path, name, grid)


@pytest.mark.timeout(60)  # HDF5 would wait for a FIFO
def test_links_and_sources_must_be_regular_files(
    comm: Any, grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also through several links, and in all folders that HDF5 searches; other files than HDF5 files are skipped."""
    monkeypatch.chdir(shared_tmp_path)
    path = shared_tmp_path / "main.h5"

    def write() -> None:
        linked(shared_tmp_path)
        for folder in ("first", "second"):
            Path(folder).mkdir()
        os.mkfifo("pipe.h5")
        os.mkfifo("second/between.h5")
        Path("first/target.h5").write_text("not HDF5's")
        with h5py.File("sub/between.h5", "r+") as file:
            file["pipe"] = h5py.ExternalLink("../pipe.h5", "/x")
            file["inner/soft"] = h5py.SoftLink("/pipe")
        with h5py.File(path, "r+") as file:
            file["twice"] = h5py.ExternalLink("sub/between.h5", "/inner/soft")
            file["plain"] = h5py.ExternalLink("between.h5", "/up/x")
            virtual(file, "of_pipe", h5py.VirtualSource("pipe.h5", "x", X.shape))
            virtual(file, "of_link", h5py.VirtualSource("sub/between.h5", "pipe", X.shape))
            file.create_dataset("raw", X.shape, "f8", external=[("pipe.h5", 0, X.nbytes)])

    by_rank_0(comm, write)
    A = DistMatrix.zeros((3, 3), grid=grid)
    for name in ("twice", "of_pipe", "of_link", "raw"):
        refused(comm, FileError, "pipe.h5: it is a FIFO, not a file", hdf5.load, path, name, grid)
    refused(comm, FileError, "pipe.h5: it is a FIFO, not a file", hdf5.save, path, "twice", A)
    monkeypatch.setenv("HDF5_EXT_PREFIX", "first:sub")
    assert np.array_equal(hdf5.load(path, "plain", grid).allgather(), X)
    refused(comm, FileError, "another file, sub/target.h5", hdf5.save, path, "plain", A)
    monkeypatch.setenv("HDF5_EXT_PREFIX", "second:sub")
    refused(comm, FileError, "second/between.h5: it is a FIFO, not a file", hdf5.load, path, "plain", grid)


def test_a_transfer_of_fewer_bytes_than_asked_for_is_an_error(
    comm: Any, grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank transfers too few bytes, and MPI reports it only in the status."""
    monkeypatch.setattr(dataset_access, "parallel_h5py", lambda: False)
    path, A = shared_tmp_path / "a.h5", DistMatrix.random((40, 3), grid=grid, block=1)
    hdf5.save(path, "x", A)
    original = dataset_access.open_on_all

    class Short:
        def _move(self, at: int, buffer: Any, status: Any) -> None:
            status.Set_elements(MPI.BYTE, buffer[0].nbytes - (comm.rank == comm.size // 2))

        Read_at = Write_at = _move

    @contextmanager
    def opened(*arguments: Any) -> Iterator[Any]:
        with original(*arguments):
            yield Short()

    monkeypatch.setattr(dataset_access, "open_on_all", opened)
    refused(comm, FileError, r"a.h5: of \d+ bytes at byte \d+ only \d+ were read", hdf5.load, path, "x", grid)
    refused(comm, FileError, r"a.h5: of \d+ .* only \d+ were written", hdf5.save, path, "x", A, check=False)
    monkeypatch.undo()
    assert np.array_equal(hdf5.load(path, "x", grid, verify=True).allgather(), A.allgather())
    assert os.listdir(shared_tmp_path) == ["a.h5"]


# ------------------------------------------------------------------ pieces
@pytest.mark.parametrize("most", [1, 7, 64, 1000, 1 << 18])
def test_pieces_cover_a_dataset_once_in_contiguous_shares(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "ELEMENTS", most)
    monkeypatch.setattr(pieces, "INDICES", 2 * most)
    shapes = [(0, 3), (3, 0), (1, 1), (1, 50), (50, 1), (13, 8), (4, 90), (90, 4), (31, 37)]
    for shape, unit, ranks in pairs(shapes, [(1, 1), (3, 2), (8, 40)], (1, 2, 3, 4, 9)):
        seen = np.zeros(shape, int)
        for piece in pieces.cut(shape, unit, ranks, (6, 10)):
            for rank in range(ranks):
                row, col, (rows, cols) = piece.share(rank)
                seen[row : row + rows, col : col + cols] += 1
                assert rows * cols <= max(most, unit[0] * unit[1])
                assert unit != (1, 1) or rows <= 1 or cols == shape[1]  # shares are contiguous in the file
                assert row % unit[0] == col % unit[1] == 0
            assert unit != (1, 1) or max(piece.layout.shape) <= max(2 * most, ranks)
        assert (seen == 1).all()
    assert most < 1 << 18 or len(pieces.cut((8_000_000, 1), (1, 1), 4)) == 16
    if most > 64:  # otherwise a period of the block sizes exceeds a piece
        for shape in [(1, 20_000_000), (20_000_000, 1)]:
            found = pieces.cut(shape, (1, 1), 9, (11, 7))
            assert len(found) > 1
            assert all(row % 11 == col % 7 == 0 for (row, col), _ in found)


def test_chunks_are_read_and_written_whole(
    comm: Any, grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, units = pieces.cut, list[tuple[int, int]]()

    def counted(shape: tuple[int, int], unit: tuple[int, int], *others: Any) -> Any:
        units.append(unit)
        return cut(shape, unit, *others)

    by_rank_0(comm, lambda: linked(shared_tmp_path))
    monkeypatch.setattr(pieces, "cut", counted)
    for most, unit in ((stored._MOST_CHUNK, (3, 2)), (3 * 2 * 8 - 1, (1, 1))):
        monkeypatch.setattr(stored, "_MOST_CHUNK", most)
        assert np.array_equal(hdf5.load(shared_tmp_path / "main.h5", "group/zipped", grid).allgather(), X)
        assert {*units} == {unit}
        units.clear()


@pytest.mark.parametrize("shape", [(50_000, 1), (1, 50_000)])
def test_files_of_many_short_runs_take_memory_for_a_piece_of_them(
    comm: Any, grid: Any, shared_tmp_path: Path, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In addition to the matrix, only index arrays of one piece are allocated, whatever the size of the matrix."""
    monkeypatch.setattr(pieces, "INDICES", 1 << 11)
    monkeypatch.setattr(checksum, "_MOST", 1 << 11)
    path = shared_tmp_path / "a.h5"
    with ProcessGrid(comm, (comm.size, 1) if shape[0] > 1 else (1, comm.size)) as line:
        A = DistMatrix.random(shape, grid=line, block=1)
        small = DistMatrix.random((20, 20), grid=line, block=1)
        for matrix in (small, A):  # the first run also allocates for imports and caches: the second one counts
            tracemalloc.start()
            hdf5.save(path, "x", matrix)
            B = hdf5.load(path, "x", line, 1, verify=True)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert np.array_equal(B.local, matrix.local)
        assert peak < 30 * 8 * (1 << 11) + (0 if A.shared else B.local.nbytes)
