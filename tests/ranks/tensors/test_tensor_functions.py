"""Functions of tensors in all kinds of layouts, compared with NumPy's."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
import pytest
import tiers
from drawn_tensors import drawn_key, elements, tensor_of

from pdgemm import DistMatrix, DistTensor
from pdgemm.errors import ArgumentError
from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.tensor_layout import TensorLayout

pytestmark = [pytest.mark.mpi, tiers.every_grid]


def drawn(grids: list[Any], number: int, seed: int = 0) -> Iterator[tuple[random.Random, Any]]:
    """Yield a source of random numbers and a grid, `number` times with --all, otherwise a few times."""
    for turn in range(number if tiers.everything() else number // (4 if grids[0].comm.size < 3 else 12)):
        draw = random.Random(1000 * seed + turn)
        yield draw, draw.choice(grids)


def drawn_shape(draw: random.Random, most: int = 4) -> tuple[int, ...]:
    return tuple(draw.choice((0, 1, 2, 3, 4, 5, 6)) if draw.random() < 0.4 else draw.choice((2, 3, 5, 8))
                 for _ in range(draw.randint(0, most)))  # fmt: skip


def check(result: Any, expected: Any, error: float = 0.0) -> None:
    """Check the shape, the type and the elements of a tensor, or of an array or a number that is on every rank."""
    if isinstance(result, (DistTensor, DistMatrix)):
        local = result.local
        assert result.shape == expected.shape
        if isinstance(result, DistTensor) and local.size:
            assert np.allclose(local, expected[np.ix_(*result.indices())], error, error, equal_nan=True)
        if isinstance(result, DistTensor):
            assert result.report is None or result.report.counted == result.report.predicted
        result = result.allgather()
    assert result.shape == np.shape(expected)
    assert result.dtype == np.asarray(expected).dtype
    if error:
        assert np.allclose(result, expected, error, error, equal_nan=True)
    else:
        assert np.array_equal(result, expected, equal_nan=np.asarray(expected).dtype.kind in "fc")


def broadcastable(draw: random.Random, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape that is broadcast to this one."""
    return tuple(1 if draw.random() < 0.3 else n for n in shape)[draw.choice((0, 0, 1, len(shape) // 2)) :]


def test_elementwise_functions_broadcast_tensors_arrays_matrices_and_numbers(grids: list[Any]) -> None:
    functions = (np.add, np.multiply, np.maximum, np.subtract, np.less, np.hypot)
    for draw, grid in drawn(grids, 180):
        shape = drawn_shape(draw)
        x = elements(shape, draw.choice(("float64", "complex64", "float32", "int32")), 1)
        X = tensor_of(x, grid, draw)
        f = draw.choice(functions[:4] if x.dtype.kind == "c" else functions)
        y = elements(broadcastable(draw, shape), x.dtype, 2)
        if draw.random() < 0.3:  # the first operand is broadcast, too
            x, y = elements(broadcastable(draw, shape), x.dtype, 1), elements(shape, x.dtype, 2)
            X = tensor_of(x, grid, draw)
        Y: Any = draw.choice((tensor_of(y, grid, draw), y, tensor_of(y, grid, draw)))
        if y.ndim == 2 and draw.random() < 0.5:
            Y = DistMatrix.from_global(y, grid=grid, block=(2, 1), order=draw.choice("CF"))
        check(f(X, Y), f(x, y), 1e-6)
        check(f(Y, X), f(y, x), 1e-6)
        check(f(X, 3), f(x, 3), 1e-6)
        if np.broadcast_shapes(x.shape, y.shape) == x.shape and f is not np.less:
            out = tensor_of(np.zeros_like(f(x, y)), grid, draw)
            out = out.copy() if out.unfolding.conjugated else out
            assert f(X, Y, out=out) is out
            check(out, f(x, y), 1e-6)
            if f is not np.hypot:
                X = X.copy() if X.unfolding.conjugated else X
                same = X
                X += Y
                assert same is X
                check(X, x + y, 1e-6)
        check(Y if not isinstance(Y, np.ndarray) else y, y)  # an operand is not changed


def test_functions_of_one_tensor_and_attributes(grids: list[Any]) -> None:
    for draw, grid in drawn(grids, 60, 1):
        x = elements(drawn_shape(draw), draw.choice(("float64", "complex128", "int32")))
        X = tensor_of(x, grid, draw)
        assert (X.ndim, X.size, X.shape, X.dtype) == (x.ndim, x.size, x.shape, x.dtype)
        assert (np.ndim(X), np.size(X), np.shape(X)) == (x.ndim, x.size, x.shape)
        check(-X, -x)
        check(abs(X), abs(x), 1e-14)
        check(np.sqrt(abs(X)), np.sqrt(abs(x)), 1e-14)
        check(X.conj(), x.conj())
        check(np.conj(X), np.conj(x))
        check(np.real(X), x.real)
        check(np.imag(X), x.imag)
        check(X.copy(), x)
        check(X.astype("complex64"), x.astype("complex64"))
        assert np.allclose(X, x)
        assert np.allclose(x, X)
        assert np.allclose(X, X.astype("complex128"))
        assert np.allclose(X, x + 1) == (x.size == 0)
        whole = X.to_global(0)
        assert (whole is None) == (grid.comm.rank != 0)
        assert whole is None or np.array_equal(whole, x)


def test_reductions_along_any_axes(grids: list[Any]) -> None:
    for draw, grid in drawn(grids, 180, 2):
        dtype = draw.choice(("float64", "float32", "complex64", "int8", "uint8", "int32", "bool", "float16"))
        x = elements(drawn_shape(draw), dtype)
        if x.size and x.dtype.kind == "f" and draw.random() < 0.4:
            x.reshape(-1)[draw.randrange(x.size)] = draw.choice((np.nan, np.inf))
        X = tensor_of(x, grid, draw)
        axes = tuple(axis - draw.choice((0, x.ndim)) for axis in range(x.ndim) if draw.random() < 0.5)
        axis = draw.choice((None, axes, axes[0] if axes else None))
        count = prod(x.shape) if axis is None else prod(x.shape[a] for a in np.atleast_1d(np.array(axis, int)))
        for name in ("sum", "prod", "min", "max", "any", "all", "mean", "var", "std"):
            options: Any = {"ddof": draw.choice((0, 1))} if name in ("var", "std") else {}
            keepdims = draw.random() < 0.5
            if name in ("min", "max") and not count:
                with pytest.raises(ArgumentError, match=f"{name} of no elements"):
                    getattr(X, name)(axis, keepdims=keepdims)
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # NumPy warns of means of no elements
                expected = getattr(np, name)(x, axis=axis, keepdims=keepdims, **options)
                result = getattr(np, name)(X, axis=axis, keepdims=keepdims, **options)
            error = 2e-2 if dtype == "float16" else 1e-4 if dtype in ("float32", "complex64") else 1e-12
            check(result, expected, error)


def test_a_broadcast_element_for_each_part_of_as_many_indices(grids: list[Any]) -> None:
    for grid in grids:
        r = len(grid.members)
        first = BlockCyclic(1, 1, 1), BlockCyclic(r, 1, r, source=r - 1)
        there = TensorLayout((r,), (), (0,), first, grid.members)
        x, y = np.array([2.0]), np.arange(float(r))
        X, Y = DistTensor.from_global(x, grid=grid), DistTensor.from_global(y, grid=grid, layout=there)
        check(X + Y, x + y)
        check(Y * X, y * x)


def test_words_of_moved_operands(grids: list[Any]) -> None:
    for grid in grids:
        r, x = len(grid.members), elements((2 * len(grid.members), 3 * len(grid.members), 2), "float64")
        X, Y = (
            DistTensor.from_global(x, grid=grid, layout=TensorLayout.even(x.shape, rows, cols, (r, 1), grid.members))
            for rows, cols in (((0,), (1, 2)), ((1,), (0, 2)))
        )
        results = {
            "add": (X + Y, x + x, 12 * (r - 1)),
            "out": (np.multiply(X, Y, out=X.copy()), x * x, 12 * (r - 1)),
            "where": (np.where(X > 0, X, Y), x, 12 * (r - 1)),
            "mean": (X.mean(0, keepdims=True), x.mean(0, keepdims=True), 6 * (r - 1)),
            "var": (X.var(0), x.var(0), 18 * (r - 1)),  # two sums, and the mean on all ranks
            "std": (X.std(0), x.std(0), 18 * (r - 1)),
            "nothing": (X.std(2), x.std(2), 0),
        }
        for name, (result, expected, words) in results.items():
            check(result, expected, 1e-14)
            assert (result.report.counted.words_received if result.report else 0) == words * (min(grid.coords) >= 0), (
                name
            )


def test_reshapes(grids: list[Any]) -> None:
    for draw, grid in drawn(grids, 300, 3):
        shape = drawn_shape(draw, 5)
        x = elements(shape, "float64")
        if x.size:
            factors, new = [p for p in (2, 3, 5) for _ in range(_power(x.size, p))], list[int]()
            draw.shuffle(factors)
            while factors:
                k = draw.randint(0, 2)
                new.append(prod(factors[:k]))
                factors = factors[k:]
        else:
            new = [*draw.sample([0, 3, 2, 1], draw.randint(1, 4))]
            new = new if 0 in new else [*new, 0]
        X = tensor_of(x, grid, draw)
        check(X.reshape(new), x.reshape(new))
        check(X.reshape(*new), x.reshape(new))
        check(np.reshape(X, tuple(new)), x.reshape(new))
        check(X.ravel(), x.ravel())
        Y = X.reshape(new)
        assert Y.report is X.report or Y.report.counted == Y.report.predicted
        if x.size and new:
            at = draw.randrange(len(new))
            check(X.reshape([-1 if k == at else n for k, n in enumerate(new)]), x.reshape(new))
    one = DistTensor.from_global(np.ones((1,) * 4), grid=grids[0], rows=(0,), cols=(1, 2, 3))
    for ndim in range(5):  # new axes of extent 1, which no axis of the old shape becomes
        check(one.reshape((1,) * ndim).reshape((1,) * 3), np.ones((1, 1, 1)))


def test_axes_of_one_index(grids: list[Any]) -> None:
    for grid in grids:
        ranks = len(grid.members)
        x = elements((1, 1, 1), "float64")
        for rows, cols in (((2,), (0, 1)), ((0, 1), (2,)), ((), (1, 0, 2))):
            on = (1, ranks) if not rows else (ranks, 1)
            layout = TensorLayout.even(x.shape, rows, cols, on, grid.members)
            X = DistTensor.from_global(x, grid=grid, layout=layout)
            for shape in ((), (1,), (1, 1), (1,) * 4):
                Y = X.reshape(shape)
                assert Y.report is None or Y.report.counted == Y.report.predicted
                check(Y, x.reshape(shape))
        there = TensorLayout.even((), (), (), (1, 1), grid.members[-1:])
        number = DistTensor.from_global(np.array(2.0), grid=grid, layout=there)
        check(number + DistTensor.from_global(np.array(1.0), grid=grid), np.array(3.0))
        check(number.reshape(1, 1) * X, 2 * x)


def _power(n: int, p: int) -> int:
    return 0 if n % p else 1 + _power(n // p, p)


def test_axes_are_moved(grids: list[Any]) -> None:
    for draw, grid in drawn(grids, 120, 4):
        x = elements(drawn_shape(draw), "float64")
        x = x.reshape(x.shape + (1,) * draw.randint(0, 2))
        X, axes = tensor_of(x, grid, draw), list(range(x.ndim))
        draw.shuffle(axes)
        check(X.T, x.T)
        check(np.transpose(X), x.T)
        check(X.transpose(axes), x.transpose(axes))
        check(np.transpose(X, tuple(axes)), x.transpose(axes))
        check(np.permute_dims(X, axes), x.transpose(axes))
        check(np.squeeze(X), np.squeeze(x))
        thin = tuple(a for a, n in enumerate(x.shape) if n == 1 and draw.random() < 0.7)
        check(np.squeeze(X, thin), np.squeeze(x, thin))
        new = tuple(draw.sample(range(x.ndim + 2), 2))
        check(np.expand_dims(X, new), np.expand_dims(x, new))
        check(np.expand_dims(X, -1), np.expand_dims(x, -1))
        if axes:
            a, b = draw.choice(axes), draw.choice(axes) - x.ndim
            check(np.moveaxis(X, a, b), np.moveaxis(x, a, b))
            check(np.swapaxes(X, a, b), np.swapaxes(x, a, b))
            k = draw.randint(1, len(axes))
            here, there = draw.sample(axes, k), draw.sample(axes, k)
            check(np.moveaxis(X, here, there), np.moveaxis(x, here, there))


def test_parts(grids: list[Any]) -> None:
    for draw, grid in drawn(grids, 360, 5):
        x = elements(drawn_shape(draw), "float64")
        X, key = tensor_of(x, grid, draw), drawn_key(draw, x.shape)
        result = X[key] if len(key) != 1 or draw.random() < 0.5 else X[key[0]]
        check(result, x[key])
        if isinstance(result, DistTensor) and result.size:
            result.unfolding.fill(7)  # a part is a copy
            check(X, x)


def test_joins(grids: list[Any]) -> None:
    for draw, grid in drawn(grids, 120, 6):
        shape = drawn_shape(draw)
        types = [draw.choice(("float64", "float32", "complex64")) for _ in range(draw.randint(1, 3))]
        xs = [elements(shape, dtype, seed) for seed, dtype in enumerate(types)]
        axis = draw.randint(-len(shape) - 1, len(shape))
        check(np.stack([tensor_of(x, grid, draw) for x in xs], axis), np.stack(xs, axis))
        if shape:
            axis = draw.randint(-len(shape), len(shape) - 1)
            wide = [elements((*shape[:axis % len(shape)], draw.randint(0, 4), *shape[axis % len(shape) + 1:]), x.dtype)
                    for x in xs]  # fmt: skip
            both = [tensor_of(x, grid, draw) for x in wide]
            check(np.concatenate(both, axis), np.concatenate(wide, axis))
            check(np.concat(both, axis), np.concatenate(wide, axis))


def test_matrices_and_tensors_are_read_as_each_other(grids: list[Any]) -> None:
    for draw, grid in drawn(grids, 180, 7):
        x = elements(drawn_shape(draw, 5), draw.choice(("float64", "complex64")))
        X, axes = tensor_of(x, grid, draw), list(range(x.ndim))
        draw.shuffle(axes)
        at = draw.randint(0, x.ndim)
        rows, cols = axes[:at], axes[at:]
        flat = x.transpose(axes).reshape(prod(x.shape[a] for a in rows), prod(x.shape[a] for a in cols))
        M = X.matrix(rows, cols)
        check(M, flat)
        check(X.matrix(rows), x.transpose(rows + sorted(cols)).reshape(flat.shape))
        check(M.tensor([x.shape[a] for a in axes]), x.transpose(axes))
        check(M.T.tensor([x.shape[a] for a in cols + rows]), x.transpose(cols + rows))
        check(M.H.tensor([x.shape[a] for a in cols + rows]), x.conj().transpose(cols + rows))


def test_elements_do_not_depend_on_the_layout(grids: list[Any]) -> None:
    for draw, grid in drawn(grids, 60, 8):
        shape = drawn_shape(draw)
        axes, at = draw.sample(range(len(shape)), len(shape)), draw.randint(0, len(shape))
        layout: Any = {"grid": grid, "rows": axes[:at], "cols": axes[at:]}
        places = np.arange(prod(shape), dtype=float).reshape(shape)
        factors = [prod(shape[a + 1 :]) for a in range(len(shape))]

        def place(*index: Any, factors: Any = factors) -> Any:
            return sum((i * n for i, n in zip(index, factors)), 0.0)

        check(DistTensor.from_function(place, shape, **layout), places)
        for kind in ("uniform", "normal"):
            for dtype in ("float64", "complex64"):
                one = DistTensor.random(shape, seed=3, kind=kind, dtype=dtype, grid=grid)
                check(DistTensor.random(shape, seed=3, kind=kind, dtype=dtype, **layout), one.allgather())
        check(DistTensor.full(shape, 2.5, **layout), np.full(shape, 2.5))
        check(DistTensor.zeros(shape, **layout), np.zeros(shape))


@pytest.mark.on_ranks(2, 3)
def test_habits_of_numpy(comm: Any, grids: list[Any]) -> None:
    x = elements((2, 3, 4), "float64")
    for grid in grids:
        X = DistTensor.from_global(x, grid=grid)
        A = DistMatrix.from_global(x[0], grid=grid, order="F", block=(2, 1))
        check(np.concatenate([X, X], None), np.concatenate([x, x], None))
        check(np.concatenate([x, X]), np.concatenate([x, x]))
        check(np.concatenate([X[0], A, x[1]], 1), np.concatenate([x[0], x[0], x[1]], 1))
        check(np.stack([X[0], A, x[1]], -1), np.stack([x[0], x[0], x[1]], -1))
        check(np.hstack([X[0], x[0]]), np.hstack([x[0], x[0]]))
        check(np.vstack([X[0], x[0]]), np.vstack([x[0], x[0]]))
        check(np.sum(X, axis=0, dtype=np.float32), np.sum(x, axis=0, dtype=np.float32))
        check(np.transpose(X, axes=(2, 0, 1)), x.transpose(2, 0, 1))
        check(np.reshape(X, shape=(4, 6)), x.reshape(4, 6))
        check(X[0, :, [3, 1]], x[0, :, [3, 1]])
        check(A @ X.transpose(0, 2, 1), x[0] @ x.transpose(0, 2, 1), 1e-14)
        check(X @ np.ones(4), x @ np.ones(4), 1e-14)
        check(np.ones(3) @ X, np.ones(3) @ x, 1e-14)
        check(A * X, x[0] * x)
        assert np.allclose(X[:, :1], X) == np.allclose(x[:, :1], x)
        assert np.allclose(A, X[0])
        assert np.allclose(0 * X, 0)
        below = np.full((1, comm.size - 1), complex(-np.inf, -2))  # a rank has no element
        check(DistTensor.from_global(below, grid=grid, rows=[0], cols=[1]).max(), below.max())
        for dtype, error in (("float16", 1e-3), ("bfloat16", 1e-2)):
            many = DistTensor.full((300, 7), 1000, dtype=dtype, grid=grid)
            mean, variance = many.mean(), (many * np.linspace(0.9, 1.1, 7)[None]).astype(dtype).var(1)
            assert mean == 1000  # the sum of 2100 elements would overflow in float16
            assert mean.dtype == variance.dtype == dtype
            assert np.allclose(variance.astype(float), np.var(1000 * np.linspace(0.9, 1.1, 7)), 20 * error)


@pytest.mark.on_ranks(2, 3)
def test_bad_arguments_raise_the_same_error_on_all_ranks(comm: Any, grids: list[Any]) -> None:
    x = elements((2, 3, 4), "float64")
    for grid in grids:
        X, A = DistTensor.from_global(x, grid=grid), DistMatrix.from_global(x[0], grid=grid)
        calls: dict[str, Any] = {
            "cannot be broadcast": lambda X=X: X + np.zeros(5),
            "out is a ndarray": lambda X=X: np.add(X, X, out=np.zeros(x.shape)),
            r"add has the shape \(2, 3, 4\), and out is": lambda X=X: np.add(X, X, out=X[0]),
            "numpy.add.reduce is not available": lambda X=X: np.add.reduce(X),
            "numpy.sum with axis, initial is not available": lambda X=X: np.sum(X, (0, 1), initial=1.0),
            "numpy.partition is not available": lambda X=X: np.partition(X, 1),
            "must agree in the other axes": lambda X=X: np.concatenate([X, X[:, :2]]),
            r"tensors of one shape are stacked, got \(2, 3, 4\)": lambda X=X: np.stack([X, X[:1]]),
            "axis=7 of a tensor": lambda X=X: np.concatenate([X, X], 7),
            "axis=5 of a tensor": lambda X=X: np.stack([X, X], 5),
            "axis=-4 of a tensor": lambda X=X: X.sum(-4),
            "repeated axis": lambda X=X: X.sum((0, 0)),
            "to as many places": lambda X=X: np.moveaxis(X, (0, 1), (0,)),
            "axis=9 of a tensor": lambda X=X: np.swapaxes(X, 0, 9),
            r"axis=\(0, 0, 1\)": lambda X=X: X.transpose(0, 0, 1),
            "3 axes are transposed": lambda X=X: X.transpose(0, 1),
            "cannot become one of shape": lambda X=X: X.reshape(5, -1),
            "cannot be interpreted as an integer": lambda X=X: X.reshape(2.5, 12),
            "only axes of extent 1 are dropped": lambda X=X: np.squeeze(X, 0),
            "max of no elements": lambda X=X: X[:, :0].max(1),
            "takes one `...`, got": lambda X=X: X[..., ...],
            r"has 3 axes and takes one `...`, got \(0, 0, 0, 0\)": lambda X=X: X[0, 0, 0, 0],
            "axis 0 of a tensor: index -3 is out of range for a dimension of 2": lambda X=X: X[:, 0, [0, 1]][-3],
            r"axis 1 of a tensor: it is indexed by a number, .* got 1.5": lambda X=X: X[:, 1.5],
            "axis 2 of a tensor: a mask of 3 indices for a dimension of 4": lambda X=X: X[..., np.ones(3, bool)],
            r"a mask of shape \(2, 4\) for axes of extents \(2, 3, 4\)": lambda X=X: X[np.ones((2, 4), bool)],
            "a list of indices must have whole numbers or truth values, got float64": lambda X=X: X[[0.5]],
            "an array of indices has whole numbers or truth values, got float64": lambda X=X: X[X],
            "no first extents": lambda A=A: A.tensor((5, 2)),
            "must have each of 3 axes once": lambda X=X: X.matrix((0,), (1,)),
            "the extents of a tensor must be >= 0": lambda grid=grid: DistTensor.empty((-1, 2), grid=grid),
            "by zero": lambda grid=grid: DistTensor.from_function(lambda i: 1 // 0, (3,), grid=grid),
            "called with different arguments": lambda X=X: X + np.full(4, comm.rank),
        }  # fmt: skip
        for message, call in calls.items():
            with pytest.raises(Exception, match=message) as error:
                call()
            assert len({*comm.allgather(f"{type(error.value)} {error.value}")}) == 1
