"""How to cut the m x n x k box of a product among P ranks: grids Pr x Pc x c, compared by formula.

Every rank multiplies a block of ceil(m/Pr) x ceil(n/Pc) x (k/c): it needs the parts of A and B that the other ranks
of its row and column hold, and its part of C is added up over the layers.  So cut, all algorithms send the same
words; they differ in messages and memory.  Nothing here depends on P but the number of grids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import isqrt
from typing import Any

import numpy as np

IDLE = 0.05  # of the work of the ranks may be given up for fewer words


@dataclass(frozen=True)
class Box:
    """C (m x n) = A (m x k) B (k x n) on Pr x Pc x c ranks; sizes are those of the largest block."""

    m: int
    n: int
    k: int
    pr: int
    pc: int
    layers: int

    @property
    def ranks(self) -> int:
        return self.pr * self.pc * self.layers

    @cached_property
    def shares(self) -> tuple[int, int]:
        """How the layers share a block of C: so many of them along the rows times so many along the columns."""
        rows = int(_row_shares(self.m, self.n, *(np.array([x]) for x in (self.pr, self.pc, self.layers)))[0])
        return rows, self.layers // rows

    @property
    def high(self) -> int:
        """Rows of a block of C."""
        unit = self.pr * self.shares[0]
        return self.shares[0] * -(-self.m // unit)

    @property
    def wide(self) -> int:
        """Columns of a block of C."""
        unit = self.pc * self.shares[1]
        return self.shares[1] * -(-self.n // unit)

    @property
    def block(self) -> int:
        """Inner indices are dealt in blocks of this size: to the layers in turn, in a layer to rows and columns."""
        return max(1, -(-self.k // (self.layers * int(turns(self.pr, self.pc)))))

    @property
    def deep(self) -> int:
        """Inner indices of a layer."""
        return min(self.k, self.block * -(-self.k // (self.block * self.layers)))

    @property
    def words(self) -> tuple[float, float, float]:
        """Received by a rank with full blocks: of A, of B, of C."""
        return (
            self.high * self.deep * (1 - 1 / self.pc),
            self.deep * self.wide * (1 - 1 / self.pr),
            self.high * self.wide * (1 - 1 / self.layers) * (self.k > 0),
        )

    @property
    def total_words(self) -> int:
        """That all ranks together send: exact, for ragged blocks too."""
        m, n, k = self.m, self.n, self.k
        return (m * k * (self.pc - 1) + k * n * (self.pr - 1) + m * n * (self.layers - 1)) * (k > 0)


def turns(pr: Any, pc: Any) -> Any:
    """Blocks of inner indices in a layer: a multiple of the longer side that nearly is one of the shorter side."""
    long: Any = np.maximum(pr, pc)
    short: Any = np.minimum(pr, pc)
    best: Any = long
    least: Any = np.ceil(long / short) * short / long
    for times in range(2, 9):
        excess = np.ceil(times * long / short) * short / (times * long)
        better = (least > 1 + IDLE) & (excess < least)
        best, least = np.where(better, times * long, best), np.where(better, excess, least)
    return best


def _row_shares(m: int, n: int, pr: np.ndarray, pc: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Into how many shares of rows c layers cut a block of C, such that little is lost by rounding."""
    root = np.array([_near_root(int(x)) for x in c])
    best, least = c, np.full(len(c), np.inf)
    for rows in (c, root, c // root, np.ones_like(c)):
        cols = c // rows
        area = (rows * -(-m // (pr * rows))) * (cols * -(-n // (pc * cols))).astype(float)
        best, least = np.where(area < least, rows, best), np.minimum(area, least)
    return best


@lru_cache(maxsize=4096)
def _near_root(c: int) -> int:
    """The largest divisor of c whose square is at most c."""
    return next(x for x in range(isqrt(c), 0, -1) if c % x == 0)


def divisor_like(total: int, most: int) -> np.ndarray:
    """The numbers total // x: no larger one leaves as much to its cofactors."""
    x = np.arange(1, isqrt(total) + 1)
    values = np.union1d(x, total // x)
    return np.unique(np.minimum(values, max(1, most)))


@lru_cache(maxsize=64)
def grids(
    m: int, n: int, k: int, ranks: int, layers: int | None = None, shape: tuple[int, int] | None = None
) -> np.ndarray:
    """All Pr, Pc, c worth a thought, one row each: none can be made larger in one direction.

    layers, shape : where they are given.
    """
    if shape is not None:
        deep = min(ranks // (shape[0] * shape[1]), max(1, k)) if layers is None else layers
        return np.array([[*shape, deep]] if 0 < shape[0] * shape[1] * deep <= ranks else np.zeros((0, 3), int))
    plane = ranks if layers is None else ranks // layers
    found = [np.zeros((0, 3), int)]
    for a in divisor_like(plane, m) if plane else []:
        left = plane // int(a)
        b = divisor_like(left, n) if layers is None else np.array([min(left, max(1, n))])
        c = np.minimum(left // b, max(1, k)) if layers is None else np.full(1, layers)
        found.append(np.stack([np.full(len(b), a), b, c], axis=1))
    return np.concatenate(found)


def best_grids(
    m: int,
    n: int,
    k: int,
    ranks: int,
    keep: int = 1,
    *,
    layers: int | None = None,
    shape: tuple[int, int] | None = None,
    fits: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray] | None = None,
) -> list[Box]:
    """The grids on which a rank receives the fewest words, best first, among those that leave few ranks idle.

    fits : which of the grids (Pr, Pc, c) are allowed.
    """
    every = grids(m, n, k, ranks, layers, shape)
    if fits is not None:
        every = every[fits(*every.T)]
    if not len(every):
        return []
    ranks_used = every.prod(axis=1)
    every = every[ranks_used >= (1 - IDLE) ** 2 * ranks_used.max()]  # the others leave too many idle
    pr, pc, c = every.T
    rows = _row_shares(m, n, pr, pc, c)
    cols = c // rows
    high, wide = rows * -(-m // (pr * rows)), cols * -(-n // (pc * cols))
    block = np.maximum(1, -(-k // (c * turns(pr, pc))))
    deep = np.minimum(k, block * -(-k // (block * c)))
    words = high * deep * (1 - 1 / pc) + deep * wide * (1 - 1 / pr) + high * wide * (1 - 1 / c) * (k > 0)
    work = high.astype(float) * wide * deep
    allowed = np.flatnonzero(work * (1 - IDLE) <= work.min())
    order = allowed[np.lexsort((work[allowed], words[allowed]))][:keep]
    return [Box(m, n, k, int(pr[x]), int(pc[x]), int(c[x])) for x in order]
