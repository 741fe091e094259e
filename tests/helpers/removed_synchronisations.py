"""Disable synchronisations of a device's streams, one place in the code at a time."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_device import SCHEDULES

from pdgemm.devices.streams import DeviceRecorder
from pdgemm.transport.panels.task import Task

REMOVED: dict[str, Any] = {  # by synchronisation of a `DeviceRecorder`: what is called instead if it is disabled
    "synchronize_copies": lambda recorder: None,
    "record_copies": lambda recorder: (),
    "record_products": lambda recorder, poll: (),
    "hold_products": lambda recorder: None,
    "order_copies_after_products": lambda recorder: None,
    "copied": lambda recorder: _Done(),
    "finish": lambda recorder: recorder._spans.clear(),
    "begin": lambda recorder: None,
}
OF_PANELS: dict[str, Any] = {"copied": lambda task: None, "finish_products": lambda task: None}  # the same for a `Task`
Site = str  # name of the synchronisation, file, function, and line in the function
Run = tuple[str, str]  # problem and schedule


class _Done:
    def Test(self) -> bool:
        return True

    def Wait(self) -> None:
        pass


@contextmanager
def without(removed: Site | None, seen: set[Site]) -> Iterator[None]:
    """Disable one synchronisation, `removed`; add the sites of all that are called to `seen`."""

    def planted(name: str, kept: Any, nothing: Any) -> Any:
        def method(recorder: Any, *args: Any) -> Any:
            caller = sys._getframe(1)
            code = caller.f_code
            site = f"{name} {Path(code.co_filename).name} {code.co_qualname} {caller.f_lineno - code.co_firstlineno}"
            seen.add(site)
            return nothing(recorder, *args) if site == removed else kept(recorder, *args)

        return method

    with pytest.MonkeyPatch.context() as patch:
        for of, methods in ((DeviceRecorder, REMOVED), (Task, OF_PANELS)):
            for name, nothing in methods.items():
                patch.setattr(of, name, planted(name, getattr(of, name), nothing))
        yield


class Search:
    """The sites of synchronisations that some problems call, and for each site runs that fail without it.

    By default only the problems of the file `stored`, runs by site from an earlier search; with `every`, all problems.
    """

    stored: Path

    def __init__(self, comm: Any, names: Iterable[str], every: bool) -> None:
        self.comm = comm
        last = {} if every else json.loads(self.stored.read_text())
        self.last = {site: [(name, schedule) for name, schedule in runs] for site, runs in last.items()}
        runs = {run for runs in self.last.values() for run in runs}
        self.needed_by: dict[Site, list[str]] = {}  # by site: problems that call it
        for name in names:
            seen, schedules = set[Site](), [x for x in SCHEDULES if every or (name, x) in runs]
            with without(None, seen):
                for schedule in schedules:
                    assert self.outcome(name, schedule) == (False, False), f"{name}, {schedule}"
            for site in sorted({self.place(x, name) for x in set().union(*comm.allgather(seen))} - {""}):
                self.needed_by.setdefault(site, []).append(name)

    def outcome(self, name: str, schedule: str) -> tuple[bool, bool]:
        """Run a problem; return whether a race was reported, and whether the result was wrong."""
        raise NotImplementedError

    def place(self, site: Site, name: str) -> str:
        """Return the name under which a site is searched for in a problem; "" if it is not."""
        return site

    def enough(self, site: Site, told: bool, wrong: bool) -> bool:
        return told and wrong

    def shown(self, site: Site, first: Iterable[Run]) -> list[Run]:
        """Return runs that have a race, or a wrong result, without the synchronisation.   first : runs to try first."""
        others = itertools.product(self.needed_by[site], SCHEDULES)
        told = wrong = False
        runs = list[Run]()
        for name, schedule in dict.fromkeys([*(x for x in first if x[0] in self.needed_by[site]), *others]):
            with without(site.split(" of ")[0], set()):
                race, error = self.outcome(name, schedule)
            if (race and not told) or (error and not wrong):
                runs.append((name, schedule))
            told, wrong = told or race, wrong or error
            if self.enough(site, told, wrong):
                return runs
        raise AssertionError(f"{site} is not missed" if not told else f"{site} changes no result")

    def check(self) -> None:
        for site in sorted(self.needed_by):
            self.shown(site, self.last.get(site, []))

    def store(self) -> None:
        """Store few runs that cover all sites; sites with few problems are searched first."""
        found: dict[Site, list[Run]] = {}
        for site in sorted(self.needed_by, key=lambda site: len(self.needed_by[site])):
            found[site] = self.shown(site, sorted({run for runs in found.values() for run in runs}))
        if self.comm.rank == 0:
            lines = (f"{json.dumps(site)}: {json.dumps(found[site])}" for site in sorted(found))
            self.stored.write_text("{\n" + ",\n".join(lines) + "\n}\n")
