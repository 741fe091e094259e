"""Every algorithm on every grid it accepts: results, counters, memory, inputs and what lies around them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from problems import DTYPES, SHAPES, TOLERANCE, accepted, gemm_error

pytestmark = pytest.mark.mpi

ALGORITHMS = ["summa", "stationary_a", "stationary_b", "cannon", "2.5d", "row", "column", "inner"]
MIXED: list[tuple[int, int, int]] = [
    *SHAPES["empty"][1:4],
    *SHAPES["ragged"][:3],
    *SHAPES["even"][:1],
    *SHAPES["larger"][:1],
]


def check(
    grid: Any,
    mnk: tuple[int, int, int],
    algorithm: str,
    shape: tuple[int, int],
    layers: int,
    *,
    block: Any = None,
    dtype: str = "float64",
    orders: str = "CCC",
    ops: str = "NN",
    alpha: complex = 1,
    beta: complex = 0,
    device: str = "host",
    **options: Any,
) -> Any:
    """One product against NumPy, in the middle of larger matrices; its report."""
    from pdgemm import DistMatrix, pdgemm
    from pdgemm.arrays.device import to_host

    m, n, k = mnk
    made: dict[str, Any] = {"grid": grid, "dtype": dtype, "kind": "normal", "block": block, "device": device}
    sides = [(m, k) if ops[0] == "N" else (k, m), (k, n) if ops[1] == "N" else (n, k), (m, n)]
    wholes = [
        DistMatrix.random((r + 3, c + 2), seed=seed, order=order, **made)
        for seed, ((r, c), order) in enumerate(zip(sides, orders), 1)
    ]
    A, B, C = (x[1 : r + 1, 2 : c + 2] for x, (r, c) in zip(wholes, sides))
    a, b, c = A.allgather(), B.allgather(), C.allgather()
    before = [to_host(x.local).copy() for x in wholes]
    if beta == 0:
        C.local[...] = np.nan
    seen = {"N": lambda x: x, "T": lambda x: x.T, "C": lambda x: x.conj().T}
    result = pdgemm(
        alpha, A, B, beta, C, transa=ops[0], transb=ops[1], algorithm=algorithm, shape=shape, layers=layers, **options
    )
    assert result is C
    assert gemm_error(C.allgather(), alpha, seen[ops[0]](a), seen[ops[1]](b), beta, c) <= TOLERANCE, C.report
    assert all(np.array_equal(to_host(x.local), old) for x, old in zip(wholes[:2], before))
    mask = np.ones(wholes[2].shape, bool)
    mask[1 : m + 1, 2 : n + 2] = False
    here = mask[np.ix_(*wholes[2].indices())]
    assert np.array_equal(to_host(wholes[2].local)[here], before[2][here])
    report = C.report
    assert report.counted == report.predicted, str(report)
    assert report.extra_bytes == report.predicted_extra_bytes, str(report)
    if k and alpha:
        names = {"row": ("summa", "cannon"), "column": ("summa", "cannon")}.get(algorithm, (algorithm,))
        assert report.algorithm in names
        assert (report.grid, report.layers) == (shape, layers)
    return report


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_grid_and_shape(comm: Any, algorithm: str) -> None:
    from pdgemm import ProcessGrid

    with ProcessGrid(comm) as grid:
        for name, shape, layers in accepted(comm.size):
            if name == algorithm:
                cases = itertools.product(MIXED if comm.size < 9 else MIXED[2::2], [None, (2, 3)], ["auto", "ibcast"])
                for mnk, block, mover in cases:
                    check(grid, mnk, name, shape, layers, block=block, mover=mover)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_operations_types_and_orders(comm: Any, algorithm: str) -> None:
    from pdgemm import ProcessGrid

    ops = [a + b for a in "NTC" for b in "NTC"]
    orders = ["".join(x) for x in itertools.product("CF", repeat=3)]
    scalars = [(1, 0), (2, 1), (-0.5, 3), (1, -1)]
    cases = [x for x in accepted(comm.size) if x[0] == algorithm]
    if not cases:
        pytest.skip("one rank has no layers")
    with ProcessGrid(comm) as grid:
        for number, op in enumerate(ops * (1 if len(cases) > 4 else 2)):
            name, shape, layers = cases[number % len(cases)]
            alpha, beta = scalars[number % 4]
            dtype = DTYPES[(number + number // 4) % 4]
            if dtype.startswith("complex"):
                alpha, beta = alpha + 1j, beta * 1j
            options: dict[str, Any] = {"block": (None, 4, (2, 3))[number % 3], "orders": orders[number % 8]}
            check(grid, (13, 19, 22), name, shape, layers, dtype=dtype, ops=op, alpha=alpha, beta=beta, **options)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_lookahead_width_and_mover(comm: Any, algorithm: str) -> None:
    from pdgemm import ProcessGrid

    cases = [x for x in accepted(comm.size) if x[0] == algorithm]
    options = itertools.product([0, 1, 3], [1, 5, None], ["shared", "ibcast", "ring"])
    if not cases:
        pytest.skip("one rank has no layers")
    with ProcessGrid(comm) as grid:
        for number, (lookahead, width, mover) in enumerate(options):
            name, shape, layers = cases[number % len(cases)]
            asked: dict[str, Any] = {"lookahead": lookahead, "panel_width": width, "mover": mover}
            report = check(grid, (9, 14, 41), name, shape, layers, block=(None, 3)[number % 2], **asked)
            if report.algorithm in ("summa", "stationary_a", "stationary_b", "2.5d"):
                assert report.mover in (mover, "shift") or comm.size == 1


@pytest.mark.parametrize(("bundle", "cache"), [(1, 1 << 20), (6, 1 << 20), (4, 0)])
def test_thin_panels_alone_and_in_bundles(comm: Any, bundle: int, cache: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from pdgemm import ProcessGrid
    from pdgemm.planning import planner
    from pdgemm.schedules import summa_product as summa

    planner.plan_product.cache_clear()
    monkeypatch.setattr(summa, "BUNDLE", bundle)
    monkeypatch.setattr(summa, "CACHE_BYTES", cache)
    with ProcessGrid(comm) as grid:
        for name, shape, layers in accepted(comm.size):
            if name in ("summa", "2.5d"):
                for mover, orders in (("ibcast", "CCC"), ("ring", "FCF"), ("auto", "CFC")):
                    check(grid, (11, 17, 23), name, shape, layers, block=2, mover=mover, orders=orders)
    planner.plan_product.cache_clear()


def test_a_large_block_is_shifted_in_pieces(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from pdgemm import ProcessGrid
    from pdgemm.movers import shift
    from pdgemm.planning import planner
    from pdgemm.schedules import cannon_product as cannon

    planner.plan_product.cache_clear()
    for module in (shift, cannon):
        monkeypatch.setattr(module, "MESSAGE_BYTES", 80)
    with ProcessGrid(comm) as grid:
        for name, shape, layers in accepted(comm.size):
            if name == "cannon":
                report = check(grid, (11, 17, 23), name, shape, layers)
                words = report.counted.words_sent - sum(x.counted.words_sent for x in report.moves)
                messages = report.counted.messages_sent - sum(x.counted.messages_sent for x in report.moves)
                assert messages >= words / 10
    planner.plan_product.cache_clear()


def test_matrices_on_one_layer_of_the_ranks(comm: Any) -> None:
    """A, B and C on the first ranks only: 2.5D deals the inner indices out to the layers, and adds C up there."""
    from pdgemm import DistMatrix, ProcessGrid, pdgemm

    plane = max(1, comm.size // 2)
    shape = (1, plane)
    with ProcessGrid(comm, shape, ranks=range(plane)) as grid:
        A, B = (DistMatrix.random(x, grid=grid, block=3, seed=s) for x, s in (((14, 30), 1), ((30, 12), 2)))
        C = DistMatrix.empty((14, 12), grid=grid, block=(4, 5))
        for algorithm in ["auto"] + (["2.5d"] if comm.size > 1 else []):
            pdgemm(1, A, B, 0, C, algorithm=algorithm, shape=None if algorithm == "auto" else shape)
            assert gemm_error(C.allgather(), 1, A.allgather(), B.allgather()) <= TOLERANCE
            assert C.report.counted == C.report.predicted


def test_sixteen_bit_and_whole_numbers(comm: Any) -> None:
    from pdgemm import DistMatrix, ProcessGrid, pdgemm

    rng = np.random.default_rng(3)
    a, b = rng.integers(-100, 100, (12, 40)), rng.integers(-100, 100, (40, 10))
    with ProcessGrid(comm) as grid:
        for name, shape, layers in accepted(comm.size):
            for dtype, into in (("int8", "int32"), ("float16", "float32"), ("bfloat16", "float32")):
                A, B = (DistMatrix.from_global(x.astype(dtype), grid=grid, block=3) for x in (a, b))
                C = DistMatrix.empty((12, 10), grid=grid, dtype=into)
                pdgemm(1, A, B, 0, C, algorithm=name, shape=shape, layers=layers)
                assert np.array_equal(C.allgather(), a @ b)  # all exact: below 2^24
                assert C.report.counted == C.report.predicted
                assert C.report.extra_bytes == C.report.predicted_extra_bytes
