"""Matrices whose parts many ranks update, and which each come together on one rank, their home, and go back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from pdgemm.instrument.recorder import Traffic
from pdgemm.local.blas.orthogonal_stacks import work_words
from pdgemm.schedules.collectives.collective import Collective
from pdgemm.schedules.dealing import balance
from pdgemm.support.remembered import remembered


class HeldPart(NamedTuple):
    """What a rank updates of a matrix: elements `start` to `stop` of its window, row by row; none where they are equal.

    window : the first index of each dimension that the rank has, and the one behind the last.
    line   : a number for the ranks that together update each element of the window once, or each of them the whole.
    """

    window: tuple[tuple[int, int], ...]
    start: int
    stop: int
    line: int

    @property
    def words(self) -> int:
        return self.stop - self.start

    @property
    def place(self) -> tuple[slice, ...]:
        """The window in the whole matrix."""
        return tuple(slice(*ends) for ends in self.window)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the window."""
        return tuple(stop - start for start, stop in self.window)


@dataclass(frozen=True, eq=False)
class HomeLoads:
    """What each rank updates of matrices, and what this makes of it as a home: words and bytes of all ranks.

    shapes : (rows, columns) of each whole matrix.
    parts  : (kinds, ranks), the elements that each rank updates of a matrix of each kind; of a home those come from
        itself.
    kinds  : the kind of each matrix: matrices of equal layers are of few kinds.
    dtype  : of the words.
    """

    shapes: tuple[tuple[int, int], ...]
    parts: np.ndarray
    kinds: np.ndarray
    dtype: np.dtype

    @property
    def ranks(self) -> int:
        return int(self.parts.shape[1])

    @property
    def own(self) -> np.ndarray:
        """The elements that each rank updates of each matrix, (matrices, ranks)."""
        return self.parts[self.kinds]

    @cached_property
    def _whole(self) -> _Homes:
        return _homes(self.shapes, self.ranks, self.dtype)

    @property
    def homes(self) -> np.ndarray:
        """The rank of each matrix, by the flops of X X^T."""
        return self._whole.ranks

    def of_homes(self, values: Sequence[float] | np.ndarray) -> np.ndarray:
        """Return the sum on each rank of a value of each matrix of which it is the home."""
        return _sums(self.homes, values, self.ranks)

    @cached_property
    def updated(self) -> np.ndarray:
        """The elements that each rank updates."""
        return np.bincount(self.kinds, minlength=len(self.parts)) @ self.parts

    @cached_property
    def least_updated(self) -> int:
        """The elements that the rank with the fewest updates."""
        return int(self.updated.min())

    @cached_property
    def received(self) -> np.ndarray:
        """The words that each rank receives in a step: those of `HomeExchange.traffic`.

        A rank that updates T elements, H of them of its own N as a home, receives N - H words, and then T - H.
        """
        at_home = self.parts[self.kinds, self.homes]
        return self.updated + self._whole.words - 2 * self.of_homes(at_home)

    @cached_property
    def buffers(self) -> dict[str, np.ndarray]:
        """The words of the buffers of each rank.

        sent, arrived : of the larger one of the two exchanges, with what stays on the rank.   matrices : whole ones.
        work : of `orthogonal_factors`.
        """
        return {
            "sent": np.maximum(self.updated, self.of_homes(self.parts.sum(axis=1)[self.kinds])),
            "arrived": np.maximum(self.updated, self._whole.words),
            "matrices": self._whole.words,
            "work": self._whole.work,
        }

    @cached_property
    def bytes(self) -> np.ndarray:
        """The bytes of the buffers of each rank."""
        return self.dtype.itemsize * sum(self.buffers.values(), np.zeros(self.ranks, np.int64))

    @cached_property
    def most_bytes(self) -> int:
        """The bytes of the buffers of the rank with the most."""
        return int(self.bytes.max())


class _Homes(NamedTuple):
    """What hinges on the shapes of matrices and the number of ranks alone.

    ranks : the home of each matrix.   words, work : of each rank, see `HomeLoads.buffers`.
    """

    ranks: np.ndarray
    words: np.ndarray
    work: np.ndarray


@lru_cache(maxsize=64)  # a search divides the matrices of a stage in many ways, and all have these homes
def _homes(shapes: tuple[tuple[int, int], ...], ranks: int, dtype: np.dtype) -> _Homes:
    """Return the homes of matrices, as arrays that cannot be changed."""
    wide = [(min(x), max(x)) for x in shapes]
    homes = balance([(m, m, n) for m, n in wide], ranks)
    work = np.zeros(ranks, np.int64)
    for m, n in dict.fromkeys(wide):
        stacked = _sums(homes, [x == (m, n) for x in wide], ranks)
        np.maximum(work, [work_words(int(x), m, n, dtype) for x in stacked], out=work)
    results = _Homes(homes, _sums(homes, np.array([m * n for m, n in wide], np.int64), ranks), work)
    for x in results:
        x.flags.writeable = False
    return results


def _sums(homes: np.ndarray, values: Sequence[float] | np.ndarray, ranks: int) -> np.ndarray:
    """Return the sum of the values of the matrices of each rank."""
    sums = np.zeros(ranks, np.int64 if np.asarray(values).dtype.kind in "bi" else float)
    np.add.at(sums, homes, values)
    return sums


@dataclass(frozen=True)
class HomeExchange:
    """One exchange of parts of matrices to their homes, and one of all updated parts back.

    ranks : of a pipeline stage, along dp, cp and tp; they are numbered from 0.
    homes : the rank of each matrix.
    held  : for each matrix, what each rank updates of it.
    dtype : of the words that are sent.

    Each element of a matrix comes once to its home, from the rank nearest to it where several have the same ones: as
    with stage 0, and with parameters that are whole along tp.  All ranks get back what they update.  So for N elements
    of matrices, of which each rank updates other ones, as many on each of h ranks, all ranks together receive
    2 N (h-1)/h words; and for any sizes 2 (N - H), where homes update H elements of their own matrices.
    """

    ranks: int
    homes: tuple[int, ...]
    held: tuple[tuple[HeldPart, ...], ...]
    dtype: np.dtype

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """For each matrix, the ranks whose parts come to its home."""
        return tuple(self._sources(home, parts) for home, parts in zip(self.homes, self.held))

    def _sources(self, home: int, parts: tuple[HeldPart, ...]) -> tuple[int, ...]:
        """Return the ranks of which parts make up a matrix: for each window those of the line nearest to the home."""
        ranks = list[int]()
        for window in dict.fromkeys(x.window for x in parts if prod(x.shape)):
            near = min((at for at, x in enumerate(parts) if x.window == window), key=lambda at: (abs(at - home), at))
            whole = parts[near].words == prod(parts[near].shape)
            line = [at for at, x in enumerate(parts) if (x.window, x.line) == (window, parts[near].line) and x.words]
            ranks += [near] if whole else line
        return tuple(sorted(ranks))

    @remembered
    def routes(self, back: bool) -> dict[tuple[int, int], list[int]]:
        """Return the matrices of which parts go to homes, or back, by source and target, which may be one rank."""
        routes = defaultdict[tuple[int, int], list[int]](list)
        for at, (home, parts, sources) in enumerate(zip(self.homes, self.held, self.sources)):
            for rank in range(self.ranks) if back else sources:
                if parts[rank].words:
                    routes[(home, rank) if back else (rank, home)].append(at)
        return dict(routes)

    @remembered
    def exchange(self, back: bool) -> Collective:
        """Return the exchange of all ranks to the homes, or back: parts of matrices one after the other."""
        counts = np.zeros((self.ranks, self.ranks), int)
        for (source, target), matrices in self.routes(back).items():
            counts[source, target] = sum(self.held[at][target if back else source].words for at in matrices)
        ranks = tuple(range(self.ranks))
        return Collective("all_to_all", "pairwise", ranks, tuple(counts.ravel().tolist()), self.dtype)

    def traffic(self, rank: int) -> Traffic:
        """Return the words and messages of a rank in a step, there and back."""
        return sum((self.exchange(back).traffic(rank) for back in (False, True)), Traffic())
