"""The plan that `pdgemm()` would choose for given extents on any number of ranks, without MPI; layouts as texts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

import numpy as np

from pdgemm.errors import ArgumentError, LayoutError, MemoryLimitError
from pdgemm.grids.distribution import Distribution
from pdgemm.grids.layout import Layout
from pdgemm.local.arrays import dtypes
from pdgemm.planning.machines.machine import CUDA, Machine, on_nodes
from pdgemm.planning.machines.simulator import consecutive
from pdgemm.planning.planner import best_plan, considered, panel_width, panels_ahead
from pdgemm.planning.problem import Problem
from pdgemm.planning.product_plan import ProductPlan
from pdgemm.planning.search.candidate_table import Candidate
from pdgemm.planning.search.grid_search import near_root
from pdgemm.schedules.formulas import lower_bound
from pdgemm.schedules.mover_registry import AUTO, IPC, NCCL, POLICIES, SHARED, by_messages, host_movers
from pdgemm.support.text import counted, in_bytes

DEFAULT, IDEAL = "default", "ideal"
FORMS = (
    f"{IDEAL}, or {DEFAULT}, columns, rows, blocks or such as 'block=64x64 grid=8x8 source=1,2', for all three or "
    "as in 'A=columns; B=rows'"
)
MOST_BLOCKS = 10**6  # blocks of a dimension of a matrix, which plans compare one by one
MOST_SIDE = 1 << 14  # ranks along a side of a grid: a plan for one that is longer would take minutes
_SHOWN = 100  # characters of an invalid text that a message shows


def layouts_of(
    text: str, matrices: Mapping[str, tuple[tuple[int, int], np.dtype]], ranks: int
) -> dict[str, Layout]:  # fmt: skip
    """Return the layout of each matrix on the first ranks of `ranks`.

    text     : a layout for all matrices, or NAME=layout for some, separated by semicolons; the others are "default".
               "=" may stand between spaces.  A layout is one of
               "default", "blocks" : one block per rank of the most nearly square grid Pr x Pc, Pr <= Pc;
               "columns", "rows"   : one block of consecutive columns (rows) per rank;
               "block=MBxNB grid=PrxPc source=I,J" : a block-cyclic layout whose first block is on grid position (I, J).
               Any of the three may be left out: the blocks are then one per rank, the grid as in "default", and
               the source 0,0.  "block=64" is "block=64x64".
    matrices : the shape and the element type of each matrix, by its name of one letter.

    Raises ArgumentError for any other text, and for grids that have more than `ranks` ranks.
    """
    parts = [x.strip() for x in re.sub(r"\s*=\s*", "=", text).split(";") if x.strip()]
    named = {x[0]: x[2:] for x in parts if x[1:2] == "="}
    everyone, layouts = tuple(range(ranks)), dict[str, Layout]()
    try:
        if len(parts) != max(1, len(named)) or not {*named} <= {*matrices}:
            raise ValueError
        for name, (shape, dtype) in matrices.items():
            distribution = _distribution(named.get(name, DEFAULT) if named else parts[0], shape, ranks)
            layouts[name] = Layout(distribution, everyone[: prod(distribution.grid_shape)], dtype)
    except LayoutError as error:
        raise ArgumentError(f"the layout of {name} is not possible: {error}") from None
    except ValueError:
        raise ArgumentError(f"layouts are {FORMS}; got {text[:_SHOWN]!r}") from None
    return layouts


def _distribution(text: str, shape: tuple[int, int], ranks: int) -> Distribution:
    """Return the distribution that the text describes.  Raises ValueError for another text."""
    square = near_root(ranks), ranks // near_root(ranks)
    grid = {DEFAULT: square, "blocks": square, "columns": (1, ranks), "rows": (ranks, 1)}.get(text)
    pairs = dict[str, tuple[int, int]]()
    for word in text.split() if grid is None else ():
        number = re.fullmatch(r"(block|grid|source)=(\d{1,12})(?:[x,](\d{1,12}))?", word)
        if number is None or number[1] in pairs or (number[3] is None and number[1] != "block"):
            raise ValueError
        pairs[number[1]] = int(number[2]), int(number[3] or number[2])
    if grid is None and not pairs:
        raise ValueError
    pr, pc = grid or pairs.get("grid", square)
    if not 1 <= pr * pc <= ranks:
        raise LayoutError(f"a grid of {pr} x {pc} does not fit {counted(ranks, 'rank')}")
    if max(pr, pc) > MOST_SIDE and (pr, pc) != square:
        raise LayoutError(f"a grid of {pr} x {pc} is longer than {MOST_SIDE:,} ranks")
    distribution = Distribution.over((pr, pc), shape, pairs.get("block"), pairs.get("source", (0, 0)))
    if any(x.n > MOST_BLOCKS * x.block for x in (distribution.rows, distribution.cols)) and "block" in pairs:
        raise LayoutError(f"there are more than {MOST_BLOCKS:,} blocks in a row or column of blocks")
    return distribution


_LARGEST, _MOST_RANKS = 10**12, 10**7
MOST_TRIED = 1 << 14  # most ranks for which `on_more_ranks` makes a plan: such a plan takes a second
_TRIES = 6  # attempts of `on_more_ranks`


def movers() -> tuple[str, ...]:
    """Return the policies and movers that a question accepts, which are for matrices on the host."""
    return (*POLICIES, *host_movers())


@dataclass(frozen=True)
class Question:
    """C (m x n) := A (m x k) B (k x n) on some ranks of a machine, with the arguments of `pdgemm()`.

    layouts : "default": A, B and C have the layouts of `DistMatrix.empty`, one block per rank of a near-square grid;
              "ideal": each algorithm gets A, B and C on layouts that fit it, and nothing is redistributed; a text such
              as "A=columns; B=rows" (`pdgemm.planning.question`); or the layouts of A, B and C, with their types.
    memory  : bytes per rank for local parts of A, B and C, copies, panels and messages together.
    mover   : one of `movers()`; with "auto" and "shared", ranks read node-shared memory if nodes have several ranks.
        On GPUs "auto" is CUDA IPC or NCCL, if these were measured on the machine.
    width   : width of the widest panel; None: the model chooses the width.
    machine : the machine; each of its nodes holds `ranks_per_node` consecutive ranks.
    """

    m: int
    n: int
    k: int
    ranks: int
    dtype: np.dtype = field(default_factory=lambda: np.dtype(np.float64))
    layouts: str | tuple[Layout, Layout, Layout] = "default"
    memory: int | None = None
    algorithm: str = "auto"
    shape: tuple[int, int] | None = None
    layers: int | None = None
    lookahead: int | None = None
    mover: str = "auto"
    width: int | None = None
    machine: Machine = field(default_factory=Machine)

    def __post_init__(self) -> None:
        if min(self.mnk) < 0 or max(self.mnk) > _LARGEST:
            raise ArgumentError(f"dimensions are from 0 to {_LARGEST:,}, got {self.m} x {self.n} x {self.k}")
        if not 1 <= self.ranks <= _MOST_RANKS:
            raise ArgumentError(f"a product needs 1 to {_MOST_RANKS:,} ranks, got {self.ranks}")
        if self.shape is not None and min(self.shape) < 1:
            raise ArgumentError(f"a grid has 1 x 1 ranks or more, got {self.shape[0]} x {self.shape[1]}")
        if self.mover not in movers():
            raise ArgumentError(f"mover {self.mover!r} is not one of {', '.join(movers())}")
        without_neighbours = self.machine.ranks_per_node == 1 or self.machine.device == CUDA
        if self.mover == SHARED.name and self.ranks > 1 and without_neighbours:
            raise ArgumentError("mover 'shared' is for ranks that share memory with others of their node")
        _ = self._layouts  # raises an error for bad layouts

    @property
    def mnk(self) -> tuple[int, int, int]:
        return self.m, self.n, self.k

    @cached_property
    def problem(self) -> Problem:
        """The problem that `pdgemm()` would pass to the planner."""
        A, B, C = self._layouts.values()
        accumulate = dtypes.arithmetic(A.dtype, B.dtype, C.dtype)
        per_node = self.machine.ranks_per_node
        if per_node is not None and per_node >= self.ranks:
            per_node = None  # one node holds all ranks
        machine = on_nodes(self.machine, per_node)
        gpus, several = machine.device == CUDA, self.ranks > 1
        shared = several and per_node != 1 and self.mover in (AUTO, SHARED.name)
        by_message = self.mover if self.mover in by_messages() else AUTO
        if gpus:
            shared = several and per_node is None and self.mover == AUTO and IPC.name in machine.intra
            nccl = NCCL.name in (machine.inter if per_node else machine.intra)
            by_message = NCCL.name if several and nccl and not shared and self.mover == AUTO else by_message
        problem = Problem(
            A, B, C, self.ranks,
            beta_is_zero=True,
            accumulate=accumulate,
            width=panel_width(self.width, accumulate, machine, gpus * max(A.dtype.itemsize, B.dtype.itemsize)),
            lookahead=panels_ahead(self.lookahead, machine, gpus),
            mover=SHARED.name if shared and self.mover == SHARED.name else by_message,
            algorithm=self.algorithm,
            shape=self.shape,
            layers=self.layers,
            memory_limit=None if self.memory is None else self.memory - self.given_bytes,
            width_asked=self.width is not None,
            shared=shared,
            reads=IPC.name if gpus else SHARED.name,
            device=CUDA if gpus else "",
            staged=machine.staged and by_message != NCCL.name,
            nodes=consecutive(self.ranks, per_node) if shared and per_node else (),
            ideal=self._ideal,
            machine=machine,
        )  # fmt: skip
        if not self.k:  # no product is formed
            return replace(problem, algorithm="summa", shape=C.distribution.grid_shape, layers=1)
        return problem

    @property
    def _ideal(self) -> bool:
        return self.layouts == IDEAL

    @cached_property
    def _layouts(self) -> dict[str, Layout]:
        if isinstance(self.layouts, tuple):
            return dict(zip("ABC", self.layouts))
        m, n, k = self.mnk
        of_c = dtypes.product(self.dtype, self.dtype)
        matrices = {"A": ((m, k), self.dtype), "B": ((k, n), self.dtype), "C": ((m, n), of_c)}
        return layouts_of(DEFAULT if self._ideal else self.layouts, matrices, self.ranks)

    @property
    def matrices(self) -> dict[str, dict[str, tuple[int, int]]]:
        """The shape, process grid, block sizes and first owner of A, B and C by name; empty if `layouts` is "ideal"."""
        distributions = {} if self._ideal else {name: x.distribution for name, x in self._layouts.items()}
        return {
            name: {"shape": x.shape, "grid": x.grid_shape, "block": x.block, "source": x.source}
            for name, x in distributions.items()
        }

    @property
    def given_bytes(self) -> int:
        """The bytes of the largest local parts of the user's A, B and C; 0 if `layouts` is "ideal"."""
        return 0 if self._ideal else sum(x.local_bytes(None) for x in self._layouts.values())

    @property
    def bound(self) -> float:
        """The lower bound, for any algorithm, on the words that the busiest rank receives."""
        words = None if self.memory is None else self.memory / self.dtype.itemsize
        return lower_bound(*self.mnk, self.ranks, words)

    def plan(self) -> ProductPlan:
        """Return the plan that `pdgemm()` would carry out.

        Raises ArgumentError where no grid fits the request, MemoryLimitError where no plan fits the memory.
        """
        plan, _ = best_plan(self.problem)
        if plan is None:
            raise MemoryLimitError(self.shortage())
        return plan

    def shortage(self) -> str:
        """Return the shortage of memory as a sentence; "" if a plan fits the memory."""
        if best_plan(self.problem)[0] is not None:
            return ""
        share = sum(x.local_bytes(None) for x in self._layouts.values())
        return (
            f"{in_bytes(self.memory or 0)} per rank is too small: at least {in_bytes(self.least_bytes)} "
            f"are needed on {counted(self.ranks, 'rank')}, of which {in_bytes(share)} are A, B and C"
        )

    @property
    def least_bytes(self) -> int:
        """The bytes per rank of the chosen plan, A, B and C included; if no plan fits, the fewest that a plan needs."""
        plan, least = best_plan(self.problem)
        return self.given_bytes + (least if plan is None else plan.extra_bytes(None))

    @property
    def least_ranks(self) -> int:
        """The least number of ranks whose memory holds A, B and C; 0: the memory is unlimited or 0."""
        total = sum(prod(x.distribution.shape) * x.dtype.itemsize for x in self._layouts.values())
        return -(-total // self.memory) if self.memory else 0

    def on_more_ranks(self) -> Question | None:
        """Return the question for the first larger number of ranks on which a plan fits; None: no number tried fits.

        At most _TRIES multiples of `ranks` are tried, in ascending order from `least_ranks` up to MOST_TRIED.
        """
        times = max(2, -(-self.least_ranks // self.ranks))
        for _ in range(_TRIES if self.memory else 0):
            if times * self.ranks > MOST_TRIED:
                break
            more = replace(self, ranks=times * self.ranks)
            with suppress(ArgumentError):  # the requested grid may not fit this number of ranks
                if more.given_bytes <= (self.memory or 0) and best_plan(more.problem)[0] is not None:
                    return more
            times += max(1, times // 8)
        return None

    def candidates(self) -> list[Candidate]:
        """Return the candidates, the chosen one first; their memory includes A, B and C."""
        return [self._whole(x) for x in considered(self.plan())]

    def chosen(self) -> Candidate:
        """Return the first of `candidates`, without the others."""
        return self._whole(self.plan().candidate("chosen", chosen=True))

    def _whole(self, x: Candidate) -> Candidate:
        size = x.memory_bytes_per_rank + self.given_bytes
        return replace(x, memory_bytes_per_rank=size, lower_bound_words=self.bound)
