"""When a device's work is done: products in the caller's stream, copies beside them in one of our own.

The host runs ahead of both.  It waits for copies before MPI reads what they write (MPI knows no streams), and for
products before what they read is written again; products wait for copies without the host.
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

_STREAMS = {"compute": "compute", "pack": "transfer"}  # the phases whose work is a device's


class DeviceRecorder(Recorder):
    """A Recorder whose phases "compute" and "pack" are streams, with times from the device's own clock."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self.compute, self.transfer = device.current_stream(), device.transfer_stream()
        self._spans: list[tuple[str, Event, Event]] = []
        self._packed: Event | None = None  # the last copy that the host has not waited for
        self.begin()

    def begin(self) -> None:
        """Until all is done that the caller has begun: MPI may send A as it is."""
        self.compute.synchronize()

    def phase(self, name: str) -> Any:
        stream = _STREAMS.get(name)
        if stream:
            return _Span(self, name, getattr(self, stream))
        return super().phase(name)

    def settle(self) -> None:
        """Until everything packed is there."""
        if self._packed is not None:
            packed, self._packed = self._packed, None
            packed.synchronize()

    def packed(self) -> tuple[Any, ...]:
        return () if self._packed is None else (_Before(self._device, self._packed, self.compute),)

    def copied(self) -> EventRequest:
        """The last copy, for the host to wait for."""
        assert self._packed is not None
        return EventRequest(self._device, self._packed)

    def hold_products(self) -> None:
        """Products to come wait for all that was copied."""
        for arrival in self.packed():
            arrival.Wait()

    def hold_copies(self) -> None:
        self.transfer.wait_event(self.compute.record())

    def multiplied(self, poll: Callable[[], object]) -> tuple[Callable[[], object], ...]:
        event = self.compute.record()

        def wait() -> None:
            while not self._device.happened(event):
                poll()

        return (wait,)

    def finish(self) -> None:
        """Until all is done; then the phases take the seconds that the device says they took."""
        self.transfer.synchronize()
        self.compute.synchronize()
        self._packed = None
        for name, begin, end in self._spans:
            self.seconds[name] = self.seconds.get(name, 0.0) + self.timed(name, begin, end)
        self._spans.clear()

    def timed(self, name: str, begin: Event, end: Event) -> float:
        """Seconds between two events that have happened."""
        return self._device.elapsed(begin, end)

    def enclose(self, name: str, stream: Stream, begin: Event) -> None:
        end = stream.record()
        self._spans.append((name, begin, end))
        if name == "pack":
            self._packed = end


class _Span:
    """A phase in a stream."""

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
    """An event that the host waits for, as for a request of MPI."""

    __slots__ = ("_device", "_event")

    def __init__(self, device: Device, event: Event) -> None:
        self._device, self._event = device, event

    def Test(self) -> bool:
        return self._device.happened(self._event)

    def Wait(self) -> None:
        self._event.synchronize()


class _Before(EventRequest):
    """An arrival that products wait for, and the host does not."""

    __slots__ = ("_stream",)

    def __init__(self, device: Device, event: Event, stream: Stream) -> None:
        super().__init__(device, event)
        self._stream = stream

    def Wait(self) -> None:
        self._stream.wait_event(self._event)


class TracedDevice(Traced, DeviceRecorder):
    """With the times of the device's work on the host's clock."""

    def __init__(self, trace: Trace, device: Device) -> None:
        DeviceRecorder.__init__(self, device)
        self.trace = trace
        # nothing is before these: they happen now
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
    """What records the work on an array, and says when it is done."""
    found, trace = devices.of(x), spans.active()
    if trace is not None:
        return Traced(trace) if found is None else TracedDevice(trace, found)
    return Recorder() if found is None else DeviceRecorder(found)
