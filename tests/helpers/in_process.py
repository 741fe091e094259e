"""Commands of pdgemm on one rank, in the process of the tests: to start Python and MPI takes a second each time."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

from pdgemm.tools.cli.commands import run_command
from pdgemm.tools.cli.job import UNEXPECTED, Job


def run(words: list[str], cwd: Path | None) -> subprocess.CompletedProcess[str]:
    """`pdgemm WORDS`, finished, as its process would end: exit code, output and errors."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with chdir(cwd or Path.cwd()), redirect_stdout(out), redirect_stderr(err), _as_a_process(words):
        try:
            code = run_command(Job(words), "--debug" in words)
        except Exception:
            traceback.print_exc()
            code = UNEXPECTED
    texts = (file.buffer.getvalue().decode() for file in (out, err))  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(words, code, *texts)


@contextmanager
def _as_a_process(words: list[str]) -> Iterator[None]:
    """Warnings go to standard error, each once; signals stay those of the tests."""

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
