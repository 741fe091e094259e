"""The namespace of the array API: creation, types, conversions and reductions of distributed arrays, as NumPy's."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tiers

import pdgemm
import pdgemm.array_api as xp
from pdgemm import DistMatrix
from pdgemm.errors import ArgumentError, LayoutError, PdgemmError

pytestmark = [pytest.mark.mpi, tiers.every_grid]


@pytest.fixture(autouse=True)
def default(grid: Any) -> Any:
    """The grid of arrays that name no other one."""
    pdgemm.set_default_grid(grid)
    yield grid
    pdgemm.set_default_grid(None)


def check(x: Any, expected: Any, where: Any = "") -> None:
    """Compare an array with NumPy's; it is distributed, whatever its number of axes."""
    expected = np.asarray(expected)
    assert type(x) is xp.Array, where
    assert (x.shape, x.dtype) == (expected.shape, expected.dtype), where
    assert np.allclose(x.allgather(), expected, equal_nan=True), where


def test_new_arrays_are_on_the_default_grid_and_divided(default: Any) -> None:
    x = xp.arange(1000)
    assert x.grid.base.same_as(default) or x.grid.members == default.rank_map
    most = 1 if default.idle else -(-1000 // len(default.members))
    assert x.local.size <= most or default.idle
    assert xp.sum(xp.ones((6, 7)), axis=0).local.size <= (-(-7 // len(default.members)) if not default.idle else 0)
    assert repr(x).startswith("Array(1000, axes")  # local: one rank may print


def test_creation(default: Any) -> None:
    draw = random.Random(2)
    for _ in range(30):
        start, stop, step = draw.randint(-9, 9), draw.randint(-9, 9), draw.choice((-3, -1, 1, 2, 5))
        check(xp.arange(start, stop, step), np.arange(start, stop, step), (start, stop, step))
        start, step = start / 4, step / 4
        check(xp.arange(start, stop, step), np.arange(start, stop, step), (start, stop, step))
        num, endpoint = draw.randint(0, 9), draw.random() < 0.5
        check(xp.linspace(start, stop, num, endpoint=endpoint), np.linspace(start, stop, num, endpoint))
        shape, k = (draw.randint(0, 5), draw.randint(0, 5)), draw.randint(-6, 6)
        check(xp.eye(*shape, k=k), np.eye(*shape, k=k))
        value, dtype = draw.choice(((True, None), (3, None), (2.5, "float32"), (1j, None), (200, "uint8")))
        check(xp.full(shape, value, dtype=dtype), np.full(shape, value, dtype=dtype))
        check(xp.full_like(xp.eye(*shape), 7, dtype=xp.int16), np.full(shape, 7, np.int16))
    check(xp.arange(2**63, 2**64 - 1, 2**61, dtype=xp.uint64), np.arange(2**63, 2**64 - 1, 2**61, dtype=np.uint64))
    check(xp.arange(-(2**63), 2**63 - 1, 2**62), np.arange(-(2**63), 2**63 - 1, 2**62))
    check(xp.linspace(0, 1 + 1j, 4), np.linspace(0, 1 + 1j, 4))
    arrays = xp.arange(3), xp.arange(4.0), xp.arange(2)
    for indexing in ("xy", "ij"):
        for one, expected in zip(
            xp.meshgrid(*arrays, indexing=indexing), np.meshgrid(*(x.allgather() for x in arrays), indexing=indexing)
        ):
            check(one, expected)
    assert xp.empty((3, 0), dtype=xp.int8).shape == xp.empty_like(xp.zeros((3, 0))).shape == (3, 0)


def test_asarray_shares_or_copies(default: Any) -> None:
    M = DistMatrix.from_function(lambda i, j: i + j, (5, 4), grid=default)
    x = xp.asarray(M, copy=False)
    x += 1
    assert np.allclose(M.allgather(), x.allgather())  # the same elements
    y = xp.asarray(x, copy=True)
    y += 1
    assert not np.allclose(x.allgather(), y.allgather())
    assert xp.asarray(x).unfolding is x.unfolding
    assert xp.reshape(x, (20,), copy=True).unfolding is not x.unfolding
    check(xp.asarray([[x[0, 1], 2.0], [3, x[1, 1]]]), [[2.0, 2.0], [3.0, 3.0]])  # numbers and arrays
    check(xp.asarray([2**63, 1], dtype=xp.uint64), np.array([2**63, 1], np.uint64))
    for bad in (lambda: xp.asarray([1, 2], copy=False), lambda: xp.asarray(x, dtype=xp.int8, copy=False)):
        with pytest.raises(ArgumentError):
            bad()


def test_types_are_promoted_by_the_standard() -> None:
    for scalar in (True, 3, 2.5, 1j):
        for x, y in (
            (xp.ones(3, dtype=d), np.ones(3, d.name)) for d in xp.__array_namespace_info__().dtypes().values()
        ):
            if np.result_type(y, scalar) == y.dtype and y.dtype != bool:  # Python's numbers take the type of the array
                check(x * scalar, y * scalar)
                check(scalar - x, scalar - y)
    check(xp.asarray(1, dtype=xp.int8) + xp.ones(2, dtype=xp.int16), np.full(2, 2, np.int16))
    check(xp.asarray(1.0) * xp.ones(2, dtype=xp.float32), np.ones(2))  # an array without axes is an array
    assert xp.result_type(xp.ones(2, dtype=xp.int8), xp.uint8, 3) == xp.int16
    assert xp.finfo(xp.ones(1, dtype=xp.complex64)).bits == 32 and xp.iinfo(xp.int8).max == 127
    x = xp.arange(3)
    x *= 2
    check(x, [0, 2, 4])
    with pytest.raises(TypeError):
        x += 0.5


def test_numbers_are_on_every_rank() -> None:
    x = xp.asarray([[1.5, -2.0], [0.0, 4.0]])
    assert (float(xp.sum(x)), bool(xp.any(x < 0)), int(xp.sum(x > 0)), complex(xp.max(x))) == (3.5, True, 2, 4)
    assert [10, 20, 30][xp.asarray(1)] == 20
    cases: tuple[Callable[[], Any], ...] = (lambda: float(x), lambda: bool(x), lambda: float(xp.asarray(1j)))
    for case in (*cases, lambda: [1, 2][xp.asarray(1.0)]):
        with pytest.raises(TypeError):
            case()
    with pytest.raises(ValueError, match="NaN"):
        int(xp.asarray(xp.nan))


def test_reductions(default: Any) -> None:
    draw, act = random.Random(4), {"sum": np.sum, "prod": np.prod, "min": np.min, "max": np.max, "all": np.all}
    for turn in range(12):
        shape = tuple(draw.randint(1, 5) for _ in range(draw.randint(0, 4)))
        y = (np.random.default_rng(turn).normal(size=shape) * 3).astype(draw.choice(("int8", "float32", "uint16")))
        x = xp.asarray(y)
        axis = draw.choice((None, tuple(a for a in range(len(shape)) if draw.random() < 0.5)))
        for name, expected in act.items():
            check(getattr(xp, name)(x, axis=axis, keepdims=turn % 2 == 0), expected(y, axis, keepdims=turn % 2 == 0))
        for dtype in (xp.int8, xp.float64):
            check(xp.sum(x, axis=axis, dtype=dtype), np.sum(y, axis, dtype))
        if y.dtype == np.float32:
            n = math.prod(shape[a] for a in range(len(shape)) if axis is None or a in axis)
            check(xp.var(x, axis=axis, correction=0.5), np.var(y, axis, ddof=0.5), n)
            check(xp.std(x, axis=axis), np.std(y, axis))
            check(xp.mean(x, axis=axis), np.mean(y, axis))
    check(xp.clip(xp.arange(6), 1, xp.asarray([3, 4, 5, 1, 2, 9])), np.clip(np.arange(6), 1, [3, 4, 5, 1, 2, 9]))
    check(xp.where(xp.asarray([True, False]), xp.arange(2.0), 7), [0.0, 7.0])
    check(xp.where(xp.asarray([True, False, True]))[0], [0, 2])


def test_a_product_in_place_writes_the_array_itself() -> None:
    x = same = xp.asarray([[1.0, 2.0], [3.0, 4.0]])
    x @= x
    assert x is same
    check(same, [[7.0, 10.0], [15.0, 22.0]])
    with pytest.raises(LayoutError, match=r"\(2, 1\)"):
        x @= xp.ones((2, 1))


def test_an_outer_product_keeps_the_signs_of_zeros() -> None:
    outer = xp.linalg.outer(xp.asarray([-0.0, 2.0]), xp.asarray([1.0, -0.0, 0.0]))
    assert np.array_equal(xp.signbit(outer).allgather(), [[True, False, True], [False, True, False]])
    with pytest.raises(LayoutError, match="vectors"):
        xp.linalg.outer(xp.ones((2, 2)), xp.ones(2))


def test_other_libraries_read_the_array_of_one_rank(comm: Any) -> None:
    x = xp.asarray([[1.0, 2.0]])
    check(xp.from_dlpack(np.arange(4)), np.arange(4))
    check(xp.from_dlpack(x), [[1.0, 2.0]])
    assert x.__dlpack_device__() == (1, 0) and x.__array_namespace__() is xp
    if comm.size == 1:
        there = np.from_dlpack(x)
        x += 1
        assert np.array_equal(there, [[2.0, 3.0]])  # in place
        assert np.array_equal(np.asarray(x, dtype=int), [[2, 3]])
    else:
        with pytest.raises(BufferError, match="allgather"):
            np.from_dlpack(x)
        assert np.array_equal(np.asarray(x, dtype=int), [[1, 2]])  # a vector is gathered
        with pytest.raises(TypeError, match="allgather"):
            np.asarray(xp.ones((2, 2)))


def test_errors_are_those_of_all_ranks(comm: Any) -> None:
    x = xp.ones((2, 3))
    cases: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: xp.reshape(x, (7,)), LayoutError, r"\(2, 3\)"),
        (lambda: x + xp.ones((4, 3)), LayoutError, r"\(4, 3\)"),
        (lambda: xp.asarray([comm.rank]), ArgumentError, "rank 0"),
        (lambda: xp.full((2,), 300, dtype=xp.uint8), OverflowError, "300"),
        (lambda: xp.zeros((2,), dtype="text"), PdgemmError, "text"),
        (lambda: xp.ones(3).mT, ArgumentError, "two axes"),
        (lambda: x.to_device("host", stream=1), ArgumentError, "stream"),
        (lambda: xp.meshgrid(xp.ones(2), indexing="yx"), ArgumentError, "yx"),
        (lambda: xp.tril(xp.ones(3)), ArgumentError, "two axes"),
        (lambda: x.__array_namespace__(api_version="2019.1"), ArgumentError, "2019.1"),
    ]
    for case, kind, text in cases:
        if text != "rank 0" or comm.size > 1:
            with pytest.raises(kind, match=text):
                case()
