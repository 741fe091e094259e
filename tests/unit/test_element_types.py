"""Element types: which types every function accepts, and the common type of two types."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from mpi4py import MPI

from pdgemm import Batch, DistMatrix, ProcessGrid, matmul_batched, pdgemm, verify
from pdgemm.errors import DTypeError
from pdgemm.io import hdf5
from pdgemm.local.arrays import dtypes

REAL = ("float16", "bfloat16", "float32", "float64")
WHOLE = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
EIGHTHS = ("float8_e4m3fn", "float8_e5m2")
STORED = (*WHOLE, *EIGHTHS, *REAL, "complex64", "complex128")
REFUSED = ["O", "U3", "S3", "V8", [("a", "f8")], "M8[s]", "m8[s]", "g", "G", np.dtypes.StringDType()]
REFUSED += [">f8", ">i2", ">c16", "float8_e3m4", "int4"]
NO_TYPES = ["2f8", "nonsense", 3.5, 10**5000, "\ud800"]
# the type of A + B, and of A @ B except for int8 by int8
COMMON = """
            float16   bfloat16  float32    float64     complex64   complex128  int8
float16     float16   float32   float32    float64     complex64   complex128  float16
bfloat16    float32   bfloat16  float32    float64     complex64   complex128  bfloat16
float32     float32   float32   float32    float64     complex64   complex128  float32
float64     float64   float64   float64    float64     complex128  complex128  float64
complex64   complex64 complex64 complex64  complex128  complex64   complex128  complex64
complex128  complex128 complex128 complex128 complex128 complex128 complex128  complex128
int8        float16   bfloat16  float32    float64     complex64   complex128  int8
"""


def table() -> dict[tuple[str, str], str]:
    columns, *rows = (line.split() for line in COMMON.strip().splitlines())
    return {(row[0], column): found for row in rows for column, found in zip(columns, row[1:])}


def test_every_pair_of_operands_has_a_common_type() -> None:
    assert {a for a, _ in table()} | {*EIGHTHS} | {*WHOLE} == {"bool", *(x.name for x in dtypes.OPERANDS)}
    for (a, b), expected in table().items():
        given = np.dtype(a), np.dtype(b)
        assert dtypes.common(*given) == expected
        assert dtypes.product(*given) == ("int32" if expected == "int8" else expected)
        narrow = {"float16": "float32", "bfloat16": "float32", "int8": "int32"}
        assert dtypes.arithmetic(*given) == narrow.get(expected, expected)
    for a, b in itertools.product(EIGHTHS, [*EIGHTHS, *(x for x, _ in table())]):
        given = np.dtype(a), np.dtype(b)
        wide = "float32" if b in (*EIGHTHS, "float16", "bfloat16", "int8") else b
        assert dtypes.common(*given) == (a if b in (a, "int8") else wide)
        assert dtypes.product(*given) == dtypes.arithmetic(*given) == wide
    halves, int8 = dtypes.NARROW, np.dtype("i1")
    for three in itertools.permutations((*halves, int8)):
        assert dtypes.common(*three) == "float32"
    assert dtypes.common(*halves, np.dtype("F")) == "complex64"


def test_whole_numbers_are_numbers_modulo_a_power_of_two() -> None:
    for a, b in itertools.product(map(np.dtype, WHOLE), repeat=2):
        assert dtypes.arithmetic(a, b) == ("int64" if 8 in (a.itemsize, b.itemsize) else "int32")
    for a, b in itertools.product(map(np.dtype, WHOLE[1:]), repeat=2):
        assert dtypes.product(a, b) == (np.result_type(a, b) if {a, b} != {np.dtype("i1")} else "int32")


@pytest.mark.mpi
def test_mixed_types_in_sums_and_products(comm: Any) -> None:
    i, j = np.indices((6, 6))
    numbers = (5 * i + j) % 7 - 3
    with ProcessGrid(comm) as grid:
        for (a, b), expected in table().items():
            if comm.size > 1 and (a, b) != ("float16", "bfloat16"):  # only these, for which NumPy has no common type
                continue
            (A, many), (B, others) = (
                (DistMatrix.from_global(x, grid=grid, block=2), Batch.from_global(x[None], comm))
                for x in (numbers.astype(a), numbers.astype(b))
            )
            assert (A + B).dtype == expected
            assert np.array_equal((A + B).allgather(), 2 * numbers)
            assert A.allclose(B) and (A == B).allgather().all()
            C, products = A @ B, matmul_batched(many, others)
            assert C.dtype == products.dtype == ("int32" if expected == "int8" else expected)
            assert np.array_equal(C.allgather(), numbers @ numbers)
            assert all(np.array_equal(item, numbers @ numbers) for item in products.items)
            assert verify(C, 1, A, B).passed


@pytest.mark.mpi
def test_every_function_accepts_the_stored_types(comm: Any) -> None:
    i, j = np.indices((7, 5))
    with ProcessGrid(comm) as grid, ProcessGrid(MPI.COMM_SELF) as alone:
        for dtype in STORED:
            x = ((3 * i + j) % 5).astype(dtype)
            A = DistMatrix.from_global(x, grid=alone, block=2)
            for B in (
                A,
                DistMatrix.from_local(x, x.shape, grid=alone, block=2),
                DistMatrix.from_function(lambda i, j: (3 * i + j) % 5, x.shape, grid=alone, dtype=dtype),
                DistMatrix.from_global(x.real.astype(np.int64), grid=alone).astype(dtype),
                (A == A).astype(dtype) * A,
                DistMatrix.from_global(x, root=0, grid=grid, block=2).redistribute(block=3, order="F"),
            ):
                assert B.dtype == dtype
                assert np.array_equal(B.allgather(), x)
            assert np.array_equal(Batch.from_global(x[None], MPI.COMM_SELF).to_global()[0], x)
        with_notes = np.dtype("f8", metadata={"a": 1})
        assert DistMatrix.empty((3, 3), grid=grid, dtype=with_notes).dtype.metadata is None


def doors(grid: Any, path: Path) -> list[Callable[[Any], Any]]:
    """Return calls of all functions with a dtype argument."""
    A = DistMatrix.random((4, 4), grid=grid)
    hdf5.save(path, "x", A)
    shape = (400, 400)  # large enough for shared memory
    return [
        lambda dtype: DistMatrix.empty(shape, grid=grid, dtype=dtype),
        lambda dtype: DistMatrix.zeros(shape, grid=grid, dtype=dtype),
        lambda dtype: DistMatrix.eye(4, grid=grid, dtype=dtype),
        lambda dtype: DistMatrix.random(shape, grid=grid, dtype=dtype),
        lambda dtype: DistMatrix.from_function(lambda i, j: i, shape, grid=grid, dtype=dtype),
        lambda dtype: A.astype(dtype),
        lambda dtype: A.redistribute(dtype=dtype),
        lambda dtype: hdf5.load(path, "x", grid, dtype=dtype),
        lambda dtype: pdgemm(1, A, A, accumulate_dtype=dtype),
    ]


def takers(grid: Any) -> list[Callable[[np.ndarray], Any]]:
    """Return calls of all functions that take a 4 x 4 array; the last two accept any byte order."""
    i, j = DistMatrix.empty((4, 4), grid=grid).indices()
    return [
        lambda x: DistMatrix.from_local(x[np.ix_(i, j)], (4, 4), grid=grid),
        lambda x: Batch.from_local(x[None], grid.comm),
        lambda x: Batch.from_global([x], grid.comm),
        lambda x: DistMatrix.from_global(x, grid=grid),
        lambda x: DistMatrix.from_global(x, grid=grid, root=0),
    ]


def refused(call: Callable[[Any], Any], given: Any, message: str) -> None:
    with pytest.raises(DTypeError, match=message) as caught:
        call(given)
    assert "\n" not in str(caught.value)


@pytest.mark.mpi
def test_other_types_are_refused(comm: Any, tmp_path: Path) -> None:
    with ProcessGrid(comm) as grid, ProcessGrid(MPI.COMM_SELF) as alone:
        for dtype in REFUSED:
            x = np.empty((4, 4), dtype)
            for take in takers(alone)[: None if x.dtype.isnative else 3]:
                refused(take, x, "a matrix can be of bool, int8")
        for door in doors(alone, tmp_path / "alone.h5"):
            for dtype in (*REFUSED, *NO_TYPES):
                refused(door, dtype, ".")
        for door in doors(grid, comm.bcast(tmp_path) / "x.h5"):
            refused(door, "O", "object")
        for take in takers(grid):
            refused(take, np.empty((4, 4), "O"), "got object")
        A = DistMatrix.random((4, 4), grid=grid)
        refused(lambda x: A + x, np.longdouble(1), "got (float128|longdouble)")
        refused(lambda x: A * x, None, "got object")
        refused(lambda x: np.add(A, 1, dtype=x), object, "got object")


def test_whole_numbers_are_scaled_without_rounding() -> None:
    with ProcessGrid(MPI.COMM_SELF) as grid:  # one rank suffices
        i, j = np.indices((7, 5))
        for x_dtype, y_dtype in [*zip(WHOLE, WHOLE), ("uint64", "int64"), ("int64", "int32"), ("uint8", "uint64")]:
            x = ((3 * i + j) % 5 + (2**61 + 1 if x_dtype == "uint64" else 0)).astype(x_dtype)
            y = (2 * i + j).astype(y_dtype)
            X, Y = DistMatrix.from_global(x, grid=grid, block=2), DistMatrix.from_global(y, grid=grid, block=3)
            for alpha, beta in [(3, 0), (2**40 + 1, 2), (-1, -1), (0, 2**33 + 1)]:
                made = X.redistribute(Y.copy(), alpha=alpha, beta=beta)
                exact = alpha * x.astype(object) + beta * y.astype(object)
                size = 8 * (np.dtype(y_dtype).itemsize if y_dtype != "bool" else 4)
                expected = np.array([n % 2**size for n in exact.ravel()], "u8").reshape(x.shape).astype(y_dtype)
                assert np.array_equal(made.allgather(), expected), (x_dtype, y_dtype, alpha, beta)


@pytest.mark.mpi
def test_numbers_of_16_bits_are_scaled_in_single_precision(comm: Any) -> None:
    with ProcessGrid(comm) as grid:
        for dtype in ("float16", "bfloat16"):
            X = DistMatrix.from_function(lambda i, j: 2.0**-14, (5, 5), grid=grid, block=2, dtype=dtype)
            for alpha, beta in ((2.0**17, 0), (0, 2.0**17)):  # float16 would overflow
                assert X.redistribute(X.copy(), alpha=alpha, beta=beta).allclose(8)
            assert X.redistribute(alpha=bfloat16(2)).allclose(2.0**-13)
