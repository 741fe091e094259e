"""Files of many small matrices: what is opened and agreed on once for all, parcels, and writes that fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from problems import DTYPES, grid_shapes
from stored_files import by_rank_0, elements, only_file

from pdgemm import DistMatrix, ProcessGrid
from pdgemm.errors import FileError
from pdgemm.io import hdf5, many_datasets, mpi_io, pieces
from pdgemm.support import files, waits
from pdgemm.support.files import file_error

pytestmark = pytest.mark.mpi
SHAPES = [(3, 5), (1, 1), (0, 4), (17, 1), (1, 9), (6, 7), (40, 30)]


def matrices(grid: Any, shapes: list[tuple[int, int]]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays of all types by name, and the same distributed in blocks of different sizes."""
    given = {f"layer.{at}/{dtype}": elements(shape, dtype, at) for at, shape in enumerate(shapes) for dtype in DTYPES}
    of = [(1 + at % 4, 1 + at % 3) for at in range(len(given))]
    placed = zip(given.items(), of)
    return given, {name: DistMatrix.from_global(x, grid=grid, block=block) for (name, x), block in placed}


def held(path: Path) -> dict[str, np.ndarray]:
    """The datasets of a file, read without pdgemm."""
    there = dict[str, np.ndarray]()
    with h5py.File(path) as file:
        file.visititems(lambda name, x: there.update({name: x[()]}) if isinstance(x, h5py.Dataset) else None)
    return there


def same(path: Path, given: dict[str, np.ndarray]) -> bool:
    there = held(path)
    return (
        {*there} == {*given}
        and all(x.dtype == given[name].dtype for name, x in there.items())
        and all(np.array_equal(x, given[name]) for name, x in there.items())
    )


@pytest.mark.parametrize("size", [1 << 19, 45, 1])
def test_matrices_of_all_sizes_are_what_they_were(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """In one parcel, in several with large matrices between them, and each alone."""
    monkeypatch.setattr(pieces, "ELEMENTS", size)
    monkeypatch.setattr(pieces, "INDICES", max(size, comm.size))
    path = shared_tmp_path / "state.h5"
    turned, some = range(comm.size)[::-1], range(max(1, comm.size - 1))  # ranks in another order, and one that is idle
    for shape, ranks in [*((shape, turned) for shape in grid_shapes(comm.size)), ((1, len(some)), some)]:
        with ProcessGrid(comm, shape, ranks=ranks) as grid:
            given, X = matrices(grid, SHAPES if size > 1 else SHAPES[:-1])
            parcels = pieces.parcels([*X.values()], comm.size)
            assert {45: len(parcels) > 1, 1 << 19: len(parcels) == 1}.get(size, True)
            for parcel in parcels:
                sizes = [[*given.values()][number].size for number in parcel.numbers]
                assert parcel.ranks == sorted(parcel.ranks) and max(sizes) <= size
                assert max(parcel.ranks) < comm.size and sum(sizes) <= max(comm.size * size, sizes[0])
            calls = list[tuple[int, int]]()
            hdf5.save_all(path, X, progress=lambda done, total, calls=calls: calls.append((done, total)))
            assert calls == [(at + 1, len(X)) for at in range(len(X))]
            assert same(path, given)
            comm.Barrier()
            views = {"T": X["layer.5/float64"].T, "H": X["layer.5/complex128"].H, "part": X["layer.5/float32"][1:5, 2:]}
            hdf5.save_all(path, views)
            whole = {"T": given["layer.5/float64"].T, "H": given["layer.5/complex128"].conj().T}
            assert same(path, whole | {"part": given["layer.5/float32"][1:5, 2:]})
            comm.Barrier()


@pytest.mark.parametrize("size", [1 << 19, 45, 1])
def test_matrices_of_all_sizes_are_loaded(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """In parcels and alone, on other ranks, in other blocks, transposed and as another type, each with its report."""
    path = shared_tmp_path / "state.h5"
    with ProcessGrid(comm) as grid:
        given, X = matrices(grid, SHAPES if size > 1 else SHAPES[:-1])
        hdf5.save_all(path, X)
    monkeypatch.setattr(pieces, "ELEMENTS", size)
    monkeypatch.setattr(pieces, "INDICES", max(size, comm.size))
    turned, some = range(comm.size)[::-1], range(max(1, comm.size - 1))
    for shape, ranks in [(grid_shapes(comm.size)[-1], turned), ((1, len(some)), some)]:
        with ProcessGrid(comm, shape, ranks=ranks) as grid:
            layouts: dict[str, dict[str, Any]] = {name: {"block": (1 + at % 3, 2)} for at, name in enumerate(given)}
            for name in [*given][::2]:
                layouts[name] |= {"transpose": True, "source": (0, 1 % shape[1])}
            wider = [name for name, x in given.items() if x.dtype == "f"]
            for name in wider:
                layouts[name] |= {"dtype": "complex128"}
            loaded = hdf5.load_all(path, grid, layouts).matrices
            assert [*loaded] == sorted(given)
            for name, x in given.items():
                X, wanted = loaded[name], x.T if layouts[name].get("transpose") else x
                assert X.dtype == ("D" if name in wider else x.dtype) and X.block == layouts[name]["block"]
                assert np.array_equal(X.allgather(), wanted), name
                assert X.report.name == name and (X.report.shape, X.report.bytes) == (x.shape, x.nbytes)


def counting_openings_and_communications(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Return a counter of the openings of files, of waits in communications, and of what is done to the disk."""
    counted = Counter[str]()

    def counting(name: str, original: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            counted[name] += 1
            return original(*arguments, **options)

        return call

    patch.setattr(h5py, "File", counting("HDF5", h5py.File))
    patch.setattr(mpi_io, "open_on_all", counting("MPI-IO", mpi_io.open_on_all))
    for module in (files, many_datasets):
        patch.setattr(module, "reserve", counting("reserve", module.reserve))
    patch.setattr(many_datasets, "to_disk", counting("to disk", many_datasets.to_disk))
    patch.setattr(waits.Wait, "__enter__", counting("waits", waits.Wait.__enter__))
    return counted


def test_openings_and_communications_do_not_grow_with_the_number_of_matrices(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a load are few: three openings of HDF5 by rank 0, one of MPI-IO, and one exchange of small matrices."""
    with ProcessGrid(comm) as grid:
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
        waits = 30 if comm.size > 1 else 9
        assert loaded[0] == loaded[1] == {"MPI-IO": 1, "waits": waits} | ({"HDF5": 3} if comm.rank == 0 else {})
        if comm.rank == 0:
            assert saved[0]["to disk"] == 1 and saved[0]["HDF5"] <= 6


@pytest.mark.parametrize("fault", ["lost", "fails"])
def test_a_small_matrix_that_one_rank_does_not_read_is_noticed_by_all(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    path, original = shared_tmp_path / "state.h5", mpi_io._transfer

    def faulty(*where: Any) -> Any:
        transfer = original(*where)

        def get(row: int, col: int, part: np.ndarray) -> None:
            transfer(row, col, part)
            if fault == "fails":
                raise FileError(f"{path}: Input/output error")
            part[-1, -1] = 0

        return get if comm.rank == comm.size - 1 else transfer

    with ProcessGrid(comm) as grid:
        _, X = matrices(grid, [(3, 5)] * 4)
        hdf5.save_all(path, X)
        with monkeypatch.context() as patch:
            patch.setattr(mpi_io, "_transfer", faulty)
            with pytest.raises(FileError, match=r"state\.h5:.*(Input/output error|is damaged)"):
                hdf5.load_all(path, grid)
        assert {*hdf5.load_all(path, grid).matrices} == {*X}


def test_datasets_that_another_program_has_compressed_are_loaded(comm: Any, shared_tmp_path: Path) -> None:
    """Beside others, which are still as they were saved; they are compared with their checksums, too."""
    path = shared_tmp_path / "state.h5"

    def compress(added: float) -> None:
        with h5py.File(path, "r+") as file:
            x, recorded = file["layer.1/float64"][:] + added, {**file["layer.1/float64"].attrs}
            del file["layer.1/float64"]
            file.create_dataset("layer.1/float64", data=x, chunks=(2, 2), compression="gzip").attrs.update(recorded)

    with ProcessGrid(comm) as grid:
        given, X = matrices(grid, [(3, 5), (4, 4), (0, 2)])
        hdf5.save_all(path, X)
        by_rank_0(comm, lambda: compress(0))
        loaded = hdf5.load_all(path, grid).matrices
        assert [*loaded] == sorted(given)
        assert all(np.array_equal(x.allgather(), given[name]) for name, x in loaded.items())
        assert {x.report.method for x in loaded.values()} == {"mpi-io", loaded["layer.1/float64"].report.method}
        by_rank_0(comm, lambda: compress(1))
        with pytest.raises(FileError, match=r"layer\.1/float64 is damaged"):
            hdf5.load_all(path, grid)


@pytest.mark.parametrize("fault", ["lost", "fails"])
def test_a_small_matrix_that_one_rank_does_not_write_is_noticed_by_all(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    path, original = shared_tmp_path / "state.h5", mpi_io.all_by_mpi_io

    @contextmanager
    def faulty(file: Path, comm: Any, write: bool = False) -> Iterator[Any]:
        with original(file, comm, write) as transfer_of:

            def of(*where: Any) -> Any:
                transfer = transfer_of(*where)

                def put(row: int, col: int, part: np.ndarray) -> None:
                    if fault == "fails":
                        raise file_error(file, OSError(28, "No space left on device"))
                    transfer(row, col, 0 * part)

                return put if write and comm.rank == comm.size - 1 else transfer

            yield of

    with ProcessGrid(comm) as grid:
        given, X = matrices(grid, [(3, 5)] * 4)
        hdf5.save_all(path, X)
        monkeypatch.setattr(mpi_io, "all_by_mpi_io", faulty)
        said = "No space left on device" if fault == "fails" else "what was written is not what the file holds"
        with pytest.raises(FileError, match=rf"state\.h5.*{said}"):
            hdf5.save_all(path, {name: 2 * x for name, x in X.items()})
        assert only_file(shared_tmp_path, comm) == ["state.h5"]
        assert same(path, given)
        comm.Barrier()


@pytest.mark.on_ranks(1)
def test_a_dataset_that_lies_elsewhere_on_the_disk_is_noticed(
    comm: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its shape, type and checksum may be right: the elements that were compared are not those that it has now."""
    path = shared_tmp_path / "state.h5"

    def moved(partial: Path, _: Any) -> None:
        with h5py.File(partial, "r+") as file:
            file.move("a", "b")
            file["a"] = np.zeros((3, 5))
            for name, value in file["b"].attrs.items():
                file["a"].attrs[name] = value
            del file["b"]

    with ProcessGrid(comm) as grid:
        monkeypatch.setattr(many_datasets, "to_disk", moved)
        with pytest.raises(FileError, match=r"state\.h5: what was written is not what the file holds"):
            hdf5.save_all(path, {"a": DistMatrix.random((3, 5), grid=grid)})
    assert only_file(shared_tmp_path, comm) == []
