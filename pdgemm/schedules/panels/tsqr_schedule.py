"""A binary tree over ranks as a value: triangles of k columns are reduced to the root, and results are sent down.

With six ranks, for example, the root, rank 0, receives first from rank 1, then from rank 2 (after 2 has received from
3), and then from rank 4 (after 4 has received from 5).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pdgemm.instrument.recorder import Transfer
from pdgemm.schedules.rounds import LINE, Messages, Round, WorkPiece
from pdgemm.schedules.schedule import Buffers, LineSchedule, RankMap, Schedule

SLOWER = 4  # time of a factorisation on one rank / time of a product of as many flops
MEASURED = 2  # numbers that are sent down with a factor of A^H A: |A^H A - I|_F, and the shift


@dataclass(frozen=True)
class Tree(LineSchedule):
    """Messages along the edges of a binary tree, up to the root and down again.

    ranks : the ranks in the order of their rows; the first is the root.
    up    : words that each rank sends to its parent; 0: no message.   down : words that its parent sends to each rank.
    """

    ranks: tuple[int, ...]
    up: tuple[int, ...]
    down: tuple[int, ...]
    dtype: np.dtype
    algorithm = "tree"
    lookahead = 0

    def parent(self, at: int) -> int:
        """Return the place of the parent of the rank at a place; -1 for the root."""
        return at & (at - 1) if at else -1

    def children(self, at: int) -> list[int]:
        """Return the places of the children in the order in which their messages are received: the order of rows."""
        return children(at, len(self.ranks))

    @property
    def events(self) -> int:
        return 2 * len(self.ranks).bit_length()

    def rounds(self) -> Iterator[Round]:
        yield from self.rising()
        yield from self.descending()

    def rising(self) -> Iterator[Round]:
        """Yield the messages to the root, level by level."""
        return (self._level(level, True) for level in self._levels)

    def descending(self) -> Iterator[Round]:
        """Yield the messages from the root, level by level."""
        return (self._level(level, False) for level in self._levels[::-1])

    @property
    def _levels(self) -> list[np.ndarray]:
        """The levels: the places whose parents are 1, 2, 4, ... places before them."""
        places = np.arange(1, len(self.ranks))
        return [places[(places & -places) == 1 << s] for s in range(len(self.ranks).bit_length())]

    def _level(self, level: np.ndarray, rising: bool) -> Round:
        words, ranks = np.array(self.up if rising else self.down), np.array(self.ranks)
        at = level[words[level] > 0]
        ends = ranks[at], ranks[at & (at - 1)]
        source, target = ends if rising else ends[::-1]
        return Round([Messages("reduce", source, target, words[at], self.dtype.itemsize, LINE)], hidden=False)

    def buffers(self, rank: int | None) -> Buffers:
        return {}


def children(at: int, size: int) -> list[int]:
    """Return the places of the children of place `at` in a tree of `size` places."""
    steps = (1 << s for s in range(size.bit_length()))
    return [at + step for step in steps if step < (at & -at or size) and at + step < size]


def packed_words(height: int, k: int) -> int:
    """Return the words on and above the diagonal of the first `height` rows of a matrix of k columns."""
    return height * k - height * (height - 1) // 2


def heights(rows: Sequence[int], k: int) -> list[int]:
    """Return the number of rows of the triangle that each rank sends to its parent: those of its subtree, at most k."""
    ends = [at + (at & -at or len(rows)) for at in range(len(rows))]
    return [min(k, sum(rows[at:end])) for at, end in enumerate(ends)]


@lru_cache(maxsize=64)
def tsqr_tree(ranks: tuple[int, ...], rows: tuple[int, ...], k: int, dtype: np.dtype) -> Tree:
    """Return the tree of TSQR: triangles are reduced up the tree, and the final R is sent down.

    With R, each rank receives the rows of a small matrix with which it forms its part of Q.
    rows : the number of rows of the matrix on each rank, >= 0.
    """
    high = heights(rows, k)
    return Tree(ranks, tuple(packed_words(h, k) for h in high), tuple(packed_words(k, k) + h * k for h in high), dtype)


@lru_cache(maxsize=64)
def gram_tree(ranks: tuple[int, ...], rows: tuple[int, ...], k: int, dtype: np.dtype) -> Tree:
    """Return the tree of a pass of CholeskyQR: A^H A is reduced up the tree, and its factor R is broadcast down."""
    high = heights(rows, k)
    return Tree(
        ranks, tuple(packed_words(k, k) * (h > 0) for h in high), (packed_words(k, k) + MEASURED,) * len(ranks), dtype
    )


@lru_cache(maxsize=64)
def broadcast_tree(ranks: tuple[int, ...], words: int, dtype: np.dtype) -> Tree:
    """Return the tree that broadcasts `words` words from the first rank to all ranks."""
    return Tree(ranks, (0,) * len(ranks), (words,) * len(ranks), dtype)


@dataclass(frozen=True)
class TallSchedule(Schedule):
    """The work of the ranks on their rows of a tall matrix before and after the tree, and of the root in between.

    rows : number of rows on each rank, in the order of the tree.   k : number of columns.
    work : flops of a rank on its rows, in products of these rows with k x k; A^H A and A R^-1 count as half a product.
    on_top : flops of the root, in products of k x k with k x k.   each : flops of every rank, in the same products.
    workspace : words of workspace for each row.
    """

    algorithm: str
    tree: Tree
    rows: tuple[int, ...]
    k: int
    work: float = 0.0
    on_top: float = 0.0
    each: float = 0.0
    workspace: int = 0
    lookahead = 0

    @property
    def dtype(self) -> np.dtype:
        return self.tree.dtype

    @property
    def panel_dtype(self) -> np.dtype:
        return self.dtype

    @property
    def grid(self) -> RankMap:
        return self.tree.grid

    @property
    def flops(self) -> int:
        products = self.work * sum(self.rows) + self.on_top * self.k
        return round(2 * products * self.k**2) * (4 if self.dtype.kind == "c" else 1)

    @property
    def events(self) -> int:
        return 4 + self.tree.events

    def rounds(self) -> Iterator[Round]:
        by_rank = np.zeros(1 + max(self.tree.ranks), int)
        by_rank[[*self.tree.ranks]] = self.rows
        root = self.k * (np.arange(len(by_rank)) == self.tree.ranks[0])
        half = Round([], [WorkPiece((by_rank, self.k, self.k), share=self.work / 2)])
        yield half
        yield from self.tree.rising()
        if self.on_top:
            yield Round([], [WorkPiece((root, self.k, self.k), share=self.on_top * SLOWER)])
        yield from self.tree.descending()
        yield half
        yield Round([], [WorkPiece((self.k, self.k, self.k), share=self.each)])

    def transfers(self, rank: int) -> list[Transfer]:
        """Return the transfers of the tree, whose sums are cached with the tree."""
        return self.tree.transfers(rank)

    def buffers(self, rank: int | None) -> Buffers:
        rows = max(self.rows) if rank is None else self.rows[self.tree.ranks.index(rank)]
        return {"workspace": (self.workspace * rows, self.dtype)}

    def described(self, name: str) -> tuple[str, str]:
        return self.algorithm, f"{sum(self.rows)} x {self.k}, {self.dtype}, on {len(self.rows)} ranks"


def cholesky_pass(ranks: tuple[int, ...], rows: tuple[int, ...], k: int, dtype: np.dtype) -> TallSchedule:
    """Return the schedule of a pass of CholeskyQR over the rows of a matrix that the ranks hold."""
    return TallSchedule("cholesky_qr", gram_tree(ranks, rows, k, dtype), rows, k, work=1, on_top=1 / 6, each=1 / 4)


def tsqr_schedule(ranks: tuple[int, ...], rows: tuple[int, ...], k: int, dtype: np.dtype) -> TallSchedule:
    """Return the schedule of TSQR over the rows of a matrix that the ranks hold."""
    return TallSchedule("tsqr", tsqr_tree(ranks, rows, k, dtype), rows, k, work=3, workspace=k)


def svd_of_triangle(ranks: tuple[int, ...], rows: tuple[int, ...], k: int, dtype: np.dtype) -> TallSchedule:
    """Return the schedule of the singular value decomposition of R, (k, k), on the root, which broadcasts U, s, V^H."""
    return TallSchedule("svd", broadcast_tree(ranks, 2 * k * k + k, dtype), rows, k, on_top=11)
