"""Prefetch: a thread that reads the samples of the next steps while this one is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from queue import Empty, Full, Queue
from threading import Event, Thread
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.local.arrays.arguments import as_count
from pdgemm.parallel.mesh import Mesh
from pdgemm.support.agreement import together

_ENDED = 2.0**20  # what a rank without further steps adds to the number of ranks that failed
_NAP = 0.1  # seconds after which the thread looks whether it is to end


class StepSamples(NamedTuple):
    """The samples of a rank in a step.

    rows    : of each microbatch, the numbers of its samples.
    arrays  : of each microbatch, what was read of each source.
    divisor : the number of samples of all ranks that count: the sum of all losses is divided by it, once.
    """

    rows: list[np.ndarray]
    arrays: list[tuple[np.ndarray, ...]]
    divisor: float


class Prefetch:
    """Reads the samples of coming steps in a thread, `depth` steps ahead.

    ::

        with Prefetch(mesh, (images, labels), sampler.shares(mesh, range(300))) as batches:
            for batch in batches:
                ...                                       # collective: the ranks add up their samples

    sources : arrays, memory-mapped .npy files, or HDF5 datasets, whose first dimension is that of samples.  The numbers
        of samples are passed to a source in ascending order, each once, as HDF5 wants them.
    shares  : for each step, the samples of each microbatch of this rank.
    counts  : function of the arrays of a microbatch: how many of its samples, or tokens, count; None: all samples.

    `seconds` is the time that this rank has waited for samples so far.  What fails in the thread of a rank is raised on
    all ranks, in the step that lacks the samples; ArgumentError, where no sample of any rank counts in a step, or some
    ranks have fewer steps than others.
    """

    def __init__(
        self,
        mesh: Mesh,
        sources: Sequence[Any],
        shares: Iterable[list[np.ndarray]],
        *,
        depth: int = 2,
        counts: Callable[..., float] | None = None,
    ) -> None:
        self._mesh, self._counts, self.seconds = mesh, counts, 0.0
        with together(mesh.comm) as arguments:
            self._sources, steps = tuple(sources), iter(shares)
            self._queue: Queue[Any] = Queue(as_count(depth, "depth", 1))
            arguments += ["Prefetch", len(self._sources)]
        mesh.line("dp")  # in a step a rank could fail before it came here, and others would wait for it
        self._end = Event()
        self._thread = Thread(target=self._read, args=(steps,), name="pdgemm-prefetch", daemon=True)

    def __enter__(self) -> Prefetch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def _read(self, shares: Iterator[list[np.ndarray]]) -> None:
        """Put the samples of each step, then None, into the queue; an exception ends the thread, and is put there."""
        item: Any = True
        while item is not None and not self._end.is_set():
            try:
                rows = next(shares, None)
                item = None
                if rows is not None:
                    arrays = [tuple(samples_of(source, some) for source in self._sources) for some in rows]
                    number = sum(self._counts(*x) if self._counts else len(some) for x, some in zip(arrays, rows))
                    item = rows, arrays, float(number)
            except Exception as bad:
                self._put(bad)
                return
            self._put(item)

    def _put(self, item: Any) -> None:
        while not self._end.is_set():
            try:
                return self._queue.put(item, timeout=_NAP)
            except Full:
                continue

    def __iter__(self) -> Iterator[StepSamples]:
        """Yield the samples of each step.  Collective over dp; one small all-reduce a step, and one at the end."""
        while True:
            start = perf_counter()
            item = self._taken()
            self.seconds += perf_counter() - start
            failed, ended = isinstance(item, Exception), item is None
            divisor, failures = self._mesh.sum(0.0 if failed or ended else item[2], failed + _ENDED * ended)
            if failures == _ENDED * self._mesh.shape.dp:
                return
            if failures:
                checks = self._mesh.checks(self._mesh.line("dp"))
                checks.agree(item if failed else None, "Prefetch, no more steps" if ended else "")
            if not 0 < divisor < inf:  # on all ranks, which have the same sum
                raise ArgumentError(f"the samples of a step that count are {divisor:g} on all ranks together")
            yield StepSamples(item[0], item[1], divisor)

    def _taken(self) -> Any:
        if self._thread.ident is None:
            return ArgumentError("samples are read inside of the block `with Prefetch(...) as batches`")
        while True:
            try:
                return self._queue.get(timeout=_NAP)
            except Empty:
                if not self._thread.is_alive() and self._queue.empty():
                    return RuntimeError("the thread that reads samples has ended")


def samples_of(source: Any, rows: np.ndarray) -> np.ndarray:
    """Return these samples of a source, in this order; negative numbers count from its end.  Local."""
    if isinstance(source, np.ndarray):
        return np.asarray(source[rows])
    if (before := np.asarray(rows) < 0).any():  # HDF5 takes no such numbers in a list
        rows = np.where(before, rows + len(source), rows)
    ascending, back = np.unique(rows, return_inverse=True)
    return np.asarray(source[ascending])[back]
