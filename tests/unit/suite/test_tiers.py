"""How much of the suite is run by default (tiers.py): no test is left out everywhere, no pair of parameters either."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import jobs
import pytest
import tiers

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("sizes", [(2, 3), (2, 3, 4), (5, 2, 2, 3), (1, 4, 1, 3, 2, 2)], ids=str)
def test_any_two_values_meet(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    sides = [range(size) for size in sizes]
    whole = [*itertools.product(*sides)]
    monkeypatch.setattr(tiers, "_everything", False)
    rows = tiers.pairs(*sides)
    assert len({*rows}) == len(rows) and {*rows} <= {*whole}
    for one, two in itertools.combinations(range(len(sides)), 2):
        assert {(row[one], row[two]) for row in rows} == {*itertools.product(sides[one], sides[two])}
    assert len(sides) == 2 or len(rows) < len(whole)
    monkeypatch.setattr(tiers, "_everything", True)
    assert [*tiers.pairs(*sides)] == whole


def test_no_values_make_no_rows() -> None:
    assert [*tiers.pairs([1, 2], [], [3])] == []


def test_fewer_examples_are_drawn_unless_all_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for everything, drawn in ((False, (1, 34, 75)), (True, (1, 100, 225))):
        monkeypatch.setattr(tiers, "_everything", everything)
        assert tuple(map(tiers.examples, (1, 100, 225))) == drawn


NOWHERE = """
import sys, pytest
class Look:
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        from tiers import GRIDS, ranks_of
        parallel = [(item, mark) for item in items if (mark := item.get_closest_marker("mpi"))]
        least = {item.nodeid: mark.kwargs.get("min_size", 1) for item, mark in parallel}
        ranks = {item.nodeid: {*ranks_of(item)} & {*GRIDS} for item, _ in parallel}
        print("parallel tests:", len(parallel))
        print("nowhere:", [name for name in least if max(ranks[name], default=0) < least[name]])
        print("elsewhere:", [item.nodeid for item, _ in parallel if not {*ranks_of(item)} <= {*GRIDS}])
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *sys.argv[1:]], plugins=[Look()]))
"""


def test_each_parallel_test_belongs_on_some_number_of_ranks() -> None:
    done = jobs.run(jobs.python(0, "-c", NOWHERE, ROOT / "tests"), cwd=ROOT, PDGEMM_TEST_SUMMARY="")
    assert done.returncode == 0, done.stdout + done.stderr
    found: Any = dict(re.findall(r"^(parallel tests|nowhere|elsewhere): (.*)$", done.stdout, re.MULTILINE))
    assert int(found["parallel tests"]) > 300
    assert (found["nowhere"], found["elsewhere"]) == ("[]", "[]")


def test_the_suite_runs_on_the_ranks_of_the_tiers() -> None:
    text = (ROOT / "scripts" / "test.sh").read_text()
    assert f"ranks='{' '.join(map(str, tiers.GRIDS))}'" in text


def test_planted_bugs_apply() -> None:
    """Code that moves takes the bugs of scripts/hardening/mutants.py along."""
    done = jobs.run(jobs.python(0, ROOT / "scripts" / "hardening" / "mutants.py", "--check"))
    assert done.returncode == 0 and re.fullmatch(r"\d+ bugs apply\n", done.stdout), done.stdout
