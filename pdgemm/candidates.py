"""The ways to lay out A, B and C for each algorithm: on the grids that they have, and on the best new ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from pdgemm.boxes import Box, best_grids
from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.grids.layout import Layout
from pdgemm.machine import Machine
from pdgemm.products import Cannon, Inner, Layered, Product, Stationary, Summa
from pdgemm.products.product import Placed
from pdgemm.schedule import skewed_places

BROADCASTS = ("ibcast", "ring")  # movers to choose from; the first where nothing speaks for another
PRODUCTS = (Summa, Stationary, Cannon, Layered, Inner)
ALGORITHMS = ("auto", "summa", "stationary_a", "stationary_b", "cannon", "2.5d", "row", "column", "inner")
REDUCED_BYTES = 1 << 26  # of C that are reduced at a time, but not fewer than REDUCED_ROWS rows, for BLAS
REDUCED_ROWS = 256
_BOXES = 2  # new grids of each kind


class Way(NamedTuple):
    """A product on layouts that fit it; `transposed`: of C^T = B^T A^T."""

    product: Product
    transposed: bool = False

    @property
    def algorithm(self) -> str:
        """The algorithm by the name that a user gives it."""
        name = self.product.algorithm
        return "stationary_b" if (name, self.transposed) == ("stationary_a", True) else name

    @property
    def layouts(self) -> tuple[Layout, Layout, Layout]:
        """Of A, B and C, as the user sees them."""
        A, B, C = self.product.A, self.product.B, self.product.C
        return (B.T, A.T, C.T) if self.transposed else (A, B, C)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Pr, Pc and layers as the user sees C."""
        grid = self.product.grid
        pr, pc = grid.shape[::-1] if self.transposed else grid.shape
        return pr, pc, grid.layers


@dataclass(frozen=True)
class Problem:
    """What is to be multiplied, how it lies, and what is asked of the plan.

    size      : ranks of the communicator in which the layouts number their ranks.
    plain     : C is not read, beta is 0.
    mover     : one of BROADCASTS, or "auto".
    algorithm : one of ALGORITHMS.   shape, layers : of the grid of the product, where they are asked for.
    """

    A: Layout
    B: Layout
    C: Layout
    size: int
    plain: bool
    accumulate: np.dtype
    width: int
    lookahead: int
    mover: str
    algorithm: str = "auto"
    shape: tuple[int, int] | None = None
    layers: int | None = None
    memory_limit: int | None = None
    width_asked: bool = True  # is `width` the caller's?
    machine: Machine = field(default_factory=Machine, repr=False)

    @property
    def given(self) -> tuple[Layout, Layout, Layout]:
        return self.A, self.B, self.C

    @property
    def mnk(self) -> tuple[int, int, int]:
        return *self.C.distribution.shape, self.A.distribution.cols.n

    @property
    def T(self) -> Problem:
        """C^T = B^T A^T."""
        shape = self.shape and self.shape[::-1]
        return replace(self, A=self.B.T, B=self.A.T, C=self.C.T, shape=shape)

    @property
    def grids(self) -> list[Layout]:
        """Matrices with different grids."""
        found: dict[object, Layout] = {}
        for x in (self.C, self.A, self.B):
            found.setdefault(x.grid, x)
        return list(found.values())

    @property
    def place(self) -> tuple[int, ...]:
        """All ranks, those of C first."""
        rest = set(range(self.size)) - set(self.C.place) if len(self.C.place) < self.size else ()
        return (*self.C.place, *sorted(rest))

    @property
    def broadcast(self) -> str:
        """How panels travel until the plan is tuned."""
        return BROADCASTS[0] if self.mover == "auto" else self.mover

    @property
    def reduced_rows(self) -> int:
        m, n, _ = self.mnk
        return max(1, min(m, max(REDUCED_ROWS, REDUCED_BYTES // (max(1, n) * self.accumulate.itemsize))))


def ways(problem: Problem) -> Iterator[Way]:
    """All ways that are worth a comparison."""
    shape, layers = problem.shape, problem.layers
    for way in _ways(problem):
        pr, pc, c = way.shape
        if (shape is None or shape == (pr, pc)) and (layers is None or layers == c):
            yield way


def _ways(problem: Problem) -> Iterator[Way]:
    algorithm, layers = problem.algorithm, problem.layers
    if problem.size == 1 and algorithm == "auto":  # nothing is sent: there is nothing to choose
        algorithm = "summa"
    sides = {"row": (problem.size, 1), "column": (1, problem.size)}
    if algorithm in sides:
        if problem.shape not in (None, sides[algorithm]):
            return
        problem = replace(problem, shape=sides[algorithm])
    both = ((problem, False), (problem.T, True))
    plane = layers in (None, 1)
    if plane and algorithm in ("auto", "summa", "row", "column"):
        for base in problem.grids:
            yield from summa_here(problem, base)
        for box in _boxes(problem, 1):
            yield Way(summa_on(problem, box))
    for p, transposed in both if plane else ():
        if algorithm in ("auto", "stationary_b" if transposed else "stationary_a"):
            yield Way(stationary(p, p.A.distribution.grid_shape, p.A.place), transposed)
            for pr, pc in _stationary_shapes(p):
                yield Way(stationary(p, (pr, pc), p.place[: pr * pc]), transposed)
        if algorithm in ("auto", "cannon", "row", "column"):
            for box in _boxes(p, 1, cannon=True):
                if not transposed or box.pr != box.pc:
                    yield Way(cannon_on(p, box), transposed)
    if algorithm in ("auto", "2.5d") and layers != 1:
        yield from _layered(problem, both)
    if algorithm in ("auto", "inner"):
        for a, b in inner_layouts(problem):
            rows = problem.reduced_rows
            yield Way(
                Inner(a, b, problem.C, problem.accumulate, problem.width, 0, "reduce_scatter", rows, problem.size)
            )


def _layered(problem: Problem, both: tuple[tuple[Problem, bool], ...]) -> Iterator[Way]:
    for box in _boxes(problem, problem.layers, layered=True):
        yield Way(layered_on(problem, box, "summa"))
    for p, transposed in both:
        for box in _boxes(p, problem.layers, layered=True, cannon=True):
            if not transposed or box.pr != box.pc:
                yield Way(layered_on(p, box, "cannon"), transposed)
    pr, pc = problem.C.distribution.grid_shape
    c = problem.layers or problem.size // (pr * pc)
    if 1 < c <= problem.size // (pr * pc):
        yield Way(layered_on(problem, Box(*problem.mnk, pr, pc, c), "summa", on_layer_0=True))


def _boxes(problem: Problem, layers: int | None, layered: bool = False, cannon: bool = False) -> list[Box]:
    def fits(pr: np.ndarray, pc: np.ndarray, c: np.ndarray) -> np.ndarray:
        alone = pr * pc == 1  # each rank a layer: that is "inner"
        allowed = (c > 1) & (~alone | (problem.algorithm == "2.5d")) if layered else c > 0
        return allowed & (pc % pr == 0) if cannon else allowed

    forced = problem.algorithm != "auto"
    return best_grids(*problem.mnk, problem.size, _BOXES, layers=layers, shape=problem.shape, fits=fits, anyhow=forced)


def _stationary_shapes(problem: Problem) -> list[tuple[int, int]]:
    """Pr x Pc over the rows and columns of A: as a box, Pr x 1 in Pc layers."""
    if problem.shape is not None:
        pr, pc = problem.shape
        return [(pr, pc)] if pr * pc <= problem.size else []
    boxes = best_grids(*problem.mnk, problem.size, _BOXES, fits=lambda pr, pc, c: pc == 1)
    return [(box.pr, box.layers) for box in boxes]


def summa_here(problem: Problem, base: Layout) -> Iterator[Way]:
    """On the grid of one of the matrices, C's rows as A's, C's columns as B's."""
    pr, pc = base.distribution.grid_shape
    on_a, on_b, on_c = (x.grid == base.grid for x in (problem.A, problem.B, problem.C))
    a, b, c = (x.distribution for x in (problem.A, problem.B, problem.C))
    rows = [x.rows for x, here in ((c, on_c), (a, on_a)) if here] or [c.rows.over(pr)]
    cols = [x.cols for x, here in ((c, on_c), (b, on_b)) if here] or [c.cols.over(pc)]
    inner_a = a.cols if on_a else BlockCyclic.even(a.cols.n, pc)
    inner_b = b.rows if on_b else BlockCyclic.even(b.rows.n, pr)
    for r in {x.canonical: x for x in reversed(rows)}.values():
        for s in {x.canonical: x for x in reversed(cols)}.values():
            yield Way(_summa(problem, r, s, inner_a, inner_b, base.place))


def _summa(
    problem: Problem, r: BlockCyclic, s: BlockCyclic, inner_a: BlockCyclic, inner_b: BlockCyclic, place: tuple[int, ...]
) -> Summa:
    return Summa(
        brought(problem.A, Distribution(r, inner_a), place),
        brought(problem.B, Distribution(inner_b, s), place),
        brought(problem.C, Distribution(r, s), place, problem.accumulate),
        problem.accumulate,
        problem.width,
        problem.lookahead,
        problem.broadcast,
    )


def summa_on(problem: Problem, box: Box) -> Summa:
    """On a new grid."""
    r, s, inner_a, inner_b = _dims(box)
    return _summa(problem, r, s, inner_a, inner_b, problem.place[: box.ranks])


def _dims(box: Box) -> tuple[BlockCyclic, BlockCyclic, BlockCyclic, BlockCyclic]:
    """How a box deals the rows and columns of C and the inner indices of A and B."""
    return (
        BlockCyclic(box.m, box.row_block, box.pr),
        BlockCyclic(box.n, box.col_block, box.pc),
        BlockCyclic(box.k, box.block, box.pc * box.layers),
        BlockCyclic(box.k, box.block, box.pr * box.layers),
    )


def stationary(problem: Problem, shape: tuple[int, int], place: tuple[int, ...]) -> Stationary:
    """A, or all matrices, on a Pr x Pc grid; B across it."""
    (pr, pc), (m, n, k) = shape, problem.mnk
    a, b, c = (x.distribution for x in (problem.A, problem.B, problem.C))
    grid = (shape, place)
    here_a, here_c = problem.A.grid == grid, problem.C.grid == grid
    rows = a.rows if here_a else c.rows if here_c else BlockCyclic.even(m, pr)
    inner = a.cols if here_a else BlockCyclic.even(k, pc)
    cols_c = c.cols if here_c else BlockCyclic.even(n, pc)
    across = tuple(place[i * pc + j] for j in range(pc) for i in range(pr))
    cols_b = b.cols if problem.B.grid == ((pc, pr), across) else BlockCyclic.even(n, pr)
    return Stationary(
        brought(problem.A, Distribution(rows, inner), place),
        brought(problem.B, Distribution(inner, cols_b), across),
        brought(problem.C, Distribution(rows, cols_c), place, problem.accumulate),
        problem.accumulate,
        problem.width,
        problem.lookahead,
        problem.broadcast,
    )


def cannon_on(problem: Problem, box: Box) -> Cannon:
    """On C's own grid where it has the shape of the box, else on a new one."""
    a, b, c = (x.distribution for x in (problem.A, problem.B, problem.C))
    r, s, inner_a, inner_b = _dims(box)
    shape, place = (box.pr, box.pc), problem.place[: box.ranks]
    if problem.C.grid == (shape, place):
        r, s = c.rows, c.cols
    if box.pr == box.pc:  # any blocks will do
        if a.grid_shape == shape:
            inner_a = inner_b = a.cols
        elif b.grid_shape == shape:
            inner_a = inner_b = b.rows
    place_a, place_b = skewed_places(place, shape)
    return Cannon(
        brought(problem.A, Distribution(r, inner_a), place_a),
        brought(problem.B, Distribution(inner_b, s), place_b),
        brought(problem.C, Distribution(r, s), place, problem.accumulate),
        problem.accumulate,
        problem.width,
        1,
        "shift",
    )


def layered_on(problem: Problem, box: Box, inside: str, on_layer_0: bool = False) -> Layered:
    """In layers, C shared out over them, or on layer 0 as the user has it."""
    c, place = box.layers, problem.place[: box.ranks]
    pr, pc = shape = box.pr, box.pc
    grid = Placed(shape, c, place)
    r, s, inner_a, inner_b = _dims(box)
    if on_layer_0:
        r, s = problem.C.distribution.rows, problem.C.distribution.cols
        C = problem.C
    else:
        down, across = box.shares
        rows = BlockCyclic(box.m, box.row_block // down, pr * down)
        cols = BlockCyclic(box.n, box.col_block // across, pc * across)
        place_c = tuple(
            grid.layer(x * across + y)[i * pc + j]
            for i in range(pr)
            for x in range(down)
            for j in range(pc)
            for y in range(across)
        )
        C = brought(problem.C, Distribution(rows, cols), place_c, problem.accumulate)
    skewed = [skewed_places(grid.layer(x), shape) if inside == "cannon" else (grid.layer(x),) * 2 for x in range(c)]
    place_a = tuple(skewed[x][0][i * pc + j] for i in range(pr) for j in range(pc) for x in range(c))
    place_b = tuple(skewed[x][1][i * pc + j] for i in range(pr) for x in range(c) for j in range(pc))
    return Layered(
        brought(problem.A, Distribution(r, inner_a), place_a),
        brought(problem.B, Distribution(inner_b, s), place_b),
        C,
        problem.accumulate,
        problem.width,
        problem.lookahead,
        "shift" if inside == "cannon" else problem.broadcast,
        place,
        c,
        inside,
        problem.reduced_rows,
    )


def inner_layouts(problem: Problem) -> Iterator[tuple[Layout, Layout]]:
    """Ways to lay out A in columns and B in rows over the same ranks."""
    A, B, size = problem.A, problem.B, problem.size
    m, n, k = problem.mnk
    found: dict[object, tuple[BlockCyclic, tuple[int, ...]]] = {}
    if A.distribution.rows.parts == 1:
        found[A.distribution.cols.canonical, A.place] = A.distribution.cols, A.place
    if B.distribution.cols.parts == 1:
        found.setdefault((B.distribution.rows.canonical, B.place), (B.distribution.rows, B.place))
    found[None] = BlockCyclic.even(k, size), tuple(range(size))
    for inner, place in found.values():
        yield (
            brought(A, Distribution(BlockCyclic.even(m, 1), inner), place),
            brought(B, Distribution(inner, BlockCyclic.even(n, 1)), place),
        )


def brought(x: Layout, distribution: Distribution, place: tuple[int, ...], dtype: np.dtype | None = None) -> Layout:
    """x where it lies so, described in this way, else what it is to become."""
    there = replace(x, distribution=distribution, place=place)
    return there if x.same_place(there) else replace(there, dtype=dtype or x.dtype)
