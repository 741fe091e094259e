"""Synchronization of a device's work: products run in the caller's stream, copies in a transfer stream beside them.

The host runs ahead of both.  It waits for copies before MPI reads their result (MPI ignores streams), and for products
before their operands are overwritten; products wait for copies within the device.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from pdgemm.arrays import device as devices
from pdgemm.arrays.device import Device, Event, Stream
from pdgemm.instrument import spans
from pdgemm.instrument.recorder import Recorder
from pdgemm.instrument.spans import Trace, Traced

_STREAMS = {"compute": "compute", "pack": "transfer"}  # the phases that run on a device


class DeviceRecorder(Recorder):
    """A Recorder whose phases "compute" and "pack" run in streams, and are timed by the device's events."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self.compute, self.transfer = device.current_stream(), device.transfer_stream()
        self._spans: list[tuple[str, Event, Event]] = []
        self._packed: Event | None = None  # the last copy that the host has not waited for
        self.begin()

    def begin(self) -> None:
        """Wait for all work that the caller has started, after which MPI may send A."""
        self.compute.synchronize()

    def phase(self, name: str) -> Any:
        stream = _STREAMS.get(name)
        if stream:
            return _Span(self, name, getattr(self, stream))
        return super().phase(name)

    def synchronize_copies(self) -> None:
        """Wait until everything packed is complete."""
        if self._packed is not None:
            packed, self._packed = self._packed, None
            packed.synchronize()

    def record_copies(self) -> tuple[Any, ...]:
        return () if self._packed is None else (_Before(self._device, self._packed, self.compute),)

    def copied(self) -> EventRequest:
        """Return a request that the host waits for: it is complete when the last copy is."""
        assert self._packed is not None
        return EventRequest(self._device, self._packed)

    def hold_products(self) -> None:
        """Make the products that follow wait for all copies."""
        for arrival in self.record_copies():
            arrival.Wait()

    def order_copies_after_products(self) -> None:
        self.transfer.wait_event(self.compute.record())

    def record_products(self, poll: Callable[[], object]) -> tuple[Callable[[], object], ...]:
        event = self.compute.record()

        def wait() -> None:
            while not self._device.happened(event):
                poll()

        return (wait,)

    def finish(self) -> None:
        """Wait for all work, then add the seconds that the device measured to the phases."""
        self.transfer.synchronize()
        self.compute.synchronize()
        self._packed = None
        for name, begin, end in self._spans:
            self.seconds[name] = self.seconds.get(name, 0.0) + self.timed(name, begin, end)
        self._spans.clear()

    def timed(self, name: str, begin: Event, end: Event) -> float:
        """Return the seconds between two completed events."""
        return self._device.elapsed(begin, end)

    def enclose(self, name: str, stream: Stream, begin: Event) -> None:
        end = stream.record()
        self._spans.append((name, begin, end))
        if name == "pack":
            self._packed = end


class _Span:
    """A phase whose work runs in a stream."""

    __slots__ = ("_begin", "_name", "_recorder", "_stream")

    def __init__(self, recorder: DeviceRecorder, name: str, stream: Stream) -> None:
        self._recorder, self._name, self._stream = recorder, name, stream

    def __enter__(self) -> None:
        self._stream.__enter__()
        self._begin = self._stream.record()

    def __exit__(self, *error: Any) -> None:
        try:
            self._recorder.enclose(self._name, self._stream, self._begin)
        finally:
            self._stream.__exit__(*error)


class EventRequest:
    """An event with the interface of an MPI request: the host waits for it."""

    __slots__ = ("_device", "_event")

    def __init__(self, device: Device, event: Event) -> None:
        self._device, self._event = device, event

    def Test(self) -> bool:
        return self._device.happened(self._event)

    def Wait(self) -> None:
        self._event.synchronize()


class _Before(EventRequest):
    """An event that a stream waits for; the host does not wait."""

    __slots__ = ("_stream",)

    def __init__(self, device: Device, event: Event, stream: Stream) -> None:
        super().__init__(device, event)
        self._stream = stream

    def Wait(self) -> None:
        self._stream.wait_event(self._event)


class TracedDevice(Traced, DeviceRecorder):
    """A DeviceRecorder that adds the work of the device to a trace, with times on the host's clock."""

    def __init__(self, trace: Trace, device: Device) -> None:
        DeviceRecorder.__init__(self, device)
        self.trace = trace
        # the streams are idle, so these events complete now
        self._origins = {name: getattr(self, stream).record() for name, stream in _STREAMS.items()}
        self._now = perf_counter()

    def phase(self, name: str) -> Any:
        if name not in _STREAMS:
            return Traced.phase(self, name)
        if self.trace.ranges:
            self.trace.ranges.push(name)
        return DeviceRecorder.phase(self, name)

    def enclose(self, name: str, stream: Stream, begin: Event) -> None:
        super().enclose(name, stream, begin)
        if self.trace.ranges:
            self.trace.ranges.pop()

    def timed(self, name: str, begin: Event, end: Event) -> float:
        seconds = super().timed(name, begin, end)
        start = self._now + self._device.elapsed(self._origins[name], begin)
        self.trace.add((f"{_STREAMS[name]} stream", name, start, start + seconds))
        return seconds


def recorder_of(x: Any) -> Recorder:
    """Return the recorder that times the work on an array and synchronizes with it."""
    found, trace = devices.of(x), spans.active()
    if trace is not None:
        return Traced(trace) if found is None else TracedDevice(trace, found)
    return Recorder() if found is None else DeviceRecorder(found)
