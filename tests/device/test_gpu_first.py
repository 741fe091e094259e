"""scripts/gpu/gpu_first.py, on CuPy without a GPU: all steps, failing steps, and runs that end early."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tiers import everything, thorough

pytestmark = thorough

ROOT = Path(__file__).parents[2]


@pytest.fixture
def first(monkeypatch: Any) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "gpu"))
    return import_module("gpu_first")


# without --all, a few of the tests for a real GPU: test_cuda_layer.py runs all of them on CuPy without a GPU
FEW = {} if everything() else {"PYTEST_ADDOPTS": "-k 'test_elements_by_their_indices or test_memory'"}


def hour(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    argv = [str(ROOT / "scripts" / "gpu" / "gpu_first.sh"), "--out", str(out), "--rehearse", *options]
    own = os.environ | FEW | {"PDGEMM_FIRST_HOUR": str(out / "own")}
    return subprocess.run(argv, capture_output=True, text=True, check=False, env=own)


def printed(passed: bool) -> str:
    return f"print({json.dumps([{'what': 'speed', 'expected': '1', 'measured': '2', 'passed': passed}])!r})"


@pytest.mark.timeout(600)
def test_the_whole_hour(tmp_path: Path, first: Any) -> None:
    chosen = [x.name for x in first.STEPS if everything() or x.ranks < 4]  # 4 ranks take as long as all others
    done = hour(tmp_path, "--steps", ",".join(chosen))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    verdicts = {x["step"]: x["verdict"] for x in report["steps"]}
    assert list(verdicts) == chosen
    assert verdicts.pop("sanitizer") == "not run"  # the sanitizer is not installed here
    assert set(verdicts.values()) == {"passed"}
    page = (tmp_path / "report.md").read_text()
    assert "rehearsal" in page
    assert all(f"## {x['step']}: {x['verdict']}" in page for x in report["steps"])
    assert all("passed" in y for x in report["steps"] for y in x["findings"])
    assert all((tmp_path / f"{name}.txt").read_text().startswith("$ mpiexec") for name in verdicts)


@pytest.mark.timeout(120)
def test_an_hour_resumes_after_its_last_step(tmp_path: Path) -> None:
    assert "reach-2: not begun" in hour(tmp_path, "--steps", "reach-2", "--minutes", "-1").stdout
    assert not (tmp_path / "reach-2.json").exists()
    assert "reach-2: passed in" in hour(tmp_path, "--steps", "reach-2").stdout
    assert "reach-2: passed before" in hour(tmp_path, "--steps", "reach-2").stdout
    assert "reach-2: passed in" in hour(tmp_path, "--steps", "reach-2", "--again").stdout
    assert "the steps are environment, tests-1" in hour(tmp_path, "--steps", "reach").stderr


@pytest.mark.timeout(120)
def test_the_commands_for_a_lent_machine(tmp_path: Path, first: Any) -> None:
    """The printed commands name each step once, with valid options; --archive packs all files that a call writes."""
    lines = hour(tmp_path, "--commands").stdout.splitlines()
    calls = [line.split("    #")[0].split() for line in lines if line.startswith("scripts/gpu/gpu_first.sh")]
    assert sorted(",".join(x[-1] for x in calls).split(",")) == sorted(x.name for x in first.STEPS)
    done = hour(tmp_path / "out", "--steps", "environment", "--archive", str(tmp_path / "first-hour.tgz"))
    assert not done.returncode, done.stderr
    with tarfile.open(tmp_path / "first-hour.tgz") as file:
        assert {f"out/{name}" for name in ("report.md", "environment.txt", "environment.json")} <= {*file.getnames()}


def step(first: Any, tmp_path: Path, text: str, *more: str) -> Any:
    """Return a step that runs a script with this text."""
    script = tmp_path / "own.py"
    script.write_text(text)
    return first.Step("own", "a script", 2, (*more, str(script)))


AS_TESTS = "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("text", "how", "verdict", "why"),
    [
        (printed(True), (), "passed", ""),
        (printed(False), (), "failed", "speed"),
        ("print('all is well')", (), "failed", "it printed no findings"),
        ("raise ValueError('no kernel')", (), "failed", "exit status 1: ValueError: no kernel"),
        ("import os; os.kill(os.getpid(), 9)", (), "failed", "exit status"),
        (f"import sys; {printed(True)}; sys.exit(3)", (), "failed", "exit status 3"),
        ("def test(): pass", AS_TESTS, "passed", ""),
        ("def test(): assert 1 == 2", AS_TESTS, "failed", "1 failed"),
        ("import pytest\ndef test(): pytest.skip('there is no GPU')", AS_TESTS, "not run", "there is no GPU"),
        ("import nothing_of_this_name", AS_TESTS, "failed", "nothing_of_this_name"),
    ],
)
def test_verdicts(tmp_path: Path, first: Any, text: str, how: tuple[str, ...], verdict: str, why: str) -> None:
    """Verdicts on scripts and tests; a step whose tests are all skipped has not passed."""
    found = first.run(step(first, tmp_path, text, *how), tmp_path, False, 60)
    assert found["verdict"] == verdict, found
    assert why in found["why"]


HANGS = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open({pids!r}, "a") as file:
    print(os.getpid(), file=file)
print("it waits for a GPU", flush=True)
time.sleep(100)
"""


def wait_for_the_end(pids: Path) -> None:
    deadline = time.monotonic() + 30
    while alive := [pid for pid in map(int, pids.read_text().split()) if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.1)
    assert len(pids.read_text().split()) == 2


@pytest.mark.timeout(120)
def test_a_step_that_hangs(tmp_path: Path, first: Any) -> None:
    """A step that hangs is killed with all its ranks, including one that ignores signals."""
    pids = tmp_path / "pids"
    found = first.run(step(first, tmp_path, HANGS.format(pids=str(pids))), tmp_path, False, 8)
    assert found["verdict"] == "failed"
    assert "not finished after 8 seconds: it waits for a GPU" in found["why"]
    wait_for_the_end(pids)


@pytest.mark.timeout(120)
def test_an_hour_that_is_ended_from_outside(tmp_path: Path, first: Any) -> None:
    """If the whole run is ended by a signal, none of its ranks remains on the GPU."""
    pids, script = tmp_path / "pids", tmp_path / "own.py"
    script.write_text(HANGS.format(pids=str(pids)))
    program = f"import gpu_first as f; f.STEPS = [f.Step('own', '', 2, ({str(script)!r},))]; f.main(['--out', 'out'])"
    path = f"{ROOT / 'scripts' / 'gpu'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}) as ended:
        deadline = time.monotonic() + 60
        while not pids.exists() or len(pids.read_text().split()) < 2:
            assert time.monotonic() < deadline and ended.poll() is None
            time.sleep(0.1)
        ended.terminate()
        assert ended.wait(60) == 143
    wait_for_the_end(pids)


def test_packages_that_are_missing(first: Any) -> None:
    """Missing packages are named with versions, except those that an environment marker excludes."""
    requirements = ["numpy>=1", "numpy>=99", "no-such-thing", "no-such-thing; python_version < '3'", "pytest"]
    assert [*import_module("missing_packages").missing(requirements)] == ["numpy>=99", "no-such-thing"]


def test_a_step_without_its_tool_and_an_empty_report(tmp_path: Path, first: Any) -> None:
    own = first.Step("own", "a tool", 1, ("x.py",), before=("no-such-tool",))
    assert first.run(own, tmp_path, False, 60)["why"] == "no-such-tool is not installed"
    first.report(tmp_path, [], False)
    assert (tmp_path / "report.md").read_text().startswith("# The first hour on a GPU")
    assert {"report.json", "report.md"} <= {x.name for x in tmp_path.iterdir()}
