"""ShardedOptimizer: each rank updates its part of the parameters, from its part of the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pdgemm.errors import ArgumentError, LinAlgError, PdgemmError
from pdgemm.matrix.argument_checks import as_real
from pdgemm.matrix.local_arrays import allocated
from pdgemm.parallel.buckets import Buckets
from pdgemm.parallel.layout_choice import STAGE, on_all_lines
from pdgemm.parallel.line_buckets import LineBuckets
from pdgemm.parallel.updates.loss_scale import LossScale
from pdgemm.parallel.updates.update_rules import UpdateRule
from pdgemm.schedules.training.flat_layout import Bucket
from pdgemm.support.agreement import together


class Step(NamedTuple):
    """What a step did.   norm : of all gradients, before clipping.   skipped : they overflowed, and nothing changed."""

    norm: float
    skipped: bool


class ShardedOptimizer:
    """Updates the parameters of `buckets` by a rule.  Collective over the mesh.

    ::

        optimizer = ShardedOptimizer(buckets, AdamW(), scale=LossScale())
        ...                                             # gradients of optimizer.scale.scale times the loss
        step = optimizer.step(rate=1e-3, clip=1.0)

    rule   : `AdamW` or `SGD`, or another `UpdateRule`.
    scale  : the `LossScale`, for float16; the loss is multiplied by `optimizer.scale.scale`, and `step` divides.
    decays : function of a parameter's name: is its weight decayed?  None: all are.

    With stage 1 and more each rank has the state of its part alone; 16-bit parameters have float32 master weights.
    updates : the number of updates so far, without skipped steps.   bytes : allocated, by kind, with those of buckets.
    """

    def __init__(
        self,
        buckets: Buckets,
        rule: UpdateRule,
        *,
        scale: LossScale | None = None,
        decays: Callable[[str], bool] | None = None,
    ) -> None:
        self.buckets, self.rule, self.scale, self.updates = buckets, rule, scale, 0
        mesh = buckets.mesh
        with together(mesh.comm) as arguments:
            if not isinstance(scale, LossScale | None):
                raise ArgumentError(f"scale is a LossScale, got {scale!r}")
            self._decays = {name: decays is None or bool(decays(name)) for name in buckets.parameters}
            arguments += ["ShardedOptimizer", rule, scale]

        def compare(axis: str) -> None:  # stages have other parameters
            with together(mesh.line(axis).comm) as arguments:
                arguments += ["ShardedOptimizer", self._decays]

        on_all_lines(mesh, [STAGE], compare)

        def allocate() -> list[np.ndarray]:
            with together(mesh.comm):
                words = [x.layout.owned(x.index) if x.layout.stage else x.layout.words for x in buckets.lines]
                return [np.zeros((len(rule.kept), n), buckets.layouts.whole.wide) for n in words]

        self.states = allocated(mesh.comm, allocate)  # of each line

    @property
    def bytes(self) -> dict[str, int]:
        total = dict.fromkeys(("parameters", "gradients", "optimizer", "buffers"), 0)
        for line, state in zip(self.buckets.lines, self.states):
            for kind, size in line.storage.bytes.items():
                total[kind] += size
            total["optimizer"] += state.nbytes
        return total

    def kept(self, kind: str, bucket: Bucket) -> np.ndarray:
        """Return what a later run needs of the part of a bucket that this rank updates: a view, not a copy.

        kind : one of `kinds`.
        """
        at, line = next((at, x) for at, x in enumerate(self.buckets.lines) if bucket.names[0] in x.layout.places)
        if kind == "parameters":
            return line.storage.own_masters(bucket)
        return self.states[at][self.rule.kept.index(kind), line.storage.place(bucket)]

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of numbers that a later run needs of each parameter."""
        return "parameters", *self.rule.kept

    def restore(self, kind: str, name: str, values: np.ndarray) -> None:
        """Set what `kept` returns of one parameter, from the values of this rank's flat part.  Local."""
        line = self.buckets.line_of(name)
        if kind == "parameters":
            self.buckets.set_parameter(name, values)
        elif line is not None:
            bucket = line.layout.bucket_of[name]
            elements, place = line.layout.overlap(name, line.storage.span(bucket))
            self.kept(kind, bucket)[place] = values[elements]

    def step(self, rate: float, clip: float | None = None) -> Step:
        """Reduce the gradients, and update the parameters on all ranks.  Collective over the mesh.

        rate : the learning rate.   clip : gradients whose norm is larger are scaled to this norm; None: never.

        With a `LossScale`, gradients that overflow on any rank skip the update on all ranks, and halve the scale.
        Without one, and where the scale is the least one, LinAlgError is raised on all ranks, and nothing has changed.
        Raises ArgumentError on all ranks, and names them, where they pass different rates or norms, or are in
        different steps; the gradients are 0 then.
        """
        buckets, scale, error = self.buckets, self.scale, None
        try:
            rate = as_real(rate, "rate")
            clip = None if clip is None else as_real(clip, "clip", above=0)
        except PdgemmError as bad:  # the other ranks wait for the gradients of this one
            error = bad
        same = f"ShardedOptimizer.step, rate {rate}, clip {clip}, step {self.updates + 1}, {scale}"
        with buckets.timed("reduce"):
            reduced = buckets.finish(error, same)
        if reduced.overflow and (not scale or scale.scale <= scale.least):
            self._not_finite()
        if scale:
            self.scale = scale.after(reduced.overflow)
        if reduced.overflow:
            buckets.clear()
            return Step(float("inf"), True)
        norm = reduced.norm / (scale.scale if scale else 1.0)
        factor = (1.0 / scale.scale if scale else 1.0) * (min(1.0, clip / norm) if clip and norm else 1.0)
        self.updates += 1
        with buckets.timed("optimizer"), np.errstate(over="ignore"):  # of a part, of which one rank alone would warn
            for line, state in zip(buckets.lines, self.states):
                for bucket in line.layout.buckets[::-1]:
                    self._update(line, bucket, state[:, line.storage.place(bucket)], factor, rate)
            for line in buckets.lines:
                for bucket in () if line.layout.gathers_late else line.layout.buckets[::-1]:
                    line.wait_for(bucket)
            buckets.clear()
        return Step(norm, False)

    def _not_finite(self) -> None:
        """Raise LinAlgError on all ranks, which names the gradients that are no numbers."""
        buckets, mesh = self.buckets, self.buckets.mesh
        numbers = {name: at for at, name in enumerate(buckets.parameters)}
        own = [(mesh.index("pp"), numbers[name], name) for x in buckets.lines for name in x.storage.not_finite()]
        bad = [*dict.fromkeys(name for _, _, name in sorted(x for some in mesh.comm.allgather(own) for x in some))]
        others = f" and {len(bad) - 1} others" if bad[1:] else ""
        what = (
            f"gradient of {bad[0]!r}{others} is NaN or" if bad else "norm of the gradients, whose squares overflow, is"
        )
        buckets.clear()
        raise LinAlgError(f"the {what} infinite in step {self.updates + 1}: nothing was changed")

    def _update(self, line: LineBuckets, bucket: Bucket, kept: np.ndarray, factor: float, rate: float) -> None:
        """Update the own part of a bucket, of which `kept` is the state, and start to gather its parts."""
        storage, layout = line.storage, line.layout
        line.wait_for(bucket)  # other ranks have the part of the last update
        parameters, gradients = storage.own_parameters(bucket), storage.own_gradients(bucket)
        if factor != 1:
            gradients *= gradients.dtype.type(factor)
        masters = storage.own_masters(bucket)
        decays = [self._decays[name] for name in bucket.names]
        pieces = [(slice(0, len(masters)), True)]
        if not all(decays):
            span = storage.span(bucket)
            pieces = [(layout.overlap(name, span)[1], decayed) for name, decayed in zip(bucket.names, decays)]
        for place, decayed in pieces:
            x, g, state = masters[place], gradients[place], kept[:, place]
            self.rule.update(x, g, state, self.updates, rate, decayed)
        if layout.masters:
            parameters[:] = masters
        if layout.stage in (1, 2):
            line.gather_updated(bucket)
            self.buckets.poll()
