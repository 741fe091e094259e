"""The lines of progress of a running command."""

from __future__ import annotations

import pytest

from pdgemm.tools.cli import session


@pytest.mark.parametrize(
    ("what", "unit", "rates"),
    [("read A", "B/s", ["21.3 MiB/s", "21.3 MiB/s"]), ("multiply", "FLOP/s", ["22 MFLOP/s", "22 MFLOP/s"])],
)
def test_progress_lines(
    what: str, unit: str, rates: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter((0.0, 1.0, 6.0, 7.0, 12.0, 20.0))
    monkeypatch.setattr(session, "perf_counter", lambda: next(clock))
    told = session.ProgressLines(what, 2**29, unit)
    for done in (1, 2, 3, 4, 8):
        told(done, 8)
    first, second = rates
    assert capsys.readouterr().err.splitlines() == [
        f"{what}: 25% in 6.0 s, {first}, 18 s left", f"{what}: 50% in 12 s, {second}, 12 s left"
    ]  # fmt: skip
