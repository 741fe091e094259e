"""pytest plugin: one report for tests that run on several MPI ranks.

    mpiexec -n 4 python -m pytest --with-mpi -m mpi tests

Every rank runs every test.  After each phase (setup, call, teardown) the ranks agree on the outcome: a test
passes only if it passes on all ranks, and the consequences (-x, the exit code) are the same on all ranks.
Only rank 0 reports; a failure is shown once, as on the lowest rank that failed.  A rank that has failed
while others hang in a collective prints its failure after GRACE seconds; at the test's timeout all ranks print
their stacks, and the job ends.  Without --with-mpi only the fixtures and the summary file remain, and mpi4py is
not imported.
"""

from __future__ import annotations

import array
import atexit
import faulthandler
import functools
import os
import random
import shutil
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Generator, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from _pytest._code.code import TerminalRepr  # the base class of failures in reports
from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import HypothesisException
from run_summary import Summary

CODES = ("passed", "skipped", "xfailed", "xpassed", "failed")
PASSED, SKIPPED, XFAILED, XPASSED, FAILED = range(5)
INTERRUPTED = -1
GRACE = 5.0  # seconds until a failed rank that waits for the others prints its failure
LIMIT = 600.0  # seconds until a wait counts as a hang, if no timeout is set


def abort_job() -> None:
    """Abort the job if this rank exits early, for example by an error in conftest.py: MPI_Finalize would hang."""
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI and MPI.Is_initialized() and not MPI.Is_finalized() and MPI.COMM_WORLD.size > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)


atexit.register(abort_job)


@pytest.hookimpl(trylast=True)  # after the reporter and other plugins are registered
def pytest_configure(config: pytest.Config) -> None:
    session = Session(config) if config.getoption("--with-mpi", default=False) else None
    if session is None:
        atexit.unregister(abort_job)
    path = os.environ.get("PDGEMM_TEST_SUMMARY")
    worker = hasattr(config, "workerinput")  # a worker of pytest-xdist: the controller adds up the counts
    if path and not worker and (session is None or session.rank == 0):
        config.pluginmanager.register(Summary(Path(path)), "test_summary")
    if session:
        config.pluginmanager.register(session, "mpi_session")


@pytest.fixture(scope="session")
def comm() -> Any:
    """MPI.COMM_WORLD."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture
def shared_tmp_path(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A new directory, the same on every rank; it is removed after the test."""
    session = request.config.pluginmanager.get_plugin("mpi_session")
    first = session is None or session.rank == 0
    path: Any = request.getfixturevalue("tmp_path") if first else None
    if session:
        path = session.fixture_comm.bcast(path)
    yield path
    if session:
        session.fixture_comm.Barrier()
    if first:
        shutil.rmtree(path, ignore_errors=True)


class RankRepr(TerminalRepr):
    """A failure, preceded by a line with the ranks on which it happened."""

    def __init__(self, head: str, inner: Any) -> None:
        self.head, self.inner = head, inner
        if hasattr(inner, "reprcrash"):
            self.reprcrash = inner.reprcrash  # for the short summary

    def toterminal(self, tw: Any) -> None:
        tw.line(self.head, bold=True)
        if hasattr(self.inner, "toterminal"):
            self.inner.toterminal(tw)
        else:
            tw.line(str(self.inner))


def on_ranks(ranks: list[int]) -> str:
    return f"on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


class Session:
    """The plugin of a run under MPI."""

    def __init__(self, config: pytest.Config) -> None:
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        launched = os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE") or world.size
        if int(launched) != world.size:
            raise pytest.UsageError(f"{launched} ranks, mpi4py sees {world.size}: mpiexec of another MPI?")
        self.library = MPI.Get_library_version().split(",")[0].strip()
        self.config = config
        self.rank, self.size = world.rank, world.size
        # In a test pytest captures file descriptor 2; here it is not captured yet.
        self.stderr = os.fdopen(os.dup(2), "w", errors="backslashreplace")
        self.item: pytest.Item | None = None
        self.limit = self.default_limit = float(getattr(config, "_env_timeout", None) or LIMIT)
        self.deadline: float | None = time.monotonic() + self.limit
        self.waiting: str | None = "start"  # the place where this rank waits for the others
        self.news: str | None = None  # the failure that is printed if other ranks do not reach this place
        self.requests: list[Any] = []
        self.broken: list[tuple[str, str]] = []  # failures of the collection on this rank
        self.interrupted = False
        self.stop = threading.Event()
        self.watchdog = threading.Thread(target=self.watch, daemon=True)
        self.watchdog.start()
        self.comm, self.fixture_comm = world.Dup(), world.Dup()  # these messages never match those of tests
        self.waiting = self.deadline = None
        if self.rank:
            config.pluginmanager.unregister(name="terminalreporter")
        for plugin in config.pluginmanager.get_plugins():
            if type(plugin).__name__ == "MPIPlugin":
                plugin._is_testing_mpi = False  # no page of library details at the end
        use_same_examples()

    def pytest_report_header(self) -> str:
        return f"mpi: {self.size} ranks, {self.library}"

    def say(self, text: str) -> None:
        self.stderr.write(f"\n[rank {self.rank} of {self.size}] {text}\n")
        self.stderr.flush()

    # ---- agreeing ----

    def agree(self, point: str, code: int, news: str | None = None) -> list[int]:
        """Return every rank's code, once all ranks have reached this point."""
        mine = array.array("q", [zlib.crc32(point.encode()), code])
        gathered = array.array("q", bytes(16 * self.size))
        start = time.monotonic()
        self.waiting, self.news = point, news
        own_deadline = self.deadline is None  # outside of tests, or without a timeout
        if own_deadline:
            self.limit, self.deadline = self.default_limit, start + self.default_limit
        # keep the buffer alive: after Ctrl-C in this wait, MPI may still write into it
        self.requests.append(request := self.comm.Iallgather(mine, gathered))
        while not request.Test():
            waited = time.monotonic() - start
            if waited < 0.002:
                os.sched_yield()  # usually all ranks arrive together: do not sleep
            else:
                time.sleep(min(waited / 10, 0.02))
            if self.news and waited > min(GRACE, self.limit / 2):
                self.say(f"{point}: still waiting for other ranks, after\n{self.news}")
                self.news = None
        self.requests.clear()
        self.waiting = self.news = None
        if own_deadline:
            self.deadline = None
        points, codes = gathered[0::2], list(gathered[1::2])
        if INTERRUPTED in codes:
            if code != INTERRUPTED:
                self.interrupted = True
                raise KeyboardInterrupt(f"on rank {codes.index(INTERRUPTED)}")
        elif len(set(points)) > 1:
            places = [f"\n  rank {r}: {place}" for r, place in enumerate(self.comm.allgather(point))]
            self.abort("the ranks are at different points" + "".join(places))
        return codes

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, Any, pytest.TestReport]:
        report = yield
        code = CODES.index(report.outcome)
        if hasattr(report, "wasxfail"):
            code = {PASSED: XPASSED, SKIPPED: XFAILED}.get(code, code)
        news = report.longreprtext if code == FAILED else CODES[code] if code in (SKIPPED, XFAILED) else None
        codes = self.agree(f"{item.nodeid} ({call.when})", code, news)
        if codes.count(code) == self.size and code != FAILED:
            return report
        ranks = {c: [r for r in range(self.size) if codes[r] == c] for c in sorted(set(codes))}
        if FAILED not in ranks:
            told = "; ".join(f"{CODES[c]} {on_ranks(rs)}" for c, rs in ranks.items())
            report.outcome, report.longrepr = "failed", f"the outcome differs: {told} of {self.size}"
            vars(report).pop("wasxfail", None)
            return report
        bad, hook, data = ranks[FAILED], self.config.hook, None
        if self.rank == bad[0]:
            data = hook.pytest_report_to_serializable(config=self.config, report=report)
        data = self.comm.bcast(data, root=bad[0])
        report = hook.pytest_report_from_serializable(config=self.config, data=data)
        if self.size > 1:
            where = f"{on_ranks(bad)} of {self.size}" if len(bad) < self.size else f"on all {self.size} ranks"
            shown = f"; this is rank {bad[0]}" if len(bad) > 1 else ""
            report.longrepr = RankRepr(f"failed {where}{shown}", report.longrepr)
        return report

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        random.seed(item.nodeid)  # the same on all ranks: `example()` of hypothesis draws from it
        handle = getattr(getattr(item, "obj", None), "hypothesis", None)
        if handle and not hasattr(handle.inner_test, "in_step"):
            handle.inner_test = self.in_step(handle.inner_test)

    def in_step(self, test: Callable[..., None]) -> Callable[..., None]:
        """Let each example of a hypothesis test fail on all ranks or on none: all ranks shrink the same example."""

        @functools.wraps(test)
        def example(*args: Any, **kwargs: Any) -> None:
            news = None
            try:
                test(*args, **kwargs)
            except HypothesisException:
                raise  # such as assume(): the same on all ranks
            except Exception:
                news = traceback.format_exc()
            assert self.item
            codes = self.agree(f"{self.item.nodeid} (example)", FAILED if news else PASSED, news)
            if FAILED in codes:  # hypothesis compares failures by type and line: raise the same on all ranks
                raise AssertionError(self.comm.bcast(news, root=codes.index(FAILED)))

        example.in_step = True  # type: ignore[attr-defined]
        return example

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.broken.append((f"an error in {report.nodeid}", report.longreprtext))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        mine = [place for place, _ in self.broken] + [item.nodeid for item in session.items]
        codes = self.agree("end of collection", zlib.crc32("\n".join(mine).encode()))
        if len(set(codes)) == 1:
            return
        everyone = self.comm.allgather((mine, self.broken))
        r = next(r for r in range(self.size) if codes[r] != codes[0])
        pairs = enumerate(zip_longest(everyone[0][0], everyone[r][0], fillvalue="nothing"))
        n, (a, b) = next((n, pair) for n, pair in pairs if pair[0] != pair[1])
        text = f"the ranks collected different tests: number {n} is {a} on rank 0, {b} on rank {r}"
        for rank in (0, r):
            text += "".join(f"\n[rank {rank}] {place}\n{trace}" for place, trace in everyone[rank][1])
        self.abort(text)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        if not self.interrupted:
            self.agree("interrupt", INTERRUPTED, repr(excinfo.value))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        session.exitstatus = max(self.agree("end of session", int(exitstatus)))

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        # wait until rank 0 has printed its report: mpiexec ends the job as soon as one rank exits with an error
        sys.stdout.flush()
        self.agree("exit", 0)
        self.stop.set()
        self.watchdog.join()
        atexit.unregister(abort_job)

    # ---- hangs, and errors outside the tests ----

    @pytest.hookimpl(optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool:
        """Replace pytest-timeout's timer by one that prints stacks with their rank, and in one piece."""
        self.limit, self.deadline = settings.timeout, time.monotonic() + settings.timeout
        # faulthandler runs even if native code holds the interpreter's lock; the watchdog does not
        faulthandler.dump_traceback_later(settings.timeout + 1.5, exit=True, file=self.stderr)
        return True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.item = item
        try:
            return (yield)
        finally:
            self.item = self.deadline = None
            faulthandler.cancel_dump_traceback_later()

    def watch(self) -> None:
        while not self.stop.wait(0.2):
            if self.deadline is not None and time.monotonic() > self.deadline:
                self.expire()

    def expire(self) -> None:
        """End the job (in the watchdog's thread, while the main thread hangs)."""
        try:
            faulthandler.cancel_dump_traceback_later()
            text = f"timeout of {self.limit:g} s in {self.item.nodeid if self.item else self.waiting}"
            news = f", after\n{self.news}" if self.news else ""
            state = f"{self.waiting}: waiting for other ranks{news}" if self.waiting else self.stacks()
            self.say(f"{text}\n{state}")
            time.sleep(1)
            if self.rank == 0:
                self.last_words(f"{text}, see above")
            time.sleep(1.5)  # until other ranks have printed, too: the first exit ends the job
        except BaseException:
            traceback.print_exc(file=self.stderr)
        finally:
            self.stderr.flush()
            os._exit(1)

    def stacks(self) -> str:
        """Return the stacks of all threads but this one, from the test's frame on."""
        names = {t.ident: t.name for t in threading.enumerate()}
        text = ""
        for ident, frame in sys._current_frames().items():
            if ident != threading.get_ident():
                frames = traceback.extract_stack(frame)
                own = {"_pytest", "pluggy", "hypothesis"}
                pytests = [n for n, f in enumerate(frames) if own & {*Path(f.filename).parts}]
                inner = frames[pytests[-1] + 1 :] if pytests else frames
                text += f"{names.get(ident, ident)}:\n{''.join(traceback.format_list(inner or frames))}"
        return text

    def last_words(self, text: str) -> None:
        """Report the current test as failed with this text, and print the summary of all failures so far."""
        get = self.config.pluginmanager.get_plugin
        if capture := get("capturemanager"):
            capture.suspend_global_capture(in_=True)
        if self.item:
            report = pytest.TestReport(self.item.nodeid, self.item.location, {}, "failed", text, "call")
            self.config.hook.pytest_runtest_logreport(report=report)
        if summary := get("test_summary"):
            summary.write(at_least_failed=1)
        if reporter := get("terminalreporter"):
            reporter.ensure_newline()
            for part in ("summary_errors", "summary_failures", "short_test_summary", "summary_stats", "flush"):
                getattr(reporter, part)()

    def abort(self, text: str) -> None:
        """On all ranks: rank 0 prints the reason and ends the job."""
        if self.rank:
            time.sleep(10)
        sys.stdout.flush()
        self.say(text)
        self.comm.Abort(1)

    @pytest.hookimpl(tryfirst=True)
    def pytest_internalerror(self, excrepr: Any) -> None:
        self.say(f"error outside the tests\n{excrepr}")
        self.comm.Abort(1)


def use_same_examples() -> None:
    """Let hypothesis draw the same examples on every rank, independent of the clock and of earlier runs."""
    # without settings that depend on the clock, or on the lines that this rank executes
    off: Any = {"suppress_health_check": [HealthCheck.too_slow], "phases": [x for x in Phase if x is not Phase.explain]}
    settings.register_profile("mpi", derandomize=True, deadline=None, database=None, print_blob=False, **off)
    settings.load_profile("mpi")
