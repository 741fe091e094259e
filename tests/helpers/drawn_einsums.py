"""Draw expressions of einsum, and compare the contractions of tensors with NumPy's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import tiers
from drawn_tensors import elements, matrix_of, tensor_of
from mpi4py import MPI

import pdgemm
from pdgemm import DistMatrix, DistTensor
from pdgemm.array_api import Array
from pdgemm.local.arrays import dtypes
from pdgemm.planning.machines.machine import machine_at_hand, on_nodes
from pdgemm.support.agreement import together

TYPES = ("float64", "float32", "complex128", "complex64", "float16", "bfloat16", "int8", "int64")


def compare(result: Any, expected: Any, magnitude: Any, roundings: int, dtype: np.dtype) -> None:
    """Check a result against a sum of products in double precision.  Collective: all ranks fail, or none.

    A sum of products, each of which takes part in n operations with a rounding, has an error of at most gamma_n =
    nu/(1 - nu) times the sum of the absolute values (Higham 2002, 3.1 and 3.5); u is that of the type of accumulation.
    16-bit results of single contractions are rounded again, at most four times here.
    """
    whole = result.allgather() if isinstance(result, DistTensor) else np.asarray(result)
    with together(MPI.COMM_WORLD):
        assert whole.shape == expected.shape
        assert whole.dtype == dtype
        if dtype.kind in "iu":
            assert np.array_equal(whole, expected.astype(dtype))
            return
        sums = dtypes.TYPE[dtype].sums_dtype
        n = roundings * (4 if dtype.kind == "c" else 1) * dtypes.eps(sums) / 2
        bound = (n / (1 - n) + (8 * dtypes.eps(dtype) if sums != dtype else 0)) * magnitude
        smallest = 1e-4 * roundings if dtype == "float16" else 0  # products below 2^-14 lose digits
        assert (abs(whole.astype(expected.dtype) - expected) <= bound + smallest).all(), (whole, expected)


def reference(expression: str, arrays: list[np.ndarray], *lists: Any) -> tuple[Any, Any, int]:
    """Return the sums of products, of absolute values, and a number of roundings of each product."""
    kind = {"i": np.int64, "c": np.complex128}
    wide = [x.astype(kind.get(x.dtype.kind, np.float64)) for x in arrays]
    terms = 1
    for n in {letter: n for x, y in zip(expression.split("->")[0].split(","), arrays)
              for letter, n in zip(x, y.shape)}.values():  # fmt: skip
        terms *= max(1, n)
    of = [np.asarray(np.einsum(expression, *x, optimize=len(x) > 1)) for x in (wide, [abs(x) for x in wide])]
    return *of, terms + 2 * len(arrays) + 4


def machine_of(grid: Any) -> Any:
    return on_nodes(machine_at_hand(), grid.ranks_per_node)


def checked(expression: str, arrays: list[np.ndarray], operands: list[Any], grid: Any, **options: Any) -> Any:
    """Check an einsum, the words of its plan, and that its operands do not change.  Collective.

    operands : tensors, matrices or arrays.
    """
    result = pdgemm.einsum(expression, *operands, **options)
    dtype, (left, output) = arrays[0].dtype, expression.split("->")
    if len(arrays) > 1 or any(x not in output and n != 1 for x, n in zip(left, arrays[0].shape)):
        dtype = dtypes.product(dtype, dtype)  # int8 is summed in int32
    compare(result, *reference(expression, arrays), dtype)
    counted = result
    if not isinstance(result, DistTensor):  # an array of the array API has a report
        forms = [Array(x.unfolding, x.layout) if isinstance(x, DistTensor) else x for x in operands]
        counted = pdgemm.einsum(expression, *forms, **options)
    after = [x if isinstance(x, np.ndarray) else x.allgather() for x in operands]
    with together(MPI.COMM_WORLD):
        assert all(np.array_equal(x, y) for x, y in zip(arrays, after))
        if isinstance(counted, DistTensor):
            plan = pdgemm.plan_einsum(expression, *operands, machine=machine_of(grid), **options)
            counts_match(plan, counted)
    return result


def counts_match(plan: Any, result: Any) -> None:
    """Check the words of an einsum: those that it counted, and those that its plan has.  Local.

    Numbers and arrays of one axis are gathered after that, on all ranks.
    """
    stages = [x.traffic(result.grid.comm.rank) for name, x in plan.program.stages if name != "gather"]
    words = [
        tuple(sum(getattr(x, name) for x in traffics) for name in ("words_received", "words_sent", "words_read"))
        for traffics in ([result.report.counted], [result.report.predicted], stages)
    ]
    assert words[0] == words[1] == words[2], words


def drawn_expression(draw: random.Random, dtype: str) -> tuple[str, list[tuple[int, ...]]]:
    """Return an expression of 1 to 4 operands of 0 to 6 axes, and the shapes of its operands."""
    number = 1 if dtype == "int8" and draw.random() < 0.3 else draw.choice((1, 2, 2, 2, 3, 4)) if dtype != "int8" else 2
    letters = "ijklmnop"[: draw.choice((3, 4, 5, 7))]
    lengths = (0, 1, 2, 3, 4, 5, 6) if number < 3 else (0, 1, 2, 2, 3)
    inputs = ["".join(draw.choice(letters) for _ in range(draw.choice(lengths))) for _ in range(number)]
    if draw.random() < 0.5:  # without repeated indices
        inputs = ["".join(dict.fromkeys(x)) for x in inputs]
    used = sorted({*"".join(inputs)})
    draw.shuffle(used)
    output = "".join(used[: draw.randint(0, min(6, len(used)))])
    extents = {x: draw.choice((0, 1, 2, 3) if draw.random() < 0.2 else (1, 2, 2, 3, 4, 5)) for x in letters}
    shapes = [tuple(extents[x] if draw.random() < 0.98 or x not in output else 1 for x in y) for y in inputs]
    if any(
        len({*s}) > 1 for x in letters for s in [[n for y, t in zip(inputs, shapes) for z, n in zip(y, t) if z == x]]
    ):
        shapes = [tuple(extents[x] for x in y) for y in inputs]
    return ",".join(inputs) + "->" + output, shapes


def drawn_operand(array: np.ndarray, grid: Any, draw: random.Random) -> Any:
    """Return an array as a tensor, or sometimes as a matrix, or as the array that all ranks have."""
    how = draw.random()
    if how < 0.1:
        return array
    return matrix_of(array, grid, draw) if how < 0.25 and array.ndim == 2 else tensor_of(array, grid, draw)


def drawn_cases(
    grids: list[Any], number: int, seed: int, part: tuple[int, int] = (0, 1), only_tensors: bool = True
) -> Iterator[tuple[Any, ...]]:
    """Yield expressions with their operands; `number` times with --all, otherwise a few times.

    part : which part of how many parts of these cases.   only_tensors : no operand is a matrix or an array.
    """
    at, parts = part
    for turn in range(at, number if tiers.everything() else number // (60 if MPI.COMM_WORLD.size < 3 else 150), parts):
        draw = random.Random(1000003 * seed + turn)
        grid, dtype = draw.choice(grids), draw.choice(TYPES)
        expression, shapes = drawn_expression(draw, dtype)
        arrays = [elements(shape, dtype, 10 * turn + at) for at, shape in enumerate(shapes)]
        operands = [(tensor_of if only_tensors else drawn_operand)(x, grid, draw) for x in arrays]
        if not any(isinstance(x, (DistTensor, DistMatrix)) for x in operands):
            operands[0] = tensor_of(arrays[0], grid, draw)
        yield draw, grid, expression, arrays, operands
