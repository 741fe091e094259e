"""Parameters and gradients of a model in flat storage, divided among the ranks that have the same parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np
import torch
from torch import nn

from pdgemm.errors import ArgumentError
from pdgemm.instrument.recorder import Then, Traffic
from pdgemm.parallel.mesh import Line
from pdgemm.schedules.training.flat_shards import FlatBucket, FlatShards
from pdgemm.training.layers.context import flat_array
from pdgemm.transport.movers.arrivals import Arrival

WIDE = {torch.float64: torch.float64}  # the type of gradients; of all other parameters float32


@dataclass
class UpdatedPart:
    """The part of a parameter that this rank updates.

    name : of the parameter.   span : its elements in the flat parameter.   weights : what the optimizer updates.
    gradient : of the loss.  Both are flat; but where they are all that this rank has of a parameter of several
        dimensions, they have its shape.
    """

    name: str
    span: slice
    weights: nn.Parameter
    gradient: torch.Tensor


class Storage:
    """The parameters that the ranks of a line have in common, and their gradients.  Collective over the line.

    layout : the `FlatShards`.   parameters : of this rank, by name; afterwards their elements are in flat storage.
    copies : see `DividedParameter`.   groups : the line of the groups of `layout`, or None.

    A gradient that autograd has accumulated is added to flat storage, and the last one of a bucket starts the reduction
    of the bucket: with stages 0 and 1 in the last microbatch of a step, with stages 2 and 3 in each.
    """

    def __init__(
        self, line: Line, layout: FlatShards, parameters: dict[str, nn.Parameter], copies: int, groups: Line | None
    ) -> None:
        self.line, self.layout, self.parameters, self.copies, self._groups = line, layout, parameters, copies, groups
        self._tag = line.first_tag(2 * len(layout.buckets))  # of gradients, and then of parameters, of each bucket
        self._coming = dict[int, Arrival]()  # parameters of buckets that are being made whole
        first = next(iter(parameters.values()))
        self.dtype, self.wide = first.dtype, WIDE.get(first.dtype, torch.float32)
        self._bucket_of = {name: bucket for bucket in layout.buckets for name in bucket.names}
        self._whole = [self._flattened(bucket) for bucket in layout.buckets]
        parts = [self._part_of(bucket, self._whole[bucket.number]) for bucket in layout.buckets]
        self._own: list[torch.Tensor] = [x.clone() for x in parts] if layout.stage == 3 else parts
        self.masters = None if self.dtype == self.wide else [x.to(self.wide) for x in self._updated_parts()]
        sizes = [x.numel() if layout.stage > 1 else bucket.words for x, bucket in zip(self._own, layout.buckets)]
        self.gradients = [torch.zeros(n, dtype=self.wide) for n in sizes]
        self._slots = dict[int, torch.Tensor]()  # gradients of buckets that are being reduced, with stages 2 and 3
        self._runs = dict[int, list[Arrival]]()  # the reduction in progress of each bucket
        self._missing = [len(bucket.names) for bucket in layout.buckets]
        self.last = True  # whether the gradients of this microbatch complete a step
        self.delayed = False  # whether a parameter may get several gradients in a pass, the last of them later
        self.received = set[str]()  # the parameters that have got a gradient in this step
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(partial(self._accumulated, name))
        self.free([*parameters])

    def _flattened(self, bucket: FlatBucket) -> torch.Tensor:
        """Return the flat storage of a bucket, of which its parameters are views."""
        whole = torch.empty(bucket.words, dtype=self.dtype)
        for name in bucket.names:
            view = self.view(name, whole)
            view.copy_(self.parameters[name].detach())
            self.parameters[name].data = view
        return whole

    def view(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return the elements of a parameter, in its shape, in a flat tensor of its bucket."""
        place, start = self.layout.places[name], self._bucket_of[name].start
        return whole[place.start - start : place.stop - start].view(self.parameters[name].shape)

    def _part_of(self, bucket: FlatBucket, whole: torch.Tensor) -> torch.Tensor:
        part = self.layout.part(bucket, self.line.rank)
        return whole[part.start - bucket.start : part.stop - bucket.start]

    def _updated_parts(self) -> list[torch.Tensor]:
        return self._own if self.layout.stage else self._whole

    # ---------------------------------------------------------------- gradients
    def _accumulated(self, name: str, parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            self.add(name, gradient)

    def add(self, name: str, gradient: torch.Tensor) -> None:
        """Add a gradient of a microbatch; the last one of a bucket starts its reduction."""
        bucket = self._bucket_of[name]
        if not self._missing[bucket.number]:
            raise ArgumentError(f"{name!r} has a second gradient in a pass: use checkpoint with use_reentrant=False")
        self.received.add(name)
        self.view(name, self._sums(bucket)).add_(gradient)
        if not self.delayed:
            self._missing[bucket.number] -= 1
            if not self._missing[bucket.number]:
                self._complete(bucket)
        self.line.mesh.transfers.poll()

    def _sums(self, bucket: FlatBucket) -> torch.Tensor:
        """Return the tensor to which the gradients of a bucket are added."""
        if self.layout.stage < 2:
            return self.gradients[bucket.number]
        if bucket.number not in self._slots:
            self._slots[bucket.number] = torch.zeros(bucket.words, dtype=self.wide)
        return self._slots[bucket.number]

    def _complete(self, bucket: FlatBucket) -> None:
        """Start the reduction of a bucket whose gradients of a microbatch are complete."""
        self._missing[bucket.number] = 0
        if self.layout.stage == 3:
            self.free(bucket.names)
        if self.layout.stage < 2 and not self.last:
            return
        sums, act = self._sums(bucket), None
        if self.layout.stage > 1:
            del self._slots[bucket.number]
            act = partial(self.gradients[bucket.number].add_, self._part_of(bucket, sums))
        if self.line.size == 1:
            if act:
                act()
            return
        transfers, tag = self.line.mesh.transfers, self._tag + 2 * bucket.number
        transfers.wait(self._runs.pop(bucket.number, []))  # of the last microbatch, whose messages have the same tag
        run = self.line.start(self.layout.reduction(bucket), flat_array(sums), "gradients", tag)
        self._runs[bucket.number] = [Then(run, act) if act else run]
        transfers.expect(self._runs[bucket.number])

    def begin_step(self) -> None:
        """Set all gradients to 0: those of the last step, also of one that has raised an error on all ranks."""
        self.received.clear()
        for sums in self.gradients:
            sums.zero_()

    def end_pass(self, names: Sequence[str]) -> None:
        """End the backward pass of a microbatch through these parameters.

        The loss may not depend on some of them: their gradients are 0, and their buckets are reduced now.
        """
        self.free(names)  # a block that returns its input, too, is made whole again behind its gradients
        for bucket in self.buckets(names):
            if self._missing[bucket.number]:
                self._sums(bucket)
                self._complete(bucket)
            self._missing[bucket.number] = len(bucket.names)

    def finish(self) -> None:
        """Wait for all transfers of a step, also of parameters that no pass has used."""
        self.complete()
        for group in self._runs.values():
            self.line.mesh.transfers.wait(group)
        self._runs.clear()
        if self._groups and self._groups.size > 1:
            for bucket in self.layout.buckets:
                own = self._own_gradients(bucket)
                self._groups.carry_out(self.layout.sum_of_groups(own.numel()), flat_array(own), "gradients")

    def _own_gradients(self, bucket: FlatBucket) -> torch.Tensor:
        """Return this rank's part of the reduced gradients of a bucket."""
        sums = self.gradients[bucket.number]
        return sums if self.layout.stage > 1 else self._part_of(bucket, sums)

    def traffic(self, microbatches: int) -> dict[str, Traffic]:
        """Return the traffic of a step of this rank, by kind, from formulas."""
        return self.layout.traffic(self.line.rank, microbatches, self._groups.rank if self._groups else 0)

    def pieces(self) -> list[UpdatedPart]:
        """Return the parts of parameters that this rank updates."""
        pieces, weights = list[UpdatedPart](), self.masters or self._updated_parts()
        for bucket in self.layout.buckets:
            own, sums, place = weights[bucket.number], self.gradients[bucket.number], slice(bucket.start, bucket.stop)
            if self.layout.stage:
                sums, place = self._own_gradients(bucket), self.layout.part(bucket, self.line.rank)
            for name in bucket.names:
                at = self.layout.places[name]
                start, stop = max(at.start, place.start), min(at.stop, place.stop)
                if start < stop:
                    here = slice(start - place.start, stop - place.start)
                    span = slice(start - at.start, stop - at.start)
                    weights_here, sums_here = own[here], sums[here]
                    shape = self.parameters[name].shape
                    if len(shape) > 1 and stop - start == at.stop - at.start:  # rules may depend on the shape
                        weights_here, sums_here = weights_here.view(shape), sums_here.view(shape)
                    pieces.append(UpdatedPart(name, span, nn.Parameter(weights_here), sums_here))
        return pieces

    def squares(self) -> float:
        """Return the sum of the squares of this rank's part of the reduced gradients, divided by the groups."""
        norms = (torch.linalg.vector_norm(self._own_gradients(x), dtype=torch.float64) for x in self.layout.buckets)
        return sum(float(x) ** 2 for x in norms) / self.layout.groups

    # ---------------------------------------------------------------- parameters
    def checksum(self) -> int:
        """Return the sum of the bits of the parameters that this rank has between steps."""
        total = 0
        for x in self._own if self.layout.stage == 3 else self._whole:
            elements = flat_array(x).view(np.uint8)
            ends = len(elements) // 8 * 8
            total += int(elements[:ends].view(np.int64).sum()) + int(elements[ends:].sum())
        return total % (2**31 - 1)

    def difference(self, tp: Line) -> int:
        """Return this rank's addend of a sum over all ranks, which is 0 if all copies of the parameters are equal."""
        lines = self._of_copies(tp)
        copies, first = prod(line.size for line in lines), not any(line.rank for line in lines)
        return (copies * first - 1) * self.checksum() if copies > 1 else 0

    def differs(self, tp: Line) -> bool:
        """Return whether copies of the parameters differ.  Collective over the lines of these copies."""
        checksums = [line.comm.allgather(self.checksum()) for line in self._of_copies(tp)]
        return any(len({*x}) > 1 for x in checksums)

    def _of_copies(self, tp: Line) -> list[Line]:
        """Return the lines of ranks with the same parameters between steps."""
        groups = [self._groups] if self._groups else []
        return [self.line] * (self.layout.stage < 3) + [tp] * (self.copies > 1) + groups

    def updated(self) -> None:
        """Copy master weights to parameters, and start to make parameters whole that were updated in parts.

        Buckets of the first layers, which the next pass needs first, come first.
        """
        if self.masters is not None:
            for narrow, master in zip(self._updated_parts(), self.masters):
                narrow.copy_(master)
        if self.layout.stage in (1, 2) and self.line.size > 1:
            for bucket in reversed(self.layout.buckets):
                self._coming[bucket.number] = self._gathering(bucket)
                self.line.mesh.transfers.expect([self._coming[bucket.number]])

    def complete(self) -> None:
        """Wait until all parameters are whole that were updated in parts."""
        self.line.mesh.transfers.wait([*self._coming.values()])
        self._coming.clear()

    def buckets(self, names: Sequence[str]) -> list[FlatBucket]:
        """Return the buckets with these parameters; parameters of other storages are ignored."""
        return [*dict.fromkeys(self._bucket_of[name] for name in names if name in self._bucket_of)]

    def is_whole(self, name: str) -> bool:
        """Return whether this rank has all elements of a parameter now; True for those of other storages."""
        wholes = ((bucket.number, self._whole[bucket.number]) for bucket in self.buckets([name]))
        return all(at not in self._coming and x.nbytes <= x.untyped_storage().nbytes() for at, x in wholes)

    def gather(self, names: Sequence[str]) -> None:
        """Make the buckets of these parameters whole: start it with stage 3, and wait.  Collective over the line."""
        for bucket in self.buckets(names):
            whole = self._whole[bucket.number]
            if bucket.number in self._coming:
                self.line.mesh.transfers.wait([self._coming.pop(bucket.number)])
            if self.layout.stage < 3 or whole.untyped_storage().size():
                continue
            whole.untyped_storage().resize_(bucket.words * whole.itemsize)
            self._part_of(bucket, whole).copy_(self._own[bucket.number])
            if self.line.size > 1:
                self.line.mesh.transfers.wait([self._gathering(bucket)])

    def _gathering(self, bucket: FlatBucket) -> Arrival:
        whole, tag = flat_array(self._whole[bucket.number], self.layout.stage == 3), self._tag + 2 * bucket.number + 1
        return self.line.start(self.layout.gathering(bucket), whole, "parameters", tag)

    def free(self, names: Sequence[str]) -> None:
        """Free the buckets of these parameters, with stage 3, until they are gathered again."""
        for bucket in self.buckets(names) if self.layout.stage == 3 else ():
            self._whole[bucket.number].untyped_storage().resize_(0)
