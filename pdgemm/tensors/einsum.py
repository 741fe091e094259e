"""einsum() and tensordot(): the execution of plans of contractions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pdgemm.batched import matmul_batched
from pdgemm.errors import DTypeError, LayoutError
from pdgemm.linalg.work import Work
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays import dtypes
from pdgemm.local.arrays.device import beside
from pdgemm.local.arrays.elementwise import is_extension, set_broadcast, supported
from pdgemm.matrix.argument_checks import as_scalar, check_result
from pdgemm.matrix.array_functions import check_one_device
from pdgemm.matrix.batch import Batch
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.planning.product_plan import ProductPlan
from pdgemm.planning.tensors.contractions import ELEMENTWISE, LOOP, PRODUCT, STACK, Contraction
from pdgemm.planning.tensors.einsum_plan import DIAGONAL, SUM, EinsumPlan, Single, machine_beneath, plan_of
from pdgemm.planning.tensors.expression import Expression, parsed
from pdgemm.planning.tensors.resources import Resources, TensorValue
from pdgemm.planning.tensors.tensor_layouts import undivided
from pdgemm.support.agreement import together
from pdgemm.tensors.dist_tensor import DistTensor
from pdgemm.tensors.tensor_moves import in_layout, spread


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
    grid = known[0].grid
    plan: EinsumPlan | None = None
    with together(grid.comm) as arguments:
        expr, tensors = parsed(expression, operands)
        arguments += ["einsum", str(expr), *expr.extents, memory_limit, alpha, beta]
        if out is not None:
            _check_out(expr, out)
        if all(isinstance(x, DistTensor) for x in tensors):  # one agreement is enough
            plan = _planned(expr, tensors, out, optimize, memory_limit)
            arguments.append(plan.description)
    if plan is None:
        tensors = [_as_tensor(x, known[0]) for x in tensors]
        with together(grid.comm) as arguments:
            plan = _planned(expr, tensors, out, optimize, memory_limit)
            arguments.append(plan.description)
    # all ranks have the same numbers, and so the same errors
    alpha = as_scalar(alpha, plan.result[1].dtype, "alpha")
    beta = beta if out is None else as_scalar(beta, out.dtype, "beta")
    if out is not None:  # slices write it before operands are read for the last time
        with together(grid.comm):
            if not dtypes.can_convert(plan.result[1].dtype, out.dtype):
                raise DTypeError(f"einsum {expr}: the result is {plan.result[1].dtype}, and out {out.dtype}")
            check_result("out", out.unfolding, {f"operand {at}": x.unfolding for at, x in enumerate(tensors, 1)})
    work = Work("einsum", memory_limit=memory_limit)
    C = _carried_out(plan, tensors, alpha, beta, out, work)
    work.reported(C.unfolding, plan.contractions)
    if out is not None:
        return out
    kind = next((type(x) for x in known if isinstance(x, DistTensor)), DistTensor)
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


def _as_tensor(x: Any, like: DistTensor | DistMatrix) -> DistTensor:
    """Return a tensor, a matrix or an array as a tensor; an array on the grid and the device of `like`."""
    if isinstance(x, DistMatrix):
        return DistTensor.of_matrix(x, x.shape)
    return x if isinstance(x, DistTensor) else DistTensor.from_global(x, grid=like.grid, device=like.device)


def _carried_out(
    plan: EinsumPlan, tensors: list[DistTensor], alpha: complex, beta: complex, out: DistTensor | None, work: Work
) -> DistTensor:
    """Return the result of a plan, its axes in the order of the expression's result."""
    for step in plan.before:
        tensors[step.at] = _single(step, tensors[step.at], work)
    for index in np.ndindex(*(plan.expression.extent[x] for x in plan.slices)):
        at = dict(zip(plan.slices, index))
        terms = [
            x.part({axis: at[y] if x.shape[axis] > 1 else 0 for axis, y in enumerate(labels) if y in at}) if at else x
            for x, labels in zip(tensors, plan.expression.inputs)
        ]
        out, beta = _steps(plan, terms, alpha, beta, out, work), 1
    assert out is not None
    return out


def _steps(
    plan: EinsumPlan, terms: list[DistTensor], alpha: Any, beta: complex, out: DistTensor | None, work: Work
) -> DistTensor:
    """Return out := alpha times the result of the steps for one index of the slices + beta out."""
    for step in plan.steps:
        if isinstance(step, Single):
            terms[step.at] = _single(step, terms[step.at], work)
        else:
            last = len(terms) == plan.remaining
            scalars: tuple[Any, complex, DistTensor | None] = (alpha, beta, out) if last else (1, 0, None)
            terms.append(_contracted(step.contraction, terms[step.a], terms[step.b], *scalars, work))
    if plan.contractions:
        return terms[-1]
    labels, _ = plan.result
    C = terms[plan.remaining].transpose([labels.index(x) for x in plan.expression.output])
    return _added(C, alpha, beta, out, work)


def _added(C: DistTensor, alpha: Any, beta: complex, out: DistTensor | None, work: Work) -> DistTensor:
    """Return out := alpha C + beta out; a new tensor if out is None."""
    if out is None:
        return C * alpha if np.any(alpha != 1) else C.copy()
    work.add(out.unfolding, alpha, _moved(C, out.layout, work).unfolding, beta)
    return out


def _single(step: Single, x: DistTensor, work: Work) -> DistTensor:
    """Return the result of a step on one tensor."""
    if step.kind == SUM:
        y = x.sum(step.axes, keepdims=True)
        work.did(y)
        if y.dtype != x.dtype and all(x.shape[axis] == 1 for axis in step.axes):  # no sum of integers
            y = y.with_elements(y.layout, x.dtype, lambda: y.local)
        return DistTensor(y.unfolding, y.layout.without(step.axes))
    gone = step.axes[step.kind == DIAGONAL :]
    y = _moved(x, undivided(x.layout, gone, x.grid.members), work)
    return _diagonal(y, step.axes[0], gone) if step.kind == DIAGONAL else y


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
    plan: Contraction, A: DistTensor, B: DistTensor, alpha: Any, beta: complex, out: DistTensor | None, work: Work
) -> DistTensor:
    """Return out := alpha A B + beta out, moved and multiplied as planned; a new tensor if out is None."""
    chosen, pair, dtype = plan.chosen, plan.pair, dtypes.product(A.dtype, B.dtype)
    if chosen.way == ELEMENTWISE:
        wide = [_aligned(x, labels, pair.c) for x, labels in ((A, pair.a), (B, pair.b))]
        a, b = (x if y is x else work.did(y) for x, y in ((x, spread(x, chosen.C)) for x in wide))
        inner: Any = np.dtype(np.float32) if is_extension(dtype) else dtype
        product = lambda: inner.type(alpha) * (a.local.astype(inner, copy=False) * supported(b.local))  # noqa: E731
        C = A.with_elements(chosen.C, dtype, product)
        return C if out is None else _added(C, 1, beta, out, work)
    A, B = (_moved(x, to, work) for x, to in ((A, chosen.A), (B, chosen.B)))
    empty = 0 in (*plan.mnk, plan.extent(chosen.batch))
    in_place = out is not None and out.layout == chosen.C and chosen.way == PRODUCT and not empty
    C = out if out is not None and in_place else DistTensor._allocated(chosen.C, A.grid, dtype, A.device)
    if empty:
        C.unfolding.fill(0)
    elif chosen.way == STACK:
        _stacked(plan, A, B, alpha, C)
    elif chosen.way == LOOP:
        _looped(plan, A, B, alpha, C, work)
    else:
        moved = {name for _, stage in plan.stages if isinstance(stage, ProductPlan) for name, _ in stage.moves}
        A, B = (_readable(x) if name in moved else x for name, x in (("A", A), ("B", B)))
        X, Y, Z = (_matrix(x, labels, rows) for x, labels, rows in zip((A, B, C), pair, chosen.row_labels))
        work.product(alpha, X, Y, beta if in_place else 0, Z, **plan.request._asdict())
    return C if out is None or in_place else _added(C, 1, beta, out, work)


def _readable(x: DistTensor) -> DistTensor:
    """Return a tensor, or a copy that other ranks of the node read in place, as plans expect.  Collective."""
    if x.unfolding.shared or not x.grid.shares_memory:
        return x
    return x.with_elements(x.layout, x.dtype, lambda: x.local)


def _matrix(x: DistTensor, labels: tuple[str, ...], rows: tuple[str, ...]) -> DistMatrix:
    """Return the unfolding with these rows, or its transpose."""
    held = tuple(labels[axis] for axis in x.layout.rows)
    return x.unfolding if held == rows else x.unfolding.T


def _moved(x: DistTensor, target: Any, work: Work) -> DistTensor:
    y = in_layout(x, target)
    return y if y is x else work.did(y)


def _aligned(x: DistTensor, labels: tuple[str, ...], c: tuple[str, ...]) -> DistTensor:
    """Return a tensor with its axes in the order of the labels `c`, and new axes of extent 1 for other labels."""
    x = x.transpose([labels.index(y) for y in c if y in labels])
    return x.expanded([at for at, y in enumerate(c) if y not in labels])


def _stacked(plan: Contraction, A: DistTensor, B: DistTensor, alpha: complex, C: DistTensor) -> None:
    """Compute C := alpha A B, each item of the batch on the rank that has it.  Nothing is sent."""
    comm, (m, n, k), width = C.grid.comm, plan.mnk, C.unfolding.distribution
    each = plan.extent(plan.chosen.rows)
    counts = [width.local_shape(C.grid.coords_of(rank))[0] // each for rank in range(comm.size)]
    owner = np.repeat(np.arange(comm.size), counts)
    stacks = []
    for x, shape in ((A, (m, k)), (B, (k, n)), (C, (m, n))):
        items = x.unfolding.local.reshape(counts[comm.rank], *shape)
        shapes = np.tile(np.array(shape), (len(owner), 1))
        stacks.append(Batch(items, shapes, owner.copy(), x.dtype, comm, devices.of(items)))
    matmul_batched(*stacks, alpha=alpha, check=C.device != devices.HOST)


def _looped(plan: Contraction, A: DistTensor, B: DistTensor, alpha: complex, C: DistTensor, work: Work) -> None:
    """Compute C := alpha A B, one index of the batch after the other, on all ranks."""
    chosen, pair = plan.chosen, plan.pair
    axes = [[labels.index(y) for y in chosen.batch] for labels in pair]
    left = [tuple(y for y in labels if y not in chosen.batch) for labels in pair]
    parts = [
        DistTensor._allocated(x.layout.without(gone), x.grid, x.dtype, x.device) for x, gone in zip((A, B, C), axes)
    ]
    X, Y, Z = (_matrix(*x) for x in zip(parts, left, chosen.row_labels))
    for index in np.ndindex(*(plan.extents[y] for y in chosen.batch)):
        keys = [_place(x.ndim, gone, index) for x, gone in zip((A, B, C), axes)]
        for part, x, key in zip(parts[:2], (A, B), keys):
            if part.local.size:  # an idle rank has no index of the batch
                set_broadcast(part.local, x.local[key])
        work.product(alpha, X, Y, 0, Z, **plan.request._asdict())
        if parts[2].local.size:
            set_broadcast(C.local[keys[2]], parts[2].local)


def _place(ndim: int, axes: Sequence[int], index: Sequence[int]) -> tuple[Any, ...]:
    """Return the key of one index of each of some axes, and of all indices of the others."""
    at = dict(zip(axes, index))
    return tuple(at.get(axis, slice(None)) for axis in range(ndim))


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
