"""The layout of the tests: shared code is in helpers, file names differ, and folders are small."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[2]
PATHS = sorted(TESTS.rglob("*.py"))
MOST = 20  # tests of a folder


def test_no_test_is_imported() -> None:
    """No test imports a test module, not inside functions either."""
    tests = {path.stem for path in PATHS if path.name.startswith("test_")}
    assert len(tests) > 100
    lines = {path.name: re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE) for path in PATHS}
    assert {name: some for name, names in lines.items() if (some := {*names} & tests)} == {}


def test_names_of_test_modules_are_unique() -> None:
    """Names must differ, because all folders are on Python's path."""
    names = Counter(path.name for path in PATHS if path.name != "conftest.py")
    assert [name for name, number in names.items() if number > 1] == []


def test_helpers_hold_no_tests_and_other_folders_no_helpers() -> None:
    others = [path.name for path in PATHS if path.parent.name != "helpers" and not path.name.startswith("test_")]
    assert {*others} == {"conftest.py", "across_hosts.py"}  # across_hosts.py runs only on hosts of hosts.sh
    assert not any(path.name.startswith("test_") for path in PATHS if path.parent.name == "helpers")


def test_folders_are_small() -> None:
    folders = Counter(path.parent for path in PATHS if path.name.startswith("test_"))
    assert {path.name: number for path, number in folders.items() if number > MOST} == {}


def test_parallel_tests_are_marked_in_their_own_module() -> None:
    """Parallel runs do not import modules without the mark (tests/conftest.py): their tests would never run."""
    texts = {path.name: path.read_text() for path in PATHS if path.name.startswith("test_")}
    parallel = {
        name for name, text in texts.items() if re.search(r"^\s*def test_\w+\([^)]*\bcomm: ", text, re.MULTILINE)
    }
    assert len(parallel) > 60
    assert {name for name in parallel if "pytest.mark.mpi" not in texts[name]} == set()
