"""Decide before running: what is moved where, by which algorithm, and what it costs each rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from pdgemm import dtypes
from pdgemm.errors import MemoryLimitError
from pdgemm.exchange import Exchange, plan_exchange
from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.grids.layout import Layout
from pdgemm.local import EXACT_WIDTH
from pdgemm.products import Inner, Summa
from pdgemm.timing import Traffic

PANEL_WIDTH = 512  # wide enough for BLAS to reach its peak, narrow enough to stay in flight behind it
ALGORITHMS = ("auto", "summa", "inner")
_REDUCED_BYTES = 1 << 26  # of C that are reduced at a time, but not fewer than _REDUCED_ROWS rows, for BLAS
_REDUCED_ROWS = 256
_NO_LIMIT = 1 << 62
_WORTH_MOVING = 2  # how many times fewer words make up for the memory of moved copies


@dataclass(frozen=True)
class Plan:
    """C := alpha A B + beta C from the user's layouts to the user's layouts: a value, without data.

    product : the algorithm, on layouts that fit it.
    moves   : what is redistributed: A and B before the product, C after it.
    home    : the matrix, "A", "B" or "C", on whose grid the product is done.
    """

    product: Summa | Inner
    moves: tuple[tuple[str, Exchange], ...]
    home: str

    def traffic(self, rank: int) -> Traffic:
        """Words and messages of a rank, moves included."""
        return sum((move.traffic(rank) for _, move in self.moves), self.product.traffic(rank))

    def extra_bytes(self, rank: int | None) -> int:
        """Memory of a rank beyond A, B and C as they were given; rank None: at most, of any rank."""
        return self.product.extra_bytes(rank) + sum(
            move.extra_bytes(rank) + (move.source if name == "C" else move.target).local_bytes(rank)
            for name, move in self.moves
        )

    @cached_property
    def description(self) -> str:
        """All of the plan in words, to compare among ranks."""
        return repr(self)

    @property
    def total_words(self) -> int:
        """Words that all ranks together send."""
        return self.product.total_words + sum(move.total_words for _, move in self.moves)


@lru_cache(maxsize=64)
def plan_product(
    A: Layout,
    B: Layout,
    C: Layout,
    size: int,
    *,
    accumulate: np.dtype,
    beta_is_zero: bool = True,
    algorithm: str = "auto",
    lookahead: int = 1,
    mover: str = "ibcast",
    panel_width: int | None = None,
    memory_limit: int | None = None,
) -> Plan:
    """The plan that sends the fewest words among those that fit `memory_limit` bytes on every rank.

    Matrices are moved, which costs memory, where no algorithm takes them as they lie, or memory is too small for it,
    or at most half as many words are sent in all.
    size : ranks of the communicator in which the layouts number their ranks.
    Raises MemoryLimitError, saying what is needed, where nothing fits.
    """
    width = min(panel_width or PANEL_WIDTH, _NO_LIMIT if accumulate in dtypes.BLAS else EXACT_WIDTH)
    products: list[tuple[Summa | Inner, str]] = []
    if algorithm != "inner":
        products += [
            (Summa(a, b, c, accumulate, width, lookahead, mover), home)
            for a, b, c, home in _summa_layouts(A, B, C, accumulate)
        ]
    if algorithm != "summa":
        m, n = C.distribution.shape
        rows = max(1, min(m, max(_REDUCED_ROWS, _REDUCED_BYTES // (max(1, n) * accumulate.itemsize))))
        products += [(Inner(a, b, C, accumulate, width, rows, size), "C") for a, b in _inner_layouts(A, B, size)]
    given = (A, B, C)
    plans = [_with_moves(x, home, given, size, beta_is_zero, None) for x, home in products]
    plans.sort(key=lambda plan: (plan.total_words * (_WORTH_MOVING if plan.moves else 1), len(plan.moves)))
    if memory_limit is None:
        return plans[0]
    least = [_with_moves(plan.product.narrowest, plan.home, given, size, beta_is_zero, 0) for plan in plans]
    for plan, narrowest in zip(plans, least, strict=True):
        spare = memory_limit - narrowest.extra_bytes(None)
        if plan.extra_bytes(None) > memory_limit and spare >= 0:
            # half of what is left over goes to the messages of moves, the rest to panels
            share = spare // (2 * max(1, len(plan.moves)))
            plan = _with_moves(plan.product, plan.home, given, size, beta_is_zero, share)
            while (needed := plan.extra_bytes(None)) > memory_limit:
                plan = replace(plan, product=plan.product.smaller(memory_limit / needed))
        if spare >= 0:
            return plan
    needed = min(plan.extra_bytes(None) for plan in least)
    raise MemoryLimitError(
        f"memory limit {memory_limit} bytes per rank is too small for A ({A}), B ({B}) and C ({C}): "
        f"at least {needed} bytes are needed" + (f" with lookahead {lookahead}" if lookahead else "")
    )


def _summa_layouts(
    A: Layout, B: Layout, C: Layout, accumulate: np.dtype
) -> Iterator[tuple[Layout, Layout, Layout, str]]:
    """Ways to lay out A, B and C for SUMMA: on the grid of one of them, C's rows as A's, C's columns as B's."""
    grids: dict[object, tuple[str, Layout]] = {}
    for name, x in (("C", C), ("A", A), ("B", B)):
        grids.setdefault(x.grid, (name, x))
    for home, base in grids.values():
        pr, pc = base.distribution.grid_shape
        on_a, on_b, on_c = (x.grid == base.grid for x in (A, B, C))
        a, b, c = A.distribution, B.distribution, C.distribution
        rows = [x.rows for x, here in ((c, on_c), (a, on_a)) if here] or [c.rows.over(pr)]
        cols = [x.cols for x, here in ((c, on_c), (b, on_b)) if here] or [c.cols.over(pc)]
        inner_a = a.cols if on_a else BlockCyclic.even(a.cols.n, pc)
        inner_b = b.rows if on_b else BlockCyclic.even(b.rows.n, pr)
        for r in {x.canonical: x for x in reversed(rows)}.values():
            for s in {x.canonical: x for x in reversed(cols)}.values():
                yield (
                    _brought(A, Distribution(r, inner_a), base.place),
                    _brought(B, Distribution(inner_b, s), base.place),
                    _brought(C, Distribution(r, s), base.place, accumulate),
                    home,
                )


def _inner_layouts(A: Layout, B: Layout, size: int) -> Iterator[tuple[Layout, Layout]]:
    """Ways to lay out A in columns and B in rows over the same ranks."""
    m, k, n = *A.distribution.shape, B.distribution.cols.n
    ways: dict[object, tuple[BlockCyclic, tuple[int, ...]]] = {}
    if A.distribution.rows.parts == 1:
        ways[A.distribution.cols.canonical, A.place] = A.distribution.cols, A.place
    if B.distribution.cols.parts == 1:
        ways.setdefault((B.distribution.rows.canonical, B.place), (B.distribution.rows, B.place))
    ways[None] = BlockCyclic.even(k, size), tuple(range(size))
    for inner, place in ways.values():
        yield (
            _brought(A, Distribution(BlockCyclic.even(m, 1), inner), place),
            _brought(B, Distribution(inner, BlockCyclic.even(n, 1)), place),
        )


def _brought(x: Layout, distribution: Distribution, place: tuple[int, ...], dtype: np.dtype | None = None) -> Layout:
    """x if it lies so, else what it is to become."""
    there = replace(x, distribution=distribution, place=place)
    return x if x.same_place(there) else replace(there, dtype=dtype or x.dtype)


def _with_moves(
    product: Summa | Inner,
    home: str,
    given: tuple[Layout, Layout, Layout],
    size: int,
    beta_is_zero: bool,
    spare: int | None,
) -> Plan:
    """The product with the exchanges it needs.

    spare : bytes for the messages of each exchange, beyond what messages of one element take; None: no limit.
    """
    A, B, C = given
    needed = [("A", A, product.A, True), ("B", B, product.B, True), ("C", product.C, C, beta_is_zero)]
    moves = []
    for name, x, to, plain in needed:
        if x != to:
            least = plan_exchange(x, to, size, plain, 0).extra_bytes(None)
            moves.append((name, plan_exchange(x, to, size, plain, None if spare is None else least + spare)))
    return Plan(product, tuple(moves), home)
