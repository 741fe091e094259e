"""pdgemm.linalg, or SciPy's LAPACK in one process: one function, in its fastest layout.

Matrices that a function overwrites are filled again before each timed run, and the first result of a size is checked
by products with a random vector.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import scipy.linalg
from scipy.linalg.blas import get_blas_funcs
from scipy.linalg.lapack import get_lapack_funcs

from pdgemm import DistMatrix, ProcessGrid, linalg, pdgemm
from pdgemm.local.arrays.element_functions import element_function, fill
from pdgemm.names import AnyName
from peers.with_pdgemm import kernel as kernel
from peers.worker import Maker, Setting, Way, boxes, fastest

BLOCKS = (64, 128, 256)
TRIAL = {"svd": 1152}  # the largest order of trials that take seconds; above 1024, svd has one algorithm
HEAVY = ("cholesky", "trsm", "trmm")  # A has a heavy diagonal: it is positive definite and well-conditioned
Pair = tuple[np.ndarray, np.ndarray]


def makers(setting: Setting) -> Iterator[Maker]:
    """Yield functions that return a `Way` of PACKAGE:FUNCTION; "planned" only notes bytes that pdgemm would send."""
    package, _, function = setting.variant.partition(":")
    if package == "scipy":
        yield partial(by_scipy, setting, function)
        return
    name = FUNCTIONS[function].name
    if name and not hasattr(linalg, name):
        raise AttributeError(f"pdgemm.linalg has no {name}")
    if package == "planned":
        yield partial(planned, setting, function)
        return
    layouts = [*itertools.product(boxes(setting.comm.size), *((BLOCKS, "CF") if name else ((None,), "C")))]
    n, trial = setting.mnk[0], TRIAL.get(function, setting.mnk[0])
    if n > trial:
        small = replace(setting, mnk=(trial, trial, trial))
        best = fastest(setting.comm, (partial(by_pdgemm, small, function, *x) for x in layouts)).note
        layouts = [x for x in layouts if by_pdgemm(small, function, *x).note == best]
    yield from (partial(by_pdgemm, setting, function, *x) for x in layouts)


def by_scipy(setting: Setting, function: str) -> Way:
    A, B = (np.empty(setting.mnk[:2], setting.dtype, "F") for _ in range(2))
    return way(setting, function, FUNCTIONS[function].by_lapack, "in one process", A, B)


def on_grid(setting: Setting, shape: tuple[int, ...], block: int | None, order: Any) -> tuple[Any, Any, Any]:
    """Return a grid, and A and B on it."""
    grid = ProcessGrid(setting.comm, (shape[0], shape[1]))
    how: Any = {"grid": grid, "block": block, "dtype": AnyName(setting.dtype), "order": order}
    A, B = (DistMatrix.empty(setting.mnk[:2], **how) for _ in range(2))
    return grid, A, B


def by_pdgemm(setting: Setting, function: str, shape: tuple[int, ...], block: int | None, order: Any) -> Way:
    grid, A, B = on_grid(setting, shape, block, order)
    call, note = FUNCTIONS[function].by_pdgemm, f"{grid}, blocks of {block}, {order}" if block else f"{grid}"
    if function == "product":
        C = A.copy()
        call = partial(pdgemm, 1.0, beta=0.0, C=C)
    return way(setting, function, call, note, A, B)


def planned(setting: Setting, function: str) -> Way:
    """Return a `Way` that runs nothing; its note has the bytes that the busiest host receives, in the best layout."""
    entering = []
    for shape, block, order in itertools.product(boxes(setting.comm.size), BLOCKS, "CF"):
        grid, A, B = on_grid(setting, shape, block, order)
        nbytes = float(linalg.plan(FUNCTIONS[function].by_pdgemm, A, B).simulate().node_bytes.max())
        entering.append((nbytes, f"{grid}, blocks of {block}, {order}"))
    nbytes, note = min(entering)
    return Way(f"{nbytes / 1e6:.6f} MB, {note}", lambda: None)


def way(setting: Setting, function: str, call: Callable[[Any, Any], Any], note: str, A: Any, B: Any) -> Way:
    """Return a `Way` whose run stores its result for the check."""
    result: list[Any] = []
    refill = partial(filled, A, B, function)

    def run() -> None:
        result[:] = [call(A, B)]

    def error() -> float:
        """Return |y - expected| / |expected|, where y is the result applied to a random vector."""
        x = np.random.default_rng(3).random(A.shape[0]) - 0.5
        (r,), f = result, FUNCTIONS[function]
        y = f.image(r, x)  # before A and B, which may contain the result, are filled again
        refill()
        y, expected = f.expected(A, B, x, y, r)
        return float(np.linalg.norm(y - expected) / np.linalg.norm(expected))

    tolerance = 30 * A.shape[0] * float(np.finfo(setting.dtype).eps)  # as in the tests of LAPACK
    return Way(note, run, error, tolerance, refill)


# ------------------------------------------------------------------ products with vectors
def held(X: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the row indices, the column indices and the elements on this rank."""
    if isinstance(X, DistMatrix):
        return *X.indices(), X.local
    return *map(np.arange, X.shape), X


def summed(X: Any, values: np.ndarray) -> np.ndarray:
    return np.asarray(X.grid.comm.allreduce(values)) if isinstance(X, DistMatrix) else values


def filled(A: Any, B: Any, function: str) -> None:
    """Fill A and B with elements of mean 0 that depend only on their indices."""
    for seed, X in enumerate((A, B), 1):
        rows, cols, values = held(X)
        fill(values, rows, cols, element_function("uniform", seed, values.dtype))
        if seed == 1 and function.startswith("eig"):  # symmetric: a_ij is that of the lower triangle
            mirrored = np.empty_like(values)
            fill(mirrored.T, cols, rows, element_function("uniform", seed, values.dtype))
            np.copyto(values, mirrored, where=rows[:, None] < cols)
        values -= values.dtype.type(0.5)
        if seed == 1 and function in HEAVY:
            values[rows[:, None] == cols] += max(X.shape)


def times(X: Any, x: np.ndarray, part: str = "all", transposed: bool = False) -> np.ndarray:
    """Return X x on all ranks; X may be replaced by a triangle of X, or by its transpose."""
    rows, cols, values = held(X)
    below = rows[:, None] - cols
    where: Any = {"all": True, "lower": below >= 0, "strict": below > 0, "upper": below <= 0}[part]
    values = np.where(where, values, 0)
    if transposed:
        rows, cols, values = cols, rows, values.T
    y = np.zeros(X.shape[1 if transposed else 0])
    y[rows] = values @ x[cols]
    return summed(X, y)


def symmetric(X: Any, x: np.ndarray) -> np.ndarray:
    """Return X x of a symmetric X, of which the lower triangle is stored."""
    return times(X, x, "lower") + times(X, x, "strict", True)


def upper_twice(R: Any, x: np.ndarray) -> np.ndarray:
    """Return R^T R x of an upper triangle R."""
    return times(R, times(R, x, "upper"), "upper", True)


def norm(X: Any) -> np.ndarray:
    values = held(X)[2].astype(float)
    return np.sqrt(summed(X, np.array([(values**2).sum()])))


def trace_and_norm(X: Any) -> np.ndarray:
    """Return the trace and the norm of a symmetric matrix, of which the lower triangle is stored."""
    rows, cols, values = held(X)
    below, wide = rows[:, None] - cols, values.astype(float)
    weights = np.where(below > 0, 2.0, below == 0)
    trace, square = summed(X, np.array([wide[below == 0].sum(), (weights * wide**2).sum()]))
    return np.array([trace, square**0.5])


# ------------------------------------------------------------------ the functions
def lapack(name: str, A: np.ndarray) -> Any:
    return get_lapack_funcs(name, arrays=(A,))


def blas(name: str, A: np.ndarray) -> Any:
    return get_blas_funcs(name, arrays=(A,))


def tenth(A: Any) -> tuple[int, int]:
    """Return the first and the last pair of "eigh-10%"."""
    return 0, max(1, len(A) // 10) - 1


def lu_of_pdgemm(A: DistMatrix, B: DistMatrix) -> tuple[Any, Any]:
    factors = linalg.lu_factor(A, overwrite_a=True)
    return factors.LU, factors.perm


def lu_of_lapack(A: np.ndarray, B: np.ndarray) -> tuple[Any, Any]:
    factors, pivots, _ = lapack("getrf", A)(A, overwrite_a=1)
    order = np.arange(len(A))
    for at, other in enumerate(pivots):
        order[[at, other]] = order[[other, at]]
    return factors, order


def qr_of_lapack(want_q: bool, A: np.ndarray, B: np.ndarray) -> tuple[Any, Any]:
    width = 64 * len(A)  # the length of the workspace, for blocks of 64
    factors, tau, _, _ = lapack("geqrf", A)(A, lwork=width, overwrite_a=1)
    R = np.triu(factors) if want_q else factors
    return lapack("orgqr", A)(factors, tau, lwork=width, overwrite_a=1)[0] if want_q else None, R


def eigenvalues(A: np.ndarray, **how: Any) -> Any:
    return scipy.linalg.eigh(A, check_finite=False, overwrite_a=True, **how)


def of_svd(A: np.ndarray, **how: Any) -> Any:
    return scipy.linalg.svd(A, check_finite=False, overwrite_a=True, **how)


def of_lu(r: Any, x: np.ndarray) -> np.ndarray:
    upper = times(r[0], x, "upper")
    return times(r[0], upper, "strict") + upper


class Function(NamedTuple):
    """A function of A and B, which it may overwrite.

    name : the name in pdgemm.linalg.   image : applies the result to a vector x.
    expected : given A, B, x, the image and the result, returns two vectors that must agree.  The first is the image or
        A times the image, the second its expected value.
    """

    name: str
    by_pdgemm: Callable[[Any, Any], Any]
    by_lapack: Callable[[Any, Any], Any]
    image: Callable[[Any, np.ndarray], Any]
    expected: Callable[[Any, Any, np.ndarray, Any, Any], Pair]


FUNCTIONS = {
    "product": Function(
        "",
        lambda A, B: pdgemm(1.0, A, B),
        np.matmul,
        times,
        lambda A, B, x, y, r: (y, times(A, times(B, x))),
    ),
    "cholesky": Function(
        "cholesky",
        lambda A, B: linalg.cholesky(A, overwrite_a=True),
        lambda A, B: lapack("potrf", A)(A, lower=1, overwrite_a=1)[0],
        lambda L, x: times(L, times(L, x, "lower", True), "lower"),
        lambda A, B, x, y, r: (y, symmetric(A, x)),
    ),
    "trsm": Function(
        "solve_triangular",
        lambda A, B: linalg.solve_triangular(A, B, lower=True, overwrite_b=True),
        lambda A, B: blas("trsm", A)(1.0, A, B, lower=1, overwrite_b=1),
        times,
        lambda A, B, x, y, r: (times(A, y, "lower"), times(B, x)),
    ),
    "trmm": Function(
        "trmm",
        lambda A, B: linalg.trmm(A, B, lower=True),
        lambda A, B: blas("trmm", A)(1.0, A, B, lower=1, overwrite_b=1),
        times,
        lambda A, B, x, y, r: (y, times(A, times(B, x), "lower")),
    ),
    "syrk": Function(
        "syrk",
        lambda A, B: linalg.syrk(1.0, A, 0.0, B),
        lambda A, B: blas("syrk", A)(1.0, A, c=B, lower=1, overwrite_c=1),
        symmetric,
        lambda A, B, x, y, r: (y, times(A, times(A, x, "all", True))),
    ),
    "lu": Function("lu_factor", lu_of_pdgemm, lu_of_lapack, of_lu, lambda A, B, x, y, r: (y, times(A, x)[r[1]])),
    "qr-r": Function(
        "householder_qr",
        lambda A, B: linalg.householder_qr(A, overwrite_a=True, want_q=False),
        partial(qr_of_lapack, False),
        lambda r, x: upper_twice(r[1], x),
        lambda A, B, x, y, r: (y, times(A, times(A, x), "all", True)),
    ),
    "qr": Function(
        "householder_qr",
        lambda A, B: linalg.householder_qr(A, overwrite_a=True, want_q=True),
        partial(qr_of_lapack, True),
        lambda r, x: times(r[0], times(r[1], x, "upper")),
        lambda A, B, x, y, r: (y, times(A, x)),
    ),
    "eigh": Function(
        "eigh",
        lambda A, B: linalg.eigh(A),
        lambda A, B: eigenvalues(A, driver="evd"),  # the faster one of LAPACK's drivers
        lambda r, x: times(r[1], r[0] * times(r[1], x, "all", True)),
        lambda A, B, x, y, r: (y, symmetric(A, x)),
    ),
    "eigh-10%": Function(
        "eigh",
        lambda A, B: linalg.eigh(A, subset_by_index=tenth(A)),
        lambda A, B: eigenvalues(A, subset_by_index=tenth(A)),
        lambda r, x: times(r[1], r[0] * x[: len(r[0])]),
        lambda A, B, x, y, r: (y, symmetric(A, times(r[1], x[: len(r[0])]))),
    ),
    "eigvalsh": Function(
        "eigvalsh",
        lambda A, B: linalg.eigvalsh(A),
        lambda A, B: eigenvalues(A, eigvals_only=True),
        lambda r, x: np.array([np.sum(r), np.linalg.norm(r)]),
        lambda A, B, x, y, r: (y, trace_and_norm(A)),
    ),
    "svd": Function(
        "svd",
        lambda A, B: linalg.svd(A),
        lambda A, B: of_svd(A, full_matrices=False),
        lambda r, x: times(r[0], r[1] * times(r[2], x)),
        lambda A, B, x, y, r: (y, times(A, x)),
    ),
    "svdvals": Function(
        "svdvals",
        lambda A, B: linalg.svdvals(A),
        lambda A, B: of_svd(A, compute_uv=False),
        lambda r, x: np.array([np.linalg.norm(r)]),
        lambda A, B, x, y, r: (y, norm(A)),
    ),
    "qr-pivoted": Function(  # (A P)^T A P = R^T R
        "qr",
        lambda A, B: linalg.qr(A, mode="r", pivoting=True),
        lambda A, B: scipy.linalg.qr(A, mode="r", pivoting=True, check_finite=False, overwrite_a=True),
        lambda r, x: upper_twice(r[0], x),
        lambda A, B, x, y, r: (y, times(A, times(A, x[np.argsort(r[1])]), "all", True)[r[1]]),
    ),
}
