"""The schedule of one triangle of A A^H by triangle blocks, which needs about half of the words of A that SUMMA needs.

The rows of C are divided into as many ranges as a finite plane has points, and each rank has a line of the plane: it
receives the rows of A of the points on its line, and computes the blocks (i, j) of C for the pairs of these points.
Each pair of points is on one line, so each block is computed once.  A plane of order 2 without a line, for 6 ranks:

    1 . . .      The lines are all pairs of the points 0 to 3.  A rank receives half of A, and has one block below the
    0 3 . .      diagonal; four of the ranks also have a block on the diagonal.
    1 3 4 .
    5 2 4 5

With L layers, each layer has such ranks for a part of the inner indices.  Partial sums are added in the layout of C, in
L steps: in each step the layers send different rows, so that the order of the sums does not depend on arrivals.  One
layer is the 2-D algorithm, and a plane with one point is the 1-D algorithm.

Al Daas, Ballard, Grigori, Kumar, Rouse & Verite, Communication Lower Bounds and Optimal Algorithms for Symmetric Matrix
Computations, ACM Trans. Parallel Comput., 2025 (arXiv 2409.11304); for A A^T also SPAA 2023.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import scipy

from pdgemm.grids.layout import Layout
from pdgemm.grids.rectangles import Rectangle
from pdgemm.schedules.exchanges.rectangle_exchange import RectangleExchange, common_counts, plan_rectangles
from pdgemm.schedules.formulas import gemm_flops
from pdgemm.schedules.products.planes import Plane, lines_of, point_names
from pdgemm.schedules.rounds import Round, WorkPiece
from pdgemm.schedules.schedule import Buffers, LineSchedule
from pdgemm.schedules.staircase import TriangleName
from pdgemm.support.text import counted, sides

Range = tuple[int, int]
LEAST_STRIPS = 16  # strips in which all diagonal blocks are sent: a strip has elements of the other triangle, too


@dataclass(frozen=True)
class TriangleBlocks(LineSchedule):
    """One triangle of C := op(A) op(A)^H or, with B, of op(A) op(B)^H + op(B) op(A)^H; or the same with transposes.

    A, B, C : the layouts of op(A), op(B) and C.   ranks : all ranks of the communicator.
    plane : its lines are those of the ranks of a layer.   layers : number of layers; ranks may have no line.
    """

    A: Layout
    B: Layout | None
    C: Layout
    ranks: tuple[int, ...]
    triangle: TriangleName
    plane: Plane
    layers: int
    algorithm = "triangle"
    lookahead = 0

    @property
    def dtype(self) -> np.dtype:  # type: ignore[override]
        return self.C.dtype

    @property
    def mnk(self) -> tuple[int, int, int]:
        """The extents of the product, or of [op(A) op(B)] [op(B) op(A)]^H."""
        n, k = self.A.distribution.rows.n, self.A.distribution.cols.n
        return n, n, k * (1 if self.B is None else 2)

    @property
    def flops(self) -> int:
        n, _, k = self.mnk
        return gemm_flops(1, n * (n + 1) // 2, k, complex_=self.dtype.kind == "c")

    @cached_property
    def point_rows(self) -> list[Range]:
        """The range of rows of each point."""
        return _parts(self.mnk[0], self.plane.points)

    @cached_property
    def layer_cols(self) -> list[Range]:
        """The range of inner indices of each layer."""
        return _parts(self.A.distribution.cols.n, self.layers)

    @cached_property
    def line_of(self) -> dict[int, tuple[int, int]]:
        """The layer and the line of each rank that has one: those with which ranks hold most of what they need."""
        lines, size = lines_of(self.plane), len(self.ranks)
        held = np.zeros((size, self.layers * len(lines)), np.int64)
        on_line = np.array([np.bincount(line, minlength=self.plane.points) for line in lines])
        for layout in (self.A, self.B or self.A):
            rows = on_line @ common_counts(layout.distribution.rows, self.point_rows)
            cols = common_counts(layout.distribution.cols, self.layer_cols)
            held[[*layout.rank_map]] += np.einsum("xi,lj->ijlx", rows, cols).reshape(len(layout.rank_map), -1)
        ranks, places = scipy.optimize.linear_sum_assignment(held, maximize=True)
        return {rank: divmod(place, len(lines)) for rank, place in zip(ranks.tolist(), places.tolist())}

    def points(self, rank: int) -> tuple[int, ...]:
        """Return the points on a rank's line, ascending."""
        return lines_of(self.plane)[self.line_of[rank][1]] if rank in self.line_of else ()

    def cols(self, rank: int) -> Range:
        """Return the inner indices of a rank's layer."""
        return self.layer_cols[self.line_of[rank][0]] if rank in self.line_of else (0, 0)

    def rows(self, rank: int) -> list[Range]:
        """Return the ranges of rows of a rank's points."""
        return [self.point_rows[x] for x in self.points(rank)]

    def places(self, rank: int) -> list[Range]:
        """Return the ranges of the local rows of a rank's points."""
        return [*pairwise(accumulate((stop - start for start, stop in self.rows(rank)), initial=0))]

    def local_shape(self, rank: int) -> tuple[int, int]:
        """Return the number of rows of A, and of inner indices, that a rank multiplies."""
        start, stop = self.cols(rank)
        return max((x[1] for x in self.places(rank)), default=0), stop - start

    def blocks(self, rank: int) -> list[tuple[int, range, bool]]:
        """Return the blocks that a rank computes, numbered by the positions of their points on its line.

        For each row of blocks: its number, the columns beside the diagonal, and whether the diagonal block is computed.
        """
        line, lower = self.points(rank), self.triangle == "L"
        own = point_names(self.plane).get(self.line_of[rank][1]) if line else None
        return [(i, range(i) if lower else range(i + 1, len(line)), x == own) for i, x in enumerate(line)]

    def pieces(self, rank: int, step: int) -> list[tuple[Rectangle, Rectangle]]:
        """Return the rectangles of C to which a rank adds sums in a step, each with the rectangle of its sums.

        In each step the layers add other rows of each block.
        """
        pieces, corners = list[tuple[Rectangle, Rectangle]](), (self.rows(rank), self.places(rank))
        strips = self.layers * -(-LEAST_STRIPS // (self.layers * self.plane.points))
        for i, others, square in self.blocks(rank):
            turn, length = (self.line_of[rank][0] + step) % self.layers, corners[1][i][1] - corners[1][i][0]
            widths = {j: corners[1][j][1] - corners[1][j][0] for j in others}
            parts = [(j, *_parts(length, self.layers)[turn], 0, width) for j, width in widths.items()]
            for start, stop in _parts(length, strips)[turn :: self.layers] if square else ():
                parts.append((i, start, stop, *((0, stop) if self.triangle == "L" else (start, length))))
            for j, start, stop, first, last in parts:
                tops = (((x[i][0], x[j][0])) for x in corners)
                of_c, of_sums = (Rectangle((start + i0, stop + i0), (first + j0, last + j0)) for i0, j0 in tops)
                pieces.append((of_c, of_sums))
        return pieces

    @cached_property
    def arrivals(self) -> dict[str, RectangleExchange]:
        """The exchanges, by name, in which ranks receive their rows of A, and of B."""
        needed = tuple(tuple(Rectangle(x, self.cols(rank)) for x in self.rows(rank)) for rank in self.ranks)
        return {name: plan_rectangles(needed, x, False, "C") for name, x in (("A", self.A), ("B", self.B)) if x}

    @cached_property
    def departures(self) -> dict[str, RectangleExchange]:
        """The exchanges, by name, in which ranks send their sums to the ranks that have these elements of C."""
        sums = [tuple(tuple(c for c, _ in self.pieces(x, step)) for x in self.ranks) for step in range(self.layers)]
        into = self.C, True, self.C.order
        return {f"C, step {at}": plan_rectangles(x, *into, combines=True) for at, x in enumerate(sums)}

    @property
    def exchanges(self) -> dict[str, RectangleExchange]:
        return self.arrivals | self.departures

    @property
    def events(self) -> int:
        return 1 + sum(x.events for x in self.exchanges.values())

    def rounds(self) -> Iterator[Round]:
        """Yield the rows that arrive, the products, and the sums that leave."""
        for x in self.arrivals.values():
            yield from x.rounds()
        rows, inner = np.array([self.local_shape(rank) for rank in self.ranks]).T
        formed = [[sum(x.size for x in held) for held in step.rectangles] for step in self.departures.values()]
        share = np.sum(formed, axis=0) / np.maximum(1, rows * rows)
        yield Round([], [WorkPiece((rows, rows, inner), share=len(self.arrivals) * share)])
        for x in self.departures.values():
            yield from x.rounds()

    def copied(self, rank: int) -> int:
        return sum(x.copied(rank) for x in self.exchanges.values())

    def buffers(self, rank: int | None) -> Buffers:
        if rank is None:
            return self.buffers(max(self.ranks, key=self.extra_bytes))
        rows, inner = self.local_shape(rank)
        panels = {f"rows of {name}": (rows * inner, self.dtype) for name in self.arrivals}
        messages = ((name, x.buffers(rank)) for name, x in self.exchanges.items())
        named = {f"{name}, {kind}": size for name, buffers in messages for kind, size in buffers.items()}
        return {**panels, "sums": (rows * rows, self.dtype), **named}

    def described(self, name: str) -> tuple[str, str]:
        lines, layers = counted(self.plane.lines, "line"), counted(self.layers, "layer")
        return "product", f"{sides(*self.mnk)}, triangle blocks, {lines} in {layers}"


def _parts(n: int, number: int) -> list[Range]:
    return [*pairwise(n * x // number for x in range(number + 1))]


planned_blocks: Any = lru_cache(maxsize=16)(TriangleBlocks)


@lru_cache(maxsize=64)
def triangle_shape(n: int, k: int, size: int, terms: int = 1, layers: int | None = None) -> tuple[Plane, int]:
    """Return the plane and the number of layers by which a rank receives and sends the fewest words.

    A rank receives terms n k share / layers words of A and B, less those that it holds, and has n^2/2 / lines words of
    C.   terms : 2 with B.   layers : the only number of layers to consider.
    """

    def words(shape: tuple[Plane, int]) -> float:
        return terms * n * k * shape[0].share / shape[1] + n * n / 2 / shape[0].lines

    numbers = range(1, min(size, k) + 1) if layers is None else [layers]
    return min(((Plane.largest(size // x), x) for x in numbers), key=words)
