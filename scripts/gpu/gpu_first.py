#!/usr/bin/env python3
"""The first hour on a machine with a GPU, in steps of at most eight minutes, the most informative first.

    scripts/gpu/gpu_first.sh --out first-hour                       all steps that have not passed yet
    scripts/gpu/gpu_first.sh --out first-hour --steps ratio-1,copies-1 --again
    scripts/gpu/gpu_first.sh --commands                             the commands for a machine that is lent for minutes

Each step writes NAME.txt, the output of its commands, and NAME.json, its verdict with expected and measured values.
report.md and report.json are written again after each step, so nothing is lost when the time is over.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from time import monotonic
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[2]
MEASURES = str(Path(__file__).resolve().with_name("gpu_measures.py"))
REHEARSE = str(ROOT / "tests" / "helpers" / "rehearse.py")
SANITIZER = "compute-sanitizer"
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"


@dataclass(frozen=True)
class Step:
    """A command on some ranks.   before : the tool that starts it, e.g. a sanitizer; minutes : the time limit."""

    name: str
    what: str
    ranks: int
    command: tuple[str, ...]
    minutes: int = 8
    before: tuple[str, ...] = ()

    @property
    def tests(self) -> bool:
        return self.command[0] == "-m"

    def argv(self, rehearse: bool) -> list[str]:
        command = [*self.command]
        if rehearse:
            command = [REHEARSE, *command] + ["--small"] * (not self.tests)
        return ["mpiexec", "-n", str(self.ranks), *self.before, sys.executable, "-m", "mpi4py", *command]


def measure(name: str, what: str, ranks: int = 1, minutes: int = 8, suffix: bool = True) -> Step:
    return Step(f"{name}-{ranks}" if suffix else name, what, ranks, (MEASURES, name), minutes)


def tests(ranks: int) -> Step:
    """Return the step that runs the tests for real GPUs."""
    argv = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--with-mpi", "-m", "gpu", "-rs")
    what = f"kernels, cuBLAS, every mover and algorithm on {ranks} rank{'s' * (ranks > 1)}"
    return Step(f"tests-{ranks}", what, ranks, (*argv, str(ROOT / "tests" / "device" / "test_gpu.py")))


STEPS = (
    measure("environment", "hardware, drivers, libraries, and a kernel", minutes=2, suffix=False),
    tests(1),
    measure("reach", "CUDA IPC between ranks that share a GPU", 2, 2),
    tests(2),
    measure("ratio", "products compared with plain cuBLAS, in five types"),
    tests(4),
    measure("ratio", "ranks that share a GPU, compared with plain cuBLAS", 4),
    measure("copies", "bandwidth of copies in all memory orders", minutes=4),
    measure("edges", "infinities, NaN, 16-bit sums at the edge", minutes=4),
    measure("correct", "every type and algorithm", minutes=6),
    measure("correct", "every type, algorithm and mover", 4),
    measure("ratio", "ranks that share a GPU, compared with plain cuBLAS", 2),
    measure("transfers", "seconds of transfers, by mover", 2, 4),
    measure("nccl", "NCCL with a communicator of one rank", minutes=2),
    measure("many", "a thousand small products: calls and leaks", minutes=4),
    measure("many", "a thousand small products: calls and leaks", 2, 6),
    measure("algorithms", "SUMMA, Cannon and 2.5D by each mover, compared with plain cuBLAS", 4),
    measure("large", "arrays above 2^31 elements"),
    measure("large", "matrices above 2^31 elements, in parts", 4),
    measure("traced", "timeline and overlap", 2, 4),
    measure("bandwidth", "copies from and to the host, elements computed and reduced", minutes=2),
    measure("aligned", "products of arrays with aligned and with unaligned rows", minutes=2),
    measure("integers", "products of int8 compared with cuBLAS's call", minutes=2),
    measure("factors", "Cholesky, LU and QR compared with CuPy's", minutes=4),
    measure("factors", "Cholesky, LU and QR of ranks that share a GPU", 4, 6),
    measure("calibrated", "calibration of the time model, and its predictions", minutes=6),
    measure("calibrated", "calibration with ranks that share a GPU", 2, 6),
    Step("sanitizer", "addresses, by compute-sanitizer", 1, (MEASURES, "edges", "--small", "--no-pool"), 8,
         (SANITIZER, "--tool", "memcheck", "--error-exitcode", "9")),
)  # fmt: skip


# the steps of one call, for a machine that is lent for minutes, and their seconds on an H200 (0: not timed yet)
CALLS: tuple[tuple[tuple[str, ...], int], ...] = (
    (("environment", "reach-2", "tests-1", "edges-1", "nccl-1"), 120),
    (("tests-2", "tests-4", "correct-4"), 210),
    (("ratio-1", "ratio-4"), 180),
    (("copies-1", "transfers-2", "many-1", "many-2", "traced-2", "algorithms-4"), 145),
    (("bandwidth-1", "aligned-1", "integers-1", "factors-1", "factors-4", "large-1", "large-4"), 0),
    (("calibrated-1", "calibrated-2", "correct-1", "ratio-2", "sanitizer"), 0),
)


def commands() -> str:
    """Return the commands that run all steps on a machine that is lent for minutes and loses its files after a call."""
    packages = "mpi4py msgspec pytest-mpi"
    platforms = " ".join(f"--platform {x}" for x in ("manylinux_2_28_x86_64", "manylinux2014_x86_64"))
    lines = ["# on a machine with a network; name the Python version of the machine with the GPU"]
    lines += [
        f"python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 {platforms} -d wheels {packages}"
    ]
    lines += [
        "# on the machine with the GPU, one call after the other; from the second call on, unpack first-hour.tgz before"
    ]
    options = "--wheels wheels --openmpi openmpi.tar.gz --out first-hour --archive first-hour.tgz"
    for steps, seconds in CALLS:
        time = f"{seconds} s on an H200" if seconds else "not timed yet"
        lines.append(f"scripts/gpu/gpu_first.sh {options} --steps {','.join(steps)}    # {time}")
    return "\n".join(lines)


def pack(archive: Path, out: Path) -> None:
    """Write the results, and the kernels that CuPy has compiled, to one archive."""
    kernels = Path(os.environ.get("CUPY_CACHE_DIR", ROOT / ".first-hour" / "cupy"))
    new = archive.with_suffix(".new")
    with tarfile.open(new, "w:gz") as file:
        for path in (out, kernels):
            if path.exists():
                file.add(path, path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name)
    new.replace(archive)


def run(step: Step, out: Path, rehearse: bool, seconds: float) -> dict[str, Any]:
    """Run a step within its time limit, and return its verdict."""
    verdict: dict[str, Any] = {"step": step.name, "what": step.what, "ranks": step.ranks, "findings": []}
    argv = step.argv(rehearse)
    if step.before and not shutil.which(step.before[0]):
        return verdict | {"verdict": NOT_RUN, "why": f"{step.before[0]} is not installed", "seconds": 0}
    text, start = out / f"{step.name}.txt", monotonic()
    with text.open("w") as file:
        print("$", shlex.join(argv), file=file, flush=True)
        process = subprocess.Popen(argv, stdout=file, stderr=subprocess.STDOUT, cwd=out, start_new_session=True)
        try:
            status: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            stop(process)
    verdict["seconds"] = round(monotonic() - start, 1)
    lines = text.read_text(errors="replace").splitlines()
    if status is None:
        return verdict | {"verdict": FAILED, "why": f"not finished after {seconds:.0f} seconds: {last_words(lines)}"}
    if step.tests:
        return verdict | judged_tests(status, lines)
    return verdict | judged(status, lines)


def stop(process: subprocess.Popen[Any]) -> None:
    """End mpiexec and its ranks, also ranks that are stuck in a driver."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
            process.wait(10)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def judged(status: int, lines: Sequence[str]) -> dict[str, Any]:
    """Return the verdict of a measurement, from the findings in the last line of output that is a JSON list."""
    found: list[dict[str, Any]] = []
    for line in reversed(lines):
        if line.startswith("[{"):
            found = json.loads(line)
            break
    bad = [x["what"] for x in found if x["passed"] is False]
    if status:
        return {"verdict": FAILED, "why": f"exit status {status}: {last_words(lines)}", "findings": found}
    if not found:
        return {"verdict": FAILED, "why": "it printed no findings", "findings": found}
    return {"verdict": FAILED if bad else PASSED, "why": "; ".join(bad), "findings": found}


def judged_tests(status: int, lines: Sequence[str]) -> dict[str, Any]:
    """Return the verdict of tests, from pytest's last line.  If all tests are skipped, the step counts as not run."""
    counts: dict[str, int] = {}
    for line in lines:
        found = re.findall(r"(\d+) (passed|failed|skipped|errors?)\b", line)
        if found and re.search(r" in [\d.]+s", line):
            counts = {kind: int(number) for number, kind in found}
    told = ", ".join(f"{number} {kind}" for kind, number in counts.items()) or "no summary of pytest"
    finding = {"what": "tests", "expected": "all pass", "measured": told, "passed": None}
    right = not status and set(counts) <= {"passed", "skipped"} and "passed" in counts
    why = "" if right else f"exit status {status}: {told}; {last_words(lines)}"
    if not status and set(counts) == {"skipped"}:
        return {"verdict": NOT_RUN, "why": f"all skipped: {last_words(lines)}", "findings": [finding]}
    return {"verdict": PASSED if right else FAILED, "why": why, "findings": [finding | {"passed": right}]}


def last_words(lines: Sequence[str]) -> str:
    """Return the last line that names an error, or else the last line."""
    told = [x.strip() for x in lines if x.strip()]
    errors = [x for x in told if re.search(r"(Error|Exception|SKIPPED|FAILED)\b", x)]
    return (errors or told or ["nothing was printed"])[-1][:300]


def report(out: Path, verdicts: Sequence[dict[str, Any]], rehearse: bool) -> None:
    """Write the page and the JSON of all steps that have a verdict."""
    facts = {"date": f"{datetime.now():%Y-%m-%d}", "rehearsal": rehearse, "steps": [*verdicts]}
    save(out / "report.json", json.dumps(facts, indent=1) + "\n")
    title = "A rehearsal of the first hour, without a GPU" if rehearse else "The first hour on a GPU"
    page = [f"# {title}", "", f"{facts['date']}. The output of each step is in the file STEP.txt.", ""]
    page += ["| step | what | ranks | verdict | seconds | |", "|---|---|---|---|---|---|"]
    for x in verdicts:
        page.append(row(x["step"], x["what"], x["ranks"], x["verdict"], x["seconds"], x.get("why", "")))
    for x in verdicts:
        page += ["", f"## {x['step']}: {x['verdict']}", "", "| what | expected | measured | |", "|---|---|---|---|"]
        for y in x["findings"]:
            mark = {True: "passed", False: "**failed**", None: ""}[y["passed"]]
            page.append(row(y["what"], y["expected"], y["measured"], mark))
    save(out / "report.md", "\n".join(page) + "\n")


def row(*cells: object) -> str:
    return "| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |"


def save(path: Path, text: str) -> None:
    """Replace a file atomically: the machine may be taken away at any time."""
    new = path.with_suffix(path.suffix + ".new")
    new.write_text(text)
    new.replace(path)


@click.command()
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default="first-hour", show_default=True)
@click.option("--steps", "names", default="", help="Run only these steps, separated by commas; see --list.")
@click.option("--again", is_flag=True, help="Also run steps that have passed before.")
@click.option("--minutes", default=60.0, show_default=True, help="Start no step after this many minutes.")
@click.option("--rehearse", is_flag=True, help="Use a simulated CuPy and tiny sizes; speeds are not judged.")
@click.option("--archive", type=click.Path(path_type=Path, dir_okay=False), help="Pack all results into this file.")
@click.option("--list", "is_list", is_flag=True, help="List the steps.")
@click.option("--commands", "is_commands", is_flag=True, help="Print the commands for a machine lent for minutes.")
def main(
    out: Path,
    names: str,
    again: bool,
    minutes: float,
    rehearse: bool,
    archive: Path | None,
    is_list: bool,
    is_commands: bool,
) -> None:
    """Run the steps that have not passed yet, and write their findings."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the exit also ends the running step
    known = {step.name: step for step in STEPS}
    chosen = [x for x in names.split(",") if x] or [*known]
    if unknown := [x for x in chosen if x not in known]:
        raise click.UsageError(f"there is no step {', '.join(unknown)}; the steps are {', '.join(known)}")
    if is_list:
        for step in STEPS:
            click.echo(f"{step.name:14} {step.minutes} min  {step.ranks} ranks  {step.what}")
        return
    if is_commands:
        click.echo(commands())
        return
    out.mkdir(parents=True, exist_ok=True)
    out, begin = out.resolve(), monotonic()
    verdicts = {x: json.loads(path.read_text()) for x in known if (path := out / f"{x}.json").exists()}
    verdicts = {x: found for x, found in verdicts.items() if found["rehearsal"] == rehearse}
    for name in chosen:
        if verdicts.get(name, {}).get("verdict") == PASSED and not again:
            click.echo(f"{name}: passed before")
            continue
        if monotonic() - begin > 60 * minutes:
            click.echo(f"{name}: not begun after {minutes:g} minutes")
            continue
        seconds = 60.0 * known[name].minutes
        found = verdicts[name] = run(known[name], out, rehearse, seconds) | {"rehearsal": rehearse}
        save(out / f"{name}.json", json.dumps(found, indent=1) + "\n")
        report(out, [verdicts[x] for x in known if x in verdicts], rehearse)
        if archive:
            pack(archive, out)
        click.echo(f"{name}: {found['verdict']} in {found['seconds']} s" + f" ({found['why']})" * bool(found["why"]))
    click.echo(f"see {out / 'report.md'}")
    sys.exit(any(verdicts.get(x, {}).get("verdict") == FAILED for x in chosen))


if __name__ == "__main__":
    main()
