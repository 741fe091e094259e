"""The ways to lay out A, B and C for each algorithm: on the grids that they have, and on the best new ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.grids.layout import Layout
from pdgemm.model.machine import Machine
from pdgemm.planning.algorithm_grids import Cut, Wish, cuts
from pdgemm.planning.grid_search import Box
from pdgemm.schedules import Cannon, Inner, Layered, Product, Stationary, Summa
from pdgemm.schedules.product import READ, Placed
from pdgemm.schedules.steps import skewed_places

BROADCASTS = ("ibcast", "ring")  # movers to choose from; the first where nothing speaks for another
PRODUCTS = (Summa, Stationary, Cannon, Layered, Inner)
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
    mover     : one of BROADCASTS, "nccl", one of READ, or "auto".
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
    shared: bool = False  # may ranks of a node read each other's panels?
    reads: str = READ[0]  # and how they do
    device: str = ""  # where the matrices live; "": on the host
    compute: str = ""  # what operands may be rounded to, as of a product
    staged: bool = False  # must messages from and to the device go through the host?
    nodes: tuple[int, ...] = ()  # of each rank; (): all are on one
    private: str = ""  # which of A and B do not lie in it
    machine: Machine = field(default_factory=Machine, repr=False)

    @property
    def given(self) -> tuple[Layout, Layout, Layout]:
        return self.A, self.B, self.C

    @property
    def mnk(self) -> tuple[int, int, int]:
        return *self.C.distribution.shape, self.A.distribution.cols.n

    @property
    def wish(self) -> Wish:
        """Nothing is sent on one rank: there is nothing to choose."""
        alone = self.size == 1 and self.algorithm == "auto"
        return Wish("summa" if alone else self.algorithm, self.shape, self.layers)

    @property
    def T(self) -> Problem:
        """C^T = B^T A^T."""
        return replace(self, A=self.B.T, B=self.A.T, C=self.C.T, shape=self.wish.T.shape)

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
        if self.mover == "auto":
            return self.reads if self.shared else self.broadcasts[0]
        return self.mover

    @property
    def broadcasts(self) -> tuple[str, ...]:
        """Movers by message: what leaves the memory of a device late is passed on by point-to-point messages."""
        return ("ring",) if self.staged else BROADCASTS

    @property
    def line_up(self) -> tuple[int, ...]:
        """The nodes, where panels are read in place on each and relayed between them."""
        return self.nodes if self.broadcast in READ else ()

    @property
    def broadcast_by_message(self) -> str:
        """The same for algorithms that read panels in place only where all ranks are on one node."""
        return self.broadcasts[0] if self.broadcast in READ and self.nodes else self.broadcast

    @property
    def place_of_work(self) -> dict[str, Any]:
        """For a product: its device, and how it computes."""
        return {"device": self.device, "staged": self.staged, "compute": self.compute}

    @property
    def reduced_rows(self) -> int:
        m, n, _ = self.mnk
        return max(1, min(m, max(REDUCED_ROWS, REDUCED_BYTES // (max(1, n) * self.accumulate.itemsize))))


def ways(problem: Problem) -> Iterator[Way]:
    """All ways that are worth a comparison."""
    wish = problem.wish.on(problem.size)
    if wish is None:
        return
    for way in _ways(problem, wish):
        pr, pc, c = way.shape
        if wish.shape in (None, (pr, pc)) and wish.layers in (None, c):
            yield way


def ways_in_place(problem: Problem) -> Iterator[Way]:
    """All ways that move no matrix, where that is plain to see: where A, B and C lie on one grid of all ranks."""
    C, wish = problem.C, problem.wish
    shape = pr, pc = C.distribution.grid_shape
    alike = problem.A.grid == problem.B.grid == C.grid and pr * pc == problem.size
    if not alike or wish.algorithm not in ("auto", "summa") or wish.shape not in (None, shape) or wish.layers:
        return
    found = [*summa_here(problem, C)]
    if 1 in shape and problem.size > 1 and wish.algorithm == "auto":
        m, n, k = problem.mnk
        box = Box(m, n, k, pr, pc, 1) if pr == 1 else Box(n, m, k, pc, pr, 1)
        cut = Cut(box, "cannon", "", pr != 1)
        found.append(Way(on_new_grid(problem, cut), cut.transposed))
    for way in found:
        if all(x.same_place(to) for x, to in zip(problem.given, way.layouts)):
            yield way


def _ways(problem: Problem, wish: Wish) -> Iterator[Way]:
    """On the grids that the matrices have, and on the best new ones."""
    families = wish.families
    if "summa" in families:
        for base in problem.grids:
            yield from summa_here(problem, base)
    for name, p, transposed in (("stationary_a", problem, False), ("stationary_b", problem.T, True)):
        if name in families:
            yield Way(stationary(p, p.A.distribution.grid_shape, p.A.place), transposed)
    if "2.5d" in families:
        pr, pc = problem.C.distribution.grid_shape
        most = problem.size // (pr * pc)
        c = wish.layers or most
        if 1 < c <= most:
            yield Way(layered_on(problem, Box(*problem.mnk, pr, pc, c), "summa", on_layer_0=True))
    if "inner" in families:
        yield from (Way(inner_on(problem, a, b)) for a, b in inner_layouts(problem))
    for cut in cuts(problem.mnk, problem.size, wish, _BOXES):
        yield Way(on_new_grid(problem, cut), cut.transposed)


def on_new_grid(problem: Problem, cut: Cut) -> Product:
    """What a cut says, on layouts that fit it."""
    box, family, inside, transposed = cut
    p = problem.T if transposed else problem
    if family == "summa":
        return summa_on(p, box)
    if family == "cannon":
        return cannon_on(p, box)
    if family == "stationary_a":
        return stationary(p, (box.pr, box.layers), p.place[: box.ranks])
    if family == "2.5d":
        return layered_on(p, box, inside)
    *_, (a, b) = inner_layouts(p)
    return inner_on(p, a, b)


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
    laid = _laid(problem, (r, inner_a, place), (inner_b, s, place), (r, s, place))
    product = Summa(*laid, problem.lookahead, problem.broadcast, problem.line_up, **problem.place_of_work)
    return product if problem.width_asked else product.whole()


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
    laid = _laid(problem, (rows, inner, place), (inner, cols_b, across), (rows, cols_c, place))
    return Stationary(*laid, problem.lookahead, problem.broadcast_by_message, **problem.place_of_work)


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
    laid = _laid(problem, (r, inner_a, place_a), (inner_b, s, place_b), (r, s, place))
    return Cannon(*laid, 1, "shift", **problem.place_of_work)


def layered_on(problem: Problem, box: Box, inside: str, on_layer_0: bool = False) -> Layered:
    """In layers, C shared out over them, or on layer 0 as the user has it."""
    c, place = box.layers, problem.place[: box.ranks]
    pr, pc = shape = box.pr, box.pc
    grid = Placed(shape, c, place)
    r, s, inner_a, inner_b = _dims(box)
    if on_layer_0:
        r, s = problem.C.distribution.rows, problem.C.distribution.cols
        of_c = (r, s, problem.C.place)
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
        of_c = (rows, cols, place_c)
    skewed = [skewed_places(grid.layer(x), shape) if inside == "cannon" else (grid.layer(x),) * 2 for x in range(c)]
    place_a = tuple(skewed[x][0][i * pc + j] for i in range(pr) for j in range(pc) for x in range(c))
    place_b = tuple(skewed[x][1][i * pc + j] for i in range(pr) for x in range(c) for j in range(pc))
    mover = "shift" if inside == "cannon" else problem.broadcast
    laid = _laid(problem, (r, inner_a, place_a), (inner_b, s, place_b), of_c)
    nodes = problem.line_up if inside == "summa" else ()
    product = Layered(
        *laid, problem.lookahead, mover, place, c, inside, problem.reduced_rows, nodes, **problem.place_of_work
    )
    return product if problem.width_asked else product.whole()


def inner_on(problem: Problem, a: Layout, b: Layout) -> Inner:
    """A and B in such layouts, C where it is."""
    by = problem.broadcast_by_message
    mover = by if by in READ else "reduce_scatter"
    accumulate, rows = problem.accumulate, problem.reduced_rows
    return Inner(a, b, problem.C, accumulate, problem.width, 0, mover, rows, problem.size, **problem.place_of_work)


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


Laid = tuple[BlockCyclic, BlockCyclic, tuple[int, ...]]  # rows and columns over these ranks


def _laid(problem: Problem, A: Laid, B: Laid, C: Laid) -> tuple[Layout, Layout, Layout, np.dtype, int]:
    """The layouts of a product, its type of accumulation and the width of its panels."""
    (*of_a, at_a), (*of_b, at_b), (*of_c, at_c) = A, B, C
    return (
        brought(problem.A, Distribution(*of_a), at_a),
        brought(problem.B, Distribution(*of_b), at_b),
        brought(problem.C, Distribution(*of_c), at_c, problem.accumulate),
        problem.accumulate,
        problem.width,
    )


def brought(x: Layout, distribution: Distribution, place: tuple[int, ...], dtype: np.dtype | None = None) -> Layout:
    """x where it lies so, described in this way, else what it is to become."""
    there = replace(x, distribution=distribution, place=place)
    return there if x.same_place(there) else replace(there, dtype=dtype or x.dtype)
