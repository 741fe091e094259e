"""scripts/hardening/hostile.py: its detectors find planted faults, and a sound package passes."""

from __future__ import annotations

from pathlib import Path

import jobs
import pytest
from tiers import thorough

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "hardening" / "hostile.py"
COMMAND, CALL = "products.command:1", "arguments.calls:2:6"  # trials of valid products
pytestmark = [jobs.needs_mpiexec, thorough]


def hostile(tmp_path: Path, *options: str) -> jobs.Finished:
    done = jobs.run(jobs.python(0, SCRIPT, *options), TMPDIR=str(tmp_path))
    if done.returncode == 3:
        pytest.skip(done.stderr.strip())
    return done


@pytest.mark.parametrize(
    ("kind", "trial"),
    [
        *[(kind, COMMAND) for kind in ("lost", "traceback", "litter")],
        *[(kind, CALL) for kind in ("hang", "wrong")],
        *[(kind, COMMAND) for kind in ("hang", "signal", "code")],
    ],
)
def test_planted_faults_are_found(tmp_path: Path, kind: str, trial: str) -> None:
    bound = ("--bound", "3" if trial == COMMAND else "6") if kind == "hang" else ()
    done = hostile(tmp_path, "--trial", trial, "--ranks", "1", "--plant", kind, *bound)
    assert done.returncode == 1, done.stdout + done.stderr
    found = [line for line in done.stdout.splitlines() if line.startswith(kind.upper())]
    assert found and set(found) == {f"{kind.upper()}  --trial {trial} --ranks 1"}, done.stdout
    (kept,) = tmp_path.iterdir()
    assert "mpiexec" in (kept / "1" / "commands").read_text()


def test_missed_flips_are_found(tmp_path: Path) -> None:
    """If the comparison of `protect=` is disabled, the trial reports the missed flips."""
    done = hostile(tmp_path, "--trial", "products.flips:1", "--ranks", "1", "--plant", "blind")
    assert done.returncode == 1 and "a flip of large effect was missed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("trial", [COMMAND, CALL, "products.flips:1:0"])
def test_a_sound_package_passes_and_no_file_is_left(tmp_path: Path, trial: str) -> None:
    done = hostile(tmp_path, "--trial", trial, "--ranks", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 findings" in done.stdout
    assert not [*tmp_path.iterdir()]
