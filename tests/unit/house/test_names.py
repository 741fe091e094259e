"""Names of the package describe values, functions are short, and docstrings describe functions."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator

from house import trees

FORBIDDEN = {"asked", "found", "given", "made", "room", "told"}  # these names do not describe a value
# forbidden in first paragraphs of docstrings: verbs of travel for messages, and of place for memory
IDIOM = re.compile(r"\b(alone|lies?|lying|travels?|travelled|goes|comes)\b")
LONGEST = 60  # lines of a function without its docstring
SHORT = 12  # lines of a private function that needs no docstring
PLAIN = 8  # lines of a public function or property that needs no docstring
# modules of commands, of names of NumPy and of the array API, and of calibration: their public names need not be unique
DOORS = ("tools.cli.", "matrix.array_functions", "tools.calibrate", "array_api.", "tensors.numpy_modules.",
         *(f"tensors.indexing.tensor_{x}" for x in ("axes", "copies", "sorting")))  # fmt: skip
SHARED = {"choose", "dataset", "load", "load_all", "save", "save_all", "plan"}
Functions = ast.FunctionDef | ast.AsyncFunctionDef


def functions() -> Iterator[tuple[str, Functions]]:
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, Functions):
                yield module, node


def length(node: Functions) -> int:
    """Return the number of lines of a function without its docstring."""
    first = node.body[0]
    docstring = ast.get_docstring(node) is not None
    return node.end_lineno - node.lineno + 1 - docstring * (first.end_lineno - first.lineno + 1)  # type: ignore[operator]


def test_names_of_public_functions_are_unique() -> None:
    public = {
        (node.name, module)
        for module, tree in trees().items()
        for node in tree.body
        if isinstance(node, Functions) and not node.name.startswith("_") and not module.startswith(DOORS)
    }
    assert {name for name, number in Counter(name for name, _ in public).items() if number > 1} <= SHARED


def bound(node: ast.AST) -> str:
    """Return the name of the variable, argument, attribute or function that a node binds; "" if none."""
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.id if isinstance(node, ast.Name) else node.attr
    return node.arg if isinstance(node, ast.arg) else node.name if isinstance(node, Functions) else ""


def test_forbidden_names() -> None:
    names = [(module, node, bound(node)) for module, tree in trees().items() for node in ast.walk(tree)]
    assert [(module, node.lineno, x) for module, node, x in names if x.strip("_").lower() in FORBIDDEN] == []  # type: ignore[attr-defined]


def test_first_paragraphs_use_plain_words() -> None:
    texts = [
        (module, (ast.get_docstring(node) or "").partition("\n\n")[0])
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, Functions | ast.ClassDef | ast.Module)
    ]
    assert [(module, text) for module, text in texts if IDIOM.search(text)] == []


def test_functions_are_short() -> None:
    assert [f"{module}.{node.name}: {length(node)}" for module, node in functions() if length(node) > LONGEST] == []


def test_functions_have_docstrings() -> None:
    """Functions longer than SHORT (private) or PLAIN (public) lines have docstrings, their own or inherited."""
    scopes = [(module, scope) for module, tree in trees().items() for scope in (tree, *tree.body)]
    methods = {x.name for _, scope in scopes if isinstance(scope, ast.ClassDef) for x in scope.body if documented(x)}
    silent = [
        f"{module}.{node.name}"
        for module, scope in scopes
        if isinstance(scope, ast.Module | ast.ClassDef)
        for node in scope.body
        if isinstance(node, Functions) and not documented(node) and not node.name.startswith("__")
        if not (isinstance(scope, ast.ClassDef) and node.name in methods)
        if length(node) > (SHORT if (scope_name(scope) + node.name).startswith("_") else PLAIN)
    ]
    assert silent == []


def documented(node: ast.stmt) -> bool:
    return isinstance(node, Functions) and ast.get_docstring(node) is not None


def scope_name(scope: ast.Module | ast.ClassDef) -> str:
    return "_" if isinstance(scope, ast.ClassDef) and scope.name.startswith("_") else ""
