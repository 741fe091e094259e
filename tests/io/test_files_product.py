"""Products of matrices in files with little memory: right on every grid, with as many bytes read as planned."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from flips import changed_after_the_product, larger
from problems import DTYPES, gemm_error, grid_shapes, op
from stored_files import STORAGE, by_rank_0, elements, only_file, read, refused, write
from tiers import everything, in_turn, square_grid

from pdgemm import ProcessGrid, multiply_files
from pdgemm.errors import ArgumentError, CorruptionError, FileError, LayoutError, MemoryLimitError
from pdgemm.instrument.observer import Observer
from pdgemm.io import hdf5
from pdgemm.io.source import source
from pdgemm.io.streamed import file_panels, files_product
from pdgemm.io.streamed.checkpoints import When
from pdgemm.io.streamed.files_product import FilesProduct

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("everyone")]

TOLERANCE = 3 * 8**0.5
CASES = [  # (storage of A, storage of B, op(A), op(B), does C exist?)
    (STORAGE[i % 3], STORAGE[i // 2 % 3], opa, opb, i % 2 == 1)
    for i, (opa, opb) in enumerate(zip("NTCNTCNNTTCC", "NNNTTTCNTNCT"))
]


def multiplied(
    grid: Any, path: Path, alpha: Any, beta: Any, share: float = 0.2, ops: str = "NN", names: str = "abc", **more: Any
) -> tuple[Any, Any, Any]:
    """Compute C := alpha op(A) op(B) + beta C in the file; return report, residual and report of the save.

    share : the memory limit is the least, and this fraction of A, B and C; with 0, half of the least.
    """
    run = {key: more.pop(key) for key in ("seed", "progress", "when") if key in more}
    dtype = more.pop("dtype", None)
    a, b = (source(grid, name.upper(), (str(path), name), dtype, letter) for name, letter in zip(names, ops))
    entry = source(grid, "C", (str(path), names[2])) if beta else None
    with pytest.raises(MemoryLimitError, match="are needed") as raised:
        FilesProduct(grid, alpha, a, b, beta, entry, 1, **more)
    least = int(str(raised.value).split("(")[-1].split()[0])
    every = sum(x.shape[0] * x.shape[1] * x.dtype.itemsize for x in (a, b)) + 8 * a.shape[0] * b.shape[1]
    memory = int(1.1 * least + share * every / grid.size) if share else least // 2
    made = FilesProduct(grid, alpha, a, b, beta, entry, memory, **more)
    done: tuple[Any, Any, Any] = made.run((str(path), names[2]), **run)
    return done


def test_a_file_that_changes_before_the_first_product(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    """If another job writes C after its shape was read, the product is refused, and the other result is kept."""
    path, A = shared_tmp_path / "x.h5", elements((50, 50), "d", 1)
    write(comm, path, a=(A, {}), c=(A, {}))
    a, c = (source(grid, name, (str(path), name)) for name in "ac")
    made = FilesProduct(grid, 1, a, a, 2, c, 1 << 23)
    write(comm, path, a=(A, {}), c=(2 * A, {}))
    refused(comm, FileError, r"x.h5 was changed", made.run, (str(path), "c"), progress=lambda done, total: 1 / 0)
    assert np.array_equal(read(comm, path, "c"), 2 * A)


@square_grid
@pytest.mark.parametrize(("case", "dtype"), in_turn(range(len(CASES)) if everything() else range(0, 12, 3), DTYPES))
def test_on_every_grid(comm: Any, shared_tmp_path: Path, small: None, dtype: str, case: int) -> None:
    """Products in tiles of every kind; counted reads and writes equal the planned ones."""
    of_a, of_b, opa, opb, there = CASES[case]
    path = shared_tmp_path / "x.h5"
    m, n, k = 83, 61, 97
    A, B, C0 = elements((m, k), dtype, 1), elements((k, n), dtype, 2), elements((m, n), dtype, 3)
    alpha, beta = (1.5, -2.0) if np.dtype(dtype).kind == "f" else (1.5 - 1j, -2.0 + 0.5j)
    for shape, share in in_turn(grid_shapes(comm.size), (0.1, 0.5, 9), start=case):
        given = {"a": (op(A, opa), of_a), "b": (op(B, opb), of_b)} | ({"c": (C0, {})} if there else {})
        write(comm, path, **given)
        with ProcessGrid(comm, shape) as grid:
            report, _, wrote = multiplied(grid, path, alpha, beta if there else 0, share, opa + opb)
        C = read(comm, path, "c")
        assert C.dtype == A.dtype and wrote.checksum
        assert gemm_error(C, alpha, A, B, beta if there else 0, C0) <= TOLERANCE, (shape, share)
        tiles = np.prod(report.plan["tiles"][:2])
        assert tiles > 1 or share > 0.1
        assert (report.bytes_read, report.bytes_written) == (report.plan["bytes_read"], m * n * A.itemsize)
        assert report.bytes_read >= A.itemsize * (m * k + k * n + there * m * n)
        assert report.plan["bytes_per_rank"] <= report.plan["memory"]
        assert np.array_equal(read(comm, path, "a"), op(A, opa)) and np.array_equal(read(comm, path, "b"), op(B, opb))


@pytest.mark.parametrize(("dtype", "beta"), [("complex64", 2), ("int8", 0)])
def test_a_product_of_panels_is_repeated(
    comm: Any, grid: Any, shared_tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch, dtype: str, beta: int
) -> None:
    """A wrong product of the first panel (in slabs), a middle panel (added to the tile) or the last is repeated."""
    path, (m, n, k) = shared_tmp_path / "x.h5", (83, 61, 197)
    A, B, C0 = elements((m, k), dtype, 1), elements((k, n), dtype, 2), elements((m, n), dtype, 3)

    def run(protect: Any) -> tuple[np.ndarray, Any]:
        write(comm, path, a=(A, {}), b=(B, {}), c=(C0, {}))
        report = multiplied(grid, path, 1.0, beta, 0.3, protect=protect)[0]
        assert report.as_predicted and report.plan["bytes_per_rank"] <= report.plan["memory"]
        return read(comm, path, "c"), report

    right, report = run("repair")
    assert report.checks.counted == report.checks.predicted and not report.checks.repeats
    assert np.prod(report.plan["tiles"]) > 1, report.plan
    calls = report.checks.counted.allreduces // (3 if dtype == "int8" else 5)
    for when in sorted({0, calls // 2, calls - 1}):
        with monkeypatch.context() as patch:
            changed_after_the_product(patch, larger, after=when)
            found, report = run("repair")
        assert report.checks.repeats == 1 and "repeated 1 time" in str(report)
        assert np.array_equal(found, right)
    with monkeypatch.context() as patch:
        changed_after_the_product(patch, larger, after=calls // 2)
        refused(comm, CorruptionError, "rows of C differ from their checksums", run, "detect")
    assert np.array_equal(read(comm, path, "c"), C0)


@pytest.mark.parametrize("mnk", [(0, 5, 3), (4, 5, 0), (1, 1, 1), (1, 90, 70), (80, 1, 90), (2, 3, 300)])
def test_thin_and_empty(comm: Any, shared_tmp_path: Path, small: None, mnk: tuple[int, int, int]) -> None:
    (m, n, k), path = mnk, shared_tmp_path / "x.h5"
    A, B, C0 = elements((m, k), "d", 1), elements((k, n), "d", 2), elements((m, n), "d", 3)
    for shape, beta in zip(grid_shapes(comm.size), (0, 2)):
        write(comm, path, a=(A, {}), b=(B, {}), c=(C0, {}))
        with ProcessGrid(comm, shape) as grid:
            report, residual, _ = multiplied(grid, path, 3, beta, seed=1)
        assert report.as_predicted and residual.passed
        assert gemm_error(read(comm, path, "c"), 3, A, B, beta, C0) <= TOLERANCE


def test_unread_operands_may_hold_nan(comm: Any, grid: Any, shared_tmp_path: Path, small: None) -> None:
    """C may hold NaN if beta is 0; A and B if alpha is 0."""
    path, A, B = shared_tmp_path / "x.h5", elements((50, 40), "d", 1), elements((40, 30), "d", 2)
    nan = np.full((50, 30), np.nan)
    write(comm, path, a=(A, {}), b=(B, {}), c=(nan, {}))
    multiplied(grid, path, 1, 0)
    assert gemm_error(read(comm, path, "c"), 1, A, B) <= TOLERANCE
    multiplied(grid, path, 1, 0, ops="NC", names="aac")  # A and B are one dataset
    assert gemm_error(read(comm, path, "c"), 1, A, A.T) <= TOLERANCE
    write(comm, path, a=(A * np.nan, {}), b=(B, {}), c=(np.full((50, 30), 2.0), {}))
    report, _, _ = multiplied(grid, path, 0, 3)
    assert report.bytes_read == 8 * 50 * 30
    assert (read(comm, path, "c") == 6).all()


@pytest.mark.parametrize("stored", ["float16", "int8", "float64"])
def test_types_are_converted_on_the_way(comm: Any, grid: Any, shared_tmp_path: Path, small: None, stored: str) -> None:
    """Sums of 16-bit types are single precision in all panels, and rounded once, at the end."""
    path, sums = shared_tmp_path / "x.h5", "float32" if stored == "float64" else None
    A, B = elements((70, 150), stored, 1), elements((150, 50), stored, 2)
    write(comm, path, a=(A, {}), b=(B, {"chunks": (40, 30)}))
    report, residual, _ = multiplied(grid, path, 1, 0, accumulate_dtype=sums, seed=3)
    C = read(comm, path, "c")
    assert residual.passed and report.as_predicted and np.prod(report.plan["tiles"]) > 1
    if stored == "int8":
        assert C.dtype == np.int32 and np.array_equal(C, A.astype(int) @ B.astype(int))
    elif stored == "float16":
        exact = A.astype("d") @ B.astype("d")
        bound = 2.0**-11 * abs(exact) + 150 * 2.0**-23 * (abs(A.astype("d")) @ abs(B.astype("d")))
        assert C.dtype == np.float16 and (abs(C - exact) <= bound).all()
    else:
        assert C.dtype == np.float64 and np.array_equal(C, C.astype("f"))
        multiplied(grid, path, 1, 0, dtype="float32")
        assert gemm_error(read(comm, path, "c"), 1, A.astype("f"), B.astype("f")) <= TOLERANCE


@pytest.mark.parametrize("what", ["truncated", "changed", "a thread"])
def test_files_that_fail_half_way(
    comm: Any, grid: Any, shared_tmp_path: Path, small: None, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks raise if a file changes, or if the thread of one rank fails; the old C stays."""
    path, inputs = shared_tmp_path / "c.h5", shared_tmp_path / "ab.h5"
    A, B = elements((90, 80), "d", 1), elements((80, 70), "d", 2)
    write(comm, inputs, a=(A, {}), b=(B, {}))
    write(comm, path, c=(np.ones((90, 70)), {}))
    moved, calls = file_panels.transfer_part, [0]

    def progress(done: int, total: int) -> None:
        if comm.rank == 0 and done == total // 2:
            if what == "truncated":
                os.truncate(inputs, 4000)
            elif what == "changed":  # in the part already read
                with h5py.File(inputs, "r+") as file:
                    file["a"][0, 0] += 1

    def failing(*given: Any) -> int:
        calls[0] += 1
        if what == "a thread" and comm.rank == comm.size - 1 and calls[0] == 7:
            raise OSError(5, "no such luck")
        return moved(*given)

    monkeypatch.setattr(file_panels, "transfer_part", failing)
    a, b = (source(grid, name.upper(), (str(inputs), name)) for name in "ab")
    made = FilesProduct(grid, 1, a, b, 0, None, 12_000)
    refused(comm, OSError, "ab.h5|no such luck", made.run, (str(path), "c"), progress=progress)
    assert (read(comm, path, "c") == 1).all()
    assert sorted(by_rank_0(comm, lambda: os.listdir(shared_tmp_path))) == ["ab.h5", "c.h5"]


@pytest.mark.parametrize("when", [None, When(0)], ids=["at once", "with checkpoints"])
def test_a_wrong_result_is_not_stored(
    comm: Any, grid: Any, shared_tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch, when: Any
) -> None:
    path, A, B = shared_tmp_path / "x.h5", elements((50, 40), "d", 1), elements((40, 30), "d", 2)
    once = files_product.pdgemm

    def wrong(alpha: Any, X: Any, Y: Any, beta: Any, C: Any, **options: Any) -> None:
        once(alpha, X, Y, beta, C, **options)
        if C.stored.size and C.grid.rank == 0:
            C.stored[0, 0] += 1e-3

    monkeypatch.setattr(files_product, "pdgemm", wrong)
    write(comm, path, a=(A, {}), b=(B, {}), c=(np.ones((50, 30)), {}))
    _, residual, wrote = multiplied(grid, path, 1, 0, seed=1, when=when)
    assert not residual.passed and wrote is None
    assert (read(comm, path, "c") == 1).all()
    assert by_rank_0(comm, lambda: os.listdir(shared_tmp_path)) == ["x.h5"]


@pytest.mark.parametrize("how", ["in a thread", "as late as can be"])
def test_transfers_at_any_time(
    comm: Any, shared_tmp_path: Path, small: None, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Panels are read before they are used, and overwritten only after use; tiles are complete when written."""
    used, moved = set[bool](), file_panels.transfer_part

    def noted(*given: Any) -> int:
        used.add(threading.current_thread() is threading.main_thread())
        return moved(*given)

    monkeypatch.setattr(file_panels, "transfer_part", noted)
    if how == "as late as can be":  # without MPI_THREAD_MULTIPLE
        monkeypatch.setattr(file_panels.MPI, "Query_thread", lambda: file_panels.MPI.THREAD_SERIALIZED)
    path, A, B = shared_tmp_path / "x.h5", elements((90, 80), "d", 1), elements((80, 70), "d", 2)
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            write(comm, path, a=(A, {}), b=(B, {}))
            report, _, _ = multiplied(grid, path, 1, 0, 0.3)
        assert np.prod(report.plan["tiles"]) > 2 and report.as_predicted
        assert gemm_error(read(comm, path, "c"), 1, A, B) <= TOLERANCE
    assert used == {how != "in a thread"}


# ------------------------------------------------------------------ multiply_files
def with_factors(comm: Any, folder: Path) -> Path:
    """Write A (90 x 40) and B (40 x 50) to one file; return the folder."""
    write(comm, folder / "in.h5", x=(elements((90, 40), "d", 1), {}), y=(elements((40, 50), "d", 2), {}))
    return folder


class Keys(Observer):
    """An observer that records the keys of its reports."""

    def __init__(self) -> None:
        self.keys = list[str]()

    def report(self, key: str, *_: Any) -> None:
        self.keys.append(key)

    note = report

    def planned(self, plan: Any) -> None:
        self.keys.append("planned")


def test_multiply_files_in_memory_and_in_parts(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    x, y, folder = elements((90, 40), "d", 1), elements((40, 50), "d", 2), with_factors(comm, shared_tmp_path)
    a, b, c = f"{folder}/in.h5:/x", (folder / "in.h5", "y"), f"{folder}/c.h5:/z"
    ways: list[dict[str, Any]] = [{}, {"block": 16}, {"memory": 3_000_000}, {"memory": 3_000_000, "checkpoint": 3600.0}]
    for way in ways:
        observer = Keys()
        first = multiply_files(a, b, c, alpha=2, grid=grid, seed=1, observer=observer, overwrite=True, **way)
        assert first.verified is not None and first.verified.passed and first.wrote is not None, way
        z = hdf5.load(c, grid=grid).allgather()
        assert np.allclose(z, 2 * x @ y, rtol=1e-12, atol=1e-12)
        again = multiply_files(a, b, c, alpha=-1, beta=3, grid=grid, **way)
        assert again.verified is None and again.product is not None
        assert np.allclose(hdf5.load(c, grid=grid).allgather(), 3 * z - x @ y, rtol=1e-12, atol=1e-11)
        before = ["plan"] if "memory" in way else ["planned", "read", "read"]
        assert observer.keys == [*before, "product", "verify", "wrote"]
    turned = multiply_files(b, a, (folder / "t.h5", "t"), transa="T", transb="t", grid=grid)
    assert turned.wrote is not None
    assert np.allclose(hdf5.load(folder / "t.h5", "t", grid).allgather(), y.T @ x.T, rtol=1e-12, atol=1e-12)


def test_bad_arguments_of_multiply_files(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    folder = with_factors(comm, shared_tmp_path)
    a, b, c = f"{folder}/in.h5:/x", f"{folder}/in.h5:/y", f"{folder}/none.h5:/z"
    wrong: tuple[tuple[Any, dict[str, Any], type[Exception], str], ...] = (
        ((a, a, c), {}, LayoutError, "90 x 40"),
        ((a, b, "none.h5"), {}, ArgumentError, "name a dataset by 'FILE:/DATASET'"),
        ((a, b, a), {}, ArgumentError, "exists, and is A: it is replaced only with overwrite=True"),
        ((a, f"{folder}/in.h5:/w", c), {}, FileError, "in.h5"),
        ((a, a, c), {"memory": 3_000_000}, LayoutError, r"op\(A\) is \(90, 40\), op\(B\) is \(90, 40\)"),
        ((a, b, c), {"memory": 10}, MemoryLimitError, r"no tile fits .* of memory per rank: .* are needed"),
        ((a, b, c), {"memory": 3_000_000, "seed": 10**40}, ArgumentError, "seed"),
        ((a, b, c), {"memory": 3_000_000, "block": 8}, ArgumentError, "cannot be combined with block"),
        ((a, b, c), {"mtbf": 60.0}, ArgumentError, "mtbf needs checkpoint"),
        ((a, b, c), {"transa": "Q"}, ArgumentError, "transa"),
    )
    for datasets, how, error, message in wrong:
        refused(comm, error, message, multiply_files, *datasets, grid=grid, **how)
    if comm.size > 1:
        refused(comm, ArgumentError, "different arguments", multiply_files, a, b, c, alpha=comm.rank, grid=grid)
        refused(comm, ArgumentError, "different arguments", multiply_files, a, b, c, overwrite=comm.rank > 0, grid=grid)
    assert only_file(folder, comm) == ["in.h5"]
