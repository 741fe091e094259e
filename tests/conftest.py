"""The fixtures and the report of parallel runs come from mpi_report.py, how much is run from tiers.py."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdgemm.devices import gpu_binding

if gpu_binding.visible():
    gpu_binding.choose()  # an MPI library built for CUDA looks for the GPU of a rank when it starts
FOLDERS = {path.parent for path in Path(__file__).parent.rglob("*.py")}
sys.path[:0] = map(str, sorted(FOLDERS))  # whatever the import mode: all modules of tests have names of their own
HELPERS = Path(__file__).parent.glob("helpers/*.py")
pytest.register_assert_rewrite(*(path.stem for path in HELPERS))  # what they check is told as in a test
pytest_plugins = ["mpi_report", "tiers", "grid_fixtures", "tree_mover", "allgather_3d"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave modules out that have no test of the chosen kind: to import all of them takes six ranks a minute."""
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
    """A grid over all ranks that lasts: those that tests make share its communicator, its nodes and their memory."""
    if not pytestconfig.getoption("--with-mpi"):
        yield
        return
    from mpi4py import MPI

    from pdgemm import ProcessGrid

    with ProcessGrid(MPI.COMM_WORLD) as grid:
        yield grid


@pytest.fixture(autouse=True)
def no_message_is_left(held_grid: Any) -> Iterator[None]:
    """What a test sends and does not receive would match a receive of another grid of the same communicator."""
    yield
    if held_grid:
        from mpi4py import MPI

        for comm in (held_grid.comm, held_grid.row, held_grid.col, held_grid.node):
            assert not comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status := MPI.Status()), (status.source, status.tag)
