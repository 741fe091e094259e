"""Keys of tensors: the indices, slices, new axes, lists and masks that they are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from pdgemm.errors import KeyIndexError, LayoutError
from pdgemm.local.arrays.arguments import shown
from pdgemm.local.arrays.keys import Picked, picked_along


class ParsedKey(NamedTuple):
    """What a key of slices, indices, new axes and one list picks from a tensor.

    picks   : by axis, the indices where these are not all: a range, or an array.
    dropped : the axes that an index removes.   new : the places of new axes in the part.
    first   : the axis of the part that becomes its first one: that of a list, if an index stands apart from the list
              (as in NumPy), else 0.
    """

    picks: dict[int, Any]
    dropped: list[int]
    new: list[int]
    first: int

    def extents(self, shape: tuple[int, ...]) -> list[int]:
        """Return how many indices of each axis are picked from a tensor of this shape."""
        return [len(self.picks.get(axis, range(n))) for axis, n in enumerate(shape)]

    def aligned(self, value: Any, shape: tuple[int, ...]) -> Any:
        """Return a tensor or an array that is broadcast to the part, with the axes of the tensor of this shape.

        Collective for a tensor.  Raises LayoutError where the value cannot be broadcast.
        """
        extents = self.extents(shape)
        try:
            aligned = with_axes(value, len(shape) - len(self.dropped) + len(self.new))
            aligned = np.moveaxis(aligned, 0, self.first) if self.first else aligned
            aligned = np.squeeze(aligned, tuple(self.new)) if self.new else aligned
            aligned = np.expand_dims(aligned, tuple(self.dropped))
            if all(n in (1, m) for n, m in zip(aligned.shape, extents)):
                return aligned
        except ValueError:
            pass
        part = tuple(n for axis, n in enumerate(extents) if axis not in self.dropped)
        raise LayoutError(f"elements of shape {value.shape} cannot be broadcast to a part of shape {part}")


def with_axes(value: Any, ndim: int) -> Any:
    """Return a tensor or an array with more first axes of extent 1, or fewer.  Collective for a tensor."""
    extra = np.ndim(value) - ndim
    return value.reshape(value.shape[extra:]) if extra > 0 else np.expand_dims(value, tuple(range(-extra)))


def whole_key(keys: Sequence[Any], shape: tuple[int, ...]) -> list[Any]:
    """Return a key with a slice for each axis that it leaves out.  Raises KeyIndexError."""
    keys = list(keys)
    taken = sum(np.ndim(x) if is_mask(x) else 1 for x in keys if x is not None and x is not ...)
    if taken > len(shape) or sum(x is ... for x in keys) > 1:
        axes = f"has {len(shape)} axes and takes one `...`"
        raise KeyIndexError(f"a tensor of shape {shape} {axes}, got {shown(tuple(keys))}")
    at = next((at for at, x in enumerate(keys) if x is ...), len(keys))
    keys[at : at + 1] = [slice(None)] * (len(shape) - taken)
    return keys


def is_mask(x: Any) -> bool:
    """Return whether a part of a key is a truth value, or an array or a tensor of them, but no list of one axis."""
    listed = isinstance(x, np.ndarray) and x.ndim == 1
    return isinstance(x, bool) or (getattr(x, "dtype", None) == np.dtype(bool) and not listed)


def check_mask(mask: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Raise KeyIndexError where a mask of this shape has not the extents of first axes of a tensor, or no elements."""
    if len(mask) > len(shape) or any(m not in (n, 0) for m, n in zip(mask, shape)):
        raise KeyIndexError(f"a mask of shape {mask} for axes of extents {shape}")


def is_list(x: Any) -> bool:
    """Return whether a part of a key has indices one by one: an array or a tensor with axes."""
    return hasattr(x, "dtype") and np.ndim(x) > 0


def parsed_key(keys: Sequence[Any], shape: tuple[int, ...]) -> ParsedKey:
    """Return what a key of slices, indices, new axes and one list picks.  Raises KeyIndexError."""
    keys = whole_key(keys, shape)
    picks, dropped, new, axis, place = dict[int, Any](), list[int](), list[int](), 0, 0
    for x in keys:
        if x is None:
            new.append(place)
            place += 1
            continue
        stepped = isinstance(x, slice) and x.step not in (None, 1)
        one = Picked(range(*x.indices(shape[axis]))) if stepped else picked_along(axis, x, shape[axis])
        if one.dropped:
            dropped.append(axis)
        place += not one.dropped
        if one.dropped or not isinstance(one.indices, range) or one.indices != range(shape[axis]):
            picks[axis] = one.indices
        axis += 1
    lists = [at for at, x in enumerate(keys) if is_list(x)]
    before = keys[: lists[0]] if lists and stand_apart(keys) else []
    return ParsedKey(picks, dropped, new, sum(x is None or isinstance(x, slice) for x in before))


def stand_apart(keys: Sequence[Any]) -> bool:
    """Return whether slices or new axes stand between indices and lists of a key."""
    both = [at for at, x in enumerate(keys) if not (x is None or isinstance(x, slice))]
    return both[-1] - both[0] >= len(both)
