"""The recipe of docs/survivors.md restarts a job until its result exists, whatever the launcher's exit code."""

from __future__ import annotations

import os
import re
import subprocess
import textwrap
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "survivors.md"
LAUNCHER = """#!/bin/bash
echo start >> starts
case $(grep -c . starts) in
    %s
esac
"""


def recipe() -> str:
    blocks = [textwrap.dedent(x) for x in re.findall(r"(?ms)^ *```bash\n(.*?)^ *```", PAGE.read_text())]
    (script,) = (x for x in blocks if "mpirun" in x)
    return script


@pytest.mark.parametrize(
    ("jobs", "starts", "code"),
    [
        (["touch power.h5", "echo x > power.h5"], 2, 0),  # all ranks were killed: an empty file, exit code 0
        (["exit 0", "exit 3", "exit 137", "echo x > power.h5"], 4, 0),
        (["sleep 30", "echo x > power.h5"], 2, 0),  # ranks hang in MPI_Init
        (["echo x > power.h5; exit 3"], 1, 0),
        (["exit 1", "echo x > power.h5"], 1, 1),  # an error of the program
        (["exit 0"] * 9, 5, 1),
    ],
)
def test_the_recipe_checks_the_result(tmp_path: Path, jobs: list[str], starts: int, code: int) -> None:
    (tmp_path / "mpirun").write_text(LAUNCHER % "\n    ".join(f"{n}) {job} ;;" for n, job in enumerate(jobs, 1)))
    (tmp_path / "mpirun").chmod(0o755)
    (tmp_path / "power.h5").write_text("of another job")
    script, bounded = re.subn(r"timeout --kill-after=60 \w+ ", "timeout --kill-after=60 1s ", recipe())
    assert bounded == 1
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env={"PATH": path}, timeout=60, check=False)
    assert (len((tmp_path / "starts").read_text().split()), done.returncode) == (starts, code)
