"""What a long function says while it works, to whoever wants to know: a command line, a notebook, a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class Observer:
    """What `multiply_files` says while it works.  This one is silent; `pdgemm multiply` has one that writes lines."""

    @contextmanager
    def progress(
        self, what: str, amount: float = 0, unit: str = "FLOP/s"
    ) -> Iterator[Callable[[int, int], object] | None]:
        """Begin a part of the work, and yield what is called as progress(done, total), on all ranks, or None.

        amount : bytes or floating-point operations of all of it.   unit : of its rate.
        """
        yield None

    def report(self, key: str, what: Any) -> None:
        """Take a report: of "read", "product", "verify" or "wrote"."""

    def note(self, key: str, lines: Sequence[str], fact: Any) -> None:
        """Take what was found out: the "plan" of a product in parts, and whether it is "resumed" or "complete"."""

    def planned(self, plan: Any) -> None:
        """Take the plan of a product in memory, before anything is read."""
