"""A product in tiles, as a value: the order of reads and writes, and the memory that they need.  No MPI, no data.

C is computed in tiles of `rows x cols`.  While a tile is in memory, all panels of A (rows x width) and B (width x cols)
are read one after the other, each while the previous panel is multiplied; after its product a panel is dropped.  Let
the memory of all ranks together hold S elements.  Then a square tile of nearly S elements needs the fewest reads,
2 mnk / sqrt(S) elements (Hong & Kung, STOC 1981; the constant by Kwasniewski et al., SC 2019).

The order of the steps is serpentine: the tiles of one row from left to right, those of the next row from right to left;
within one tile the inner indices ascend, within the next tile they descend.  So a panel that the next step needs again
is still in memory.  If one panel has the whole inner dimension, the panel of A stays for a whole row of tiles.

Steps that an earlier job has done are left out of the order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from math import prod, sqrt
from typing import Any, NamedTuple

import numpy as np

from pdgemm.schedules.file_reads import FileReads
from pdgemm.support.text import counted, in_bytes

Range = tuple[int, int]  # the first index, and the index after the last one
STAGED = 1 << 20  # bytes of a panel or a tile that one transfer converts
_SLABS = 4  # slabs (blocks of rows) of a tile, each written while the next one is multiplied
_LEAST = 64  # the fewest rows of a slab on a rank
_RUN = 1 << 15  # seek overhead of each contiguous piece, in bytes that could be read in the same time
_BUFFERED = 32  # columns of A, and rows of B, in the buffers of a product
_CALL = 1 << 24  # overhead of a step beside reads and products, in bytes that could be read in the same time
_FLOPS = 32  # floating-point operations of a rank in the time in which a byte is read
_THIN = 32  # a product with this many rows, columns or inner indices takes twice the time of its operations
_THICK = 256  # inner indices; thinner panels are not cut further to shorten steps


class Operand(NamedTuple):
    """The properties of op(A) or op(B) that a tiling depends on.

    stored : bytes of an element in the file.   held : bytes of an element in memory.
    unit   : rows and columns of op(X) that are read together, as those of a chunk.
    by_columns : whether the elements of a column of op(X) are contiguous in the file, as for a transpose.
    chunk  : bytes of a chunk, which is in memory as a whole while a part of it is read.
    """

    stored: int
    held: int
    unit: tuple[int, int] = (1, 1)
    by_columns: bool = False
    chunk: int = 0


class PanelShape(NamedTuple):
    """The shape and the blocks of the largest panel of an operand, and the number of panels that will be read."""

    shape: tuple[int, int]
    block: tuple[int, int]
    loads: int


@dataclass(frozen=True)
class TileStep:
    """One product C[rows, cols] += A[rows, inner] B[inner, cols].

    reads  : for A and for B, whether the step reads a panel; if not, the panel of the last step is still in memory.
    first, last : whether the step is the first, or the last, of its tile.
    """

    rows: Range
    cols: Range
    inner: Range
    reads: tuple[bool, bool]
    first: bool
    last: bool


@dataclass(frozen=True)
class Tiling:
    """C (m x n) := A (m x k) B (k x n) in tiles, on a process grid.

    counts : numbers of rows of tiles, columns of tiles, and panels in the inner dimension.  For the choice of a tiling
             they are arrays; bytes and costs are then arrays, too, with one element for each tiling.
    held   : bytes of an element of the tile in memory.   stored : bytes of an element of C in its file.
    entry  : bytes of an element of C on entry in its file.
    held, stored and entry are 0 where C is not in a file; the bytes of an operand that is not in a file are 0, too.
    done   : the number of steps that an earlier job has done.
    protect : how products are compared with checksums ("detect", "repair", or "").
    """

    mnk: tuple[int, int, int]
    grid: tuple[int, int]
    a: Operand
    b: Operand
    held: int
    stored: int
    entry: int
    counts: tuple[int, int, int] = (1, 1, 1)
    done: int = 0
    protect: str = ""

    # ------------------------------------------------------------------ pieces
    @cached_property
    def cuts(self) -> tuple[list[Range], list[Range], list[Range]]:
        """The ranges of the rows of tiles, of the columns of tiles, and of the inner indices of panels."""
        return tuple(_cut(*x) for x in zip(self.mnk, self.counts, self._units))  # type: ignore[return-value]

    @cached_property
    def largest(self) -> tuple[int, int, int]:
        """The largest numbers of rows, columns and inner indices of a step."""
        return tuple(
            _least(n, unit * -((-n // unit) // parts)) for n, parts, unit in zip(self.mnk, self.counts, self._units)
        )

    @property
    def _units(self) -> tuple[int, int, int]:
        return self.a.unit[0], self.b.unit[1], max(self.a.unit[1], self.b.unit[0])

    @property
    def slabs(self) -> int:
        """The number of slabs (blocks of rows) of a tile; each is written while the next one is multiplied."""
        return _most(1, _least(_SLABS, self.largest[0] // (self.grid[0] * _LEAST))) if self.held else 1

    @property
    def blocks(self) -> tuple[int, int, int, int]:
        """The blocks of the largest tile and panels: rows of A and C, columns of B and C, columns of A, rows of B."""
        (rows, cols, inner), (pr, pc), a, b = self.largest, self.grid, self.a.unit, self.b.unit
        tile = _block(rows, pr * self.slabs, a[0]), _block(cols, pc, b[1])
        return *tile, _block(inner, pc, a[1]), _block(inner, pr, b[0])

    @property
    def panels(self) -> tuple[PanelShape, PanelShape]:
        """The panels of A and of B."""
        (rows, cols, inner), (mb, nb, a_inner, b_inner), (a, b) = self.largest, self.blocks, self.loads
        return PanelShape((rows, inner), (mb, a_inner), a), PanelShape((inner, cols), (b_inner, nb), b)

    @property
    def numbers(self) -> tuple[int, int, int]:
        """The lengths of the three lists of `cuts`."""
        return tuple(  # type: ignore[return-value]
            min(parts, max(1, -(-n // unit))) for n, parts, unit in zip(self.mnk, self.counts, self._units)
        )

    @property
    def steps_of_all(self) -> int:
        """The number of steps of the whole product."""
        return prod(self.numbers)

    @property
    def count(self) -> int:
        """The number of steps that are left."""
        return self.steps_of_all - self.done

    @property
    def finished(self) -> list[tuple[Range, Range]]:
        """The rows and columns of the tiles that an earlier job has finished."""
        rows, cols, inner = self.cuts
        return [(rows[i], cols[j]) for i, j in islice(self._serpentine(), self.done // len(inner))]

    @property
    def current(self) -> TileStep | None:
        """The next step if its tile has sums of an earlier job, else None."""
        step = next(self.steps(), None)
        return None if step is None or step.first else step

    def _serpentine(self) -> Iterator[tuple[int, int]]:
        """Yield the row and the column of each tile, counted in tiles, in the order of the steps."""
        rows, cols, _ = self.numbers
        for i in range(rows):
            for j in range(cols) if i % 2 == 0 else reversed(range(cols)):
                yield i, j

    def steps(self) -> Iterator[TileStep]:
        """Yield the steps that are left, in their order."""
        (rows, cols, inner), parts = self.cuts, self.numbers[2]
        before: tuple[tuple[int, int], tuple[int, int]] | None = None
        for number, (i, j) in enumerate(self._serpentine()):
            for at in range(max(0, self.done - number * parts), parts):
                l = at if number % 2 == 0 else parts - 1 - at
                now = (i, l), (l, j)
                reads = (True, True) if before is None else (now[0] != before[0], now[1] != before[1])
                if not inner[l][1] - inner[l][0]:  # nothing is multiplied
                    reads = False, False
                yield TileStep(rows[i], cols[j], inner[l], reads, at == 0, at == parts - 1)
                before = now

    # ------------------------------------------------------------------ costs
    @property
    def loads(self) -> tuple[int, int]:
        """The numbers of panels of A and of B that are read."""
        ti, tj, tl = self.counts
        if not self.mnk[2]:
            return 0, 0
        return ti * (tj * tl - (tj - 1)), ti * tj * tl - (ti - 1)

    @cached_property
    def bytes_read(self) -> int:
        """The bytes that all ranks read in all steps: of A, of B, and of C on entry or of its earlier sums.

        Not read again: the last panel of A for the next tile in the row, and the last panel of B for the next row.
        """
        if self.done:
            sums = self.current
            of_sums = 0 if sums is None else self.held * (sums.rows[1] - sums.rows[0]) * (sums.cols[1] - sums.cols[0])
            return of_sums + sum(self._read(step) for step in self.steps())
        (m, n, k), (ti, tj, _) = self.mnk, self.numbers
        _, cols, inner = (_ends(*x) for x in zip(self.mnk, self.counts, self._units))
        last = inner[-1], inner[0]  # width of the last panel of an even, and of an odd tile, in the order of the steps
        kept_a = m * (tj // 2 * last[0] + (tj - 1 - tj // 2) * last[1])
        kept_b = ti // 2 * cols[-1] * last[(tj - 1) % 2] + (ti - 1) // 2 * cols[0] * last[1]
        read = self.a.stored * (tj * m * k - kept_a) + self.b.stored * (ti * n * k - kept_b)
        return read + self.entry * m * n

    def _read(self, step: TileStep) -> int:
        """Return the bytes that a step reads."""
        rows, cols, inner = (end - first for first, end in (step.rows, step.cols, step.inner))
        a, b = step.reads
        of_c = self.entry if step.first else 0
        return a * self.a.stored * rows * inner + b * self.b.stored * inner * cols + of_c * rows * cols

    @property
    def bytes_written(self) -> int:
        finished = self.finished if self.done else []
        area = sum((r1 - r0) * (c1 - c0) for (r0, r1), (c0, c1) in finished)
        return self.stored * (self.mnk[0] * self.mnk[1] - area)

    @property
    def most_bytes(self) -> int:
        """The largest number of bytes on a rank: a tile, one or two panels of each operand, and staging buffers."""
        rows, cols, a_inner, b_inner = self._local
        panels = self.a.held * rows * a_inner, self.b.held * b_inner * cols
        kept = sum(size * _least(2, loads) for size, loads in zip(panels, self.loads))
        return self.held * rows * cols + kept + 2 * (STAGED + self.a.chunk + self.b.chunk)

    @property
    def all_bytes(self) -> int:
        """`most_bytes` and the least that products of panels need for messages, converted elements and checksums.

        Checksums are vectors, and, with "repair", need a copy of the tile to repeat a product from.
        """
        (height, _, inner), (rows, cols, _, b_inner) = self.largest, self._local
        vectors = 2 * inner + 3 * height + 2 * rows + b_inner if self.protect else 0
        copied = rows * cols if self.protect == "repair" else 0
        return self.most_bytes + self.held * (_BUFFERED * (rows + cols) + copied) + max(8, self.held) * vectors

    @property
    def _local(self) -> tuple[int, int, int, int]:
        """The largest numbers on a rank: rows and columns of C, inner indices of A, inner indices of B."""
        rows, cols, a_inner, b_inner = self.blocks
        m, n, k = self.largest
        return _least(m, rows * self.slabs), _least(n, cols), _least(k, a_inner), _least(k, b_inner)

    @property
    def file_reads(self) -> FileReads:
        """The reads of panels as a stage of a program."""
        panels = f"{counted(self.count, 'panel')} of width <= {self.largest[2]}"
        return FileReads(self.grid[0] * self.grid[1], panels, self.bytes_read, self.most_bytes)

    def as_dict(self, memory: int) -> dict[str, Any]:
        """Return the plan as a dictionary of numbers."""
        return {
            "memory": memory,
            "tiles": [*self.numbers],
            "tile": self.largest[:2],
            "panel_width": self.largest[2],
            "bytes_per_rank": self.most_bytes,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "bytes_checked": self.stored * self.mnk[0] * self.mnk[1],  # C is read back, and compared
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
        """The operations of a rank in the largest step, with at least _THICK inner indices."""
        rows, cols, inner = self.largest
        return 2 * rows * cols * _most(inner, _THICK) / (self.grid[0] * self.grid[1])

    @property
    def cost(self) -> float:
        """The cost in bytes: the bytes that are read, and all other time that depends on the tiling, as bytes.

        The other time is the seek overhead of contiguous pieces, the overhead of steps, the loss in products of thin
        matrices, and transfers that no product hides: the first panels and the last slab of the last tile.
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
        """The least bytes that must be read and written, whatever the order of the steps, with `memory` bytes per rank.

        These are 2 mnk / sqrt(S) + mn elements, if all ranks' memory holds S elements and m, n and k are at least
        sqrt(S).  Otherwise each element is read or written once: mk + kn + mn elements.
        """
        m, n, k = self.mnk
        words = max(1.0, memory * self.grid[0] * self.grid[1] / max(1, self.held))
        once = self.a.stored * m * k + self.b.stored * k * n
        often = 2 * m * n * k / sqrt(words) * min(self.a.stored, self.b.stored) if min(self.mnk) ** 2 >= words else 0
        return max(once, often) + m * n * (self.stored + self.entry)


def _cut(n: int, parts: int, unit: int) -> list[Range]:
    """Return even parts of n indices in whole units; one empty part where n is 0."""
    units = -(-n // unit)
    ends = [min(n, part * units // parts * unit) for part in range(parts + 1)]
    return [x for x in pairwise(ends) if x[1] > x[0]] or [(0, 0)]


def _ends(n: int, parts: int, unit: int) -> tuple[int, int]:
    """Return the lengths of the first and of the last part of `_cut`."""
    units = -(-n // unit)
    parts = min(parts, max(1, units))
    return min(n, units // parts * unit), n - (parts - 1) * units // parts * unit


def _block(n: int, parts: int, unit: int) -> int:
    """Return the block size, in whole units, with which each part has at most one block."""
    return unit * _most(1, -(-n // (unit * parts)))


def _least(x: Any, y: Any) -> Any:
    """Return the smaller of two integers of any size, or the elementwise minimum of arrays."""
    return np.minimum(x, y) if isinstance(y, np.ndarray) or isinstance(x, np.ndarray) else min(x, y)


def _most(x: Any, y: Any) -> Any:
    return np.maximum(x, y) if isinstance(y, np.ndarray) or isinstance(x, np.ndarray) else max(x, y)
