"""A contender as a separate process, which sleeps while others work."""

from __future__ import annotations

import ctypes
import os
import queue
import re
import shlex
import subprocess
import tempfile
import threading
from contextlib import suppress
from importlib import import_module
from typing import IO

from threadpoolctl import LibController

from pdgemm.local.blas.processors import behind, generation, libraries, of_mkl, spellings

LIMIT = 600.0  # seconds for an answer; the first one may include many products, one for each layout
PATIENCE = 10.0  # seconds in which a job must end
OPENBLAS = re.compile(r"^Core: (\w+)", re.MULTILINE)  # printed when OpenBLAS is loaded, with OPENBLAS_VERBOSE=2
MKL = re.compile(r"^MKL_VERBOSE .*? for (.*), Lnx")
BLAS = ("OMP", "OPENBLAS", "GOTO", "MKL", "BLIS")  # the prefixes of ..._NUM_THREADS
FAULT = re.compile(r"^(\w+\.)*\w*(Error|Exception)\b")  # the line of a traceback with the exception


def blas_of_numpy() -> LibController | None:
    """Return NumPy's BLAS in this process, or None if threadpoolctl does not know it."""
    return behind(ctypes.CDLL(import_module("numpy._core._multiarray_umath").__file__), libraries())


class Unable(Exception):
    """A contender did not multiply; the text is the reason."""


class Job:
    """A command that multiplies on request.  If it contains {m}, {n} or {k}, it is started again for each shape.

    It reads a line "m n k" for each product, and prints a line: the seconds and an optional note, or "-" and the
    reason why it cannot multiply.  A line "kernel NAME" before the first answer names the kernel of its BLAS, which
    OpenBLAS and MKL can also print themselves.  Other lines are ignored.  It ends at an empty line.

    wanted : NumPy's kernel, which OpenBLAS is told to use; if it uses another one, it is told to use the nearest one.
    """

    def __init__(self, command: str, wanted: str, **values: object) -> None:
        self.command, self.wanted, self.values = command, wanted, values
        self.coretypes = spellings(wanted)
        self.running = ""
        self.said: str | None = None
        self.process: subprocess.Popen[str] | None = None
        self.lines: queue.Queue[str] = queue.Queue()
        self.errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def multiply(self, m: int, n: int, k: int) -> tuple[float, str]:
        """Return the seconds and the note of one product.  Raises Unable."""
        return self.ask(f"{m} {n} {k}", m=m, n=n, k=k)

    def ask(self, line: str, **extents: int) -> tuple[float, str]:
        """Return the seconds and the note with which the job answers a line.  Raises Unable."""
        answer = self._answer(line, **extents)
        while self.unlike and self.kernel and self.coretypes[1:]:
            del self.coretypes[0]
            self.end()
            answer = self._answer(line, **extents)
        return answer

    @property
    def kernel(self) -> str:
        """The kernel of the job's BLAS; "" as long as it is not known."""
        text = os.pread(self.errors.fileno(), 1 << 20, 0).decode(errors="replace")  # pread moves no file position
        return ", ".join(dict.fromkeys(OPENBLAS.findall(text))) if self.said is None else self.said

    @property
    def nearest(self) -> str:
        """The kernel that OpenBLAS was told to use instead of NumPy's, as a note; "" if there is none."""
        tried = self.coretypes[:1] != spellings(self.wanted)[:1]
        return f"OPENBLAS_CORETYPE={self.coretypes[0]} for {self.wanted}" if tried else ""

    @property
    def unlike(self) -> str:
        """The generations of the job's kernel and of NumPy's, if times cannot be compared; "" if they are the same."""
        ours, numpys = generation(self.kernel) or "not known", generation(self.wanted) or "not known"
        return "" if self.kernel and ours == numpys else f"{ours}, NumPy {numpys}"

    def _answer(self, line: str, **extents: int) -> tuple[float, str]:
        command = self.command.format(**extents, **self.values)
        if self.process is None or self.running != command:
            self.start(command)
        assert self.process is not None and self.process.stdin is not None
        with suppress(BrokenPipeError):  # the job has ended: its last output has the reason
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()
        while True:
            try:
                said = self.lines.get(timeout=LIMIT)
            except queue.Empty:
                self.end(stuck=True)
                raise Unable(f"no answer within {LIMIT:.0f} s") from None
            if not said:
                raise Unable(self.fault())
            word, _, note = said.strip().partition(" ")
            if word == "-":
                raise Unable(note)
            if word == "kernel":
                self.said = of_mkl(note) if note.startswith("Intel") else note
            if found := MKL.match(said):
                self.said = of_mkl(found[1])
            try:
                return float(word), note
            except ValueError:
                continue

    def start(self, command: str) -> None:
        self.end()
        self.running, self.said, self.lines = command, None, queue.Queue()
        self.errors.seek(0)
        self.errors.truncate()
        try:
            self.process = subprocess.Popen(
                shlex.split(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                text=True,
                env=self.environment(),
            )
        except OSError as failed:
            raise Unable(str(failed)) from None
        threading.Thread(target=listen, args=(self.process.stdout, self.lines), daemon=True).start()

    def environment(self) -> dict[str, str]:
        """Return the environment: one thread for each process, whichever its BLAS, and the kernel of NumPy."""
        chosen = {"OPENBLAS_CORETYPE": self.coretypes[0]} if self.coretypes else {}
        return os.environ | {f"{name}_NUM_THREADS": "1" for name in BLAS} | chosen | {"OPENBLAS_VERBOSE": "2"}

    def fault(self) -> str:
        """Return the reason why the job ended without an answer, from its errors."""
        self.end()
        self.errors.seek(0)
        said = [line.strip() for line in self.errors if not line.startswith(("Core: ", "Core not found: "))]
        lines = [line for line in said if any(map(str.isalnum, line))] or ["it ended without an answer"]
        return next((line for line in lines if FAULT.match(line)), lines[-1])

    def end(self, stuck: bool = False) -> None:
        if self.process is None:
            return
        process, self.process = self.process, None
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.write("\n")  # launchers do not pass on the end of their input
            process.stdin.close()
        for patience, insist in ((PATIENCE * (not stuck), process.terminate), (PATIENCE, process.kill)):
            try:
                process.wait(patience)
                return
            except subprocess.TimeoutExpired:
                insist()  # terminate before kill, so that a launcher can end its ranks
        process.wait()


def listen(stream: IO[str], lines: queue.Queue[str]) -> None:
    """Put each line of a stream into a queue, and "" at its end."""
    for line in stream:
        lines.put(line)
    lines.put("")
