"""Syntax trees of the package's modules, and their imports."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _modules() -> dict[str, Path]:
    package = ROOT / "pdgemm"
    paths = [
        *package.rglob("*.py"),
        *(package / "grids").glob("*.py"),
        *(package / "io").glob("**/*.py"),
    ]  # grids and io are links, which rglob does not follow
    return {
        ".".join(path.relative_to(package).with_suffix("").parts).removesuffix(".__init__"): path
        for path in paths
        if path != package / "__init__.py"
    }


MODULES = _modules()


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of each module; parsing all takes a second, which no other test should wait for."""
    return {module: ast.parse(path.read_text()) for module, path in MODULES.items()}


def imported(module: str) -> set[str]:
    """Return all imports of a module: at its top, inside functions, and under TYPE_CHECKING."""
    found = set()
    for node in ast.walk(trees()[module]):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def inside(module: str) -> set[str]:
    """Return the modules of this package that a module imports."""
    own = {name.removeprefix("pdgemm.") for name in imported(module) if name.startswith("pdgemm.")}
    return own & MODULES.keys() - {module}
