"""A contender as a process of its own, which sleeps while others multiply."""

from __future__ import annotations

import os
import queue
import re
import shlex
import subprocess
import tempfile
import threading
from contextlib import suppress
from typing import IO

LIMIT = 600.0  # seconds; the first product of a shape stands for many
PATIENCE = 10.0  # seconds to end in
FAULT = re.compile(r"^(\w+\.)*\w*(Error|Exception)\b")  # the line of a traceback that tells most


class Unable(Exception):
    """A contender did not multiply, and says why."""


class Job:
    """The command may name {m}, {n}, {k} and is then started anew for each shape; else it takes all of them.

    It reads a line "m n k" for each product, and answers with a line of its seconds and what may be noted, or of "-"
    and why it cannot.  Lines that start otherwise are passed over.  It ends at an empty line.
    """

    def __init__(self, command: str, **values: object) -> None:
        self.command, self.values = command, values
        self.running = ""
        self.process: subprocess.Popen[str] | None = None
        self.lines: queue.Queue[str] = queue.Queue()
        self.errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def multiply(self, m: int, n: int, k: int) -> tuple[float, str]:
        """Seconds and note of one product.  Raises Unable."""
        command = self.command.format(m=m, n=n, k=k, **self.values)
        if self.process is None or self.running != command:
            self.start(command)
        assert self.process is not None and self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: what it said last tells why
            self.process.stdin.write(f"{m} {n} {k}\n")
            self.process.stdin.flush()
        while True:
            try:
                line = self.lines.get(timeout=LIMIT)
            except queue.Empty:
                self.end(stuck=True)
                raise Unable(f"no answer within {LIMIT:.0f} s") from None
            if not line:
                raise Unable(self.fault())
            word, _, note = line.strip().partition(" ")
            if word == "-":
                raise Unable(note)
            try:
                return float(word), note
            except ValueError:
                continue

    def start(self, command: str) -> None:
        self.end()
        self.running, self.lines = command, queue.Queue()
        self.errors.seek(0)
        self.errors.truncate()
        try:
            self.process = subprocess.Popen(
                shlex.split(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        except OSError as failed:
            raise Unable(str(failed)) from None
        threading.Thread(target=listen, args=(self.process.stdout, self.lines), daemon=True).start()

    def fault(self) -> str:
        """Why it ended without an answer."""
        self.end()
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors if any(map(str.isalnum, line))] or ["it ended without an answer"]
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
