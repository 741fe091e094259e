"""Run commands of pdgemm in the current process, which saves a second for each start of Python and MPI."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

from pdgemm.tools.cli.commands import run_command
from pdgemm.tools.cli.job import UNEXPECTED, Job


def run(words: Sequence[str], cwd: Path | None) -> subprocess.CompletedProcess[str]:
    """Run `pdgemm WORDS` on one rank; return exit code, output and errors like those of a process."""
    out, err = _file(), _file()
    with chdir(cwd or Path.cwd()), redirect_stdout(out), redirect_stderr(err):
        code = call(words)
    return subprocess.CompletedProcess(words, code, _text(out), _text(err))


@contextmanager
def one_output() -> Iterator[Callable[[], str]]:
    """Collect standard output and standard error in one text; yield a function that returns it."""
    both = _file()
    with redirect_stdout(both), redirect_stderr(both):
        yield lambda: _text(both)


def call(words: Sequence[str]) -> int:
    """Run `pdgemm WORDS` on all ranks of this job; return its exit code."""
    with _as_a_process(words):
        try:
            return run_command(Job(words), "--debug" in words)
        except Exception:
            traceback.print_exc()
            return UNEXPECTED


def _file() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)


def _text(file: io.TextIOWrapper) -> str:
    return file.buffer.getvalue().decode()  # type: ignore[attr-defined, no-any-return]


@contextmanager
def _as_a_process(words: Sequence[str]) -> Iterator[None]:
    """Set sys.argv, print warnings on standard error, and keep the signal handlers of the tests."""

    def show(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))

    handler = signal.getsignal(signal.SIGINT)
    with (
        warnings.catch_warnings(),
        mock.patch("sys.argv", ["pdgemm", *words]),
        mock.patch("pdgemm.support.signals.watch"),
    ):
        warnings.simplefilter("default")
        warnings.showwarning = show
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, handler)
