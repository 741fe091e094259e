"""NumPy's and Python's functions of a DistMatrix: the right result, or an error on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import scipy.sparse
from problems import grid_shapes
from scipy.special import erf, sici, xlogy

from pdgemm import Batch, DistMatrix, ProcessGrid
from pdgemm.errors import ArgumentError, DTypeError

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore")]

# beginnings of names of functions that read no array, set options, open files or leave elements unset
NOT_CALLED = ("set", "get", "show", "print", "save", "load", "from", "gen", "test", "info", "busday", "empty")
NEVER_ASK = ("bmat", "iterable")  # functions that return None for other types, or only whether x is iterable
DECOMPOSITIONS = ("svd", "eigh", "qr", "lstsq")  # results are not unique: tested in test_linalg_*.py
SCALARS: list[Any] = [2, 2.0, -1, 2**70, 1e300, 1j, True, np.float32(1), np.array(3.0), np.longdouble(1), None, "x"]
SCALARS += [np.datetime64(1, "s"), np.timedelta64(1, "s"), object(), np.void(b"1"), np.ma.masked, np.int8(1)]


def functions(*modules: Any) -> Iterator[Callable[..., Any]]:
    for module in modules:
        for name, function in sorted(vars(module).items()):
            plain = callable(function) and not isinstance(function, (type, np.ufunc))
            if plain and name not in {*NEVER_ASK, *DECOMPOSITIONS} and not name.startswith(("_", *NOT_CALLED)):
                yield function


def ufuncs() -> list[np.ufunc]:
    found = dict.fromkeys(x for x in vars(np).values() if isinstance(x, np.ufunc))
    return [*found, erf, sici, xlogy, np.frompyfunc(lambda x: x, 1, 1)]


def tried(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return the result of a call, or its exception."""
    try:
        made = call(*arguments, **options)
        return list(made) if isinstance(made, Iterator) else made
    except Exception as bad:
        return bad


def dealt(x: np.ndarray, **layout: Any) -> Any:
    """Return the matrix of an array; `gathered` finds the array again."""
    made: Any = DistMatrix.from_global(x, **layout)
    made.whole = x
    return made


def gathered(x: Any) -> Any:
    """Restore the elements of a matrix that `dealt` made; return its array."""
    if hasattr(x, "whole"):
        x.local[...] = x.whole[np.ix_(*x.indices())]
        return x.whole.copy()
    return list(map(gathered, x)) if isinstance(x, list) else x


def outcome(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """Return how a call with matrices compares with the same call with arrays: right, wrong, or its exception."""
    wholes = list(map(gathered, arguments))
    got = tried(call, *arguments, **options)
    if isinstance(got, Exception):
        return type(got).__name__
    expected = tried(call, *wholes, **options)
    if isinstance(expected, Exception):  # NumPy took an argument for a dtype
        assert not isinstance(got, DistMatrix)
        return "no matrix"
    if isinstance(got, DistMatrix):
        assert got.local.shape == got.distribution.local_shape(got.grid.coords)
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        got, expected = got.local, expected[np.ix_(*got.indices())]
    if getattr(call, "__module__", "") == "numpy.linalg":  # rounding errors differ
        np.testing.assert_allclose(got, expected, 1e-9, err_msg=str(call))
    else:
        np.testing.assert_equal(got, expected, str(call))
    return "right"


def middle_grid(comm: Any) -> Any:
    shapes = grid_shapes(comm.size)
    return ProcessGrid(comm, shapes[len(shapes) // 2])


def alike(comm: Any, outcomes: list[str]) -> None:
    """Check that outcomes are equal on all ranks."""
    for there in comm.allgather(outcomes):
        assert there == outcomes


def test_a_function_of_numpy_is_right_or_refused(comm: Any) -> None:
    x = np.random.default_rng(1).integers(1, 9, (3, 6, 6)).astype(float)
    with middle_grid(comm) as grid:
        A, B, C = (dealt(whole, grid=grid, block=2) for whole in x)
        outcomes = [
            outcome(function, *arguments)
            for function in functions(np, np.linalg)
            for arguments in ((A,), (A, B), (A, 2), ([A, B],), (A, B, C))
        ]
        others = np.fft, np.ma, np.strings, np.lib.stride_tricks, np.lib.array_utils
        outcomes += [outcome(function, *x) for function in functions(*others) for x in ((A,), (A, B))]
        alike(comm, outcomes)
        for looks in (np.shape, np.ndim, np.size, np.result_type, np.iscomplexobj, np.common_type):
            assert outcome(looks, A) == "right"
        assert outcome(np.linalg.matmul, A, B) == "right"


def test_missing_methods_of_arrays_name_an_alternative(comm: Any) -> None:
    with middle_grid(comm) as grid:
        A = DistMatrix.random((6, 6), grid=grid, block=2)
        missing = [name for name in dir(np.ndarray) if not name.startswith("_") and not hasattr(A, name)]
        assert {"flatten", "tolist", "sort"} <= {*missing}
        for name in missing:
            with pytest.raises(AttributeError, match=rf"^{name} is not available .*A.allgather\(\)$"):
                getattr(A, name)
        for name in ("to_numpy", "gather"):  # methods of other libraries
            with pytest.raises(AttributeError, match=rf"^a DistMatrix has no method {name}: use .*.allgather\(\)$"):
                getattr(A, name)
        with pytest.raises(AttributeError, match="^a DistMatrix has no attribute 'shap'"):
            A.shap  # noqa: B018
        for name, call in (("zeros", lambda: type(A).zeros()), ("max", lambda: A.max(of=1))):
            with pytest.raises(TypeError, match=rf"^DistMatrix.{name}\(\) "):  # not the defining class
                call()


def test_a_ufunc_is_right_or_refused(comm: Any) -> None:
    with middle_grid(comm) as grid:
        for dtype, scalars in ("float64", SCALARS), ("int32", SCALARS[::3]), ("bool", [2]), ("complex64", [2]):
            x, y = ((np.arange(36).reshape(6, 6) * step % 5 - 1).astype(dtype) for step in (1, 3))
            A, B, other = (dealt(whole, grid=grid, block=3) for whole in (x, y, y[:, 1:]))
            outcomes = []
            for ufunc in ufuncs():
                for others in [(B,), (other,), *zip(scalars)] if ufunc.nin == 2 else [(B,) * (ufunc.nin - 1)]:
                    outcomes += [outcome(ufunc, A, *others), outcome(ufunc, *others, A)]
            alike(comm, outcomes)
            assert outcome(np.add, A, B) == outcome(np.isfinite, A) == outcome(np.multiply, 2, A) == "right"


def test_other_than_elementwise_ufuncs_are_refused(grid: Any) -> None:
    A, B, C = (dealt(np.random.default_rng(seed).random((6, 6)), grid=grid, block=2) for seed in range(3))
    mask = A > B
    before = C.allgather()
    for options in (
        {"where": mask, "out": C},
        {"where": False, "out": C},
        {"axis": 0},
        {"axes": [(0,), (0,), (0,)]},
        {"keepdims": True},
        {"order": "F"},
        {"subok": False},
        {"signature": "dd->d"},
        {"dtype": object},
        {"dtype": np.longdouble},
        {"out": C, "dtype": "complex128"},
        {"out": (C, C)},
    ):
        for ufunc in (np.add, np.matmul):
            with pytest.raises((TypeError, ValueError)) as caught:
                ufunc(A, B, **options)  # type: ignore[call-overload]
            assert "\n" not in str(caught.value)
    for ufunc in ufuncs():
        for method, arguments in {
            "reduce": (A,),
            "accumulate": (A,),
            "outer": (A, B),
            "at": (A, [0], 1),
            "reduceat": (A, [0]),
        }.items():
            assert isinstance(tried(getattr(ufunc, method), *arguments), Exception)
    assert np.array_equal(C.allgather(), before)
    assert outcome(np.add, A, B, dtype="float32", casting="same_kind") == "right"
    assert np.add(A, B, out=C) is C
    assert np.array_equal(C.allgather(), A.allgather() + B.allgather())


def test_numbers_that_a_ufunc_refuses_on_one_rank_are_refused_on_all(grid: Any) -> None:
    A = DistMatrix.from_function(lambda i, j: np.where(i + j == 0, -1, 2), (6, 6), grid=grid, block=1, dtype=int)
    empty = A[:1, :1]  # a view without elements on other ranks
    for power in (lambda: 2**A, lambda: A**A, lambda: A**-1, lambda: empty**-1):
        with pytest.raises(ValueError, match="negative integer powers"):
            power()
    assert (2 ** A[1:, :]).allclose(4)
    with np.errstate(invalid="raise"), pytest.raises(FloatingPointError):
        np.sqrt(A)


def test_a_conjugated_view_is_not_written_to_by_a_ufunc(grid: Any) -> None:
    A = DistMatrix.random((6, 6), grid=grid, dtype="complex128")
    with pytest.raises(ArgumentError, match="conjugate of another matrix"):
        np.add(A.H, 1, out=A.H)


def test_subclasses_of_arrays(comm: Any, grid: Any) -> None:
    """Subclasses that only extend an array are accepted; others, whose data would be lost, are refused."""
    x = np.arange(12.0).reshape(3, 4)
    for same in (x.view(np.recarray), x.tolist()):
        assert np.array_equal(DistMatrix.from_global(same, grid=grid).allgather(), x)
    A = DistMatrix.from_global(x, grid=grid)
    with pytest.raises(DTypeError, match="whose mask would be lost"):
        DistMatrix.from_function(lambda i, j: np.ma.array(i + j, mask=i > j), (9, 9), grid=grid)
    for operate in (lambda y: A + y, lambda y: y + A, lambda y: A @ y, lambda y: y @ A, lambda y: A * y):
        for y in (scipy.sparse.csr_array(x), np.asmatrix(x), np.ma.array(x, mask=x > 3)):
            assert isinstance(tried(operate, y), (TypeError, ValueError))
    batch = Batch.from_global(x[None], comm)
    for use in (np.asarray, np.sum, lambda b: np.array_equal(b, b), lambda b: np.add(b, 1)):
        assert isinstance(tried(use, batch), TypeError) or use(batch) is False
