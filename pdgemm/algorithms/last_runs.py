"""The last executors of small products, which are called again if the same matrices are multiplied again."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple
from weakref import ref

from pdgemm.algorithms.products.executor import Call, Executor, executor_of
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.device import Array
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.schedules.products import Product


def same_again(key: tuple[Any, ...], call: Call[Product], A: DistMatrix, B: DistMatrix, C: DistMatrix) -> Executor:
    """Return the last executor that formed C if the calls differ only in their buffers, else a new executor.  Local.

    key : all values that an executor depends on, except the addresses of its matrices.
    The executor refers to the memory of A, B and C, and is kept only until one of the three matrices is freed.
    """
    last = _last_runs.get(id(C))
    if last and last.key == key and all(map(_same_place, last.arrays, (call.A, call.B, call.C))):
        return last.run
    run, forget = executor_of(call), partial(_forget, id(C))
    _last_runs[id(C)] = _LastRun(key, (call.A, call.B, call.C), run, [ref(matrix, forget) for matrix in (A, B, C)])
    return run


def _same_place(x: Array, y: Array) -> bool:
    """Do two arrays of the same shape have the same address and the same strides?"""
    return x is y or (devices.address(x), x.strides) == (devices.address(y), y.strides)


class _LastRun(NamedTuple):
    key: tuple[Any, ...]
    arrays: tuple[Array, Array, Array]
    run: Executor
    watched: list[ref[DistMatrix]]  # each reference removes this entry when its matrix is freed


_last_runs: dict[int, _LastRun] = {}  # by the id of C: matrices cannot be keys, because their == is elementwise


def _forget(number: int, _: object) -> None:
    _last_runs.pop(number, None)
