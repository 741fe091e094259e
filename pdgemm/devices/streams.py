"""Synchronization of a device's work: products run in a product stream, copies concurrently in a transfer stream.

Neither is CUDA's default stream: there, products and the copies of an MPI library would wait for each other.
The host waits for the caller's stream before a product, and for the other streams after the product; in between the
host runs ahead of them.  It waits for copies before MPI reads their result (MPI ignores streams), and for products
before their operands are overwritten; products wait for copies on the device.  Panels that are staged through the host
are copied to it in the transfer stream and from it in an upload stream, so that both directions of the bus are used.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from pdgemm.instrument import spans
from pdgemm.instrument.recorder import Recorder
from pdgemm.instrument.spans import Trace, Traced
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.device import Device, Event, Stream

_STREAMS = {"compute": "compute", "pack": "transfer", "upload": "upload"}  # the stream of each device phase


class DeviceRecorder(Recorder):
    """A Recorder whose phases "compute", "pack" and "upload" run in streams.

    Products are timed by device events, copies only while a trace is recorded, because events cost as much as launches.
    """

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self.compute, self.transfer = device.product_stream, device.transfer_stream
        self.upload = device.upload_stream
        self._spans: list[tuple[str, Event, Event]] = []
        self._computed: Event | None = None  # after the last product
        self._packed: Event | None = None  # after the last copy, if the host has not waited for it
        self._copies = False  # whether a copy has been started since that event
        self.begin()

    def begin(self) -> None:
        """Wait for all work in the caller's stream, so that MPI may send the operands."""
        self._device.current_stream().synchronize()

    def phase(self, name: str) -> Any:
        if name == "compute":
            return _Span(self, name, self.compute)
        if name == "pack":
            self._copies = True
            return self.transfer
        return self.upload if name == "upload" else super().phase(name)

    def synchronize_copies(self) -> None:
        """Wait until all copies of the transfer stream are complete."""
        packed, self._packed = self._after_copies(), None
        if packed is not None:
            self._device.wait(packed)

    def record_copies(self) -> tuple[Any, ...]:
        packed = self._after_copies()
        return () if packed is None else (_Before(self._device, packed, self.compute),)

    def copied(self) -> EventRequest:
        """Return a request for the host to wait for: it is complete when the last copy is complete."""
        packed = self._after_copies()
        assert packed is not None
        return EventRequest(self._device, packed)

    def hold_products(self) -> None:
        """Make the products that follow wait for the uploads before them."""
        self.compute.wait_event(self.upload.record())

    def order_copies_after_products(self) -> None:
        if self._computed is not None:
            self.transfer.wait_event(self._computed)

    def record_products(self, poll: Callable[[], object]) -> tuple[Callable[[], object], ...]:
        event = self._computed
        if event is None:
            return ()

        def wait() -> None:
            while not self._device.happened(event):
                poll()

        return (wait,)

    def finish(self) -> None:
        """Wait for all work, then add the seconds that the device measured to the phases."""
        for stream in (self.transfer, self.upload, self.compute):
            self._device.wait(stream)
        self._computed, self._packed, self._copies = None, None, False
        for name, begin, end in self._spans:
            self.seconds[name] = self.seconds.get(name, 0.0) + self.timed(name, begin, end)
        self._spans.clear()

    def timed(self, name: str, begin: Event, end: Event) -> float:
        """Return the seconds between two completed events."""
        return self._device.elapsed(begin, end)

    def enclose(self, name: str, stream: Stream, begin: Event) -> None:
        """End a span of this name, which began with the event `begin`."""
        end = stream.record()
        self._spans.append((name, begin, end))
        if name == "compute":
            self._computed = end

    def _after_copies(self) -> Event | None:
        if self._copies:
            self._packed, self._copies = self.transfer.record(), False
        return self._packed


class _Span:
    """A timed phase whose work runs in a stream."""

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
        self._device.wait(self._event)


class _Before(EventRequest):
    """A request for which a stream waits, and not the host: it is complete when an event is complete."""

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
        stream = DeviceRecorder.phase(self, name)
        return stream if name == "compute" else _Span(self, name, stream)

    def enclose(self, name: str, stream: Stream, begin: Event) -> None:
        super().enclose(name, stream, begin)
        if self.trace.ranges:
            self.trace.ranges.pop()

    def timed(self, name: str, begin: Event, end: Event) -> float:
        seconds = super().timed(name, begin, end)
        start = self._now + self._device.elapsed(self._origins[name], begin)
        phase = "pack" if name == "upload" else name
        self.trace.add((f"{_STREAMS[name]} stream", phase, start, start + seconds))
        return seconds


def recorder_of(x: Any) -> Recorder:
    """Return the recorder that times the work on an array and synchronizes with it."""
    device, trace = devices.of(x), spans.active()
    if trace is not None:
        return Traced(trace) if device is None else TracedDevice(trace, device)
    return Recorder() if device is None else DeviceRecorder(device)
