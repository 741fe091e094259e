"""`pdgemm hpl`: the benchmarks HPL and HPL-MxP: their random systems, their check of the residual, their line.

Both fill a matrix column by column with the numbers of one linear congruential generator,

    x_0 = seed,   x_t+1 = 6364136223846793005 x_t + 1 mod 2^64,

which a rank computes for its own elements only: after t steps x_t is a^t x_0 + (1 + a + ... + a^(t-1)) mod 2^64.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import click
import numpy as np

from pdgemm.local.arrays.element_functions import ElementFunction
from pdgemm.tools.cli import options
from pdgemm.tools.cli.job import OfAllRanks

MULTIPLIER = np.uint64(6364136223846793005)
SEED = {"HPL": 100, "HPL-MxP": 1}  # HPL_ISEED of HPL 2.3, and iseed of the reference implementation of HPL-MxP
EPS, LIMIT = 2.0**-53, 16  # of the scaled residual
HEAD = "T/V                N    NB     P     Q               Time                 Gflops"


@click.command(cls=OfAllRanks, short_help="Run the benchmarks HPL and HPL-MxP.")
@click.argument("n", type=options.COUNT)
@click.option("--mxp", is_flag=True, help="HPL-MxP: factors in single precision, X refined to double precision.")
@click.option("--nb", type=options.COUNT, default=128, show_default=True, help="Block size of the layout.")
@click.option("--grid", "grid_shape", type=options.GRID, help="Process grid P x Q; default: as square as possible.")
@options.device
@options.json_
@options.debug
def hpl(n: int, mxp: bool, nb: int, grid_shape: Any, device: Any, as_json: bool) -> int:
    """Solve the random system of HPL, or of HPL-MxP, of order N, and print the benchmark's line and check.

    The time is that of `linalg.solve`, which also estimates the condition of A.  The column T/V has the precision of
    the factors in place of HPL's variants.  The exit code is 1 if the residual is too large.
    """
    from pdgemm import linalg
    from pdgemm.io.streamed.before_reading import check_memory
    from pdgemm.tools.cli.session import session

    with session(grid_shape, as_json) as say:
        grid, (p, q), name = say.grid, say.grid.shape, "HPL-MxP" if mxp else "HPL"
        check_memory(grid, 16 * n * n // grid.size, "A and its factors")
        with say.progress("generate"):
            A, B = system(name, n, grid=grid, block=nb, device=device)
        with say.progress("solve"):
            linalg.solve(*system(name, min(n, nb), grid=grid, block=nb, device=device))  # loads libraries, is not timed
            start = perf_counter()
            X = linalg.solve(A, B, refine=mxp)
            size = X.norm(np.inf)
            seconds = max(grid.comm.allgather(perf_counter() - start))
        R = B - (A @ X).redistribute(like=B)
        residual = R.norm(np.inf) / (EPS * (A.norm(np.inf) * size + B.norm(np.inf)) * n)
        rate, passed = (2 / 3 * n**3 + 3 / 2 * n**2) / seconds / 1e9, bool(residual < LIMIT)
        verdict = "PASSED" if passed else "FAILED"
        lines = (
            f"{name}: {X.report.what}",
            "=" * len(HEAD),
            HEAD,
            "-" * len(HEAD),
            f"{'WRFP32' if mxp else 'WRFP64':8}{n:12} {nb:5} {p:5} {q:5} {seconds:18.2f} {rate:22.4e}",
            "-" * len(HEAD),
            f"||Ax-b||_oo/(eps*(||A||_oo*||x||_oo+||b||_oo)*N)= {residual:16.8e} ...... {verdict}",
            "=" * len(HEAD),
        )
        facts = {"n": n, "nb": nb, "seconds": seconds, "gflops": rate, "residual": float(residual), "passed": passed}
        say.note("hpl", lines, facts | {"benchmark": name, "what": X.report.what})
    return 0 if passed else 1


def system(name: str, n: int, **layout: Any) -> tuple[Any, Any]:
    """Return A, n x n, and B, n x 1, of a benchmark, "HPL" or "HPL-MxP", in float64.  Collective.

    HPL: elements 1/2 - x / 2^64 of an n x (n + 1) matrix, whose last column is B.  HPL-MxP: x / 2^64 - 1/2, B from the
    next seed; elements on the diagonal of A are sum |a_ij| over the rest of their row, so that LU needs no pivots.
    layout : grid, block and device of the matrices.
    """
    from pdgemm.matrix.distmatrix import DistMatrix

    f, seed = generator(n, SEED[name]), SEED[name]
    if name == "HPL":
        A = DistMatrix.from_function(lambda i, j: -f(i, j), (n, n), **layout)
        return A, DistMatrix.from_function(lambda i, j: -f(i, j + n), (n, 1), **layout)
    sums = DistMatrix.from_function(f, (n, n), **layout).vector_norm(1, axis=1)

    def dominant(i: Any, j: Any) -> Any:
        x = f(i, j)
        return np.where(i == j, sums[i] - abs(x), x)

    A = DistMatrix.from_function(dominant, (n, n), **layout)
    return A, DistMatrix.from_function(generator(n, seed + 1), (n, 1), **layout)


def generator(n: int, seed: int) -> ElementFunction:
    """Return f, where f(i, j) = x_(j n + i + 1) / 2^64 - 1/2 for matrices of n rows and up to n + 1 columns."""

    def powers(a: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return a^t, and the sum of the powers before it, for t = 0, 1, ..., n."""
        x = np.multiply.accumulate(np.append(np.uint64(1), np.full(n, a)))
        return x, np.append(np.uint64(0), np.add.accumulate(x[:-1]))

    down, add_down = powers(MULTIPLIER)
    across, add_across = powers(down[n])  # n steps: to the next column
    above = across * np.uint64(seed) + add_across * add_down[n]  # for each column, the last number of the column before
    return lambda i, j: (down[i + 1] * above[j] + add_down[i + 1]) * 2.0**-64 - 0.5
