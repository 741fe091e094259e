"""einsum() and tensordot(): contractions of tensors, one pair after the other, in planned order and layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pdgemm.algorithms.redistribution import redistribute
from pdgemm.errors import ArgumentError, DTypeError, GridError, LayoutError
from pdgemm.gemm import pdgemm
from pdgemm.instrument.run_report import RunReport
from pdgemm.linalg.work import Work
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays import dtypes
from pdgemm.local.arrays.elementwise import CONVERT
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.planning.contractions import ELEMENTWISE, LOOP, STACK, Contraction, Operand, Pair, Setting, contraction
from pdgemm.planning.machines.machine import Machine, machine_at_hand, on_nodes
from pdgemm.planning.einsum_plan import Expression, parsed
from pdgemm.support.agreement import together
from pdgemm.tensors.dist_tensor import DistTensor, tensor_of
from pdgemm.tensors.tensor_functions import whole_if_small
from pdgemm.tensors.tensor_moves import moved


def einsum(
    expression: Any,
    *operands: Any,
    out: DistTensor | None = None,
    alpha: complex = 1,
    beta: complex = 0,
    optimize: Any = True,
    memory_limit: int | None = None,
) -> Any:
    """Compute out := alpha sum A[..] B[..] ... + beta out in Einstein's notation.  Collective over the grid.

        einsum("ijab,abkl->ijkl", V, T)

    expression : as for numpy.einsum: a letter for each axis, repeated letters, "..." and an implicit result included;
        or operands and lists of axis numbers in turns.
    operands   : DistTensor, DistMatrix, or arrays that are the same on every rank.
    out        : DistTensor of the shape of the result, overwritten, not read if beta is 0.   None: a new tensor.
    optimize   : a plan of `plan_einsum`, or True.
    memory_limit : bytes per rank beyond the operands.

    Returns a tensor; for a result of no axis a number, for one of a single axis an array, on every rank.
    """
    expr, tensors = _operands(expression, operands)
    grid = next(x for x in tensors if isinstance(x, DistTensor)).grid
    work = Work("einsum", memory_limit=memory_limit)
    machine = on_nodes(machine_at_hand(tensors[0].unfolding.device != devices.HOST), grid.ranks_per_node)
    setting = Setting(grid.size, machine, memory_limit, grid.members)
    terms = [_reduced_term(labels, x, expr, at) for at, (labels, x) in enumerate(zip(expr.inputs, tensors))]
    numbers = [x for labels, x in terms if not labels]
    terms = [x for x in terms if x[0]] or [((), numbers.pop())]
    for x in numbers:
        alpha = alpha * x.allgather()[()]
    if len(terms) == 1 and alpha != 1:
        terms = [(terms[0][0], terms[0][1] * alpha)]
    while len(terms) > 1:
        (a, A), (b, B) = terms.pop(0), terms.pop(0)
        kept = set(expr.output).union(*(labels for labels, _ in terms))
        last = not terms
        c = expr.output if last else tuple(dict.fromkeys(x for x in a + b if x in kept))
        pair = Pair(a, b, c)
        plan = contraction(pair, Operand(A.layout, A.dtype), Operand(B.layout, B.dtype), setting)
        C = _contracted(plan, A, B, alpha if last else 1, work)
        terms.insert(0, (c, C))
    (labels, C) = terms[0]
    C = C.transpose([labels.index(x) for x in expr.output])
    return whole_if_small(C)


def _operands(expression: Any, operands: Sequence[Any]) -> tuple[Expression, list[DistTensor]]:
    known = [x for x in (expression, *operands) if isinstance(x, (DistTensor, DistMatrix))]
    if not known:
        raise DTypeError("einsum takes at least one DistTensor or DistMatrix; numpy.einsum takes arrays")
    grid = known[0].grid
    with together(grid.comm) as arguments:
        expr, arrays = parsed(expression, operands)
        arguments += ["einsum", str(expr), *(np.shape(x) for x in arrays)]
    tensors = []
    for x in arrays:
        if isinstance(x, DistMatrix):
            x = tensor_of(x, x.shape)
        elif not isinstance(x, DistTensor):
            x = DistTensor.from_global(np.asarray(x), grid=grid)
        tensors.append(x)
    return expr, tensors


def _reduced_term(labels: tuple[str, ...], x: DistTensor, expr: Expression, at: int) -> tuple[tuple[str, ...], DistTensor]:
    """Return an operand with each of its labels once, and without those that are only summed over."""
    for label in [y for y in dict.fromkeys(labels) if labels.count(y) > 1]:
        x, labels = _diagonal(x, labels, label)
    others = set(expr.output).union(*(y for other, y in enumerate(expr.inputs) if other != at))
    thin = [axis for axis, y in enumerate(labels) if x.shape[axis] == 1 != expr.extents[y]]
    gone = [axis for axis, y in enumerate(labels) if y not in others and axis not in thin]
    if gone + thin:
        x = x.sum(tuple(gone + thin), keepdims=True)
        x = DistTensor(x.unfolding, x.layout.without(gone + thin))
        labels = tuple(y for axis, y in enumerate(labels) if axis not in gone + thin)
    return labels, x


def _diagonal(x: DistTensor, labels: tuple[str, ...], label: str) -> tuple[DistTensor, tuple[str, ...]]:
    """Return the elements whose indices along the axes of one label are equal; the first of these axes is kept."""
    first, *others = (axis for axis, y in enumerate(labels) if y == label)
    layout = x.layout
    if set(layout.divided) & {first, *others}:
        kept = [axis for axis in range(x.ndim) if axis not in others]
        target = x._default([x.shape[axis] for axis in kept]).expanded(others, [x.shape[axis] for axis in others])
        x = moved(x, target, name="diagonal")
    n = x.layout.indices(first, x.grid.coords)
    there = x.layout.without(others)

    def elements() -> Any:
        y = np.moveaxis(x.local, [first, *others], range(1 + len(others)))
        y = y[(np.arange(len(n)), *[n] * len(others))]
        return np.moveaxis(y, 0, first - sum(z < first for z in others))

    return x._new(there, x.dtype, elements), tuple(y for axis, y in enumerate(labels) if axis not in others)


def _contracted(plan: Contraction, A: DistTensor, B: DistTensor, alpha: complex, work: Work) -> DistTensor:
    """Return alpha A B, moved and multiplied as planned."""
    chosen, pair = plan.chosen, plan.pair
    if chosen.way == ELEMENTWISE:
        a, b = (_aligned(x, labels, pair.c) for x, labels in ((A, pair.a), (B, pair.b)))
        C = a * b
        return C if alpha == 1 else C * alpha
    A, B = (_moved(x, to, work) for x, to in ((A, chosen.A), (B, chosen.B)))
    dtype = dtypes.product(A.dtype, B.dtype)
    C = DistTensor._allocated(chosen.C, A.grid, dtype, A.unfolding.device)
    m, n, k = plan.mnk
    if not m * n * plan.extent(chosen.batch):
        return C
    if chosen.way == STACK:
        _stacked(plan, A, B, alpha, C)
        return C
    rows, inner, cols = (lambda labels, x: tuple(labels.index(y) for y in x)), chosen.inner, chosen.cols
    if chosen.way == LOOP:
        return _looped(plan, A, B, alpha, C, work)
    X, Y, Z = _matrix(A, pair.a, chosen.rows), _matrix(B, pair.b, inner), _matrix(C, pair.c, chosen.rows)
    work.product(alpha, X, Y, 0, Z)
    return C


def _matrix(x: DistTensor, labels: tuple[str, ...], rows: tuple[str, ...]) -> DistMatrix:
    """Return the unfolding with these rows, or its transpose."""
    held = tuple(labels[axis] for axis in x.layout.rows)
    return x.unfolding if held == rows else x.unfolding.T


def _moved(x: DistTensor, target: Any, work: Work) -> DistTensor:
    y = moved(x, target)
    if y is not x and y.unfolding.later_report is not None:
        work.did(y.unfolding)
    return y


def _aligned(x: DistTensor, labels: tuple[str, ...], c: tuple[str, ...]) -> DistTensor:
    """Return a tensor with its axes in the order of the labels `c`, and new axes of extent 1 for other labels."""
    x = x.transpose([labels.index(y) for y in c if y in labels])
    return x.expanded([at for at, y in enumerate(c) if y not in labels])


def _stacked(plan: Contraction, A: DistTensor, B: DistTensor, alpha: complex, C: DistTensor) -> None:
    """Compute C := alpha A B for this rank's part of the batch.  Local."""
    chosen, pair = plan.chosen, plan.pair
    with together(C.grid.comm) as arguments:
        if C.local.size:
            c = C.local.transpose([pair.c.index(x) for x in chosen.batch + chosen.rows + chosen.cols])
            a = A.local.transpose([pair.a.index(x) for x in chosen.batch + chosen.rows + chosen.inner])
            b = B.local.transpose([pair.b.index(x) for x in chosen.batch + chosen.inner + chosen.cols])
            nb = len(chosen.batch)
            items = int(np.prod(c.shape[:nb]))
            m, n, k = plan.mnk
            c[...] = (alpha * np.matmul(a.reshape(items, m, k), b.reshape(items, k, n))).reshape(c.shape)


def _looped(plan: Contraction, A: DistTensor, B: DistTensor, alpha: complex, C: DistTensor, work: Work) -> DistTensor:
    """Compute C := alpha A B, one index of the batch after the other, on all ranks."""
    chosen, pair = plan.chosen, plan.pair
    parts = []
    for x, labels, rows in ((A, pair.a, chosen.rows), (B, pair.b, chosen.inner), (C, pair.c, chosen.rows)):
        axes = [labels.index(y) for y in chosen.batch]
        part = x._new(x.layout.without(axes), x.dtype, lambda x=x: np.zeros((), x.dtype))
        left = tuple(y for y in labels if y not in chosen.batch)
        parts.append((x, labels, part, _matrix(part, left, rows)))
    for index in np.ndindex(*(plan.extents[y] for y in chosen.batch)):
        at = dict(zip(chosen.batch, index))
        for x, labels, part, _ in parts[:2]:
            part.local[...] = x.local[tuple(at.get(y, slice(None)) for y in labels)]
        (*_, X), (*_, Y), (*_, Z) = parts
        work.product(alpha, X, Y, 0, Z)
        C.local[tuple(at.get(y, slice(None)) for y in pair.c)] = parts[2][2].local
    return C


def tensordot(a: Any, b: Any, axes: Any = 2) -> Any:
    """Return sums of products over pairs of axes, as numpy.tensordot.  Collective; see `einsum`."""
    known = a if isinstance(a, (DistTensor, DistMatrix)) else b
    with together(known.grid.comm) as arguments:
        na, nb = np.ndim(a) if not hasattr(a, "ndim") else a.ndim, np.ndim(b) if not hasattr(b, "ndim") else b.ndim
        if np.ndim(axes) == 0:
            axes = range(na - int(axes), na), range(int(axes))
        here, there = (np.lib.array_utils.normalize_axis_tuple(x, n) for x, n in zip(axes, (na, nb)))
        arguments += ["tensordot", here, there]
        if len(here) != len(there):
            raise LayoutError(f"tensordot sums over pairs of axes, got {here} and {there}")
    of_a, of_b = list(range(na)), list(range(na, na + nb))
    for x, y in zip(here, there):
        of_b[y] = of_a[x]
    free = [x for x in of_a if x not in {of_a[y] for y in here}] + [x for x in of_b if x >= na]
    return einsum(a, of_a, b, of_b, free)
