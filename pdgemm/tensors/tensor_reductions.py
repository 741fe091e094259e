"""Reductions of tensors over any axes: sums, products, extrema, truth values, means and variances."""

from __future__ import annotations

from math import prod
from typing import Any, Self

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.linalg.work import Work
from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.dtypes import NARROW, TYPE
from pdgemm.local.arrays.elementwise import supported
from pdgemm.planning.tensors.tensor_layouts import partial_layout, undivided
from pdgemm.support.agreement import together
from pdgemm.tensors.tensor_base import Axis, TensorBase
from pdgemm.tensors.tensor_moves import in_layout


class TensorReductions(TensorBase):
    """The reductions of a tensor over some axes, all by default.  Collective.

    A result without axes is a number, one of a single axis an array, both on every rank; any other is a tensor.
    Types are as in NumPy.  Cost: each rank's elements are read once; where a divided axis is reduced, the partial
    results of each rank are sent once.
    """

    def _reduced(self, name: str, axis: Axis, keepdims: bool, rounded: bool = True) -> Any:
        """Return a reduction of some axes: a number or an array of one axis on every rank, otherwise a tensor.

        rounded : whether sums of 16-bit numbers, which are added in float32, are rounded to 16 bits at the end.

        Each rank reduces its elements.  Partial results of an axis that is divided are then moved so that a rank has
        all those of some results, which it reduces.
        """
        act = getattr(np, name)
        with together(self.grid.comm) as arguments:
            gone = self.axes_of(axis)
            arguments += [name, gone, keepdims, str(self.layout), self.dtype]
            if name in ("min", "max") and not prod(self.shape[x] for x in gone):
                raise ArgumentError(f"{name} of no elements: axis={axis} of a tensor of shape {self.shape}")
            dtype = act(np.ones(1, self.dtype)).dtype
        wide = TYPE[dtype].sums_dtype if dtype in NARROW and name in ("sum", "prod") else dtype
        part = self._partly(name, gone, wide)
        if set(gone) & set(self.layout.divided):
            there = in_layout(part, undivided(part.layout, gone, self.grid.members), name=name)
            part = there._partly(name, gone, wide)
            part.unfolding.report = there.unfolding.later_report
        if rounded and wide != dtype:
            report, part = part.later_report, part.astype(dtype)
            part.unfolding.report = report
        return part if keepdims else type(self)(part.unfolding, part.layout.without(gone))._result()

    def _partly(self, name: str, gone: tuple[int, ...], dtype: np.dtype) -> Self:
        """Return the reductions of each rank's elements: an axis that is divided has one index for each part."""
        there = partial_layout(self.layout, gone)
        return self.with_elements(there, dtype, lambda: _fold(name, self.local, gone, dtype))

    def sum(self, axis: Axis = None, keepdims: bool = False) -> Any:
        """Return sums over some axes, all by default; of 16-bit numbers in float32.  Collective."""
        return self._reduced("sum", axis, keepdims)

    def prod(self, axis: Axis = None, keepdims: bool = False) -> Any:
        """Return products over some axes, all by default.  Collective."""
        return self._reduced("prod", axis, keepdims)

    def min(self, axis: Axis = None, keepdims: bool = False) -> Any:
        """Return least elements over some axes, all by default.  Collective."""
        return self._reduced("min", axis, keepdims)

    def max(self, axis: Axis = None, keepdims: bool = False) -> Any:
        """Return largest elements over some axes, all by default.  Collective."""
        return self._reduced("max", axis, keepdims)

    def any(self, axis: Axis = None, keepdims: bool = False) -> Any:
        """Return whether any element over some axes, all by default, is not 0.  Collective."""
        return self._reduced("any", axis, keepdims)

    def all(self, axis: Axis = None, keepdims: bool = False) -> Any:
        """Return whether all elements over some axes, all by default, are not 0.  Collective."""
        return self._reduced("all", axis, keepdims)

    def mean(self, axis: Axis = None, keepdims: bool = False) -> Any:
        """Return means over some axes, all by default.  Collective."""
        return self._moment("mean", axis, keepdims)

    def _moment(self, name: str, axis: Axis, keepdims: bool, ddof: float = 0) -> Any:
        """Return means, variances or standard deviations over some axes, of 16-bit numbers computed in float32.

        The report of a tensor has the words of the sums, and of the means that are subtracted.
        """
        work, terms = Work(name), self
        if name != "mean":
            apart = np.abs(work.did(self - self._divided(work, axis, True, 0)))
            terms = apart * apart
        result = terms._divided(work, axis, keepdims, ddof)
        result = np.sqrt(result) if name == "std" else result
        result = result.astype(self.dtype) if self.dtype in NARROW else result
        if isinstance(result, TensorBase):
            work.reported(result.unfolding, 1)
        return result

    def _divided(self, work: Work, axis: Axis, keepdims: bool, ddof: float) -> Any:
        """Return sums over some axes, divided by the number of their elements less `ddof`."""
        total = work.did(self._reduced("sum", axis, keepdims, rounded=False))
        with np.errstate(all="ignore"):
            return np.true_divide(total, max(prod(self.shape[x] for x in self.axes_of(axis)) - ddof, 0))

    def var(self, axis: Axis = None, ddof: float = 0, keepdims: bool = False) -> Any:
        """Return variances over some axes, all by default: sums of |x - mean|^2 / (n - ddof).  Collective."""
        return self._moment("var", axis, keepdims, ddof)

    def std(self, axis: Axis = None, ddof: float = 0, keepdims: bool = False) -> Any:
        """Return standard deviations over some axes, the square roots of `var`.  Collective."""
        return self._moment("std", axis, keepdims, ddof)


def _fold(name: str, x: Array, axes: tuple[int, ...], dtype: np.dtype) -> Array:
    """Return a reduction of an array with its axes kept; of no elements, the value that changes no other one."""
    if name in ("min", "max") and not x.size:
        shape = [1 if at in axes else n for at, n in enumerate(x.shape)]
        ends = (np.iinfo(dtype).max, np.iinfo(dtype).min) if dtype.kind in "iu" else (np.inf, -np.inf)
        end: Any = name == "min" if dtype.kind == "b" else ends[name == "max"]
        return np.full(
            shape, complex(end, end) if dtype.kind == "c" else end
        )  # complex numbers are ordered by both parts
    x = supported(x)
    wide = {"dtype": dtype} if name in ("sum", "prod") else {}
    return getattr(np, name)(x, axis=axes, keepdims=True, **wide)
