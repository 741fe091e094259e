"""The candidates of a plan: each algorithm on the present grids of A, B and C, and on the best new grids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, get_args

from pdgemm.errors import ArgumentError
from pdgemm.grids.layout import Layout
from pdgemm.planning.algorithm_registry import ALGORITHMS, algorithm_of
from pdgemm.planning.problem import AlgorithmRequest, Problem
from pdgemm.planning.product_layouts import cannon_on, summa_on_grid_of
from pdgemm.planning.search.grid_search import Partition, Search
from pdgemm.schedules.products import Product
from pdgemm.schedules.products.product import Collective
from pdgemm.support.text import counted, sides

_GRIDS = 2  # new grids that are compared for each algorithm


class Arrangement(NamedTuple):
    """A product on layouts that fit it; if `transposed`, it is the product C^T = B^T A^T."""

    product: Product
    transposed: bool = False

    @property
    def algorithm(self) -> str:
        """The name of the algorithm, as a user requests it."""
        return algorithm_of(self.product).called(self.transposed)

    @property
    def layouts(self) -> tuple[Layout, Layout, Layout]:
        """The layouts of A, B and C, as the user sees them."""
        A, B, C = self.product.A, self.product.B, self.product.C
        return (B.T, A.T, C.T) if self.transposed else (A, B, C)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Pr, Pc and layers of the grid for C, also where the product is C^T."""
        grid = self.product.grid
        pr, pc = grid.shape[::-1] if self.transposed else grid.shape
        return pr, pc, grid.layers


def arrangements(problem: Problem) -> Iterator[Arrangement]:
    """Yield the arrangements that the planner compares."""
    request = problem.request
    entry = next((x for x in ALGORITHMS.values() if request.algorithm in x.names), None)
    if entry and (misfit := entry.misfit(problem)):
        raise ArgumentError(f"algorithm {request.algorithm!r} {misfit}")
    suitable = (
        arrangement
        for one in request.on(problem.size)
        for arrangement in _arrangements(problem, one)
        if one.shape in (None, arrangement.shape[:2]) and one.layers in (None, arrangement.shape[2])
    )
    yield from suitable if request.algorithm not in get_args(Collective) else _of_collective(problem, suitable)


def _of_collective(problem: Problem, suitable: Iterator[Arrangement]) -> Iterator[Arrangement]:
    """Yield the arrangements that use the requested collective; if some need no redistribution, only these."""
    those = [x for x in suitable if x.product.collective == problem.algorithm]
    still = [x for x in those if all(map(Layout.same_owners, problem.layouts, x.layouts))]
    yield from still or those


def arrangements_in_place(problem: Problem) -> Iterator[Arrangement]:
    """If A, B and C are on one grid of all ranks, yield the arrangements without redistribution."""
    C, request = problem.C, problem.request
    shape = pr, pc = C.distribution.grid_shape
    alike = problem.A.grid == problem.B.grid == C.grid and pr * pc == problem.size and not problem.ideal
    if not alike or request.algorithm not in ("auto", "summa") or request.shape not in (None, shape) or request.layers:
        return
    candidates = [Arrangement(product) for product in summa_on_grid_of(problem, C)]
    if 1 in shape and problem.size > 1 and request.algorithm == "auto":
        m, n, k = problem.mnk
        partition = Partition(m, n, k, pr, pc, 1) if pr == 1 else Partition(n, m, k, pc, pr, 1)
        candidates.append(Arrangement(cannon_on(problem if pr == 1 else problem.T, partition), pr != 1))
    for arrangement in candidates:
        if all(x.same_owners(to) for x, to in zip(problem.layouts, arrangement.layouts)):
            yield arrangement


def _arrangements(problem: Problem, request: AlgorithmRequest) -> Iterator[Arrangement]:
    """Yield arrangements on the present grids of the matrices, and on the best new grids."""
    known = [entry for entry in ALGORITHMS.values() if not entry.misfit(problem)]
    for entry in () if problem.ideal else known:
        for p, transposed in ((problem, False), (problem.T, True)) if entry.twin else ((problem, False),):
            if entry.answers(request, transposed):
                yield from (Arrangement(product, transposed) for product in entry.here(p))
    search = Search(problem.mnk, problem.size, request, _GRIDS)
    for p, one in ((problem, search), (problem.T, search.T)):
        for entry in known:
            if entry.answers(request, one.transposed):
                for candidate in entry.grid_candidates(one):
                    yield Arrangement(entry.new_grid(p, candidate), one.transposed)


def impossible(request: AlgorithmRequest, ranks: int) -> str:
    """Return an error message: the reason why no grid satisfies the request, and the grids that the algorithm takes."""
    algorithm, shape, layers = request
    requested = algorithm + (f" on a {shape[0]} x {shape[1]} grid" if shape else "")
    requested += f" in {counted(layers, 'layer')}" if layers else ""
    entry = next((x for x in ALGORITHMS.values() if algorithm in x.names), None)
    reason = {
        "row": f"its grid is {ranks} x 1, in 1 layer",
        "column": f"its grid is 1 x {ranks}, in 1 layer",
        "allgather": f"its grid is {ranks} x 1 or 1 x {ranks}, in 1 layer",
        "reduce_scatter": f"its grid is {ranks} x 1, 1 x {ranks}, or 1 x 1 in {counted(ranks, 'layer')}",
        "auto": f"a grid has at most {counted(ranks, 'rank')}, layers included",
    }.get(algorithm) or (entry.needs.format(ranks=ranks, layers=counted(ranks, "layer")) if entry else "")
    text = f"{requested} is impossible on {counted(ranks, 'rank')}: {reason}"
    if not shape or (not entry and algorithm != "auto"):
        return text
    divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
    grids = [(pr, ranks // c // pr, c) for c in divisors for pr in divisors if ranks // c % pr == 0]
    accepted = [(pr, pc, c) for pr, pc, c in grids if (entry.runs_on(pr, pc, c, ranks) if entry else c == 1)]
    return f"{text}; grids of all ranks: {', '.join(sides(*x) for x in accepted[:20])}" if accepted else text
