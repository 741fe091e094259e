"""Products on one rank (BLAS), panels, and element functions."""

from __future__ import annotations

import itertools
import os
import tracemalloc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from problems import DTYPES, TOLERANCE, gemm_error
from scipy.special import ndtr, ndtri
from scipy.stats import kstest
from tiers import pairs

from pdgemm.errors import ArgumentError, DTypeError
from pdgemm.grids.index_map import IndexMap, packed
from pdgemm.local.arrays import element_functions
from pdgemm.local.arrays.element_functions import normal
from pdgemm.local.blas import library as blas, local_gemm
from pdgemm.local.blas.local_gemm import (
    conjugates,
    forms_squares,
    gemm_accumulate,
    multiply_stack,
    prepare,
    prepare_square,
)
from pdgemm.transport.block_copy import _parts, copy_permuted
from pdgemm.transport.movers.panel_views import column_buffer, column_panel

GUARD = 7.25


def choose(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDGEMM_BLAS", name)
    blas.library.cache_clear()
    blas.routine.cache_clear()


@pytest.fixture(params=["scipy", "mkl"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Select SciPy's BLAS or MKL, or instead of MKL the library of PDGEMM_BLAS, if it is an MKL."""
    name = request.param
    if name == "mkl":
        named = os.environ.get("PDGEMM_BLAS", "")
        name = named if "mkl_rt" in named else blas.mkl() or pytest.skip("MKL is not installed")
    choose(name, monkeypatch)
    yield
    blas.library.cache_clear()
    blas.routine.cache_clear()


def guarded(rng: np.random.Generator, rows: int, cols: int, dtype: str, order: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a larger array of GUARDs, and a window of it with random elements."""
    whole = np.full((rows + 3, cols + 4), GUARD, dtype, order=order)  # type: ignore[call-overload]
    cut = whole[1 : rows + 1, 2 : cols + 2]
    cut[...] = rng.standard_normal((rows, cols))
    if cut.dtype.kind == "c":
        cut += 1j * rng.standard_normal((rows, cols)).astype(cut.real.dtype)
    return whole, cut


SIZES = [(1, 1, 1), (1, 5, 3), (5, 1, 3), (4, 6, 1), (7, 8, 9), (33, 17, 40), (0, 3, 2), (3, 0, 2), (3, 2, 0)]


def factors(dtype: str) -> list[tuple[complex, complex]]:
    return [(1, 0), (2, 1), (-0.5, 3), (0, 2)] + ([(1 + 2j, 3 - 1j)] if dtype[0] == "c" else [])


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("orders", itertools.product("CF", repeat=3), ids="".join)
def test_gemm_in_any_order_inside_larger_arrays(dtype: str, orders: tuple[str, ...]) -> None:
    """In any memory order, also conjugated if BLAS reads complex operands transposed."""
    rng = np.random.default_rng(1)
    a, b = (dtype[0] == "c" and conjugates(order, orders[2]) for order in orders[:2])
    for (m, n, k), (alpha, beta) in itertools.product(SIZES, factors(dtype)):
        (_, A), (_, B), (frame, C) = (
            guarded(rng, *shape, dtype, order) for shape, order in zip([(m, k), (k, n), (m, n)], orders)
        )
        A0, B0, C0 = A.copy(), B.copy(), C.copy()
        for how in {(False, False), (a, b)}:
            C[...] = np.nan if beta == 0 else C0
            gemm_accumulate(alpha, A, B, beta, C, *how)
            left, right = (x.conj() if conjugate else x for x, conjugate in zip((A0, B0), how))
            assert gemm_error(C, alpha, left, right, beta, C0) <= TOLERANCE
        assert np.array_equal(A, A0) and np.array_equal(B, B0)
        C[...] = GUARD
        assert (frame == GUARD).all()  # no write outside C
    if dtype[0] == "c" and not a:
        x, y = (np.ones((4, 4), dtype, order) for order in orders[::2])  # type: ignore[call-overload]
        with pytest.raises(ValueError, match="not contiguous"):
            gemm_accumulate(1, x, y, 0, y.copy("K"), True)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("dtype", "orders", "lower", "hermitian", "conjugate"),
    pairs(DTYPES, [*itertools.product("CF", repeat=2)], *[[True, False]] * 3),
)
def test_one_triangle_of_a_square(
    dtype: str, orders: tuple[str, ...], lower: bool, hermitian: bool, conjugate: bool
) -> None:
    """A triangle of op(A) op(A)^H or op(A) op(A)^T; the other is not written, and C is not read if beta is 0."""
    rng = np.random.default_rng(3)
    for (n, k), (alpha, beta) in itertools.product(
        [(1, 1), (1, 4), (5, 1), (7, 9), (40, 17), (0, 2), (3, 0)], factors(dtype)
    ):
        (_, A), (frame, C) = (guarded(rng, *x, dtype, order) for x, order in zip([(n, k), (n, n)], orders))
        if hermitian:
            alpha, beta = alpha.real, beta.real
            C[np.diag_indices(n)] = C.diagonal().real
        if not forms_squares(A, C, hermitian, conjugate):
            continue
        left = A.conj() if conjugate else A.copy()
        right, C0 = (left.conj() if hermitian else left).T, C.copy()
        inside = np.tri(n, dtype=bool) if lower else np.tri(n, dtype=bool).T
        C[...] = np.where(inside, np.nan if beta == 0 else C0, GUARD)
        prepare_square(alpha, A, C, lower, hermitian, conjugate)(beta)
        assert (C[~inside] == GUARD).all()
        C[~inside] = (alpha * left @ right + beta * C0)[~inside]
        assert gemm_error(C, alpha, left, right, beta, C0) <= TOLERANCE
        C[...] = GUARD
        assert (frame == GUARD).all()


def test_squares_that_blas_can_form() -> None:
    """BLAS can form A A^H if A has C's memory order, conj(A) A^T if not, and A A^T and real squares always."""
    for *orders, conjugate in itertools.product("CF", "CF", (False, True)):
        A, C = (np.zeros((5, 5), complex, order=order) for order in orders)  # type: ignore[call-overload]
        assert forms_squares(A, C, True, conjugate) == ((orders[0] == orders[1]) != conjugate)
        assert forms_squares(A, C, False, conjugate) == (not conjugate)
        assert forms_squares(A.real.copy("K"), C.real.copy("K"), True, conjugate)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prepared_product_reads_its_arrays_anew(dtype: str) -> None:
    rng = np.random.default_rng(3)
    for (m, n, k), (alpha, beta) in itertools.product(SIZES, factors(dtype)):
        (_, A), (_, B), (frame, C) = (guarded(rng, *shape, dtype, "C") for shape in [(m, k), (k, n), (m, n)])
        product = prepare(alpha, A, B, C)
        for each in (beta, 1, 0, beta):
            A *= 0.5
            B += 1
            C0 = C.copy()
            product(each)
            assert gemm_error(C, alpha, A, B, each, C0) <= TOLERANCE
        C[...] = GUARD
        assert (frame == GUARD).all()


def test_a_prepared_product_keeps_its_arrays() -> None:
    class Array(np.ndarray):
        """An array type that allows weak references."""

    arrays = [np.ones((3, 3)).view(Array) for _ in "ABC"]
    alive = [weakref.ref(x) for x in arrays]
    product = prepare(1, *arrays)
    del arrays
    assert all(x() is not None for x in alive)
    product(1)
    assert (alive[2]() == 4).all()
    del product
    assert not any(x() is not None for x in alive)


@pytest.mark.parametrize("extent", [63, 64, 65])
@pytest.mark.parametrize("threads", [1, 2])
def test_large_products_of_a_stack_have_the_threads_of_all_others(
    extent: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several threads of BLAS, NumPy's matmul is not called: threads of its BLAS would occupy the cores."""
    monkeypatch.setattr(local_gemm, "threads", lambda: threads)
    by_numpy, matmul = [], np.matmul
    monkeypatch.setattr(local_gemm.np, "matmul", lambda *xs, out: by_numpy.append(xs) or matmul(*xs, out=out))
    rng = np.random.default_rng(0)
    A, B = rng.standard_normal((2, 3, 64, extent)), rng.standard_normal((2, 3, 64, extent)).swapaxes(2, 3)
    C = multiply_stack(A, B, full := np.full((2, 3, 64, 64), np.nan))
    assert C is full and len(by_numpy) == (threads == 1 or extent <= 64)
    np.testing.assert_allclose(C, np.einsum("abik,abkj->abij", A, B), rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("library")
def test_gemm_makes_no_temporaries() -> None:
    A, C = np.ones((600, 700))[:, 50:450], np.ones((600, 500), order="F")
    B = np.ones((500, 500), order="F")[:400]
    product = prepare(1.0, A, B, C)
    for call, most in [(lambda: gemm_accumulate(1.0, A, B, 1.0, C), 20_000), (lambda: product(1.0), 1_000)]:
        call()
        tracemalloc.start()
        call()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < most  # C is 2.4 MB


@pytest.mark.usefixtures("library")
def test_gemm_refuses_strides_that_blas_cannot_address() -> None:
    """BLAS requires a leading dimension of at least the height of a column: no overlapping rows or columns."""
    windows = np.lib.stride_tricks.sliding_window_view(np.arange(9.0), 4)
    with pytest.raises(ValueError, match="neither rows nor columns"):
        gemm_accumulate(1, windows, np.ones((4, 2)), 0, np.ones((6, 2)))
    x = np.ones((6, 6))
    for A, B, C in [
        (x[::2, ::2], x[:3, :3], np.empty((3, 3))),
        (x[:3, :3], x[::2, ::2], np.empty((3, 3))),
        (x[:3, :3], x[:3, :3], np.empty((6, 6))[::2, ::2]),
        (x[:3, :3], x[:3, 2::-1], np.empty((3, 3))),
        (np.broadcast_to(x[0, :3], (3, 3)), x[:3, :3], np.empty((3, 3))),
    ]:
        with pytest.raises(ValueError, match="contiguous"):
            gemm_accumulate(1.0, A, B, 0.0, C)


def test_the_blas_is_chosen_by_name_or_path(library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = blas.library()
    assert (chosen is None) == (os.environ["PDGEMM_BLAS"] == "scipy")
    choose("auto", monkeypatch)
    assert (blas.library() is None) == (blas.mkl() is None)
    monkeypatch.setattr(blas, "mkl", lambda: None)
    choose("auto", monkeypatch)
    assert blas.library() is None
    for name, reason in [("mkl", "not installed"), ("mlk", "got mlk: "), ("libc.so.6", "dgemm_")]:
        choose(name, monkeypatch)
        with pytest.raises(ArgumentError, match=reason):
            blas.library()


# ------------------------------------------------------------------ panels
def runs(*pairs: tuple[int, int]) -> IndexMap:
    starts, lengths = np.array(pairs).T
    return packed(starts, lengths)


@pytest.mark.parametrize("order", "CF")
def test_panels_hold_the_runs_they_name(order: str) -> None:
    local = np.asarray(np.arange(100 * 130.0).reshape(100, 130), order=order)  # type: ignore[call-overload]
    for pairs_ in ([(2, 4)], [(0, 9)], [(0, 2), (5, 3)], [(0, 1), (2, 1), (4, 1), (8, 1)], [(0, 20), (30, 70)]):
        cut = runs(*pairs_)
        for travels in (True, False):
            panel = column_panel(local, order, cut, np.empty(100 * cut.size), travels)
            assert np.array_equal(panel, local[:, cut.indices()[0]])
            assert panel.flags.forc or not travels  # panels to be sent are contiguous
            if cut.contiguous and (order == "F" or not travels):
                assert np.shares_memory(panel, local)  # not copied
    sent, arrived = np.empty(300), np.empty(300)
    panel = column_panel(local, order, runs((0, 1), (2, 2)), sent, True)
    buffer = column_buffer(100, order, 3, arrived)  # has the memory order of the received panel
    arrived[:] = sent
    assert np.array_equal(buffer, panel)


# ------------------------------------------------------------------ element functions
@pytest.mark.parametrize("dtype", [*DTYPES, "float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_random_numbers_depend_only_on_indices(kind: str, dtype: str) -> None:
    f = element_functions.element_function(kind, 5, np.dtype(dtype))
    i, j = np.arange(40)[:, None], np.arange(30)[None, :]
    whole = f(i, j)
    assert whole.dtype == dtype
    assert np.array_equal(f(i[7:20], j[:, 3:]), whole[7:20, 3:])
    assert not np.array_equal(element_functions.element_function(kind, 6, np.dtype(dtype))(i, j), whole)
    if whole.itemsize > 2:
        assert len(np.unique(whole)) == whole.size  # no element repeats
    elif kind == "uniform":
        assert ((whole >= 0) & (whole < 1)).all()


def test_random_numbers_of_other_seeds_and_streams_are_others() -> None:
    """No two seeds, kinds (uniform, normal) or parts (real, imaginary) have the same numbers."""
    streams = [element_functions.numbered(number) for number in range(8)]
    hashed, four = element_functions.hashed, np.arange(4)
    rows = [hashed(four, four, seed, stream).tobytes() for seed in range(8) for stream in streams]
    assert len({*rows}) == len(rows) and min(streams) > 2**40
    i, j = np.arange(9)[:, None], np.arange(9)[None, :]
    parts = [
        part.tobytes()
        for kind in ("uniform", "normal")
        for seed in range(6)
        for x in [element_functions.element_function(kind, seed, np.dtype("D"))(i, j)]
        for part in (x.real, x.imag)
    ]
    assert len({*parts}) == len(parts)


def test_no_seed_begins_at_the_fixed_point_of_the_hash() -> None:
    """The hash finaliser maps 0 to 0; for every seed, rows and columns with hash 0 are beyond any matrix."""
    inverse, zero = pow(int(element_functions.GOLDEN), -1, 2**64), np.zeros(1, np.uint64)
    assert not element_functions.mix(zero).any()
    for stream in map(element_functions.numbered, range(4)):
        starts = [int(element_functions.hash_start(seed, stream)[0]) for seed in (*range(-500, 1500), 2**63, 2**64 - 1)]
        rows = element_functions.mix(np.array(starts, np.uint64))  # hashes of row 0, at which those of columns start
        assert min(-x * inverse % 2**64 for x in (*starts, *map(int, rows))) > 2**40


@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_first_numbers_of_many_seeds(kind: str) -> None:
    """The first numbers of 1024 seeds are not 0 and do not repeat; each element is well distributed over the seeds."""
    i, j, seeds = np.arange(3)[:, None], np.arange(4)[None, :], range(1024)
    x = np.array([element_functions.element_function(kind, seed, np.dtype("D"))(i, j) for seed in seeds])
    parts = np.concatenate([x.real.ravel(), x.imag.ravel()])
    assert np.unique(parts).size == parts.size and (parts != 0).all()
    for dtype in ("d", "f", "F"):
        firsts = [element_functions.element_function(kind, seed, np.dtype(dtype))(i, j)[0, 0] for seed in seeds]
        assert np.count_nonzero(firsts) == len(seeds)
    places = (x if kind == "uniform" else ndtr(x.real) + 1j * ndtr(x.imag)).reshape(len(seeds), -1)
    for column in (*places.real.T, *places.imag.T):
        often = np.bincount((column * 16).astype(int), minlength=16)
        assert often.size == 16 and abs(often - 64).max() <= 5 * 8  # 1024 / 16 = 64 are expected


def test_random_bytes_are_all_bytes_alike() -> None:
    """Random int8 numbers are uniform over all 256 values, also the first ones of each seed."""
    kind = np.dtype("i1")
    f = element_functions.element_function("uniform", 7, kind)
    whole = f(*np.ogrid[:500, :512])
    assert whole.dtype == np.int8 and np.array_equal(f(*np.ogrid[3:9, :512]), whole[3:9])
    firsts = np.array([element_functions.element_function("uniform", x, kind)(*np.ogrid[:4, :4]) for x in range(256)])
    for numbers, each, most in ((whole, 1000, 200), (firsts, 16, 5 * 4)):
        often = np.bincount(numbers.ravel().view(np.uint8), minlength=256)
        assert abs(often - each).max() <= most
    assert firsts[0, 0, 0] != 0
    with pytest.raises(DTypeError, match="normal random matrices can have the types"):
        element_functions.element_function("normal", 7, kind)


def test_random_numbers_have_the_moments_they_should() -> None:
    i, j = np.arange(1000)[:, None], np.arange(1000)[None, :]
    uniform = element_functions.element_function("uniform", 0, np.dtype("d"))(i, j)
    normal = element_functions.element_function("normal", 0, np.dtype("D"))(i, j)
    assert (uniform >= 0).all() and (uniform < 1).all()
    for x, mean, variance in [(uniform, 0.5, 1 / 12), (normal.real, 0, 1), (normal.imag, 0, 1)]:
        assert abs(x.mean() - mean) < 5 * np.sqrt(variance / x.size)
        assert abs(x.var() / variance - 1) < 0.01
        rows, cols = x - x.mean(), np.roll(x - x.mean(), 1, axis=0)
        assert abs((rows * cols).mean()) < 5 * variance / np.sqrt(x.size)  # neighbours are uncorrelated
    assert abs((normal.real * normal.imag).mean()) < 5e-3


def test_kinds() -> None:
    i, j = np.arange(3)[:, None], np.arange(4)[None, :]
    local = np.full((3, 4), np.nan)
    for kind, expected in [("eye", np.eye(3, 4)), ("ones", np.ones((3, 4))), ("zeros", np.zeros((3, 4)))]:
        element_functions.fill(local, i[:, 0], j[0], element_functions.element_function(kind, 0, np.dtype("d")))
        assert np.array_equal(local, expected)
    with pytest.raises(ArgumentError, match="uniform, normal"):
        element_functions.element_function("hilbert", 0, np.dtype("d"))
    with pytest.raises(DTypeError):
        element_functions.element_function("normal", 0, np.dtype("i"))
    for dtype in (np.int8, np.uint16, np.int32, np.uint64):  # all numbers of the type, the highest bits first
        x = element_functions.element_function("uniform", 0, np.dtype(dtype))(np.arange(999), np.arange(999))
        bits, ends = 8 * x.itemsize, np.iinfo(dtype)
        assert x.dtype == dtype
        assert ends.min <= x.min() < ends.min + 2.0 ** (bits - 4)
        assert ends.max - 2.0 ** (bits - 4) < x.max() <= ends.max


def test_normal_numbers_are_quantiles_of_their_hashes() -> None:
    """Compared with SciPy up to 9 standard deviations; Kolmogorov-Smirnov test, and frequencies in the tails."""
    i, j = np.arange(1000)[:, None], np.arange(1000)[None, :]
    h = element_functions.hashed(i, j, 3, 1).ravel()
    h[:4000] >>= np.arange(4000, dtype=np.uint64) % np.uint64(64)  # including the smallest probabilities
    x, p = normal(h), ((h >> np.uint64(1)).astype(float) + 0.5) * 2.0**-64
    expected = np.where(h & np.uint64(1), ndtri(p), -ndtri(p))
    assert (np.abs(x - expected) <= 4e-15 * np.abs(expected)).all()
    assert 9.1 < np.abs(x).max() < 9.2
    x = element_functions.element_function("normal", 0, np.dtype("d"))(i, j).ravel()
    assert kstest(x, "norm").pvalue > 1e-3
    for bound in (1, 2, 3, 4):
        expected_count = x.size * 2 * ndtr(-bound)
        assert abs(np.count_nonzero(np.abs(x) > bound) - expected_count) < 5 * np.sqrt(expected_count)


@pytest.mark.parametrize("shape", [(9, 20, 30, 40), (1, 600, 1, 700), (5,) * 7, (600, 501)])
def test_permuted_arrays_are_copied_in_parts(shape: tuple[int, ...]) -> None:
    """All elements are copied, also where the parts at the end are shorter, and from reversed axes."""
    x = np.arange(np.prod(shape)).reshape(shape)
    parts = set[int]()
    for order in itertools.islice(itertools.permutations(range(x.ndim)), 0, None, max(1, x.ndim**2 - 10)):
        for source in (x.transpose(order), x[::-1].transpose(order)):
            target = np.zeros(source.shape, x.dtype)
            copy_permuted(source, target)
            assert (target == source).all()
            parts.add(len(_parts(source, 512)))
    assert max(parts) > 1
