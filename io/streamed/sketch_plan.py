"""The sketches of a matrix in a file, as a value: their sizes, the rows that are read at once, and the memory for both.

A sketch is the product of the matrix and a thin random matrix.  The matrix is read in panels of whole rows, from the
first one to the last one, once in each pass.  No MPI, no data.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import exp, inf, sqrt
from typing import Any

import scipy  # whose packages, which take long to load, are loaded when they are first used

from pdgemm.errors import MemoryLimitError
from pdgemm.io.streamed.tiling import STAGED, Operand, TileStep
from pdgemm.schedules.file_reads import FileReads
from pdgemm.support.text import counted, in_bytes

ESTIMATING = 30  # random vectors of the sketch that estimates the error of one pass
DOUBT = 1e-3  # the probability with which the error of one pass is larger than its bound
_LEAST, _USUAL = 2, 10  # columns of a sketch more than k: the fewest for which the expected error is known, and usually
_ROWS = 64  # rows of a panel on each rank; sketches become thinner before panels become lower
_PANELS = 4  # the fewest panels, so that most of the file is read while panels are multiplied
_BUFFERED = 32  # rows and columns in the buffers of a product
_RESERVE = 16  # one part in so many of the memory is left to the buffers of the products


@dataclass(frozen=True)
class SketchPlan:
    """Sketches of an m x n dataset, of which the k largest singular values are computed in one pass or more.

    grid     : long sides are distributed over all ranks: P x 1 where m >= n, else 1 x P.
    operand  : the bytes of elements in the file and in memory, and the chunks of the file.
    alpha    : 1 for real numbers and 0 for complex ones, of whose random numbers both parts are random.
    width    : columns of the sketch in which the singular vectors are sought, k + oversample.
    centered : the mean of the rows is one more row of the sketch.
    block    : rows of a panel on each rank.
    """

    shape: tuple[int, int]
    grid: tuple[int, int]
    operand: Operand
    alpha: int
    k: int
    width: int
    passes: int
    centered: bool
    block: int = 1

    @property
    def corange(self) -> int:
        """Columns of the second sketch of one pass, with which the first one is multiplied into an approximation."""
        return 2 * self.width + 1

    @property
    def right(self) -> int:
        """The columns of A Omega.  Of the two sketches of one pass that of the longer side is the thinner one."""
        if self.passes > 1:
            return self.width * (self.passes % 2)
        return self.width if self.shape[0] >= self.shape[1] else self.corange

    @property
    def left(self) -> int:
        """The rows of Psi^H A."""
        if self.passes > 1:
            return self.width * (self.passes % 2 == 0)
        return self.width if self.shape[0] < self.shape[1] else self.corange

    @property
    def sketched(self) -> int:
        """The rows of all sketches from the left: Psi^H A, those that estimate the error, and the sum of all rows."""
        return self.left + (self.passes == 1) * ESTIMATING + self.centered

    @property
    def rows(self) -> int:
        """The rows of a panel."""
        return self.block * self.grid[0]

    @property
    def across(self) -> int:
        """The columns of a panel on each rank, in whole chunks."""
        unit = self.operand.unit[1]
        return unit * -(-self.shape[1] // (unit * self.grid[1]))

    @property
    def panels(self) -> int:
        return -(-self.shape[0] // self.rows)

    def steps(self) -> Iterator[TileStep]:
        """Yield the panels of one pass."""
        m, n = self.shape
        for number in range(self.panels):
            rows = number * self.rows, min(m, (number + 1) * self.rows)
            yield TileStep((number, 0), rows, (0, 0), (0, n), (True, False), True, True, None, (0, n))

    @property
    def bytes_read(self) -> int:
        return self.passes * self.shape[0] * self.shape[1] * self.operand.stored

    @property
    def sketch_bytes(self) -> int:
        """The most bytes of a rank for sketches, random matrices, bases and singular vectors, and their copies."""
        (pr, pc), width = self.grid, self.width
        down = -(-self.shape[0] // self.rows) * self.block
        kept = 3 * down * -(-(self.right or width) // pc) + self.across * -(-(self.sketched + 3 * width) // pr)
        on_each = (10 if self.passes > 1 else 18) * width * width  # small matrices that all ranks have
        return self.operand.held * (kept + self.block * -(-self.sketched // pc) + on_each)

    @property
    def most_bytes(self) -> int:
        """The most bytes of a rank: sketches, two panels and staging buffers."""
        panel = self.block * self.across * self.operand.held
        buffers = 1 if self.panels * self.passes == 1 else 2
        return self.sketch_bytes + buffers * panel + 2 * (STAGED + self.operand.chunk)

    @property
    def all_bytes(self) -> int:
        """`most_bytes`, and the least for the buffers of products."""
        buffers = self.operand.held * _BUFFERED * (self.block + self.across + self.sketched + self.right)
        return (self.most_bytes + buffers) * _RESERVE // (_RESERVE - 1) + _RESERVE

    @property
    def factor(self) -> float:
        """How many times the least possible error of rank k the expected error |A - U diag(s) V^H|_F is, at most.

        Two passes or more: the square root of 1 + f(k, l), where f(k, l) = k / (l - k - alpha) and l = `width` (Halko,
        Martinsson & Tropp 2011, theorem 10.5: the best approximation in the space of the sketch is no worse than the
        projection of the best one of rank k; theorem 9.1: more passes do not make it worse).  One pass, for s =
        `corange`: 1 + 2 sqrt((1 + f(k, l)) (1 + f(l, s))) (Tropp, Yurtsever, Udell & Cevher 2017, theorem 4.3 and
        proposition 6.1).  1 if the sketch has the whole space.
        """
        if self.width >= min(self.shape):
            return 1.0
        range_error = 1 + _moment(self.k, self.width, self.alpha)
        if self.passes > 1:
            return sqrt(range_error)
        return 1 + 2 * sqrt(range_error * (1 + _moment(self.width, self.corange, self.alpha)))

    @property
    def file_reads(self) -> FileReads:
        """The reads as a stage of a program."""
        what = f"{self._passes} over {counted(self.panels, 'panel')}, sketches of width {self.width}"
        return FileReads(self.grid[0] * self.grid[1], what, self.bytes_read, self.most_bytes)

    @property
    def _passes(self) -> str:
        return "1 pass" if self.passes == 1 else f"{self.passes} passes"

    def as_dict(self, memory: int) -> dict[str, Any]:
        """Return the plan as a dictionary of numbers."""
        return {
            "memory": memory,
            "passes": self.passes,
            "panels": self.panels,
            "panel_rows": min(self.rows, self.shape[0]),
            "width": self.width,
            "sketches": [self.right, self.sketched],
            "bytes_per_rank": self.most_bytes,
            "bytes_read": self.bytes_read,
            "factor": self.factor,
        }

    def explain(self, memory: int) -> str:
        """Return the plan in a sentence or two."""
        panels, rows = counted(self.panels, "panel"), min(self.rows, self.shape[0])
        return (
            f"{self._passes} over A in {panels} of at most {counted(rows, 'row')}, with sketches of "
            f"width {self.width}: {in_bytes(self.most_bytes)} of {in_bytes(memory)} per rank, the rest for products; "
            f"reads {in_bytes(self.bytes_read)}; the expected error is at most {self.factor:.3g} times the least of "
            f"rank {self.k}"
        )


def _moment(k: int, width: int, alpha: int) -> float:
    """The expected |G^+|_F^2 for a k x width matrix G of normal numbers, relative to that of one number."""
    return k / (width - k - alpha) if width > k + alpha else inf


def fitting_sketch(plan: SketchPlan, oversample: int | None, memory: int) -> SketchPlan:
    """Return the plan with the widest sketches, and then the highest panels, that `memory` bytes per rank hold.

    oversample : columns of the sketch more than k; None: max(10, k + 1), or fewer, at least 2, where memory is short.
    Raises MemoryLimitError, which says how many bytes are needed.
    """
    (m, n), (pr, _), unit = plan.shape, plan.grid, plan.operand.unit[0]
    least, usual = (_LEAST, max(_USUAL, plan.k + 1)) if oversample is None else (oversample, oversample)
    widths = sorted({min(plan.k + x, m, n) for x in range(least, usual + 1)}, reverse=True)
    needed = 0
    for rows in sorted({unit, 1}, reverse=True):  # cut chunks only if necessary: each part reads them as a whole
        cut = plan if rows == unit else replace(plan, operand=plan.operand._replace(unit=(1, 1)))
        whole = -(-m // (pr * rows))  # blocks that hold all rows

        def of(width: int, blocks: int) -> SketchPlan:
            return replace(cut, width=width, block=blocks * rows)  # noqa: B023

        quarter = -(-whole // _PANELS)
        for lowest, choice in ((min(quarter, max(1, _ROWS // rows)), widths), (1, widths[-1:])):
            at = bisect_left(choice, True, key=lambda width: of(width, lowest).all_bytes <= memory)
            if at < len(choice):
                blocks = range(lowest, max(lowest, quarter) + 1)
                fits = bisect_left(blocks, True, key=lambda x: of(choice[at], x).all_bytes > memory)
                return of(choice[at], lowest + fits - 1)
        needed = of(widths[-1], 1).all_bytes
    raise MemoryLimitError(
        f"memory {in_bytes(memory)} per rank is too small for rows of the {m} x {n} matrix and sketches of it for "
        f"k = {plan.k}: {in_bytes(needed)} ({needed} bytes) are needed"
    )


def certain_factor(vectors: int, alpha: int) -> float:
    """How many times its estimate an error is, at most, but for a probability of DOUBT.

    The estimate is |G E|_F / sqrt(beta q) with q = `vectors` rows of normal numbers, beta = 2 for complex numbers, else
    1.  Its square is below x |E|_F^2 with a probability of at most (x e^(1 - x))^(beta q / 2) (Tropp, Yurtsever, Udell
    & Cevher 2019, section 6.4; from Laplace transforms of a sum of squares of normal numbers).
    """
    share = DOUBT ** (2 / ((2 - alpha) * vectors))
    return float(1 / sqrt(-scipy.special.lambertw(-share * exp(-1)).real))
