"""Write the result of a run of tests to a file that scripts read."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


class Summary:
    """Writes {"passed", "failed", "skipped", "seconds", "ran", "left_out"} to a file at the end of a run.

    ran, left_out : names of the tests that passed or failed, and of those that were skipped or failed as expected.
    broken, excepted : names of the tests that failed, and of those that failed as expected.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.start = path, time.monotonic()
        self.worst: dict[str, int] = {}
        self.excepted: list[str] = []
        path.unlink(missing_ok=True)  # a file of an earlier run

    def pytest_runtest_logreport(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.when == "call" or not report.passed:
            badness = ("passed", "skipped", "failed").index(report.outcome)
            self.worst[report.nodeid] = max(badness, self.worst.get(report.nodeid, 0))
            if report.skipped and hasattr(report, "wasxfail"):
                self.excepted.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:  # a module that is skipped or cannot be imported
            self.pytest_runtest_logreport(report)

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # after all other hooks, which may still change the exit status
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        yield
        if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            self.write(at_least_failed=int(session.exitstatus))

    def write(self, at_least_failed: int) -> None:
        passed, skipped, failed = (list(self.worst.values()).count(k) for k in range(3))
        told = {
            "passed": passed, "failed": max(failed, at_least_failed), "skipped": skipped,
            "seconds": round(time.monotonic() - self.start, 2),
            "ran": [x for x, k in self.worst.items() if k != 1],
            "left_out": [x for x, k in self.worst.items() if k == 1],
            "broken": [x for x, k in self.worst.items() if k == 2],
            "excepted": self.excepted,
        }  # fmt: skip
        self.path.write_text(json.dumps(told))
