"""ShardedOptimizer: each rank updates its part of the parameters, from its part of the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pdgemm.errors import ArgumentError, LinAlgError, PdgemmError
from pdgemm.local.arrays.arguments import as_real
from pdgemm.matrix.local_arrays import allocated
from pdgemm.parallel.buckets import Buckets
from pdgemm.parallel.layout_choice import STAGE, on_all_lines
from pdgemm.parallel.line_buckets import LineBuckets
from pdgemm.parallel.updates.homes import Choice, Homes, chosen_matrices
from pdgemm.parallel.updates.loss_scale import LossScale
from pdgemm.parallel.updates.muon import Muon
from pdgemm.parallel.updates.rule_states import RulePiece, RuleStates
from pdgemm.parallel.updates.update_rules import UpdateRule, as_rule, described
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

    rule   : `AdamW` or `SGD`, or another `UpdateRule`; or `Muon`, for which each matrix comes to one rank of its stage,
        its home, and goes back, once in a step: the same gradients give the same bits on any mesh.
    scale  : the `LossScale`, for float16; the loss is multiplied by `optimizer.scale.scale`, and `step` divides.
    decays : function of a parameter's name: is its weight decayed?  None: all are.
    matrices : what Muon updates as matrices: names, or a function of the name of a parameter of two or more dimensions,
        of which those behind the first are columns.  None: all of two dimensions, not tied, not divided along ep.  The
        rule `Muon.others` updates all others.

    With stage 1 and more each rank has the state of its part alone; 16-bit parameters have float32 master weights.
    updates : the number of updates so far, without skipped steps.
    bytes   : allocated, by kind, with those of buckets, and of `homes`.
    homes   : the `Homes` of the matrices of this pipeline stage; None: the rule needs none.

    Raises ArgumentError on all ranks.
    """

    def __init__(
        self,
        buckets: Buckets,
        rule: UpdateRule,
        *,
        scale: LossScale | None = None,
        decays: Callable[[str], bool] | None = None,
        matrices: Choice = None,
    ) -> None:
        self.buckets, self.rule, self.scale, self.updates = buckets, rule, scale, 0
        mesh = buckets.mesh
        with together(mesh.comm) as arguments:
            if not isinstance(scale, LossScale | None):
                raise ArgumentError(f"scale is a LossScale, got {scale!r}")
            rules = [as_rule(rule, "rule"), *([rule.others] if isinstance(rule, Muon) else [])]
            if matrices is not None and not isinstance(rule, Muon):
                raise ArgumentError(f"Muon alone updates matrices, and the rule is {rule!r}")
            self._decays = {name: decays is None or bool(decays(name)) for name in buckets.parameters}
            arguments += ["ShardedOptimizer", described(rule), scale]

        def compare(axis: str) -> None:  # stages have other parameters
            with together(mesh.line(axis).comm) as arguments:
                arguments += ["ShardedOptimizer", self._decays]

        on_all_lines(mesh, [STAGE], compare)

        self._matrices, self.homes = dict[str, bool](), None
        if isinstance(rule, Muon):
            self._matrices = chosen_matrices(mesh, buckets.divisions, matrices)
            here = [name for name in buckets.divisions if self._matrices[name]]
            self.homes = Homes(buckets, rule, here)

        def allocate() -> list[RuleStates]:
            number = {name: int(self._rule_of(name) is not rule) for name in buckets.divisions}
            with together(mesh.comm):
                if self.homes:
                    self.homes.allocate()
                return [RuleStates(line, rules, number, self._decays) for line in buckets.lines]

        self._states = allocated(mesh.comm, allocate)  # of each line
        self._at = {name: at for at, line in enumerate(buckets.lines) for name in line.layout.places}

    @property
    def states(self) -> list[np.ndarray]:
        """What rules keep of this rank's parts: for each line, and each rule, (len(rule.kept), elements)."""
        return [x for state in self._states for x in state.arrays]

    @property
    def state_words(self) -> dict[str, int]:
        """The numbers that are kept of each element of each parameter, for `buckets.layouts.bytes`."""
        return {name: len(self._rule_of(name).kept) for name in self.buckets.divisions}

    @property
    def bytes(self) -> dict[str, int]:
        total = dict.fromkeys(("parameters", "gradients", "optimizer", "buffers"), 0)
        for line in self.buckets.lines:
            for kind, size in line.storage.bytes.items():
                total[kind] += size
        total["optimizer"] += sum(x.nbytes for x in self.states)
        return total | ({"homes": self.homes.bytes} if self.homes else {})

    def _rule_of(self, name: str) -> UpdateRule:
        """Return the rule of a parameter of any pipeline stage."""
        return self.rule.others if isinstance(self.rule, Muon) and not self._matrices[name] else self.rule

    def kinds(self, name: str) -> tuple[str, ...]:
        """Return the kinds of numbers that a later run needs of a parameter of any pipeline stage."""
        return "parameters", *self._rule_of(name).kept

    def kept(self, kind: str, name: str) -> np.ndarray:
        """Return what a later run needs of the part of a parameter that this rank updates: a view, not a copy.

        kind : one of `kinds`.
        """
        line, state = self.buckets.lines[self._at[name]], self._states[self._at[name]]
        if kind == "parameters":
            return line.storage.own_masters(line.layout.bucket_of[name])[state.place(name)]
        return state.kept(name)[self._rule_of(name).kept.index(kind)]

    def restore(self, kind: str, name: str, values: np.ndarray) -> None:
        """Set what `kept` returns of one parameter, from the values of this rank's flat part.  Local."""
        line = self.buckets.line_of(name)
        if kind == "parameters":
            self.buckets.set_parameter(name, values)
        elif line is not None:
            elements, _ = line.layout.overlap(name, line.storage.span(line.layout.bucket_of[name]))
            self.kept(kind, name)[...] = values[elements]

    def step(self, rate: float, clip: float | None = None) -> Step:
        """Reduce the gradients, and update the parameters on all ranks.  Collective over the mesh.

        rate : the learning rate, >= 0.   clip : gradients whose norm is larger are scaled to this norm; None: never.

        With a `LossScale`, gradients that overflow on any rank skip the update on all ranks, and halve the scale.
        Without one, and where the scale is the least one, LinAlgError is raised on all ranks, and nothing has changed.
        Raises ArgumentError on all ranks, and names them, where they pass different rates or norms, or are in
        different steps; the gradients are 0 then.
        """
        buckets, scale, error = self.buckets, self.scale, None
        try:
            if (rate := as_real(rate, "rate")) < 0:
                raise ArgumentError(f"rate must be >= 0, got {rate}")
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
            if self.homes:
                self._update_at_homes(self.homes, factor)
            for line, state in zip(buckets.lines, self._states):
                for bucket in line.layout.buckets[::-1]:
                    self._update(line, bucket, state.pieces(bucket), factor, rate)
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

    def _update_at_homes(self, homes: Homes, factor: float) -> None:
        """Overwrite this rank's gradients of matrices by its parts of their updates.  Collective over the stage."""
        rule, parts = homes.rule, list[np.ndarray]()
        for name in homes.names:
            part = np.empty(0, self.buckets.layouts.whole.wide)
            if (line := self.buckets.line_of(name)) is not None:
                state = self._states[self._at[name]]
                part = line.storage.own_gradients(line.layout.bucket_of[name])[state.place(name)]
                if factor != 1:
                    part *= part.dtype.type(factor)
                rule.add_momentum(part, state.kept(name))
            parts.append(part)
        with self.buckets.mesh.raised_together():  # a home may have no memory, and others wait for what it sends
            homes.update(parts)

    def _update(self, line: LineBuckets, bucket: Bucket, pieces: list[RulePiece], factor: float, rate: float) -> None:
        """Update the own part of a bucket, which has these pieces, and start to gather its parts."""
        storage, layout = line.storage, line.layout
        line.wait_for(bucket)  # other ranks have the part of the last update
        parameters, gradients, masters = (
            x(bucket) for x in (storage.own_parameters, storage.own_gradients, storage.own_masters)
        )
        for place, rule, state, decays in pieces:
            x, g = masters[place], gradients[place]
            if factor != 1 and not isinstance(rule, Muon):  # whose updates are of scaled gradients
                g *= g.dtype.type(factor)
            rule.update(x, g, state, self.updates, rate, decays)
        if layout.masters:
            parameters[:] = masters
        if layout.stage in (1, 2):
            line.gather_updated(bucket)
            self.buckets.poll()
