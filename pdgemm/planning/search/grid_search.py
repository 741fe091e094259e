"""The grids Pr x Pc x c that partition a product m x n x k among P ranks, compared by formula.

Every rank multiplies a block of ceil(m/Pr) x ceil(n/Pc) x (k/c): the rank needs the parts of A and B that the other
ranks of its grid row and grid column hold, and its partial sum of C is reduced over the layers.  On the same partition
all algorithms send the same words; they differ in messages and memory.  The time of the search depends on P only
through the number of grids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import isqrt
from typing import Any, NamedTuple

import numpy as np

from pdgemm.planning.problem import AlgorithmRequest

Takes = Callable[[Any, Any, Any, int], Any]  # takes(Pr, Pc, layers, ranks) -> bool, or array for arrays of grids

IDLE = 0.05  # share of the work that may be lost to idle ranks for fewer words


@dataclass(frozen=True)
class Partition:
    """C (m x n) = A (m x k) B (k x n) on Pr x Pc x c ranks."""

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
        """The numbers of parts into which the layers divide the rows, and the columns, of a block of C."""
        rows = int(_row_shares(self.m, self.n, *(np.array([x]) for x in (self.pr, self.pc, self.layers)))[0])
        return rows, self.layers // rows

    @cached_property
    def row_block(self) -> int:
        """The block size of the rows of C: a multiple of shares[0], so that layers can divide each block."""
        unit = self.pr * self.shares[0]
        return self.shares[0] * max(1, -(-self.m // unit))

    @cached_property
    def col_block(self) -> int:
        """The block size of the columns of C: a multiple of shares[1], so that layers can divide each block."""
        unit = self.pc * self.shares[1]
        return self.shares[1] * max(1, -(-self.n // unit))

    @cached_property
    def block(self) -> int:
        """The block size of inner indices; blocks are cyclic over layers, and in a layer over grid rows or columns."""
        return max(1, -(-self.k // (self.layers * int(inner_blocks(self.pr, self.pc)))))


def inner_blocks(pr: Any, pc: Any) -> Any:
    """Return the number of inner blocks of a layer, a multiple of max(pr, pc).

    So max(pr, pc) owners have equally many blocks.  If possible, the number is chosen such that min(pr, pc) owners have
    almost equally many, too: the largest share is at most `IDLE` above the mean.
    """
    long, short = np.maximum(pr, pc), np.minimum(pr, pc)
    best, least = long, np.ceil(long / short) * short / long  # exact below 2^53
    for times in range(2, 9):
        if np.all(least <= 1 + IDLE):
            break
        excess = np.ceil(times * long / short) * short / (times * long)
        better = (least > 1 + IDLE) & (excess < least)
        best, least = np.where(better, times * long, best), np.where(better, excess, least)
    return best


def _row_shares(m: int, n: int, pr: np.ndarray, pc: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return the number of parts into which c layers divide the rows of a block of C, with the least padding.

    If several numbers need equally little padding, layers divide the columns rather than the rows.  Each layer then has
    a part of the few rows that are reduced at a time.
    """
    different, which = np.unique(c, return_inverse=True)
    root = np.array([near_root(x) for x in different.tolist()], int)[which]
    best, least = c, np.full(len(c), np.inf)
    for rows in (np.ones_like(c), root, c // root, c):
        cols = c // rows
        area = rows * np.ceil(m / (pr * rows)) * (cols * np.ceil(n / (pc * cols)))
        best, least = np.where(area < least, rows, best), np.minimum(area, least)
    return best


@lru_cache(maxsize=4096)
def near_root(c: int) -> int:
    """Return the largest divisor of c whose square is at most c."""
    return next(x for x in range(isqrt(c), 0, -1) if c % x == 0)


def divisor_like(total: int, most: int) -> np.ndarray:
    """Return the distinct values of min(total // x, most) for x = 1, 2, ..., total, ascending.

    Each is the largest v <= most among all v with the same total // v.
    """
    small = np.arange(1, isqrt(total) + 1)
    large = (total // small)[::-1]
    values = np.concatenate([small, large[int(large[0] == small[-1]) :]])  # both arrays may contain the root
    return values if values[-1] <= most else np.append(values[values < most], most)


def grids(
    m: int, n: int, k: int, ranks: int, layers: int | None = None, shape: tuple[int, int] | None = None
) -> np.ndarray:
    """Return all maximal grids as an array with a row Pr, Pc, c for each: none of the three can be larger.

    layers, shape : the requested number of layers and grid; None: any.
    """
    m, n, k = max(1, m), max(1, n), max(1, k)
    if shape is not None:
        depth = min(ranks // (shape[0] * shape[1]), k) if layers is None else layers
        return np.array([[*shape, depth]] if 0 < shape[0] * shape[1] * depth <= ranks else np.zeros((0, 3), int))
    plane = ranks if layers is None else ranks // layers
    first = divisor_like(plane, m) if plane else np.zeros(0, int)
    left = plane // np.maximum(1, first)
    if layers is None:
        many = np.array([isqrt(x) for x in left.tolist()], int)  # as in divisor_like(x, n), for all x at once
        which = np.repeat(np.arange(len(left)), many)
        small = np.arange(len(which)) - np.repeat(np.cumsum(many) - many, many) + 1
        second = np.minimum(n, np.concatenate([small, left[which] // small]))
        which, second = np.divmod(np.unique(np.tile(which, 2) * (n + 1) + second), n + 1)
        first, third = first[which], np.minimum(left[which] // second, k)
    else:
        second, third = np.minimum(left, n), np.full(len(left), layers)
    return np.stack([first, second, third], axis=1)


@lru_cache(maxsize=64)
def priced(
    m: int, n: int, k: int, ranks: int, layers: int | None, shape: tuple[int, int] | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the grids on which few ranks are idle, and m_loc n_loc k_loc, the size of the largest block of each.

    The grids are in ascending order of the words that the busiest rank receives.
    """
    if m < n:  # the grids of C^T = B^T A^T
        every, work = priced(n, m, k, ranks, layers, shape and shape[::-1])
        return every[:, [1, 0, 2]], work
    every = grids(m, n, k, ranks, layers, shape)
    used = every.prod(axis=1)
    every = every[used >= (0.75 if ranks < 256 else 0.9) * used.max(initial=0)]  # other grids leave too many idle
    pr, pc, c = every.T
    rows = _row_shares(m, n, pr, pc, c)
    cols = c // rows
    m_loc = np.minimum(m, rows * np.ceil(m / (pr * rows)))
    n_loc = np.minimum(n, cols * np.ceil(n / (pc * cols)))
    block = np.maximum(1, np.ceil(k / (c * inner_blocks(pr, pc))))
    k_loc = np.minimum(k, block * np.ceil(k / (block * c)))
    words = m_loc * k_loc * (1 - 1 / pc) + k_loc * n_loc * (1 - 1 / pr) + m_loc * n_loc * (1 - 1 / c) * (k > 0)
    work = m_loc * n_loc * k_loc
    order = np.lexsort((work, words))
    return every[order], work[order]


def best_grids(
    m: int,
    n: int,
    k: int,
    ranks: int,
    keep: int = 1,
    *,
    layers: int | None = None,
    shape: tuple[int, int] | None = None,
    takes: Takes | None = None,
    anyhow: bool = False,
) -> list[Partition]:
    """Return the grids on which a rank receives the fewest words, best first, among grids with few idle ranks.

    takes  : which grids are allowed; None: all.
    anyhow : allow grids with more ranks than rows, columns or inner indices, if there are no other grids.
    """
    every, work = priced(m, n, k, ranks, layers, shape)
    if takes is not None:
        pr, pc, c = every.T
        allowed = np.asarray(takes(pr, pc, c, ranks))
        every, work = every[allowed], work[allowed]
    if not len(every):
        side = max(ranks, m, n, k)
        again = anyhow and (m, n, k) != (side, side, side)
        partitions = best_grids(side, side, side, ranks, keep, layers=layers, shape=shape, takes=takes) if again else []
        return [Partition(m, n, k, partition.pr, partition.pc, partition.layers) for partition in partitions]
    busy = np.flatnonzero(work * (1 - IDLE) <= work.min())[:keep]
    return [Partition(m, n, k, *map(int, every[x])) for x in busy]


# ------------------------------------------------------------------ the search for one algorithm
class GridCandidate(NamedTuple):
    """A grid for an algorithm.

    partition : Pr x Pc x layers.  For "stationary_a" it is Pr x 1 x Pc, because the columns of its grid divide k.  In a
                search for C^T = B^T A^T, it is the partition of that product.
    inside    : algorithm of a layer, "summa" or "cannon"; "" for an algorithm without layers.
    """

    partition: Partition
    inside: str = ""


@dataclass(frozen=True)
class Search:
    """A search for grids.

    keep       : number of grids to return of each kind.
    transposed : `mnk` and `request` describe the product C^T = B^T A^T.
    """

    mnk: tuple[int, int, int]
    ranks: int
    request: AlgorithmRequest
    keep: int
    transposed: bool = False

    @property
    def T(self) -> Search:
        """The search for grids of C^T = B^T A^T."""
        m, n, k = self.mnk
        return replace(self, mnk=(n, m, k), request=self.request.T, transposed=not self.transposed)

    @property
    def forced(self) -> bool:
        """Does the request name an algorithm, or "row" or "column"?"""
        return self.request.algorithm != "auto"

    def best(self, layers: int | None, takes: Takes) -> list[Partition]:
        """Return the best grids that `takes` accepts with this number of layers; None: with any number."""
        return best_grids(
            *self.mnk, self.ranks, self.keep, layers=layers, shape=self.request.shape, takes=takes, anyhow=self.forced
        )
