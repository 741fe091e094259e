"""NumPy's .npy files: files of numpy.save are loaded in any layout, and numpy.load reads files that pdgemm saves."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems import BLOCKS, grid_shapes, sources
from stored_files import by_rank_0, dropped, only_file, refused, unchanged

from pdgemm import DistMatrix, ProcessGrid
from pdgemm.errors import ArgumentError, DTypeError, FileError, LayoutError
from pdgemm.io import atomic, npy, pieces

pytestmark = pytest.mark.mpi

SHAPES = [(0, 0), (0, 5), (4, 0), (1, 1), (7, 5), (13, 8), (29, 61)]
TYPES = ["bool", "int8", "int64", "uint16", "float16", "float32", "float64", ">f4", "complex64", "complex128"]


@pytest.mark.filterwarnings("ignore:Stored array in format")
def test_both_ways_with_numpy(comm: Any, shared_tmp_path: Path) -> None:
    """With all shapes, types, format versions, blocks, sources, orders in memory and file, parts, and transposed."""
    theirs, ours = shared_tmp_path / "theirs.npy", shared_tmp_path / "ours.npy"
    turn = itertools.cycle(itertools.product("CF", "FC", [False, True], [(None, None), ((1, 4), None), (None, (0, 3))]))
    types, versions = itertools.cycle(TYPES), itertools.cycle(((1, 0), (2, 0), (3, 0)))

    def write(x: np.ndarray, version: tuple[int, int]) -> None:
        with theirs.open("wb") as file:
            np.lib.format.write_array(file, x, version=version)

    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as one, ProcessGrid(comm, shape[::-1]) as other:
            for case, (m, n) in enumerate(SHAPES):
                for source in sources(shape):
                    order, file_order, transpose, (rows, cols) = next(turn)
                    dtype, (mb, nb, ka, kb) = np.dtype(next(types)), BLOCKS[case % len(BLOCKS)]
                    x = np.random.default_rng(case).integers(0, 99, (m, n)).astype(dtype, order=file_order)
                    by_rank_0(comm, lambda x=x: write(x, next(versions)))
                    A = npy.load(theirs, one, None if mb is None else (mb, nb), source=source)
                    assert (A.dtype, A.shape) == (dtype.newbyteorder("="), (m, n))
                    assert A.report.bytes == x.nbytes
                    assert np.array_equal(A.allgather(), x)
                    if min(m, n) > 4:
                        T = npy.load(theirs, other, ka and (ka, kb), rows=rows, cols=cols, transpose=transpose)
                        part = x[slice(*rows or (None,)), slice(*cols or (None,))]
                        assert np.array_equal(T.allgather(), part.T if transpose else part)
                    A = A.redistribute(grid=other, block=(3, 2), order=order)
                    view, whole = (A, x) if case % 2 else (A.H, x.conj().T)
                    report = npy.save(ours, view, order=file_order)
                    assert (report.method, report.bytes) == ("mpi-io", x.nbytes)
                    found = by_rank_0(comm, lambda: np.load(ours))
                    assert found.flags.f_contiguous if file_order == "F" else found.flags.c_contiguous
                    assert found.dtype == A.dtype and np.array_equal(found, whole)
            assert npy.load(ours, one, dtype="complex128").dtype == "complex128"
            assert isinstance(A, DistMatrix)
    assert only_file(shared_tmp_path, comm) == ["ours.npy", "theirs.npy"]


def test_an_array_of_one_dimension_is_a_column(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    path, again, v = shared_tmp_path / "v.npy", shared_tmp_path / "again.npy", np.arange(37, dtype=">f4")
    by_rank_0(comm, lambda: np.save(path, v))
    for options, expected in (({}, v[:, None]), ({"transpose": True}, v[None]), ({"rows": (3, 9)}, v[3:9, None])):
        A = npy.load(path, grid, 5, **options)  # type: ignore[arg-type]
        assert np.array_equal(A.allgather(), expected)
    for order in ("C", "F"):
        npy.save(again, npy.load(path), ndim=1, order=order)  # type: ignore[arg-type]
        found = by_rank_0(comm, lambda: np.load(again))
        assert found.shape == (37,) and np.array_equal(found, v)
    with pytest.raises(LayoutError, match=r"\(1, 37\) cannot be saved with ndim=1"):
        npy.save(again, npy.load(path, grid, transpose=True), ndim=1)


@pytest.mark.filterwarnings("ignore:Stored array in format 3.0")
def test_bad_files_and_arguments_are_refused(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    A = DistMatrix.random((6, 5), grid=grid)

    def write() -> None:
        np.save(shared_tmp_path / "number.npy", np.ones(()))
        np.save(shared_tmp_path / "objects.npy", np.array([[object()]]), allow_pickle=True)
        np.save(shared_tmp_path / "fields.npy", np.zeros((2, 2), [("α", "f8")]))
        np.save(shared_tmp_path / "dates.npy", np.zeros((2, 2), "M8[s]"))
        np.save(shared_tmp_path / "cut.npy", np.ones((20, 20)))
        with (shared_tmp_path / "cut.npy").open("rb+") as file:
            file.truncate(200)
        np.savez(shared_tmp_path / "many.npz", a=np.ones((2, 2)))
        (shared_tmp_path / "text.npy").write_text("1 2 3")
        (shared_tmp_path / "header.npy").write_bytes(b"\x93NUMPY\x01\x00\x05\x00{'a':")
        np.save(shared_tmp_path / "whole.npy", np.ones((4, 4)))
        whole = (shared_tmp_path / "whole.npy").read_bytes()
        (shared_tmp_path / "version.npy").write_bytes(whole.replace(b"\x93NUMPY\x01", b"\x93NUMPY\x09"))
        (shared_tmp_path / "negative.npy").write_bytes(whole.replace(b"(4, 4), ", b"(-1, 4),"))

    by_rank_0(comm, write)
    cases: list[tuple[str, type[Exception], str, dict[str, Any]]] = [
        ("nothing.npy", FileError, "No such file", {}),
        ("number.npy", LayoutError, r"is neither a matrix nor a vector: its shape is \(\)", {}),
        ("objects.npy", DTypeError, "holds object, which are not numbers", {}),
        ("fields.npy", DTypeError, "which are not numbers", {}),
        ("version.npy", FileError, "version 9.0 of the .npy format is not known", {}),
        ("negative.npy", FileError, r"damaged: its header says that its shape is \(-1, 4\)", {}),
        ("dates.npy", DTypeError, "which are not numbers", {}),
        ("cut.npy", FileError, "is truncated: its elements end at byte 3328, the file at 200", {}),
        ("many.npz", FileError, "many.npz: it is not a .npy file", {}),
        ("text.npy", FileError, "text.npy: it is not a .npy file", {}),
        ("header.npy", FileError, "header.npy: ", {}),
        ("whole.npy", DTypeError, "holds float64, which cannot become int64", {"dtype": "int64"}),
        ("whole.npy", ArgumentError, "steps of 1", {"rows": slice(0, 4, 2)}),
        ("whole.npy", LayoutError, "block size", {"block": 0}),
        ("", FileError, "folder", {}),
    ]
    for name, kind, message, options in cases:
        refused(comm, kind, message, npy.load, shared_tmp_path / name, grid, **options)
    before = only_file(shared_tmp_path, comm)
    for matrix, path, kind, message, options in [
        (A.astype("bfloat16"), "b.npy", DTypeError, "cannot hold bfloat16", {}),
        (A, "no/b.npy", FileError, "the folder .* does not exist", {}),
        (A, "b.npy", ArgumentError, "order 'K'", {"order": "K"}),
    ]:
        refused(comm, kind, message, npy.save, shared_tmp_path / path, matrix, **options)
    assert only_file(shared_tmp_path, comm) == before


def test_a_file_is_replaced_whole_or_not_at_all(
    comm: Any, grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a write fails, or is lost without an error, or the header is lost, the old file stays."""
    path = shared_tmp_path / "a.npy"
    A, B = (DistMatrix.random((40, 30), grid=grid, seed=seed) for seed in (1, 2))
    npy.save(path, A)
    lost = r"a\.npy: the file does not hold the bytes that were written"

    def fails(*arguments: Any) -> None:
        raise FileError("disk full")

    for module, name, fault, message in (
        *((atomic, "to_disk", fault, lost) for fault in dropped),
        (pieces, "write_pieces", fails, "disk full"),
        (pieces, "write_pieces", lambda *arguments: None, lost),
    ):
        with monkeypatch.context() as patch, unchanged(comm, shared_tmp_path):
            patch.setattr(module, name, fault)
            refused(comm, FileError, message, npy.save, path, B)


def test_a_file_that_changes_while_it_is_read(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    """The change is noticed although the file's time is restored."""
    path = shared_tmp_path / "a.npy"
    by_rank_0(comm, lambda: np.save(path, np.ones((20, 20))))

    def meddle(done: int, total: int) -> None:
        if comm.rank == 0:
            before = path.stat()
            np.save(path, np.ones((30, 20)))
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    refused(comm, FileError, "was changed while it was read", npy.load, path, grid, progress=meddle)
