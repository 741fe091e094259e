"""The interface through which a long function reports its progress to a command line, a notebook or a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class Observer:
    """The receiver of the progress of `multiply_files`.  This class does nothing; subclasses print."""

    @contextmanager
    def progress(
        self, what: str, amount: float = 0, unit: str = "FLOP/s"
    ) -> Iterator[Callable[[int, int], object] | None]:
        """Begin a part of the work; yield a function progress(done, total) for all ranks to call, or None for no calls.

        amount : bytes or floating-point operations of the whole part.   unit : unit of the rate of the part.
        """
        yield None

    def report(self, key: str, what: Any) -> None:
        """Receive a report; `key` is "read", "product", "verify" or "wrote"."""

    def note(self, key: str, lines: Sequence[str], fact: Any) -> None:
        """Receive a fact about a product in parts, and its text in lines; `key` is "plan", "resumed" or "complete"."""

    def planned(self, plan: Any) -> None:
        """Receive the plan of a product in memory, before the matrices are read."""
