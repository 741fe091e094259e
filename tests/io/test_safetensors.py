"""safetensors files: pdgemm loads files of the safetensors library, and the library loads files of pdgemm."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems import BLOCKS, grid_shapes, sources
from stored_files import by_rank_0, only_file, refused, unchanged

from pdgemm import DistMatrix, ProcessGrid
from pdgemm.errors import ArgumentError, DTypeError, FileError, LayoutError
from pdgemm.io import atomic, safetensors
from pdgemm.io.many_datasets import ManyDatasets
from pdgemm.io.safetensors.matrices import DTYPE

pytest.importorskip("safetensors", reason="safetensors is not installed")
pytestmark = pytest.mark.mpi

SHAPES = [(0, 0), (0, 5), (4, 0), (1, 1), (7, 5), (13, 8), (29, 61)]
TYPES = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "bfloat16", "float32",
    "float64", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu",
]  # fmt: skip


def tensors_of(path: Path) -> dict[str, np.ndarray]:
    """Return the tensors that the library reads in one process; 8-bit floats, which NumPy lacks, as bytes."""
    from safetensors import deserialize

    return {
        name: np.frombuffer(bytes(x["data"]), DTYPE[x["dtype"]]).reshape(x["shape"])
        for name, x in deserialize(path.read_bytes())
    }


def write(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write tensors by the library."""
    from safetensors.numpy import save_file

    save_file({name: np.array(x, order="C") for name, x in tensors.items()}, path)


def test_both_ways_with_the_library(comm: Any, shared_tmp_path: Path) -> None:
    """All types and shapes in one file, all blocks and sources, views and vectors: bits are equal."""
    theirs, ours = shared_tmp_path / "theirs.safetensors", shared_tmp_path / "ours.safetensors"
    rng = np.random.default_rng(1)
    x = {f"{n}/{dtype}": rng.integers(0, 2, SHAPES[n % len(SHAPES)]).astype(dtype) for n, dtype in enumerate(TYPES)}
    x["nan"] = np.array([[np.nan, -0.0, np.inf]], "f")
    x["vector"] = np.arange(37.0)
    by_rank_0(comm, lambda: write(theirs, x))
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            turn = itertools.cycle(itertools.product(BLOCKS, sources(shape), [False, True]))
            layouts = {
                name: {"block": None if mb is None else (mb, nb), "source": source, "transpose": turned}
                for name, ((mb, nb, *_), source, turned) in zip(x, turn)
            }
            matrices = safetensors.load_all(theirs, grid, layouts)
            assert matrices.keys() == x.keys()
            for name, A in matrices.items():
                whole = x[name] if x[name].ndim == 2 else x[name][:, None]
                assert A.dtype == whole.dtype and A.report.name == name and A.report.bytes == whole.nbytes
                assert A.allgather().tobytes() == (whole.T if layouts[name]["transpose"] else whole).tobytes()
            back = {name: A.T if layouts[name]["transpose"] else A for name, A in matrices.items()}
            size = safetensors.save_all(ours, back, shapes={"vector": (37,)})
            saved = by_rank_0(comm, lambda: tensors_of(ours))
            assert saved.keys() == x.keys() and size == by_rank_0(comm, lambda: ours.stat().st_size)
            for name, values in saved.items():
                assert (values.dtype, values.shape) == (x[name].dtype, x[name].shape), name
                assert values.tobytes() == x[name].tobytes(), name
    assert only_file(shared_tmp_path, comm) == ["ours.safetensors", "theirs.safetensors"]


def test_headers_meet_the_rules_of_the_library(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    """Metadata, names of any characters, and alignment; a selection of tensors is read, in other types."""
    from safetensors import safe_open

    path, metadata = shared_tmp_path / "x.safetensors", {"made by": "üα", "step": "7"}
    names = ["é.weight", 'a"b\\c', "d/e", "f"]
    dtypes = ["int8", "float64", "float16", "float32"]
    matrices = {
        name: DistMatrix.ones((3, n + 1), grid=grid, dtype=dtype) for n, (name, dtype) in enumerate(zip(names, dtypes))
    }
    for options, expected in (({}, {"format": "pt"}), ({"metadata": metadata}, metadata)):
        safetensors.save_all(path, matrices, check=bool(options), **options)

        def read() -> Any:
            data = path.read_bytes()
            text = data[8 : 8 + int.from_bytes(data[:8], "little")]
            with safe_open(path, "numpy") as file:
                return file.metadata(), json.loads(text), len(text)

        there, header, length = by_rank_0(comm, read)
        assert there == {"written by": "pdgemm", **expected} and length % 8 == 0
        assert {name: x["dtype"] for name, x in header.items() if name in names} == dict(
            zip(names, ["I8", "F64", "F16", "F32"])
        )
        assert all(header[name]["data_offsets"][0] % matrices[name].dtype.itemsize == 0 for name in names)
    some = safetensors.load_all(path, grid, {"f": {"dtype": "float64"}}, names=["f", "d/e"])
    assert [(name, A.dtype) for name, A in some.items()] == [("f", "float64"), ("d/e", "float16")]


def test_matrices_that_cannot_be_saved_or_loaded(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    """All ranks raise the same error, and the old file stays."""
    path, A = shared_tmp_path / "x.safetensors", DistMatrix.ones((3, 4), grid=grid)
    safetensors.save_all(path, {"a": A})
    old = by_rank_0(comm, path.read_bytes)
    for error, message, matrices, options in (
        (DTypeError, "cannot hold a, of complex128: convert", {"a": A.astype("complex128")}, {}),
        (LayoutError, r"a is 3 x 4, and cannot have the shape \(5,\)", {"a": A}, {"shapes": {"a": (5,)}}),
        (LayoutError, "cannot have the shape", {"a": A}, {"shapes": {"a": (-3, -4)}}),
        (ArgumentError, "shapes has 'b', which is not one of the matrices a", {"a": A}, {"shapes": {"b": (12,)}}),
        (ArgumentError, "no tensor has the name '__metadata__'", {"__metadata__": A}, {}),
        (ArgumentError, "are strings, got 7", {"a": A}, {"metadata": {"step": 7}}),
        (ArgumentError, "are strings, got", {"\ud800": A}, {}),
        (ArgumentError, "are strings, got 1", {1: A, "1": A}, {}),
        (ArgumentError, "matrices is empty", {}, {}),
        (DTypeError, "a must be a DistMatrix", {"b": A, "a": np.ones((2, 2))}, {}),
    ):
        refused(comm, error, message, safetensors.save_all, path, matrices, **options)
    refused(comm, ArgumentError, "has no c, b; it has a", safetensors.load_all, path, grid, {"b": {}}, names=["a", "c"])
    refused(comm, ArgumentError, "names must be a list of names, got 'a'", safetensors.load_all, path, grid, names="a")
    refused(comm, ArgumentError, "load has no option rows", safetensors.load_all, path, grid, {"a": {"rows": 3}})
    refused(comm, DTypeError, "cannot become int32", safetensors.load_all, path, grid, {"a": {"dtype": "int32"}})
    assert by_rank_0(comm, path.read_bytes) == old
    if comm.size > 1:
        with pytest.raises(ArgumentError, match="different arguments"):
            safetensors.save_all(path, {"a": A}, metadata={"rank": str(comm.rank)})
    many = shared_tmp_path / "many.safetensors"
    by_rank_0(comm, lambda: write(many, {"conv": np.ones((2, 3, 3), "f"), "one": np.ones((), "f"), "w": np.eye(3)}))
    loaded = safetensors.load_all(many, grid)
    assert {name: x.shape for name, x in loaded.items()} == {"conv": (2, 9), "one": (1, 1), "w": (3, 3)}
    assert np.array_equal(safetensors.load_all(many, grid, names=["w"])["w"].allgather(), np.eye(3))
    assert only_file(shared_tmp_path, comm) == ["many.safetensors", "x.safetensors"]


def described(*tensors: tuple[str, str, list[int], list[int]], data: int) -> bytes:
    """Return the contents of a file with this header of tensors, and `data` bytes of zeros."""
    text = json.dumps({name: {"dtype": d, "shape": s, "data_offsets": o} for name, d, s, o in tensors}).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


def test_damaged_files_are_refused(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    """Truncated anywhere, or with an invalid header: one FileError on all ranks, and never a matrix."""
    path = shared_tmp_path / "x.safetensors"
    safetensors.save_all(path, {"a": DistMatrix.random((5, 3), grid=grid, seed=1)})
    whole = by_rank_0(comm, path.read_bytes)
    length = int.from_bytes(whole[:8], "little")
    F32 = "F32"
    for data in (
        b"", whole[:5], whole[:8], whole[: 8 + length // 2], whole[: 8 + length], whole[:-1], whole + b"x",
        b"\xff" * 8 + whole[8:], (1 << 40).to_bytes(8, "little") + whole[8:], whole[:8] + b"[" + whole[9:],
        b"\x93NUMPY" + whole, b"{}" * 100,
        described(("a", F32, [2], [0, 8]), ("b", F32, [1], [4, 8]), data=8),  # overlap
        described(("a", F32, [2], [8, 16]), data=16),  # a gap
        described(("a", F32, [2], [0, 12]), data=12),  # size and shape differ
        described(("a", F32, [1 << 62, 1 << 62], [0, 8]), data=8),  # the size overflows
        described(("a", F32, [-1], [0, 4]), data=4),
        described(("a", "F99", [1], [0, 4]), data=4),
    ):  # fmt: skip
        by_rank_0(comm, lambda data=data: path.write_bytes(data))
        with pytest.raises(FileError, match=r"x\.safetensors is not a safetensors file, or is damaged: "):
            safetensors.load_all(path, grid)
    by_rank_0(comm, lambda: path.write_bytes(described(("a", "F4", [2], [0, 1]), data=1)))
    refused(comm, DTypeError, "tensors of type F4 cannot be read; valid types are", safetensors.load_all, path, grid)
    for other in (shared_tmp_path, shared_tmp_path / "none.safetensors"):
        with pytest.raises(FileError):
            safetensors.load_all(other, grid)


def test_without_the_library(comm: Any, grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks name the package to install, before anything is written."""
    path = shared_tmp_path / "x.safetensors"
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for call in (
        lambda: safetensors.save_all(path, {"a": DistMatrix.ones((3, 4), grid=grid)}),
        lambda: safetensors.load_all(path, grid),
    ):
        refused(comm, ArgumentError, r"safetensors is not installed: pip install 'pdgemm\[safetensors\]'", call)
    assert only_file(shared_tmp_path, comm) == []


def test_bytes_lost_by_storage_are_noticed(
    comm: Any, grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a byte of the elements or the header changes, saving fails, the old file stays, and no other file is left."""
    path, A = shared_tmp_path / "x.safetensors", DistMatrix.random((7, 5), grid=grid, seed=1)
    safetensors.save_all(path, {"a": A})
    for where, before, at in ((ManyDatasets, ManyDatasets.write, -3), (atomic, atomic.to_disk, 10)):

        def flipped(*arguments: Any, before: Any = before, at: int = at) -> None:
            before(*arguments)
            if comm.rank == 0:
                partial = next(shared_tmp_path.glob(".x.safetensors.*.partial"))
                data = bytearray(partial.read_bytes())
                data[at] ^= 1
                partial.write_bytes(data)

        with monkeypatch.context() as patch, unchanged(comm, shared_tmp_path):
            patch.setattr(where, before.__name__, flipped)
            lost = r"x\.safetensors: the file does not hold the bytes that were written"
            refused(comm, FileError, lost, safetensors.save_all, path, {"a": A * 2})
