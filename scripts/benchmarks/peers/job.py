"""A contender as a process of its own, which sleeps while others work."""

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

LIMIT = 600.0  # seconds; the first product of a shape stands for many
PATIENCE = 10.0  # seconds to end in
OPENBLAS = re.compile(r"^Core: (\w+)", re.MULTILINE)  # as it is loaded, with OPENBLAS_VERBOSE=2
MKL = re.compile(r"^MKL_VERBOSE .*? for (.*), Lnx")
BLAS = ("OMP", "OPENBLAS", "GOTO", "MKL", "BLIS")  # whose number of threads may be set
FAULT = re.compile(r"^(\w+\.)*\w*(Error|Exception)\b")  # the line of a traceback that tells most


def blas_of_numpy() -> LibController | None:
    """In this process; None where threadpoolctl does not know it."""
    return behind(ctypes.CDLL(import_module("numpy._core._multiarray_umath").__file__), libraries())


class Unable(Exception):
    """A contender did not multiply, and says why."""


class Job:
    """The command may name {m}, {n}, {k} and is then started anew for each shape; else it takes all of them.

    It reads a line "m n k" for each product, and answers with a line of its seconds and what may be noted, or of "-"
    and why it cannot.  A line "kernel NAME" before says what its BLAS uses, which OpenBLAS and MKL can also say
    themselves.  Lines that start otherwise are passed over.  It ends at an empty line.

    wanted : NumPy's kernel.  Its OpenBLAS is told to use this one, or if it turns out that it did not, the nearest one.
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
        """What its BLAS uses; "" as long as that is not known."""
        text = os.pread(self.errors.fileno(), 1 << 20, 0).decode(errors="replace")  # it goes on writing where it was
        return ", ".join(dict.fromkeys(OPENBLAS.findall(text))) if self.said is None else self.said

    @property
    def nearest(self) -> str:
        """What its OpenBLAS was told to use in the place of NumPy's kernel, if so."""
        tried = self.coretypes[:1] != spellings(self.wanted)[:1]
        return f"OPENBLAS_CORETYPE={self.coretypes[0]} for {self.wanted}" if tried else ""

    @property
    def unlike(self) -> str:
        """Why its times are not to be held against NumPy's; "" where both multiply for processors of one generation."""
        ours, numpys = generation(self.kernel) or "not known", generation(self.wanted) or "not known"
        return "" if self.kernel and ours == numpys else f"{ours}, NumPy {numpys}"

    def _answer(self, line: str, **extents: int) -> tuple[float, str]:
        command = self.command.format(**extents, **self.values)
        if self.process is None or self.running != command:
            self.start(command)
        assert self.process is not None and self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: what it said last tells why
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
        """One thread for each process whatever its BLAS is, and the kernel that NumPy has chosen."""
        chosen = {"OPENBLAS_CORETYPE": self.coretypes[0]} if self.coretypes else {}
        return os.environ | {f"{name}_NUM_THREADS": "1" for name in BLAS} | chosen | {"OPENBLAS_VERBOSE": "2"}

    def fault(self) -> str:
        """Why it ended without an answer."""
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
                insist()  # first so that a launcher can end its ranks
        process.wait()


def listen(stream: IO[str], lines: queue.Queue[str]) -> None:
    """All lines as they come, and "" at the end."""
    for line in stream:
        lines.put(line)
    lines.put("")
