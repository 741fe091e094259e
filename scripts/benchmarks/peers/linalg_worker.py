"""pdgemm.linalg, or SciPy's LAPACK in one process: one function, in its fastest layout, once for each line.

As contenders of bench_linalg.py; the protocol is that of peers/job.py.  What a function overwrites is filled
anew before its time is taken, and the first result of a size is checked: by products with a random vector.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from bench_gemm import order_of_rank_0
from scipy.linalg import eigh, qr, svd
from scipy.linalg.blas import get_blas_funcs
from scipy.linalg.lapack import get_lapack_funcs

from pdgemm import DistMatrix, ProcessGrid, linalg, pdgemm
from pdgemm.grids.layout import Order
from pdgemm.local.arrays.element_functions import element_function, fill
from pdgemm.local.blas import processors
from pdgemm.local.blas.threads import blas_of_products
from pdgemm.names import AnyName
from peers.worker import NAP, SURPLUS, boxes

if TYPE_CHECKING:
    from mpi4py import MPI

BLOCKS = (64, 128, 256)
NAMES = {  # what is called of pdgemm.linalg
    "cholesky": "cholesky", "trsm": "solve_triangular", "trmm": "trmm", "syrk": "syrk", "lu": "lu_factor",
    "qr-r": "householder_qr", "qr": "householder_qr", "eigh": "eigh", "eigh-10%": "eigh", "eigvalsh": "eigvalsh",
    "svd": "svd", "svdvals": "svdvals", "qr-pivoted": "qr", "ldl": "ldl",
}  # fmt: skip
TRIAL = {"svd": 1152}  # the largest order of trials, where they take seconds; svd has one algorithm above 1024
HEAVY = ("cholesky", "trsm", "trmm")  # whose A has a heavy diagonal: positive definite, well-conditioned


class Way(NamedTuple):
    """matrices : A, B, and C of a product, which `run` may overwrite; it returns the result."""

    note: str
    matrices: list[Any]
    run: Callable[[], Any]


def ways(comm: MPI.Intracomm, contender: str, function: str, n: int, dtype: str) -> Iterator[Way]:
    if contender == "scipy":
        A, B = (np.empty((n, n), dtype, "F") for _ in range(2))
        yield Way("in one process", [A, B], partial(by_scipy, function, A, B))
        return
    orders: tuple[Order, ...]
    product, orders = function == "product", ("C", "F")
    for shape in boxes(comm.size):
        grid = ProcessGrid(comm, (shape[0], shape[1]))
        for block, order in itertools.product([None] if product else BLOCKS, orders[:1] if product else orders):
            matrices = [
                DistMatrix.empty((n, n), grid=grid, block=block, dtype=AnyName(dtype), order=order)
                for _ in range(2 + product)
            ]
            note = f"{grid}, blocks of {block}, {order}" if block else f"{grid}"
            yield Way(note, matrices, partial(by_pdgemm, function, *matrices))


def by_pdgemm(function: str, A: DistMatrix, B: DistMatrix, C: DistMatrix | None = None) -> Any:
    library: Any = linalg
    match function:
        case "product":
            return pdgemm(1.0, A, B, 0.0, C)
        case "cholesky":
            return library.cholesky(A, overwrite_a=True)
        case "trsm":
            return library.solve_triangular(A, B, lower=True, overwrite_b=True)
        case "trmm":
            return library.trmm(A, B, lower=True)
        case "syrk":
            return library.syrk(1.0, A, 0.0, B)
        case "lu":
            found = library.lu_factor(A, overwrite_a=True)
            return found.LU, found.perm
        case "eigh":
            return library.eigh(A)
        case "eigh-10%":
            return library.eigh(A, subset_by_index=(0, tenth(A) - 1))
        case "eigvalsh" | "svd" | "svdvals" | "ldl":
            return getattr(library, function)(A)
        case "qr-pivoted":
            return library.qr(A, mode="r", pivoting=True)
    return library.householder_qr(A, overwrite_a=True, want_q=function == "qr")


def by_scipy(function: str, A: np.ndarray, B: np.ndarray) -> Any:
    lapack: Any = partial(get_lapack_funcs, arrays=(A,))
    blas: Any = partial(get_blas_funcs, arrays=(A,))
    match function:
        case "cholesky":
            return lapack("potrf")(A, lower=1, overwrite_a=1)[0]
        case "trsm":
            return blas("trsm")(1.0, A, B, lower=1, overwrite_b=1)
        case "trmm":
            return blas("trmm")(1.0, A, B, lower=1, overwrite_b=1)
        case "syrk":
            return blas("syrk")(1.0, A, c=B, lower=1, overwrite_c=1)
        case "lu":
            factors, pivots, _ = lapack("getrf")(A, overwrite_a=1)
            order = np.arange(len(A))
            for at, other in enumerate(pivots):
                order[[at, other]] = order[[other, at]]
            return factors, order
        case "eigh":  # the faster of LAPACK's drivers
            return eigh(A, driver="evd", check_finite=False, overwrite_a=True)
        case "eigh-10%":
            return eigh(A, subset_by_index=(0, tenth(A) - 1), check_finite=False, overwrite_a=True)
        case "eigvalsh":
            return eigh(A, eigvals_only=True, check_finite=False, overwrite_a=True)
        case "svd":
            return svd(A, full_matrices=False, check_finite=False, overwrite_a=True)
        case "svdvals":
            return svd(A, compute_uv=False, check_finite=False, overwrite_a=True)
        case "qr-pivoted":
            return qr(A, mode="r", pivoting=True, check_finite=False, overwrite_a=True)
    width = 64 * len(A)  # of LAPACK's workspace, for blocks of 64
    if function == "ldl":
        return lapack("sytrf")(A, lower=1, lwork=width, overwrite_a=1)
    factors, tau, _, _ = lapack("geqrf")(A, lwork=width, overwrite_a=1)
    if function == "qr-r":
        return None, factors
    R = np.triu(factors)
    return lapack("orgqr")(factors, tau, lwork=width, overwrite_a=1)[0], R


def tenth(A: Any) -> int:
    """The number of pairs of "eigh-10%"."""
    return max(1, len(A) // 10)


# ------------------------------------------------------------------ matrices and checks
def held(X: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, columns and elements that this rank has."""
    if isinstance(X, DistMatrix):
        return *X.indices(), X.local
    return *map(np.arange, X.shape), X


def refill(way: Way, function: str) -> None:
    """Elements of mean 0 that depend on their indices alone."""
    for seed, X in enumerate(way.matrices, 1):
        rows, cols, values = held(X)
        fill(values, rows, cols, element_function("uniform", seed, values.dtype))
        values -= values.dtype.type(0.5)
        if seed == 1 and function in HEAVY:
            values[rows[:, None] == cols] += max(X.shape)


def times(comm: MPI.Intracomm, X: Any, x: np.ndarray, part: str = "all", transposed: bool = False) -> np.ndarray:
    """X x, or of a triangle of X, or of its transpose; whole vectors on all ranks."""
    rows, cols, values = held(X)
    below = rows[:, None] - cols
    where: Any = {"all": True, "lower": below >= 0, "strict": below > 0, "upper": below <= 0}[part]
    values = np.where(where, values, 0)
    if transposed:
        rows, cols, values = cols, rows, values.T
    y = np.zeros(X.shape[1 if transposed else 0])
    y[rows] = values @ x[cols]
    return np.asarray(comm.allreduce(y)) if isinstance(X, DistMatrix) else y


def symmetric(comm: MPI.Intracomm, X: Any, x: np.ndarray) -> np.ndarray:
    """X x, where X has its lower triangle."""
    return times(comm, X, x, "lower") + times(comm, X, x, "strict", True)


def moments(comm: MPI.Intracomm, X: Any, of_triangle: bool) -> np.ndarray:
    """The trace and the norm of X, of which the lower triangle counts twice; or its norm alone."""
    rows, cols, values = held(X)
    below, wide = rows[:, None] - cols, values.astype(float)
    weights = np.where(below > 0, 2.0, below == 0) if of_triangle else np.ones_like(wide)
    both = np.array([wide[below == 0].sum(), (weights * wide**2).sum()])
    both = np.asarray(comm.allreduce(both)) if isinstance(X, DistMatrix) else both
    return np.array([both[0], both[1] ** 0.5] if of_triangle else [both[1] ** 0.5])


def solved(factors: Any, b: np.ndarray) -> np.ndarray:
    """The solution by factors of a symmetric matrix: an LDL, or a list of those of LAPACK's sytrf."""
    if isinstance(factors, list):
        sytrs: Any = get_lapack_funcs("sytrs", arrays=factors[:1])
        return np.asarray(sytrs(*factors, b, lower=1)[0])
    return np.asarray(linalg.ldl_solve(factors, b))


def error(comm: MPI.Intracomm, function: str, way: Way, found: Any) -> float:
    """|what the result makes of x - what it should make| / |the latter|; A and B are filled anew."""

    def of(X: Any, x: np.ndarray, *part: Any) -> np.ndarray:
        return times(comm, X, x, *part)

    n = way.matrices[0].shape[0]
    x = np.random.default_rng(3).random(n) - 0.5
    if function in ("trsm", "trmm", "product"):
        y = of(found, x)  # before B, in which it may be, is filled anew
    elif function == "cholesky":
        y = of(found, of(found, x, "lower", True), "lower")
    elif function == "syrk":
        y = of(found, x, "lower") + of(found, x, "strict", True)
    elif function == "lu":
        upper = of(found[0], x, "upper")
        y = of(found[0], upper, "strict") + upper
    elif function == "eigh":
        y = of(found[1], found[0] * of(found[1], x, "all", True))
    elif function == "eigh-10%":
        some = x[: len(found[0])]
        y = of(found[1], found[0] * some)
    elif function == "svd":
        y = of(found[0], found[1] * of(found[2], x))
    elif function == "qr-pivoted":
        y = of(found[0], of(found[0], x, "upper"), "upper", True)
    elif function == "ldl":
        factors = found if isinstance(way.matrices[0], DistMatrix) else [found[0].copy(), found[1]]
    elif function in ("eigvalsh", "svdvals"):
        y = np.array([np.sum(found), np.linalg.norm(found)] if function == "eigvalsh" else [np.linalg.norm(found)])
    else:
        R = of(found[1], x, "upper")
        y = of(found[1], R, "upper", True) if function == "qr-r" else of(found[0], R)
    order = found[1] if function == "lu" else None
    refill(way, function)
    A, B = way.matrices[:2]
    if function == "trsm":
        expected, y = of(B, x), of(A, y, "lower")
    elif function == "eigh-10%":
        expected = symmetric(comm, A, of(found[1], some))
    elif function in ("eigvalsh", "svdvals"):
        expected = moments(comm, A, function == "eigvalsh")
    elif function in ("cholesky", "eigh"):
        expected = symmetric(comm, A, x)
    elif function == "ldl":
        expected = symmetric(comm, A, x)
        y = symmetric(comm, A, solved(factors, expected))
    elif function == "qr-pivoted":  # (A P)^T A P = R^T R
        order = found[1]
        expected = of(A, of(A, x[np.argsort(order)]), "all", True)[order]
    elif function in ("trmm", "product"):
        expected = of(A, of(B, x), "lower" if function == "trmm" else "all")
    elif function in ("syrk", "qr-r"):
        first = function == "syrk"
        expected = of(A, of(A, x, "all", first), "all", not first)
    else:
        expected = of(A, x) if order is None else of(A, x)[order]
    return float(np.linalg.norm(y - expected) / np.linalg.norm(expected))


# ------------------------------------------------------------------ the protocol
def timed(comm: MPI.Intracomm, function: str, way: Way) -> tuple[float, Any]:
    """Seconds until the last rank is done, on all ranks, and the result."""
    refill(way, function)
    comm.Barrier()
    start = perf_counter()
    found = way.run()
    comm.Barrier()
    return comm.bcast(perf_counter() - start), found


def fastest(comm: MPI.Intracomm, contender: str, function: str, n: int, dtype: str) -> Way:
    """The best of two runs counts, the first of which also warms up.  Raises ArithmeticError for a wrong result."""
    best, least = 0, inf
    for number, way in enumerate(ways(comm, contender, function, min(n, TRIAL.get(function, n)), dtype)):
        seconds = timed(comm, function, way)[0]
        if seconds < SURPLUS * least:
            seconds = min(seconds, timed(comm, function, way)[0])
        if seconds < least:
            best, least = number, seconds
    way = next(itertools.islice(ways(comm, contender, function, n, dtype), best, None))
    wrong = error(comm, function, way, timed(comm, function, way)[1])
    if not wrong <= 30 * n * np.finfo(dtype).eps:  # as in the tests of LAPACK
        raise ArithmeticError(f"wrong: relative error {wrong:.1e}")
    return way


def planned(comm: MPI.Intracomm, function: str, n: int, dtype: str) -> Way:
    """Runs nothing: its note is the least that pdgemm brings to the busiest host, of its layouts, by their programs."""

    def call(A: DistMatrix, B: DistMatrix) -> Any:
        return by_pdgemm(function, A, B)

    entering = [
        (float(linalg.plan(call, *way.matrices).simulate().node_bytes.max()), way.note)
        for way in ways(comm, "pdgemm", function, n, dtype)
    ]
    nbytes, note = min(entering)
    return Way(f"{nbytes / 1e6:.6f} MB, {note}", [], lambda: None)


def serve(comm: MPI.Intracomm, contender: str, function: str, dtype: str) -> None:
    """For every "n n n" that rank 0 reads, one call; rank 0 answers its seconds, or "-" and why not."""
    if comm.rank == 0:
        print("kernel", processors.kernel(blas_of_products()), flush=True)
    now, way, trouble = "", None, ""
    while line := order_of_rank_0(comm, NAP):
        if line != now:
            now, way, trouble = line, None, ""
            if contender != "scipy" and function in NAMES and not hasattr(linalg, NAMES[function]):
                trouble = f"pdgemm.linalg has no {NAMES[function]}"
            else:
                n = int(line.split()[0])
                try:
                    way = (
                        planned(comm, function, n, dtype)
                        if contender == "planned"
                        else fastest(comm, contender, function, n, dtype)
                    )
                except Exception as failed:  # on all ranks, or the job hangs and is ended
                    trouble = f"{type(failed).__name__}: {failed}"
        answer = f"{timed(comm, function, way)[0]:.9f} {way.note}" if way else f"- {trouble}"
        if comm.rank == 0:
            print(" ".join(answer.split()), flush=True)
