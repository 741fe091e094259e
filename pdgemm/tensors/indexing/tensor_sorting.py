"""Sorted tensors, and functions that follow from them: searches, distinct elements, sets."""

from __future__ import annotations

from collections import namedtuple
from typing import Any, Literal

import numpy as np

from pdgemm.algorithms.statistics import sorting
from pdgemm.errors import ArgumentError
from pdgemm.linalg.work import Work
from pdgemm.local.arrays.arguments import as_name
from pdgemm.local.arrays.device import Array, to_host
from pdgemm.local.arrays.folds import widened
from pdgemm.planning.tensors.tensor_layouts import undivided
from pdgemm.support.agreement import described_elements, together
from pdgemm.tensors.indexing.tensor_copies import concatenate, operand_tensor
from pdgemm.tensors.indexing.tensor_lines import cumulative, deal, in_line, of_rows, places_of_nonzero, stored
from pdgemm.tensors.tensor_base import TensorBase, in_layout


def sort(x: Any, axis: int | None = -1, kind: Any = None, *, stable: Any = None, descending: bool = False) -> Any:
    """Return the elements sorted along an axis, or all of them; NaN last, or first if descending.  Collective.

    Along the only axis of more than one index, each rank sorts its elements, cuts them where the parts of the result
    begin, and sends each part to its rank, where it is sorted again: each element is sent once at most.  Along another
    axis the tensor is moved so that a rank has whole lines.  Every sort is stable: `kind` and `stable` change nothing.
    Raises ArgumentError or DTypeError on all ranks.
    """
    return _ordered(x, axis, descending, False)


def argsort(x: Any, axis: int | None = -1, kind: Any = None, *, stable: Any = None, descending: bool = False) -> Any:
    """Return the indices that sort the elements along an axis, or all of them: of equal ones, the first index first.

    Collective; cost as for `sort`, and an index with each element.  Complex numbers are ordered by both parts.
    """
    return _ordered(x, axis, descending, True)


def _ordered(a: Any, axis: int | None, descending: bool, places: bool) -> Any:
    """Return sorted elements; with `places`, the indices that sort them.  Collective."""
    name = "argsort" if places else "sort"
    if axis is None:
        return _ordered(a.ravel(), 0, descending, places)
    (at,) = a.axes_of(axis)
    if a.size == a.shape[at]:
        work = Work(name)
        line = in_line(a, work)
        result = _places(line, descending) if places else _sorted(line, descending, False)
        work.reported(work.did(result).unfolding, 1)
        return result.reshape(a.shape)

    def act(x: Array) -> Array:  # of equal elements the first one is first, also in descending order
        x = widened(np.flip(x, at) if descending else x)
        order = np.argsort(x, at, stable=True) if places else np.sort(x, at)
        return np.flip(x.shape[at] - 1 - order if places else order, at) if descending else order

    a = in_layout(a, undivided(a.layout, [at], a.grid.members), name=name)
    result = a.with_elements(a.layout, np.dtype(np.int64) if places else a.dtype, lambda: act(to_host(a.local)))
    result.unfolding.report = a.later_report
    return result


def _places(line: Any, descending: bool) -> Any:
    """Return the places of the elements of a line in their sorted order; complex numbers first by the real part."""
    if line.dtype.kind != "c":
        return _sorted(line, descending, True)
    by_imag = _places(line.imag, descending)
    return by_imag[_places(line.real[by_imag], descending)]


def _sorted(line: Any, descending: bool, places: bool) -> Any:
    """Return the sorted elements of a line of real numbers; with `places`, their indices.  Collective."""
    name, parts = "argsort" if places else "sort", line.layout.first[0].parts
    with together(line.grid.comm) as arguments:
        sorting.check_ordered(line.dtype, name)
        arguments += [name, str(line.layout), line.dtype, descending]
        keys, order = _keys(line, descending, places)
    dim, size = line.layout.first[0], line.size
    cuts = sorting.cuts_of(keys, np.minimum(np.arange(1, parts) * dim.block, size), size, line.grid.comm)
    sizes, work = np.diff(cuts), Work(name)
    rows, _ = deal(keys[:, None], sizes, line.grid, work)
    with together(line.grid.comm):  # memory may be short on one rank
        keys = rows[:, 0]
        if places:
            turn = np.argsort(keys, kind="stable")
            order += dim.to_global(0, max(line.grid.coords[0], 0))
        else:
            keys.sort()
    if places:
        rows, _ = deal(order[:, None], sizes, line.grid, work)
        result = of_rows(line, line.layout, rows, turn)
    else:
        keys = ~keys if descending else keys
        result = line.with_elements(line.layout, line.dtype, lambda: sorting.elements_of(keys, line.dtype))
    work.reported(result.unfolding, 1)
    return result


def _keys(line: Any, descending: bool, places: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return sorted keys of this rank's elements, smaller for larger ones if descending; with `places`, their order."""
    if not places:
        keys = to_host(sorting.keys_of(line.unfolding))
        return ~keys[::-1] if descending else keys, np.empty(0, np.int64)
    x = to_host(line.local)
    keys = sorting.keys_of_elements(x + x.dtype.type(0) if x.dtype.kind == "f" else x)  # -0 equals 0
    keys = ~keys if descending else keys
    order = np.argsort(keys, kind="stable")
    return keys[order], order


# ---------------------------------------------------------------- functions of sorted elements
def searchsorted(a: Any, v: Any, side: Literal["left", "right"] = "left", sorter: Any = None) -> Any:
    """Return, for each element of v, the number of elements of a that are less; with "right", at most as large.

    a : a tensor of one axis, ascending, or ascending in the order of `sorter`.   Collective.
    v : a tensor; or a number or an array that all ranks have: then its counts are added up over the ranks.
    For a tensor, the elements of both are sorted together: cost as for `argsort`, and an exchange of the counts.
    """
    a = operand_tensor(a, v)
    with together(a.grid.comm) as arguments:
        arguments += ["searchsorted", str(a.layout), as_name(side, "side", ("left", "right")), np.shape(v)]
        if a.ndim != 1:
            raise ArgumentError(f"searchsorted takes a sorted tensor of one axis, got one of shape {a.shape}")
    a = a if sorter is None else a[sorter]
    if not isinstance(v, TensorBase):
        with together(a.grid.comm) as arguments:
            arguments.append(described_elements(np.asarray(v)))
            counts = np.asarray(np.searchsorted(to_host(a.local), v, side), np.int64)
        return operand_tensor(sorting.sum_over_ranks(counts, a.grid.comm), a)._result()
    flat, first = type(a).reshape(v, [v.size]), side == "left"
    work = Work("searchsorted")
    order = work.did(argsort(work.did(concatenate([flat, a] if first else [a, flat]))))
    of_a = order >= v.size if first else order < a.size
    numbers = cumulative(of_a, np.add, 0)[~of_a]
    result = in_line(type(a).zeros((v.size,), grid=a.grid, dtype=np.int64, device=a.device), work)
    stored(result, [0], in_line(order[~of_a] - (0 if first else a.size), work), in_line(numbers, work), work)
    work.reported(result.unfolding, 2)
    return result.reshape(v.shape)


def isin(element: Any, test_elements: Any, *, invert: bool = False) -> Any:
    """Return whether each element is among `test_elements`; with `invert`, whether it is not.  Collective.

    Either is a tensor, or a number or an array that all ranks have.  Cost: as for `sort`, and two of `searchsorted`,
    if `test_elements` is a tensor; otherwise nothing is sent.
    """
    if isinstance(test_elements, TensorBase):
        among = sort(test_elements, None)
        result = searchsorted(among, element, "right") > searchsorted(among, element, "left")
        return (result & (element == element)) != invert
    with together(element.grid.comm) as arguments:
        arguments += ["isin", described_elements(np.asarray(test_elements)), invert]
    act = lambda: np.isin(to_host(element.local), test_elements, invert=invert)  # noqa: E731
    return element.with_elements(element.layout, np.dtype(bool), act)


# the distinct elements, ascending; their first indices; the place of each element among them; their numbers
Distinct = namedtuple("Distinct", "values indices inverse_indices counts")
DistinctCounts = namedtuple("DistinctCounts", "values counts")
DistinctInverse = namedtuple("DistinctInverse", "values inverse_indices")


def distinct(T: Any, equal_nan: bool = False) -> Distinct:
    """Return the distinct elements of a tensor, as numpy.unique.  Collective.

    equal_nan : all NaN are one element.   Cost: as for `argsort`, and a few exchanges of indices.
    """
    work = Work("unique")
    flat = in_line(T, work)
    order = work.did(argsort(flat))
    ordered = work.did(flat[order])
    changes = ordered[1:] != ordered[:-1]
    if equal_nan and T.dtype.kind in "fc":
        changes = changes & ((ordered[1:] == ordered[1:]) | (ordered[:-1] == ordered[:-1]))
    new = concatenate([np.ones(min(T.size, 1), bool), changes])
    starts = places_of_nonzero(new)[0]
    counts = concatenate([starts[1:], np.full(min(T.size, 1), T.size)]) - starts
    values, indices = (work.did(x[new]) for x in (ordered, order))
    inverse = in_line(type(T).zeros((T.size,), grid=T.grid, dtype=np.int64, device=T.device), work)
    stored(inverse, [0], in_line(order, work), in_line(cumulative(new, np.add, 0) - 1, work), work)
    for x in (values, indices, inverse, counts):
        work.reported(x.unfolding, 6)
    return Distinct(values, indices, inverse.reshape(T.shape), counts)


def unique_all(x: Any) -> Distinct:
    """Return the distinct elements, their first indices, places and numbers, as numpy.unique_all.  Collective.

    Each NaN is distinct.   Cost: as for `argsort`, and a few exchanges of indices.
    """
    return Distinct(*unique(x, True, True, True, equal_nan=False))


def unique_counts(x: Any) -> DistinctCounts:
    """Return the distinct elements and their numbers, as numpy.unique_counts.  Collective; see `unique_all`."""
    return DistinctCounts(*unique(x, return_counts=True, equal_nan=False))


def unique_inverse(x: Any) -> DistinctInverse:
    """Return the distinct elements and the place of each element, as numpy.unique_inverse.  Collective."""
    return DistinctInverse(*unique(x, return_inverse=True, equal_nan=False))


def unique_values(x: Any) -> Any:
    """Return the distinct elements, ascending, as numpy.unique_values.  Collective; see `unique_all`."""
    return unique(x, equal_nan=False)


def unique(
    ar: Any, return_index: bool = False, return_inverse: bool = False, return_counts: bool = False,
    *, equal_nan: bool = True, sorted: bool = True,
) -> Any:  # fmt: skip
    """Return the distinct elements, ascending, and what else is requested, as numpy.unique.  Collective."""
    every = [x._result() if x.ndim < ar.ndim else x for x in distinct(ar, equal_nan)]
    chosen = [x for x, wanted in zip(every, (True, return_index, return_inverse, return_counts)) if wanted]
    return tuple(chosen) if len(chosen) > 1 else chosen[0]


FUNCTIONS = (sort, argsort, searchsorted, isin, unique, unique_all, unique_counts, unique_inverse, unique_values)
