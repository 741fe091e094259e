"""The grids that the planner compares: the grids on which an algorithm runs and sends the fewest words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from pdgemm.planning.problem import AlgorithmRequest
from pdgemm.planning.search.grid_search import Partition, best_grids

Takes = Callable[[Any, Any, Any, int], Any]  # takes(Pr, Pc, layers, ranks) -> bool, or array for arrays of grids


class GridCandidate(NamedTuple):
    """A grid for an algorithm.

    partition : Pr x Pc x layers; for "stationary_a" Pr x 1 x Pc, because the columns of its grid divide k; in a search
                for C^T = B^T A^T, the partition of that product.
    inside    : algorithm of a layer, "summa" or "cannon"; "" for an algorithm without layers.
    """

    partition: Partition
    inside: str = ""


@dataclass(frozen=True)
class Search:
    """A search for grids.

    keep       : number of grids that `best` returns.
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
        """Does the request name an algorithm or a policy, and not "auto"?"""
        return self.request.algorithm != "auto"

    def best(self, layers: int | None, takes: Takes) -> list[Partition]:
        """Return the best grids that `takes` accepts with this number of layers; None: with any number."""

        def fits(pr: np.ndarray, pc: np.ndarray, c: np.ndarray) -> np.ndarray:
            return np.asarray(takes(pr, pc, c, self.ranks))

        return best_grids(
            *self.mnk, self.ranks, self.keep, layers=layers, shape=self.request.shape, fits=fits, anyhow=self.forced
        )
