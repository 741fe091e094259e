"""Bytes that each public function copies between host and device for matrices on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_cupy import Gpu, fake_cupy

import pdgemm
from pdgemm import DistMatrix, linalg, statistics

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore")]

N = 256  # the matrices are N x N, or N x 8


@pytest.fixture(autouse=True)
def gpus(comm: Any) -> Iterator[Gpu]:
    """Simulate a GPU for each rank, and CUDA-aware MPI: messages do not pass through the host."""
    if comm.size > 4:
        pytest.skip("runs on up to 4 ranks")
    with fake_cupy(comm.size, aware="yes") as made:
        yield made


def operands(grid: Any) -> Any:
    how: Any = {"grid": grid, "device": "cuda", "block": 16}
    A, B, E = (DistMatrix.random((N, N), seed=s, **how) for s in (1, 2, 3))
    tall = DistMatrix.random((N, 8), seed=4, **how)
    C, S = A + N / 4 * DistMatrix.eye(N, **how), A + A.T + 2 * N * DistMatrix.eye(N, **how)
    factors, L, x = linalg.lu_factor(C), linalg.cholesky(S), np.ones(N)
    return SimpleNamespace(how=how, AB=A @ B, A=A, B=B, E=E, C=C, S=S, tall=tall, L=L, factors=factors, x=x)


def _multiplied(o: Any, epilogue: Any) -> Any:
    return pdgemm.pdgemm(1, o.A, o.B, 0, o.E, epilogue=epilogue)


LINALG: dict[str, Callable[..., Any]] = {
    "cho_factor": lambda f, o: f(o.S), "cho_solve": lambda f, o: f(o.L, o.B), "cholesky": lambda f, o: f(o.S),
    "cond": lambda f, o: f(o.C, 1), "det": lambda f, o: f(o.C),
    "eigh": lambda f, o: f(o.S), "eigvalsh": lambda f, o: f(o.S),
    "expm": lambda f, o: f(o.S * 1e-3), "gram": lambda f, o: f(o.tall), "her2k": lambda f, o: f(1, o.A, o.B),
    "hemm": lambda f, o: f(1, o.S, o.B), "symm": lambda f, o: f(1, o.S, o.B),
    "herk": lambda f, o: f(1, o.A), "householder_qr": lambda f, o: f(o.A), "inv": lambda f, o: f(o.C),
    "inertia": lambda f, o: f(o.S), "inv_triangular": lambda f, o: f(o.L),
    "kron": lambda f, o: f(o.A, o.tall[:4, :4]), "lstsq": lambda f, o: f(o.tall, o.B),
    "lu": lambda f, o: f(o.C), "lu_factor": lambda f, o: f(o.C), "lu_solve": lambda f, o: f(o.factors, o.B),
    "matrix_power": lambda f, o: f(o.C, 3),
    "matrix_rank": lambda f, o: f(o.C), "matrix_sign": lambda f, o: f(o.S),
    "matvec": lambda f, o: f(o.A, o.x),
    "newton_schulz": lambda f, o: f(o.S), "norm": lambda f, o: f(o.A, "fro"),
    "outer": lambda f, o: f(o.tall[:, :1], o.x), "pinv": lambda f, o: f(o.C), "polar": lambda f, o: f(o.C),
    "qr": lambda f, o: f(o.tall), "slogdet": lambda f, o: f(o.C), "solve": lambda f, o: f(o.C, o.B),
    "solve_triangular": lambda f, o: f(o.L, o.B), "sqrtm": lambda f, o: f(o.S), "svd": lambda f, o: f(o.C),
    "svdvals": lambda f, o: f(o.tall), "syr2k": lambda f, o: f(1, o.A, o.B), "syrk": lambda f, o: f(1, o.A),
    "trmm": lambda f, o: f(o.L, o.B),
}  # fmt: skip
STATISTICS: dict[str, Callable[..., Any]] = {
    **{name: lambda f, o: [f(o.A, axis=axis) for axis in (None, 0)] for name in (
        "median", "nanmax", "nanmean", "nanmedian", "nanmin", "nanprod", "nanstd", "nansum", "nanvar", "sort")},
    **{name: lambda f, o: [f(o.A, 0.3, axis=axis) for axis in (None, 0)] for name in (
        "nanpercentile", "nanquantile", "percentile", "quantile")},
    "cumsum": lambda f, o: f(o.A, 1), "histogram": lambda f, o: f(o.A),
}  # fmt: skip
METHODS: dict[str, Callable[..., Any]] = {
    **{name: lambda f, o: [f(axis=axis) for axis in (None, 0, 1)] for name in (
        "all", "any", "argmax", "argmin", "max", "mean", "min", "norm", "prod", "std", "sum", "var", "vector_norm")},
    **{name: lambda f, o: f() for name in (
        "checksum", "conj", "conjugate", "copy", "diagonal", "draw", "indices", "preview", "round", "to_device",
        "trace", "transpose")},
    **{name: lambda f, o: f(o.x) for name in ("matvec", "rmatvec", "dot")},
    "allclose": lambda f, o: f(o.B), "astype": lambda f, o: f(np.float32), "clip": lambda f, o: f(0.2, o.B),
    "cumsum": lambda f, o: f(0), "fill": lambda f, o: f(3), "redistribute": lambda f, o: f(block=7),
    "layout_in": lambda f, o: f(o.A.grid),
    "same_layout": lambda f, o: f(o.B), "take": lambda f, o: f([3, 1], 0),
    "tensor": lambda f, o: f((N, N)), "to_blocks": lambda f, o: f((0, 2)), "zeros": lambda f, o: f((N, N), **o.how),
    "ones": lambda f, o: f((N, N), **o.how),
    "empty": lambda f, o: f((N, N), **o.how), "eye": lambda f, o: f(N, **o.how),
    "full": lambda f, o: f((N, N), 2, **o.how),
    "random": lambda f, o: (f((N, N), **o.how), f((N, N), kind="normal", **o.how)),
    "from_local": lambda f, o: f(o.A.local, o.A.shape, grid=o.A.grid, block=16),
}  # fmt: skip
OTHERS: dict[str, Callable[..., Any]] = {
    "assign": lambda f, o: (
        f(o.E, o.E != o.A, 2), f(o.E, [5, 1], o.x), f(o.E, np.s_[:, 3], 1), f(o.E, [7, 2], o.A[:2])),
    "checksum": lambda f, o: f(o.A), "matmul": lambda f, o: f(o.A, o.B),
    "Epilogue": lambda f, o: _multiplied(o, f(
        bias=o.A[:1], scale=o.x, activation="gelu", residual=o.B.redistribute(block=9), aux=o.E.copy())),
    "pdgemm": lambda f, o: (f(1, o.A, o.B, 2, o.E, transa="T"), f(1, o.A.redistribute(block=9), o.B)),
    "plan": lambda f, o: f(o.A, o.B).execute(o.A, o.B, o.E), "redistribute": lambda f, o: f(o.A.T, block=5),
    "select": lambda f, o: f(o.A, [5, 3], slice(0, N, 2)), "verify": lambda f, o: f(o.AB, 1, o.A, o.B),
    "einsum": lambda f, o: f("ij,jk->ki", o.A, o.B), "tensordot": lambda f, o: f(o.A, o.B, 1),
    "operators": lambda f, o: (abs(o.A - o.B * 2) ** 2 < o.E, np.where(o.A > o.B, o.A, 0), np.exp(o.A), np.triu(o.A)),
}  # fmt: skip
MORE = {  # functions that copy more, and the reason
    "eigh": "LAPACK on one rank solves small parts of the spectrum; this matrix is one small part",
    "eigvalsh": "as eigh",
    "inertia": "as eigh",
    "matrix_rank": "LAPACK on one rank computes the singular values of R, n x n",
    "pinv": "as matrix_rank, and U and V^H, n x n",
    "svd": "as pinv",
}
NOT_MEASURED = {
    "allgather": "the result is the whole matrix, on the host",
    "to_global": "as allgather",
    "to_host": "a copy on the host",
    "from_global": "an array of the host",
    "from_blocks": "blocks on the host; test_blocks_of_a_matrix_on_a_device has blocks on the device",
    "from_function": "a function of the user, of NumPy's arrays",
    "diag": "as from_function: a vector of the host",
    "Batch": "arrays of the caller", "balance": "no matrix", "matmul_batched": "a Batch",
    "matmul_grouped": "as matmul_batched, see test_grouped_products", "plan_grouped": "integers of the host",
    "Routing": "as plan_grouped",
    "Scaled": "on the host", "quantize": "on the host",
    "multiply_files": "files", "StoredMatrix": "files", "resilient": "a function of the user",
    **dict.fromkeys(("BlockCyclic", "CorruptionError", "Distribution", "Machine", "PdgemmError", "Plan", "ProcessGrid",
                     "Report", "DistMatrix", "DistTensor", "load_machine", "plan_einsum", "set_default_grid",
                     "trace"),
                    "no function of a matrix"),
}  # fmt: skip


def tables(o: Any) -> list[tuple[Any, list[str], dict[str, Callable[..., Any]]]]:
    """Return (namespace, names of its public functions, calls by name) for each namespace."""
    methods = [x for x in dir(DistMatrix) if x[0] != "_" and callable(getattr(DistMatrix, x))]
    exported = [x for x, value in vars(statistics).items() if x[0] != "_" and callable(value)]
    functions = [x for x in linalg.__all__ if x not in ("LU", "plan")]  # not a function of elements
    return [
        (linalg, functions, LINALG),
        (statistics, exported, STATISTICS),
        (o.A, methods, METHODS),
        (pdgemm, [*pdgemm.__all__, "operators"], OTHERS),
    ]


@pytest.mark.on_ranks(1, 2)
def test_bytes_copied_through_the_host(grid: Any, gpus: Gpu) -> None:
    """A call copies at most 40 rows of the matrix each way, at most 4 in one copy."""
    row, o = 8 * N, operands(grid)
    for space, names, calls in tables(o):
        assert {*calls} <= {*names} <= {*calls, *NOT_MEASURED}
        more = {}
        for name, call in calls.items():
            gpus.downloads.clear(), gpus.uploads.clear()
            call(getattr(space, name, None), o)
            for way, passed in (("down", gpus.downloads), ("up", gpus.uploads)):
                if sum(passed) > 40 * row or max(passed, default=0) > 4 * row:
                    more[name, way] = sum(passed) / row, max(passed) / row
        there = {name for name, _ in more}
        assert there <= {*MORE} and (grid.size > 1 or there == {*calls} & {*MORE}), more
