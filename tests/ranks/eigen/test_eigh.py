"""Eigenvalues and eigenvectors of Hermitian matrices by tridiagonal form: LAPACK's test matrices and bounds."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from factored import EPS, positive_definite, relative, rng_matrix
from lapack_matrices import SYMMETRIC, glued_wilkinson, symmetric
from problems import grid_shapes
from tiers import every_grid, everything, in_turn

from pdgemm import DistMatrix, ProcessGrid, linalg
from pdgemm.errors import ArgumentError, DTypeError, LayoutError, LinAlgError
from pdgemm.local.blas.threads import NodeCores, threads
from pdgemm.schedules.panels.panel_schedule import OneRankSchedule
from pdgemm.schedules.products.product import Product

pytestmark = pytest.mark.mpi
TYPES = ("d", "F", "f", "D")


@pytest.fixture(autouse=True)
def reduced_by_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set small limits: small matrices are divided among ranks, in small bands and leaves; two stages from order 33."""
    small = {"division.SMALL": 6, "eigh.LARGE": 33, "eigh.LARGE_FOR_PART": 20, "eigh.LARGE_FOR_VALUES": 20}
    small |= {"tridiagonal_form.BAND": 8, "tridiagonal.LEAF": 12, "tridiagonal_form.REST": 9}
    for name, value in small.items():
        monkeypatch.setattr(f"pdgemm.linalg.eigen.{name}", value)


def with_values(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return a Hermitian matrix with these eigenvalues, up to rounding."""
    Q = np.linalg.qr(rng_matrix(len(values), len(values), dtype).astype(np.result_type(dtype, "d")))[0]
    x = (Q * values) @ Q.conj().T
    return ((x + x.conj().T) / 2).astype(dtype)


def kinds(n: int, dtype: str) -> dict[str, np.ndarray]:
    """Return zero, the matrices of LAPACK's dchkst that are not diagonal, and other difficult matrices."""
    real, general = np.finfo(dtype), rng_matrix(n, n, dtype)
    general = general + general.conj().T
    wilkinson = np.diag(np.abs(np.arange(n) - (n - 1) / 2)) + np.diag(np.ones(n - 1), 1) + np.diag(np.ones(n - 1), -1)
    laplace = 2 * np.eye(n) - np.diag(np.ones(n - 1), 1) - np.diag(np.ones(n - 1), -1)
    scales = np.logspace(0, np.log10(float(real.eps)), n)
    return {f"type {number}": symmetric(number, n, dtype) for number in (1, *SYMMETRIC[7:])} | {
        "repeated": with_values(np.repeat([1.0, -2.0, 3.0], -(-n // 3))[:n], dtype),
        "graded": general * scales * scales[:, None],
        "overflowing": general / np.linalg.norm(general, 2) * (0.9 * float(real.max)),
        "wilkinson": wilkinson, "glued": glued_wilkinson(n, dtype), "laplace": laplace,
        "hilbert": scipy.linalg.hilbert(n), "rank one": np.ones((n, n)),
    }  # fmt: skip


def check(a: np.ndarray, w: np.ndarray, V: Any, part: slice = slice(None)) -> None:
    """Check |A V - V D|_1 and |V^H V - I| <= c n eps; w equals LAPACK's, is sorted, and equal on every rank."""
    v, n = V.allgather(), len(a)
    assert v.dtype == a.dtype and w.dtype == np.finfo(a.dtype).dtype and v.shape == (n, len(w))
    assert len(set(V.grid.comm.allgather(w.tobytes()))) == 1 and (np.diff(w) >= 0).all()
    wide = np.longdouble if np.finfo(a.dtype).bits == 64 else np.float64
    size = float(np.abs(a).max(initial=0)) or 1.0
    scaled, x = a.astype(np.result_type(a.dtype, wide)) / size, v.astype(np.result_type(a.dtype, wide))
    norm = float(np.abs(scaled).sum(axis=0).max(initial=0))
    assert relative(scaled @ x - x * (w.astype(wide) / size), norm, a.dtype, n) <= EPS
    assert relative(x.conj().T @ x - np.eye(len(w)), 1, a.dtype, n) <= EPS
    exact = np.linalg.eigvalsh((scaled).astype(np.result_type(a.dtype, "d")))[part]
    assert np.abs(w / size - exact).max(initial=0) <= EPS * n * np.finfo(a.dtype).eps * norm


@pytest.mark.on_ranks(1, 2, 4)
@pytest.mark.parametrize(("dtype", "stages"), in_turn(TYPES, (1, 2)))
def test_all_pairs(comm: Any, dtype: str, stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of matrix, on each grid in turn, in any layout; counted words equal the formulas.

    On 2 and on 4 ranks each type has an eighth of the kinds.
    """
    monkeypatch.setattr("pdgemm.linalg.eigen.eigh.LARGE", 36 if stages == 1 else 7)
    shapes, few = grid_shapes(comm.size), comm.size > 1 and not everything()
    for shape in shapes:
        with ProcessGrid(comm, shape) as grid:
            for turn, (name, x) in enumerate(kinds(35, dtype).items()):
                if turn % len(shapes) != shapes.index(shape) or (
                    few and turn % 8 != TYPES.index(dtype) + comm.size // 4 * 4
                ):
                    continue
                a, block = np.asarray(x, dtype), [(5, 3), None, 8][turn % 3]
                lower = turn % 2 == 0
                half = np.where(np.tri(35, dtype=bool) if lower else np.tri(35, dtype=bool).T, a, np.nan)
                A = DistMatrix.from_global(half.astype(dtype), grid=grid, block=block, order="CF"[turn % 2])
                w, V = linalg.eigh(A, lower=lower)
                check(a, w, V)
                assert V.same_layout(A) and np.array_equal(A.allgather(), half.astype(dtype), equal_nan=True), name
                report: Any = V.report
                assert report.counted == report.predicted, name


@every_grid
def test_orders(comm: Any) -> None:
    """Orders that LAPACK solves on one rank, orders of one panel or leaf, and larger orders."""
    for number, n in enumerate((0, 1, 6, 7, 9, 13, 25, 50)):
        shapes, dtype = grid_shapes(comm.size), TYPES[number % 4]
        a = rng_matrix(n, n, dtype)
        a = a + a.conj().T
        with ProcessGrid(comm, shapes[number % len(shapes)]) as grid:
            A = DistMatrix.from_global(a, grid=grid, block=4)
            w, V = linalg.eigh(A)
            check(a, w, V)
            values = linalg.eigh(A, eigvals_only=True)
            size = np.linalg.norm(a, 2) if n else 0
            assert np.abs(values - w).max(initial=0) <= EPS * max(1, n) * np.finfo(dtype).eps * size
            assert np.array_equal(values, linalg.eigvalsh(A)) and np.array_equal(values, np.linalg.eigvalsh(A))


@pytest.mark.on_ranks(1, 2, 4)
def test_lapack_uses_the_cores_of_the_node(comm: Any, monkeypatch: Any, request: Any) -> None:
    """One rank computes with threads and cores of all ranks of the node, and gives them back; its error is that of all.

    Each rank is bound to one core.
    """
    allowed = os.sched_getaffinity(0)
    request.addfinalizer(partial(os.sched_setaffinity, 0, allowed))
    os.sched_setaffinity(0, {sorted(allowed)[comm.rank % len(allowed)]})
    monkeypatch.setattr("pdgemm.linalg.factors.operands.ON_NODE", 5)
    monkeypatch.setattr("pdgemm.algorithms.panels.panel_run._LONG", 0)
    monkeypatch.setattr("pdgemm.linalg.eigen.generalized._TILE", 8)
    for name in ("LARGE", "LARGE_FOR_PART", "LARGE_FOR_VALUES"):
        monkeypatch.setattr(f"pdgemm.linalg.eigen.eigh.{name}", 200)
    used, cores, calls = NodeCores.used, [], []
    eigh = scipy.linalg.eigh

    def counted(self: NodeCores) -> Any:
        cores.append(self.threads)
        return used(self)

    def with_threads(*arguments: Any, **options: Any) -> Any:
        calls.append((threads(), os.sched_getaffinity(0)))
        return eigh(*arguments, **options)

    monkeypatch.setattr(NodeCores, "used", counted)
    monkeypatch.setattr(scipy.linalg, "eigh", with_threads)
    before = threads(), os.sched_getaffinity(0)
    for n, dtype in ((24, "float64"), (24, "complex64"), (90, "float64")):  # the larger one is only reduced by LAPACK
        a = rng_matrix(n, n, dtype)
        a = a + a.conj().T
        with ProcessGrid(comm, grid_shapes(comm.size)[-1]) as grid:
            A = DistMatrix.from_global(a, grid=grid, block=5)
            check(a, *linalg.eigh(A))
            check(a, *linalg.eigh(A, subset_by_index=(2, 4)), slice(2, 5))
            check(a, *linalg.eigh(A, lower=False, subset_by_index=(1, n - 1)), slice(1, n))
            assert np.allclose(linalg.eigvalsh(A), np.linalg.eigvalsh(a), atol=1e-3)
            assert all(comm.allgather((threads(), os.sched_getaffinity(0)) == before))
            if comm.size > 1 and n == 24:
                plan = linalg.plan(linalg.eigh, A)
                one = [x for x in plan.schedules if isinstance(x, OneRankSchedule)]
                assert [x.helpers for x in one] == [comm.size]
                shares = [[y.work[-1].share for y in x.rounds()] for x in (one[0], replace(one[0], helpers=1))]
                assert shares == [[0.5 / comm.size], [0.5]]
                iterates = linalg.plan(linalg.eigh, DistMatrix.eye(28, grid=grid), k=1)
                assert {len(x.grid.ranks) for x in iterates.schedules if isinstance(x, Product)} == {comm.size}
            expected = [(grid.cores.threads, grid.cores.cores) if comm.size > 1 else before] * (4 if n == 24 else 0)
            assert all(comm.allgather(calls == (expected if grid.rank == grid.rank_map[0] else [])))
            assert all(comm.allgather(len(cores) == (comm.size > 1 and grid.rank == grid.rank_map[0]) * 4))
            calls.clear()
            cores.clear()

    for at in ((0, 23), (23, 0), (9, 3)):  # one element, in a tile on or off the diagonal
        a = np.ones((24, 24))
        a[at] = 2
        with ProcessGrid(comm) as grid, pytest.warns(match=f"on a {grid} grid. is not Hermitian"):
            linalg.eigvalsh(DistMatrix.from_global(a, grid=grid, block=5))

    def failing(*arguments: Any, **options: Any) -> Any:
        raise np.linalg.LinAlgError("no convergence")

    monkeypatch.setattr(scipy.linalg, "eigh", failing)
    with ProcessGrid(comm) as grid, pytest.raises(np.linalg.LinAlgError, match="no convergence"):
        linalg.eigh(DistMatrix.eye(24, grid=grid))
    assert (threads(), os.sched_getaffinity(0)) == before


@pytest.mark.on_ranks(1, 2)
def test_subsets(comm: Any) -> None:
    """Subsets by index and by value, as in SciPy: some, none or all pairs, and values only."""
    for number, shape in enumerate(grid_shapes(comm.size)):
        dtype, n = TYPES[number + comm.size], 45
        a = with_values(np.r_[np.linspace(-3, -1, 15), np.linspace(0.5, 4, 30)], dtype)
        with ProcessGrid(comm, shape) as grid:
            A = DistMatrix.from_global(a, grid=grid, block=(7, 4))
            for lo, hi in ((0, 0), (3, 17), (n - 2, n - 1), (0, n - 1)):
                w, V = linalg.eigh(A, subset_by_index=(lo, hi))
                check(a, w, V, slice(lo, hi + 1))
                assert len(w) == hi - lo + 1
            for ends, expected in (((-1.5, 1.0), None), ((-np.inf, 0), 15), ((0, np.inf), 30), ((-0.9, 0.4), 0)):
                w, V = linalg.eigh(A, subset_by_value=ends)
                exact = scipy.linalg.eigh(a, eigvals_only=True, subset_by_value=ends)
                assert len(w) == len(exact) and expected in (None, len(w))
                start = int((np.linalg.eigvalsh(a.astype("D")) <= ends[0]).sum())
                check(a, w, V, slice(start, start + len(w)))
                values = linalg.eigvalsh(A, subset_by_value=ends)
                assert np.allclose(values, exact, atol=1e-4 if np.finfo(dtype).bits == 32 else 1e-12)
            w, V = linalg.eigh(A, k=14)
            check(a, w, V, slice(n - 14, n))
    with ProcessGrid(comm) as grid:  # intervals are open below and closed above
        A = DistMatrix.from_global(np.diag(np.arange(1.0, 21.0)), grid=grid, block=3)
        assert linalg.eigvalsh(A, subset_by_value=(3, 7)).tolist() == [4, 5, 6, 7]
        assert linalg.eigh(A, subset_by_value=(3, 7))[1].shape == (20, 4)


def beside_the_cut(n: int) -> dict[str, np.ndarray]:
    """Return spectra in which eigenvalue k agrees with the next ones in all or most digits."""
    rising = np.linspace(0, 1, n)
    return {
        "equal": np.r_[rising[22:], np.full(20, 8), 9, 10], "near": np.r_[rising[:-30], 1 - 1e-9 * np.arange(30)],
        "zeros": np.logspace(-16, 0, n), "some zeros": np.r_[np.zeros(n // 2), rising[: n - n // 2]],
        "threes": np.repeat(rising[: -(-n // 3)], 3)[:n], "all": np.ones(n),
    }  # fmt: skip


@pytest.mark.on_ranks(1)
@pytest.mark.parametrize(("n", "steps"), [(40, 1), (120, None)])
def test_eigenvalues_equal_to_omitted_ones(
    comm: Any, n: int, steps: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """k values and vectors are right even if block Lanczos does not find them: then the whole matrix is solved.

    In one spectrum of order 120 block Lanczos misses one of them in 300 steps.
    """
    spectra = beside_the_cut(n)
    if steps:
        monkeypatch.setattr("pdgemm.linalg.eigen.eigh.STEPS", steps)
    else:
        spectra = {"near": spectra["near"]}
    with ProcessGrid(comm, grid_shapes(comm.size)[-1]) as grid:
        for turn, (name, values) in enumerate(spectra.items()):
            a = with_values(values, "dD"[turn % 2])
            A, exact, size = DistMatrix.from_global(a, grid=grid, block=9), np.linalg.eigvalsh(a), np.linalg.norm(a)
            for k, which in ((1, "largest"), (2, "smallest"), (3, "largest"))[: 3 if steps else 1]:
                w, V = linalg.eigh(A, k=k, which=which)  # type: ignore[arg-type]
                v = V.allgather()
                expected = exact[-k:] if which == "largest" else exact[:k]
                assert np.abs(w - expected).max() <= 1e-10 * size, name
                assert np.linalg.norm(a @ v - v * w) <= 2e-10 * size and V.shape == (n, k)
                assert np.abs(v.conj().T @ v - np.eye(k)).max() <= 100 * n * np.finfo(a.dtype).eps
                report: Any = V.report
                assert report.counted == report.predicted
        with pytest.raises(LinAlgError, match="were not found in 1 steps"):
            linalg.eigh(A * 0 + np.diag(np.arange(float(n))), k=1, steps=1)


@pytest.mark.on_ranks(4)
def test_ranks_without_a_position(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks outside the grid get the eigenvalues, but no elements and no work: in one or two stages, also without V."""
    a = rng_matrix(40, 40, "F")
    a = a + a.conj().T
    with ProcessGrid(comm, (1, 3), ranks=[3, 0, 2]) as grid:
        A = DistMatrix.from_global(a, grid=grid, block=7)
        for large in (7, 50):
            monkeypatch.setattr("pdgemm.linalg.eigen.eigh.LARGE", large)
            check(a, *linalg.eigh(A))
        U, s, _ = linalg.svd(A)
        assert np.allclose(linalg.eigvalsh(A), np.linalg.eigvalsh(a), atol=1e-4) and len(s) == U.shape[1] == 40
        monkeypatch.setattr("pdgemm.linalg.singular.singular_values.SMALL", 5)
        assert np.allclose(linalg.svdvals(A), s, atol=1e-4)


def test_the_diagonal_is_real(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imaginary parts on the diagonal are not read, as in LAPACK's ?heev, by any method, for A and for (A, B)."""
    a, b = rng_matrix(40, 40, "D"), positive_definite(40, "complex128")
    a = a + a.conj().T
    a1, b1 = (x + np.diag(1j * np.arange(1.0, 41)) for x in (a, b))
    exact = scipy.linalg.eigh(a, b, eigvals_only=True)
    with ProcessGrid(comm) as grid:
        A, B = (DistMatrix.from_global(x, grid=grid, block=7) for x in (a1, b1))
        for large, small in ((7, 6), (50, 6), (50, 50)):
            monkeypatch.setattr("pdgemm.linalg.eigen.eigh.LARGE", large)
            monkeypatch.setattr("pdgemm.linalg.eigen.division.SMALL", small)
            check(a, *linalg.eigh(A))
            assert np.allclose(linalg.eigvalsh(A), np.linalg.eigvalsh(a)) and np.allclose(linalg.eigh(A, B)[0], exact)
        w, V = linalg.eigh(A, k=2)
        assert np.allclose(w, np.linalg.eigvalsh(a)[-2:]) and V.shape == (40, 2)


@pytest.mark.parametrize("kind", [1, 2, 3])
def test_two_matrices(comm: Any, kind: Any) -> None:
    """A v = w B v, A B v = w v and B A v = w v; vectors have length 1 in the norm of B, or of its inverse."""
    for number, shape in list(enumerate(grid_shapes(comm.size)))[kind % 2 :][:1]:
        dtype, n, lower = TYPES[kind], 33, number % 2 == 0
        a, b = rng_matrix(n, n, dtype), positive_definite(n, dtype)
        a = a + a.conj().T
        halves = [np.where(np.tri(n, dtype=bool) if lower else np.tri(n, dtype=bool).T, x, 0) for x in (a, b)]
        with ProcessGrid(comm, shape) as grid:
            A, B = (DistMatrix.from_global(x, grid=grid, block=y) for x, y in zip(halves, ((5, 3), 8)))
            w, V = linalg.eigh(A, B, lower=lower, type=kind)
            some, U = linalg.eigh(A, B, lower=lower, type=kind, subset_by_index=(4, 9))
            values = linalg.eigvalsh(A, B, lower=lower, type=kind)
            v, u, report = V.allgather().astype("D"), U.allgather(), V.report
            assert report.counted == report.predicted  # type: ignore[union-attr]
        exact, eps, kappa = scipy.linalg.eigh(a, b, type=kind)[0], np.finfo(dtype).eps, np.linalg.cond(b)
        a, b = a.astype("D"), b.astype("D")
        left, right = {1: (a @ v, b @ v), 2: (a @ (b @ v), v), 3: (b @ (a @ v), v)}[kind]
        size = np.linalg.norm(a, 1) * (
            np.linalg.norm(v, 1) if kind == 1 else np.linalg.norm(b, 1) * np.linalg.norm(v, 1)
        )
        assert np.linalg.norm(left - right * w, 1) <= EPS * n * eps * kappa * size
        norms = v.conj().T @ (np.linalg.solve(b, v) if kind == 3 else b @ v)
        assert np.abs(norms - np.eye(n)).max() <= EPS * n * eps * kappa
        for x, y in ((w, exact), (values, exact), (some, exact[4:10])):
            assert np.abs(x - y).max() <= EPS * n * eps * kappa * np.abs(exact).max()
        assert u.shape == (n, 6)


def test_plans(comm: Any) -> None:
    """A plan has the words, messages and flops of a run without deflation."""
    n = 40
    a = with_values(np.linspace(-1, 2, n), "d")
    for shape in grid_shapes(comm.size):
        with ProcessGrid(comm, shape) as grid:
            A, B = (DistMatrix.from_global(x, grid=grid, block=6) for x in (a, positive_definite(n, "d")))
            for arguments, options in (
                ((A,), {}), ((A,), {"lower": False, "subset_by_index": (3, 8)}), ((A, B), {"type": 3}),
            ):  # fmt: skip
                report: Any = linalg.eigh(*arguments, **options)[1].report
                plan = linalg.plan("eigh", *arguments, **options)
                assert (plan.traffic(comm.rank), plan.flops) == (report.counted, report.flops), f"{plan}\n{report}"
            for function, part, expected in (
                ("eigvalsh", A, {"band"}), ("eigh", A, {"band", "chase", "back chase", "reflectors"}),
                ("eigh", A[:30, :30], {"tridiagonal", "reflectors"}),
            ):  # fmt: skip
                names = {stage.algorithm for _, stage in linalg.plan(function, part).stages}
                assert names & {"band", "chase", "back chase", "reflectors", "tridiagonal"} == expected


def test_bad_arguments(comm: Any) -> None:
    with ProcessGrid(comm) as grid:
        A, B = (DistMatrix.eye(20, grid=grid, block=3) for _ in range(2))
        single, small = DistMatrix.eye(20, grid=grid, dtype="f"), DistMatrix.eye(19, grid=grid)
        bad = DistMatrix.from_global(np.diag(np.where(np.arange(20) == 11, -1.0, 1)), grid=grid)
        for error, text, options in (
            (ArgumentError, "one of k, subset_by_index and subset_by_value", {"k": 2, "subset_by_index": (0, 1)}),
            (ArgumentError, "last index of subset_by_index must be <= 19", {"subset_by_index": (0, 20)}),
            (ArgumentError, "first index of subset_by_index must be >= 0", {"subset_by_index": (-1, 3)}),
            (ArgumentError, "last index of subset_by_index must be >= 5", {"subset_by_index": (5, 4)}),
            (ArgumentError, "subset_by_index must be a pair", {"subset_by_index": 3}),
            (ArgumentError, r"interval \(lo, hi\] with lo < hi", {"subset_by_value": (1, 1)}),
            (ArgumentError, "an end of subset_by_value must be a real number", {"subset_by_value": (0, np.nan)}),
            (ArgumentError, "type must be 1, 2 or 3, got 4", {"type": 4}),
            (LayoutError, "same shape: A is 20 x 20 .*, B is 19 x 19", {"B": small}),
            (DTypeError, "A is float64, and B float32", {"B": single}),
            (LinAlgError, "B .* is not positive definite: its leading minor of order 12 is not", {"B": bad}),
            (ArgumentError, "protect is for products, and B is factored", {"B": B, "protect": "detect"}),
        ):
            with pytest.raises(error, match=text):
                linalg.eigh(A, **options)
        with pytest.raises(Exception, match="B"):
            linalg.eigh(A, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", TYPES)
def test_inertia(comm: Any, dtype: str) -> None:
    """Counts of negative, zero and positive eigenvalues are right, and equal on all ranks."""
    n, signs = 40, np.repeat([-1, 0, 1], [14, 5, 21])
    known = with_values(signs * np.linspace(1, 2, n), dtype)
    cases = [(known, (14, 5, 21)), (-np.eye(n), (n, 0, 0)), (np.zeros((5, 5)), (0, 5, 0)), (np.eye(0), (0, 0, 0))]
    with ProcessGrid(comm) as grid:
        for given, expected in cases:
            for lower in (True, False):
                x = (np.tril if lower else np.triu)(given).astype(dtype)
                counts = linalg.inertia(DistMatrix.from_global(x, grid=grid, block=(7, 4)), lower=lower)
                assert counts == expected and {*comm.allgather(counts)} == {expected}
        assert counts.negative == counts.zero == counts.positive == 0
        with pytest.raises(LinAlgError, match="NaN or infinity"):
            linalg.inertia(DistMatrix.from_global(known * np.nan, grid=grid))
