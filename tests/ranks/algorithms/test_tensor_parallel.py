"""The products of tensor-parallel layers: values, and words that equal Megatron's formulas exactly."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from device_ways import WAYS
from fake_device import SCHEDULES, fake_device
from problems import TOLERANCE, gemm_error
from tiers import every_grid, in_turn, pairs

from pdgemm import DistMatrix, ProcessGrid, pdgemm

pytestmark = pytest.mark.mpi

Matrices = dict[str, Any]
# products of two layers and their gradients: (A, B, C), the collective, and the matrix that it moves
PRODUCTS: dict[str, tuple[Callable[..., tuple[Any, Any, Any]], str, str]] = {
    "Y = X W1": (lambda X, W1, Y, W2, Z: (X, W1, Y), "allgather", "X"),
    "Z = Y W2": (lambda X, W1, Y, W2, Z: (Y, W2, Z), "reduce_scatter", "Z"),
    "dY = dZ W2^T": (lambda X, W1, Y, W2, Z: (Z, W2.T, Y), "allgather", "Z"),
    "dW2 = Y^T dZ": (lambda X, W1, Y, W2, Z: (Y.T, Z, W2), "allgather", "Z"),
    "dX = dY W1^T": (lambda X, W1, Y, W2, Z: (Y, W1.T, X), "reduce_scatter", "X"),
    "dW1 = X^T dY": (lambda X, W1, Y, W2, Z: (X.T, Y, W1), "allgather", "X"),
}
SIZES = [
    (24, 12, 36),
    (13, 7, 10),
    (5, 3, 2),
    (1, 4, 1),
    (3, 1, 7),
]  # tokens, inputs, hidden; even, uneven, empty shards


@pytest.fixture
def lines(comm: Any) -> Iterator[tuple[Any, Any]]:
    with ProcessGrid(comm, (comm.size, 1)) as by_rows, ProcessGrid(comm, (1, comm.size)) as by_columns:
        yield by_rows, by_columns


def layers(lines: tuple[Any, Any], sizes: tuple[int, int, int], block: int | None = None, **options: Any) -> Matrices:
    """Return X, W1, Y, W2 and Z of two layers; X, W2 and Z are divided by rows, W1 and Y by columns."""
    (by_rows, by_columns), (tokens, inputs, hidden) = lines, sizes
    shapes = {
        "X": (tokens, inputs, by_rows), "W1": (inputs, hidden, by_columns), "Y": (tokens, hidden, by_columns),
        "W2": (hidden, inputs, by_rows), "Z": (tokens, inputs, by_rows),
    }  # fmt: skip
    return {
        name: DistMatrix.random((rows, cols), grid=grid, seed=seed, kind="normal", block=block, **options)
        for seed, (name, (rows, cols, grid)) in enumerate(shapes.items())
    }


def check(comm: Any, name: str, matrices: Matrices, beta: float, **options: Any) -> Any:
    """Compare one product with NumPy; check its collective and words; return its report."""
    operands, collective, moved = PRODUCTS[name]
    A, B, C = operands(**matrices)
    a, b, c = A.allgather(), B.allgather(), C.allgather()
    own, elements = matrices[moved].local.size, matrices[moved].size
    if not beta:
        C.local[...] = np.nan
    report = pdgemm(1, A, B, beta, C, **options).report
    assert gemm_error(C.allgather(), 1, a, b, beta, c) <= TOLERANCE, str(report)
    assert report.as_predicted, str(report)
    assert report.collective == (collective if comm.size > 1 else ""), str(report)
    words = elements - own if collective == "allgather" else (comm.size - 1) * own
    assert report.counted.words_received == words, f"{name}: {report}"
    assert comm.allreduce(words) == (comm.size - 1) * elements  # on average (P - 1)/P of the matrix per rank
    return report


@every_grid
@pytest.mark.parametrize("name", PRODUCTS)
def test_each_product_by_name(comm: Any, lines: Any, name: str) -> None:
    ways = pairs(("auto", "ring", "ibcast"), ("float64", "float32"), (0, 0.5), "CF", (None, 2), (1, 3))
    for sizes, (mover, dtype, beta, order, block, lookahead) in in_turn(SIZES, ways, [*PRODUCTS].index(name)):
        matrices = layers(lines, sizes, block, dtype=dtype, order=order)
        options: dict[str, Any] = {"algorithm": PRODUCTS[name][1], "mover": mover, "lookahead": lookahead}
        check(comm, name, matrices, beta, panel_width=(None, 2)[lookahead > 1], **options)


@pytest.mark.on_ranks(2, 4)
@pytest.mark.parametrize(("mover", "sizes"), [("auto", (508, 126, 515)), ("ring", (250, 130, 511))])
def test_auto_chooses_them(comm: Any, lines: Any, mover: str, sizes: tuple[int, int, int]) -> None:
    matrices = layers(lines, sizes, dtype="float32")
    for name in PRODUCTS:
        report = check(comm, name, matrices, 0, mover=mover)
        assert not report.moves
        assert f"({report.collective}) on a" in str(report) or comm.size == 1 or comm.rank


def test_on_a_device(comm: Any, lines: Any) -> None:
    ways, schedules = itertools.cycle(WAYS.values()), itertools.cycle(SCHEDULES)
    for number, (name, (reach, mover), schedule) in enumerate(zip(PRODUCTS, ways, schedules)):
        with fake_device(schedule, reach=reach) as device:
            matrices = layers(lines, SIZES[number % 3], device="fake", dtype=("float64", "float32")[number % 2])
            check(comm, name, matrices, number % 2, mover=mover, algorithm=PRODUCTS[name][1])
            assert comm.allgather(device.races) == [[]] * comm.size
