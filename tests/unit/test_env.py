"""What `. scripts/env.sh` sets, and leaves as it was set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ENV = Path(__file__).parents[2] / "scripts" / "env.sh"
QUIET = "OMPI_MCA_orte_execute_quiet"  # Open MPI 4's mpirun then adds no lines to those of a command that fails


@pytest.mark.parametrize(
    ("given", "quiet"),
    [({}, "1"), ({QUIET: "0"}, "0"), ({"SLURM_JOB_NUM_NODES": "2"}, "1")],
)
def test_mpirun_adds_nothing_to_an_error(tmp_path: Path, given: dict[str, str], quiet: str) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").write_text("")
    environment = {"PATH": os.environ["PATH"], "PDGEMM_VENV": str(tmp_path), **given}
    script = f". {ENV}; {sys.executable} -c \"import os; print(os.environ['{QUIET}'])\""
    done = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == (quiet, 0), done.stderr
