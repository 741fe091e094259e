"""A product in tiles, as a value: what is read and written when, and what it takes of memory.  No MPI, no data.

C is computed in tiles of `rows x cols`.  While a tile is in memory, all panels of A (rows x width) and B (width x cols)
are read one after the other, each while the one before is multiplied, and are forgotten.  With S elements in the memory
of all ranks together, a square tile of nearly S elements makes the least reading, 2 mnk / sqrt(S) elements (Hong &
Kung, STOC 1981; the constant by Kwasniewski et al., SC 2019).

The order is a walk without jumps, first through the columns of C, then through its rows, each time in the direction
opposite to the last, and so within a tile through the inner indices: a panel that the next step needs again is still
there.  If A and B fit one panel in the inner dimension, the panel of A stays for a whole row of tiles.

What an earlier job has done of it is left out of the walk.  A job that goes on with less memory cuts tiles and panels
into parts, so that their ends stay ends of tiles and panels.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from math import prod, sqrt
from typing import Any, NamedTuple

import numpy as np

from pdgemm.support.text import counted, in_bytes

Range = tuple[int, int]  # the first index, and the one after the last
STAGED = 1 << 20  # bytes of a panel or a tile that are converted at once on their way
_SLABS = 4  # parts of a tile, by rows, of which one is written while the next is multiplied
_LEAST = 64  # rows and columns of a slab on a rank
_RUN = 1 << 15  # bytes that could be read in the time that a contiguous piece takes beside its bytes
_BUFFERED = 32  # panels of one column or row in the buffers of a product
_CALL = 1 << 24  # in that of a step beside reading and multiplying
_FLOPS = 32  # floating-point operations of a rank in the time in which a byte is read
_THIN = 32  # a product of a matrix with so many rows, columns or inner indices takes twice the time of its operations
_THICK = 256  # inner indices of a panel that is not made thinner so that steps become shorter


class Operand(NamedTuple):
    """op(A) or op(B) as the tiling sees it.

    stored : bytes of an element in the file.   held : in memory.
    unit   : rows and columns of op(X) that are read together, those of a chunk.
    by_columns : whether the elements of a column of op(X) are contiguous in the file, as where op is a transposition.
    chunk  : bytes of a chunk, which is in memory as a whole while a part of it is read.
    """

    stored: int
    held: int
    unit: tuple[int, int] = (1, 1)
    by_columns: bool = False
    chunk: int = 0


class Part(NamedTuple):
    """A part of C of which only some inner indices are done.

    done : these indices, the first or the last of all.   file : that holds the sums, and nothing else of C.
    """

    rows: Range
    cols: Range
    done: Range
    file: str

    def holds(self, rows: Range, cols: Range) -> bool:
        """Return whether this tile is in the part."""
        return all(x[0] <= y[0] and y[1] <= x[1] for x, y in ((self.rows, rows), (self.cols, cols)))


@dataclass(frozen=True)
class TileStep:
    """One product C[rows, cols] += A[rows, inner] B[inner, cols].

    tile   : its number in the rows and columns of tiles.
    reads  : whether the panels of A and of B are to be read; else those of the last step are still there.
    first, last : of this tile of C in this job.
    part   : that holds the sums of the tile so far, if this is the first step and there are some.
    done   : the inner indices that are done of the tile after this step.
    """

    tile: tuple[int, int]
    rows: Range
    cols: Range
    inner: Range
    reads: tuple[bool, bool]
    first: bool
    last: bool
    part: Part | None
    done: Range


@dataclass(frozen=True)
class Tiling:
    """C (m x n) := A (m x k) B (k x n) in tiles, on a process grid.

    counts : tiles in the rows and columns of C, and panels in the inner dimension.  While one is chosen, arrays of
             numbers: bytes and costs are then those of as many tilings.
    held   : bytes of an element of the tile in memory.   stored : of C in its file.   entry : of C on entry.
    They are 0 where C lies elsewhere, and the bytes of an operand that lies elsewhere are, too.
    finished, parts : tiles, and parts of others, that an earlier job has done.
    protect : how products are compared with checksums ("detect", "repair", or "").
    """

    mnk: tuple[int, int, int]
    grid: tuple[int, int]
    a: Operand
    b: Operand
    held: int
    stored: int
    entry: int
    counts: tuple[int, int, int]
    finished: frozenset[tuple[int, int]] = frozenset()
    parts: tuple[Part, ...] = ()
    protect: str = ""

    # ------------------------------------------------------------------ pieces
    @cached_property
    def cuts(self) -> tuple[list[Range], list[Range], list[Range]]:
        """The tiles' rows and columns, and the panels' inner indices."""
        return tuple(_cut(*x) for x in zip(self.mnk, self.counts, self._units))  # type: ignore[return-value]

    @cached_property
    def largest(self) -> tuple[int, int, int]:
        """The most rows, columns and inner indices of a step."""
        return tuple(
            _least(n, unit * -((-n // unit) // parts)) for n, parts, unit in zip(self.mnk, self.counts, self._units)
        )

    @property
    def _units(self) -> tuple[int, int, int]:
        return self.a.unit[0], self.b.unit[1], max(self.a.unit[1], self.b.unit[0])

    @property
    def slabs(self) -> int:
        """Parts of a tile, by rows, of which one is written while the next is multiplied."""
        return _most(1, _least(_SLABS, self.largest[0] // (self.grid[0] * _LEAST))) if self.held else 1

    @property
    def blocks(self) -> tuple[int, int, int, int]:
        """The blocks of the largest tile and panels: rows of A and C, columns of B and C, columns of A, rows of B."""
        (rows, cols, inner), (pr, pc), a, b = self.largest, self.grid, self.a.unit, self.b.unit
        tile = _block(rows, pr * self.slabs, a[0]), _block(cols, pc, b[1])
        return *tile, _block(inner, pc, a[1]), _block(inner, pr, b[0])

    @property
    def numbers(self) -> tuple[int, int, int]:
        """How many `cuts` there are of each kind."""
        return tuple(  # type: ignore[return-value]
            min(parts, max(1, -(-n // unit))) for n, parts, unit in zip(self.mnk, self.counts, self._units)
        )

    @cached_property
    def count(self) -> int:
        """How many steps there are."""
        return sum(1 for _ in self.steps()) if self._resumed else prod(self.numbers)

    @property
    def _resumed(self) -> bool:
        return bool(self.finished or self.parts)

    def steps(self) -> Iterator[TileStep]:
        """Yield the steps in their order."""
        rows, cols, inner = self.cuts
        before: tuple[tuple[int, int], tuple[int, int]] | None = None
        number = 0
        for i in range(len(rows)):
            for j in range(len(cols)) if i % 2 == 0 else reversed(range(len(cols))):
                down, number = number % 2 == 0, number + 1
                if (i, j) in self.finished:
                    continue
                part = next((x for x in self.parts if x.holds(rows[i], cols[j])), None)
                order = list(range(len(inner)))
                if part is not None:  # go on in the same direction
                    down = part.done[0] == 0
                    order = [l for l in order if not part.done[0] <= inner[l][0] < part.done[1]]
                for l in order if down else reversed(order):
                    now = (i, l), (l, j)
                    reads = (True, True) if before is None else (now[0] != before[0], now[1] != before[1])
                    if not inner[l][1] - inner[l][0]:  # nothing is multiplied
                        reads = False, False
                    first, last = (order[0], order[-1]) if down else (order[-1], order[0])
                    sums, done = part if l == first else None, (0, inner[l][1]) if down else (inner[l][0], self.mnk[2])
                    yield TileStep((i, j), rows[i], cols[j], inner[l], reads, l == first, l == last, sums, done)
                    before = now

    def resumed(
        self, counts: tuple[int, int, int], finished: frozenset[tuple[int, int]], parts: tuple[Part, ...]
    ) -> Tiling:
        """Return the tiling for what an earlier job, whose tiles and panels were so many, has left to be done."""
        old = replace(self, counts=counts).cuts
        rows, cols = ([bisect_right([x for x, _ in old[d]], first) - 1 for first, _ in self.cuts[d]] for d in (0, 1))
        there = product(range(len(rows)), range(len(cols)))
        return replace(
            self, finished=frozenset((i, j) for i, j in there if (rows[i], cols[j]) in finished), parts=parts
        )

    # ------------------------------------------------------------------ costs
    @property
    def loads(self) -> tuple[int, int]:
        """How many panels of A and of B are read."""
        ti, tj, tl = self.counts
        if not self.mnk[2]:
            return 0, 0
        return ti * (tj * tl - (tj - 1)), ti * tj * tl - (ti - 1)

    @cached_property
    def bytes_read(self) -> int:
        """Bytes of A, B and C on entry, or its sums so far, that all ranks read: of all steps without what is there.

        There are the last panel of A before the next tile of the same rows, and that of B before the next rows.
        """
        if self._resumed:
            return sum(self._read(step) for step in self.steps())
        (m, n, k), (ti, tj, _) = self.mnk, self.numbers
        _, cols, inner = (_ends(*x) for x in zip(self.mnk, self.counts, self._units))
        last = inner[-1], inner[0]  # of an even, of an odd tile in the order of the steps
        kept_a = m * (tj // 2 * last[0] + (tj - 1 - tj // 2) * last[1])
        kept_b = ti // 2 * cols[-1] * last[(tj - 1) % 2] + (ti - 1) // 2 * cols[0] * last[1]
        read = self.a.stored * (tj * m * k - kept_a) + self.b.stored * (ti * n * k - kept_b)
        return read + self.entry * m * n

    def _read(self, step: TileStep) -> int:
        """Return the bytes that a step reads."""
        rows, cols, inner = (end - first for first, end in (step.rows, step.cols, step.inner))
        a, b = step.reads
        of_c = (self.held if step.part else self.entry) if step.first else 0
        return a * self.a.stored * rows * inner + b * self.b.stored * inner * cols + of_c * rows * cols

    @property
    def bytes_written(self) -> int:
        area = self.mnk[0] * self.mnk[1]
        if self.finished:
            rows, cols, _ = ([end - first for first, end in cuts] for cuts in self.cuts)
            area -= sum(rows[i] * cols[j] for i, j in self.finished)
        return self.stored * area

    @property
    def most_bytes(self) -> int:
        """The most bytes of a rank: a tile, one or two panels of each operand, and what is converted on its way."""
        rows, cols, a_inner, b_inner = self._local
        panels = self.a.held * rows * a_inner, self.b.held * b_inner * cols
        kept = sum(size * _least(2, loads) for size, loads in zip(panels, self.loads))
        return self.held * rows * cols + kept + 2 * (STAGED + self.a.chunk + self.b.chunk)

    @property
    def all_bytes(self) -> int:
        """The same with the least that products of panels take for messages, converted elements and checksums.

        Those are vectors, and a copy of the tile from which a product is repeated.
        """
        (height, _, inner), (rows, cols, _, b_inner) = self.largest, self._local
        vectors = 2 * inner + 3 * height + 2 * rows + b_inner if self.protect else 0
        copied = rows * cols if self.protect == "repair" else 0
        return self.most_bytes + self.held * (_BUFFERED * (rows + cols) + copied) + max(8, self.held) * vectors

    @property
    def _local(self) -> tuple[int, int, int, int]:
        """The most rows and columns of C, and inner indices of A and of B, that a rank has."""
        rows, cols, a_inner, b_inner = self.blocks
        m, n, k = self.largest
        return _least(m, rows * self.slabs), _least(n, cols), _least(k, a_inner), _least(k, b_inner)

    def as_dict(self, memory: int) -> dict[str, Any]:
        """Return the plan as plain figures."""
        return {
            "memory": memory,
            "tiles": [*self.numbers],
            "tile": self.largest[:2],
            "panel_width": self.largest[2],
            "bytes_per_rank": self.most_bytes,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "bytes_checked": self.stored * self.mnk[0] * self.mnk[1],  # C is read again, and compared
            "lower_bound_bytes": self.bound(memory),
        }

    def explain(self, memory: int) -> str:
        """Return the plan in a sentence or two."""
        ti, tj, tl = self.numbers
        every, bound = self.bytes_read + self.bytes_written, self.bound(memory)
        tiles, panels = counted(ti * tj, "tile"), counted(tl, "panel")
        return (
            f"{tiles} of C of at most {self.largest[0]} x {self.largest[1]}, each by {panels} of width <= "
            f"{self.largest[2]}: {in_bytes(self.most_bytes)} of {in_bytes(memory)} per rank, the rest for "
            f"products; reads {in_bytes(self.bytes_read)} and writes {in_bytes(self.bytes_written)}, "
            f"{every / bound if bound else 1:.2f} times the lower bound"
        )

    @property
    def flops(self) -> float:
        """The operations of a rank in the largest step; those of a thicker one where panels are thin."""
        rows, cols, inner = self.largest
        return 2 * rows * cols * _most(inner, _THICK) / (self.grid[0] * self.grid[1])

    @property
    def cost(self) -> float:
        """Bytes that are read, and that could be read in the time of all else that depends on the tiling.

        That is the time of contiguous pieces beside their bytes, of calls, of products of thin matrices, and of what
        cannot be hidden behind a product: the first panels and the last part of the last tile.
        """
        (m, n, k), (ti, tj, tl), (rows, cols, a_inner, b_inner) = self.mnk, self.counts, self._local
        sizes = m * k / (ti * tl), k * n / (tj * tl)
        widths = (rows / self.slabs if self.a.by_columns else a_inner), (b_inner if self.b.by_columns else cols)
        read = bare = 0.0
        for operand, loads, size, width in zip((self.a, self.b), self.loads, sizes, widths):
            read += loads * size * (operand.stored + _RUN / _most(1, width))
            bare += size * operand.stored
        bare += self.stored * self.largest[0] * self.largest[1] / self.slabs
        ranks = self.grid[0] * self.grid[1]
        thin = sum(_THIN / _most(1, x) for x in (rows / self.slabs, cols, self.largest[2]))
        return read + bare + ti * tj * tl * _CALL + 2 * m * n * k / ranks / _FLOPS * thin

    def bound(self, memory: int) -> float:
        """Bytes that any order reads and writes at least with so many bytes per rank.

        2 mnk / sqrt(S) + mn elements, where no dimension is less than sqrt(S); else mk + kn + mn, each once.
        """
        m, n, k = self.mnk
        words = max(1.0, memory * self.grid[0] * self.grid[1] / max(1, self.held))
        once = self.a.stored * m * k + self.b.stored * k * n
        often = 2 * m * n * k / sqrt(words) * min(self.a.stored, self.b.stored) if min(self.mnk) ** 2 >= words else 0
        return max(once, often) + m * n * (self.stored + self.entry)


def waiting(tiling: Tiling, begun: set[tuple[int, int]]) -> list[Part]:
    """Return the parts with tiles that have not begun."""
    rows, cols, _ = tiling.cuts
    tiles = [(i, j) for i, j in product(range(len(rows)), range(len(cols))) if (i, j) not in begun]
    return [x for x in tiling.parts if any(x.holds(rows[i], cols[j]) for i, j in tiles)]


def _cut(n: int, parts: int, unit: int) -> list[Range]:
    """Return even parts of n indices in whole units; one that is empty where n is 0."""
    units = -(-n // unit)
    ends = [min(n, part * units // parts * unit) for part in range(parts + 1)]
    return [x for x in pairwise(ends) if x[1] > x[0]] or [(0, 0)]


def _ends(n: int, parts: int, unit: int) -> tuple[int, int]:
    """Return the lengths of the first and of the last of these parts."""
    units = -(-n // unit)
    parts = min(parts, max(1, units))
    return min(n, units // parts * unit), n - (parts - 1) * units // parts * unit


def _block(n: int, parts: int, unit: int) -> int:
    """Return the size of blocks of whole units, so few that each part has one."""
    return unit * _most(1, -(-n // (unit * parts)))


def _least(x: Any, y: Any) -> Any:
    """Return the smaller of two integers, of any size, or of the elements of arrays."""
    return np.minimum(x, y) if isinstance(y, np.ndarray) or isinstance(x, np.ndarray) else min(x, y)


def _most(x: Any, y: Any) -> Any:
    return np.maximum(x, y) if isinstance(y, np.ndarray) or isinstance(x, np.ndarray) else max(x, y)
