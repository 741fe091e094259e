"""The flat storage of a model on one rank: parameters, gradients and buffers, and collectives on parts of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any
from zlib import crc32

import numpy as np

from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.recorder import Traffic
from pdgemm.parallel.exact_squares import as_numbers, exact_squares
from pdgemm.parallel.mesh import Mesh
from pdgemm.parallel.parts import FlatValues
from pdgemm.schedules.collectives.collective import Collective
from pdgemm.schedules.training.flat_layout import FLIGHT, Bucket, FlatLayout
from pdgemm.transport.collectives import CollectiveRun, prepared_collective
from pdgemm.transport.movers.node_arrays import NodeArrays

_AT_A_TIME = 1 << 14  # elements of which a copy is squared
Array = np.ndarray


def flat_arrays(layout: FlatLayout, line: ProcessGrid) -> dict[str, Array]:
    """Allocate the arrays of a layout on this rank of a line, set to 0.  Local.

    "parameters", "gradients", and where the layout has them two "slots" for gradients of whole buckets, two,
    "gathered", for parameters of whole buckets, and "masters", the wide parameters that this rank updates.
    Raises NodeMemoryError where parts are read in place, and the node has no such memory left.
    """
    own, largest = layout.owned(line.rank), max(bucket.words for bucket in layout.buckets)
    shared = line.memory.empty if layout.in_place else np.empty
    words = own if layout.stage == 3 else layout.words
    arrays = {"parameters": (shared if layout.stage in (1, 2) else np.empty)((words,), layout.dtype)}
    if layout.stage == 3:
        arrays["gathered"] = shared((FLIGHT, largest), layout.dtype)
    if layout.whole_gradients:
        arrays["gradients"] = shared((layout.uses * layout.levels, layout.words), layout.wide)
    else:
        arrays["gradients"] = np.empty(own, layout.wide)
        arrays["slots"] = shared((FLIGHT, largest), layout.wide)
    if layout.masters:
        arrays["masters"] = np.empty(own if layout.stage else layout.words, layout.wide)
    for x in arrays.values():
        x[...] = 0
    return arrays


class FlatStorage:
    """The arrays of a `FlatLayout` on this rank, those of `flat_arrays`.  Collective over the line."""

    def __init__(self, mesh: Mesh, line: ProcessGrid, layout: FlatLayout, arrays: dict[str, Array]) -> None:
        self.layout, self.index, self.arrays, self._mesh, self._line = layout, line.rank, arrays, mesh, line
        self._prepared, self._node = dict[int, Callable[[Traffic], CollectiveRun]](), None  # by tag
        if layout.in_place:
            here = line.memory.lies_here
            self._node = NodeArrays(line, **{name: (x, None) for name, x in arrays.items() if here(x)})

    @property
    def bytes(self) -> dict[str, int]:
        """The bytes that were allocated, by kind; those of the optimizer are master weights."""
        sizes = {name: x.nbytes for name, x in self.arrays.items()}
        buffers = sizes.pop("slots", 0) + sizes.pop("gathered", 0)
        return sizes | {"buffers": buffers, "optimizer": sizes.pop("masters", 0)}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters."""
        return {x.name: x.shape for x in self.layout.parameters}

    def span(self, bucket: Bucket) -> slice:
        """Return what this rank updates of a bucket, in flat storage: its part, or with stage 0 the whole bucket."""
        return self.layout.part(bucket, self.index) if self.layout.stage else slice(bucket.start, bucket.stop)

    def own_parameters(self, bucket: Bucket) -> Array:
        """Return the parameters that this rank updates of a bucket."""
        layout = self.layout
        return self.arrays["parameters"][layout.kept(bucket, self.index) if layout.stage == 3 else self.span(bucket)]

    def place(self, bucket: Bucket) -> slice:
        """Return the place of what this rank updates of a bucket where it keeps this alone, one after the other."""
        return self.layout.kept(bucket, self.index) if self.layout.stage else slice(bucket.start, bucket.stop)

    def own_masters(self, bucket: Bucket) -> Array:
        """Return the parameters that this rank updates of a bucket in the wide type, from which later ones follow."""
        return self.arrays["masters"][self.place(bucket)] if self.layout.masters else self.own_parameters(bucket)

    def own_gradients(self, bucket: Bucket) -> Array:
        """Return the gradients of the parameters that this rank updates of a bucket."""
        if self.layout.whole_gradients:
            return self.arrays["gradients"][0, self.span(bucket)]
        return self.arrays["gradients"][self.layout.kept(bucket, self.index)]

    def set_parameter(self, name: str, value: Array | FlatValues) -> None:
        """Set a parameter, or with stage 3 this rank's part of it, and its master weights from the flat one.  Local."""
        bucket, flat = self.layout.bucket_of[name], self.arrays["parameters"]
        span, into = slice(0, self.layout.words), flat
        if self.layout.stage == 3:
            span, into = self.span(bucket), self.own_parameters(bucket)
        elements, place = self.layout.overlap(name, span)
        into[place] = value[elements]
        if self.layout.masters:
            elements, place = self.layout.overlap(name, self.span(bucket))
            self.own_masters(bucket)[place] = value[elements]

    def shaped(self, name: str, flat: Array, start: int) -> Array:
        """Return a parameter's view of a piece of flat storage that begins at `start`."""
        place = self.layout.places[name]
        return flat[place.start - start : place.stop - start].reshape(self.shapes[name])

    def start(self, collective: Collective, name: str, part: Any, kind: str, tag: int) -> CollectiveRun:
        """Start a collective of the line on a part of an array, and count its traffic as of this kind.

        tag : another one for each part.
        """
        checks = self._mesh.checks(self._line)
        if tag not in self._prepared:
            where = self.arrays[name][part], tag, partial(self._piece, name, part)
            self._prepared[tag] = prepared_collective(collective, checks.messages, *where, self._line.memory.fence)
        checks.started += 1
        return self._prepared[tag](self._mesh.traffic[kind])

    def _piece(self, name: str, part: Any, rank: int) -> Array:
        """Return a part of an array of another rank of the line."""
        assert self._node is not None
        return self._node(name, rank)[part]

    def not_finite(self) -> list[str]:
        """Return the names of parameters of which a gradient that this rank updates is NaN or infinite.  Local."""
        return [
            name
            for bucket in self.layout.buckets
            for name in bucket.names
            if not _finite(self.own_gradients(bucket)[self.layout.overlap(name, self.span(bucket))[1]])
        ]

    def checksum(self, name: str) -> int:
        """Return a checksum of the gradient that this rank updates of a parameter.  Local."""
        bucket = self.layout.bucket_of[name]
        _, place = self.layout.overlap(name, self.span(bucket))
        return crc32(self.own_gradients(bucket)[place].view(np.uint8).data)

    def add_uses(self) -> None:
        """Add the reduced gradients of several uses of the parameters that this rank updates.  Local."""
        for use in range(1, self.layout.uses):
            for bucket in self.layout.buckets:
                self.own_gradients(bucket)[...] += self.arrays["gradients"][use * self.layout.levels, self.span(bucket)]

    def squares(self) -> Array:
        """Return the sum of squares of this rank's part of the gradients, as numbers that ranks may add.  Local.

        One number; with a tree those of the exact sum, so that other parts and lines give the same bits.
        """
        parts = list[Array]()
        for bucket in self.layout.buckets:
            part, start = self.layout.part(bucket, self.index), self.span(bucket).start
            parts.append(self.own_gradients(bucket)[part.start - start : part.stop - start])
        if not self.layout.tree:
            return np.array([sum(map(sum_of_squares, parts))])
        sums = [exact_squares(x) for x in parts]
        return as_numbers(None if None in sums else sum(x for x in sums if x))


def _finite(x: Array) -> bool:
    """Are all elements numbers?  Local."""
    return bool(np.isfinite(x.astype(np.float64)).all())


def sum_of_squares(x: Array) -> float:
    """Return the sum of squares in float64.  Local."""
    total = 0.0
    for start in range(0, len(x), _AT_A_TIME):
        some = x[start : start + _AT_A_TIME].astype(np.float64)
        total += float(np.dot(some, some))
    return total


def add_to_tree(levels: Array, microbatch: int, last: int) -> None:
    """Join the gradients of a microbatch, counted from 1, in level 0 with partial sums of a binary tree.

    Level k > 0 has the sum of 2^(k-1) microbatches that waits for that of as many later ones.
    """
    level, count = 1, microbatch
    while count % 2 == 0:
        np.add(levels[level], levels[0], out=levels[0])
        level, count = level + 1, count // 2
    if microbatch < last:
        levels[level] = levels[0]
        levels[0] = 0
