"""Choose the tests that concern changed files: for `scripts/test.sh --changed`.

    python scripts/hardening/concerned.py [BASE]     prints test files, one a line; on stderr, the reason for each

Changed files are those that differ from the commit where this branch left BASE (main), and untracked files.
For a module, at most FEW test files are chosen: files that import the module or one of its importers, and use its
names.  Files that import the module itself rank first, then files that use its names most.  If fewer than ON_RANKS of
the chosen files run on several ranks, more such files are added: those that use the names of the importers most.  For
any other file, the test files that name it are chosen.  Other tests could fail, too: most modules are used by most of
the package.
Exit codes: 0, or 2 if BASE is not a commit.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "tests" / "helpers")]

from house import MODULES, ROOT, trees  # noqa: E402

HOUSE = "tests/unit/house/test_imports.py"  # the rules of imports concern every module
DEFINITION = ast.FunctionDef | ast.ClassDef
FEW, ON_RANKS = 10, 4  # a minute or two


@cache
def sources() -> dict[str, str]:
    """Return the text of each test file, and of each helper."""
    return {x.relative_to(ROOT).as_posix(): x.read_text() for x in sorted((ROOT / "tests").rglob("*.py"))}


@cache
def helpers_of(path: str) -> frozenset[str]:
    """Return the helpers that a test file imports."""
    names = set[str]()
    for node in ast.walk(ast.parse(sources()[path])):
        if isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
        elif isinstance(node, ast.Import):
            names |= {x.name for x in node.names}
    return frozenset(x for name in names if (x := f"tests/helpers/{name}.py") in sources())


def tests(paths: set[str]) -> set[str]:
    """Return the test files among `paths`, and the test files that import the others, which are helpers."""
    chosen = {x for x in paths if Path(x).name.startswith("test_")}
    using = {x for x in sources() if helpers_of(x) & (paths - chosen)} - paths
    return chosen | (tests(using) if using else set())


@cache
def exported(package: str) -> dict[str, str]:
    """Return {exported name: module that defines it} of a package; "" is pdgemm itself."""
    tree = trees()[package] if package else ast.parse((ROOT / "pdgemm" / "__init__.py").read_text())
    return {
        alias.asname or alias.name: module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        for module in (f"{node.module}.{alias.name}".removeprefix("pdgemm."), str(node.module).removeprefix("pdgemm."))
        if module in MODULES
    }


def _module(name: str) -> str:
    """Return the module of the package that defines a dotted name, or ""."""
    name = name.removeprefix("pdgemm").removeprefix(".")
    if name in MODULES:
        return name
    package, _, last = name.rpartition(".")
    if package in MODULES and MODULES[package].name != "__init__.py":
        return package
    return exported(package).get(last, package) if package in MODULES or not package else ""


def modules_imported(tree: ast.Module) -> frozenset[str]:
    """Return the modules of the package that a file imports, or names in strings as the registry of commands does."""
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "pdgemm":
            names |= {_module(f"{node.module}.{x.name}") for x in node.names}
        elif isinstance(node, ast.Import):
            names |= {_module(x.name) for x in node.names if x.name.split(".")[0] == "pdgemm"}
        elif isinstance(node, ast.Constant) and str(node.value).startswith("pdgemm."):
            names |= {str(node.value).removeprefix("pdgemm.").partition(":")[0]} & MODULES.keys()
    return frozenset(names - {""})


@cache
def importers(module: str) -> frozenset[str]:
    """Return the modules that import a module."""
    return frozenset(x for x, others in _graph().items() if module in others and x != module)


@cache
def _graph() -> dict[str, frozenset[str]]:
    return {x: modules_imported(tree) for x, tree in trees().items()}


@cache
def modules_of(path: str) -> frozenset[str]:
    """Return the modules of the package that a test file imports, itself or by its helpers."""
    return frozenset[str]().union(*(modules_imported(ast.parse(sources()[x])) for x in {path, *helpers_of(path)}))


@cache
def names_of(module: str) -> frozenset[str]:
    """Return the last name of a module, and the functions and classes that it defines."""
    return frozenset({module.rpartition(".")[2], *(x.name for x in trees()[module].body if isinstance(x, DEFINITION))})


@cache
def words(path: str) -> Counter[str]:
    """Return how often each word occurs in a test file."""
    return Counter(re.findall(r"\w+", sources()[path]))


def nearest(module: str) -> set[str]:
    """Return the test files that concern a module, by the rules for modules above."""
    levels = [{module}]  # the module, its importers, the importers of these, ...
    while level := set[str]().union(*map(importers, levels[-1])) - set[str]().union(*levels):
        levels.append(level)
    names = [frozenset[str]().union(*map(names_of, x)) for x in levels]
    uses = {
        test: [sum(words(test)[x] for x in level) for level in names]
        for test in sorted(tests({*sources()}))
        if not modules_of(test).isdisjoint(set[str]().union(*levels))
    }
    order = sorted(uses, key=lambda x: (uses[x][0] > 0, module in modules_of(x), uses[x]), reverse=True)
    using = [x for x in order if uses[x][0]]
    return {*using[:FEW], *[x for x in order if "mark.mpi" in sources()[x]][:ON_RANKS]}


@cache
def module_of(path: str) -> str:
    """Return the module in a file, or "" if the file is not part of the package."""
    return next((name for name, file in MODULES.items() if file.resolve() == (ROOT / path).resolve()), "")


def concerned(path: str) -> set[str]:
    """Return the test files that concern a file."""
    if module := module_of(path):
        return nearest(module) | {HOUSE}
    if path in sources():
        return tests({path})
    named = re.compile(rf"(?<![\w-]){re.escape(Path(path).name)}\b")
    return {x for x, text in sources().items() if Path(x).name.startswith("test_") and named.search(text)}


def changed(base: str) -> list[str]:
    """Return the files that differ from the commit where this branch left `base`."""

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
