"""The grids that are compared: of those that an algorithm takes, the ones with the fewest words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from pdgemm.planning.problem import AlgorithmRequest
from pdgemm.planning.search.grid_search import Partition, best_grids

Takes = Callable[[Any, Any, Any, int], Any]  # takes(Pr, Pc, layers, ranks): numbers, or an array of each


class GridCandidate(NamedTuple):
    """One algorithm on one grid.

    partition  : Pr x Pc x layers; for "stationary_a" Pr x 1 x Pc, because the columns of its grid divide k.
    algorithm  : name of its entry.
    inside     : algorithm of a layer, "summa" or "cannon".
    transposed : the partition is that of the product C^T = B^T A^T.
    """

    partition: Partition
    algorithm: str
    inside: str = ""
    transposed: bool = False


@dataclass(frozen=True)
class Search:
    """A search for grids.

    keep       : number of grids of each kind that are returned.
    transposed : `mnk` and `request` are those of the product C^T = B^T A^T.
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
        """Does the request name one algorithm?"""
        return self.request.algorithm != "auto"

    def best(self, layers: int | None, takes: Takes) -> list[Partition]:
        """Return the best grids that an algorithm takes with this number of layers; for None, with any number."""

        def fits(pr: np.ndarray, pc: np.ndarray, c: np.ndarray) -> np.ndarray:
            return np.asarray(takes(pr, pc, c, self.ranks))

        return best_grids(
            *self.mnk, self.ranks, self.keep, layers=layers, shape=self.request.shape, fits=fits, anyhow=self.forced
        )
