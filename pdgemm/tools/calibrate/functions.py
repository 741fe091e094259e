"""The seconds of functions of a model: NumPy computes exponentials and moments slower than memory brings elements."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from pdgemm.local.arrays.activations import Finish
from pdgemm.parallel.layers.attention import causal_softmax, softmax_gradient
from pdgemm.parallel.layers.normalization import layernorm, layernorm_backward
from pdgemm.parallel.updates.update_rules import AdamW
from pdgemm.planning.machines.machine import Function
from pdgemm.support.agreement import together
from pdgemm.tools.calibrate.place import in_turns

_SIDE, _KEYS = 1024, 256  # rows and columns; keys of a softmax, as short as those of usual models on hosts
_FRESH, _WORDS = 96, 1 << 18  # arrays of 1 MiB that are kept at one time; the C library returns them to the system


def function_seconds(comm: MPI.Comm) -> dict[Function, float]:
    """Return the seconds of a float32 element forward and backward, in an update, and in new memory.

    Collective, NumPy.  Pages of arrays below 4 MiB come one by one; those of larger ones are huge, and four times as
    fast (`Machine.first_touch_bandwidth`).
    """
    with together(comm):
        x = np.random.default_rng(0).standard_normal((_SIDE, _SIDE), np.float32)
        y, z, gain = x.copy(), x.copy(), np.ones(_SIDE, np.float32)
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

    def update() -> None:
        AdamW().update(y.ravel(), z.ravel(), moments, 1, 1e-3, True)

    def touch() -> None:
        kept = [np.empty(_WORDS, np.float32) for _ in range(_FRESH)]
        for array in kept:
            array[::1024] = 0  # an element of each page

    works: dict[Function, Callable[[], None]] = {
        "normalization": normalization,
        "activation": activation,
        "softmax": softmax,
        "update": update,
        "touch": touch,
    }
    elements = dict.fromkeys(works, x.size) | {"touch": _FRESH * _WORDS}
    with together(comm):  # what they allocate may fail on one rank, for which the others would wait in the turns
        for work in works.values():
            work()
    seconds = in_turns(comm, list(works.values()))
    return {name: max(1e-12, taken / elements[name]) for name, taken in zip(works, seconds)}
