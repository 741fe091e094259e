"""Run the blocks of a page like a reader who types them, in a folder with only links to the checkout."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from documented import Block, commands, same_output
from jobs import python
from tiers import everything

from pdgemm.support.launcher import outside_job

CHECKOUT = Path(__file__).parents[2]
STARTS_JOBS = ("scaling", "calibrate")  # commands that start jobs, or measure on an otherwise idle machine
LINKS = ("scripts", "slurm", "docs", "tests")
SECONDS = 90.0  # time limit of a block
# lines that are not always printed: progress of slow commands, and warnings of Open MPI's launcher
SOMETIMES = re.compile(r"^(?:[\w ]+: \d+% in .* left|\[warn\] Epoll .*)\n", re.MULTILINE)


class Reader:
    """The shell and the Python jobs that run the blocks of one page.

    jobs : Python jobs, one per number of ranks, started on demand and shared by all pages.
    """

    def __init__(self, folder: Path, jobs: Jobs) -> None:
        self.folder, self.notes = folder / "page", folder / "notes"
        self.notes.mkdir(parents=True)
        self.folder.mkdir()
        for name in LINKS:
            (self.folder / name).symlink_to(CHECKOUT / name)
        self._jobs, self._exports = jobs, False

    @property
    def current(self) -> Path:
        """The current folder: `cd` on a page changes it."""
        place = self.notes / "folder"
        return Path(place.read_text().strip()) if place.exists() else self.folder

    @property
    def written(self) -> set[str]:
        """The names of files and folders that the page has created in its first folder."""
        return {path.name for path in self.folder.iterdir()} - {*LINKS}

    def type(self, block: Block) -> None:
        """Run a block, and compare its output with the output that the page shows."""
        if "file" in block.marks:
            (self.current / block.marks["file"]).write_text(block.text)
        elif block.language == "python":
            printed = self._on_ranks(block.ranks, block=block.text)
            if block.text.startswith(">>>"):
                compare(block.text, printed[0])
            elif block.output is not None:
                compare(block.output, "".join(printed))
            else:
                assert not "".join(printed[1:]), f"only rank 0 should print, but another rank printed: {printed[-1]}"
        else:
            for command, shown in block.dialogue():
                words = _words_for_ranks(command)
                if words and not block.exit_code and not self._exports and not everything():
                    ranks, request = words
                    printed_by_all = SOMETIMES.sub("", "".join(self._on_ranks(ranks, **request)))
                else:
                    self._exports |= "export" in command  # then use shells: running ranks lack the variables
                    code, printed_by_all = self.shell(command)
                    assert code == block.exit_code, f"exit code {code} of: {command}\n{printed_by_all}"
                if shown is not None:
                    compare(shown, printed_by_all)

    def _on_ranks(self, ranks: int, **request: Any) -> list[str]:
        return self._jobs.of(ranks).run({"page": str(self.notes), "folder": str(self.current), **request})

    def shell(self, command: str) -> tuple[int, str]:
        """Run commands in the folder and environment of the previous block; exit code 1 if any of them fails."""
        state, place, script = (self.notes / name for name in ("environment", "folder", "commands"))
        script.write_text(command)
        lines = [
            f'[ ! -e {shlex.quote(str(place))} ] || cd "$(cat {shlex.quote(str(place))})"',
            f"[ ! -e {shlex.quote(str(state))} ] || . {shlex.quote(str(state))}",
            f"trap 'export -p >{shlex.quote(str(state))}; pwd >{shlex.quote(str(place))}; exit ${{failed:-0}}' EXIT",
            "trap 'failed=$?' ERR",
            f". {shlex.quote(str(script))}",
        ]
        with (self.notes / "printed").open("w+") as printed:
            process = subprocess.Popen(
                ["bash", "-c", "\n".join(lines)],
                cwd=self.folder,
                env=outside_job() | {"COLUMNS": "160"},
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                code = process.wait()
            printed.seek(0)
            return code, SOMETIMES.sub("", printed.read())


class Jobs:
    """Jobs whose ranks run the blocks of pages; one job per number of ranks."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._jobs, self._started = folder, dict[int, PythonJob](), 0

    def of(self, ranks: int) -> PythonJob:
        if ranks in self._jobs and self._jobs[ranks].ended:
            del self._jobs[ranks]
        if ranks not in self._jobs:
            self._started += 1
            self._jobs[ranks] = PythonJob(ranks, self._folder / f"job {self._started}")
        return self._jobs[ranks]

    def end(self) -> None:
        """End all jobs; check that each succeeds, except those that failed before."""
        for job in self._jobs.values():
            if not job.ended:
                job.end(True)


class PythonJob:
    """A job on several ranks that runs `typed_ranks.py`."""

    def __init__(self, ranks: int, notes: Path) -> None:
        self.ranks, self.notes, self.done = ranks, notes, 0
        notes.mkdir(parents=True)
        program = Path(__file__).with_name("typed_ranks.py")
        self._errors = (notes / "errors").open("w+")
        self._process = subprocess.Popen(
            python(ranks, "-m", "mpi4py", program, notes),
            cwd=notes,
            env=outside_job() | {"PYTHONPATH": ""},
            stdin=subprocess.DEVNULL,
            stdout=self._errors,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def run(self, request: dict[str, Any]) -> list[str]:
        """Send a request to the job; return the output of each rank."""
        number, self.done = self.done, self.done + 1
        unfinished = self.notes / "unfinished"
        unfinished.write_text(json.dumps(request))
        unfinished.rename(self.notes / f"{number}.json")
        answers = [self.notes / f"{number}.{rank}.out" for rank in range(self.ranks)]
        end = time.monotonic() + SECONDS
        while not all(answer.exists() for answer in answers):
            late = time.monotonic() > end
            if late or self.ended:
                self.end(False)
                self._errors.seek(0)
                what = f"unfinished after {SECONDS:.0f} s" if late else "the job has ended"
                raise AssertionError(f"{what}:\n{request}\n{self._errors.read()}")
            time.sleep(0.02)
        return [answer.read_text() for answer in answers]

    def end(self, well: bool) -> None:
        (self.notes / f"{self.done}.end").touch()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(20 if well else 0.1)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self._errors.seek(0)
        assert code == 0 or not well, f"the job of the page ended with {code}:\n{self._errors.read()}"


def _words_for_ranks(command: str) -> tuple[int, dict[str, list[str]]] | None:
    """Return ranks and request (`typed_ranks.py`) of a shell command that a running job can carry out, else None."""
    words = shlex.split(command, comments=True)
    if [*commands(command)] != [words] or set("$*`~") & set(command):
        return None
    ranks = 1
    if words[:2] == ["mpirun", "-n"]:
        ranks, words = int(words[2]), words[3:]
    if words[0] == "pdgemm" and words[1] not in STARTS_JOBS:
        return ranks, {"command": words[1:]}
    if words[:3] == ["python", "-m", "pdgemm"]:
        return ranks, {"script": words[3:]}
    if words[0] == "python" and ranks == 1:
        return ranks, {"script": words[1:]}
    return None


def compare(shown: str, printed: str) -> None:
    assert same_output(shown, printed), f"the page shows\n{shown}\nbut the output is\n{printed}"
