"""pytest plugin: how much of the suite a run covers.

    --all     everything: every combination of parameters, more examples, drawn anew every time, and tests marked
              `thorough`; without it, parameters in pairs, and fewer examples, the same ones every time
    --tiers   on N ranks, only the tests meant for N ranks; without it, all selected tests

A parallel test runs on 2 ranks, one per core.  Tests that distribute panels over rows and columns are marked
`square_grid`: they run on 2 x 2 ranks.  Tests that depend on the shape of the process grid are marked `every_grid`, and
tests for other numbers of ranks, for example, `on_ranks(1, 3)`.  On 1 rank, without messages,
tests/ranks/test_one_rank.py calls each public function.  On 6 ranks, which share 2 cores, half of the parameters of
each test that also runs on 4 ranks are skipped.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

USUAL, GRIDS = (2,), (1, 2, 3, 4, 6)
WIDER = {USUAL: (2, 4), GRIDS: (*GRIDS, 8, 9)}  # with --all
every_grid = pytest.mark.on_ranks(*GRIDS)
square_grid = pytest.mark.on_ranks(4)  # 2 x 2 ranks
thorough = pytest.mark.thorough

_everything = False


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("how much of the suite is run")
    group.addoption("--all", action="store_true", help="every combination of parameters, and all drawn examples")
    group.addoption("--tiers", action="store_true", help="only the tests that are meant for this number of ranks")


@pytest.hookimpl(tryfirst=True)  # before test modules are imported, and before mpi_report derives its profile
def pytest_configure(config: pytest.Config) -> None:
    global _everything
    _everything = config.getoption("--all")
    config.addinivalue_line("markers", "on_ranks(*numbers): the numbers of ranks on which --tiers runs a test")
    config.addinivalue_line("markers", "thorough: a test, or parameters, only with --all")
    # no deadline: hypothesis would stop an arbitrary rank of a slow example
    # derandomize: each run of a commit draws the same examples, except with --all
    settings.register_profile("pdgemm", deadline=None, max_examples=examples(100), derandomize=not _everything)
    settings.load_profile("pdgemm")


def everything() -> bool:
    """Return whether the tests run with --all."""
    return _everything


def examples(number: int) -> int:
    """Return `number` with --all, and a third of it without: how many examples hypothesis draws."""
    return number if _everything else -(-number // 3)


def pairs(*factors: Iterable[Any]) -> Sequence[tuple[Any, ...]]:
    """Return the product of the factors with --all; otherwise rows that contain every pair of values of two factors.

    Each row is the one with the most new pairs (Cohen et al., The AETG system, IEEE Trans. Software Eng. 23(7), 1997).
    """
    sides = [tuple(x) for x in factors]
    if _everything or len(sides) < 3:
        return list(itertools.product(*sides))
    chosen = _covering(tuple(map(len, sides)))
    return [tuple(side[at] for side, at in zip(sides, row)) for row in chosen]


def in_turn(one: Iterable[Any], other: Sequence[Any], start: int = 0) -> Sequence[tuple[Any, Any]]:
    """Return the product of two factors with --all; otherwise pair each value of `one` with the next of `other`."""
    if _everything:
        return list(itertools.product(one, other))
    return list(zip(one, itertools.cycle([*other[start % len(other) :], *other[: start % len(other)]])))


@functools.cache
def _covering(sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    rows = list(itertools.product(*map(range, sizes)))
    met = [frozenset(itertools.combinations(enumerate(row), 2)) for row in rows]
    left, chosen = set[Any]().union(*met), list[tuple[int, ...]]()
    most = [(-len(x), number) for number, x in enumerate(met)]  # a heap of rows by (minus) their number of new pairs
    while left:
        _, number = heapq.heappop(most)
        new = (-len(met[number] & left), number)
        if most and new > most[0]:
            heapq.heappush(most, new)
        else:
            left -= met[number]
            chosen.append(rows[number])
    return tuple(chosen)


def ranks_of(item: pytest.Item) -> tuple[int, ...]:
    """Return the numbers of ranks on which `scripts/test.sh` runs a parallel test."""
    mark = item.get_closest_marker("on_ranks")
    numbers = tuple(mark.args) if mark else USUAL
    return WIDER.get(numbers, numbers) if _everything else numbers


def third(rows: Sequence[Any]) -> Sequence[Any]:
    """Return all rows with --all, otherwise every third: for many tests of less than a second each."""
    return rows if _everything else rows[::3]


def _every_second(items: Sequence[pytest.Item]) -> Iterable[pytest.Item]:
    """Yield every second parameter set of each test that runs on 4 ranks, too, with all parameter sets."""
    seen = Counter[tuple[Any, ...]]()
    for item in items:
        test = item.parent, getattr(item, "originalname", item.name)
        seen[test] += 1
        if seen[test] % 2 == 0 and 4 in ranks_of(item):
            yield item


def named_ranks(text: str) -> set[int]:
    """Return the numbers of ranks on which tests of a module may run, by the marks in its text."""
    named = {
        *USUAL,
        *(GRIDS if "every_grid" in text else ()),
        *((4,) if re.search("square_grid|ON_RANKS", text) else ()),
    }
    return named | {int(x) for numbers in re.findall(r"on_ranks\(([^)]*)\)", text) for x in re.findall(r"\d+", numbers)}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip modules without a test for this number of ranks, because importing a module takes each rank a while."""
    if _everything or not config.getoption("--tiers") or not collection_path.match("test_*.py"):
        return None
    from mpi4py import MPI

    return True if MPI.COMM_WORLD.size not in named_ranks(collection_path.read_text()) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = set[pytest.Item]()
    if not _everything:
        left_out = {item for item in items if item.get_closest_marker("thorough")}
    if config.getoption("--tiers"):
        from mpi4py import MPI

        parallel = [item for item in items if item.get_closest_marker("mpi")]
        left_out |= {item for item in parallel if MPI.COMM_WORLD.size not in ranks_of(item)}
        if MPI.COMM_WORLD.size > 4 and not _everything:
            left_out |= {*_every_second([item for item in items if item not in left_out])}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]
