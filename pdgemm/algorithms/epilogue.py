"""Epilogues: elementwise operations at the end of a product, checked before it, and applied once after the last sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, get_args

import numpy as np

from pdgemm.algorithms.plan_workspace import Workspace
from pdgemm.errors import ArgumentError, DeviceError, DTypeError, LayoutError
from pdgemm.instrument.spans import timed
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.activations import Finish
from pdgemm.local.arrays.arguments import as_name
from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.dtypes import RESULTS, TYPE, kind_rank
from pdgemm.local.arrays.elementwise import CONVERT
from pdgemm.matrix.argument_checks import as_scalar, check_dtype, check_matrices, check_result, shape_of
from pdgemm.matrix.array_functions import part_of_broadcast
from pdgemm.matrix.batch import Batch, empty_items
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.names import Activation
from pdgemm.planning.ending import Ending, EpilogueOperand, OperandName, vector_operand
from pdgemm.planning.product_plan import ProductPlan
from pdgemm.support.agreement import described_elements

Vector = DistMatrix | Batch | np.ndarray
_VECTORS: tuple[OperandName, ...] = ("scale", "bias")


@dataclass(frozen=True, kw_only=True, eq=False)
class Epilogue:
    """The elementwise operations at the end of a product, with S = alpha op(A) op(B) + beta C:

        C := f(scale S + bias) + residual                  aux := scale S + bias
        C := (scale S) f'(aux) + residual                  gradient=True, in a backward pass

    scale : a number, or a vector: a number for each column, (n,) or (1, n), or for each row, (m, 1).
    bias : a vector or a number.  A vector is an array that is equal on all ranks, or a DistMatrix of one row or one
        column, of any layout over the ranks of C.
    activation : f, elementwise: "relu", "gelu" (z Phi(z), Phi the normal distribution), "gelu_tanh" (its approximation,
        as in cuBLASLt) or "silu" (z / (1 + exp(-z))).  None: the identity.
    residual : DistMatrix (m, n) of any layout over the ranks of C; it must not share memory with C.
    aux : DistMatrix (m, n) in the layout of C, overwritten with the argument of f; with `gradient` it is read.

    In `matmul_batched`, each DistMatrix is a Batch with the owners of C; its items have the shapes of C's items or, as
    a scale or bias, of one row or column of them.  An array is used for all items.

    The epilogue is computed in the type of accumulation, once, after the last sum, and then rounded to the type of C.
    Products may be real or complex; an activation needs a real product.  Operands may have any real type, or a complex
    type if C is complex.

    Cost: one pass over C on each rank; n words of a distributed row are sent to each row of the grid, m words of a
    distributed column to each column; a residual in another layout is redistributed.  Where C is narrower than the type
    of accumulation, the sums need mn/P more words of memory.
    Error: that of the product, times |f'| <= 1.13, and some units in the last place of the type of accumulation.

        hidden = Epilogue(bias=b, activation="gelu", aux=Z)
        Y = pdgemm(1, X, W1, epilogue=hidden)                                  # Z = X W1 + b, Y = gelu(Z)
        dZ = pdgemm(1, dO, W2, transb="T", epilogue=hidden.backward())         # dZ = (dO W2^T) gelu'(Z)
        db = dZ.sum(axis=0)
    """

    bias: Vector | complex | None = None
    activation: Activation | None = None
    residual: DistMatrix | Batch | None = None
    scale: Vector | complex | None = None
    aux: DistMatrix | Batch | None = None
    gradient: bool = False

    def backward(self) -> Epilogue:
        """Return the epilogue of the backward pass: it multiplies the gradient with respect to f by f'(aux).

        Raises ArgumentError without `activation` or `aux`, or if `gradient` is already True.
        """
        if self.aux is None or self.activation is None or self.gradient:
            raise ArgumentError("backward() needs an epilogue with an activation and aux, and gradient=False")
        return Epilogue(activation=self.activation, aux=self.aux, gradient=True)

    @property
    def operands(self) -> dict[str, DistMatrix]:
        """The operands that are a DistMatrix, by name."""
        fields = {name: getattr(self, name) for name in ("scale", "bias", "residual", "aux")}
        return {name: x for name, x in fields.items() if isinstance(x, DistMatrix)}

    @property
    def text(self) -> str:
        """The formula, for reports."""
        product = "S" if self.scale is None else "scale S"
        if self.gradient:
            value = f"({product}) {self.activation}'(aux)"
        else:
            value = product if self.bias is None else f"{product} + bias"
            value = f"{self.activation}({value})" if self.activation else value
        return value if self.residual is None else f"{value} + residual"

    def described(self) -> str:
        """Return the values that must be equal on all ranks, as text."""
        values = [getattr(self, name) for name in _VECTORS]
        arrays = [described_elements(np.asarray(x)) for x in values if not isinstance(x, DistMatrix | Batch | None)]
        return f"epilogue {self.text}, {self.aux is not None}, {arrays}"


def ending_of(epilogue: Any, matrices: dict[str, DistMatrix], accumulate: np.dtype) -> Ending | None:
    """Check an epilogue, and return its description for the planner; None if there is no epilogue.  Local.

    matrices : A, B and C, by name.
    """
    if epilogue is None:
        return None
    check_form(epilogue, accumulate)
    C, grid = matrices["C"], matrices["A"].grid
    _check(epilogue, matrices)
    there, operands = C.layout_in(grid), list[EpilogueOperand]()
    for name in _VECTORS:
        x = getattr(epilogue, name)
        if isinstance(x, DistMatrix):
            operands.append(vector_operand(name, x.layout_in(grid), there))
        elif x is not None:
            check_vector(name, x, C.shape, C.dtype)
    if epilogue.residual is not None:
        here = epilogue.residual.layout_in(grid)
        operands.append(EpilogueOperand("residual", here, replace(there, dtype=here.dtype)))
    if epilogue.aux is not None and not epilogue.aux.layout_in(grid).same_owners(there):
        raise LayoutError(f"aux must have the layout of C, {there}; got {epilogue.aux.layout_in(grid)}")
    return Ending(C.dtype, epilogue.text, tuple(operands))


def check_form(epilogue: Any, accumulate: np.dtype) -> None:
    """Raise if an epilogue does not fit the type of the sums, or its operands cannot be combined."""
    if not isinstance(epilogue, Epilogue):
        raise ArgumentError(f"epilogue must be an Epilogue, got {type(epilogue).__name__}")
    if kind_rank(accumulate) == 0:
        raise DTypeError(f"an epilogue is for real and complex products; these sums are {accumulate}")
    if epilogue.activation is not None:
        as_name(epilogue.activation, "activation", get_args(Activation))
        if kind_rank(accumulate) == 2:
            raise DTypeError(f"activation {epilogue.activation!r} is for real products; these sums are {accumulate}")
    if epilogue.gradient and (epilogue.aux is None or not epilogue.activation or epilogue.bias is not None):
        raise ArgumentError("gradient=True needs an activation and aux, and no bias: aux contains the bias")


def _check(epilogue: Epilogue, matrices: dict[str, DistMatrix]) -> None:
    """Raise if an operand does not match C, or shares memory with C or aux."""
    C = matrices["C"]
    for name in ("residual", "aux"):
        if not isinstance(getattr(epilogue, name), DistMatrix | None):
            check_matrices(**{name: getattr(epilogue, name)})
    for name, x in epilogue.operands.items():
        check_matrices(**{name: x})
        wanted = [C.shape] if name in ("residual", "aux") else [(1, C.shape[1]), (C.shape[0], 1)]
        if x.shape not in wanted:
            raise LayoutError(
                f"{name} is {shape_of(x)} on a {x.grid} grid, C is {shape_of(C)} on a {C.grid} grid: {name} must be "
                + " or ".join(f"{m} x {n}" for m, n in wanted)
            )
        if x.device != C.device:
            raise DeviceError(f"{name} is on {x.device}, C on {C.device}: copy it with to_device")
        if x.conjugated:
            raise ArgumentError(f"{name} is the conjugate of another matrix: pass a copy")
        check_dtype(name, x, RESULTS)
        check_kind(name, x.dtype, C.dtype)
    check_result("C", C, epilogue.operands)
    if epilogue.aux is not None and not epilogue.gradient:
        read = matrices | epilogue.operands
        check_result("aux", read.pop("aux"), read)


def check_vector(name: str, x: Any, shape: tuple[int, int], dtype: np.dtype) -> None:
    """Raise if a number or an array cannot be the scale or bias of a C of this shape and type."""
    if np.ndim(x) == 0:
        as_scalar(x, dtype, name)
        return
    if not isinstance(x, np.ndarray):
        raise DTypeError(f"{name} must be a number, array, DistMatrix or (of batches) a Batch; got {type(x).__name__}")
    m, n = shape
    if x.shape not in ((n,), (1, n), (m, 1)):
        raise LayoutError(f"{name} has the shape {x.shape}, C is {m} x {n}: use ({n},), (1, {n}) or ({m}, 1)")
    check_kind(name, x.dtype, dtype)


def check_kind(name: str, x: np.dtype, C: np.dtype) -> None:
    """Raise DTypeError if a result of type C cannot hold numbers of type x."""
    if x not in TYPE or kind_rank(x) > kind_rank(C):
        raise DTypeError(f"{name} is {x}, which a result of {C} cannot hold")


class EpilogueRun:
    """An epilogue with its buffers, to be applied any number of times.  Local.

    sums : the matrix to which the product writes the sums S; this is C itself if C has the type of accumulation.
    sources : by name, this rank's source array of each operand that the plan redistributes.
    """

    def __init__(self, epilogue: Epilogue, plan: ProductPlan, C: DistMatrix, workspace: Workspace) -> None:
        self._epilogue, self._C, self._workspace = epilogue, C, workspace
        buffer = workspace.sums
        self.sums = C if buffer is None else type(C)(buffer, C.grid, C.distribution, C.order)
        assert plan.problem.ending is not None
        self._moved = [x.name for x in plan.problem.ending.moved]  # in the same order on all ranks
        self.sources: dict[str, Array] = {name: self._source(name) for name in self._moved}

    def _operand(self, name: str) -> Any:
        """Return the part of an operand that matches this rank's part of C, with its current elements."""
        x, C = getattr(self._epilogue, name), self._C
        if name in self._moved:
            return self._workspace.copies[name]
        if isinstance(x, DistMatrix):
            return x.stored
        if not np.ndim(x):
            return None if x is None else as_scalar(x, C.dtype, name)
        part, device = part_of_broadcast(x, *C.indices()), devices.of(C.stored)
        return device.to_device(part, "C") if device else part

    def _source(self, name: str) -> Array:
        """Return the array from which this rank sends an operand: its part of a residual, or copies of a vector."""
        return self._workspace.repeated.get(name, getattr(self._epilogue, name).stored)

    def begin(self, beta: Any) -> None:
        """Copy C to `sums`, unless `sums` is C or beta is 0; fill the buffers with copies of the vectors to be sent."""
        if self.sums is not self._C and beta != 0:
            CONVERT(self.sums.stored, self._C.stored)
        for name, copies in self._workspace.repeated.items():
            x = self._epilogue.operands[name]
            row, copies = (x.stored, copies) if x.shape == (1, self._C.shape[1]) else (x.stored.T, copies.T)
            for at in range(copies.shape[0]) if copies.size else ():
                CONVERT(copies[at : at + 1], row)

    def end(self, report: Callable[[], Any]) -> Callable[[], Any]:
        """Apply the epilogue to `sums`, and write C; return a function that adds the seconds to the report."""
        C, epilogue, start = self._C, self._epilogue, perf_counter()
        operands = {name: self._operand(name) for name in ("scale", "bias", "residual", "aux")}
        with np.errstate(all="ignore"), timed("epilogue"):
            Finish(epilogue.activation or "", epilogue.gradient, **operands)(C.stored, self.sums.stored)
            if device := devices.of(C.stored):
                device.current_stream().synchronize()
        seconds = perf_counter() - start

        def extended() -> Any:
            product = report()
            computing = product.compute_seconds + seconds
            return product.changed(seconds=product.seconds + seconds, compute_seconds=computing)

        return extended


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
