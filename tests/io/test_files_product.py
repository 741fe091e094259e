"""Products from files to a file with little memory: right on every grid, and what is read is what was planned."""

from __future__ import annotations

import itertools
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from flips import changed_after_the_product, larger
from problems import DTYPES, gemm_error, grid_shapes, op
from stored_files import STORAGE, by_rank_0, elements, read, write
from tiers import everything, in_turn, square_grid

from pdgemm import ProcessGrid
from pdgemm.errors import ArgumentError, CorruptionError, FileError, LayoutError, MemoryLimitError
from pdgemm.io.source import source
from pdgemm.io.streamed import file_panels, files_product
from pdgemm.io.streamed.files_product import FilesProduct

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("everyone")]

TOLERANCE = 3 * 8**0.5
CASES = [  # storage of A and of B, op(A), op(B), whether C is there
    (STORAGE[i % 3], STORAGE[i // 2 % 3], opa, opb, i % 2 == 1)
    for i, (opa, opb) in enumerate(zip("NTCNTCNNTTCC", "NNNTTTCNTNCT"))
]


def multiplied(
    grid: Any, path: Path, alpha: Any, beta: Any, share: float = 0.2, ops: str = "NN", names: str = "abc", **more: Any
) -> tuple[Any, Any, Any]:
    """C := alpha op(A) op(B) + beta C in the file, and what the run reports.

    share : of A, B and C that fits the memory, beside what it must have; 0: not even that.
    """
    run = {key: more.pop(key) for key in ("seed", "progress") if key in more}
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


def test_a_file_that_changes_before_the_first_product(comm: Any, shared_tmp_path: Path, small: None) -> None:
    """Another job has saved to it since its shape was looked at: nothing is computed, and its work is not lost."""
    path, A = shared_tmp_path / "x.h5", elements((50, 50), "d", 1)
    with ProcessGrid(comm) as grid:
        write(comm, path, a=(A, {}), c=(A, {}))
        a, c = (source(grid, name, (str(path), name)) for name in "ac")
        made = FilesProduct(grid, 1, a, a, 2, c, 1 << 20)
        write(comm, path, a=(A, {}), c=(2 * A, {}))
        with pytest.raises(FileError, match=r"x.h5 was changed"):
            made.run((str(path), "c"), progress=lambda done, total: 1 / 0)
    assert np.array_equal(read(comm, path, "c"), 2 * A)


@square_grid
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", range(len(CASES)))
def test_on_every_grid(comm: Any, shared_tmp_path: Path, small: None, dtype: str, case: int) -> None:
    """In tiles of every kind; what is read and written is counted, and is what was planned."""
    if not everything() and case % 4 != DTYPES.index(dtype):
        pytest.skip("with --all")
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
        item = A.itemsize
        tiles = np.prod(report.plan["tiles"][:2])
        assert tiles > 1 or share > 0.1
        assert (report.bytes_read, report.bytes_written) == (report.plan["bytes_read"], m * n * item)
        assert report.bytes_read >= item * (m * k + k * n + there * m * n)
        assert report.plan["bytes_per_rank"] <= report.plan["memory"]
        assert np.array_equal(read(comm, path, "a"), op(A, opa)) and np.array_equal(read(comm, path, "b"), op(B, opb))


@pytest.mark.parametrize(("dtype", "beta"), [("float64", 0), ("complex64", 2), ("int8", 0), ("float32", 2)])
def test_a_product_of_panels_is_repeated(
    comm: Any, shared_tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch, dtype: str, beta: int
) -> None:
    """Whichever of them goes wrong: the first, in slabs, one in the middle, which adds to the tile, or the last."""
    path, (m, n, k) = shared_tmp_path / "x.h5", (83, 61, 397)
    A, B, C0 = elements((m, k), dtype, 1), elements((k, n), dtype, 2), elements((m, n), dtype, 3)

    def run(protect: Any) -> tuple[np.ndarray, Any]:
        write(comm, path, a=(A, {}), b=(B, {}), c=(C0, {}))
        report = multiplied(grid, path, 1.0, beta, 0.3, protect=protect)[0]
        assert report.as_predicted and report.plan["bytes_per_rank"] <= report.plan["memory"]
        return read(comm, path, "c"), report

    with ProcessGrid(comm) as grid:
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
            with pytest.raises(CorruptionError, match="rows of C differ from what was expected"):
                run("detect")
        assert np.array_equal(read(comm, path, "c"), C0)


@pytest.mark.parametrize("mnk", [(0, 5, 3), (4, 5, 0), (0, 0, 0), (1, 1, 1), (1, 90, 70), (80, 1, 90), (2, 3, 300)])
def test_thin_and_empty(comm: Any, shared_tmp_path: Path, small: None, mnk: tuple[int, int, int]) -> None:
    (m, n, k), path = mnk, shared_tmp_path / "x.h5"
    A, B, C0 = elements((m, k), "d", 1), elements((k, n), "d", 2), elements((m, n), "d", 3)
    for shape, beta in itertools.product(grid_shapes(comm.size), (0, 2)):
        write(comm, path, a=(A, {}), b=(B, {}), c=(C0, {}))
        with ProcessGrid(comm, shape) as grid:
            report, residual, _ = multiplied(grid, path, 3, beta, seed=1)
        assert report.as_predicted and residual.passed
        assert gemm_error(read(comm, path, "c"), 3, A, B, beta, C0) <= TOLERANCE


def test_what_is_not_read_may_be_anything(comm: Any, shared_tmp_path: Path, small: None) -> None:
    """Where beta is 0, C; where alpha is 0, A and B."""
    path, A, B = shared_tmp_path / "x.h5", elements((50, 40), "d", 1), elements((40, 30), "d", 2)
    nan = np.full((50, 30), np.nan)
    with ProcessGrid(comm) as grid:
        write(comm, path, a=(A, {}), b=(B, {}), c=(nan, {}))
        multiplied(grid, path, 1, 0)
        assert gemm_error(read(comm, path, "c"), 1, A, B) <= TOLERANCE
        write(comm, path, a=(A * np.nan, {}), b=(B, {}), c=(np.full((50, 30), 2.0), {}))
        report, _, _ = multiplied(grid, path, 0, 3)
        assert report.bytes_read == 8 * 50 * 30
        assert (read(comm, path, "c") == 6).all()


@pytest.mark.parametrize("stored", ["float16", "int8", "float64"])
def test_types_are_converted_on_the_way(comm: Any, shared_tmp_path: Path, small: None, stored: str) -> None:
    """Sums of 16-bit types are kept in single precision from panel to panel, and rounded once."""
    path, sums = shared_tmp_path / "x.h5", "float32" if stored == "float64" else None
    A, B = elements((70, 150), stored, 1), elements((150, 50), stored, 2)
    with ProcessGrid(comm) as grid:
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


def test_one_dataset_is_both(comm: Any, shared_tmp_path: Path, small: None) -> None:
    path, A = shared_tmp_path / "x.h5", elements((60, 60), "D", 1)
    with ProcessGrid(comm) as grid:
        write(comm, path, a=(A, {}))
        multiplied(grid, path, 1, 0, ops="NC", names="aac")
        assert gemm_error(read(comm, path, "c"), 1, A, A.conj().T) <= TOLERANCE


def test_a_wrong_result_is_not_stored(
    comm: Any, shared_tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, A, B = shared_tmp_path / "x.h5", elements((50, 40), "d", 1), elements((40, 30), "d", 2)
    once = files_product.pdgemm

    def wrong(alpha: Any, X: Any, Y: Any, beta: Any, C: Any, **options: Any) -> None:
        once(alpha, X, Y, beta, C, **options)
        if C.stored.size and C.grid.rank == 0:
            C.stored[0, 0] += 1e-3

    monkeypatch.setattr(files_product, "pdgemm", wrong)
    with ProcessGrid(comm) as grid:
        write(comm, path, a=(A, {}), b=(B, {}), c=(np.ones((50, 30)), {}))
        _, residual, wrote = multiplied(grid, path, 1, 0, seed=1)
    assert not residual.passed and wrote is None
    assert (read(comm, path, "c") == 1).all()
    assert by_rank_0(comm, lambda: os.listdir(shared_tmp_path)) == ["x.h5"]


def test_bad_input(comm: Any, shared_tmp_path: Path) -> None:
    """One exception on all ranks, and nothing is written."""
    path, A = shared_tmp_path / "x.h5", elements((50, 40), "d", 1)
    with ProcessGrid(comm) as grid:
        write(comm, path, a=(A, {}), b=(A, {}))
        with pytest.raises(LayoutError, match=r"op\(A\) is \(50, 40\), op\(B\) is \(50, 40\)"):
            multiplied(grid, path, 1, 0)
        write(comm, path, a=(A, {}), b=(A.T, {}))
        with pytest.raises(MemoryLimitError, match=r"no tile fits .* of memory per rank: .* are needed"):
            multiplied(grid, path, 1, 0, 0)
        with pytest.raises(ArgumentError, match="seed"):  # before hours of work
            multiplied(grid, path, 1, 0, seed=10**40, progress=lambda done, total: 1 / 0)
    assert by_rank_0(comm, lambda: os.listdir(shared_tmp_path)) == ["x.h5"]


@pytest.mark.parametrize("what", ["truncated", "changed", "a thread"])
def test_files_that_fail_half_way(
    comm: Any, shared_tmp_path: Path, small: None, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the back of all ranks, or in the thread of one: all raise, and the old C stays."""
    path, inputs = shared_tmp_path / "c.h5", shared_tmp_path / "ab.h5"
    A, B = elements((90, 80), "d", 1), elements((80, 70), "d", 2)
    write(comm, inputs, a=(A, {}), b=(B, {}))
    write(comm, path, c=(np.ones((90, 70)), {}))
    moved, calls = file_panels.transfer_part, [0]

    def progress(done: int, total: int) -> None:
        if comm.rank == 0 and done == total // 2:
            if what == "truncated":
                os.truncate(inputs, 4000)
            elif what == "changed":  # what was read of it
                with h5py.File(inputs, "r+") as file:
                    file["a"][0, 0] += 1

    def failing(*given: Any) -> int:
        calls[0] += 1
        if what == "a thread" and comm.rank == comm.size - 1 and calls[0] == 7:
            raise OSError(5, "no such luck")
        return moved(*given)

    monkeypatch.setattr(file_panels, "transfer_part", failing)
    with ProcessGrid(comm) as grid:
        a, b = (source(grid, name.upper(), (str(inputs), name)) for name in "ab")
        made = FilesProduct(grid, 1, a, b, 0, None, 12_000)
        with pytest.raises(OSError, match="ab.h5|no such luck"):
            made.run((str(path), "c"), progress=progress)
    assert (read(comm, path, "c") == 1).all()
    assert sorted(by_rank_0(comm, lambda: os.listdir(shared_tmp_path))) == ["ab.h5", "c.h5"]


def test_slow_files(comm: Any, shared_tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No panel is used before it was read, none is overwritten while it is used, and no tile before it is written."""
    moved = file_panels.transfer_part

    def slow(*given: Any) -> int:
        time.sleep(5e-3 * (1 + (comm.rank + len(calls)) % 3))
        calls.append(moved(*given))
        return calls[-1]

    monkeypatch.setattr(file_panels, "transfer_part", slow)
    path, A, B = shared_tmp_path / "x.h5", elements((90, 80), "d", 1), elements((80, 70), "d", 2)
    for shape in grid_shapes(comm.size):
        calls: list[int] = []
        with ProcessGrid(comm, shape) as grid:
            write(comm, path, a=(A, {}), b=(B, {}))
            report, _, _ = multiplied(grid, path, 1, 0, 0.3)
        assert np.prod(report.plan["tiles"]) > 2 and report.as_predicted
        assert gemm_error(read(comm, path, "c"), 1, A, B) <= TOLERANCE


@pytest.mark.parametrize("threads", [True, False])
def test_transfers_have_threads_where_mpi_allows_it(
    comm: Any, shared_tmp_path: Path, small: None, threads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else they happen at once; the result is the same, bit by bit."""
    used: set[bool] = set()
    moved = file_panels.transfer_part

    def told(*given: Any) -> int:
        used.add(threading.current_thread() is threading.main_thread())
        return moved(*given)

    monkeypatch.setattr(file_panels, "transfer_part", told)
    assert isinstance(file_panels.worker(), ThreadPoolExecutor)  # mpi4py asks for all threads
    if not threads:
        monkeypatch.setattr(file_panels.MPI, "Query_thread", lambda: file_panels.MPI.THREAD_SERIALIZED)
    path, A, B = shared_tmp_path / "x.h5", elements((90, 80), "d", 1), elements((80, 70), "d", 2)
    with ProcessGrid(comm) as grid:
        write(comm, path, a=(A, {}), b=(B, {}))
        multiplied(grid, path, 1, 0)
    assert used == {not threads}
    assert gemm_error(read(comm, path, "c"), 1, A, B) <= TOLERANCE
