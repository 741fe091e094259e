"""A plan of the passes over a matrix in a file that compute its singular values: panels, and the memory they need.

The matrix is read in panels of whole rows, or of whole columns, from the first one to the last one, once in each pass.
No MPI, no data.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pdgemm.errors import MemoryLimitError
from pdgemm.io.streamed.tiling import STAGED, Operand, TileStep
from pdgemm.schedules.file_reads import FileReads
from pdgemm.support.text import counted, in_bytes

BLOCKS = 6  # if this many blocks have a column for each singular value, no steps are taken (`is_small` of `svd`)
LEAST = 2  # the least number of columns of a block beyond k
_ROWS, _SIZE = 64, 1 << 14  # least rows and bytes of a panel on a rank; only the bytes where memory is short
_PANELS = 4  # the fewest panels, so that most of the file is read while panels are multiplied
_BUFFERED = 32  # rows and columns in the buffers of a product
_RESERVE = 16  # 1 / _RESERVE of the memory is left to the buffers of the products


@dataclass(frozen=True)
class SvdPlan:
    """The passes over a p x q matrix that compute its k largest singular values.

    grid     : the grid of the panels: P x 1 (rows are distributed) where p >= q, otherwise 1 x P (columns are).
    operand  : the bytes of elements in the file and in memory, and the chunks of the file.
    width    : columns of the blocks of Golub-Kahan steps, k + oversample.
    triangles : whether the rows of each rank are reduced to a triangle of order q (p >= q) instead of such steps.
    centered : whether the mean of the rows is subtracted.   block : rows of a panel on each rank.
    wide     : bytes of an element of a triangle, which is in double precision.
    """

    shape: tuple[int, int]
    grid: tuple[int, int]
    operand: Operand
    k: int
    width: int
    triangles: bool
    centered: bool
    wide: int = 8
    block: int = 1

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
        p, q = self.shape
        for number in range(self.panels):
            rows = number * self.rows, min(p, (number + 1) * self.rows)
            yield TileStep(rows, (0, 0), (0, q), (True, False), True, True)

    def passes(self, steps: int) -> int:
        """Return the number of passes over the file with this number of Golub-Kahan steps."""
        return 2 if self.triangles else 2 * steps + 3

    @property
    def pass_bytes(self) -> int:
        return self.shape[0] * self.shape[1] * self.operand.stored

    @property
    def columns(self) -> int:
        """The columns of a triangle: q, and one more if the mean of the rows is subtracted."""
        return self.shape[1] + self.centered

    @property
    def kept(self) -> int:
        """The rows of the buffer that each rank reduces to a triangle.

        The buffer has space for a panel and twice the rows of a triangle; or for all rows of the rank, if these are
        fewer.
        """
        return min(self.panels, -(-2 * self.columns // self.block) + 1) * self.block

    @property
    def stacked(self) -> int:
        """The rows on each rank after all panels: those of a triangle, or all its rows if the buffer holds them."""
        return self.kept if self.kept == self.panels * self.block else self.columns

    @property
    def held_bytes(self) -> int:
        """The largest number of bytes on a rank for bases, triangles, singular vectors, and their copies."""
        (p, q), (pr, pc), k, width = self.shape, self.grid, self.k, self.width
        down, each = self.panels * self.block, -(-q // (pr * pc))
        if self.triangles:
            small = 4 * self.stacked * q + 10 * q * q  # the copies of factorisations that have all singular values
            if q > BLOCKS * width:
                small = 10 * width * (self.stacked + each) + 60 * width * width
            words = self.kept * self.columns + max(2 * self.kept * self.columns, small)
            return self.wide * words + self.operand.held * 4 * k * (down + q)
        bases = 10 * width * (-(-p // (pr * pc)) + each) + 60 * width * width
        return self.operand.held * (bases + 2 * (down * -(-width // pc) + self.across * -(-width // pr)))

    @property
    def most_bytes(self) -> int:
        """The largest number of bytes on a rank: bases or triangles, two panels and staging buffers."""
        panel = self.block * self.across * self.operand.held
        return self.held_bytes + 2 * (panel + min(panel, STAGED) + self.operand.chunk)

    @property
    def all_bytes(self) -> int:
        """`most_bytes`, and the least number of bytes that buffers of products need."""
        buffers = self.operand.held * _BUFFERED * (self.block + self.across + 2 * self.width)
        return (self.most_bytes + buffers) * _RESERVE // (_RESERVE - 1) + _RESERVE

    def file_reads(self, passes: int) -> FileReads:
        """Return the reads as a stage of a program."""
        how = "triangles" if self.triangles else f"blocks of {self.width} columns"
        what = f"{passes} passes over {counted(self.panels, 'panel')}, {how}"
        return FileReads(self.grid[0] * self.grid[1], what, passes * self.pass_bytes, self.most_bytes)

    def as_dict(self, memory: int, passes: int | None = None) -> dict[str, Any]:
        """Return the plan as a dictionary of numbers.   passes : None if the number of steps is not known yet."""
        passes = 2 if self.triangles else passes
        return {
            "memory": memory,
            "passes": passes,
            "panels": self.panels,
            "panel_rows": min(self.rows, self.shape[0]),
            "width": self.width,
            "triangles": self.triangles,
            "bytes_per_rank": self.most_bytes,
            "bytes_read": None if passes is None else passes * self.pass_bytes,
        }

    def explain(self, memory: int) -> str:
        """Return the plan in a sentence or two."""
        panels, rows = counted(self.panels, "panel"), min(self.rows, self.shape[0])
        lines = "column" if self.operand.by_columns else "row"
        size = f"{in_bytes(self.most_bytes)} of {in_bytes(memory)} per rank, the rest for products"
        if self.triangles:
            return (
                f"2 passes over A in {panels} of at most {counted(rows, lines)}, which become triangles of order "
                f"{self.columns}: {size}; reads {in_bytes(2 * self.pass_bytes)}"
            )
        return (
            f"A is read twice in each step, for a block of {counted(self.width, 'column')}, and in 3 more passes; "
            f"a pass reads {in_bytes(self.pass_bytes)} in {panels} of at most {counted(rows, lines)}; memory: {size}"
        )


def fitting_plan(triangles: SvdPlan, steps: SvdPlan, oversample: int | None, memory: int) -> SvdPlan:
    """Return a plan that fits `memory` bytes per rank: with triangles if they fit, else with the widest blocks.

    triangles, steps : the plans to complete, with and without triangles.
    oversample : columns of a block beyond k.  None: as many as fit, but at least 2, and not so many that products with
        bases cost more than products with A.
    Raises MemoryLimitError, which says how many bytes are needed.
    """
    (p, q), k = steps.shape, steps.k
    most = max(k + 10, p * q // (22 * (p + q))) if oversample is None else k + oversample
    least = k + LEAST if oversample is None else most
    widths = list(range(min(most, min(p, q) // BLOCKS), least - 1, -1))
    needed = []
    for plan, choice in ((triangles, [triangles.width]), (steps, widths)):
        if choice:
            fits, plan_needs = _fitting(plan, choice, memory)
            if fits is not None:
                return fits
            needed.append(plan_needs)
    raise MemoryLimitError(
        f"memory {in_bytes(memory)} per rank is too small for panels of the matrix and singular vectors for k = {k}: "
        f"{in_bytes(min(needed))} ({min(needed)} bytes) are needed"
    )


def _fitting(plan: SvdPlan, widths: list[int], memory: int) -> tuple[SvdPlan | None, int]:
    """Return (plan, 0) with the first of `widths` that fits, and with the most rows in a panel that fit.

    If nothing fits, return (None, the number of bytes that are needed).
    """
    (p, _), (pr, _), unit = plan.shape, plan.grid, plan.operand.unit[0]
    needed = 0
    for rows in sorted({unit, 1}, reverse=True):  # cut chunks only if necessary: each part reads them as a whole
        cut = plan if rows == unit else replace(plan, operand=plan.operand._replace(unit=(1, 1)))
        whole = -(-p // (pr * rows))  # blocks that hold all rows

        def of(width: int, blocks: int) -> SvdPlan:
            return replace(cut, width=width, block=blocks * rows)  # noqa: B023

        quarter = -(-whole // _PANELS)
        least = min(quarter, -(-_SIZE // (rows * cut.across * cut.operand.held)))  # each panel has an overhead
        for lowest, choice in ((max(least, min(quarter, _ROWS // rows)), widths), (least, widths[-1:])):
            at = bisect_left(choice, True, key=lambda width: of(width, lowest).all_bytes <= memory)
            if at < len(choice):
                blocks = range(lowest, max(lowest, quarter) + 1)
                fits = bisect_left(blocks, True, key=lambda x: of(choice[at], x).all_bytes > memory)
                return of(choice[at], lowest + fits - 1), 0
        needed = of(widths[-1], least).all_bytes
    return None, needed
