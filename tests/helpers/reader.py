"""A reader who types what a page shows, from top to bottom, in a folder that has only links to the checkout."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from documented import Block, same_output
from jobs import python

from pdgemm.support.launcher import outside_job

CHECKOUT = Path(__file__).parents[2]
LINKS = ("scripts", "slurm", "docs", "tests")
SECONDS = 90.0  # of one block
# what is said only where something takes long: progress, and the event library of Open MPI's launcher
SOMETIMES = re.compile(r"^(?:[\w ]+: \d+% in .* left|\[warn\] Epoll .*)\n", re.MULTILINE)


class Reader:
    """The shell and the Python jobs of one page."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.notes = folder / "page", folder / "notes"
        self.notes.mkdir(parents=True)
        self.folder.mkdir()
        for name in LINKS:
            (self.folder / name).symlink_to(CHECKOUT / name)
        self._jobs: dict[int, PythonJob] = {}

    @property
    def current(self) -> Path:
        """The folder in which the reader is: a page may begin with `cd`."""
        place = self.notes / "folder"
        return Path(place.read_text().strip()) if place.exists() else self.folder

    @property
    def written(self) -> set[str]:
        """The names that the page has left in the folder in which it was begun."""
        return {path.name for path in self.folder.iterdir()} - {*LINKS}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for job in self._jobs.values():
            job.end(kind is None)

    def type(self, block: Block) -> None:
        """Do what a block says, and compare what it prints with what the page shows."""
        if "file" in block.marks:
            (self.current / block.marks["file"]).write_text(block.text)
        elif block.language == "python":
            if block.ranks not in self._jobs:
                self._jobs[block.ranks] = PythonJob(block.ranks, self.current, self.notes / f"{block.ranks} ranks")
            printed = self._jobs[block.ranks].run(block.text)
            if block.text.startswith(">>>"):
                compare(block.text, printed[0])
            elif block.output is not None:
                compare(block.output, "".join(printed))
            else:
                assert not "".join(printed[1:]), f"all ranks print what one should: {printed[-1]}"
        else:
            for command, shown in block.dialogue():
                code, printed = self.shell(command)
                assert code == block.exit_code, f"exit code {code} of: {command}\n{printed}"
                if shown is not None:
                    compare(shown, printed)

    def shell(self, command: str) -> tuple[int, str]:
        """Run commands in the folder and the environment that those before left; 1 if any of them fails."""
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


class PythonJob:
    """A job whose ranks run the Python blocks of a page as they come."""

    def __init__(self, ranks: int, cwd: Path, notes: Path) -> None:
        self.ranks, self.notes, self.done = ranks, notes, 0
        notes.mkdir()
        program = Path(__file__).with_name("typed_ranks.py")
        self._errors = (notes / "errors").open("w+")
        self._process = subprocess.Popen(
            python(ranks, "-m", "mpi4py", program, notes),
            cwd=cwd,
            env=outside_job() | {"PYTHONPATH": ""},
            stdin=subprocess.DEVNULL,
            stdout=self._errors,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def run(self, source: str) -> list[str]:
        """Return what each rank prints."""
        number, self.done = self.done, self.done + 1
        unfinished = self.notes / "unfinished"
        unfinished.write_text(source)
        unfinished.rename(self.notes / f"{number}.py")
        answers = [self.notes / f"{number}.{rank}.out" for rank in range(self.ranks)]
        end = time.monotonic() + SECONDS
        while not all(answer.exists() for answer in answers):
            late = time.monotonic() > end
            if late or self._process.poll() is not None:
                self.end(False)
                self._errors.seek(0)
                what = f"unfinished after {SECONDS:.0f} s" if late else "the job has ended"
                raise AssertionError(f"{what}:\n{source}\n{self._errors.read()}")
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


def compare(shown: str, printed: str) -> None:
    assert same_output(shown, printed), f"the page shows\n{shown}\nand what is printed is\n{printed}"
