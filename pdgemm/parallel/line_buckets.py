"""The buckets of parameters whose gradients are added along one line of a mesh."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cached_property, partial
from itertools import product
from time import perf_counter

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument import spans
from pdgemm.instrument.recorder import Then
from pdgemm.parallel.divided_parameters import DividedParameters
from pdgemm.parallel.flat_storage import FlatStorage, add_to_tree
from pdgemm.parallel.mesh import Mesh
from pdgemm.parallel.parts import FlatValues
from pdgemm.schedules.training.flat_layout import FLIGHT, Bucket, FlatLayout
from pdgemm.transport.movers.arrivals import Arrival

Array = np.ndarray


class LineBuckets:
    """The parameters of one line, their gradients and reductions, as `Buckets` joins them.  Collective over the line.

    line : of the mesh.   layout, arrays : of its `FlatStorage`.   tags : two for each bucket and use, its own.

    layout : the `FlatLayout`: words and bytes of each kind.   storage : the `FlatStorage`: arrays of this rank.
    index  : of this rank on the line.
    wrong  : by parameter, what was wrong with its gradient in the step in progress.
    """

    def __init__(
        self, mesh: Mesh, line: ProcessGrid, layout: FlatLayout, arrays: dict[str, Array], tags: range
    ) -> None:
        self.line, self.layout, self.transfers = line, layout, mesh.transfers
        self.storage = FlatStorage(mesh, line, layout, arrays)
        self._arrays, self.index, self._tags = arrays, line.rank, tags
        self._begin_step()
        self._runs = dict[int, list[Arrival]]()  # by bucket, those of other uses behind: the reduction in progress
        self._gathers = dict[int, list[Arrival]]()  # by bucket: updated parameters that come in
        self._gathered = [0] * len(layout.buckets)  # how often this rank has begun to gather each
        self._line_checks, checks = mesh.checks(line), mesh.checks(mesh.grid)
        self._checks = checks
        self._failures = checks.failures  # how often all ranks had raised an exception when they last agreed on passes
        self.divided = DividedParameters(
            self.layout, self._arrays.get("gathered"), self._gather, self._arrived, lambda: checks.guarded
        )
        self._number_of = {name: bucket.number for name, bucket in self.layout.bucket_of.items()}

    # ---------------------------------------------------------------- parameters
    def parameter(self, name: str) -> Array:
        """Return a whole parameter, to be read, after waiting for its bucket; with stage 3 inside passes alone.

        With stage 3 it is a copy: others take the place of its bucket while the caller may still use it.
        """
        bucket = self.layout.bucket_of[name]
        if self.layout.stage < 3:
            if self._gathers:
                self.wait_for(bucket)
            view = self.storage.shaped(name, self._arrays["parameters"], 0)
        else:
            view = self.storage.shaped(name, self.divided.whole(bucket), bucket.start).copy()
        view.flags.writeable = False  # what is written here would not reach master weights and parts of other ranks
        return view

    def set_parameter(self, name: str, value: Array | FlatValues) -> None:
        """Set a parameter and its master weights to a value that all ranks pass.  Local."""
        flat = np.asarray(value).reshape(-1) if isinstance(value, np.ndarray | np.generic) else value
        self.wait_for(self.layout.bucket_of[name])
        self.storage.set_parameter(name, flat)

    def pass_over(self, chunk: int | None, step: int) -> AbstractContextManager[None]:
        """With stage 3, make the parameters of a chunk whole, or of all: those of flat storage by a step of 1 or -1.

        Collective over the line.
        """
        if self._failures != self._checks.failures:
            self._catch_up()
        return self.divided.pass_over([x for x in self.layout.buckets if chunk in (None, x.chunk)][::step])

    def _catch_up(self) -> None:
        """After an exception of all ranks, complete what some of them had begun.  Collective over the line.

        Where it has left them with different gradients ready, the step in progress is an error of `Buckets.finish`.
        """
        self._line_checks.meet()  # before a wait that looks for no calls
        failures, own = self._checks.failures, (self.divided.begun, self._gathered, [*self._ready.values()])
        begun, gathered, ready = zip(*self.line.comm.allgather(own))
        self.divided.catch_up(max(begun))
        for bucket in self.layout.buckets:
            if self._gathered[bucket.number] < max(counts[bucket.number] for counts in gathered):
                self.wait_for(bucket)
                self.gather_updated(bucket)
        if any(counts != ready[0] for counts in ready):
            self.interrupt()
            self.force()
            self.wait()
        self._failures = failures

    def interrupt(self) -> None:
        """Let the end of the step in progress, whose gradients are incomplete, be an error.  Local."""
        what = "an exception has ended a step, and its gradients were not cleared"
        self.divided.error = ArgumentError(f"{what}: call Buckets.clear() on all ranks, and take the next step")

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
        self._gathered[bucket.number] += 1

    def wait_for(self, bucket: Bucket) -> None:
        """Wait until the updated parameters of a bucket are whole, and other ranks have those of this rank.  Local."""
        self._arrived(self._gathers.get(bucket.number, []))
        self._gathers.pop(bucket.number, None)  # now that nothing has interrupted the wait

    # ---------------------------------------------------------------- gradients
    def gradient(self, name: str) -> Array:
        """Return the gradient of a parameter, to which the gradient of this microbatch is added."""
        bucket, slot, view = self._views[self._ready[name] % self.layout.uses][name]
        if slot is not None and (self._slots[slot] != bucket.number or bucket.number in self._runs):
            self._slot(bucket, min(self._times[bucket.number] + 1, self.layout.microbatches))
        return view

    @cached_property
    def _views(self) -> list[dict[str, tuple[Bucket, int | None, Array]]]:
        """For each use, the bucket, slot and gradient of each parameter; the slot is None where gradients are whole."""
        layout, shaped = self.layout, self.storage.shaped
        views: list[dict[str, tuple[Bucket, int | None, Array]]] = [{} for _ in range(layout.uses)]
        for use, (name, bucket) in product(range(layout.uses), layout.bucket_of.items()):
            if layout.whole_gradients:
                view = shaped(name, self._arrays["gradients"][use * layout.levels], 0)
                views[use][name] = bucket, None, view
            else:
                slot = bucket.number % FLIGHT
                views[use][name] = bucket, slot, shaped(name, self._arrays["slots"][slot], bucket.start)
        return views

    def _slot(self, bucket: Bucket, microbatch: int) -> Array:
        """Return the gradients of a bucket in a slot; a new bucket takes the slot of the one before the last.

        All ranks reduce the buckets in one order: those of the microbatch before, then the earlier ones of this one.
        """
        slot = bucket.number % FLIGHT
        for other in (x for x in self.layout.buckets if x.chunk == bucket.chunk):
            self._force(other, microbatch - 1)
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
                self.wrong |= dict.fromkeys(bucket.names, what)
                flat[:] = 0
        return flat

    def ready(self, name: str) -> None:
        """Say that a gradient of a microbatch is complete; the last one of a bucket starts its reduction.  Local."""
        if (count := self._ready[name]) == self.layout.times:
            # an exception here, on one rank, would leave the others waiting
            self.wrong.setdefault(name, "became ready more often, or after the gradients of later buckets")
            return
        self._ready[name] = level = count + 1
        number, behind = self._number_of[name], self._behind
        if level == self._times[number] + 1:
            behind[number] -= 1
            if not behind[number]:
                bucket, self._times[number] = self.layout.buckets[number], level
                behind[number] = sum(self._ready[other] == level for other in bucket.names)
                self._complete(bucket, level)
        elif self.layout.tree:  # partial sums are of microbatches, each of which is whole before the next one begins
            self.wrong.setdefault(name, "became ready before others of the microbatch before, which a tree has first")

    def _force(self, bucket: Bucket, times: int) -> None:
        """Let gradients that have not become ready so often take part in reductions, which the other ranks wait for."""
        for name in bucket.names if self._times[bucket.number] < times else ():
            while self._ready[name] < times:
                self.wrong[name] = "did not become ready"
                self.gradient(name)  # waits for its slot, if it has to, before the reduction counts as begun
                self.ready(name)

    def _complete(self, bucket: Bucket, times: int) -> None:
        """Add the gradients of a bucket to those of earlier microbatches; start its reduction after the last one.

        times : how often they have become ready; the uses in a microbatch take turns.
        """
        layout, (earlier, use) = self.layout, divmod(times - 1, self.layout.uses)
        microbatch, first = earlier + 1, use * layout.levels
        if layout.tree and layout.levels > 1:
            levels = self._arrays["gradients"][first : first + layout.levels, bucket.start : bucket.stop]
            add_to_tree(levels, microbatch, layout.microbatches)
        if microbatch == layout.microbatches or layout.reduce_each:
            self._reduce(bucket, use)

    def _reduce(self, bucket: Bucket, use: int = 0) -> None:
        """Start the reduction of a bucket; its own part is added up where gradients are not whole."""
        layout, number = self.layout, bucket.number + use * len(self.layout.buckets)
        name, place = "gradients", (use * layout.levels, slice(bucket.start, bucket.stop))
        if not layout.whole_gradients:
            slot = self._slot(bucket, self._times[bucket.number])
            name, place = "slots", (bucket.number % FLIGHT, slice(0, bucket.words))
        run: Arrival = self.storage.start(layout.reduction(bucket), name, place, "gradients", self._tags[2 * number])
        if not layout.whole_gradients:
            run = Then(run, partial(self._keep, bucket, slot))
        self._runs[number] = self._expected(run)

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
        self._arrived(self._runs.get(number, []))
        self._runs.pop(number, None)  # now that nothing has interrupted the wait

    def _arrived(self, group: list[Arrival]) -> None:
        """Wait for a group of arrivals, which is part of the trace: so it is known which rank the others wait for."""
        start, trace = perf_counter(), spans.active() if group else None
        try:
            self.transfers.wait(group)
        except BaseException:
            self.transfers.expect(group)  # goes on, as other ranks may wait for it
            raise
        if trace:
            trace.add((spans.HOST, "wait", start, perf_counter()))

    def force(self) -> None:
        """Start all reductions, also those of gradients that have not become ready.  Local."""
        for bucket in self.layout.buckets:
            self._force(bucket, self.layout.times)

    def wait(self) -> None:
        """Wait for all reductions in progress."""
        for number in [*self._runs]:
            self._wait(number)

    def clear(self) -> None:
        """Set gradients to zero for the next step, after waiting for reductions that have begun.  Collective."""
        if self._failures != self._checks.failures:
            self._catch_up()
        self.wait()
        for name in ("gradients", "slots") if any(x is not None for x in self._slots) else ("gradients",):
            self._arrays[name][...] = 0
        self.divided.error = None
        self._begin_step()

    def _begin_step(self) -> None:
        """No gradient is ready."""
        buckets = self.layout.buckets
        self._ready = dict.fromkeys(self.layout.places, 0)  # how often each gradient has become ready
        self._times = [0] * len(buckets)  # how often all gradients of a bucket have become ready
        self._behind = [len(bucket.names) for bucket in buckets]  # gradients that are not ready more often than that
        self._slots: list[int | None] = [None] * FLIGHT  # the bucket whose gradients are in each slot
        self.wrong: dict[str, str] = {}  # by parameter, what was wrong in this step
