"""Parameters of which each rank keeps its part, and which are whole a bucket or two at a time (ZeRO, stage 3)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.schedules.training.flat_layout import FLIGHT, Bucket, FlatLayout
from pdgemm.transport.movers.arrivals import Arrival


class DividedParameters:
    """Gathers the buckets of a pass one after the other, each while the one before is in use.

    slots  : space for two buckets; None: parameters are not divided.
    gather : function that starts to gather a bucket in its slot, and returns the arrivals to wait for.
    guarded : does an exception of this rank end the passes of all ranks, see `Mesh.raised_together`?

    All ranks gather the same buckets in the same order, whichever parameters they use, also where a pass ends with an
    exception.   begun : how many buckets this rank has begun to gather, and the number of the last one.

    error : what is wrong on this rank with the step in progress, as the use of its parameters; None: nothing.
    """

    def __init__(
        self,
        layout: FlatLayout,
        slots: np.ndarray | None,
        gather: Callable[[Bucket], list[Arrival]],
        wait: Callable[[list[Arrival]], object],
        guarded: Callable[[], object] = lambda: False,
    ) -> None:
        self._layout, self._slots, self._gather, self._wait = layout, slots, gather, wait
        self._guarded, self.begun = guarded, (0, 0)
        self._order: Sequence[Bucket] | None = None  # of the pass in progress
        self._at, self._coming = -1, list[list[Arrival]]()
        self.error: ArgumentError | None = None

    @contextmanager
    def pass_over(self, order: Sequence[Bucket]) -> Iterator[None]:
        """Gather these buckets, neighbours, which take the slots in turn, in this order until the block ends."""
        if self._slots is None:
            yield
            return
        if self._order is not None:
            raise ArgumentError("a pass over the parameters ends before the next one begins")
        self._order, self._at, self._coming = order, -1, []
        self._begin(0)
        try:
            yield
        except Exception:
            if not self._guarded():
                self._complete()  # other ranks gather on, and wait for this one
            raise
        else:
            self._complete()
        finally:
            self._order = None

    def whole(self, bucket: Bucket) -> np.ndarray:
        """Return the parameters of a bucket, after waiting until they are gathered.

        Those of another chunk, or whose slot another bucket has taken, are NaN, with a warning: one rank that raises
        would leave the others waiting, so all of them raise `error` at the end of the step.
        """
        if self._slots is None or self._order is None:
            raise ArgumentError("with stage 3, parameters are whole inside forward() and backward() alone")
        turn = self._order.index(bucket) if bucket in self._order else -1
        if turn < max(0, self._at):
            what = f"are of chunk {bucket.chunk}, and were used in a pass of another one"
            if turn >= 0:
                what = (
                    "were whole earlier in this pass, and later ones have replaced them: use parameters in their "
                    "order, or pass a larger bucket_bytes"
                )
            self.error = ArgumentError(f"parameters {', '.join(bucket.names)} {what}")
            warnings.warn(f"{self.error}; here they are NaN", RuntimeWarning, stacklevel=5)
            return np.full(bucket.words, np.nan, self._slots.dtype)
        while self._at < turn:
            self._advance()
        return self._slots[bucket.number % FLIGHT, : bucket.words]

    def _complete(self) -> None:
        """Gather all buckets that are left of the pass."""
        while self._at < len(self._coming) - 1:
            self._advance()

    def catch_up(self, begun: tuple[int, int]) -> None:
        """Complete a pass that an exception has ended.  Collective over the line.   begun : the most of any rank.

        That is one bucket more at most: a rank waits for a bucket of all ranks before it begins the one after the next.
        """
        for group in self._coming:
            self._wait(group)
        if begun > self.begun:
            self._order, self._coming = [self._layout.buckets[begun[1]]], []
            self._begin(0)
            self._order = None
            self._wait(self._coming[0])

    def _begin(self, turn: int) -> None:
        """Start to gather a bucket, if there are so many."""
        for bucket in (self._order or ())[turn : turn + 1]:
            self.begun = self.begun[0] + 1, bucket.number
            self._coming.append(self._gather(bucket))

    def _advance(self) -> None:
        """Wait for the next bucket, and start to gather the one after it, where the one before was."""
        self._at += 1
        self._wait(self._coming[self._at])
        self._begin(self._at + 1)
