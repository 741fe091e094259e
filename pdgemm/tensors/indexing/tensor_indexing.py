"""Parts of tensors that keys name, read and set: indices, slices, lists, masks, and arrays of indices."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Self

import numpy as np

from pdgemm.algorithms.indexing.selection import as_element
from pdgemm.errors import ArgumentError, DTypeError, KeyIndexError
from pdgemm.grids.index_pairs import pairs_between, places_in_range
from pdgemm.grids.tensor_layout import TensorLayout
from pdgemm.linalg.work import Work
from pdgemm.local.arrays.device import beside, to_host
from pdgemm.local.arrays.dtypes import can_convert, element_type
from pdgemm.local.arrays.elementwise import set_broadcast
from pdgemm.local.arrays.keys import last_of_each
from pdgemm.matrix.argument_checks import overlap
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.planning.tensors.tensor_layouts import undivided
from pdgemm.support.agreement import described_elements, together
from pdgemm.tensors.indexing import tensor_keys, tensor_lines
from pdgemm.tensors.indexing.tensor_copies import broadcast_to, flip, moveaxis, operand_tensor
from pdgemm.tensors.indexing.tensor_keys import ParsedKey, is_list, is_mask, parsed_key, with_axes
from pdgemm.tensors.indexing.tensor_lines import in_line, recorded
from pdgemm.tensors.tensor_base import TensorBase, as_operand, in_layout
from pdgemm.tensors.tensor_parts import TensorParts, is_window


class TensorIndexing(TensorParts):
    """`T[key]` and `T[key] = x`."""

    def __getitem__(self, key: Any) -> Any:
        """Return a part: slices of any step, indices, `...`, None, lists, masks and arrays of indices, as in NumPy.

        A mask, or an array of indices, is a tensor, or an array that all ranks have.  A number or an array of one axis
        is on every rank, any other part a new tensor.  Nothing is sent, unless an axis that is divided is indexed by a
        number, a list or a slice whose step is not 1 or -1; a key of an index for each axis sends nothing either.
        Under a mask, elements are first moved to the order of their indices; of arrays of indices, the indices are
        sent to the elements' owners, and the elements back.  Collective.
        Raises KeyIndexError, an IndexError, on all ranks.
        """
        keys = _keys(key)
        if self._is_mask(keys):
            part = self._under(keys[0])
        elif split := self._split(keys):
            part = split[1]._at(*split[2:])
        else:
            part = self._basic(keys)
        return part._result() if self.ndim > 1 else part

    def __setitem__(self, key: Any, value: Any) -> None:
        """Set a part to a number, a tensor or an array that is the same on every rank; it is broadcast.  Collective.

        key   : as for reading; the elements keep their type.  If an index occurs twice, the last value stays.
        value : of a type that this one can hold; a tensor that shares memory with this one is copied first.

        Of a number or an array nothing is sent; of a tensor each element that changes its rank, once, in one exchange.
        Under arrays of indices, these are sent, too.  `.report` has the words.
        Raises KeyIndexError, LayoutError, DTypeError or ArgumentError on all ranks; then nothing is set.
        """
        keys = _keys(key)
        value = value.tensor(value.shape) if isinstance(value, DistMatrix) else value
        with together(self.grid.comm) as arguments:
            arguments += ["T[...] = x", str(self.layout), self.dtype]
            if self.unfolding.conjugated:
                raise ArgumentError("this tensor is the conjugate of a matrix, and cannot be written to")
            if not isinstance(value, TensorBase):
                value = np.asarray(value) if np.ndim(value) else as_element(value, self.dtype)
                arguments.append(described_elements(value) if value.ndim else value)
            if not can_convert(element_type(value.dtype), self.dtype):
                raise DTypeError(f"{value.dtype} elements cannot become {self.dtype}")
        work = Work("T[...] = x")
        if self._is_mask(keys):
            self._set_under(keys[0], value, work)
        elif split := self._split(keys):
            self._set_at(split, value, work)
        else:
            self._set_basic(keys, value, work)
        work.reported(self.unfolding, 1)

    # ------------------------------------------------------------------ slices, indices, one list
    def _basic(self, keys: Sequence[Any]) -> Self:
        """Return a part by slices, indices, new axes and one list, as a tensor.  Collective."""
        with together(self.grid.comm) as arguments:
            picks, dropped, new, first = parsed = parsed_key(keys, self.shape)
            arguments += ["T[...]", str(self.layout), dropped, new, *picks.values()]
            descending = [x for x in self.layout.divided if isinstance(picks.get(x), range) and picks[x].step < 0]
            picks |= {x: picks[x][::-1] for x in descending}
            apart = any(x in dropped or not is_window(picks.get(x, range(0))) for x in self.layout.divided)
        if apart and len(dropped) == self.ndim:
            part = self._one([picks[x].start for x in range(self.ndim)])
        else:
            part = self._moved(parsed) if apart else self._windowed(picks)
            part = type(self)(part.unfolding, part.layout.without(dropped))
        if descending:
            report = part.later_report
            part = flip(part, [x - sum(y < x for y in dropped) for x in descending])
            part.unfolding.report = report
        part = part.expanded(new)
        return part.transpose([first, *range(first), *range(first + 1, part.ndim)]) if first else part

    def _moved(self, parsed: ParsedKey) -> Self:
        """Return the picked indices of each axis, in the default layout of the part.  Collective."""
        kept = [n for axis, n in enumerate(parsed.extents(self.shape)) if axis not in parsed.dropped]
        target = self.default_layout(kept).expanded(parsed.dropped)
        pairs = {x: pairs_between(y, range(len(y))) for x, y in parsed.picks.items()}
        return in_layout(self, target, pairs, name="T[...]")

    def _one(self, indices: list[int]) -> Self:
        """Return one element, on the rank that has it.  Collective; nothing is sent."""
        rank, local = tensor_lines.owners(self.layout, range(self.ndim), indices)
        there = TensorLayout.even((), (), (), (1, 1), (int(rank),))
        return self.with_elements(there, self.dtype, lambda: self.local[(*map(int, local), ...)])

    def _set_basic(self, keys: Sequence[Any], value: Any, work: Work) -> None:
        """Set the part that slices, indices, new axes and one list name.  Collective."""
        with (agreement := together(self.grid.comm)) as arguments:
            parsed, tensor = parsed_key(keys, self.shape), isinstance(value, TensorBase)
            arguments += [parsed.dropped, parsed.new, *parsed.picks.values()]
            agreement.flag = tensor and overlap(self.unfolding.stored, value.unfolding.stored)
        if tensor or np.ndim(value):
            value = parsed.aligned(value.copy() if agreement.flag else value, self.shape)
        if all(is_window(parsed.picks.get(x, range(0))) for x in self.layout.divided):
            layout, window = self._window(parsed.picks)
            value, key = as_operand(value, layout, self, work), [*window]
            value = type(self)(value, layout).local if isinstance(value, DistMatrix) else value
        elif tensor:
            pairs = dict[int, Any]()
            for axis, (n, m) in enumerate(zip(parsed.extents(self.shape), value.shape)):
                indices = parsed.picks.get(axis, range(n))
                if n == m and isinstance(indices, range):
                    pairs[axis] = pairs_between(range(n), indices)
                else:
                    last = last_of_each(np.asarray(indices))
                    pairs[axis] = pairs_between(0 * last if m == 1 else last, np.asarray(indices)[last])
            work.did(in_layout(value, self.layout, pairs, "T[...] = x", out=self.unfolding))
            return
        else:
            key, places = list[Any]([slice(None)] * self.ndim), self.indices()
            for axis, indices in parsed.picks.items():
                if isinstance(indices, range):
                    key[axis], places[axis] = places_in_range(places[axis], indices)
                else:
                    last = last_of_each(indices)
                    _, key[axis], mine = np.intersect1d(places[axis], indices[last], True, True)
                    places[axis] = last[mine]
            if np.ndim(value):
                value = value[np.ix_(*([0] if n == 1 else x for x, n in zip(places, value.shape)))]
        with together(self.grid.comm):
            if self.local.size and all(isinstance(x, slice) for x in key):
                set_broadcast(self.local[(*key, ...)], value)
            elif self.local.size:
                here = np.ix_(*(np.arange(n)[x] for n, x in zip(self.local.shape, key)))
                value = beside(value, self.local) if np.ndim(value) else value
                self.local[tuple(beside(x, self.local) for x in here)] = value

    # ------------------------------------------------------------------ arrays of indices
    def _split(self, keys: list[Any]) -> tuple[list[Any], Self, list[int], list[Any], int] | None:
        """Return the key without arrays of indices, its part, the axes that the arrays index, the arrays, and a place.

        The axes of the arrays have this place in the result.  None: the key has one list at most.  Collective.
        """
        lists = [x for x in keys if is_list(x)]
        if len(lists) < 2 and not any(isinstance(x, TensorBase) or np.ndim(x) > 1 for x in lists):
            return None
        basic, axes, arrays, axis, place = list[Any](), list[int](), list[Any](), 0, 0
        keys = tensor_keys.whole_key(keys, self.shape)
        for x in keys:
            more = _unmasked(x, self.shape[axis:]) if is_list(x) else ()
            arrays += more
            axes += range(place, place + len(more))
            basic += [slice(None)] * len(more) or [x]
            axis += len(more) or x is not None
            place += len(more) or x is None or isinstance(x, slice)
        part = self if all(x == slice(None) for x in basic) else self._basic(basic)
        return basic, part, axes, arrays, 0 if tensor_keys.stand_apart(keys) else axes[0]

    def _at(self, axes: list[int], arrays: list[Any], place: int) -> Self:
        """Return the parts with these indices of some axes, whose axes in the result begin at `place`.  Collective."""
        shape, numbers = self._numbers(axes, arrays)
        rest = [x for x in range(self.ndim) if x not in axes]
        extents = [self.shape[x] for x in rest]
        if prod(extents) < len(self.grid.members):  # else a rank has at least as many elements as there are numbers
            work = Work("T[...]")
            part = tensor_lines.fetched(self, axes, in_line(operand_tensor(numbers, self), work), work)
        else:
            every = numbers.allgather() if isinstance(numbers, TensorBase) else numbers
            whole = self.transpose([*axes, *rest]).reshape([prod(self.shape[x] for x in axes), *extents])
            part = whole._basic([every.reshape(-1)])
        part = part.reshape([*shape, *extents])
        return moveaxis(part, range(len(shape)), range(place, place + len(shape)))

    def _numbers(self, axes: list[int], arrays: list[Any]) -> tuple[tuple[int, ...], Any]:
        """Return the shape of broadcast arrays of indices, and the row-major numbers of these, an array or a tensor."""
        with together(self.grid.comm) as arguments:
            arguments += ["indices of a tensor", *axes, str(self.layout)]
            arguments += [x.shape if isinstance(x, TensorBase) else described_elements(x) for x in arrays]
            try:
                shape = np.broadcast_shapes(*(x.shape for x in arrays))
            except ValueError as bad:
                raise KeyIndexError(f"arrays of indices: {bad}") from None
            if wrong := [x.dtype for x in arrays if x.dtype.kind not in "iu" and prod(x.shape)]:
                raise KeyIndexError(f"an array of indices has whole numbers or truth values, got {wrong[0]}")
        numbers: Any = np.int64(0)
        for axis, x in zip(axes, arrays):
            n, x = self.shape[axis], x.astype(np.int64)
            outside = np.any((x < -n) | (x >= n))
            if outside.allgather() if isinstance(outside, TensorBase) else outside:
                raise KeyIndexError(f"an index is out of range for axis {axis} of a tensor of shape {self.shape}")
            numbers = numbers * n + np.where(x < 0, x + n, x)
        return shape, numbers

    def _set_at(self, split: tuple[Any, ...], value: Any, work: Work) -> None:
        """Set the parts that arrays of indices name; split : the result of `_split`.  Collective."""
        basic, part, axes, arrays, place = split
        shape, numbers = part._numbers(axes, arrays)
        rest = [x for x in range(part.ndim) if x not in axes]
        extents = [part.shape[x] for x in rest]
        if np.ndim(value) or isinstance(value, TensorBase):
            wanted = [*extents[:place], *shape, *extents[place:]]
            value = operand_tensor(value, self)
            value = recorded(work, value, broadcast_to(with_axes(value, len(wanted)), wanted))
            value = np.moveaxis(value, range(place, place + len(shape)), range(len(shape)))
            value = in_line(value.astype(self.dtype), work, [prod(shape), *extents])
        there = recorded(work, part, in_layout(part, undivided(part.layout, rest, self.grid.members), name=work.name))
        tensor_lines.stored(there, axes, in_line(operand_tensor(numbers, self), work), value, work)
        if there is not self:
            self._set_basic(basic, there, work)

    # ------------------------------------------------------------------ masks
    def _is_mask(self, keys: list[Any]) -> bool:
        """Return whether a key is a mask of the first axes.  Collective."""
        if len(keys) != 1 or not is_mask(mask := keys[0]):
            return False
        with together(self.grid.comm) as arguments:
            same = isinstance(mask, TensorBase) or described_elements(np.asarray(mask))
            arguments += ["T[mask]", np.shape(mask), str(self.layout), same]
            tensor_keys.check_mask(np.shape(mask), self.shape)
        return True

    def _under(self, mask: Any) -> Self:
        """Return the parts under a mask of the first axes, in the order of their indices.  Collective."""
        if not np.ndim(mask):
            count = int(mask.allgather() if isinstance(mask, TensorBase) else mask)
            return self.expanded([0])._basic([np.zeros(count, np.int64)])
        rest = self.shape[np.ndim(mask) :]
        if not prod(mask.shape) or prod(rest) >= len(self.grid.members):  # or a short mask
            every = (mask.allgather() if isinstance(mask, TensorBase) else mask).reshape(-1)
            whole = self.reshape([prod(self.shape[: np.ndim(mask)]), *rest])
            return whole._basic([np.flatnonzero(every)])
        work = Work("T[mask]")
        flat, where = in_line(self, work, [prod(mask.shape), *rest]), in_line(operand_tensor(mask, self), work)
        with together(self.grid.comm):
            piece = flat.local[(beside(np.flatnonzero(to_host(where.local)), flat.local),)]
        return tensor_lines.of_pieces(self, piece, rest, work)

    def _set_under(self, mask: Any, value: Any, work: Work) -> None:
        """Set the elements under a mask of the first axes.  Collective."""
        if not prod(np.shape(mask)):
            return
        wide = np.expand_dims(mask, tuple(range(np.ndim(mask), self.ndim)))
        if np.ndim(value):
            numbers = tensor_lines.cumulative(operand_tensor(mask, self).ravel(), np.add, 0)
            count = int(numbers[-1].allgather())
            wanted = [count, *self.shape[np.ndim(mask) :]]
            value = operand_tensor(value, self)
            value = recorded(work, value, broadcast_to(with_axes(value, len(wanted)), wanted))
            value = work.did(value._at([0], [np.maximum(numbers - 1, 0)], 0)).reshape(self.shape) if count else 0
        value = value.astype(self.dtype) if isinstance(value, TensorBase) else value
        where, values = (as_operand(x, self.layout, self, work) for x in (wide, value))
        with together(self.grid.comm):
            x = self.unfolding.stored
            where, values = (y.local if isinstance(y, DistMatrix) else y for y in (where, values))
            set_broadcast(x, np.where(where, values, x))


def _keys(key: Any) -> list[Any]:
    """Return the parts of a key, lists and ranges as arrays, integer tensors without axes as numbers.  Collective."""
    keys = list(key) if isinstance(key, tuple) else [key]
    keys = [np.asarray(x, None if len(x) else np.int64) if isinstance(x, (list, range)) else x for x in keys]
    numbers = [isinstance(x, TensorBase) and not x.ndim and x.dtype.kind in "iu" for x in keys]
    return [int(x.allgather()) if number else x for x, number in zip(keys, numbers)]


def _unmasked(x: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Return an array of indices, or those of a mask of axes of these extents.  Collective."""
    if x.dtype.kind != "b":
        return (x,)
    tensor_keys.check_mask(x.shape, shape)
    return tensor_lines.places_of_nonzero(x) if isinstance(x, TensorBase) else np.nonzero(x)
