"""Small parts of the command line: streams that are closed, and settings that are proposed."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from pdgemm.tools.cli import session
from pdgemm.tools.profiling import environment


@pytest.mark.parametrize("err", [False, True])
def test_a_closed_stream_does_not_close_the_other(monkeypatch: pytest.MonkeyPatch, err: bool) -> None:
    def closed(*args: Any, **options: Any) -> None:
        raise BrokenPipeError

    before = sys.stdout, sys.stderr
    for name, stream in zip(("stdout", "stderr"), before):
        monkeypatch.setattr(sys, name, stream)  # and put back
    monkeypatch.setattr(session, "echo", closed)
    session.say_line("a line", err=err)
    after = sys.stdout, sys.stderr
    assert [x is y for x, y in zip(before, after)] == [err, not err]
    after[err].close()


def test_only_settings_that_are_not_set_are_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [x for x in environment.os.environ if x.startswith("OMPI_MCA_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(environment.Path, "exists", lambda path: False)  # no InfiniBand
    (every,) = environment._tcp("Open MPI 5")
    names = [x.partition("=")[0] for x in every.split(" export ")[1].split()]
    monkeypatch.setenv(names[0], "mine")
    (rest,) = environment._tcp("Open MPI 5")
    assert names[0] not in rest and all(name in rest for name in names[1:])
    for name in names:
        monkeypatch.setenv(name, "mine")
    assert environment._tcp("Open MPI 5") == []
