"""Import of the programs in docs/examples as modules."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


@functools.cache
def example(name: str) -> ModuleType:
    """Import an example as a module, so that tests can call its functions."""
    path = EXAMPLES / f"{name}.py"
    for package in ("sklearn", "matplotlib"):
        if package in path.read_text():
            pytest.importorskip(package)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # where Python looks for the modules of an example
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module
