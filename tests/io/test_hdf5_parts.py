"""Parts of datasets: rows and columns, by each way of reading, transposed or not; only what is asked for is read."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from problems import grid_shapes
from stored_files import by_rank_0
from tiers import pairs, square_grid

from pdgemm import DistMatrix, ProcessGrid
from pdgemm.errors import ArgumentError, FileError
from pdgemm.io import hdf5, hyperslabs, mpi_io, npy

pytestmark = [pytest.mark.mpi, square_grid]

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


def write(path: Path, x: np.ndarray) -> None:
    """The same matrix in every storage: contiguous, in chunks, compressed, big-endian, in pieces of other datasets."""
    with h5py.File(path, "w") as file:
        file["contiguous"] = x
        file.create_dataset("chunked", data=x, chunks=(7, 9))
        file.create_dataset("gzip", data=x, chunks=(8, 8), compression="gzip")
        file["big_endian"] = x.astype(">f8")
        layout = h5py.VirtualLayout(x.shape, x.dtype)
        layout[:20] = h5py.VirtualSource(path, "contiguous", x.shape)[:20]
        layout[20:] = h5py.VirtualSource(path, "chunked", x.shape)[20:]
        file.create_virtual_dataset("virtual", layout)


@pytest.mark.parametrize("way", ["best", "without a parallel h5py"])
def test_parts_of_every_storage(
    comm: Any, shared_tmp_path: Path, parallel: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip

    if way != "best":
        if not parallel:
            pytest.skip("without a parallel h5py it is the best way")
        monkeypatch.setattr(hyperslabs, "parallel_h5py", lambda: False)
    path = shared_tmp_path / "parts.h5"
    x = np.random.default_rng(3).standard_normal((M, N))
    by_rank_0(comm, lambda: write(path, x))
    names = ["contiguous", "chunked", "gzip", "big_endian", "virtual"]
    expected = {"contiguous": "mpi-io"} if way != "best" or not parallel else dict.fromkeys(names[:4], "mpio")
    turn = itertools.cycle(itertools.product([False, True], [None, (3, 2)], [1 << 12, 0]))
    grids = [ProcessGrid(comm, shape) for shape in grid_shapes(comm.size)]
    for made, name, (rows, cols) in pairs(grids, names, PARTS):
        transpose, block, gap = next(turn)
        monkeypatch.setattr(mpi_io, "_GAP", gap)  # each row alone, and many together
        dtype = "complex64" if name == "contiguous" and made is grids[0] else None
        A = hdf5.load(path, name, made, block, rows=rows, cols=cols, transpose=transpose, dtype=dtype)
        part = x[as_slice(rows), as_slice(cols)]
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
    for load, method in itertools.product(loads, ["best", "mpi-io"]):
        if method == "mpi-io":
            monkeypatch.setattr(hyperslabs, "parallel_h5py", lambda: False)
        for part in ({"rows": (1000, 1100), "cols": (5, 15)}, {"rows": slice(32760, None), "cols": (32000, 32700)}):
            load(rows=(0, 1), cols=(0, 1))  # modules, libraries
            before = counted()
            A = load(**part)
            read = comm.allreduce(counted() - before)
            assert isinstance(A, DistMatrix)
            # a collective read takes what lies between the rows, too, as far as its buffers go
            between = 0 if A.report.method != "mpio" else A.shape[0] * (1 << 15) * A.dtype.itemsize
            assert read < A.nbytes + between + comm.size * 300_000


def test_what_is_refused(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "a.h5"
    x = np.arange(30.0).reshape(6, 5)
    hdf5.save(path, "x", DistMatrix.from_global(x, grid=grid))
    for part, message in [
        ({"rows": slice(0, 6, 2)}, r"rows are taken in steps of 1, got slice\(0, 6, 2\)"),
        ({"cols": slice(None, None, -1)}, "cols are taken in steps of 1"),
        ({"cols": range(0, 5, 3)}, "cols are taken in steps of 1"),
        ({"rows": 3}, r"rows are a pair \(start, stop\), a slice or a range, got 3"),
        ({"rows": (2, 7)}, "rows 2:7 are not within 0:6"),
        ({"rows": (3, 2)}, "the stop of rows must be >= 3, got 2"),
        ({"rows": slice("a", None)}, "rows are .* of whole numbers"),
        ({"rows": (0, 3), "verify": True}, "verify reads the whole dataset, and not a part of it"),
    ]:
        with pytest.raises(ArgumentError, match=message) as caught:
            hdf5.load(path, "x", grid, **part)
        assert len(set(comm.allgather(str(caught.value)))) == 1
    assert hdf5.load(path, "x", grid, rows=(0, 6), verify=True).shape == (6, 5)  # which is all
    if comm.size > 1:
        with pytest.raises(ArgumentError, match="different arguments"):
            hdf5.load(path, "x", grid, rows=(comm.rank, 6))
    A = hdf5.load(path, "x", grid, rows=(1, 3), cols=slice(2))
    assert str(A.report).startswith(f"read {path}:x (rows 1:3, columns 0:2 of 6 x 5 float64, 32 B) by mpi")
    assert hdf5.save(path, "x", A, replaces=A.report).shape == (2, 2)  # nobody has saved meanwhile
    with pytest.raises(FileError, match="was replaced after it was read"):
        hdf5.save(path, "x", A, replaces=A.report)
