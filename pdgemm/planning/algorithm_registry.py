"""The registry of algorithms: one entry per algorithm, with its schedule, executor, grids, and layouts of A, B and C.

The names that callers and the command line accept, the candidates of a plan, the reading of saved plans, and the lists
in the documentation are derived from these entries.  `register_algorithm` adds an entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pdgemm.errors import ArgumentError
from pdgemm.names import AnyName
from pdgemm.planning import product_layouts as layouts
from pdgemm.planning.problem import AlgorithmRequest, Problem
from pdgemm.planning.search.grid_search import GridCandidate, Partition, Search, Takes
from pdgemm.schedules.products import Cannon, Inner, Layered, Product, Stationary, Summa


@dataclass(frozen=True, eq=False)
class Algorithm:
    """An algorithm that forms a product on many ranks.

    name     : name of the algorithm in requests, plans and reports.
    product  : class of the schedule.
    executor : "module:class" of the executor, which is imported at its first use.
    words, memory, good_for : short descriptions for the documentation.
    takes    : takes(Pr, Pc, layers, ranks) returns whether the algorithm runs on this grid if there are `ranks` ranks.
    needs    : the condition on these grids, for error messages; {ranks} is replaced by the number of ranks, {layers} by
        the same number and the word "layers".
    new_grid : new_grid(problem, candidate) returns the product with A, B and C laid out on the candidate's grid.
    here     : here(problem) yields the products to compare on the present grids of A, B and C; none by default.
    layers   : number of layers of the grids: "one", "several" or "any".
    twin     : name of the algorithm in requests for C^T = B^T A^T; "": the same name.
    mirrored : are the messages for C^T = B^T A^T different on a grid that is not square?
    policies : the names in `POLICIES` for which this algorithm is a candidate, too.
    grids    : grids(search) yields the grids to compare; None: the best grids that `takes` accepts.
    moves_by : names of the transports of panels or partial sums that are not movers.
    devices  : does the algorithm also run on matrices in device memory?
    triangles : does the algorithm form one triangle of C with half the work if `Product.triangle` is set?
    scales   : does the executor multiply panels by `Call.scales`?
    """

    name: str
    product: type[Product]
    executor: str
    words: str
    memory: str
    good_for: str
    takes: Takes
    needs: str
    new_grid: Callable[[Problem, GridCandidate], Product]
    here: Callable[[Problem], Iterator[Product]] = lambda problem: iter(())
    layers: Literal["one", "several", "any"] = "one"
    twin: str = ""
    mirrored: bool = False
    policies: tuple[str, ...] = ()
    grids: Callable[[Search], Iterator[GridCandidate]] | None = None
    moves_by: tuple[str, ...] = ()
    devices: bool = True
    triangles: bool = False
    scales: bool = False

    def misfit(self, problem: Problem) -> str:
        """Return the reason why the algorithm cannot form a product, on any grid; "" where it can."""
        if problem.device and not self.devices:
            return "is for matrices on the host, these are on a device"
        if problem.triangle and not self.triangles:
            able = ", ".join(name for x in ALGORITHMS.values() if x.triangles for name in x.names)
            return f"computes all of C; only {able} can compute one triangle"
        return "does not multiply operands with scales" if any(problem.scales) and not self.scales else ""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, self.twin) if self.twin else (self.name,)

    def called(self, transposed: bool) -> str:
        """Return the name of the algorithm; `transposed`: the name of its twin, if it has one."""
        return self.twin if transposed and self.twin else self.name

    def runs_on(self, pr: int, pc: int, layers: int, ranks: int) -> bool:
        """Does the algorithm run on this grid, for C = A B or for C^T = B^T A^T?"""
        return bool(self.takes(pr, pc, layers, ranks) or (self.mirrored and self.takes(pc, pr, layers, ranks)))

    def answers(self, request: AlgorithmRequest, transposed: bool = False) -> bool:
        """Does the algorithm satisfy the request?"""
        by_name = request.algorithm in ("auto", self.called(transposed), *self.policies)
        layers = {"one": request.layers in (None, 1), "several": request.layers != 1, "any": True}
        return by_name and layers[self.layers]

    def grid_candidates(self, search: Search) -> Iterator[GridCandidate]:
        """Yield the grids on which the planner compares this algorithm."""
        if self.grids:
            yield from self.grids(search)
        elif not search.transposed or self.mirrored:
            for partition in search.best(1 if self.layers == "one" else search.request.layers, self.takes):
                if not search.transposed or partition.pr != partition.pc:
                    yield GridCandidate(partition)


def _one_layer(pr: Any, pc: Any, c: Any, ranks: int) -> Any:
    return c == 1


def _torus(pr: Any, pc: Any, c: Any, ranks: int) -> Any:
    return (c == 1) & (pc % pr == 0)


def _stationary_grids(search: Search) -> Iterator[GridCandidate]:
    """Yield Pr x Pc grids for stationary A, as partitions Pr x 1 x Pc: their columns divide k, as layers do."""
    if search.request.shape is None:
        partitions = search.best(None, lambda pr, pc, c, ranks: pc == 1)
    else:
        pr, pc = search.request.shape
        partitions = [Partition(*search.mnk, pr, 1, pc)] if pr * pc <= search.ranks else []
    yield from map(GridCandidate, partitions)


def _layered_grids(search: Search) -> Iterator[GridCandidate]:
    """Yield grids with Cannon's algorithm or SUMMA in each layer."""

    def layered(pr: Any, pc: Any, c: Any, ranks: int) -> Any:
        return (c > 1) & ((pr * pc > 1) | search.forced)  # 1 x 1 x P is "inner"

    for partition in search.best(
        search.request.layers, lambda pr, pc, c, ranks: layered(pr, pc, c, ranks) & (pc % pr == 0)
    ):
        if not search.transposed or partition.pr != partition.pc:
            yield GridCandidate(partition, "cannon")
    if not search.transposed:
        yield from (GridCandidate(partition, "summa") for partition in search.best(search.request.layers, layered))


def _inner_grids(search: Search) -> Iterator[GridCandidate]:
    """Yield the only possible grid: 1 x 1, with one layer per rank."""
    (_, shape, layers), ranks = search.request, search.ranks
    possible = shape in (None, (1, 1)) and layers in (None, ranks) and (ranks > 1 or search.forced)
    if possible and not search.transposed:
        yield GridCandidate(Partition(*search.mnk, 1, 1, ranks))


_ENTRIES = (
    Algorithm(
        "summa", Summa, "pdgemm.algorithms.products.summa:SummaExecutor",
        words="(mk + kn)(q - 1)/q²", memory="a few panels",
        good_for="any block sizes; C largest, or A, B and C alike",
        takes=_one_layer, needs="it takes Pr x Pc <= {ranks}, in 1 layer",
        new_grid=lambda problem, candidate: layouts.summa_on(problem, candidate.partition),
        here=lambda problem: (x for base in problem.grids for x in layouts.summa_on_grid_of(problem, base)),
        policies=("row", "column", "allgather"), triangles=True, scales=True,
    ),
    Algorithm(
        "stationary_a", Stationary, "pdgemm.algorithms.products.summa:StationaryExecutor",
        words="as SUMMA, for the other two matrices", memory="a few panels",
        good_for="A (or B) largest: thin B and C",
        takes=_one_layer, needs="it takes Pr x Pc <= {ranks}, in 1 layer",
        new_grid=lambda problem, candidate: layouts.stationary(
            problem, (candidate.partition.pr, candidate.partition.layers), problem.rank_map[: candidate.partition.ranks]
        ),
        here=lambda problem: iter([layouts.stationary(problem, problem.A.distribution.grid_shape, problem.A.rank_map)]),
        twin="stationary_b", mirrored=True, policies=("allgather", "reduce_scatter"), grids=_stationary_grids,
        scales=True,
    ),
    Algorithm(
        "cannon", Cannon, "pdgemm.algorithms.products.cannon:CannonExecutor",
        words="as SUMMA, in neighbours' messages", memory="two blocks each of A and B",
        good_for="square-ish grids, high latency",
        takes=_torus, needs="one side of its grid divides the other, in 1 layer",
        new_grid=lambda problem, candidate: layouts.cannon_on(problem, candidate.partition),
        mirrored=True, policies=("row", "column", "allgather"), moves_by=("shift",), triangles=True, scales=True,
    ),
    Algorithm(
        "2.5d", Layered, "pdgemm.algorithms.products.layered:LayeredExecutor",
        words="falls as c^½ with c layers", memory="c times C's block, and a little",
        good_for="many ranks, or large k, and memory to spare",
        takes=lambda pr, pc, c, ranks: c > 1, needs="it takes Pr x Pc x layers <= {ranks}, with layers >= 2",
        new_grid=lambda problem, candidate: layouts.layered_on(problem, candidate.partition, candidate.inside),
        here=layouts.layered_here, layers="several", mirrored=True, grids=_layered_grids, moves_by=("shift",),
        triangles=True, scales=True,
    ),
    Algorithm(
        "inner", Inner, "pdgemm.algorithms.products.layered:InnerExecutor",
        words="mn (P - 1)/P, whatever k", memory="the rows of C that are reduced at a time",
        good_for="huge k",
        takes=lambda pr, pc, c, ranks: (pr * pc == 1) & (c == ranks), needs="its grid is 1 x 1 in {layers}",
        new_grid=lambda problem, candidate: layouts.inner_on_new_grid(problem, candidate.partition),
        here=lambda problem: (layouts.inner_on(problem, a, b) for a, b in layouts.inner_layouts(problem)),
        layers="any", policies=("reduce_scatter",), grids=_inner_grids, moves_by=("reduce_scatter",), triangles=True,
        scales=True,
    ),
)  # fmt: skip
ALGORITHMS = {entry.name: entry for entry in _ENTRIES}
# "row", "column": SUMMA or Cannon's algorithm on a P x 1 or 1 x P grid; others: algorithms with this `collective`
POLICIES = ("row", "column", "allgather", "reduce_scatter")


def register_algorithm(entry: Algorithm) -> AnyName:
    """Add an algorithm to the registry that plans choose from, and return its name.

    Every rank adds the same entry, before the first product.  Raises ArgumentError if the name exists already.
    """
    for name in entry.names:
        if name in algorithm_choices():
            raise ArgumentError(f"algorithm {name!r} exists already")
    ALGORITHMS[entry.name] = entry
    return AnyName(entry.name)


def families() -> tuple[str, ...]:
    """Return the names of all algorithms."""
    return tuple(name for entry in ALGORITHMS.values() for name in entry.names)


def algorithm_choices() -> tuple[str, ...]:
    """Return the values that the argument `algorithm` accepts."""
    return ("auto", *families(), *POLICIES)


def is_algorithm(name: object) -> bool:
    """Is the name a value of the argument `algorithm`?  The check is fast, because every product makes it."""
    return isinstance(name, str) and (name in ALGORITHMS or name == "auto" or name in algorithm_choices())


def algorithm_of(product: Product) -> Algorithm:
    """Return the entry of a product's algorithm."""
    return ALGORITHMS[product.algorithm]
