"""Buckets: parameters of a model and their gradients in flat storage, which are reduced bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from math import isfinite, sqrt
from time import perf_counter
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from pdgemm.errors import ArgumentError, NodeMemoryError
from pdgemm.instrument import spans
from pdgemm.instrument.recorder import Then
from pdgemm.local.arrays.integers import as_count
from pdgemm.local.blas.local_gemm import gemm_accumulate, leading, product_slabs
from pdgemm.parallel.divided_parameters import DividedParameters
from pdgemm.parallel.flat_storage import FlatStorage, add_to_tree
from pdgemm.parallel.layout_choice import Initial, as_parameter, type_of_parameters, with_transport
from pdgemm.parallel.mesh import Mesh
from pdgemm.schedules.training.flat_layout import FLIGHT, Bucket, FlatLayout, Parameter
from pdgemm.support.agreement import agree, described_elements, together
from pdgemm.support.text import counted
from pdgemm.transport.movers.arrivals import Arrival

WAITS = "waits in passes"  # of the recorder: seconds in which a forward or backward pass waits for messages
_CUT = 12  # bits of 32 that a checksum leaves out, so that sums of squares are exact
_FAILED = 2.0**20  # what a rank that failed adds to the number of ranks whose gradients overflow
Array = np.ndarray


class Reduced(NamedTuple):
    """What all ranks know of the reduced gradients: their norm, and whether it or one of them is NaN or infinite."""

    norm: float
    overflow: bool


class Buckets:
    """The parameters of a model and their gradients on the ranks of a mesh's dp axis.  Collective over the mesh.

    ::

        buckets = Buckets(mesh, {"w": w, "b": b}, stage=2)
        with buckets.forward():
            y = x @ buckets.parameters["w"] + buckets.parameters["b"]
        with buckets.backward():
            buckets.gradients["b"] += dy.sum(0); buckets.ready("b")
            buckets.gradients["w"] += x.T @ dy;  buckets.ready("w")
        reduced = buckets.finish()          # ShardedOptimizer.step does this, and updates the parameters

    parameters : arrays of the host by name, in the order of the forward pass, with the same values on all ranks; they
        are copied.  Or `Initial` values by a formula, of which a rank computes what it keeps.
    dtype  : float16, bfloat16, float32 or float64, of the parameters; None: that of the arrays.
    stage  : what the ranks divide among them (ZeRO): 0 nothing, 1 the optimizer's state, 2 also gradients, 3 also
        parameters, which are whole inside `forward` and `backward` alone, a bucket or two at a time.
    microbatches : how often each gradient becomes ready in a step, on every rank.  Gradients are added, and reduced
        when they are ready for the last time.
    reduce_each : with stages 2 and 3, reduce the gradients of each microbatch, which takes memory for none as a whole.
    same_bits : add gradients as a binary tree over all microbatches of all ranks, 2^k of them: then 1, 2, 4, ... ranks
        compute the same bits, where each microbatch is computed alike and buckets are of one size.
    bucket_bytes : of gradients that are reduced together; None: the fastest by the model of the machine, from 256 KiB.

    parameters, gradients : arrays by name.  Gradients are float64 where parameters are, else float32, and 0 when a step
        begins.  A gradient is added to, `gradients[name] += ...`, and then `ready(name)` starts the reduction of its
        bucket if it is the last one of it.  Take both anew in each pass: between nodes, what other ranks have updated
        comes in while the next forward pass goes on, and `parameters[name]` waits for it; with stages 2 and 3, buckets
        use the memory of gradients in turn.
    layout : the `FlatLayout`: words and bytes of each kind.   storage : the `FlatStorage`: arrays of this rank.

    Cost of a step: `layout.step(rank)`.  Parts are read in place where all ranks of the line share memory, and sent
    otherwise; then `poll`, which `ready` calls, moves the messages on.
    Raises ArgumentError or DTypeError on all ranks, before anything is allocated.
    """

    def __init__(
        self,
        mesh: Mesh,
        parameters: Mapping[str, Array | Initial],
        *,
        stage: int = 0,
        dtype: Any = None,
        microbatches: int = 1,
        reduce_each: bool = False,
        same_bits: bool = False,
        bucket_bytes: int | None = None,
    ) -> None:
        self.mesh, self.line = mesh, mesh.line("dp")
        with together(mesh.comm) as arguments:
            named = [(str(name), as_parameter(x, name)) for name, x in parameters.items()]
            values, entries = dict(named), tuple(Parameter(name, x.shape) for name, x in named)
            kind = type_of_parameters(values, dtype)
            microbatches = as_count(microbatches, "microbatches", 1)
            layout = FlatLayout(
                entries, kind, self.line.size, stage, microbatches=microbatches, reduce_each=bool(reduce_each),
                tree=bool(same_bits),
            )  # fmt: skip
            if same_bits and self.line.size & (self.line.size - 1):
                raise ArgumentError(f"same_bits takes 1, 2, 4, ... ranks along dp, got {self.line.size}")
            arrays = [x for x in values.values() if isinstance(x, np.ndarray)]
            formulas = [x for x in values.values() if isinstance(x, Initial)]
            arguments += ["Buckets", repr(layout), bucket_bytes, *formulas, described_elements(*arrays)]
        self.layout = with_transport(layout, self.line, bucket_bytes, True)
        self.recorder, self.transfers = mesh.recorder, mesh.transfers
        try:
            self.storage = FlatStorage(mesh, self.layout)
        except NodeMemoryError:  # raised on all ranks, so all ranks send parts instead
            self.layout = with_transport(layout, self.line, bucket_bytes, False)
            self.storage = FlatStorage(mesh, self.layout)
        self._arrays, self.index = self.storage.arrays, self.storage.index
        self._tags = mesh.tags(2 * len(self.layout.buckets))
        self._begin_step()
        self._runs = dict[int, list[Arrival]]()  # by bucket: the reduction in progress
        self._gathers = dict[int, list[Arrival]]()  # by bucket: updated parameters that come in
        self.divided = DividedParameters(self.layout, self._arrays.get("gathered"), self._gather, self._arrived)
        with together(mesh.comm):
            for name, value in values.items():
                self.set_parameter(name, value)
        self._number_of = {name: bucket.number for name, bucket in self.layout.bucket_of.items()}
        self.parameters, self.gradients = _Parameters(self, self.parameter), _Gradients(self, self.gradient)

    # ---------------------------------------------------------------- parameters
    def parameter(self, name: str) -> Array:
        """Return a whole parameter, to be read, after waiting for its bucket; with stage 3 inside passes alone."""
        bucket = self.layout.bucket_of[name]
        if self.layout.stage < 3:
            if self._gathers:
                self.wait_for(bucket)
            view = self.storage.shaped(name, self._arrays["parameters"], 0)
        else:
            view = self.storage.shaped(name, self.divided.whole(bucket), bucket.start)
        view.flags.writeable = False  # what is written here would not reach master weights and parts of other ranks
        return view

    def set_parameter(self, name: str, value: Array | Initial) -> None:
        """Set a parameter and its master weights to a value that all ranks pass.  Local."""
        flat = value if isinstance(value, Initial) else np.asarray(value).reshape(-1)
        if flat.size != (place := self.layout.places[name]).stop - place.start:
            raise ArgumentError(f"parameter {name!r} has {place.stop - place.start} elements, got {flat.size}")
        self.wait_for(self.layout.bucket_of[name])
        self.storage.set_parameter(name, flat)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """With stage 3, make parameters whole in the order of the forward pass.  Collective over the line."""
        with self.timed(spans.PASSES[0]), self.divided.pass_over(self.layout.buckets[::-1]):
            yield

    @contextmanager
    def backward(self) -> Iterator[None]:
        """With stage 3, make parameters whole in the order of the backward pass.  Collective over the line."""
        with self.timed(spans.PASSES[1]), self.divided.pass_over(self.layout.buckets):
            yield

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Record the seconds of a phase of a step, and its span where a trace is recorded."""
        start, trace, seconds = perf_counter(), spans.active(), self.recorder.seconds
        waited = seconds.get("wait", 0.0)
        with self.recorder.phase(phase):
            yield
        if phase in spans.PASSES:
            seconds[WAITS] = seconds.get(WAITS, 0.0) + seconds.get("wait", 0.0) - waited
        if trace:
            trace.add((spans.HOST, phase, start, perf_counter()))

    def _gather(self, bucket: Bucket) -> list[Arrival]:
        """Start to gather the parameters of a bucket in its slot, with stage 3.   Returns the arrivals to wait for."""
        part, place = self.layout.part(bucket, self.index), (bucket.number % FLIGHT, slice(0, bucket.words))
        whole = self._arrays["gathered"][place]
        whole[part.start - bucket.start : part.stop - bucket.start] = self.storage.own_parameters(bucket)
        tag = self._tags[2 * bucket.number + 1]
        return self._expected(self.storage.start(self.layout.gathering(bucket), "gathered", place, "parameters", tag))

    def gather_updated(self, bucket: Bucket) -> None:
        """Start to gather the parts of a bucket that the ranks have updated, with stages 1 and 2."""
        span, tag = slice(bucket.start, bucket.stop), self._tags[2 * bucket.number + 1]
        run = self.storage.start(self.layout.gathering(bucket), "parameters", span, "parameters", tag)
        self._gathers[bucket.number] = self._expected(run)

    def wait_for(self, bucket: Bucket) -> None:
        """Wait until the updated parameters of a bucket are whole, and other ranks have those of this rank.  Local."""
        self._arrived(self._gathers.pop(bucket.number, []))

    # ---------------------------------------------------------------- gradients
    def gradient(self, name: str) -> Array:
        """Return the gradient of a parameter, to which the gradient of this microbatch is added."""
        bucket, slot, view = self._views[name]
        if slot is not None and (self._slots[slot] != bucket.number or bucket.number in self._runs):
            self._slot(bucket, min(self._times[bucket.number] + 1, self.layout.microbatches))
        return view

    @cached_property
    def _views(self) -> dict[str, tuple[Bucket, int | None, Array]]:
        """The bucket, slot and gradient of each parameter; the slot is None where gradients are whole."""
        shaped, views = self.storage.shaped, dict[str, tuple[Bucket, int | None, Array]]()
        for name, bucket in self.layout.bucket_of.items():
            if self.layout.whole_gradients:
                views[name] = bucket, None, shaped(name, self._arrays["gradients"][0], 0)
            else:
                slot = bucket.number % FLIGHT
                views[name] = bucket, slot, shaped(name, self._arrays["slots"][slot], bucket.start)
        return views

    def _slot(self, bucket: Bucket, microbatch: int) -> Array:
        """Return the gradients of a bucket in a slot; a new bucket takes the slot of the one before the last."""
        slot = bucket.number % FLIGHT
        if bucket.number in self._runs:  # of the microbatch before
            self._wait(bucket.number)
        flat = self._arrays["slots"][slot, : bucket.words]
        if self._slots[slot] != bucket.number:
            for earlier in self.layout.buckets[: max(0, bucket.number - FLIGHT + 1)]:
                self._force(earlier, microbatch)
            if (before := self._slots[slot]) is not None:
                self._wait(before)
            self._slots[slot] = bucket.number
            if flat.view(np.bool_).any():  # a free slot is 0, unless an array was kept that was one of its gradients
                what = "was added to an array of another bucket or step"
                self._wrong |= dict.fromkeys(bucket.names, what)
                flat[:] = 0
        return flat

    def ready(self, *names: str) -> None:
        """Say that gradients of a microbatch are complete; the last one of a bucket starts its reduction.  Local.

        What is wrong with them is raised by `finish`, on all ranks.
        """
        ready, times, behind, last = self._ready, self._times, self._behind, self.layout.microbatches
        for name in names:
            if (count := ready.get(name)) is None:
                raise ArgumentError(f"{name!r} is not a parameter; parameters are {', '.join(self.parameters)}")
            if count == last:  # an exception here, on one rank, would leave the others waiting
                self._wrong.setdefault(name, "became ready more often, or after the gradients of later buckets")
                continue
            ready[name] = level = count + 1
            number = self._number_of[name]
            if level == times[number] + 1:
                behind[number] -= 1
                if not behind[number]:
                    bucket, times[number] = self.layout.buckets[number], level
                    behind[number] = sum(ready[other] == level for other in bucket.names)
                    self._complete(bucket, level)
        if self.transfers.in_flight:
            self.poll()

    def _force(self, bucket: Bucket, times: int) -> None:
        """Let gradients that have not become ready so often take part in reductions, which the other ranks wait for."""
        for name in bucket.names if self._times[bucket.number] < times else ():
            while self._ready[name] < times:
                self._wrong[name] = "did not become ready"
                self.ready(name)

    def poll(self) -> None:
        """Let the messages of reductions move on, between products of more than a few milliseconds.  Local."""
        self.transfers.poll()

    def multiply(self, A: Array, B: Array, add_to: Array | None = None) -> Array:
        """Return A B, or add it to `add_to`, in parts between which the messages of reductions move on.  Local.

        A : (m, k), B : (k, n), add_to : (m, n), real; they are converted to the type of `add_to`, or of gradients.
        Where messages are sent, `poll` is called every few milliseconds.   2mnk flops.
        Raises ArgumentError on this rank where shapes do not fit.
        """
        shapes = [np.shape(x) for x in (A, B, add_to) if x is not None]
        place = shapes[0][:-1] + shapes[1][1:]
        if shapes[0][1:] != shapes[1][:1] or len(place) != 2 or shapes[2:] not in ([], [place]):
            raise ArgumentError(f"shapes that are no product A B, or not what it is added to: {shapes}")
        C, kind = add_to, self.layout.wide if add_to is None else add_to.dtype
        if C is None:
            C = np.empty((len(A), B.shape[1]), kind)
        A, B = (_for_blas(np.asarray(x, kind)) for x in (A, B))
        sent = self.layout.shards > 1 and not self.layout.in_place
        for a, b, c in product_slabs(A, B, C) if sent else [(A, B, C)]:
            gemm_accumulate(1, a, b, add_to is not None, c)
            if sent:
                self.poll()
        return C

    def _complete(self, bucket: Bucket, microbatch: int) -> None:
        """Add the gradients of a bucket to those of earlier microbatches; start its reduction after the last one."""
        layout = self.layout
        if layout.tree and layout.levels > 1:
            add_to_tree(self._arrays["gradients"][:, bucket.start : bucket.stop], microbatch, layout.microbatches)
        if microbatch == layout.microbatches or layout.reduce_each:
            self._reduce(bucket)

    def _reduce(self, bucket: Bucket) -> None:
        """Start the reduction of a bucket; its own part is added up where gradients are not whole."""
        layout, tag = self.layout, self._tags[2 * bucket.number]
        name, place = "gradients", (0, slice(bucket.start, bucket.stop))
        if not layout.whole_gradients:
            slot = self._slot(bucket, self._times[bucket.number])
            name, place = "slots", (bucket.number % FLIGHT, slice(0, bucket.words))
        run: Arrival = self.storage.start(layout.reduction(bucket), name, place, "gradients", tag)
        if not layout.whole_gradients:
            run = Then(run, partial(self._keep, bucket, slot))
        self._runs[bucket.number] = self._expected(run)

    def _expected(self, run: Arrival) -> list[Arrival]:
        """Return a started collective as a group to wait for; it goes on in each `poll` and in each other wait."""
        self.transfers.expect(group := [run])
        return group

    def _keep(self, bucket: Bucket, slot: Array) -> None:
        """Add the own part of a reduced bucket to the gradients of this rank; its slot is free for another bucket."""
        part = self.layout.part(bucket, self.index)
        self.storage.own_gradients(bucket)[...] += slot[part.start - bucket.start : part.stop - bucket.start]
        self._slots[bucket.number % FLIGHT], slot[:] = None, 0

    def _wait(self, number: int) -> None:
        """Wait for the reduction of a bucket."""
        self._arrived(self._runs.pop(number, []))

    def _arrived(self, group: list[Arrival]) -> None:
        """Wait for a group of arrivals, which is part of the trace: so it is known which rank the others wait for."""
        start, trace = perf_counter(), spans.active() if group else None
        self.transfers.wait(group)
        if trace:
            trace.add((spans.HOST, "wait", start, perf_counter()))

    def finish(self, error: Exception | None = None, arguments: str = "") -> Reduced:
        """Wait for all reductions, and return what all ranks know of the gradients.  Collective over the line.

        error : what else is wrong on this rank, and is raised on all ranks.   arguments : the same text on all ranks.

        The gradients of this rank's parts are `storage.own_gradients`.  Raises ArgumentError on all ranks, and names
        them, where gradients did not become ready, or more often than there are microbatches, or where parameters of
        stage 3 were not used in their order, and where the ranks have different arguments; gradients are 0 then.
        """
        for bucket in self.layout.buckets:
            self._force(bucket, self.layout.microbatches)
        for bucket in self.layout.buckets:
            self._wait(bucket.number)
        with np.errstate(over="ignore"):
            bad = not isfinite(squares := self.storage.squares())
            error, own = error or self.divided.error, float(crc32(arguments.encode()) >> _CUT)
            failed = _FAILED * bool(self._wrong or error)
            total, failures, once, twice = self.mesh.sum(0.0 if bad else squares, bad + failed, own, own * own)
        if failures >= _FAILED or self.line.size * int(twice) != int(once) ** 2:  # all are equal, or Cauchy-Schwarz
            wrong = "; ".join(f"the gradient of {name!r} {what}" for name, what in self._wrong.items())
            times = counted(self.layout.microbatches, "time")
            rule = f"in a step each becomes ready {times}, in order of the backward pass"
            self.clear()
            agree(self.line.comm, ArgumentError(f"{wrong}: {rule}") if wrong else error, arguments)
        return Reduced(sqrt(total), failures > 0 or not isfinite(total))

    def clear(self) -> None:
        """Set gradients to zero for the next step, after waiting for reductions that have begun.  Collective."""
        for number in [*self._runs]:
            self._wait(number)
        for name in ("gradients", "slots") if any(x is not None for x in self._slots) else ("gradients",):
            self._arrays[name][...] = 0
        self.divided.error = None
        self._begin_step()

    def _begin_step(self) -> None:
        """No gradient is ready."""
        buckets = self.layout.buckets
        self._ready = dict.fromkeys(self.layout.places, 0)  # how often each gradient has become ready
        self._times = [0] * len(buckets)  # the microbatches of which all gradients of a bucket are complete
        self._behind = [len(bucket.names) for bucket in buckets]  # gradients that are not ready more often than that
        self._slots: list[int | None] = [None] * FLIGHT  # the bucket whose gradients are in each slot
        self._wrong: dict[str, str] = {}  # by parameter, what was wrong in this step


def _for_blas(x: Array) -> Array:
    """Return an array of which rows or columns are contiguous."""
    try:
        leading(x)
    except ValueError:
        return np.ascontiguousarray(x)
    return x


class _Parameters(Mapping[str, Array]):
    """Arrays by the names of parameters."""

    def __init__(self, buckets: Buckets, of: Callable[[str], Array]) -> None:
        self._names, self._of = buckets.layout.places, of

    def __getitem__(self, name: str) -> Array:
        return self._of(name)

    def __iter__(self) -> Iterator[str]:
        return reversed(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _Gradients(_Parameters):
    def __setitem__(self, name: str, value: Array) -> None:
        """Take the array that `x[name] += y` has changed in place."""
        if value is not (own := self[name]) and not np.shares_memory(value, own):
            own[...] = value
