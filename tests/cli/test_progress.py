"""What is shown while a command is at work: a bar in a terminal, and lines where the output is a pipe."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from pdgemm.tools.cli import session


@pytest.mark.parametrize(
    ("what", "unit", "rates"),
    [("read A", "B/s", ["21.3 MiB/s", "21.3 MiB/s"]), ("multiply", "FLOP/s", ["22 MFLOP/s", "22 MFLOP/s"])],
)
def test_lines_tell_how_much_is_done(
    what: str, unit: str, rates: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter((0.0, 1.0, 6.0, 6.0, 7.0, 12.0, 12.0, 20.0))
    monkeypatch.setattr(session, "perf_counter", lambda: next(clock))
    told = session.ProgressLines(what, 2**29, unit)
    for done in (1, 2, 3, 4, 8):
        told(done, 8)
    first, second = rates
    assert capsys.readouterr().err.splitlines() == [
        f"{what}: 25% in 6.0 s, {first}, 18 s left", f"{what}: 50% in 12 s, {second}, 12 s left"
    ]  # fmt: skip


def test_a_bar_ends_before_the_result_is_printed(tmp_path: Path) -> None:
    """In a terminal: what is left on the screen when the bar is gone is the line of the result."""
    command = [sys.executable, "-m", "pdgemm", "generate", f"{tmp_path}/a.h5:/x", "--shape", "30x20"]
    ours, theirs = pty.openpty()
    done = subprocess.run(
        command, stdout=theirs, stderr=theirs, check=False, timeout=60, env={**os.environ, "TERM": "xterm"}
    )
    os.close(theirs)
    screen = b""
    while chunk := _read(ours):
        screen += chunk
    assert done.returncode == 0, screen
    last = screen.decode().replace("\r\n", "\n").rstrip("\n").rsplit("\n", 1)[-1]
    assert last.split("\x1b[2K")[-1].lstrip("\r").startswith("wrote "), last
    assert "100%" not in last.split("\x1b[2K")[-1]


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # the other end is closed
        return b""
