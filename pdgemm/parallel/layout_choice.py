"""The parameters that a user passes, and their layout: transport and the size of buckets are chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod, sqrt
from typing import Any

import numpy as np

from pdgemm.errors import ArgumentError, DTypeError
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.dtypes import FLOATS, element_type, names
from pdgemm.local.arrays.element_functions import ElementFunction, element_function, fill
from pdgemm.local.arrays.integers import as_count
from pdgemm.matrix.argument_checks import as_real
from pdgemm.planning.collective_plan import choose_collective
from pdgemm.planning.machines.machine import machine_at_hand, on_nodes
from pdgemm.planning.machines.simulator import simulate
from pdgemm.schedules.collectives.collective import even_parts
from pdgemm.schedules.mover_registry import SHARED
from pdgemm.schedules.training.flat_layout import Bucket, FlatLayout
from pdgemm.support.agreement import together

_REAL = tuple(x for x in FLOATS if x.kind != "c")
_LEAST = 1 << 18  # bytes of the smallest bucket that is chosen
_SAME = 1 << 20  # words of a bucket on any number of ranks, where all compute the same bits


def with_transport(layout: FlatLayout, line: ProcessGrid, bucket_bytes: int | None, in_place: bool) -> FlatLayout:
    """Return the layout with its collectives and the size of its buckets.  Collective over the line.

    Lines of a mesh may lie on one node or on several, and then have other collectives.
    bucket_bytes : of gradients; None: the size with the least time by the model of the machine.
    in_place : parts are read in place if all ranks of the line share memory.
    """
    with together(line.comm) as arguments:
        chosen = _with_transport(layout, line, bucket_bytes, in_place)
        arguments += ["Buckets", chosen]
    return chosen


def _with_transport(layout: FlatLayout, line: ProcessGrid, bucket_bytes: int | None, in_place: bool) -> FlatLayout:
    """Return the layout, as `with_transport`.  Local."""
    machine = on_nodes(machine_at_hand(), line.ranks_per_node)
    ranks, operation = layout.shards, "reduce_scatter" if layout.stage else "all_reduce"

    def fastest(operation: str) -> str:
        counts = even_parts(layout.words, ranks)
        return choose_collective(operation, counts, layout.wide, ranks, machine).algorithm

    if in_place and line.shares_memory and line.ranks_per_node is None:
        how = {"mover": SHARED.name, "reduce_by": "pairwise", "gather_by": "pairwise"}
    elif ranks > 1:
        late = layout.stage in (1, 2) and len({*line.nodes}) == ranks  # parameters come in during the next pass
        how = {"gather_by": "pairwise" if late else fastest("all_gather")}
        how["reduce_by"] = "nearest" if layout.tree else fastest(operation)
    else:
        how = {}
    layout = replace(layout, **how)  # type: ignore[arg-type]
    if bucket_bytes is None:  # the size of buckets has a part in the bits of the norm
        return replace(layout, bucket_words=_SAME if layout.tree else bucket_words(layout, machine))
    words = as_count(bucket_bytes, "bucket_bytes", 1) // layout.wide.itemsize
    return replace(layout, bucket_words=max(1, words))


def bucket_words(layout: FlatLayout, machine: Any) -> int:
    """Return the words of a bucket with the least exposed time: sqrt(A N / B).  Local.

    A collective without words takes A seconds, which each bucket costs; a word takes B seconds, and those of the last
    bucket are not hidden.  N : the words of all parameters.
    """
    if layout.shards == 1:
        return layout.words
    one = Bucket(0, 0, layout.shards, ())
    first, whole = (
        simulate(layout.reduction(bucket), machine, layout.shards).seconds
        for bucket in (one, Bucket(0, 0, layout.words, ()))
    )
    word = max(whole - first, 1e-15) / layout.words
    least = min(layout.words, _LEAST // layout.wide.itemsize)
    return max(least, min(layout.words, int(sqrt(first * layout.words / word))))


class Initial:
    """The initial values of a parameter by a formula, of which each rank computes what it keeps.

    ::

        Buckets(mesh, {"w": Initial((4096, 4096), "normal", seed=1, scale=0.02), "b": Initial(4096, "zeros")}, stage=3)

    shape  : of the parameter.
    values : "normal", of mean 0 and variance 1, "uniform" on [0, 1), "zeros", "ones", or a function f(i, j) of arrays
        of rows and columns, as of `DistMatrix.from_function`.  A vector has one row, and an array of more dimensions
        the rows of its first one.
    seed   : of random numbers, which are the same on any number of ranks.   scale : by which values are multiplied.
    dtype  : float16, bfloat16, float32 or float64.
    """

    def __init__(
        self,
        shape: int | Sequence[int],
        values: str | ElementFunction = "zeros",
        *,
        seed: int = 0,
        scale: float = 1.0,
        dtype: Any = np.float32,
    ) -> None:
        shape = (shape,) if isinstance(shape, int | np.integer) else shape
        self.shape = tuple(as_count(n, "shape", 0) for n in shape)
        self.dtype, self.size, self._scale = element_type(dtype), prod(self.shape), as_real(scale, "scale")
        self._values = element_function(values, seed, np.dtype(np.float64)) if isinstance(values, str) else values
        name = values if isinstance(values, str) else getattr(values, "__qualname__", type(values).__name__)
        sizes = " x ".join(map(str, self.shape))
        self._said = f"Initial({sizes} {name} of seed {seed} times {scale} {self.dtype})"  # the same on all ranks

    def __repr__(self) -> str:
        return self._said

    def __getitem__(self, span: slice) -> np.ndarray:
        """Return a range of elements of the flat parameter, of which only their rows are computed.  Local."""
        rows, cols = as_table(self.shape)
        if span.start >= span.stop:  # also beyond the last row, which a function need not have
            return np.empty(0, np.result_type(self.dtype, np.float32))
        first, last = span.start // cols, -(-span.stop // cols)
        columns = span if rows == 1 else slice(0, cols)
        table = np.empty((last - first, columns.stop - columns.start), np.result_type(self.dtype, np.float32))
        fill(table, np.arange(first, last), np.arange(columns.start, columns.stop), self._values)
        start = span.start - (first * cols + columns.start)
        flat: np.ndarray = table.reshape(-1)[start : start + span.stop - span.start]
        flat *= flat.dtype.type(self._scale)
        return flat


def as_table(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of the matrix of a parameter: a vector has one row, further dimensions are columns."""
    words = prod(shape)
    rows = shape[0] if len(shape) > 1 and words else 1
    return rows, words // rows


def as_parameter(x: Any, name: str) -> np.ndarray | Initial:
    """Return a parameter as an array of NumPy, or its formula.  Raises ArgumentError for an array on a device."""
    if isinstance(x, Initial):
        return x
    if device := devices.of(x):
        raise ArgumentError(f"parameter {name!r} is on a device, {device.name}; training takes arrays of the host")
    return np.asarray(x)


def type_of_parameters(values: Mapping[str, np.ndarray | Initial], dtype: Any) -> np.dtype:
    """Return the type of the parameters.  Raises ArgumentError or DTypeError."""
    for name, x in values.items():
        if x.dtype not in _REAL:
            raise DTypeError(f"parameter {name!r} is of {x.dtype}; parameters are real numbers: {names(_REAL)}")
        for other, y in values.items():
            arrays = isinstance(x, np.ndarray) and isinstance(y, np.ndarray)
            if other != name and arrays and x.size and y.size and np.shares_memory(x, y):
                raise ArgumentError(f"parameters {name!r} and {other!r} share memory: pass one of them")
    kinds = {x.dtype for x in values.values()}
    if dtype is None and len(kinds) > 1:
        raise DTypeError(f"parameters are of {names(tuple(sorted(kinds, key=str)))}: convert them with dtype=")
    kind = element_type(dtype) if dtype is not None else next(iter(kinds), np.dtype(np.float32))
    if kind not in _REAL:
        raise DTypeError(f"parameters are real numbers of {names(_REAL)}, got dtype={kind}")
    return kind
