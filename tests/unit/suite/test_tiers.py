"""The tests that run by default (tiers.py) include every parallel test and every pair of parameter values."""

from __future__ import annotations

import ast
import itertools
import re
import runpy
from pathlib import Path

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
    assert [*tiers.pairs(*sides)] == whole and [*tiers.pairs([1, 2], [], [3])] == []


def test_fewer_examples_are_drawn_unless_all_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for everything, drawn in ((False, (1, 34, 75)), (True, (1, 100, 225))):
        monkeypatch.setattr(tiers, "_everything", everything)
        assert tuple(map(tiers.examples, (1, 100, 225))) == drawn


def test_each_parallel_test_belongs_on_some_number_of_ranks() -> None:
    """The marks of each parallel test name numbers of ranks on which scripts/test.sh runs it."""
    grids, least, number = ", ".join(map(str, tiers.GRIDS)), re.compile(r"mpi\(min_size=(\d+)\)"), 0
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        body = ast.parse(path.read_text()).body
        module = " ".join(ast.unparse(x) for x in body if ast.unparse(x).startswith("pytestmark"))
        for test in (x for x in body if isinstance(x, ast.FunctionDef) and x.name.startswith("test_")):
            own = " ".join(map(ast.unparse, test.decorator_list))
            marks = [x.replace("every_grid", f"on_ranks({grids})") for x in (own, module)]
            marks = [x.replace("square_grid", "on_ranks(4)") for x in marks]
            if not any("pytest.mark.mpi" in x for x in marks):
                continue
            number += 1
            named = next((y for x in marks if (y := re.findall(r"on_ranks\(([\d, ]+)\)", x))), ["2"])
            ranks = {int(rank) for text in named for rank in text.split(",")}
            most = next((int(y[0]) for x in marks if (y := least.findall(x))), 1)
            assert ranks <= {*tiers.GRIDS} and max(ranks) >= most, (path.name, test.name)
    assert number > 300


def test_the_suite_runs_on_the_ranks_of_the_tiers() -> None:
    text = (ROOT / "scripts" / "test.sh").read_text()
    assert f"ranks='{' '.join(map(str, tiers.GRIDS))}'" in text


def test_planted_bugs_apply(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All bugs of scripts/hardening/mutants.py apply to the present code."""
    monkeypatch.setattr("sys.argv", ["mutants.py", "--check"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "scripts" / "hardening" / "mutants.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert not end.value.code and re.fullmatch(r"\d+ bugs apply\n", said), said
