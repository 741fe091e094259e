"""Extreme arguments, and matrices of freed grids: one error of one line, equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16

from pdgemm import Batch, DistMatrix, ProcessGrid, balance, linalg, matmul, pdgemm, plan, redistribute, verify
from pdgemm.errors import ArgumentError, DTypeError, GridError, LayoutError, OutOfMemoryError, PdgemmError
from pdgemm.grids.distribution import Distribution
from pdgemm.io import hdf5
from pdgemm.local.arrays.arguments import as_count, shown
from pdgemm.matrix.argument_checks import as_scalar
from pdgemm.support.agreement import _disagreement

LONG = 10**5000  # too large to be printed by Python
NUMBERLESS: list[Any] = [True, 2.0, float("nan"), "2", b"2", 1j, [2], np.array([2, 2]), np.True_, object()]
BEYOND: list[Any] = [2**63, -(2**63) - 1, LONG, -LONG, np.uint64(2**64 - 1)]
LOOKS = {
    "later_report", "nbytes", "real", "block", "device", "dtype", "indices", "itemsize", "local", "ndim", "report",
    "shape", "size", "stored",
}  # on this rank  # fmt: skip
WITHOUT_ARGUMENTS = (
    "H", "T", "mT", "conj", "conjugate", "imag", "transpose", "copy", "diagonal", "trace", "allgather", "to_global",
    "to_blocks", "to_host", "preview", "draw", "checksum", "round", "sum", "mean", "prod", "min", "max", "argmin",
    "argmax", "any", "all", "var", "std", "norm", "vector_norm",
)  # fmt: skip


def one_line(kind: Any, call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    with pytest.raises(kind) as caught:
        call(*arguments, **options)
    assert isinstance(caught.value, PdgemmError)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_alpha_is_finite_in_the_type_of_the_arithmetic() -> None:
    for given, dtype, number in [
        (2, "f8", 2.0),
        (np.array(3), "f4", 3.0),
        (np.array(2, bfloat16), "f8", 2.0),
        (bfloat16(2), "i4", 2),
        (True, "f4", 1.0),
        (Fraction(1, 2), "f8", 0.5),
        (1e300, "f8", 1e300),
        (1e5, "f2", 1e5),  # multiplied in float32
        (np.inf, "f4", np.inf),
        (-np.inf, "F", complex(-np.inf)),
        (np.longdouble("inf"), "f8", np.inf),
        (2**40, "i4", 0),
        (2**40, "i8", 2**40),
        (2**64 + 5, "u8", 5),
        (1e38 * 3j, "F", 3e38j),
    ]:
        got = as_scalar(given, np.dtype(dtype), "alpha")
        assert got == number and type(got) is type(number)
    for nan in (np.nan, np.float16(np.nan), Decimal("NaN"), np.array(np.nan)):
        assert np.isnan(as_scalar(nan, np.dtype("f4"), "alpha"))
    for dtype in ("f2", "bfloat16", "f4", "f8", "F", "D", "i4", "i8"):
        for given in (10**400, -(10**400), LONG, Fraction(10**400), Decimal("1e400"), np.longdouble("1e4000")):
            one_line(ArgumentError, as_scalar, given, np.dtype(dtype), "alpha")
        for no_number in ("1", None, [1], np.array([1, 2]), np.ma.masked, np.array("1"), object(), np.array(None)):
            one_line(DTypeError, as_scalar, no_number, np.dtype(dtype), "alpha")
    for dtype in ("f2", "bfloat16", "f4", "F"):
        for given in (1e300, -1e39, 10**39, np.float64(1e300)):
            one_line(ArgumentError, as_scalar, given, np.dtype(dtype), "alpha")
    one_line(ArgumentError, as_scalar, 1e300j, np.dtype("F"), "alpha")


def test_layouts_are_of_whole_numbers_of_64_bits() -> None:
    for wrong in (*NUMBERLESS, *BEYOND):
        for arguments in (
            ((wrong, 2), 2, (0, 0)),
            ((2, wrong), 2, (0, 0)),
            ((2, 2), (2, wrong), (0, 0)),
            ((2, 2), 2, (0, wrong)),
        ):
            one_line(ArgumentError, Distribution.over, (2, 2), *arguments)
    for negative in (-1, -(2**63)):
        one_line(LayoutError, Distribution.over, (2, 2), (negative, 2))
        one_line(LayoutError, Distribution.over, (2, 2), (2, 2), negative)
        one_line(LayoutError, Distribution.over, (2, 2), (2, 2), 2, (negative, 0))
    for no_pair in (5, None, (1,), (1, 2, 3), object()):
        one_line(LayoutError, Distribution.over, (2, 2), no_pair)
        one_line(LayoutError, Distribution.over, (2, 2), (2, 2), 2, no_pair)
    made = Distribution.over((2, 2), np.array([4, 6]), (np.int8(2), None), [np.uint64(1), 0])
    assert (made.shape, made.block, made.source) == ((4, 6), (2, 3), (1, 0))
    assert Distribution.over((2, 2), (4, 6), 2**63 - 1).block == (2**63 - 1,) * 2


def test_values_are_shown_in_one_short_line() -> None:
    assert shown("x") == "'x'"
    for value in (LONG, [LONG], "x" * 1000, np.zeros((9, 9)), -LONG):
        assert len(shown(value)) < 80 and "\n" not in shown(value)
    one_line(ArgumentError, as_count, LONG, "it", 0)


@pytest.mark.mpi
def test_counts_beyond_all_bounds(comm: Any, grid: Any) -> None:
    A = DistMatrix.random((6, 6), grid=grid, block=2)
    doors: list[Callable[[Any], Any]] = [
        lambda x: DistMatrix.empty((6, 6), grid=grid, block=x),
        lambda x: DistMatrix.random((6, 6), grid=grid, seed=x),
        lambda x: A.redistribute(source=(0, x)),
        lambda x: A.redistribute(memory_limit=x),
        lambda x: A.norm(x + x),  # the 2-norm is supported
        lambda x: pdgemm(1, A, A, lookahead=x),
        lambda x: pdgemm(1, A, A, panel_width=x),
        lambda x: pdgemm(1, A, A, memory_limit=x),
        lambda x: pdgemm(1, A, A, shape=(x, 1)),
        lambda x: verify(A, 1, A, A, vectors=x),
        lambda x: verify(A, 1, A, A, seed=x),
    ]
    for door in doors:
        for wrong in (2.0, LONG, np.array([2, 2])):
            one_line((ArgumentError, LayoutError), door, wrong)
    one_line(ArgumentError, doors[0], LONG if comm.rank == 0 else 2)  # on one rank only
    for huge in (2**62, 2**63 - 1):
        C = pdgemm(1, A, A, lookahead=huge, panel_width=huge, memory_limit=huge)
        D = A.redistribute(block=(huge, 3)) @ A.redistribute(block=(2, huge))
        assert np.allclose(C.allgather(), D.allgather())
        one_line(OutOfMemoryError, DistMatrix.zeros, (huge, 1), grid=grid, block=huge)
        one_line(OutOfMemoryError, DistMatrix.zeros, (huge, 0), grid=grid)
    one_line(OutOfMemoryError, DistMatrix.zeros, (2**40, 2**40), grid=grid)
    assert DistMatrix.zeros((2**40, 0), grid=grid).size == 0
    one_line(ArgumentError, balance, [(2, 2, 2)], 2.0)
    sizes = [(2, 2, 2), (0, 2, 2), (3, 3, 3)]
    assert np.array_equal(balance(sizes, 2**62), balance(sizes, 4))
    for key in ("x", ("x", 1), (slice("x"), slice(None)), A, LONG):
        one_line(ArgumentError, A.__getitem__, key)
    assert A[:LONG, -LONG:].shape == (6, 6)
    for scale in (lambda: pdgemm(10**400, A, A), lambda: A.redistribute(alpha=LONG), lambda: A * 10**400):
        one_line(ArgumentError, scale)


@pytest.mark.mpi
def test_nothing_is_done_with_matrices_of_a_freed_grid(comm: Any, tmp_path: Path) -> None:
    path = comm.bcast(tmp_path) / "x.h5"
    with ProcessGrid(comm) as other:  # another grid of the same ranks still exists
        grid = ProcessGrid(comm)
        A, X, Y = (DistMatrix.random((6, 6), grid=where, block=2) for where in (grid, other, other))
        makers = DistMatrix.zeros, DistMatrix.eye, DistMatrix.random
        view, conjugate, product = A[1:, 1:].T, A.astype("complex64").H, A @ X
        p = plan(X, Y, X.copy())
        prepared = [plan(*abc).prepare(*abc) for abc in ((A, Y, X.copy()), (Y, A, X.copy()), (X, Y, A))]
        before = A.local.copy()
        grid.free()
        methods: dict[str, tuple[Any, ...]] = dict.fromkeys(WITHOUT_ARGUMENTS, ())
        methods |= {"allclose": (A,), "astype": ("f4",), "layout_in": (other,), "redistribute": (X,)}
        methods |= {"rmatvec": (np.ones(6),), "take": ([0], 0), "cumsum": (0,), "dot": (X,), "clip": (0, 1)}
        methods |= {
            "same_layout": (X,),
            "to_device": ("host",),
            "matvec": (np.ones(6),),
            "fill": (1,),
            "tensor": ((6, 6),),
        }
        own = (vars(cls) for cls in DistMatrix.__mro__ if cls.__module__.startswith("pdgemm."))
        public = {name for names in own for name, kind in names.items() if not isinstance(kind, classmethod)}
        assert {name for name in public if not name.startswith("_")} - LOOKS == set(methods)
        uses: list[Callable[[], Any]] = [
            lambda name=name, given=given: getattr(A, name)(*given) if callable(getattr(A, name)) else None
            for name, given in methods.items()
        ]
        uses += [
            *prepared,
            *(lambda each=each: each(check=False) for each in prepared),
            lambda: A[1:, 1:],
            lambda: A.__setitem__((slice(None), slice(None)), 1),
            lambda: X.__setitem__((slice(None), slice(None)), A),
            lambda: A + 1,
            lambda: X + A,
            lambda: A.__iadd__(1),
            lambda: np.add(X, 1, out=A),
            lambda: np.isnan(view),
            lambda: conjugate.norm(),
            lambda: X.allclose(A),
            lambda: A @ X,
            lambda: pdgemm(1, X, Y, 0, A),
            lambda: pdgemm(1, X, A, check=False),
            lambda: p.execute(X, Y, A),
            lambda: p.prepare(X, A, Y),
            lambda: plan(X, A),
            lambda: redistribute(A, X, check=False),
            lambda: redistribute(X, grid=grid),
            lambda: verify(X, 1, Y, Y, 1, A),
            lambda: verify(A, 1, X, Y),
            lambda: hdf5.save(path, "x", A),
            lambda: hdf5.load(path, "x", grid),
            lambda: grid.work_grid(grid.shape, 1, grid.rank_map),
            lambda: grid.same_as(other),
            lambda: grid.rank_map_in(other),
            *(lambda make=make: make((3, 3), grid=grid) for make in makers),
            lambda: DistMatrix.from_global(np.ones((3, 3)), grid=grid),
            lambda: DistMatrix.from_local(before, (6, 6), grid=grid, block=2),
        ]
        for use in uses:
            with pytest.raises(GridError, match="grid has been freed") as caught:
                use()
            assert "\n" not in str(caught.value)
        assert not path.exists()
        assert np.array_equal(A.local, before)  # local arrays may still be read
        assert "6 x 6" in repr(A) and product.report and view.shape == (5, 5)
        assert np.allclose((X @ Y).allgather(), X.allgather() @ Y.allgather())


@pytest.mark.mpi
@pytest.mark.on_ranks(4)
def test_messages_of_common_mistakes_name_the_remedy(comm: Any, grid: Any) -> None:
    def imatmul(X: Any, Y: Any) -> None:
        X @= Y

    backward = ProcessGrid(comm, ranks=range(comm.size)[::-1])
    A, B = DistMatrix.eye((60, 50), grid=grid), DistMatrix.eye((50, 40), grid=grid)
    S, F = (DistMatrix.eye(50, grid=grid, order=kept) for kept in ("C", "F"))
    whole = np.eye(60)
    other = DistMatrix.eye(50, grid=backward)
    planned = plan(S.copy(), S.copy(), S.copy())
    order = r"alpha must be a number, got DistMatrix; the arguments are pdgemm\(alpha, A, B\), or matmul\(A, B\)"
    rank = r"position \(0, 0\) of the grid is rank (0 in one, 3|3 in one, 0) in the other"
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: pdgemm(A, B), order),  # type: ignore[call-arg, arg-type]
        (lambda: pdgemm(A, B, 1.0), order),  # type: ignore[arg-type]
        (lambda: pdgemm(1, A), "B must be a DistMatrix, got NoneType"),  # type: ignore[call-arg]
        (lambda: pdgemm(1, whole, A), r"A must be a DistMatrix, got ndarray; DistMatrix.from_global\(A, gri"),
        (lambda: matmul(A, 3), "B must be a DistMatrix, got int$"),  # type: ignore[arg-type]
        (lambda: imatmul(F, F.copy()), "C shares memory with A, which is read .* A = A @ B in place of A @= B"),
        (lambda: A + A.T, "60 x 50 .*and 50 x 60 .*cannot be broadcast to one shape$"),
        (lambda: A.allclose(B), "60 x 50 .*and 50 x 40 .*cannot be broadcast to one shape$"),
        (lambda: planned.execute(other, F, F.copy()), f"A is .*the plan was made for .*; {rank}$"),
        (lambda: planned.execute(S, F, F.copy()), "B is .*; the order of the local arrays is 'F' in one, 'C' in"),
        (lambda: ProcessGrid((2, 2)), r"a communicator, got \(2, 2\); the shape of a grid is shape=\(Pr, Pc\)"),  # type: ignore[arg-type]
        (lambda: DistMatrix.random((4, 4), grid=grid, seed=comm.rank), "rank 0: DistMatrix.random, seed=0; rank 1"),
    ]  # fmt: skip
    for call, message in cases:
        with pytest.raises(PdgemmError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value) and caught.value.__cause__ is None
        assert caught.value.__suppress_context__ or caught.value.__context__ is None
    backward.free()


def test_errors_name_only_some_of_many_different_calls() -> None:
    text = _disagreement([f"f, seed={rank}" for rank in range(1000)])
    assert text.endswith("; rank 3: f, seed=3; and 996 others") and len(text) < 200


def test_the_signature_of_pdgemm() -> None:
    required = [name for name, x in signature(pdgemm).parameters.items() if x.default is Parameter.empty]
    assert required == ["alpha", "A", "B"]


@pytest.mark.mpi
@pytest.mark.on_ranks(4)
def test_arrays_that_differ_among_the_ranks_are_no_matrix(comm: Any, grid: Any) -> None:
    """Arrays with other random numbers on each rank, a common mistake, are refused; memory orders may differ."""
    whole = np.arange(30.0).reshape(6, 5)
    there = np.asfortranarray(whole) if comm.rank % 2 else whole[:, :].astype(">f8")
    A = DistMatrix.from_global(there, grid=grid)
    assert np.array_equal(A.allgather(), whole)
    other = whole.copy()
    other[5, 4] += 1e-12 * (comm.rank == 2)
    wrong: list[Any] = [
        lambda: DistMatrix.from_global(np.random.default_rng(comm.rank).random((30, 20)), grid=grid),
        lambda: DistMatrix.from_global(other, grid=grid, block=2),
        lambda: A @ other.T,
        lambda: Batch.from_global([whole, other[4:]], comm),
        lambda: A @ other[5],
        lambda: linalg.solve(A[:5], other[1:, 4]),
    ]
    for use in wrong:
        with pytest.raises(ArgumentError, match="different arguments.*elements of checksum"):
            use()
    with pytest.raises(ArgumentError, match=r"with root=0, those of rank 0 are distributed"):
        DistMatrix.from_global(other, grid=grid)
    B = DistMatrix.from_global(other, grid=grid, check=False)
    mixed = comm.allgather(np.array_equal(B.local, other[np.ix_(*B.indices())]))
    assert mixed == [True] * 4  # check=False: each rank's elements are its own
    alone = DistMatrix.from_global(other, grid=grid, root=2).allgather()
    assert np.array_equal(alone, other) == (comm.rank == 2)
    with pytest.raises(ArgumentError, match="different arguments.*check="):
        DistMatrix.from_global(whole, grid=grid, check=comm.rank > 0)
    with pytest.raises(ArgumentError, match="different arguments"):  # also if there are few elements to compare
        DistMatrix.from_global(np.zeros((0, 2 + comm.rank)), grid=grid)
