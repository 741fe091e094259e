"""The functions of numpy.fft for tensors: each rank transforms some lines of elements, along axes that are not divided.

Where a tensor has fewer other elements than ranks, such as one of a single axis of n = n1 n2 elements, the lines of an
n1 x n2 matrix are transformed (the four-step algorithm: Bailey, FFTs in external or hierarchical memory, J.
Supercomput. 4, 1990).  With j = j1 n2 + j2, k = k1 + n1 k2 and w = exp(-2 pi i / n):

    X[k1 + n1 k2] = sum_j2 exp(-2 pi i j2 k2 / n2) w^(j2 k1) sum_j1 exp(-2 pi i j1 k1 / n1) x[j1 n2 + j2]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isqrt, prod
from operator import index
from typing import Any

import numpy as np

from pdgemm.errors import ArgumentError, DTypeError
from pdgemm.local.arrays.device import beside
from pdgemm.planning.tensors.tensor_layouts import undivided
from pdgemm.support.agreement import together
from pdgemm.tensors.indexing.tensor_copies import concatenate, flip, moveaxis, roll
from pdgemm.tensors.tensor_base import in_layout

_FORWARD = ("fft", "rfft", "hfft")  # the others are divided by n, if norm is "backward"


def _transformed(name: str, x: Any, n: int | None, axis: int, norm: str | None) -> Any:
    """Return numpy.fft's function of this name, of x along an axis.  Collective.

    Words: those of one exchange if the axis is divided; by the four-step algorithm, of three.
    """
    act = getattr(np.fft, name)
    with together(x.grid.comm) as arguments:
        (at,) = x.axes_of(index(axis))
        arguments += [f"numpy.fft.{name}", n, at, norm, str(x.layout)]
        if (n is not None and index(n) < 1) or norm not in (None, "backward", "ortho", "forward"):
            raise ArgumentError(f"{name} takes n >= 1 and norm 'backward', 'ortho' or 'forward', got {n} and {norm!r}")
        if name in ("rfft", "ihfft") and x.dtype.kind == "c":
            raise DTypeError(f"{name} takes real numbers, got {x.dtype}")
        line = act(np.zeros((1, min(x.shape[at], 2)), x.dtype), n=2)  # its type; raises an error for a bad type
    extent = n or (2 * (x.shape[at] - 1) if name in ("irfft", "hfft") else x.shape[at])
    if extent < 1:
        raise ArgumentError(f"{name} takes at least one element, got shape {x.shape} and axis {axis}")
    others = prod(x.shape) // x.shape[at] if x.size else 0
    if 0 < others < len(x.grid.members) and _divisor(extent) > 1:
        return _by_four_steps(name, x, extent, at, norm)
    count = extent // 2 + 1 if name in ("rfft", "ihfft") else extent
    moved = in_layout(x, undivided(x.layout, (at,), x.grid.members), name=name)
    there = moved.layout.without([at]).expanded([at], [count])
    return moved.with_elements(there, line.dtype, lambda: act(moved.local, n=extent, axis=at, norm=norm))


def _divisor(n: int) -> int:
    """Return the largest divisor of n that is at most its square root."""
    return next(d for d in range(isqrt(n), 0, -1) if n % d == 0)


def _by_four_steps(name: str, x: Any, n: int, axis: int, norm: str | None) -> Any:
    """Return the result of `_transformed` for n elements along an axis, as complex transforms of shorter lines."""
    x = moveaxis(x, axis, -1)
    whole = name in ("fft", "ifft")
    if name in ("irfft", "hfft"):
        half = _resized(x.conj() if name == "hfft" else x, n // 2 + 1)
        x = concatenate([half, flip(half[..., 1 : n - n // 2], -1).conj()], -1)
    n1 = _divisor(n)
    lines = _resized(x, n).reshape(*x.shape[:-1], n1, n // n1)
    inverse = name in ("ifft", "irfft", "hfft")
    step, sign, unscaled = ("ifft", 1, "forward") if inverse else ("fft", -1, "backward")
    lines = _transformed(step, lines, None, -2, unscaled)
    *_, k1, j2 = lines.indices()

    def turn() -> Any:
        factor = np.exp(sign * 2j * np.pi / n * (k1[:, None] * j2 % n)).astype(lines.dtype)
        return lines.local * beside(factor, lines.local)

    turned = lines.with_elements(lines.layout, lines.dtype, turn)
    result = moveaxis(_transformed(step, turned, None, -1, unscaled), -1, -2).reshape(*x.shape[:-1], n)
    if not whole:
        result = result.real if inverse else result[..., : n // 2 + 1]
    result = result.conj() if name == "ihfft" else result
    share = {"ortho": 0.5, "forward": float(name in _FORWARD)}.get(norm or "", float(name not in _FORWARD))
    return moveaxis(result / n**share if share else result, -1, axis)


def _resized(x: Any, n: int) -> Any:
    """Return the first n elements along the last axis, and zeros behind them where there are fewer."""
    if (lacking := n - x.shape[-1]) <= 0:
        return x[..., :n] if lacking else x
    shape = (*x.shape[:-1], lacking)
    return concatenate([x, type(x).zeros(shape, dtype=x.dtype, grid=x.grid, device=x.device)], -1)


def _of_axes(x: Any, s: Sequence[int] | None, axes: Sequence[int] | None) -> list[tuple[int, int | None]]:
    """Return pairs of an axis and the extent after its transform, None for its own."""
    if axes is None:
        axes = range(x.ndim) if s is None else range(x.ndim - len(s), x.ndim)
    places = x.axes_of(tuple(axes))
    if not places or (s is not None and len(s) != len(places)):
        raise ArgumentError(f"as many extents as axes are transformed, at least one; got s={s} and axes={axes}")
    return list(zip(places, [None] * len(places) if s is None else s))


def _of_several(name: str, x: Any, pairs: Any, norm: str | None) -> Any:
    """Return transforms along several axes, first along those that are not divided, so that fewer exchanges follow."""
    for at, n in sorted(pairs, key=lambda pair: pair[0] in x.layout.divided):
        x = _transformed(name, x, n, at, norm)
    return x


def fft(x: Any, /, n: int | None = None, axis: int = -1, norm: str | None = "backward") -> Any:
    """Return X_k = sum_j x_j exp(-2 pi i j k / n) along an axis.  Collective.

    n    : elements along the axis: x is cut, or filled up with zeros; by default its own extent.
    norm : "backward": not scaled;  "ortho": divided by sqrt(n);  "forward": divided by n.

    Cost: 5 n log2(n) / P flops for each line, and one exchange if the axis is divided; three where x has fewer other
    elements than ranks.  An axis of a prime number of elements is then transformed by one rank.
    """
    return _transformed("fft", x, n, axis, norm)


def ifft(x: Any, /, n: int | None = None, axis: int = -1, norm: str | None = "backward") -> Any:
    """Return the inverse of `fft`; "backward": divided by n, "forward": not scaled.  Collective."""
    return _transformed("ifft", x, n, axis, norm)


def rfft(x: Any, /, n: int | None = None, axis: int = -1, norm: str | None = "backward") -> Any:
    """Return the first n // 2 + 1 elements of `fft` of real numbers.  Collective."""
    return _transformed("rfft", x, n, axis, norm)


def irfft(x: Any, /, n: int | None = None, axis: int = -1, norm: str | None = "backward") -> Any:
    """Return the inverse of `rfft`, n real numbers, by default 2 (m - 1) of m elements.  Collective."""
    return _transformed("irfft", x, n, axis, norm)


def hfft(x: Any, /, n: int | None = None, axis: int = -1, norm: str | None = "backward") -> Any:
    """Return `fft` of the Hermitian sequence of n elements that begins with x, by default 2 (m - 1).  Collective."""
    return _transformed("hfft", x, n, axis, norm)


def ihfft(x: Any, /, n: int | None = None, axis: int = -1, norm: str | None = "backward") -> Any:
    """Return the inverse of `hfft`.  Collective."""
    return _transformed("ihfft", x, n, axis, norm)


def fftn(x: Any, /, s: Any = None, axes: Any = None, norm: str | None = "backward") -> Any:
    """Return `fft` along several axes, all by default, with s elements.  Collective."""
    return _of_several("fft", x, _of_axes(x, s, axes), norm)


def ifftn(x: Any, /, s: Any = None, axes: Any = None, norm: str | None = "backward") -> Any:
    """Return the inverse of `fftn`.  Collective."""
    return _of_several("ifft", x, _of_axes(x, s, axes), norm)


def rfftn(x: Any, /, s: Any = None, axes: Any = None, norm: str | None = "backward") -> Any:
    """Return `rfft` along the last of several axes, and `fft` along the others.  Collective."""
    *others, (last, n) = _of_axes(x, s, axes)
    return _of_several("fft", rfft(x, n, last, norm), others, norm)


def irfftn(x: Any, /, s: Any = None, axes: Any = None, norm: str | None = "backward") -> Any:
    """Return the inverse of `rfftn`.  Collective."""
    *others, (last, n) = _of_axes(x, s, axes)
    return irfft(_of_several("ifft", x, others, norm), n, last, norm)


def fftshift(x: Any, /, axes: Any = None) -> Any:
    """Return x with the element of frequency 0 in the middle of some axes, all by default.  Collective."""
    places = x.axes_of(axes)
    return roll(x, [x.shape[at] // 2 for at in places], places) if places else x


def ifftshift(x: Any, /, axes: Any = None) -> Any:
    """Return the inverse of `fftshift`.  Collective."""
    places = x.axes_of(axes)
    return roll(x, [-(x.shape[at] // 2) for at in places], places) if places else x


FUNCTIONS: tuple[Callable[..., Any], ...] = (
    *(fft, ifft, rfft, irfft, hfft, ihfft, fftn, ifftn, rfftn, irfftn, fftshift, ifftshift),
)
