"""einsum() and tensordot(): the execution of plans of contractions."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from pdgemm.algorithms.product_options import FullProduct, Operands, ProductOptions
from pdgemm.batched import matmul_batched
from pdgemm.errors import DTypeError, LayoutError
from pdgemm.gemm import carried_out
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.grids.tensor_layout import TensorLayout
from pdgemm.linalg.work import Work
from pdgemm.local.arrays import device as devices, dtypes
from pdgemm.local.arrays.device import beside
from pdgemm.local.arrays.elementwise import is_extension, set_broadcast, supported
from pdgemm.matrix.argument_checks import as_scalar, check_result
from pdgemm.matrix.array_functions import check_one_device
from pdgemm.matrix.batch import Batch
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import new_array
from pdgemm.planning.tensors.contractions import ELEMENTWISE, STACK, Contraction, aligned_layout
from pdgemm.planning.tensors.einsum_plan import (
    Diagonal,
    EinsumPlan,
    Joint,
    Move,
    Single,
    machine_beneath,
    plan_of,
    sums_dtype,
)
from pdgemm.planning.tensors.expression import Expression, parsed
from pdgemm.planning.tensors.resources import Resources, TensorValue
from pdgemm.support.agreement import agree_if_later, together
from pdgemm.tensors.dist_tensor import DistTensor
from pdgemm.tensors.indexing.tensor_copies import operand_tensor
from pdgemm.tensors.tensor_base import in_layout, spread


def einsum(
    expression: Any,
    *operands: Any,
    out: DistTensor | None = None,
    alpha: complex = 1,
    beta: complex = 0,
    optimize: EinsumPlan | bool = True,
    memory_limit: int | None = None,
) -> Any:
    """Compute out := alpha sum A[..] B[..] ... + beta out in Einstein's notation.  Collective over the grid.

        einsum("ijab,abkl->ijkl", V, T)

    expression : as for numpy.einsum: a letter for each axis, repeated letters, "..." and an implicit result included;
        or operands and lists of axis numbers in turns.
    operands   : DistTensor, DistMatrix, or arrays that are the same on every rank; of arrays only, the result is that
        of numpy.einsum.
    out        : DistTensor of the shape of the result, overwritten, not read if beta is 0; it shares no memory with an
        operand.   None: a new tensor.
    optimize   : the plan of `plan_einsum` for tensors of these layouts; otherwise a plan is made, and kept for the next
        call with such tensors.
    memory_limit : bytes per rank for moved operands, intermediate results and buffers.

    Returns a tensor; for a result without axes a number, for one with a single axis an array, on every rank.  The
    tensor's `report` has the words of all exchanges and products, as counted and as planned.
    Cost: that of the plan.  Error: that of the products, see `pdgemm`.
    Raises ArgumentError, LayoutError, DTypeError, MemoryLimitError, on every rank; messages name the expression.
    """
    known = [x for x in (out, expression, *operands) if isinstance(x, (DistTensor, DistMatrix))]
    if not known:  # opt_einsum contracts intermediate results of one axis, which are arrays
        return alpha * np.einsum(expression, *operands, optimize=True)
    grid, work = known[0].grid, Work("einsum", memory_limit=memory_limit)
    later = all(x.grid.comm is grid.comm for x in known)  # the next agreement is over this communicator
    with together(grid.comm, later=later) as arguments:
        expr, tensors = parsed(expression, operands)
        arguments += ["einsum", str(expr), *expr.extents, memory_limit, alpha, beta]
        if out is not None:
            _check_out(expr, out)
    like = operand_tensor(known[0], known[0])
    tensors = [operand_tensor(x, like) for x in tensors]
    with together(grid.comm, later=later) as arguments:
        plan = _planned(expr, tensors, out, optimize, memory_limit)
        arguments.append(plan.description)
        alpha = as_scalar(alpha, plan.result[1].dtype, "alpha")
        if out is not None:  # slices write it before operands are read for the last time
            beta = as_scalar(beta, out.dtype, "beta")
            if not dtypes.can_convert(plan.result[1].dtype, out.dtype):
                raise DTypeError(f"einsum {expr}: the result is {plan.result[1].dtype}, and out {out.dtype}")
            check_result("out", out.unfolding, {f"operand {at}": x.unfolding for at, x in enumerate(tensors, 1)})
    C = _carried_out(plan, tensors, alpha, beta, out, work)
    agree_if_later(grid.comm)
    kind = next((type(x) for x in known if isinstance(x, DistTensor)), DistTensor)
    if out is None and C.dtype == np.int32 and kind.narrow_products:
        C = C.astype(dtypes.common(*(x.dtype for x in tensors)))
    work.reported(C.unfolding, plan.contractions)
    if out is not None:
        return out
    return kind(C.unfolding, C.layout)._result()


def _check_out(expr: Expression, out: Any) -> None:
    """Raise TypeError or LayoutError unless `out` is a tensor of the shape of the result.  Local."""
    if not isinstance(out, DistTensor):
        raise TypeError(f"einsum {expr}: out is a {type(out).__name__}, and not a DistTensor")
    if out.ndim != len(expr.output):
        raise LayoutError(f"einsum {expr}: the result has {len(expr.output)} axes, and out the shape {out.shape}")
    for label, n in zip(expr.output, out.shape):
        if n != expr.extent[label]:
            raise LayoutError(f"einsum {expr}: index {label!r} has the extents {expr.extent[label]} and {n}, of out")


def _planned(
    expr: Expression, tensors: Sequence[DistTensor], out: DistTensor | None, optimize: Any, memory_limit: int | None
) -> EinsumPlan:
    """Return the plan of an einsum of tensors.  Raises LayoutError if the caller's plan is another one.  Local."""
    check_one_device(f"einsum {expr}", [x for x in (*tensors, out) if x is not None])
    values, grid = tuple(TensorValue(x.layout, x.dtype) for x in tensors), tensors[0].grid
    if isinstance(optimize, EinsumPlan):
        if (str(optimize.expression), optimize.operands) != (str(expr), values):
            raise LayoutError(f"the plan was made for {optimize.expression} and other layouts than those of {expr}")
        return optimize
    resources = Resources(grid.size, machine_beneath(tensors[0]), memory_limit, grid.members)
    return plan_of(expr, values, resources, None if out is None else out.layout)


def _carried_out(
    plan: EinsumPlan, tensors: list[DistTensor], alpha: Any, beta: complex, out: DistTensor | None, work: Work
) -> DistTensor:
    """Return the result of a plan, its axes in the order of the expression's result."""
    for move in plan.before:
        tensors[move.at] = _single(move, tensors[move.at], work)
    for index in np.ndindex(*(plan.expression.extent[x] for x in plan.slices)):
        out, beta = _one_slice(plan, tensors, dict(zip(plan.slices, index)), alpha, beta, out, work), 1
    assert out is not None
    return out


def _one_slice(
    plan: EinsumPlan, tensors: Sequence[DistTensor], at: dict[str, int], alpha: Any, beta: complex,
    out: DistTensor | None, work: Work,
) -> DistTensor:  # fmt: skip
    """Return out := alpha times the sum of products with this index of each slice + beta out.  Collective."""
    terms = [*tensors]
    for number, (x, labels) in enumerate(zip(tensors, plan.expression.inputs)):
        if places := {axis: at[y] if x.shape[axis] > 1 else 0 for axis, y in enumerate(labels) if y in at}:
            terms[number] = x.part(places)
    for step in plan.steps:
        if isinstance(step, Joint):
            last = step is plan.steps[-1]
            end: tuple[Any, complex, DistTensor | None] = (alpha, beta, out) if last else (1, 0, None)
            terms.append(_contracted(step.contraction, terms[step.a], terms[step.b], *end, work))
        else:
            terms[step.at] = _single(step, terms[step.at], work)
    if plan.contractions:
        return terms[-1]
    order = [plan.result[0].index(x) for x in plan.expression.output]
    return _added(terms[0].transpose(order), alpha, beta, out, work)


def _added(C: DistTensor, alpha: Any, beta: complex, out: DistTensor | None, work: Work) -> DistTensor:
    """Return out := alpha C + beta out; a new tensor if out is None."""
    if out is None:
        factor = np.asarray(alpha).astype(C.dtype)[()] if C.dtype.kind in "iu" else alpha  # -1 modulo 2^bits
        return C * factor if alpha != 1 else C.copy()
    work.add(out.unfolding, alpha, _moved(C, out.layout, work).unfolding, beta)
    return out


def _moved(x: DistTensor, target: TensorLayout, work: Work) -> DistTensor:
    y = in_layout(x, target)
    return y if y is x else work.did(y)


def _single(step: Single, x: DistTensor, work: Work) -> DistTensor:
    """Return the result of a step on one tensor."""
    if isinstance(step, Move):
        return _moved(x, step.target, work)
    if isinstance(step, Diagonal):
        return _diagonal(x, step.axes[0], step.axes[1:])
    y = work.did(x.sum(step.axes, keepdims=True))
    if y.dtype != (dtype := sums_dtype(x, step.axes)):
        wide = y
        y = wide.with_elements(wide.layout, dtype, lambda: wide.local)
    return DistTensor(y.unfolding, y.layout.without(step.axes))


def _diagonal(x: DistTensor, first: int, others: Sequence[int]) -> DistTensor:
    """Return the elements whose indices along `first` and the axes `others`, none of which is divided, are equal."""
    n = x.layout.indices(first, x.grid.coords)

    def elements() -> Any:
        y = x.local
        places = {axis: beside(n, y) for axis in others} | {first: beside(np.arange(len(n)), y)}
        kept = [axis for axis in range(x.ndim) if axis not in places]
        y = y.transpose(first, *others, *kept)[tuple(places[axis] for axis in (first, *others))]
        back = sorted(range(1 + len(kept)), key=(first, *kept).__getitem__)
        return y.transpose(back)

    return x.with_elements(x.layout.without(others), x.dtype, elements)


def _contracted(
    x: Contraction, A: DistTensor, B: DistTensor, alpha: Any, beta: complex, out: DistTensor | None, work: Work
) -> DistTensor:
    """Return out := alpha A B + beta out, moved and multiplied as planned; a new tensor if out is None."""
    if x.way == ELEMENTWISE:
        C = _elementwise(x, A, B, alpha, work)
    else:
        A, B = _moved(A, x.A, work), _moved(B, x.B, work)
        if not prod(x.mnk) * x.items:
            dtype = dtypes.product(A.dtype, B.dtype)
            C = DistTensor.zeros(x.C.shape, layout=x.C, grid=A.grid, dtype=dtype, device=A.device)
        elif x.way == STACK:
            C = _stacked(x, A, B, alpha)
        elif x.batch:
            C = _one_by_one(x, A, B, alpha, work)
        elif out is not None and out.layout == x.C:
            return _product(x, A, B, alpha, beta, out, work)
        else:
            C = _product(x, A, B, alpha, 0, None, work)
    return C if out is None else _added(C, 1, beta, out, work)


def _elementwise(x: Contraction, A: DistTensor, B: DistTensor, alpha: Any, work: Work) -> DistTensor:
    """Return alpha A B, the product of elements that are broadcast."""
    parts = []
    for y, labels in ((A, x.pair.a), (B, x.pair.b)):
        wide = DistTensor(y.unfolding, aligned_layout(y.layout, labels, x.pair.c))
        part = spread(wide, x.C)
        parts.append(part if part is wide else work.did(part))
    a, b = parts
    dtype = dtypes.product(A.dtype, B.dtype)
    inner: Any = np.dtype(np.float32) if is_extension(dtype) else dtype
    factor = np.asarray(alpha).astype(inner)[()]  # of integers -1 modulo 2^bits
    return A.with_elements(x.C, dtype, lambda: factor * (a.local.astype(inner, copy=False) * supported(b.local)))


class _InLayout(NamedTuple):
    """The form of a product whose new result is the matrix of a tensor of this layout, or the transpose."""

    layout: TensorLayout
    grid: ProcessGrid
    transposed: bool

    def operands(self, alpha: Any, A: DistMatrix, B: DistMatrix, beta: Any, C: DistMatrix | None) -> Operands:
        """Return the operands after checking that they fit; C is allocated if it is None.  Local."""
        new = C is None
        if C is None:
            there, matrix = self.grid.reshaped(self.layout.grid_shape, self.layout.rank_map), self.layout.matrix
            dtype, device = dtypes.product(A.dtype, B.dtype), devices.of(A.stored)
            C = DistMatrix(new_array(matrix.local_shape(there.coords), dtype, "C", there, device), there, matrix, "C")
            C = C.T if self.transposed else C
        return FullProduct("N", "N").operands(alpha, A, B, beta, C)._replace(new_result=new)


def _product(
    x: Contraction, A: DistTensor, B: DistTensor, alpha: Any, beta: complex, out: DistTensor | None, work: Work
) -> DistTensor:
    """Return out := alpha A B + beta out, one product of matrices; a new tensor if out is None."""
    operands = (_readable(y) if name in x.redistributed else y for name, y in (("A", A), ("B", B)))
    X, Y = (y.unfolding.T if turned else y.unfolding for y, turned in zip(operands, x.transposed))
    Z = None if out is None else out.unfolding.T if x.transposed[2] else out.unfolding
    options = ProductOptions(**x.request._asdict(), memory_limit=work.memory_limit)
    form = _InLayout(x.C, A.grid.base, x.transposed[2])
    Z = work.did(carried_out(form, alpha, X, Y, beta, Z, options))
    work.products += 1
    return DistTensor(Z.T if x.transposed[2] else Z, x.C) if out is None else out


def _readable(x: DistTensor) -> DistTensor:
    """Return a tensor, or a copy that other ranks of the node read in place, as plans expect.  Collective."""
    if x.unfolding.shared or not x.grid.shares_memory:
        return x
    return x.with_elements(x.layout, x.dtype, lambda: x.local)


def _stacked(x: Contraction, A: DistTensor, B: DistTensor, alpha: complex) -> DistTensor:
    """Return alpha A B, each item of the batch on the rank that has it.  Nothing is sent."""
    C = DistTensor._allocated(x.C, A.grid, dtypes.product(A.dtype, B.dtype), A.device)
    comm, (m, n, k), width = C.grid.comm, x.mnk, C.unfolding.distribution
    each = x.extent(x.rows)
    counts = [width.local_shape(C.grid.coords_of(rank))[0] // each for rank in range(comm.size)]
    owner = np.repeat(np.arange(comm.size), counts)
    stacks = []
    for y, shape in ((A, (m, k)), (B, (k, n)), (C, (m, n))):
        items = y.unfolding.local.reshape(counts[comm.rank], *shape)
        shapes = np.tile(np.array(shape), (len(owner), 1))
        stacks.append(Batch(items, shapes, owner.copy(), y.dtype, comm, devices.of(items)))
    matmul_batched(*stacks, alpha=alpha, check=C.device != devices.HOST)
    return C


def _one_by_one(x: Contraction, A: DistTensor, B: DistTensor, alpha: complex, work: Work) -> DistTensor:
    """Return alpha A B, one product of all ranks for each index of the batch."""
    one, Z = x.item, None
    C = DistTensor._allocated(x.C, A.grid, dtypes.product(A.dtype, B.dtype), A.device)
    X, Y = (DistTensor._allocated(to, y.grid, y.dtype, y.device) for to, y in ((one.A, A), (one.B, B)))
    for index in np.ndindex(*(x.extent((y,)) for y in x.batch)):
        at = dict(zip(x.batch, index))
        keys = [tuple(at.get(y, slice(None)) for y in labels) for labels in x.pair]
        for part, y, key in zip((X, Y), (A, B), keys):
            if part.local.size:  # an idle rank has no index of the batch
                set_broadcast(part.local, y.local[key])
        Z = _product(one, X, Y, alpha, 0, Z, work)
        if Z.local.size:
            set_broadcast(C.local[keys[2]], Z.local)
    return C


def tensordot(a: Any, b: Any, axes: Any = 2) -> Any:
    """Return sums of products over pairs of axes, as numpy.tensordot.  Collective; see `einsum`."""
    known = a if isinstance(a, (DistTensor, DistMatrix)) else b
    if not isinstance(known, (DistTensor, DistMatrix)):
        return np.tensordot(a, b, axes)
    with together(known.grid.comm) as arguments:
        shapes = [tuple(x.shape) if hasattr(x, "shape") else np.shape(x) for x in (a, b)]
        na, nb = map(len, shapes)
        if isinstance(axes, (int, np.integer)):
            axes = range(na - axes, na), range(axes)
        here, there = (np.lib.array_utils.normalize_axis_tuple(x, n) for x, n in zip(axes, (na, nb)))
        arguments += ["tensordot", here, there]
        if [shapes[0][x] for x in here] != [shapes[1][x] for x in there]:
            ends = f"{here} of shape {shapes[0]} and {there} of shape {shapes[1]}"
            pairs = [(shapes[0][x], shapes[1][y]) for x, y in zip(here, there)]
            unequal = next((f", of extents {m} and {n}" for m, n in pairs if m != n), "")
            raise LayoutError(f"tensordot sums over pairs of axes of equal extents, got axes {ends}{unequal}")
    of_a, of_b = list(range(na)), list(range(na, na + nb))
    for x, y in zip(here, there):
        of_b[y] = of_a[x]
    free = [x for x in of_a if x not in {of_a[y] for y in here}] + [x for x in of_b if x >= na]
    return einsum(a, of_a, b, of_b, free)
