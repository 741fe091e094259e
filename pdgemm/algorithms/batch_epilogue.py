"""Epilogues of batches: the last operations on the products of many small matrices, item by item."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pdgemm.algorithms.epilogue import Epilogue, check_form, check_kind, check_vector
from pdgemm.errors import LayoutError
from pdgemm.local.arrays.activations import Finish
from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.elementwise import CONVERT
from pdgemm.matrix.batch import Batch, empty_items


class BatchEpilogue:
    """The epilogue of a batch of products on this rank's items, with its buffers.  Local: raises only on this rank.

    sums : the batch that receives alpha A B + beta C; this is C itself if C has the type of accumulation.
    batches : the operands of the epilogue that are batches, by name.  An item of `residual` or `aux` has the shape of
        C's item; an item of `scale` or `bias` is one row or one column.
    check : called with the name of an operand and its batch; raises if the batch does not match C.
    """

    def __init__(self, epilogue: Any, C: Batch, accumulate: np.dtype, check: Callable[[str, Any], object]) -> None:
        check_form(epilogue, accumulate)
        self.epilogue: Epilogue = epilogue
        self._C = C
        fields = {name: getattr(epilogue, name) for name in ("scale", "bias", "residual", "aux")}
        self.batches = {name: x for name, x in fields.items() if isinstance(x, Batch)}
        for name, x in fields.items():
            if isinstance(x, Batch) or (x is not None and name in ("residual", "aux")):
                check(name, x)
                self._check_shapes(name, x)
            elif x is not None:
                for m, n in np.unique(C.shapes, axis=0).tolist():
                    check_vector(name, x, (m, n), C.dtype)
        self._operands = {name: self._items(x) for name, x in fields.items()}
        own = C.shapes[C.owner == C.comm.rank]
        self.sums = C
        if C.dtype != accumulate:
            items = empty_items(own, C.shapes, accumulate, C.device)
            self.sums = Batch(items, C.shapes, C.owner, accumulate, C.comm, C.device)

    def begin(self, beta: Any) -> None:
        """Copy C to `sums`, unless `sums` is C or beta is 0."""
        if self.sums is not self._C and beta != 0:
            for s, c in zip(self.sums.items, self._C.items):
                CONVERT(s, c)

    def end(self) -> None:
        """Apply the epilogue to `sums`, and write the results to C."""
        for s, c, *operands in zip(self.sums.items, self._C.items, *self._operands.values()):
            Finish(self.epilogue.activation or "", self.epilogue.gradient, *operands)(c, s)

    def _items(self, x: Any) -> list[Any]:
        """Return the array or number that an operand provides for each item of this rank."""
        if isinstance(x, Batch):
            return [*x.items]
        device = self._C.device
        value: Array = np.atleast_2d(x) if np.ndim(x) else x
        return [device.to_device(value, "C") if device and np.ndim(x) else value] * len(self._C.items)

    def _check_shapes(self, name: str, x: Batch) -> None:
        """Raise LayoutError where an item has the wrong shape.

        An item must have the shape of C's item.  An item of scale or bias must have the shape of one row, or of one
        column, of C's item.
        """
        whole = (x.shapes == self._C.shapes).all(axis=1)
        if name in ("scale", "bias"):
            rows, cols = (x.shapes == [1, 0] + self._C.shapes * [0, 1]), (x.shapes == [0, 1] + self._C.shapes * [1, 0])
            whole = rows.all(axis=1) | cols.all(axis=1)
        for item in np.flatnonzero(~whole)[:1]:
            m, n = self._C.shapes[item]
            wanted = f"1 x {n} or {m} x 1" if name in ("scale", "bias") else f"{m} x {n}"
            shape = "{} x {}".format(*x.shapes[item])
            raise LayoutError(f"item {item} of {name} is {shape}, but must be {wanted}: item {item} of C is {m} x {n}")
        check_kind(name, x.dtype, self._C.dtype)
