"""The programs of docs/examples as modules."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


@functools.cache
def example(name: str) -> ModuleType:
    """Return an example as a module, of which tests call the functions."""
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
