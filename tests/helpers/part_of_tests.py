"""pytest plugin: run only some of the tests, PDGEMM_TEST_PART=K/N each N-th one from the K-th on, K from 0 on."""

from __future__ import annotations

import os

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    first, _, step = os.environ.get("PDGEMM_TEST_PART", "0/1").partition("/")
    kept = items[int(first) % int(step) :: int(step)]
    config.hook.pytest_deselected(items=[x for x in items if x not in kept])
    items[:] = kept
