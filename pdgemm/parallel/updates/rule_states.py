"""What rules keep of the parameters that a rank updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from pdgemm.parallel.line_buckets import LineBuckets
from pdgemm.parallel.updates.update_rules import UpdateRule
from pdgemm.schedules.training.flat_layout import Bucket


class RulePiece(NamedTuple):
    """Neighbours in a bucket's part, which a rule updates alike.

    place : in the part that this rank updates of the bucket.   state : (len(rule.kept), so many elements).
    """

    place: slice
    rule: UpdateRule
    state: np.ndarray
    decays: bool


class RuleStates:
    """The state of the parameters of one line on this rank: for each rule an array of those that it updates.  Local.

    rules  : each once.   rule_of : the number of each parameter's rule.   decays : whether its weight is decayed.

    arrays : of each rule, (len(rule.kept), elements) in the order of flat storage.
    """

    def __init__(
        self, line: LineBuckets, rules: Sequence[UpdateRule], rule_of: Mapping[str, int], decays: Mapping[str, bool]
    ) -> None:
        layout, ends = line.layout, [0] * len(rules)
        self._rules, self._rule_of, self._decays = rules, rule_of, decays
        self._places, self._kept = dict[str, slice](), dict[str, slice]()  # in the bucket's part, and in the array
        for bucket in layout.buckets:
            for name in bucket.names:
                _, self._places[name] = layout.overlap(name, line.storage.span(bucket))
                start = ends[rule_of[name]]
                ends[rule_of[name]] += self._places[name].stop - self._places[name].start
                self._kept[name] = slice(start, ends[rule_of[name]])
        self.arrays = [np.zeros((len(rule.kept), n), layout.wide) for rule, n in zip(rules, ends)]
        self._pieces = [[*self._of(bucket)] for bucket in layout.buckets]

    def place(self, name: str) -> slice:
        """Return what this rank updates of a parameter, in its part of the bucket."""
        return self._places[name]

    def kept(self, name: str) -> np.ndarray:
        """Return what is kept of the part of a parameter that this rank updates, (len(rule.kept), elements)."""
        return self.arrays[self._rule_of[name]][:, self._kept[name]]

    def pieces(self, bucket: Bucket) -> list[RulePiece]:
        """Return the pieces of this rank's part of a bucket, none of them empty."""
        return self._pieces[bucket.number]

    def _of(self, bucket: Bucket) -> list[RulePiece]:
        alike = list[list[str]]()
        for name in bucket.names:
            if self._places[name].start < self._places[name].stop:
                if alike and self._kind(alike[-1][0]) == self._kind(name):
                    alike[-1].append(name)
                else:
                    alike.append([name])
        pieces = list[RulePiece]()
        for names in alike:
            place, kept = (slice(x[names[0]].start, x[names[-1]].stop) for x in (self._places, self._kept))
            rule, decays = self._kind(names[0])
            pieces.append(RulePiece(place, self._rules[rule], self.arrays[rule][:, kept], decays))
        return pieces

    def _kind(self, name: str) -> tuple[int, bool]:
        return self._rule_of[name], self._decays[name]
