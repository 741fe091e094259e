"""Fixtures of all tests; mpi_report.py is the plugin of parallel runs, tiers.py chooses how much is run."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdgemm.devices import gpu_binding

if gpu_binding.visible():
    gpu_binding.choose()  # before MPI starts: an MPI library built for CUDA then selects the GPU of the rank
FOLDERS = {path.parent for path in Path(__file__).parent.rglob("*.py")}
sys.path[:0] = map(str, sorted(FOLDERS))  # in every import mode of pytest; all test modules have different names
HELPERS = Path(__file__).parent.glob("helpers/*.py")
pytest.register_assert_rewrite(*(path.stem for path in HELPERS))  # pytest explains failed assertions of helpers, too
pytest_plugins = ["mpi_report", "tiers", "grid_fixtures", "tree_mover", "allgather_3d"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip modules without a test of the chosen kind: importing all modules on six ranks takes a minute."""
    kind = config.option.markexpr
    if kind not in ("mpi", "not mpi") or not collection_path.match("test_*.py"):
        return None
    text = collection_path.read_text()
    if kind == "mpi":
        return True if "pytest.mark.mpi" not in text else None
    marks = [x for x in ast.parse(text).body if isinstance(x, ast.Assign) and ast.unparse(x.targets[0]) == "pytestmark"]
    return True if any("pytest.mark.mpi" in ast.unparse(x.value) for x in marks) else None


@pytest.fixture(scope="session", autouse=True)
def held_grid(pytestconfig: pytest.Config) -> Iterator[Any]:
    """A grid over all ranks for the whole run: the grids of tests share its communicator, nodes and memory."""
    if not pytestconfig.getoption("--with-mpi"):
        yield
        return
    from mpi4py import MPI

    from pdgemm import ProcessGrid

    with ProcessGrid(MPI.COMM_WORLD) as grid:
        yield grid


@pytest.fixture(autouse=True)
def small_orders(held_grid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all ranks factor the small matrices of tests, except the smallest ones, which LAPACK factors on one rank."""
    if held_grid:
        monkeypatch.setattr("pdgemm.linalg.factors.operands.SMALL", 6)
        monkeypatch.setattr("pdgemm.linalg.factors.operands.ON_NODE", 1)


@pytest.fixture(autouse=True)
def no_message_is_left(held_grid: Any) -> Iterator[None]:
    """Check that no message is pending: a later receive of another grid of the same communicator would match it."""
    yield
    if held_grid:
        from mpi4py import MPI

        for comm in (held_grid.comm, held_grid.row, held_grid.col, held_grid.node):
            assert not comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status := MPI.Status()), (status.source, status.tag)
