"""Which tests concern what changed: for `scripts/test.sh --changed`.

    python scripts/hardening/concerned.py [BASE]     prints files of tests, one a line; what chose them, on stderr

Changed is what differs from the commit where this branch left BASE (main), files that git does not know yet included.
A module's tests are those that import it by its full name, bear its name, or catch the bugs that mutants.py
plants in it; where there are none, those of the modules that import it, and so on upwards.  Of any other file, they are
those that name it.  Most of the package uses most of what stands below it, so these are the nearest tests and not all
that could fail.  Exit codes: 0, or 2 where BASE is no commit.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests" / "helpers")]

from house import MODULES, inside  # noqa: E402
from mutants import MUTANTS  # noqa: E402

HOUSE = "tests/unit/house/test_imports.py"  # the floors, of any module


@cache
def sources() -> dict[str, str]:
    """The text of each file of tests, and of each helper."""
    return {x.relative_to(ROOT).as_posix(): x.read_text() for x in sorted((ROOT / "tests").rglob("*.py"))}


@cache
def imports(path: str) -> frozenset[str]:
    """All that a file of tests imports: modules, and names in them."""
    found = set[str]()
    for node in ast.walk(ast.parse(sources()[path])):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{x.name}" for x in node.names)}
        elif isinstance(node, ast.Import):
            found |= {x.name for x in node.names}
    return frozenset(found)


def tests(paths: set[str]) -> set[str]:
    """Those of the files that are tests, and the tests that import the others, which are helpers."""
    found = {x for x in paths if Path(x).name.startswith("test_")}
    helpers = {Path(x).stem for x in paths - found if x.startswith("tests/helpers/")}
    using = {x for x in sources() if imports(x) & helpers} - paths
    return found | (tests(using) if using else set())


def own_tests(module: str) -> set[str]:
    """The tests that import a module, bear its name, or catch bugs that are planted in it."""
    caught = {word for x in MUTANTS if x.module == module for line in x.tests for word in line.split()[1:]}
    known = {x for x in sources() if Path(x).name.startswith("test_")}
    imported = {x for x in known if f"pdgemm.{module}" in imports(x)}
    return imported | {x for x in known if x in caught or Path(x).stem == f"test_{module.rpartition('.')[2]}"}


def nearest(module: str) -> set[str]:
    """The tests of a module; where it has none, those of the modules that import it."""
    seen, level = set[str](), {module}
    while level:
        if found := set[str]().union(*map(own_tests, level)):
            return found
        seen |= level
        level = {x for x in MODULES if inside(x) & level} - seen
    folders = module.split(".")  # of a command, say, which is loaded by its name
    return {x for x in sources() for folder in folders if f"/{folder}/test_" in x}


@cache
def module_of(path: str) -> str:
    """The module that a file holds; "" where it is none of the package."""
    return next((name for name, file in MODULES.items() if file.resolve() == (ROOT / path).resolve()), "")


def concerned(path: str) -> set[str]:
    """The tests that concern a file."""
    if module := module_of(path):
        return nearest(module) | {HOUSE}
    if path in sources():
        return tests({path})
    named = re.compile(rf"(?<![\w-]){re.escape(Path(path).name)}\b")
    return {x for x, text in sources().items() if Path(x).name.startswith("test_") and named.search(text)}


def changed(base: str) -> list[str]:
    """The files that differ from the commit where this branch left `base`."""

    def git(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"concerned.py: {done.stderr.strip()}", file=sys.stderr)
            sys.exit(2)
        return done.stdout.split("\0" if "-z" in words else None)

    (left,) = git("merge-base", base, "HEAD")
    differ = git("diff", "-z", "--name-only", "--no-renames", left)
    return sorted({*differ, *git("ls-files", "-z", "--others", "--exclude-standard")} - {""})


def main(base: str = "main") -> None:
    chosen = set[str]()
    for path in changed(base):
        found = concerned(path)
        chosen |= found
        print(f"{path}: {', '.join(sorted(found)) or 'no test names it'}", file=sys.stderr)
    print(*sorted(x for x in chosen if (ROOT / x).exists()), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
