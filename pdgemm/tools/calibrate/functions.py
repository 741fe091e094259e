"""Measure functions of a neural network by NumPy: exponentials and moments take longer than reading their operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.local.arrays.activations import Finish
from pdgemm.parallel.flat_storage import sum_of_squares
from pdgemm.parallel.layers.attention import causal_softmax, softmax_gradient
from pdgemm.parallel.layers.normalization import layernorm, layernorm_backward
from pdgemm.parallel.layers.vocabulary import add_table_rows, table_rows
from pdgemm.parallel.updates.update_rules import AdamW
from pdgemm.planning.machines.machine import Function
from pdgemm.support.agreement import together
from pdgemm.support.memory_left import keep_freed_memory
from pdgemm.tools.calibrate.place import in_turns

_SIDE, _KEYS = 1024, 256  # rows and columns; keys of a softmax, as few as in usual models on hosts
_FEATURES = 128  # columns of an embedding table, as few as in usual models on hosts


def function_seconds(comm: MPI.Comm) -> dict[Function, float]:
    """Return the seconds per float32 element of each function, forward and backward, and of an update.  Collective.

    Freed memory is retained by the process, as in training steps.
    """
    keep_freed_memory()
    with together(comm):
        x = np.random.default_rng(0).standard_normal((_SIDE, _SIDE), np.float32)
        y, z, gain = x.copy(), x.copy(), np.ones(_SIDE, np.float32)
        tables = np.ones((2, _KEYS, _FEATURES), np.float32)
        ids = np.random.default_rng(1).integers(0, _KEYS, x.size // _FEATURES)
        moments, positions = np.zeros((2, x.size), np.float32), np.arange(_KEYS)
        scores, dscores = x.reshape(-1, _KEYS, _KEYS).copy(), x.reshape(-1, _KEYS, _KEYS).copy()

    def normalization() -> None:
        layernorm_backward(x, layernorm(x, gain, gain)[1], gain)

    def activation() -> None:
        Finish("gelu_tanh", bias=gain[None], aux=z)(y, x)
        Finish("gelu_tanh", gradient=True, aux=z)(y, x)

    def softmax() -> None:
        causal_softmax(scores, positions, positions)
        softmax_gradient(dscores, scores)

    def embedding() -> None:
        add_table_rows(table_rows(tables[0], ids), ids, tables[1])

    def update() -> None:
        sum_of_squares(z.ravel())
        np.multiply(z, gain[0], out=z)  # clip the gradients
        AdamW().update(y.ravel(), z.ravel(), moments, 1, 1e-3, True)

    functions = (normalization, activation, softmax, embedding, update)
    works: dict[Any, Callable[[], None]] = {function.__name__: function for function in functions}
    with together(comm):  # an allocation may fail on one rank; the others would wait for it in a barrier
        for work in works.values():
            work()
    seconds = in_turns(comm, list(works.values()))
    return {name: max(1e-12, taken / x.size) for name, taken in zip(works, seconds)}
