"""Keys of tensors and of arrays: indices, slices, masks and arrays of indices, read and set, compared with NumPy."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import tiers
from drawn_tensors import drawn_key, elements, tensor_of

from pdgemm import DistTensor
from pdgemm.array_api import Array
from pdgemm.errors import ArgumentError, DTypeError, KeyIndexError, LayoutError
from pdgemm.tensors.indexing import tensor_lines

pytestmark = [pytest.mark.mpi, tiers.every_grid]


def drawn_shape(draw: random.Random, most: int = 4) -> tuple[int, ...]:
    return tuple(draw.choice((0, 1, 2, 3, 5, 8)) for _ in range(draw.randint(0, most)))


def some(draw: random.Random, shape: tuple[int, ...], often: float = 0.2) -> tuple[int, ...]:
    """Return a shape that is broadcast to this one."""
    return tuple(1 if draw.random() < often else n for n in shape)[draw.choice((0, 0, 0, len(shape) // 2)) :]


def key_of_arrays(draw: random.Random, shape: tuple[int, ...]) -> Any:
    """Return a mask of the first axes, or a key with arrays of indices, masks, indices, slices and new axes."""
    source = np.random.default_rng(draw.randrange(1 << 30))
    if draw.random() < 0.4:
        return np.asarray(source.random(shape[: draw.randint(0, len(shape))]) < 0.5)
    key, common = list[Any](), tuple(draw.randint(0, 4) for _ in range(draw.randint(1, 2)))
    for n in shape[: draw.randint(0, len(shape))]:
        kind = draw.randrange(5)
        if kind < 2 and n:
            key.append(source.integers(-n, n, some(draw, common, 0.3) or (1,)).astype(draw.choice(("int64", "int8"))))
        elif kind == 2 and n:
            key.append(draw.randrange(-n, n))
        else:
            key.append(slice(draw.choice((None, 1, -2)), None, draw.choice((None, 2, -1))))
    key[draw.randint(0, len(key)) : 0] = [None] * draw.choice((0, 0, 1))
    return (*key, ...) if draw.random() < 0.3 else tuple(key)


def check(result: Any, expected: Any, what: Any) -> None:
    expected = np.asarray(expected)
    assert result.shape == expected.shape, what
    assert result.dtype == expected.dtype, what
    if isinstance(result, DistTensor):
        if result.ndim and result.local.size:
            assert np.array_equal(result.local, expected[np.ix_(*result.indices())]), what
        assert result.report is None or result.report.counted == result.report.predicted, what
        result = result.allgather()
    assert np.array_equal(result, expected), what


@pytest.mark.parametrize("seed", range(2))
def test_drawn_keys(grids: list[Any], seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed:  # a rank fetches a few elements at a time
        monkeypatch.setattr("pdgemm.tensors.indexing.tensor_lines.BATCH", 3)
    for turn in range(200 if tiers.everything() else 50 if grids[0].comm.size < 3 else 20):
        draw = random.Random(1000 * seed + turn)
        grid, kind = draw.choice(grids), draw.choice((DistTensor, Array))

        def tensor(x: Any, draw: Any = draw, grid: Any = grid, kind: Any = kind) -> Any:
            T = tensor_of(x, grid, draw)
            T = T.copy() if T.unfolding.conjugated else T
            return kind(T.unfolding, T.layout) if not T.unfolding.conjugated else kind.from_global(x, grid=grid)

        x = elements(drawn_shape(draw), draw.choice(("float64", "complex64", "int32")), turn)
        key = draw.choice((key_of_arrays, drawn_key))(draw, x.shape)
        what = seed, turn, x.shape, key
        keys = [tensor(k) if isinstance(k, np.ndarray) and draw.random() < 0.6 else k
                for k in (key if isinstance(key, tuple) else [key])]  # fmt: skip
        used, X = tuple(keys) if isinstance(key, tuple) else keys[0], tensor(x)
        try:
            expected = np.asarray(x[key])
        except IndexError:  # arrays that do not broadcast, or a mask that does not fit
            with pytest.raises(KeyIndexError):
                X[used]
            continue
        check(X[used], expected, what)
        y, value = x.copy(), elements(some(draw, expected.shape), draw.choice((x.dtype, "int8")), turn + 1)
        try:
            y[key] = value
        except (TypeError, ValueError):  # NumPy broadcasts no value of two axes under a mask
            continue
        X[used] = V = draw.choice((tensor, np.asarray))(value)
        check(X, y, what)
        check(V, value, what)
        X[used] = y[key] = 7
        check(X, y, what)


def test_words_of_keys(comm: Any, grids: list[Any]) -> None:
    """An element is sent once at most; numbers, arrays and single elements are not sent."""
    x = elements((8, 9), "float64")
    for grid in grids:
        X = Array.from_global(x, grid=grid)
        for i in range(8):
            one = X[i, 2 * i % 9]
            assert one.report is None
            assert one.grid.rank_map == (X.grid.rank_of(*X.layout.matrix.owner(i, 2 * i % 9)),)
            assert float(one) == x[i, 2 * i % 9]
        for key, value in (((slice(1, 7, 3), [0, 5]), 3.0), (slice(2, 5), np.arange(9.0)), (x > 0, 1.0)):
            X[key] = x[key] = value
            assert X.report.counted.words_received == 0
        X[1:] = X[:-1]  # the memory of both is the same
        x[1:] = x[:-1].copy()
        words = comm.allreduce(X.report.counted.words_received)
        assert words <= 9 * X.grid.shape[0]
        assert X.report.counted == X.report.predicted
        assert np.array_equal(X.allgather(), x)
        X[...] = X
        assert np.array_equal(X.allgather(), x)
        long = Array.from_global(np.arange(64), grid=grid)
        part = long[Array.from_global(np.arange(64) % 4 == 1, grid=grid)]
        assert np.array_equal(part.allgather(), np.arange(1, 64, 4))
        if len(grid.members) > 1 and list(grid.members) == sorted(grid.members):
            assert comm.allreduce(part.report.counted.words_received) <= 16
        assert max(comm.allgather(part.local.size)) == -(-16 // len(grid.members))


@pytest.mark.on_ranks(2, 3)
def test_bad_keys_raise_the_same_error_on_all_ranks(comm: Any, grid: Any) -> None:
    x = np.zeros((3, 4))
    X = Array.from_global(x, grid=grid)
    mask, places = (Array.from_global(a, grid=grid) for a in (np.ones((3, 3), bool), np.array([0, 3])))

    def store(key: Any, value: Any) -> None:
        X[key] = value

    for call, error, message in (
        (lambda: X[mask], KeyIndexError, r"a mask of shape \(3, 3\) for axes of extents \(3, 4\)"),
        (lambda: X[places], KeyIndexError, r"out of range for axis 0 of a tensor of shape \(3, 4\)"),
        (lambda: X[places.astype(float)], KeyIndexError, "whole numbers or truth values, got float64"),
        (lambda: X[[0, 1], [0, 1, 2]], KeyIndexError, "arrays of indices: shape mismatch"),
        (lambda: X[np.arange(2) + comm.rank, [0, 1]], ArgumentError, "called with different arguments"),
        (lambda: store(0, np.zeros(3)), LayoutError, r"of shape \(3,\) cannot be broadcast to a part of shape \(4,\)"),
        (lambda: store((0, places), X), LayoutError, r"of shape \(3, 4\) cannot become one of shape \(4,\)"),
        (lambda: store(0, 1j), TypeError, "complex"),
        (lambda: store(0, X + 1j), DTypeError, "complex128 elements cannot become float64"),
        (lambda: store(0, comm.rank), ArgumentError, "called with different arguments"),
        (lambda: store((0, 0, 0), 1), KeyIndexError, "has 2 axes"),
    ):
        with pytest.raises(error, match=message) as raised:
            call()
        assert len({*comm.allgather(str(raised.value))}) == 1
        assert not X.allgather().any()
    conjugate = DistTensor.from_global(x + 1j, grid=grid).matrix([0]).H.tensor((4, 3))
    with pytest.raises(ArgumentError, match="conjugate of a matrix"):
        conjugate[0] = 1


@pytest.mark.on_ranks(2, 3)
@pytest.mark.parametrize("place", ["owners", "beside"])
def test_an_error_of_one_rank_is_raised_on_all(
    comm: Any, grid: Any, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is short on one rank, before the indices are sent, and before the elements are sent back or set."""
    x = Array.from_global(np.arange(24.0), grid=grid)
    indices = Array.from_global(np.array([23, 0, 5, 5, 11]), grid=grid)

    def short(*_: Any) -> None:
        raise MemoryError(place)

    def read() -> None:
        x[indices]

    def write() -> None:
        x[indices] = 1.0

    for act in (read, write):
        with monkeypatch.context() as patched:
            if comm.rank == comm.size - 1:
                patched.setattr(tensor_lines, place, short)
            with pytest.raises(MemoryError, match=place):
                act()
    assert np.array_equal(x.allgather(), np.arange(24.0))
