"""The code of docs/contributing-first.md: its algorithm works, and its tests detect the bugs that the page names."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from documented import program

from pdgemm.planning.algorithm_registry import ALGORITHMS
from pdgemm.planning.planner import best_plan

PAGE = Path(__file__).parents[3] / "docs/contributing-first.md"
BUGS = {  # of the section "Break it once": (code, replacement)
    "what is sent is not counted": ("recorder.traffic.sent(int(words[rank]), line.size - 1)", "pass"),
    "inner + 1 in rounds()": ("j, high * inner,", "j, high * (inner + 1),"),
    "B is gathered in the wrong order": ("grid.col, call.B,", "grid.col, call.B[::-1],"),
    "beta is 0": ("first = beta if product.sums_in_c else 0", "first = 0"),
    "nothing is stored": ('store(call.C, sums if k else None, Combine(1, beta, paired(room["update"])))', "pass"),
}

pytestmark = pytest.mark.mpi


@contextmanager
def page(bug: tuple[str, str] = ("", "")) -> Iterator[ModuleType]:
    """Yield the code of the page, with a bug, as a module; its algorithm is registered in the block only."""
    source, module = program(PAGE), ModuleType("gathered")
    assert source.count(bug[0]) == 1 or not bug[0]
    sys.modules["gathered"] = module
    best_plan.cache_clear()
    try:
        exec(compile(source.replace(*bug) if bug[0] else source, PAGE, "exec"), vars(module))
        yield module
    finally:
        ALGORITHMS.pop("gathered", None)
        best_plan.cache_clear()
        del sys.modules["gathered"]


def run(test: Any, comm: Any) -> None:
    """Run a test of the page with all of its parameters."""
    marks = [mark for mark in test.pytestmark if mark.name == "parametrize"]
    for values in itertools.product(*(mark.args[1] for mark in marks)):
        test(comm, **dict(zip((mark.args[0] for mark in marks), values)))


def test_the_page_runs(comm: Any) -> None:
    with page() as module:
        tests = [value for name, value in vars(module).items() if name.startswith("test_")]
        assert len(tests) == 3
        for test in tests:
            run(test, comm)


@pytest.mark.on_ranks(4)
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_seen(comm: Any, bug: str) -> None:
    """A test of the page fails on all ranks at once, so that no rank waits for the others."""
    with page(BUGS[bug]) as module, pytest.raises(AssertionError):
        run(module.test_where_all_lies_well, comm)
