"""verify_einsum() checks a result of einsum with random vectors, without a second contraction (Freivalds 1979)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.local.arrays import dtypes
from pdgemm.local.arrays.device import to_host
from pdgemm.matrix.residual import Residual, random_vectors
from pdgemm.planning.tensors.expression import Expression, Labels
from pdgemm.support.agreement import together
from pdgemm.tensors.dist_tensor import DistTensor

_VECTORS = "vectors"  # the label of the axis of random vectors
_SOME = 3  # indices of each label of the result that several operands have
_ELEMENTS = 1 << 20  # elements that are contracted with vectors at a time

Held = tuple[Labels, np.ndarray]


def image_size(expression: Expression) -> int:
    """Return the numbers that a rank holds at a time for `verify_einsum`: the images of all operands, of both kinds."""
    vectors, some = _chosen(expression, 0)
    extent = {**expression.extent, **{x: len(at) for x, at in some.items()}}
    of_images = [[extent[x] for x in {*labels} - {*vectors}] for labels in (*expression.inputs, expression.output)]
    return 4 * sum(int(np.prod(x)) for x in of_images)


def verify_einsum(
    expression: Expression, operands: Sequence[DistTensor], C: Any, alpha: complex = 1, seed: int = 0
) -> Residual:
    """Compare C with alpha times the einsum of the operands, both contracted with random vectors.  Collective.

    C : the result of `einsum`, a tensor, or the array or number of each rank.

    An index of the result that one operand has is summed with two random vectors of [-1, 1); of an index that several
    operands have, such as one of a batch, a few random values are compared.  The operands are contracted with these
    first, each by itself, to images that have only the indices that several operands share; NumPy contracts the images
    on each rank in double precision.  The bound is that of `residual.verify`, for each contraction of two operands.
    Cost: two passes over each operand, and memory for the images.
    """
    result = C if isinstance(C, DistTensor) else DistTensor.from_global(np.asarray(C), grid=operands[0].grid)
    vectors, some = _chosen(expression, seed)
    kept, own = _image(expression.output, result, expression, vectors, some, False)
    tensors = [*zip(expression.inputs, operands)]
    expected, scale = (
        np.einsum(*_arguments([_image(*x, expression, vectors, some, absolute) for x in tensors], kept), optimize=True)
        for absolute in (False, True)
    )
    expected, scale = alpha * expected, abs(alpha) * scale
    inner = [x for x, _ in expression.extents if x not in expression.output]
    longest = max(expression.size(inner), expression.size([x for x in expression.output if x in vectors]))
    dtype = result.dtype
    unit = max(dtypes.eps(dtypes.arithmetic(dtype)), dtypes.eps(np.float64))
    rounded = dtypes.eps(dtype) / 2 if dtype in dtypes.NARROW else 0.0
    bound = len(operands) * (3 * float(np.sqrt(longest + 2)) * unit + rounded)
    left, right = np.atleast_1d(own).ravel(), np.atleast_1d(expected).ravel()
    size = np.atleast_1d(scale).ravel()
    finite = np.isfinite(left), np.isfinite(right) & np.isfinite(size)
    return Residual.of(left, right, (size, size), finite, bound)


def _chosen(expression: Expression, seed: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the random vectors of some labels, and the indices of others, as in `verify_einsum`."""
    rng, vectors, some = np.random.default_rng(seed), dict[str, np.ndarray](), dict[str, np.ndarray]()
    for number, (label, n) in enumerate(expression.extents):
        holders = sum(label in labels for labels in expression.inputs)
        if label in expression.output and holders > 1:
            some[label] = np.sort(rng.permutation(n)[:_SOME])
        elif holders == 1:
            summed = label not in expression.output
            vectors[label] = np.ones(n) if summed else random_vectors(n, seed + number)
    return vectors, some


def _image(
    labels: Labels,
    x: DistTensor,
    expression: Expression,
    vectors: Mapping[str, np.ndarray],
    some: Mapping[str, np.ndarray],
    absolute: bool,
) -> Held:
    """Return a tensor contracted with the vectors of its labels, at some indices of others, whole on every rank.

    absolute : of the absolute values of all numbers.
    """
    thin = [n == 1 < expression.extent[label] for n, label in zip(x.shape, labels)]  # broadcast along the label
    every = dict.fromkeys(label for label, one in zip(labels, thin) if not one)
    kept = tuple(y for y in every if y not in vectors)
    summed = {y: np.abs(vectors[y]) if absolute else vectors[y] for y in every if y in vectors}
    kept += (_VECTORS,) if any(vector.ndim > 1 for vector in summed.values()) else ()
    lengths = [2 if y == _VECTORS else len(some[y]) if y in some else expression.extent[y] for y in kept]
    dtype = np.float64 if absolute else np.result_type(x.dtype, np.float64)
    with together(x.grid.comm):
        image = np.zeros(lengths, dtype)
        local = to_host(x.local)
        indices = x.indices() if local.size else []
        longest = int(np.argmax(local.shape)) if local.ndim else 0
        step = max(1, _ELEMENTS * (local.shape or (1,))[longest] // max(1, local.size))
        for start in range(0, (local.shape or (1,))[longest] if local.size else 0, step):
            held = {y: some.get(y, np.arange(expression.extent[y])) for y in every}  # the indices of this part
            own = [y[start : start + step] if axis == longest else y for axis, y in enumerate(indices)]
            for axis, label in enumerate(labels):
                if not thin[axis]:
                    held[label] = np.intersect1d(held[label], own[axis], assume_unique=True)
            picks = [[0] if thin[axis] else np.searchsorted(y, held[labels[axis]]) for axis, y in enumerate(own)]
            at = [np.asarray(y) + (start if axis == longest else 0) for axis, y in enumerate(picks)]
            part = local[np.ix_(*at)] if at else local
            part = np.squeeze(np.abs(part) if absolute else part, tuple(np.flatnonzero(thin)))
            terms = [(tuple(y for y, one in zip(labels, thin) if not one), part)]
            terms += [((y, _VECTORS)[: vector.ndim], vector[held[y]]) for y, vector in summed.items()]
            places = [
                np.arange(2) if y == _VECTORS else np.searchsorted(some[y], held[y]) if y in some else held[y]
                for y in kept
            ]
            value = np.einsum(*_arguments(terms, kept), optimize=True)
            if kept:
                image[np.ix_(*places)] += value
            else:
                image += value
    x.grid.comm.Allreduce(MPI.IN_PLACE, image, MPI.SUM)
    return kept, image


def _arguments(terms: Sequence[Held], output: Labels) -> list[Any]:
    """Return the arguments of numpy.einsum for arrays with labels."""
    number = {y: at for at, y in enumerate(dict.fromkeys(y for labels, _ in terms for y in labels))}
    arguments: list[Any] = []
    for labels, array in terms:
        arguments += [array.astype(np.result_type(array, np.float64), copy=False), [number[y] for y in labels]]
    return [*arguments, [number[y] for y in output if y in number]]
