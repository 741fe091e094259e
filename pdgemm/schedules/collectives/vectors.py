"""Reductions of a matrix to a number, or to a vector over its columns or rows, which all ranks receive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, zip_longest

import numpy as np

from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.grids.layout import Layout
from pdgemm.instrument.recorder import Traffic
from pdgemm.schedules.collectives.collective import Collective
from pdgemm.schedules.rounds import Round
from pdgemm.schedules.schedule import Buffers, RankMap, Schedule
from pdgemm.support.members import remembered

_STAGE_BYTES = 1 << 25  # the buffer of one stage of an all-gather of a matrix


@dataclass(frozen=True)
class SideBySide:
    """Collectives that run at the same time on disjoint sets of ranks, such as one in each grid column."""

    parts: tuple[Collective, ...]

    @cached_property
    def by_rank(self) -> dict[int, Collective]:
        return {rank: part for part in self.parts for rank in part.ranks}

    def of(self, rank: int) -> Collective | None:
        """Return the collective in which a rank takes part."""
        return self.by_rank.get(rank)

    def rounds(self) -> Iterator[Round]:
        for rounds in zip_longest(*(part.rounds() for part in self.parts)):
            together = [at for at in rounds if at]
            moves, work = ([x for at in together for x in getattr(at, name)] for name in ("moves", "work"))
            yield Round(moves, work, hidden=False)


@dataclass(frozen=True)
class ToAllRanks(Schedule):
    """Collectives, stage after stage, after which all ranks have a number, a vector, or all elements of a matrix."""

    stages: tuple[SideBySide, ...]
    algorithm = "to all ranks"
    lookahead = 0

    @remembered
    def traffic(self, rank: int) -> Traffic:
        parts = [stage.of(rank) for stage in self.stages]
        return sum((part.traffic(rank) for part in parts if part), Traffic())

    @property
    def grid(self) -> RankMap:
        return RankMap.of_line(range(1 + max(max(stage.by_rank, default=0) for stage in self.stages)))

    @property
    def panel_dtype(self) -> np.dtype:
        parts = self.stages[0].parts
        return parts[0].dtype if parts else np.dtype(float)

    @property
    def events(self) -> int:
        return sum(max((part.events for part in stage.parts), default=0) for stage in self.stages)

    def rounds(self) -> Iterator[Round]:
        return chain.from_iterable(stage.rounds() for stage in self.stages)

    def buffers(self, rank: int | None) -> Buffers:
        return {}  # none: the collectives overwrite the result

    def described(self, name: str) -> tuple[str, str]:
        return name, self.algorithm


def members(dimension: BlockCyclic) -> list[int]:
    """Return the parts of a dimension that own at least one index."""
    return [part for part in range(dimension.parts) if dimension.count(part)]


@lru_cache(maxsize=256)
def reduction_stages(
    layout: Distribution, rank_map: tuple[int, ...], size: int, axis: int | None, arrays: int, dtype: np.dtype
) -> ToAllRanks:
    """Return the collectives of a reduction, stage by stage.

    rank_map : the ranks of the grid positions, row by row; the others of the `size` ranks are idle, and get the result.
    axis     : 0: reduce each column, 1: each row, None: all elements.
    arrays   : number of values that are reduced for each column (row).

    With axis 0, the ranks of a grid column reduce up a tree, always in the same order, and broadcast the result; then
    the ranks of each grid row all-gather the results of the grid columns.  At the end the idle ranks get the result.
    """
    ranks = np.array(rank_map).reshape(layout.grid_shape)
    idle = sorted({*range(size)} - {*rank_map})

    def tree(operation: str, taking_part: Iterable[int], length: int) -> Collective:
        those = tuple(map(int, taking_part))
        return Collective(operation, "tree", those, (length,) + (0,) * (len(those) - 1), dtype, arrays=arrays)

    if axis is None:
        owners = ranks[np.ix_(members(layout.rows), members(layout.cols))].ravel().tolist()
        everyone = [*owners, *sorted({*range(size)} - {*owners})]
        return ToAllRanks((SideBySide((tree("reduce", owners, 1),)), SideBySide((tree("broadcast", everyone, 1),))))
    reduced, kept = (layout.rows, layout.cols) if axis == 0 else (layout.cols, layout.rows)
    ranks = ranks if axis == 0 else ranks.T
    owners, counts = members(reduced), tuple(kept.count(j) for j in range(kept.parts))
    first = [*owners, *sorted({*range(reduced.parts)} - {*owners})]
    up = (tree("reduce", ranks[owners, j], n) for j, n in enumerate(counts) if n)
    down = (tree("broadcast", ranks[first, j], n) for j, n in enumerate(counts) if n)
    across = (Collective("all_gather", "bruck", tuple(row), counts, dtype, arrays=arrays) for row in ranks.tolist())
    to_idle = (tree("broadcast", (rank_map[0], *idle), kept.n),) if idle else ()
    return ToAllRanks(tuple(SideBySide(tuple(parts)) for parts in (up, down, across, to_idle)))


@lru_cache(maxsize=64)
def gathering(layout: Layout, size: int) -> tuple[ToAllRanks, int]:
    """Return the schedule of an all-gather of a matrix, and the number of local rows that a rank sends in one stage."""
    return matrix_gather(layout, size, _STAGE_BYTES // layout.dtype.itemsize)


def matrix_gather(layout: Layout, size: int, most: int) -> tuple[ToAllRanks, int]:
    """Return the all-gather of a matrix over `size` ranks, and the number of local rows that a rank sends in one stage.

    most : most words of one stage, but a stage sends at least one row of each rank.
    """
    (pr, _), distribution = layout.distribution.grid_shape, layout.distribution
    shapes = [distribution.local_shape(layout.coords(rank)) for rank in range(size)]
    height = max(1, most // max(1, pr * distribution.shape[1]))
    stages = [
        [max(0, min(height, rows - start)) * cols for rows, cols in shapes]
        for start in range(0, max(1, *(rows for rows, _ in shapes)), height)
    ]
    ranks = tuple(range(size))
    collectives = (Collective("all_gather", "bruck", ranks, tuple(counts), layout.dtype) for counts in stages)
    return ToAllRanks(tuple(SideBySide((x,)) for x in collectives)), height


@lru_cache(maxsize=64)
def diagonal_gather(layout: Layout, size: int, offset: int, length: int) -> tuple[ToAllRanks, np.ndarray]:
    """Return the all-gather of a diagonal over `size` ranks, and the positions on the diagonal in gathered order."""
    at, ranks, dimensions = np.arange(length), np.array(layout.rank_map), layout.distribution
    i, j = dimensions.rows.owner(at + max(0, -offset)), dimensions.cols.owner(at + max(0, offset))
    owner = ranks.reshape(dimensions.grid_shape)[i, j]
    counts = np.bincount(owner, minlength=size).tolist()
    gather = Collective("all_gather", "bruck", (*range(size),), (*counts,), layout.dtype)
    return ToAllRanks((SideBySide((gather,)),)), np.argsort(owner, kind="stable")


@lru_cache(maxsize=64)
def vector_to_all(size: int, words: int, dtype: np.dtype, sums: bool) -> ToAllRanks:
    """Return the broadcast of rank 0's vector to `size` ranks; if `sums`, the all-reduce of the ranks' vectors."""
    trees = (
        Collective(operation, "tree", (*range(size),), (words,) + (0,) * (size - 1), dtype)
        for operation in ("reduce", "broadcast")[1 - sums :]
    )
    return ToAllRanks(tuple(SideBySide((x,)) for x in trees))
