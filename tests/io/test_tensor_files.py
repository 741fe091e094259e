"""Tensors in HDF5 and .npy files: datasets of any number of dimensions, whole or in parts, in all layouts."""

from __future__ import annotations

import itertools
import tracemalloc
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from stored_files import by_rank_0, edited, only_file, read, refused, unchanged

import pdgemm
from pdgemm import DistMatrix, DistTensor
from pdgemm.errors import ArgumentError, DTypeError, FileError, LayoutError, PdgemmError
from pdgemm.grids.tensor_layout import TensorLayout
from pdgemm.io import boxes, dataset_access, hdf5, npy, pieces

pytestmark = pytest.mark.mpi

SHAPES = [(9,), (4, 6), (3, 4, 5), (2, 3, 4, 5), (1, 7, 1, 3, 2), (5, 0, 3), (7, 1, 1), (2, 2, 9, 2), (3, 11, 5)]
TYPES = ["f8", "c16", "f4", "i4", "f2"]


def values(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    x = np.random.default_rng(seed).integers(-9, 10, (2, *shape)).astype(dtype)
    return x[0] + 1j * x[1] if dtype.startswith("c") else x[0]


@pytest.mark.on_ranks(1, 2, 3, 4)
def test_tensors_are_saved_and_loaded_in_all_layouts(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one transfer and by many, contiguous, in chunks and compressed; in both orders; parts; and transposed."""
    h5, there = shared_tmp_path / "a.h5", shared_tmp_path / "a.npy"
    cases = [*enumerate(itertools.product((1 << 19, 40, 7), SHAPES))][comm.size % 2 :: 2]
    for number, (most, shape) in cases:
        monkeypatch.setattr(pieces, "ELEMENTS", most)
        dtype, ndim, seen = TYPES[number % len(TYPES)], len(shape), list[tuple[int, int]]()
        x = values(shape, dtype, number)
        turned = np.random.default_rng(number).permutation(ndim)
        T = DistTensor.from_global(x.transpose(turned)).transpose(np.argsort(turned))
        chunks = tuple(min(n, 3) for n in shape) if number % 3 == 1 and x.size else None
        hdf5.save(h5, "x", T, chunks=chunks, compression=chunks and "gzip", progress=lambda *x: seen.append(x))  # noqa: B023
        assert seen == [(at, len(seen)) for at in range(1, len(seen) + 1)]
        assert most != 7 or ndim < 3 or len(seen) > 1 or chunks or x.size <= 7 * comm.size
        assert np.array_equal(read(comm, h5, "x"), x)
        groups = tuple(int(y) for y in turned[: number % (ndim + 1)])
        layout = groups, tuple(y for y in range(ndim) if y not in groups)
        for options in ({"layout": layout}, {"layout": layout[::-1], "transpose": True}):
            y = hdf5.load(h5, "x", verify=True, **options)
            assert y.layout.rows == options["layout"][0] and y.dtype == x.dtype
            assert np.array_equal(y.allgather(), x.T if "transpose" in options else x)
        npy.save(there, T, order="CF"[number % 2])
        held = by_rank_0(comm, lambda: np.load(there))
        assert np.array_equal(held, x) and held.dtype == x.dtype and held.flags["CF"[number % 2] + "_CONTIGUOUS"]
        part = tuple(slice(n // 3, n - n // 4) for n in shape)
        for get, file in ((hdf5.load, f"{h5}:x"), (npy.load, there)):
            y = get(file, part=part, dtype="c16", transpose=number % 2 == 1)
            assert np.array_equal(y.allgather(), x[part].T if number % 2 else x[part])
            assert y.report.part is None if x[part].shape == shape else y.report.part.shape == x[part].shape
    npy.save(there, DistTensor.from_global(x := values((3, 11, 5), "f8")))
    whole = npy.load(there, layout=TensorLayout.even((3, 11, 5), (1,), (2, 0), (1, comm.size)))
    assert whole.layout.cols == (2, 0) and np.array_equal(whole.allgather(), x)
    assert only_file(shared_tmp_path, comm) == ["a.h5", "a.npy"]


def test_datasets_of_other_programs(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the other byte order, in chunks, virtual, and integers; in rows with gaps between them."""
    path, x = shared_tmp_path / "a.h5", values((6, 5, 4, 7), "f8")
    monkeypatch.setattr(pieces, "ELEMENTS", 100)
    with edited(comm, path, "w") as file:
        file["big"], file["integers"] = x.astype(">f4"), x.astype("i8")
        file.create_dataset("chunks", data=x, chunks=(4, 2, 3, 7), compression="gzip")
        virtual = h5py.VirtualLayout((6, 5, 4, 7), "f8")
        virtual[...] = h5py.VirtualSource(".", "chunks", x.shape)
        file.create_virtual_dataset("virtual", virtual)
        file["plain"] = x
    by_rank_0(comm, lambda: np.save(shared_tmp_path / "big.npy", x.astype(">i2")))
    for name, dtype in (("big", None), ("integers", "f8"), ("chunks", None), ("virtual", None), ("plain", "c16")):
        T = hdf5.load(path, name, dtype=dtype)
        if not dataset_access.parallel_h5py():
            assert T.report.method == ("mpi-io" if name in ("plain", "integers") else "independent")
        assert np.array_equal(T.allgather(), x)
        part = (slice(1, 5), None, (1, 3), range(2, 6))
        assert np.array_equal(hdf5.load(path, name, dtype=dtype, part=part).allgather(), x[1:5, :, 1:3, 2:6])
    assert np.array_equal(npy.load(shared_tmp_path / "big.npy").allgather(), x)
    assert str(hdf5.load(path, "plain", part=part).report).startswith(
        f"read {path}:plain ([1:5, 0:5, 1:3, 2:6] of 6 x 5 x 4 x 7 float64, 1.2 KiB) by "
    )


def test_checksums_and_lost_elements(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksum does not depend on the layout, and tells changed and exchanged elements; a matrix has the same."""
    path, x = shared_tmp_path / "a.h5", values((5, 4, 6), "f8") + 0.1
    sums = {hdf5.save(path, "x", DistTensor.from_global(x, rows=rows)).checksum for rows in ((), (1,), (2, 0))}
    assert len(sums) == 1 and None not in sums
    M = DistMatrix.from_global(x[0])
    assert hdf5.save(path, "m", M.tensor(M.shape)).checksum == hdf5.save(path, "m", M).checksum
    with edited(comm, path) as file:
        file["x"][3, 1] = file["x"][3, 1][::-1]
    refused(comm, FileError, "a.h5:x is damaged", hdf5.load, path, "x", verify=True)
    with unchanged(comm, shared_tmp_path), monkeypatch.context() as patched:
        patched.setattr(boxes, "in_layout", lambda T, to, **_: DistTensor.zeros(to.shape, grid=T.grid, layout=to))
        for save in (lambda T: hdf5.save(path, "x", T), lambda T: npy.save(shared_tmp_path / "x.npy", T)):
            refused(comm, FileError, "lost", save, DistTensor.from_global(x))

    def stopped(*_: int) -> None:
        raise RuntimeError("stopped")

    with unchanged(comm, shared_tmp_path), pytest.raises(RuntimeError, match="stopped"):
        hdf5.save(path, "x", DistTensor.from_global(x), progress=stopped)
    T = hdf5.load(path, "x")
    hdf5.save(path, "x", T, replaces=T.report)
    refused(comm, FileError, "was replaced after it was read", hdf5.save, path, "x", T, replaces=T.report)


def test_bad_files_and_arguments(comm: Any, shared_tmp_path: Path) -> None:
    path, there = shared_tmp_path / "a.h5", shared_tmp_path / "a.npy"
    T = DistTensor.random((3, 4, 5))
    hdf5.save(path, "x", T)
    npy.save(there, T)
    by_rank_0(comm, lambda: np.save(shared_tmp_path / "cut.npy", np.ones((9, 9, 9))))
    by_rank_0(comm, lambda: (shared_tmp_path / "cut.npy").open("rb+").truncate(900))
    with edited(comm, path) as file:
        file["strings"] = np.full((2, 2, 2), b"a")
        file["number"] = 1.0
    number = DistTensor.full((), 3.0)
    cases: list[tuple[Any, tuple[Any, ...], dict[str, Any], type[PdgemmError], str]] = [
        (hdf5.load, (path, "x"), {"part": (slice(1), slice(1))}, ArgumentError, "has a slice for each of 3 axes, got"),
        (hdf5.load, (path, "x"), {"part": 3}, ArgumentError, "for each of 3 axes, got 3"),
        (hdf5.load, (path, "x"), {"part": (None, (0, 5), None)}, ArgumentError, "axis 1 0:5 are not within 0:4"),
        (hdf5.load, (path, "x"), {"part": (None, None, slice(0, 5, 2))}, ArgumentError, "axis 2 are taken in steps"),
        (hdf5.load, (path, "x"), {"part": (slice(2), None, None), "verify": True}, ArgumentError, r"\[0:2, 0:4, 0:5\]"),
        (hdf5.load, (path, "x"), {"block": 2}, ArgumentError, "x is read as a tensor of 3 dimensions: block"),
        (npy.load, (there,), {"rows": (0, 2)}, ArgumentError, "a.npy is read as a tensor of 3 dimensions"),
        (npy.load, (there,), {"source": (0, 1)}, ArgumentError, "a.npy is read as a tensor of 3 dimensions"),
        (npy.load, (there,), {"layout": 3}, ArgumentError, "layout is a TensorLayout or the axes of rows"),
        (npy.load, (there,), {"layout": ((0,), (0, 2))}, ArgumentError, "must have each of 3 axes once"),
        (npy.load, (there,), {"layout": DistTensor.zeros((3, 4)).layout}, LayoutError, "layout is that of a tensor"),
        (npy.load, (there,), {"dtype": "i4"}, DTypeError, "holds float64, which cannot become int32"),
        (npy.load, (shared_tmp_path / "cut.npy",), {}, FileError, "cut.npy is truncated"),
        (hdf5.load, (path, "strings"), {}, DTypeError, r"can be of|cannot become"),
        (hdf5.load, (path, "number"), {"part": ()}, LayoutError, r"its shape is \(\)"),
        (hdf5.dataset, (path, "x"), {}, LayoutError, r"neither a matrix nor a vector: its shape is \(3, 4, 5\)"),
        (npy.dataset, (there,), {}, LayoutError, r"neither a matrix nor a vector: its shape is \(3, 4, 5\)"),
        (hdf5.save, (path, "y", number), {}, LayoutError, "a tensor without axes is a number"),
        (npy.save, (there, number), {}, LayoutError, "a tensor without axes is a number"),
        (npy.save, (there, T), {"order": "A"}, ArgumentError, "neither"),
        (hdf5.save, (path, "strings", T), {}, ArgumentError, "overwrite"),
        (hdf5.save, (path, "y", T), {"chunks": (2, 2)}, PdgemmError, "a.h5"),
    ]  # fmt: skip
    with unchanged(comm, shared_tmp_path):
        for call, arguments, options, kind, message in cases:
            refused(comm, kind, message, call, *arguments, **options)
        if comm.size > 1:
            refused(comm, PdgemmError, "different arguments", hdf5.load, path, "x", part=((comm.rank, 3), None, None))


def test_nothing_of_the_size_of_the_tensor(comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apart from the parts of the ranks, which are in shared memory."""
    monkeypatch.setattr(pieces, "ELEMENTS", 1 << 14)
    shape = (32, 8, 32, 64)
    T = DistTensor.from_function(lambda i, j, k, l: i + 0.5 * j - k * l, shape, rows=(3, 1), cols=(2, 0))
    expected = pdgemm.einsum("ijkl->i", T)
    tracemalloc.start()
    hdf5.save(shared_tmp_path / "a.h5", "x", T)
    read_back = hdf5.load(shared_tmp_path / "a.h5", "x", layout=((1, 0), (2, 3)), verify=True)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    whole = T.size * 8
    assert peak < whole / 3
    assert np.array_equal(pdgemm.einsum("ijkl->i", read_back), expected)
