"""Matrices in files as operands: right results with matrices of any layout; files are read once, in panels."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from flips import changed_after_the_product, larger
from problems import DTYPES, gemm_error, grid_shapes
from stored_files import STORAGE, elements, read, refused, write
from tiers import in_turn

from pdgemm import DistMatrix, ProcessGrid, linalg, pdgemm
from pdgemm.errors import ArgumentError, DTypeError, FileError, LayoutError, MemoryLimitError
from pdgemm.io import hdf5

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("everyone")]

TOLERANCE = 3 * 8**0.5
KINDS = ["both in files", "A in a file", "B in a file"]


def opened(comm: Any, path: Path, grid: Any, **given: Any) -> list[Any]:
    write(comm, path, **given)
    return [hdf5.dataset(path, name, grid) for name in given]


@pytest.mark.parametrize(("dtype", "kind"), in_turn(DTYPES, KINDS))
def test_products_with_any_layouts(comm: Any, shared_tmp_path: Path, small: None, dtype: str, kind: str) -> None:
    """Results and counts are right; inputs and the elements around C are unchanged."""
    m, n, k = 83, 61, 197
    A, B, C0 = elements((m, k), dtype, 1), elements((k, n), dtype, 2), elements((m + 3, n + 5), dtype, 3)
    alpha, beta = (1.5, -2.0) if np.dtype(dtype).kind == "f" else (1.5 - 1j, -2.0 + 0.5j)
    for number, (shape, ops) in enumerate(zip(grid_shapes(comm.size) * 2, ("NN", "TN", "NC", "TC", "CT", "CC"))):
        a, b = ({"N": x, "T": x.T, "C": x.conj().T}[op] for x, op in zip((A, B), ops))
        with ProcessGrid(comm, shape) as grid:
            of_a, of_b = STORAGE[number % 3], STORAGE[(number + 1) % 3]
            X, Y = opened(comm, shared_tmp_path / "x.h5", grid, a=(a, of_a), b=(b, of_b))
            if kind == "B in a file":
                X = DistMatrix.from_global(a, grid=grid, block=7)
            elif kind == "A in a file":
                Y = DistMatrix.from_global(b, grid=grid, block=(5, 9), source=(0, 0))
            whole = DistMatrix.from_global(C0, grid=grid, block=(11, 4))
            C = whole[2 : 2 + m, 3 : 3 + n]
            steps: list[int] = []
            how: dict[str, Any] = {"transa": ops[0], "transb": ops[1], "memory_limit": 5_000 * A.itemsize}
            how["progress"] = lambda done, total: steps.append(total)  # noqa: B023
            plan = linalg.plan(pdgemm, alpha, X, Y, beta, C, **how)
            assert not steps and plan.flops > 0
            made = pdgemm(alpha, X, Y, beta, C, **how)
            found = comm.bcast(whole.to_global())
            assert (
                made is C
                and gemm_error(found[2 : 2 + m, 3 : 3 + n], alpha, A, B, beta, C0[2 : 2 + m, 3 : 3 + n]) <= TOLERANCE
            )
            found[2 : 2 + m, 3 : 3 + n] = C0[2 : 2 + m, 3 : 3 + n]
            assert np.array_equal(found, C0)
            in_files = A.itemsize * (m * k * (kind != "B in a file") + k * n * (kind != "A in a file"))
            assert (
                C.report.as_predicted
                and C.report.bytes_read == plan.bytes_read == in_files
                and C.report.bytes_written == 0
            )
            assert len(steps) == steps[0] == C.report.plan["tiles"][2] and (len(steps) > 1 or comm.size > 4)
        assert np.array_equal(read(comm, shared_tmp_path / "x.h5", "a"), a)


def test_as_operators_and_views(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    A, B = elements((30, 40), "D", 1), elements((40, 20), "D", 2)
    X, Y = opened(comm, shared_tmp_path / "x.h5", grid, a=(A, {}), b=(B, {}))
    Z = DistMatrix.from_global(B, grid=grid)
    for C, exact in (
        (X @ Y, A @ B), (X @ Z, A @ B), (X.T.T @ Y.H.H, A @ B),
        (Z.T @ X.T, (A @ B).T), (Y.H @ X.H, (A @ B).conj().T),
    ):  # fmt: skip
        assert isinstance(C, DistMatrix) and C.dtype == np.complex128
        np.testing.assert_allclose(comm.bcast(C.to_global()), exact, atol=1e-12)
    assert (X.shape, X.T.shape, X.ndim, X.size, len(X.H)) == ((30, 40), (40, 30), 2, 1200, 40)
    assert "x.h5:a, 30 x 40 complex128" in repr(X)
    for view, exact in ((X, A), (X.T, A.T), (X.H, A.conj().T)):
        assert np.array_equal(comm.bcast(view.load(block=7).to_global()), exact)
    with pytest.raises(LayoutError, match="conjugate"):
        _ = X.T.H
    (R,) = opened(comm, shared_tmp_path / "r.h5", grid, a=(A.real.copy(), {}))
    assert np.array_equal(comm.bcast(R.T.H.load().to_global()), A.real)  # for real matrices H is T


def test_sums_are_rounded_once(comm: Any, grid: Any, shared_tmp_path: Path, small: None) -> None:
    """Sums over many panels are rounded once, to the type of C; int8 operands have exact int32 sums."""
    A, B = elements((40, 300), "e", 1), elements((300, 30), "e", 2)
    X, Y = opened(comm, shared_tmp_path / "x.h5", grid, a=(A, {}), b=(B, {}))
    C0 = elements((40, 30), "e", 3)
    C = DistMatrix.from_global(C0, grid=grid)
    pdgemm(1, X, Y, 2, C, memory_limit=16_000)
    exact = A.astype("d") @ B.astype("d") + 2 * C0.astype("d")
    bound = 2.0**-11 * abs(exact) + 302 * 2.0**-23 * (abs(A.astype("d")) @ abs(B.astype("d")) + 2 * abs(C0.astype("d")))
    assert C.dtype == np.float16 and C.report.plan["tiles"][2] > 1
    assert (abs(comm.bcast(C.to_global()).astype("d") - exact) <= bound).all()
    A, B = elements((40, 300), "i1", 1), elements((300, 30), "i1", 2)
    X, Y = opened(comm, shared_tmp_path / "x.h5", grid, a=(A, {}), b=(B, {}))
    D = pdgemm(1, X, Y, memory_limit=30_000)
    assert D.dtype == np.int32 and np.array_equal(comm.bcast(D.to_global()), A.astype(int) @ B.astype(int))


def test_products_of_panels_are_repeated(
    comm: Any,
    grid: Any,
    shared_tmp_path: Path,
    small: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For a repeat, C is restored from a copy, whose bytes count in the memory limit."""
    A, B, C0 = elements((40, 300), "d", 1), elements((300, 30), "d", 2), elements((40, 30), "d", 3)
    X, Y = opened(comm, shared_tmp_path / "x.h5", grid, a=(A, {}), b=(B, {}))
    C, D = (DistMatrix.from_global(C0, grid=grid) for _ in "CD")
    copy = max(comm.allgather(C.local.nbytes))
    pdgemm(1, X, Y, 2, C, memory_limit=40_000 + copy, protect="repair")
    checks = C.report.checks
    assert C.report.plan["tiles"][2] > 1 and checks.counted == checks.predicted and not checks.repeats
    with monkeypatch.context() as patch:
        changed_after_the_product(patch, larger, after=1)
        pdgemm(1, X, Y, 2, D, memory_limit=40_000 + copy, protect="repair")
    assert D.report.checks.repeats == 1 and np.array_equal(D.allgather(), C.allgather())
    refused(comm, MemoryLimitError, "are needed", pdgemm, 1, X, Y, 2, D, memory_limit=copy, protect="repair")
    assert np.array_equal(D.allgather(), C.allgather())


def test_unused_operands_are_not_read(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    X, Y = opened(comm, shared_tmp_path / "x.h5", grid, a=(np.full((9, 8), np.nan), {}), b=(np.ones((8, 7)), {}))
    C = DistMatrix.from_function(lambda i, j: i + j, (9, 7), grid=grid)
    pdgemm(0, X, Y, 3, C)
    assert C.report.bytes_read == 0
    assert np.array_equal(comm.bcast(C.to_global()), 3.0 * np.add.outer(np.arange(9), np.arange(7)))
    X, Y = opened(comm, shared_tmp_path / "y.h5", grid, a=(np.ones((9, 8)), {}), b=(np.ones((8, 7)), {}))
    C = DistMatrix.from_function(lambda i, j: np.nan * i, (9, 7), grid=grid)
    assert (comm.bcast(pdgemm(1, X, Y, 0, C).to_global()) == 8).all()
    for m, n, k in ((0, 5, 3), (4, 0, 3), (4, 5, 0)):
        X, Y = opened(comm, shared_tmp_path / "z.h5", grid, a=(np.ones((m, k)), {}), b=(np.ones((k, n)), {}))
        found = pdgemm(1, X, Y)
        assert found.shape == (m, n) and (comm.bcast(found.to_global()) == k).all()


def test_bad_input(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    """All ranks raise the same error, and C is unchanged."""
    path = shared_tmp_path / "x.h5"
    X, Y = opened(comm, path, grid, a=(np.ones((9, 8)), {}), b=(np.ones((8, 7)), {}))
    C, C2 = DistMatrix.zeros((9, 7), grid=grid), DistMatrix.eye(8, grid=grid)
    (S,) = opened(comm, shared_tmp_path / "s.h5", grid, s=(np.ones((8, 8)), {}))
    for error, text, call in (
        (LayoutError, r"op\(A\) is \(9, 8\), op\(B\) is \(9, 8\)", lambda: pdgemm(1, X, X)),
        (LayoutError, r"C is \(9, 7\)", lambda: pdgemm(1, Y.T, Y, 0, C)),
        (DTypeError, "B must be a DistMatrix or a StoredMatrix, got int", lambda: pdgemm(1, X, 7)),  # type: ignore[arg-type]
        (MemoryLimitError, "bytes\\) are needed", lambda: pdgemm(1, X, Y, 0, C, memory_limit=10)),
        (ArgumentError, "algorithm", lambda: pdgemm(1, X, Y, 0, C, algorithm="none")),  # type: ignore[arg-type]
        (DTypeError, "alpha", lambda: pdgemm(1j, X, Y, 0, C)),
        (DTypeError, "alpha must be a number, got StoredMatrix", lambda: pdgemm(X, Y)),  # type: ignore[call-arg, arg-type]
        (DTypeError, "C must be a DistMatrix, got str", lambda: pdgemm(1, X, Y, 0, "C")),  # type: ignore[arg-type]
        (ArgumentError, "C", lambda: pdgemm(1, S, C2, 0, C2, memory_limit=5 << 20)),
        (FileError, "no such file", lambda: hdf5.dataset("none.h5", "x", grid)),
        (DTypeError, "cannot become int8", lambda: hdf5.dataset(path, "a", grid, dtype="int8")),
    ):  # fmt: skip
        refused(comm, error, text, call)
    if comm.size > 1:
        refused(comm, ArgumentError, "different arguments", pdgemm, 1 + grid.rank, X, Y, 0, C)
    assert not comm.bcast(C.to_global()).any()
    comm.Barrier()
    if comm.rank == 0:
        os.utime(path)
    comm.Barrier()
    refused(comm, FileError, r"x.h5 was changed", pdgemm, 1, X, Y, 0, C)


def test_a_file_that_changes_while_it_is_read_again(comm: Any, grid: Any, shared_tmp_path: Path, small: None) -> None:
    """An error if elements have changed, even if times are restored; a right product if only the mode has."""
    path, X = shared_tmp_path / "x.h5", np.random.default_rng(1).normal(size=(60, 400))

    def rewritten() -> None:
        before = path.stat()
        with h5py.File(path, "r+") as file:
            file["a"][0, 0] += 1
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    write(comm, path, a=(X, {}))
    B = np.ones_like(hdf5.load(path, "a", grid)).T

    def meddle(done: int, total: int, change: Any) -> None:
        assert total > 1
        if comm.rank == 0 and done == total // 2:
            change()
        comm.Barrier()

    def run(change: Any) -> Any:
        how: dict[str, Any] = {"memory_limit": 2 * X.nbytes // comm.size, "progress": partial(meddle, change=change)}
        return pdgemm(1, hdf5.dataset(path, "a", grid), B, **how)

    assert np.allclose(run(lambda: path.chmod(0o600)).allgather(), X @ np.ones((400, 60)))
    for work in (
        run,
        lambda change: linalg.svd(hdf5.dataset(path, "a", grid), 2, progress=partial(meddle, change=change)),
    ):
        refused(comm, FileError, "was changed while it was read", work, rewritten)
