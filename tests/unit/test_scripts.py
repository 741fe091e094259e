"""All scripts have help texts, and refuse unknown arguments before they change anything."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
QUIET = "OMPI_MCA_orte_execute_quiet"  # with it, Open MPI 4's mpirun adds no lines to errors of a command
SCRIPTS = sorted(
    x.relative_to(ROOT / "scripts").as_posix()
    for x in (ROOT / "scripts").rglob("*.sh")
    if x.read_text().startswith("#!")
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with only the scripts, so that all files that they create are seen."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def run(checkout: Path, *words: str) -> subprocess.CompletedProcess[str]:
    tools = {"PATH": "/usr/bin:/bin"}
    return subprocess.run(["bash", *words], cwd=checkout, env=tools, capture_output=True, text=True, timeout=60)


def test_help_of_each_script(checkout: Path) -> None:
    before = sorted(checkout.rglob("*"))
    assert len(SCRIPTS) >= 12
    for script in SCRIPTS:
        for flag in ("--help", "-h"):
            said = run(checkout, f"scripts/{script}", flag)
            first = (checkout / "scripts" / script).read_text().splitlines()[1]
            assert (said.returncode, said.stderr) == (0, ""), (script, said)
            assert said.stdout.startswith(first.removeprefix("# ")) and "set -euo" not in said.stdout, script
    assert sorted(checkout.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["setup.sh", "--hepl"], "--hepl is not an extra of pdgemm; the extras are: mpi mpich "),
        (["setup.sh", "dev", "demmo"], "demmo is not an extra of pdgemm; the extras are: mpi mpich "),
        (["demo.sh", "--fast"], "takes no arguments, not '--fast'"),
        (["setup_parallel_hdf5.sh", "dev"], "takes no arguments, not 'dev'"),
        (["docs.sh", "--chekc"], "the only option is --check, not '--chekc'"),
    ],
)
def test_unknown_arguments_are_refused(checkout: Path, words: list[str], said: str) -> None:
    before = sorted(checkout.rglob("*"))
    bad = run(checkout, f"scripts/{words[0]}", *words[1:])
    assert bad.returncode == 2 and said in bad.stderr and not bad.stdout, bad
    assert sorted(checkout.rglob("*")) == before


def test_the_environment_of_another_checkout_is_not_cleared(checkout: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / "bin").mkdir(parents=True)
    (checkout / ".venv").symlink_to(other)
    bad = run(checkout, "scripts/setup.sh", "dev")
    assert bad.returncode == 1 and f".venv is a link to {other}, which another checkout may use" in bad.stderr, bad
    assert [*other.iterdir()] == [other / "bin"]


@pytest.mark.parametrize(("said", "quiet"), [({}, "1"), ({QUIET: "0"}, "0"), ({"SLURM_JOB_NUM_NODES": "2"}, "1")])
def test_mpirun_adds_nothing_to_an_error(tmp_path: Path, said: dict[str, str], quiet: str) -> None:
    """scripts/env.sh sets the variable QUIET, unless the user has."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").write_text("")
    environment = {"PATH": os.environ["PATH"], "PDGEMM_VENV": str(tmp_path), **said}
    script = f". {ROOT / 'scripts' / 'env.sh'}; {sys.executable} -c \"import os; print(os.environ['{QUIET}'])\""
    done = subprocess.run(["sh", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == (quiet, 0), done.stderr
