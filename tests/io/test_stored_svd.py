"""Singular values of matrices in files, in one and in two passes: within their bounds, and read as often as planned."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems import DTYPES, grid_shapes
from stored_files import STORAGE, by_rank_0, elements, write
from tiers import every_grid, everything, pairs

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("everyone", "small")]

SHAPES = [(97, 40), (41, 103), (64, 64), (203, 31), (5, 89), (3, 2)]
SPECTRA = {  # of order n
    "fast": lambda j: 10.0 ** (-j / 3),
    "slow": lambda j: 1 / j,
    "flat": lambda j: 1 + 0 * j,
    "rank 3": lambda j: 1.0 * (j <= 3),
    "zero": lambda j: 0 * j,
}


def matrix(shape: tuple[int, int], dtype: str, spectrum: str, seed: int = 1) -> np.ndarray:
    order = min(shape)
    bases = []
    for n in shape:
        x = elements((n, order), np.dtype(dtype).kind.replace("f", "d").replace("c", "D"), seed + n)
        bases.append(np.linalg.qr(x)[0])
    s = SPECTRA[spectrum](np.arange(1.0, order + 1))
    return ((bases[0] * s) @ bases[1].conj().T).astype(dtype)


def check(A: np.ndarray, triplets: Any, k: int, passes: int, nbytes: int) -> None:
    """Compare triplets and the facts of their report with A in double precision."""
    U, s, Vh = (x if isinstance(x, np.ndarray) else x.allgather() for x in triplets[:3])
    report, eps = triplets[0].report, np.finfo(A.dtype).eps
    assert (U.shape, s.shape, Vh.shape) == ((len(A), k), (k,), (k, A.shape[1]))
    assert (U.dtype, s.dtype, Vh.dtype) == (A.dtype, np.finfo(A.dtype).dtype, A.dtype)
    assert report.as_predicted and report.bytes_read == report.plan["bytes_read"] == passes * nbytes
    assert report.steps == passes and triplets[2].report.facts == report.facts
    for X in (U, Vh.conj().T):
        assert abs(X.conj().T @ X - np.eye(k)).max() <= 100 * eps
    wide = A.astype(np.result_type(A.dtype, np.float64))
    exact, facts = np.linalg.svd(wide, compute_uv=False), report.facts
    norm, best = np.linalg.norm(exact), np.linalg.norm(exact[k:])
    rounding = 200 * eps * norm
    error = np.linalg.norm(wide - (U.astype(wide.dtype) * s) @ Vh)
    assert abs(facts["norm"] - norm) <= rounding
    assert best - rounding <= error <= facts["bound"] * (1 + 1e-9)
    if passes > 1:
        assert abs(facts["error"] - error) <= rounding
        assert facts["least"] <= best + rounding and facts["bound"] <= facts["error"] + rounding
        above = np.sqrt(s.astype(float) ** 2 + max(0.0, facts["error"] ** 2 - facts["least"] ** 2))
        assert (s <= exact[:k] + rounding).all() and (exact[:k] <= above + rounding).all()
    else:
        assert error / 1.8 <= facts["error"] + rounding and facts["error"] <= 1.8 * error + rounding
        assert facts["bound"] <= 1.8 * facts["error"] + rounding
    assert error <= 2 * facts["factor"] * best + rounding


@every_grid
@pytest.mark.parametrize(("dtype", "spectrum", "passes"), pairs(DTYPES, SPECTRA, (1, 2, 3, 4)))
def test_within_bounds(comm: Any, shared_tmp_path: Path, dtype: str, spectrum: str, passes: int) -> None:
    """Tall, wide and square, of any layout in the file, in panels of a few rows; of several ranks half the shapes."""
    from pdgemm import ProcessGrid
    from pdgemm.io import hdf5
    from pdgemm.linalg import svd

    turn, few = itertools.cycle(grid_shapes(comm.size)), comm.size > 1 and not everything()
    for number, shape in enumerate(SHAPES):
        if few and (number + passes + (np.dtype(dtype).kind == "c")) % 2:
            continue  # each type, spectrum and number of passes meets both halves
        A, k = matrix(shape, dtype, spectrum), min(4, *shape)
        write(comm, shared_tmp_path / "a.h5", a=(A, STORAGE[number % 3] if min(shape) > 30 else {}))
        with ProcessGrid(comm, next(turn)) as grid:
            X = hdf5.dataset(shared_tmp_path / "a.h5", "a", grid)
            steps: list[tuple[int, int]] = []
            triplets = svd(X, k, passes=passes, memory=20_000 * A.itemsize, progress=lambda *x: steps.append(x))  # noqa: B023
            check(A, triplets, k, passes, A.nbytes)
            assert triplets[0].report.facts["error"] <= 1e-4 or spectrum not in ("rank 3", "zero")
            panels = triplets[0].report.plan["panels"]
            assert steps == [(x + 1, panels * passes) for x in range(panels * passes)]
            assert panels > 2 or number % 3


@every_grid
@pytest.mark.parametrize("passes", [1, 2])
def test_the_same_on_every_grid_and_in_all_panels(comm: Any, shared_tmp_path: Path, passes: int) -> None:
    """Random numbers depend on global indices alone."""
    from pdgemm import ProcessGrid
    from pdgemm.io import hdf5
    from pdgemm.linalg import svd

    A = matrix((150, 60), "d", "slow")
    write(comm, shared_tmp_path / "a.h5", a=(A, {}))
    values = []
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            for memory in (1 << 18, 1 << 22):
                X = hdf5.dataset(shared_tmp_path / "a.h5", "a", grid)
                _, s, _ = svd(X, 5, passes=passes, memory=memory, oversample=6, seed=7)
                values.append(s)
    assert np.allclose(values, values[0], rtol=1e-12)
    assert (abs(values[0] - np.linalg.svd(A, compute_uv=False)[:5]) < 0.2).all()


@every_grid
@pytest.mark.parametrize(("dtype", "passes", "centered"), pairs(DTYPES, (1, 2, 3, 4), (False, True)))
def test_as_planned_before_the_file_is_read(
    comm: Any, shared_tmp_path: Path, dtype: str, passes: int, centered: bool
) -> None:
    """Words, messages, flops and bytes of each rank are those that `linalg.plan` tells."""
    from pdgemm import ProcessGrid, StoredMatrix
    from pdgemm.io import hdf5
    from pdgemm.linalg import plan, svd

    turn = itertools.cycle(grid_shapes(comm.size))
    for number, shape in enumerate(SHAPES[:2]):
        write(comm, shared_tmp_path / "a.h5", a=(elements(shape, np.dtype(dtype).char, 1), {}))
        with ProcessGrid(comm, next(turn)) as grid:
            A = hdf5.dataset(shared_tmp_path / "a.h5", "a", grid)
            X: Any = A if (number + passes) % 2 else A.H
            function: Any = StoredMatrix.centered_svd if centered else svd
            calls: list[tuple[int, int]] = []
            how = {"passes": passes, "memory": 30_000 * A.dtype.itemsize, "progress": lambda *x: calls.append(x)}  # noqa: B023
            program = plan(function, X, 3, **how)
            assert not calls
            report = function(X, 3, **how)[0].report
            assert program.traffic(comm.rank) == report.counted == report.predicted
            assert program.flops == report.flops and program.bytes_read == report.bytes_read
            assert program.extra_bytes(None) >= report.plan["bytes_per_rank"] and program.simulate().seconds > 0
            assert f"over {report.plan['panels']} panel" in str(program)


EXPONENTS = {  # of 2: of all rows, or of the first, the second and the last third of the rows
    8: (-1060, -1030, 600, 1020, (-1060, -1040, -1025), (-1060, 0, 40), (0, 900, 1019), (1019, -1060, 1000)),
    4: (-140, -126, 60, 122, (-140, -130, -125), (-140, 0, 20), (0, 100, 121), (121, -140, 110)),
}


@pytest.mark.parametrize(("dtype", "passes", "centered"), pairs(DTYPES, (1, 2, 3), (False, True)))
def test_any_magnitude(comm: Any, grid: Any, shared_tmp_path: Path, dtype: str, passes: int, centered: bool) -> None:
    """Norms that overflow, numbers without all digits, and panels larger than all before: as of 2^-e A near 1."""
    from pdgemm.io import hdf5
    from pdgemm.linalg import svd

    wide = np.result_type(dtype, np.float64)
    real, eps = np.dtype(np.dtype(dtype).char.lower()), np.finfo(dtype).eps
    for number, exponents in list(enumerate(EXPONENTS[real.itemsize]))[passes % 2 :: 2]:
        shape = (90, 15) if number % 4 > 1 else (15, 90)
        A, third = matrix(shape, dtype, "fast"), np.arange(shape[0]) * 3 // shape[0]
        scale = np.broadcast_to(exponents, 3)[third]
        stored = (np.ldexp(A.view(real), scale[:, None])).view(dtype)  # in which small numbers are rounded
        largest = int(scale.max())
        near = np.ldexp(stored.view(real), -largest).view(dtype).astype(wide)
        write(comm, shared_tmp_path / "a.h5", a=(stored, {}))
        X, k = hdf5.dataset(shared_tmp_path / "a.h5", "a", grid), 15
        how: dict[str, Any] = {"passes": passes, "memory": 25_000 * A.itemsize}
        X, near = (X.H, near.conj().T) if number % 3 == 0 else (X, near)
        U, s, Vh, *mean = X.centered_svd(k, **how) if centered else svd(X, k, **how)
        assert U.report.as_predicted and U.report.plan["panels"] > 2
        bound = 2000 * eps * np.linalg.norm(near)
        least = bound + 90 * np.ldexp(
            np.finfo(dtype).smallest_subnormal.astype(float), -largest
        )  # of what is scaled back
        if centered:
            mu = near.mean(axis=0, keepdims=True)
            assert abs(np.ldexp(mean[0].allgather().view(real), -largest).view(dtype) - mu).max() <= least
            near = near - mu
        U, Vh, report = U.allgather().astype(wide), Vh.allgather(), U.report
        G, exact = U.conj().T @ near @ Vh.conj().T, np.linalg.svd(near, compute_uv=False)
        assert np.linalg.norm(U @ G @ Vh - near) <= bound and np.linalg.norm(G - np.diag(exact)) <= bound
        assert abs(np.ldexp(s.astype(float), -largest) - exact).max() <= least
        facts = {name: np.ldexp(value, -largest) for name, value in report.facts.items() if name != "factor"}
        assert abs(facts["norm"] - np.linalg.norm(near)) <= least and facts["error"] <= least


def test_more_passes_come_nearer(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    """To the least error of this rank, where the singular values hardly decay."""
    from pdgemm.io import hdf5
    from pdgemm.linalg import svd

    A = matrix((300, 200), "d", "slow")
    write(comm, shared_tmp_path / "a.h5", a=(A, {}))
    X, s = hdf5.dataset(shared_tmp_path / "a.h5", "a", grid), np.linalg.svd(A, compute_uv=False)
    errors = [svd(X, 5, passes=passes)[0].report.facts["error"] for passes in (1, 2, 3, 4, 6)]
    assert errors == sorted(errors, reverse=True)
    assert errors[1] > 1.05 * np.linalg.norm(s[5:]) and errors[4] < 1.001 * np.linalg.norm(s[5:])


@pytest.mark.parametrize("passes", [1, 2])
def test_all_singular_values_and_more_than_the_rank(comm: Any, grid: Any, shared_tmp_path: Path, passes: int) -> None:
    from pdgemm.io import hdf5
    from pdgemm.linalg import svd

    for spectrum, shape, k in (("fast", (50, 12), 12), ("rank 3", (12, 50), 12), ("rank 3", (60, 55), 20)):
        A = matrix(shape, "d", spectrum)
        write(comm, shared_tmp_path / "a.h5", a=(A, {}))
        triplets = svd(hdf5.dataset(shared_tmp_path / "a.h5", "a", grid), k, passes=passes)
        check(A, triplets, k, passes, A.nbytes)
        assert np.allclose(triplets[1], np.linalg.svd(A, compute_uv=False)[:k], atol=1e-13)
        assert triplets[0].report.facts["factor"] == 1 or k == 20


@pytest.mark.parametrize(("dtype", "passes"), [("d", 1), ("D", 2), ("F", 1)])
def test_npy_files_and_transposes(comm: Any, grid: Any, shared_tmp_path: Path, dtype: str, passes: int) -> None:
    """Rows or columns contiguous, in any byte order; the file is read as it lies."""
    from pdgemm.io import npy
    from pdgemm.linalg import svd

    A, path = matrix((90, 37), dtype, "fast"), shared_tmp_path / "a.npy"
    for stored in (A, np.asfortranarray(A), A.astype(A.dtype.newbyteorder(">"))):
        by_rank_0(comm, lambda: np.save(path, stored))  # noqa: B023
        X = npy.dataset(path, grid)
        assert (X.shape, X.dtype) == (A.shape, A.dtype) and "a.npy, 90 x 37" in repr(X)
        assert np.array_equal(X.load().allgather(), A)
        check(A, svd(X, 4, passes=passes), 4, passes, A.nbytes)
        if not stored.flags.f_contiguous or A.dtype.kind != "c":
            check(A.conj().T, svd(X.H, 4, passes=passes), 4, passes, A.nbytes)
        if A.dtype.kind != "c" or stored.flags.f_contiguous:
            check(A.T, svd(X.T, 4, passes=passes), 4, passes, A.nbytes)
        ones = np.ones((37, 2))
        assert np.allclose((X @ type(X.load()).from_global(ones, grid=grid)).allgather(), A @ ones, atol=1e-5)


@every_grid
@pytest.mark.parametrize(("dtype", "passes"), [("d", 1), ("D", 2), ("f", 3), ("F", 1), ("d", 4)])
def test_centered(comm: Any, shared_tmp_path: Path, dtype: str, passes: int) -> None:
    """The mean comes from the same passes, also where it is large, or rows are in order; of columns for a transpose."""
    from pdgemm import ProcessGrid
    from pdgemm.io import hdf5

    for grid_shape, shape in zip(grid_shapes(comm.size) * 2, ((120, 31), (33, 110))):
        A = matrix(shape, dtype, "fast")
        A = (A + 30 + np.linspace(0, 1, shape[0])[:, None] + np.linspace(-9, 9, shape[1])).astype(dtype)
        write(comm, shared_tmp_path / "a.h5", a=(A, {}))
        with ProcessGrid(comm, grid_shape) as grid:
            X = hdf5.dataset(shared_tmp_path / "a.h5", "a", grid)
            views = ((X, A), (X.H, A.conj().T), *([] if np.dtype(dtype).kind == "c" else [(X.T, A.T)]))
            for view, whole in views:
                triplets = view.centered_svd(4, passes=passes, memory=200_000)
                mean, eps = triplets[3].allgather(), np.finfo(dtype).eps
                assert mean.shape == (1, whole.shape[1]) and mean.dtype == whole.dtype
                assert np.allclose(mean, whole.mean(axis=0), rtol=200 * eps)
                U, s, Vh, facts = *triplets[:3], triplets[0].report.facts
                centered = whole - whole.mean(axis=0, dtype=np.result_type(dtype, float))
                error = np.linalg.norm(centered - (U.allgather() * s.astype(float)) @ Vh.allgather())
                rounding = 100 * eps * np.linalg.norm(whole)
                assert error <= facts["bound"] + rounding and abs(facts["norm"] - np.linalg.norm(centered)) <= rounding
                assert facts["error"] <= 3 * error + rounding
                assert triplets[0].report.bytes_read == passes * A.nbytes and triplets[0].report.as_predicted
                exact = np.linalg.svd(centered, compute_uv=False)[:4]
                assert np.allclose(s, exact, rtol=1e-2, atol=max(facts["error"], rounding))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_elements_that_are_no_numbers(comm: Any, grid: Any, shared_tmp_path: Path, value: float) -> None:
    """The same error on all ranks, whose last panel has the element; the ranks go on."""
    from pdgemm.errors import LinAlgError
    from pdgemm.io import hdf5
    from pdgemm.linalg import svd

    A = matrix((300, 40), "d", "slow")
    A[299, 7] = value
    write(comm, shared_tmp_path / "a.h5", a=(A, {}))
    X = hdf5.dataset(shared_tmp_path / "a.h5", "a", grid)
    for passes in (1, 2):
        for call in (lambda: svd(X, 3, passes=passes, memory=1 << 18), lambda: X.centered_svd(3, passes=passes)):  # noqa: B023
            with pytest.raises(LinAlgError, match=r"rows \d+ to 299 of the dataset have elements that are NaN or inf"):
                call()
    A[299, 7] = 0
    write(comm, shared_tmp_path / "a.h5", a=(A, {}))
    check(A, svd(hdf5.dataset(shared_tmp_path / "a.h5", "a", grid), 3), 3, 2, A.nbytes)


def test_sketches_fit_the_memory(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    """Less memory, thinner sketches; too little is an error that says how much is needed, and that is enough."""
    from pdgemm.errors import MemoryLimitError
    from pdgemm.io import hdf5
    from pdgemm.linalg import svd

    A = matrix((150, 60), "d", "slow")
    write(comm, shared_tmp_path / "a.h5", a=(A, {}), b=(A, {"chunks": (40, 25)}))
    for name, passes in zip("ab", (1, 2)):
        X, widths = hdf5.dataset(shared_tmp_path / "a.h5", name, grid), []
        with pytest.raises(MemoryLimitError, match=r"k = 10: .* bytes\) are needed") as caught:
            svd(X, 10, passes=passes, memory=10_000)
        needed = int(re.search(r"\((\d+) bytes\)", str(caught.value))[1])  # type: ignore[index]
        for memory in (needed, needed * 5 // 4, 1 << 24):
            triplets = svd(X, 10, passes=passes, memory=memory)
            plan = triplets[0].report.plan
            check(A, triplets, 10, passes, A.nbytes)
            assert plan["bytes_per_rank"] <= memory == plan["memory"]
            widths.append(plan["width"])
        assert widths[0] == 12 and widths == sorted(widths) and widths[-1] == 21
        with pytest.raises(MemoryLimitError):
            svd(X, 10, passes=passes, memory=needed - 1)
        assert svd(X, 10, oversample=5, passes=passes)[0].report.plan["width"] == 15


def test_bad_input(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    """The same exception on all ranks, before the file is read."""
    from pdgemm import DistMatrix
    from pdgemm.errors import ArgumentError, DTypeError, FileError
    from pdgemm.io import hdf5, npy
    from pdgemm.linalg import svd

    path = shared_tmp_path / "a.h5"
    write(comm, path, a=(np.ones((9, 8)), {}), i=(np.ones((9, 8), "i4"), {}))
    X, A = hdf5.dataset(path, "a", grid), DistMatrix.ones((9, 8), grid=grid)
    for error, text, call in (
        (ArgumentError, "name k, or load it", lambda: svd(X)),
        (ArgumentError, "k = 9 is more than the 8 singular values of A, which is 9 x 8", lambda: svd(X, 9)),
        (ArgumentError, "passes", lambda: svd(X, 2, passes=0)),
        (ArgumentError, "memory", lambda: svd(X, 2, memory=0)),
        (ArgumentError, "tolerance and steps: for a matrix in memory", lambda: svd(X, 2, tolerance=0.1, steps=3)),
        (ArgumentError, "full_matrices: for a matrix in memory", lambda: svd(X, 2, full_matrices=True)),
        (ArgumentError, "are for a matrix in a file, and A is in memory", lambda: svd(A, 2, passes=1)),
        (ArgumentError, "are for a matrix in a file, and A is in memory", lambda: svd(A, 2, memory=1 << 20)),
        (DTypeError, "is of int32: open it with dtype=float32, ", lambda: svd(hdf5.dataset(path, "i", grid), 2)),
        (FileError, "is not a .npy file", lambda: npy.dataset(path, grid)),
    ):  # fmt: skip
        with pytest.raises(error, match=text):
            call()
    if comm.size > 1:
        with pytest.raises(ArgumentError, match="different arguments"):
            svd(X, 2 + (comm.rank == 1))
    assert svd(hdf5.dataset(path, "i", grid, dtype="float32"), 2)[1][0] == pytest.approx(72**0.5)


def test_a_file_that_changes_between_two_passes(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    import h5py

    from pdgemm.errors import FileError
    from pdgemm.io import hdf5
    from pdgemm.linalg import svd

    path = shared_tmp_path / "a.h5"
    write(comm, path, a=(np.ones((400, 30)), {}))

    def meddle(done: int, total: int) -> None:
        if comm.rank == 0 and done == total // 2:
            with h5py.File(path, "r+") as file:
                file["a"][399, 0] += 1
        comm.Barrier()

    with pytest.raises(FileError, match="a.h5:a was changed while it was read"):
        svd(hdf5.dataset(path, "a", grid), 2, memory=1 << 18, progress=meddle)
