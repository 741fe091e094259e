"""Singular values of matrices in files, by triangles and by steps: within their bounds, and reads as planned."""

from __future__ import annotations

import itertools
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems import DTYPES, grid_shapes
from scipy.linalg import LinAlgWarning
from stored_files import STORAGE, by_rank_0, elements, refused, write
from tiers import everything, in_turn

from pdgemm import DistMatrix, ProcessGrid, StoredMatrix
from pdgemm.errors import ArgumentError, DTypeError, FileError, LinAlgError, MemoryLimitError
from pdgemm.io import hdf5, npy
from pdgemm.linalg import plan, svd

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("everyone", "small")]

K = 4
SHAPES = [(97, 40), (41, 103), (64, 64), (203, 37)]
SPECTRA = {  # singular values as functions of the index j, with and without gaps near j = K
    "flat": lambda j: 1 + 0 * j,
    "1/i": lambda j: 1 / j,
    "1/sqrt(i)": lambda j: j**-0.5,
    "geometric": lambda j: 2.0**-j,
    "fast": lambda j: 10.0 ** (-j / 3),
    "steps": lambda j: 10.0 ** -((j - 1) // 3),
    "clusters": lambda j: 1 / (1 + (j - 1) // 3) + 1e-7 / j,
    "rank 3": lambda j: 1.0 * (j <= 3),
    "zero": lambda j: 0 * j,
    "tiny": lambda j: 1e-31 / j,
    "huge": lambda j: 1e31 / j,
    "random": lambda j: np.sort(np.random.default_rng(len(j)).random(len(j)))[::-1],
}
SCALED = "columns of falling scale"
WAYS = "triangles", "memory for triangles", "steps"


def matrix(shape: tuple[int, int], dtype: str, spectrum: str, seed: int = 1) -> np.ndarray:
    order = min(shape)
    if spectrum == SCALED:
        return (elements(shape, np.dtype(dtype).char, seed) * np.linspace(1, 0.01, shape[1])).astype(dtype)
    bases = []
    for n in shape:
        x = elements((n, order), np.dtype(dtype).kind.replace("f", "d").replace("c", "D"), seed + n)
        bases.append(np.linalg.qr(x)[0])
    s = SPECTRA[spectrum](np.arange(1.0, order + 1))
    return ((bases[0] * s) @ bases[1].conj().T).astype(dtype)


def least_memory(call: Any) -> int:
    """Return the least memory (bytes), which the error of a call with memory=1 names."""
    with pytest.raises(MemoryLimitError, match=rf"k = {K}: .* bytes\) are needed") as caught:
        call(memory=1)
    return int(re.search(r"\((\d+) bytes\)", str(caught.value))[1])  # type: ignore[index]


def check(A: np.ndarray, triplets: Any, k: int, nbytes: int, warned: bool = False) -> None:
    """Compare singular triplets and their report with an SVD of A in double precision."""
    U, s, Vh = (x if isinstance(x, np.ndarray) else x.allgather() for x in triplets[:3])
    report, eps = triplets[0].report, np.finfo(A.dtype).eps
    assert (U.shape, s.shape, Vh.shape) == ((len(A), k), (k,), (k, A.shape[1]))
    assert (U.dtype, s.dtype, Vh.dtype) == (A.dtype, np.finfo(A.dtype).dtype, A.dtype)
    passes = 2 if report.plan["triangles"] else 2 * report.steps + 3
    assert report.as_predicted and report.bytes_read == report.plan["bytes_read"] == passes * nbytes
    assert report.plan["passes"] == passes and triplets[2].report.facts == report.facts
    for X in (U, Vh.conj().T):
        assert abs(X.conj().T @ X - np.eye(k)).max() <= 100 * eps
    wide = A.astype(np.result_type(A.dtype, np.float64))
    exact, facts = np.linalg.svd(wide, compute_uv=False), report.facts
    first, bounds = exact[0] or 1.0, np.array(facts["bounds"])
    errors = abs(s - exact[:k]) / first
    assert (errors <= bounds).all() and facts["bound"] == bounds.max()
    assert warned or (bounds <= np.maximum(10 * errors, 300 * eps)).all()
    residual = np.linalg.norm(wide @ Vh.conj().T - U.astype(wide.dtype) * s.astype(float), axis=0).max()
    assert residual <= (1000 * eps + 10 * facts["residual"]) * first
    assert (
        abs(facts["share"] - ((exact[:k] ** 2).sum() / (exact**2).sum() if exact[0] else 1))
        <= 100 * eps + 3 * bounds.max()
    )


@pytest.mark.parametrize(("spectrum", "how"), in_turn([*SPECTRA, SCALED], [*itertools.product(DTYPES, WAYS)]))
def test_each_bound_holds(comm: Any, shared_tmp_path: Path, spectrum: str, how: tuple[str, str]) -> None:
    """Errors are within the bounds for tall, wide and square matrices, in any storage, in panels of a few rows."""
    turn, (dtype, way) = itertools.cycle(grid_shapes(comm.size)), how
    for number, shape in enumerate(SHAPES):
        if not everything() and (number + len(way) + (np.dtype(dtype).kind == "c")) % 2:
            continue
        A = matrix(shape, dtype, spectrum)
        write(comm, shared_tmp_path / "a.h5", a=(A, STORAGE[number % 3]))
        with ProcessGrid(comm, next(turn)) as grid:
            X = hdf5.dataset(shared_tmp_path / "a.h5", "a", grid)
            memory = 1 << 24 if way == "triangles" else 80_000 * np.result_type(dtype, float).itemsize
            if way == "steps":
                memory = least_memory(lambda memory: svd(X, K, memory=memory)) * 9 // 8  # noqa: B023
            calls: list[tuple[int, int]] = []
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                triplets = svd(X, K, memory=memory, progress=lambda *x: calls.append(x))  # noqa: B023
            check(A, triplets, K, A.nbytes, any("known to" in str(x.message) for x in caught))
            plan = triplets[0].report.plan
            assert plan["triangles"] or way == "steps"
            assert plan["bytes_per_rank"] <= memory == plan["memory"]
            most = plan["panels"] * plan["passes"]
            assert [x for x, _ in calls] == [*range(1, most + 1)] and calls[-1][1] == most
            assert all(x <= total <= most for x, total in calls) and (plan["panels"] > 2 or number % 3)


@pytest.mark.on_ranks(1, 2, 3, 4)
def test_the_same_on_every_grid_and_in_all_panels(comm: Any, shared_tmp_path: Path) -> None:
    """In memory and in files, by triangles and by steps, the values are equal on all grids and for all panels."""
    A = matrix((90, 40), "d", "fast")
    write(comm, shared_tmp_path / "a.h5", a=(A, {}))
    values = [np.linalg.svd(A, compute_uv=False)[:K]]
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            X = hdf5.dataset(shared_tmp_path / "a.h5", "a", grid)
            least = least_memory(lambda memory: svd(X, K, memory=memory))  # noqa: B023
            for memory in (least, 1 << 22):
                U, s, _ = svd(X, K, memory=memory, seed=7)
                assert U.report.plan["triangles"] == (memory > least)
                values.append(s)
            values.append(svd(X.load(), K, seed=7)[1])
    assert np.allclose(values, values[0], rtol=1e-13)


def test_passes_until_the_tolerance_is_met(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    """A wider tolerance takes fewer passes; if the allowed passes or steps do not suffice, a warning is issued."""
    A = matrix((150, 60), "d", "1/sqrt(i)")
    write(comm, shared_tmp_path / "a.h5", a=(A, {}))
    X, exact = hdf5.dataset(shared_tmp_path / "a.h5", "a", grid), np.linalg.svd(A, compute_uv=False)[:K]
    memory, passes = least_memory(lambda memory: svd(X, K, memory=memory)), list[int]()
    for tolerance in (1e-12, 1e-6, 1e-3):
        U, s, _ = svd(X, K, memory=memory, tolerance=tolerance)
        assert (abs(s - exact) <= U.report.facts["bounds"]).all() and U.report.facts["bound"] <= tolerance
        passes.append(U.report.plan["passes"])
    assert passes[0] > passes[1] > passes[2]
    for most in ({"passes": 8}, {"steps": 2}):
        with pytest.warns(LinAlgWarning, match=r"a.h5:a, 150 x 60: the 4 largest singular values are known to"):
            U, s, _ = svd(X, K, memory=memory, **most)
        assert U.report.plan["passes"] == 7 and (abs(s - exact) <= U.report.facts["bounds"]).all()
    with pytest.raises(ArgumentError, match=r"passes = 4 is too few for .*a.h5:a: at least 5 are needed with"):
        svd(X, K, memory=memory, passes=4)
    refused(comm, ArgumentError, r"passes = 1 is too few for .*a.h5:a: at least 2 are needed with", svd, X, K, passes=1)


@pytest.mark.on_ranks(2, 4)
@pytest.mark.parametrize(("how", "dtype"), in_turn(itertools.product(("triangles", "steps"), (False, True)), DTYPES))
def test_as_planned_before_the_file_is_read(
    comm: Any, shared_tmp_path: Path, dtype: str, how: tuple[str, bool]
) -> None:
    """Words, messages, flops and bytes of each rank equal those of `linalg.plan`."""
    (way, centered), turn = how, itertools.cycle(grid_shapes(comm.size)[::-1])
    shapes = SHAPES[:1] if centered and way == "triangles" else SHAPES[:2]  # full rank, also centered
    for number, shape in enumerate(shapes):
        write(comm, shared_tmp_path / "a.h5", a=(elements(shape, np.dtype(dtype).char, 1), {}))
        with ProcessGrid(comm, next(turn)) as grid:
            A = hdf5.dataset(shared_tmp_path / "a.h5", "a", grid)
            X: Any = A if number or centered else A.H
            function: Any = StoredMatrix.centered_svd if centered else svd
            calls: list[tuple[int, int]] = []
            options: dict[str, Any] = {"steps": 2, "tolerance": 1e-30, "progress": lambda *x: calls.append(x)}  # noqa: B023
            least = least_memory(lambda memory: function(X, K, memory=memory))  # noqa: B023
            options["memory"] = least * 9 // 8 if way == "steps" else 1 << 24
            program = plan(function, X, K, **options)
            assert not calls
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                report = function(X, K, **options)[0].report
            assert program.traffic(comm.rank) == report.counted == report.predicted
            assert program.flops == report.flops and program.bytes_read == report.bytes_read
            assert program.extra_bytes(None) >= report.plan["bytes_per_rank"] and program.simulate().seconds > 0
            assert f"over {report.plan['panels']} panel" in str(program)


EXPONENTS = {  # by itemsize of a real: powers of 2 that scale all rows, or the first, second and last third of the rows
    8: (-1060, -1030, 600, 1020, (-1060, -1040, -1025), (-1060, 0, 40), (0, 900, 1019), (1019, -1060, 1000)),
    4: (-140, -126, 60, 122, (-140, -130, -125), (-140, 0, 20), (0, 100, 121), (121, -140, 110)),
}


@pytest.mark.parametrize(
    ("how", "dtype"), in_turn(itertools.product(("triangles", "steps"), (False, True)), DTYPES, start=1)
)
def test_any_magnitude(comm: Any, grid: Any, shared_tmp_path: Path, dtype: str, how: tuple[str, bool]) -> None:
    """Overflowing norms, subnormal numbers, and ever larger panels: results equal those for 2^-e A near 1."""
    way, centered = how
    wide = np.result_type(dtype, np.float64)
    real, eps = np.dtype(np.dtype(dtype).char.lower()), np.finfo(dtype).eps
    for number, exponents in list(enumerate(EXPONENTS[real.itemsize]))[centered::2]:
        shape = (90, 40) if number % 4 > 1 else (40, 90)
        A, third = matrix(shape, dtype, "fast"), np.arange(shape[0]) * 3 // shape[0]
        scale = np.broadcast_to(exponents, 3)[third]
        stored = (np.ldexp(A.view(real), scale[:, None])).view(dtype)  # small numbers are rounded
        largest = int(scale.max())
        near = np.ldexp(stored.view(real), -largest).view(dtype).astype(wide)
        write(comm, shared_tmp_path / "a.h5", a=(stored, {}))
        X = hdf5.dataset(shared_tmp_path / "a.h5", "a", grid)
        X, near = (X.H, near.conj().T) if number % 3 == 0 else (X, near)
        function: Any = StoredMatrix.centered_svd if centered else svd
        memory = 80_000 * A.itemsize
        if way == "steps":
            memory = least_memory(lambda memory: function(X, K, memory=memory))  # noqa: B023
        U, s, Vh, *mean = function(X, K, memory=memory)
        assert U.report.as_predicted and U.report.plan["panels"] > 2
        bound = 2000 * eps * np.linalg.norm(near)
        least = bound + 90 * np.ldexp(
            np.finfo(dtype).smallest_subnormal.astype(float), -largest
        )  # rounding of the values scaled back
        if centered:
            mu = near.mean(axis=0, keepdims=True)
            assert abs(np.ldexp(mean[0].allgather().view(real), -largest).view(dtype) - mu).max() <= least
            near = near - mu
        U, Vh, report = U.allgather().astype(wide), Vh.allgather(), U.report
        G, exact = U.conj().T @ near @ Vh.conj().T, np.linalg.svd(near, compute_uv=False)
        assert np.linalg.norm(G - np.diag(exact[:K])) <= bound
        assert abs(np.ldexp(s.astype(float), -largest) - exact[:K]).max() <= least
        assert report.facts["bound"] <= 300 * eps and report.facts["residual"] <= 3 * eps**0.5
        assert abs(report.facts["share"] - (exact[:K] ** 2).sum() / (exact**2).sum()) <= 300 * eps


def test_all_singular_values_and_more_than_the_rank(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    for spectrum, shape, k in (("fast", (50, 12), 12), ("rank 3", (12, 50), 12), ("rank 3", (60, 55), 20)):
        A = matrix(shape, "d", spectrum)
        write(comm, shared_tmp_path / "a.h5", a=(A, {}))
        triplets = svd(hdf5.dataset(shared_tmp_path / "a.h5", "a", grid), k)
        check(A, triplets, k, A.nbytes)
        assert np.allclose(triplets[1], np.linalg.svd(A, compute_uv=False)[:k], atol=1e-13)


@pytest.mark.parametrize(("dtype", "way"), [("d", "steps"), ("D", "steps"), ("F", "triangles")])
def test_npy_files_and_transposes(comm: Any, grid: Any, shared_tmp_path: Path, dtype: str, way: str) -> None:
    """In C and Fortran order, in any byte order; the file is read in its own order."""
    A, path = matrix((90, 40), dtype, "fast"), shared_tmp_path / "a.npy"
    for stored in (np.asfortranarray(A), A.astype(A.dtype.newbyteorder(">"))):
        by_rank_0(comm, lambda: np.save(path, stored))  # noqa: B023
        X = npy.dataset(path, grid)
        assert (X.shape, X.dtype) == (A.shape, A.dtype) and "a.npy, 90 x 40" in repr(X)
        assert np.array_equal(X.load().allgather(), A)
        memory = least_memory(lambda memory: svd(X, K, memory=memory)) if way == "steps" else None  # noqa: B023
        check(A, svd(X, K, memory=memory), K, A.nbytes)
        if not stored.flags.f_contiguous or A.dtype.kind != "c":
            check(A.conj().T, svd(X.H, K, memory=memory), K, A.nbytes)
        if A.dtype.kind != "c" or stored.flags.f_contiguous:
            check(A.T, svd(X.T, K, memory=memory), K, A.nbytes)
        ones = np.ones((40, 2))
        assert np.allclose((X @ type(X.load()).from_global(ones, grid=grid)).allgather(), A @ ones, atol=1e-5)


@pytest.mark.parametrize(("dtype", "way"), in_turn(DTYPES, WAYS))
def test_centered(comm: Any, shared_tmp_path: Path, dtype: str, way: str) -> None:
    """The mean (for a transpose, of the other dimension) takes no extra pass; it may be large, and rows sorted."""
    for grid_shape, shape in zip(grid_shapes(comm.size) * 2, ((120, 41), (43, 110))):
        A = matrix(shape, dtype, "fast")
        A = (A + 30 + np.linspace(0, 1, shape[0])[:, None] + np.linspace(-9, 9, shape[1])).astype(dtype)
        write(comm, shared_tmp_path / "a.h5", a=(A, {}))
        with ProcessGrid(comm, grid_shape) as grid:
            X = hdf5.dataset(shared_tmp_path / "a.h5", "a", grid)
            views = ((X, A), (X.H, A.conj().T), *([] if np.dtype(dtype).kind == "c" else [(X.T, A.T)]))
            for view, whole in views:
                memory = None if way == "triangles" else 80_000 * A.itemsize
                if way == "steps":
                    memory = least_memory(lambda memory: view.centered_svd(K, memory=memory))  # noqa: B023
                triplets, eps = view.centered_svd(K, memory=memory), np.finfo(dtype).eps
                mean = triplets[3].allgather()
                assert mean.shape == (1, whole.shape[1]) and mean.dtype == whole.dtype
                assert np.allclose(mean, whole.mean(axis=0), rtol=200 * eps)
                U, s, Vh, facts = *triplets[:3], triplets[0].report.facts
                centered = whole - whole.mean(axis=0, dtype=np.result_type(dtype, float))
                exact = np.linalg.svd(centered, compute_uv=False)
                rounding = 30 * eps * np.linalg.norm(whole) / exact[0]  # rounding errors of A - mean
                assert (abs(s - exact[:K]) / exact[0] <= np.array(facts["bounds"]) + rounding).all()
                assert facts["bound"] <= 300 * eps
                error = np.linalg.norm(centered - (U.allgather() * s.astype(float)) @ Vh.allgather())
                assert abs(error - np.linalg.norm(exact[K:])) <= 10 * rounding * exact[0]
                assert abs(facts["share"] - (exact[:K] ** 2).sum() / (exact**2).sum()) <= 3 * rounding + 300 * eps
                report = triplets[0].report
                assert report.as_predicted and report.bytes_read == report.plan["passes"] * A.nbytes


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_inf_are_refused(comm: Any, grid: Any, shared_tmp_path: Path, value: float) -> None:
    """All ranks raise the same error, although only the last panel contains the element; later calls succeed."""
    A = matrix((300, 50), "d", "1/i")
    A[299, 7] = value
    write(comm, shared_tmp_path / "a.h5", a=(A, {}))
    X = hdf5.dataset(shared_tmp_path / "a.h5", "a", grid)
    memory = least_memory(lambda memory: svd(X, K, memory=memory))
    for call in (lambda: svd(X, K, memory=memory), lambda: svd(X, K), lambda: X.centered_svd(K)):
        refused(comm, LinAlgError, r"rows \d+ to 299 of the dataset have elements that are NaN or inf", call)
    refused(comm, LinAlgError, r"NaN or inf", svd, X.T, K)
    A[299, 7] = 0
    write(comm, shared_tmp_path / "a.h5", a=(A, {}))
    check(A, svd(hdf5.dataset(shared_tmp_path / "a.h5", "a", grid), K), K, A.nbytes)


def test_plans_fit_the_memory(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    """Less memory means thinner blocks; if it is too little, the error names the least memory, which suffices."""
    A = matrix((90, 70), "d", "fast")
    write(comm, shared_tmp_path / "a.h5", a=(A, {}), b=(A, {"chunks": (40, 25)}))
    for name in "ab":
        X, widths = hdf5.dataset(shared_tmp_path / "a.h5", name, grid), []
        needed = least_memory(lambda memory: svd(X, K, memory=memory))  # noqa: B023
        for memory in (needed, needed * 2, 1 << 24):
            triplets = svd(X, K, memory=memory)
            plan = triplets[0].report.plan
            check(A, triplets, K, A.nbytes)
            assert plan["bytes_per_rank"] <= memory == plan["memory"] and plan["triangles"] == (memory == 1 << 24)
            widths.append(plan["width"])
        assert widths[0] == K + 2 and widths[1] > K + 2
        with pytest.raises(MemoryLimitError):
            svd(X, K, memory=needed - 1)
        assert svd(X, K, oversample=5, memory=needed * 3 // 2)[0].report.plan["width"] == 9


def test_bad_input(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    """All ranks raise the same error, before the file is read."""
    path = shared_tmp_path / "a.h5"
    write(comm, path, a=(np.ones((9, 8)), {}), i=(np.ones((9, 8), "i4"), {}))
    X, A = hdf5.dataset(path, "a", grid), DistMatrix.ones((9, 8), grid=grid)
    for error, text, call in (
        (ArgumentError, "pass k, or load it", lambda: svd(X)),
        (ArgumentError, "k = 9 is more than the 8 singular values of A, which is 9 x 8", lambda: svd(X, 9)),
        (ArgumentError, "passes", lambda: svd(X, 2, passes=0)),
        (ArgumentError, "memory", lambda: svd(X, 2, memory=0)),
        (ArgumentError, "tolerance", lambda: svd(X, 2, tolerance=0)),
        (ArgumentError, "steps", lambda: X.centered_svd(2, steps=0)),
        (ArgumentError, "full_matrices: only for a matrix in memory", lambda: svd(X, 2, full_matrices=True)),
        (ArgumentError, "are for a matrix in a file, and A is in memory", lambda: svd(A, 2, passes=1)),
        (ArgumentError, "are for a matrix in a file, and A is in memory", lambda: svd(A, 2, memory=1 << 20)),
        (DTypeError, "is of int32: open it with dtype=float32, ", lambda: svd(hdf5.dataset(path, "i", grid), 2)),
        (FileError, "is not a .npy file", lambda: npy.dataset(path, grid)),
    ):  # fmt: skip
        refused(comm, error, text, call)
    if comm.size > 1:
        refused(comm, ArgumentError, "different arguments", svd, X, 2 + (comm.rank == 1))
    assert svd(hdf5.dataset(path, "i", grid, dtype="float32"), 2)[1][0] == pytest.approx(72**0.5)


def test_bounds_hold_for_many_rows_in_single_precision(
    comm: Any, grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums of 200,000 single-precision addends have large rounding errors, which the bounds must include."""
    monkeypatch.undo()  # undo `small`: panels of many rows
    A = 2.5 + np.random.default_rng(0).standard_normal((200_000, 10), "f4")
    A[:500] = -1000
    by_rank_0(comm, lambda: np.save(shared_tmp_path / "tall.npy", A))
    X, wide = npy.dataset(shared_tmp_path / "tall.npy", grid), A.astype(float)
    M, centred = DistMatrix.from_global(A, grid=grid), wide - wide.mean(axis=0)
    for triplets, matrix, most in (
        (svd(X, 2), wide, 1e-6),
        (X.centered_svd(2), centred, 1e-6),
        (svd(M, 2), wide, 2e-3),
    ):
        U, s, Vh, *_ = triplets
        exact = np.linalg.svd(np.linalg.qr(matrix, mode="r"), compute_uv=False)
        facts = U.report.facts
        assert (abs(s - exact[:2]) <= np.array(facts["bounds"]) * exact[0]).all() and facts["bound"] <= most
        apart = matrix.T @ U.allgather().astype(float) - Vh.allgather().T.astype(float) * s
        assert np.linalg.norm(apart, axis=0).max() <= facts["residual"] * exact[0]
