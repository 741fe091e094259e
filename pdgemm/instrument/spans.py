"""Spans of the work of each rank while a trace is recorded; without a trace, no loop of a product calls this module."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, MutableSequence
from contextlib import contextmanager
from functools import cache
from time import perf_counter
from typing import Any, NamedTuple

from pdgemm.instrument.recorder import Recorder, Then

HOST, MOVING = "host", "transfers"  # rows of a rank in a trace; the streams of a device have other rows


class Span(NamedTuple):
    """A span of time, in seconds of this process's clock.

    nbytes : bytes moved, read or written.   facts : function that returns further facts.
    """

    row: str
    name: str
    start: float
    end: float
    nbytes: int = 0
    facts: Callable[[], dict[str, Any]] | None = None


class Trace:
    """The spans of this rank, which stay in memory (200 bytes each) until they are written.

    keep : False if only NVTX ranges are requested.   nvtx : the module `nvtx`; None: no ranges.
    """

    def __init__(self, keep: bool = True, nvtx: Any = None) -> None:
        self._recorded: MutableSequence[tuple[Any, ...]] = [] if keep else deque(maxlen=0)
        self.ranges = Ranges(nvtx.get_domain("pdgemm")) if nvtx else None
        self.add = self._recorded.append  # takes the fields of a Span as a tuple

    @property
    def spans(self) -> list[Span]:
        return [Span(row, phase_name(name), *rest) for row, name, *rest in self._recorded]


def phase_name(phase: str) -> str:
    """Return the name of a phase in a trace."""
    return "product" if phase == "compute" else phase


class Ranges:
    """Ranges of NVTX, each of which costs a microsecond."""

    def __init__(self, domain: Any) -> None:
        self._domain, self.pop = domain, domain.pop_range
        self._attributes = cache(lambda name: domain.get_event_attributes(message=phase_name(name)))

    def push(self, name: str) -> None:
        """Begin a range of NVTX."""
        self._domain.push_range(self._attributes(name))


class Traced(Recorder):
    """A Recorder that also adds the begin and the end of its phases and transfers to a trace."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def phase(self, name: str) -> Any:
        return Phase(self, name)

    def coming(self, kind: str, x: Any, request: Any) -> Any:
        self.traffic.received(x.size)
        return Then(request, self.moving(kind, x.nbytes))

    def moving(self, kind: str, nbytes: int) -> Callable[[], None]:
        start, add = perf_counter(), self.trace.add
        return lambda: add((MOVING, kind, start, perf_counter(), nbytes))


_active: Trace | None = None


def active() -> Trace | None:
    """Return the trace that is being recorded, or None."""
    return _active


@contextmanager
def taking(trace: Trace | None) -> Iterator[None]:
    """Record the work of this process in the trace while the block runs; None records nothing."""
    global _active
    before, _active = _active, trace
    try:
        yield
    finally:
        _active = before


class timed:
    """A timer of its `with` block, with the result in `.seconds`; adds a span of the host to the active trace."""

    __slots__ = ("_name", "_nbytes", "_start", "_trace", "seconds")

    def __init__(self, name: str, nbytes: int = 0) -> None:
        self._name, self._nbytes, self._trace = name, nbytes, _active

    def __enter__(self) -> timed:
        if self._trace and self._trace.ranges:
            self._trace.ranges.push(self._name)
        self._start = perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        end = perf_counter()
        self.seconds = end - self._start
        if self._trace:
            self._trace.add((HOST, self._name, self._start, end, self._nbytes))
            if self._trace.ranges:
                self._trace.ranges.pop()


class Phase(timed):
    """A phase on the host, with the same seconds in the trace and in the report, and a range of NVTX if requested."""

    __slots__ = ("_recorder",)

    def __init__(self, recorder: Traced, name: str) -> None:
        super().__init__(name)
        self._recorder, self._trace = recorder, recorder.trace

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        seconds = self._recorder.seconds
        seconds[self._name] = seconds.get(self._name, 0.0) + self.seconds
