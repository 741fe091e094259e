"""Every algorithm on every grid that it accepts: results, counters, memory, inputs and guard zones."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest
from allgather_3d import ENTRY
from checked_product import MIXED, check
from problems import DTYPES, NAMES, accepted
from tiers import every_grid, everything, in_turn, square_grid
from tree_mover import ON_HOST

from pdgemm import ProcessGrid
from pdgemm.planning import planner
from pdgemm.schedules.products import cannon_product as cannon, summa_product as summa

pytestmark = [pytest.mark.mpi, every_grid, pytest.mark.usefixtures("allgather_3d")]

ALGORITHMS = [*NAMES, ENTRY.name]
OPS = [a + b for a in "NTC" for b in "NTC"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_grid(comm: Any, grid: Any, algorithm: str, tree_mover: None) -> None:
    """Grids in turn; shapes, blocks, operations, types, orders, scalars, lookahead, width and mover are drawn."""
    cases = [x for x in accepted(comm.size) if x[0] == algorithm]
    if not cases:
        pytest.skip("one rank has no layers")
    rng = np.random.default_rng(ALGORITHMS.index(algorithm))
    pick: Any = lambda *values: values[rng.integers(len(values))]  # noqa: E731
    for number in range((6 if everything() else 1) * max(9, len(cases))):
        _, shape, layers = cases[number % len(cases)]
        dtype, (alpha, beta) = DTYPES[(number + number // 4) % 4], pick((1, 0), (2, 1), (-0.5, 3), (1, -1))
        if dtype.startswith("complex"):
            alpha, beta = alpha + 1j, beta * 1j
        asked: dict[str, Any] = {
            "lookahead": pick(0, 1, 3),
            "panel_width": pick(1, 5, None),
            "mover": pick(*ON_HOST),
        }
        asked |= {
            "ops": OPS[number % 9],
            "orders": "".join(pick(*"CF") for _ in "ABC"),
            "block": pick(None, 4, (2, 3)),
        }
        size = [*MIXED, (9, 14, 41), (13, 19, 22)][number % 9]
        report = check(grid, size, algorithm, shape, layers, dtype=dtype, alpha=alpha, beta=beta, **asked)
        if report.algorithm in ("summa", "stationary_a", "stationary_b", "2.5d"):
            assert report.mover in (asked["mover"], "shift") or comm.size == 1


@square_grid
def test_thin_panels_one_by_one_and_in_bundles(comm: Any, monkeypatch: pytest.MonkeyPatch, tree_mover: None) -> None:
    grids = [x for x in accepted(comm.size) if x[0] in ("summa", "2.5d")]
    ways = [("ibcast", "CCC"), ("ring", "FCF"), ("auto", "CFC"), ("tree", "FCC")]
    with ProcessGrid(comm) as grid:
        for bundle, cache in ((1, 1 << 20), (6, 1 << 20), (4, 0)):
            planner.best_plan.cache_clear()
            monkeypatch.setattr(summa, "BUNDLE", bundle)
            monkeypatch.setattr(summa, "CACHE_BYTES", cache)
            for (name, shape, layers), (mover, orders) in in_turn(grids[bundle % 2 :: 2], ways, start=bundle):
                check(grid, (11, 17, 23), name, shape, layers, block=2, mover=mover, orders=orders)
    planner.best_plan.cache_clear()


@square_grid
def test_a_large_block_is_shifted_in_pieces(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planner.best_plan.cache_clear()
    for module in (import_module("pdgemm.transport.movers.ring"), cannon):  # the folder has a function of this name
        monkeypatch.setattr(module, "LARGEST_MESSAGE_BYTES", 80)
    with ProcessGrid(comm) as grid:
        for number, (name, shape, layers) in enumerate(x for x in accepted(comm.size) if x[0] == "cannon"):
            report = check(grid, (11, 17, 23), name, shape, layers, dtype=("float64", "complex128")[number % 2])
            words = report.counted.words_sent - sum(x.counted.words_sent for x in report.moves)
            messages = report.counted.messages_sent - sum(x.counted.messages_sent for x in report.moves)
            assert messages >= words / 10
    planner.best_plan.cache_clear()
