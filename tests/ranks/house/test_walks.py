"""Limits on the number of calls and modules that a product or a factorisation takes, for readers of the code."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdgemm import DistMatrix, ProcessGrid, linalg, pdgemm
from pdgemm.planning.planner import best_plan

TRACE = Path(__file__).parents[3] / "scripts/benchmarks/trace_calls.py"

pytestmark = [pytest.mark.mpi, pytest.mark.on_ranks(1)]


@pytest.fixture(scope="module")
def trace() -> Any:
    """The script that counts calls of functions of the package, and changes of module."""
    spec = spec_from_file_location("trace_calls", TRACE)
    assert spec and spec.loader
    spec.loader.exec_module(module := module_from_spec(spec))
    return module


def test_a_product_is_short(comm: Any, trace: Any) -> None:
    with ProcessGrid(comm) as grid:
        _ = DistMatrix.random((20, 30), grid=grid) @ DistMatrix.random((30, 10), grid=grid)  # load all modules
        A, B = DistMatrix.random((64, 32), grid=grid), DistMatrix.random((32, 48), grid=grid)
        best_plan.cache_clear()
        walk = trace.walked(lambda: pdgemm(1, A, B))
        assert walk.calls <= 450
        assert walk.moves <= 520
        assert len(walk.modules) <= 60


def test_a_factorisation_is_short(comm: Any, trace: Any) -> None:
    with ProcessGrid(comm) as grid:
        linalg.cholesky(DistMatrix.eye(20, grid=grid))
        A = DistMatrix.from_global(64 * np.eye(64) + 1, grid=grid)
        walk = trace.walked(lambda: linalg.cholesky(A))
        assert walk.calls <= 260
        assert walk.moves <= 310
        assert len(walk.modules) <= 40
