"""The functions of numpy.fft of tensors, by lines and by the four-step algorithm."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import tiers
from drawn_tensors import elements, tensor_of

import pdgemm.array_api as xp
from pdgemm import DistTensor
from pdgemm.errors import ArgumentError, DTypeError

pytestmark = [pytest.mark.mpi, tiers.every_grid]
SHAPES = ((24,), (1, 30), (13,), (2, 9), (4, 5, 6), (1, 1), (3, 0, 4))


def close(result: Any, expected: np.ndarray) -> bool:
    error = 1e-3 if expected.dtype.itemsize < (16 if expected.dtype.kind == "c" else 8) else 1e-10
    same = (result.shape, result.dtype) == (expected.shape, expected.dtype)
    return same and np.allclose(result.allgather(), expected, error, error)


@pytest.mark.parametrize("name", ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"])
def test_transforms_along_an_axis(grids: list[Any], name: str) -> None:
    draw, act = random.Random(name), getattr(np.fft, name)
    for shape in SHAPES:
        single = draw.random() < 0.3
        real = name in ("rfft", "ihfft")
        x = elements(shape, ("float32" if single else "float64") if real else "complex64" if single else "complex128")
        axis = draw.randrange(-len(shape), len(shape)) if 0 not in shape else -1
        if shape == (1, 30):
            axis = 1
        n, norm = draw.choice((None, 8, 12, 35)), draw.choice((None, "ortho", "forward"))
        if name in ("irfft", "hfft") and shape[axis] == 1:
            n = 6
        result = act(tensor_of(x, draw.choice(grids), draw), n=n, axis=axis, norm=norm)
        assert close(result, act(x, n=n, axis=axis, norm=norm)), (shape, n, axis, norm)


@pytest.mark.parametrize("name", ["fftn", "ifftn", "rfftn", "irfftn"])
def test_transforms_along_several_axes(grids: list[Any], name: str) -> None:
    draw, act = random.Random(name), getattr(np.fft, name)
    for shape in ((4, 6), (3, 4, 5), (24,)):
        x = elements(shape, "float64" if name == "rfftn" else "complex128")
        for axes in (None, (0,), (0, len(shape) - 1) if len(shape) > 1 else (-1,)):
            s = None if axes is None else tuple(draw.choice((4, 5)) for _ in axes)
            result = act(tensor_of(x, draw.choice(grids), draw), s=s, axes=axes, norm="ortho")
            assert close(result, act(x, s=s, axes=axes, norm="ortho")), (shape, s, axes)


def test_shifts_and_frequencies(grids: list[Any]) -> None:
    draw = random.Random(3)
    for grid in grids:
        x = elements((4, 5), "float64")
        for axes in (None, 1, (0,)):
            for act in (np.fft.fftshift, np.fft.ifftshift):
                assert close(act(tensor_of(x, grid, draw), axes=axes), act(x, axes=axes))
    for n in (1, 6, 7):
        assert close(xp.fft.fftfreq(n, d=0.5), np.fft.fftfreq(n, 0.5))
        assert close(xp.fft.rfftfreq(n, dtype=xp.float32), np.fft.rfftfreq(n).astype("float32"))


@pytest.mark.on_ranks(4)
def test_no_rank_has_a_whole_line(grid: Any) -> None:
    x = xp.Array.from_function(lambda i: np.cos(0.1 * i), (4096,), grid=grid)
    X = xp.fft.fft(x)
    assert X.local.size == 1024
    assert np.allclose(xp.fft.ifft(X).allgather(), x.allgather())


def test_bad_arguments(grid: Any) -> None:
    X = DistTensor.zeros((4, 3), grid=grid)
    for options, message in (({"n": 0}, "n >= 1"), ({"norm": "best"}, "'best'"), ({"axis": 2}, "axis=2")):
        with pytest.raises(ArgumentError, match=message):
            np.fft.fft(X, **options)
    with pytest.raises(ArgumentError, match="at least one element"):
        np.fft.irfft(X[:1], axis=0)
    with pytest.raises(DTypeError, match="rfft takes real numbers, got complex128"):
        np.fft.rfft(X.astype(complex))
    with pytest.raises(ArgumentError, match="as many extents as axes"):
        np.fft.fftn(X, s=(3, 3), axes=(0,))
