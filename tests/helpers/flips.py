"""Planted faults: C is changed before a product returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from pdgemm.algorithms import prepared


def changed_after_the_product(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], object], times: int = 1, after: int = 0
) -> None:
    """Let products call change(C) before they return: `times` products, after the first `after`."""
    run, count = prepared.Prepared._run, [0]

    def damaged(self: Any, *arguments: Any) -> Any:
        report = run(self, *arguments)
        count[0] += 1
        if after < count[0] <= after + times:
            change(self._matrices[2])
        return report

    monkeypatch.setattr(prepared.Prepared, "_run", damaged)


def larger(C: Any) -> None:
    """Add 1000 to the first local element."""
    if C.local.size:
        C.local[0, 0] += C.dtype.type(1000)
