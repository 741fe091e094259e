"""Synchronisations of a device's streams that are planted to do nothing, one place in the code at a time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pdgemm.devices.streams import DeviceRecorder
from pdgemm.transport.panels.task import Task

REMOVED: dict[str, Any] = {  # what a synchronisation returns that does nothing
    "synchronize_copies": lambda recorder: None,
    "record_copies": lambda recorder: (),
    "record_products": lambda recorder, poll: (),
    "hold_products": lambda recorder: None,
    "order_copies_after_products": lambda recorder: None,
    "copied": lambda recorder: _Done(),
    "finish": lambda recorder: recorder._spans.clear(),
    "begin": lambda recorder: None,
}
OF_PANELS: dict[str, Any] = {"copied": lambda task: None, "finish_products": lambda task: None}  # those of a `Task`
Site = str  # which of them, in what file, in what function, on what line of that


class _Done:
    def Test(self) -> bool:
        return True

    def Wait(self) -> None:
        pass


@contextmanager
def without(removed: Site | None, seen: set[Site]) -> Iterator[None]:
    """Synchronisations called from one place do nothing; those called are added to `seen`."""

    def planted(name: str, kept: Any, nothing: Any) -> Any:
        def method(recorder: Any, *args: Any) -> Any:
            caller = sys._getframe(1)
            code = caller.f_code
            site = f"{name} {Path(code.co_filename).name} {code.co_qualname} {caller.f_lineno - code.co_firstlineno}"
            seen.add(site)
            return nothing(recorder, *args) if site == removed else kept(recorder, *args)

        return method

    with pytest.MonkeyPatch.context() as patch:
        for of, methods in ((DeviceRecorder, REMOVED), (Task, OF_PANELS)):
            for name, nothing in methods.items():
                patch.setattr(of, name, planted(name, getattr(of, name), nothing))
        yield
