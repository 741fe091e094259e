"""The fixtures and the report of parallel runs come from mpi_report.py, how much is run from tiers.py."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdgemm.devices import gpu_binding

if gpu_binding.visible():
    gpu_binding.choose()  # an MPI library built for CUDA looks for the GPU of a rank when it starts
FOLDERS = {path.parent for path in Path(__file__).parent.rglob("*.py")}
sys.path[:0] = map(str, sorted(FOLDERS))  # whatever the import mode: all modules of tests have names of their own
HELPERS = Path(__file__).parent.glob("helpers/*.py")
pytest.register_assert_rewrite(*(path.stem for path in HELPERS))  # what they check is told as in a test
pytest_plugins = ["mpi_report", "tiers", "grid_fixtures", "tree_mover", "allgather_3d"]


@pytest.fixture(scope="session", autouse=True)
def held_grid(pytestconfig: pytest.Config) -> Iterator[None]:
    """A grid over all ranks that lasts: those that tests make share its communicator, its nodes and their memory."""
    if not pytestconfig.getoption("--with-mpi"):
        yield
        return
    from mpi4py import MPI

    from pdgemm import ProcessGrid

    with ProcessGrid(MPI.COMM_WORLD):
        yield
