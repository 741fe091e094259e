"""Files of many small matrices, which share openings, agreements and messages ("parcels"); and failed writes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from problems import DTYPES, grid_shapes
from stored_files import by_rank_0, elements, only_file, refused, unchanged

from pdgemm import DistMatrix, ProcessGrid, Scaled, quantize
from pdgemm.errors import FileError
from pdgemm.io import dataset_access, hdf5, many_datasets, pieces
from pdgemm.io.scaled_files import load_scaled, save_scaled
from pdgemm.support import files, waits
from pdgemm.support.files import file_error

pytestmark = pytest.mark.mpi
ATTRS = {"step": 7, "rate": 0.5, "name": "größe", "done": False, "seeds": np.arange(5), "shift": 1 - 2j}
SHAPES = [(3, 5), (1, 1), (0, 4), (17, 1), (1, 9), (6, 7), (40, 30)]


def matrices(grid: Any, shapes: list[tuple[int, int]]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return arrays of all types by name, and the same as matrices in blocks of different sizes."""
    given = {f"layer.{at}/{dtype}": elements(shape, dtype, at) for at, shape in enumerate(shapes) for dtype in DTYPES}
    of = [(1 + at % 4, 1 + at % 3) for at in range(len(given))]
    placed = zip(given.items(), of)
    return given, {name: DistMatrix.from_global(x, grid=grid, block=block) for (name, x), block in placed}


def same(path: Path, given: dict[str, np.ndarray]) -> bool:
    """Return whether plain h5py reads exactly these arrays from a file."""
    there = dict[str, np.ndarray]()
    with h5py.File(path) as file:
        file.visititems(lambda name, x: there.update({name: x[()]}) if isinstance(x, h5py.Dataset) else None)
    return {*there} == {*given} and all(
        x.dtype == given[name].dtype and np.array_equal(x, given[name]) for name, x in there.items()
    )


@pytest.mark.parametrize("size", [1 << 19, 45, 1])
def test_matrices_of_all_sizes_are_saved_and_loaded(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """In one parcel, in several with large matrices between them, or each alone; loaded in other layouts and types."""
    monkeypatch.setattr(pieces, "ELEMENTS", size)
    monkeypatch.setattr(pieces, "INDICES", max(size, comm.size))
    path = shared_tmp_path / "state.h5"
    turned, some = range(comm.size)[::-1], range(max(1, comm.size - 1))  # reversed ranks; one idle rank
    for number, shape in enumerate(grid_shapes(comm.size), 1):
        with ProcessGrid(comm, shape, ranks=turned) as one, ProcessGrid(comm, (1, len(some)), ranks=some) as other:
            here, there = (one, other) if number % 2 else (other, one)
            given, X = matrices(here, SHAPES if size > 1 else SHAPES[:-1])
            check_parcels(pieces.parcels([*X.values()], comm.size), [x.size for x in given.values()], comm.size, size)
            calls = list[tuple[int, int]]()
            report = hdf5.save_all(path, X, attrs=ATTRS, progress=lambda *x, calls=calls: calls.append(x))
            assert calls == [(at + 1, len(X)) for at in range(len(X))]
            assert report.generation == 2 * number - 1 and report.bytes == sum(x.nbytes for x in given.values())
            assert same(path, given)
            layouts: dict[str, dict[str, Any]] = {name: {"block": (1 + at % 3, 2)} for at, name in enumerate(given)}
            for name in [*given][::2]:
                layouts[name] |= {"transpose": True, "source": (0, 1 % there.shape[1])}
            wider = [name for name, x in given.items() if x.dtype == "f"]
            for name in wider:
                layouts[name] |= {"dtype": "complex128"}
            state = hdf5.load_all(path, there, layouts)
            assert [*state.matrices] == sorted(given) and state.generation == report.generation
            assert state.attrs.keys() == ATTRS.keys() and isinstance(state.attrs["step"], int)
            assert all(np.array_equal(x, ATTRS[name]) for name, x in state.attrs.items())
            for name, x in given.items():
                Y, wanted = state.matrices[name], x.T if layouts[name].get("transpose") else x
                assert Y.dtype == ("D" if name in wider else x.dtype) and Y.block == layouts[name]["block"]
                assert np.array_equal(Y.allgather(), wanted), name
                assert Y.report.name == name and (Y.report.shape, Y.report.bytes) == (x.shape, x.nbytes)
                assert np.array_equal(X[name].allgather(), x)  # X was not overwritten
            comm.Barrier()
            views = {"T": X["layer.5/float64"].T, "H": X["layer.5/complex128"].H, "part": X["layer.5/float32"][1:5, 2:]}
            hdf5.save_all(path, views)
            whole = {"T": given["layer.5/float64"].T, "H": given["layer.5/complex128"].conj().T}
            assert same(path, whole | {"part": given["layer.5/float32"][1:5, 2:]})
    assert only_file(shared_tmp_path, comm) == ["state.h5"]


def check_parcels(parcels: Any, sizes: list[int], ranks: int, most: int) -> None:
    assert {45: len(parcels) > 1, 1 << 19: len(parcels) == 1}.get(most, True)
    for parcel in parcels:
        within = [sizes[number] for number in parcel.numbers]
        assert parcel.ranks == sorted(parcel.ranks) and max(within) <= most
        assert max(parcel.ranks) < ranks and sum(within) <= max(ranks * most, within[0])


def counting_openings_and_communications(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Count openings of files, waits for other ranks, and flushes to disk; return the counter."""
    counted = Counter[str]()

    def counting(name: str, original: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            counted[name] += 1
            return original(*arguments, **options)

        return call

    patch.setattr(h5py, "File", counting("HDF5", h5py.File))
    patch.setattr(dataset_access, "open_on_all", counting("MPI-IO", dataset_access.open_on_all))
    for module in (files, many_datasets):
        patch.setattr(module, "reserve", counting("reserve", module.reserve))
    patch.setattr(many_datasets, "to_disk", counting("to disk", many_datasets.to_disk))
    patch.setattr(waits.Wait, "__enter__", counting("waits", waits.Wait.__enter__))
    return counted


def test_openings_and_communications_do_not_grow_with_the_number_of_matrices(
    comm: Any, grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load takes three openings of HDF5 by rank 0, one of MPI-IO, and one exchange of small matrices."""
    saved, loaded = list[Counter[str]](), list[Counter[str]]()
    for number in (2, 9):
        _, X = matrices(grid, [(3, 5)] * number)
        path = shared_tmp_path / f"{number}.h5"
        hdf5.save_all(path, X)
        with monkeypatch.context() as patch:
            counted = counting_openings_and_communications(patch)
            hdf5.save_all(path, X)
            saved.append(Counter(counted))
            counted.clear()
            hdf5.load_all(path, grid, {name: {"block": 2, "transpose": True} for name in X})
            loaded.append(counted)
    assert saved[0] == saved[1] and saved[0]["MPI-IO"] == 2 and saved[0]["waits"] <= 50
    waits = 29 if comm.size > 1 else 9
    assert loaded[0] == loaded[1] == {"MPI-IO": 1, "waits": waits} | ({"HDF5": 3} if comm.rank == 0 else {})
    if comm.rank == 0:
        assert saved[0]["to disk"] == 1 and saved[0]["HDF5"] <= 6


def test_datasets_that_another_program_has_compressed_are_loaded(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    """Compressed and other datasets are loaded by one call, and their checksums are compared."""
    path = shared_tmp_path / "state.h5"

    def compress(added: float) -> None:
        with h5py.File(path, "r+") as file:
            x, recorded = file["layer.1/float64"][:] + added, {**file["layer.1/float64"].attrs}
            del file["layer.1/float64"]
            file.create_dataset("layer.1/float64", data=x, chunks=(2, 2), compression="gzip").attrs.update(recorded)

    given, X = matrices(grid, [(3, 5), (4, 4), (0, 2)])
    hdf5.save_all(path, X)
    by_rank_0(comm, lambda: compress(0))
    loaded = hdf5.load_all(path, grid).matrices
    assert [*loaded] == sorted(given)
    assert all(np.array_equal(x.allgather(), given[name]) for name, x in loaded.items())
    assert {x.report.method for x in loaded.values()} == {"mpi-io", loaded["layer.1/float64"].report.method}
    by_rank_0(comm, lambda: compress(1))
    refused(comm, FileError, r"layer\.1/float64 is damaged", hdf5.load_all, path, grid)


@pytest.mark.parametrize("fault", ["lost", "fails"])
@pytest.mark.parametrize("write", [False, True])
def test_a_small_matrix_that_one_rank_does_not_transfer_is_noticed_by_all(
    comm: Any, grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, write: bool
) -> None:
    path, original, (_, X) = shared_tmp_path / "state.h5", dataset_access._transfer, matrices(grid, [(3, 5)] * 4)

    def faulty(*where: Any) -> Any:
        transfer = original(*where)

        def wrong(row: int, col: int, part: np.ndarray) -> None:
            transfer(row, col, 0 * part if write else part)
            if fault == "fails":
                raise file_error(path, OSError(5, "Input/output error"))
            part[-1, -1] *= write

        return wrong if comm.rank == comm.size - 1 and where[2] == write else transfer

    hdf5.save_all(path, X)
    said = r"Input/output error" if fault == "fails" else "does not hold the bytes" if write else "is damaged"
    with monkeypatch.context() as patch, unchanged(comm, shared_tmp_path):
        patch.setattr(dataset_access, "_transfer", faulty)
        if write:
            refused(comm, FileError, rf"state\.h5.*{said}", hdf5.save_all, path, {name: 2 * x for name, x in X.items()})
        else:
            refused(comm, FileError, rf"state\.h5:.*{said}", hdf5.load_all, path, grid)
    assert {*hdf5.load_all(path, grid).matrices} == {*X}


def test_scaled_matrices_are_saved_and_loaded(comm: Any, shared_tmp_path: Path) -> None:
    path = shared_tmp_path / "weights.h5"
    shape = grid_shapes(comm.size)[-1]
    with ProcessGrid(comm) as grid, ProcessGrid(comm, shape) as other:
        A = DistMatrix.random((45, 37), grid=grid, block=(8, 4), kind="normal")
        powers = quantize(A, "float8_e4m3fn", "block", block=(4, 4), scale_dtype="float8_e8m0fnu")
        matrices = {
            "layer/w": powers,
            "turned": quantize(A, "float8_e5m2", "row").T,
            "whole": quantize(A, "int8", "column"),
            "plain": A,
        }
        save_scaled(path, matrices, attrs={"step": 3})
        saved = load_scaled(path, other, {"layer/w/values": {"block": 5}})
        assert saved.attrs == {"step": 3} and {*saved.matrices} == {*matrices}
        for name, x in matrices.items():
            y: Any = saved.matrices[name]
            if isinstance(x, Scaled):
                assert (y.dtype, y.scales.dtype, y.block) == (x.dtype, x.scales.dtype, x.block)
                x, y = x.decode(), y.decode()
            assert np.array_equal(x.allgather(), y.allgather())
        assert saved.matrices["layer/w"].values.block == (5, 5)  # type: ignore[attr-defined]
