"""The families of algorithms, and for each the grids that are worth a comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from pdgemm.planning.grid_search import Box, best_grids
from pdgemm.support.text import counted, sides

FAMILIES = ("summa", "cannon", "stationary_a", "stationary_b", "2.5d", "inner")
ALGORITHMS = ("auto", *FAMILIES, "row", "column")


class Wish(NamedTuple):
    """What is asked for: one of ALGORITHMS, Pr x Pc, layers; None: any."""

    algorithm: str
    shape: tuple[int, int] | None
    layers: int | None

    @property
    def T(self) -> Wish:
        """Of C^T = B^T A^T."""
        return self._replace(shape=self.shape and self.shape[::-1])

    @property
    def families(self) -> list[str]:
        """Those that may answer it."""
        flat = ("summa", "cannon")
        several = {"auto": FAMILIES, "row": flat, "column": flat}.get(self.algorithm, (self.algorithm,))
        takes = {"2.5d": self.layers != 1, "inner": True}  # so many layers
        return [x for x in several if takes.get(x, self.layers in (None, 1))]

    def on(self, ranks: int) -> Wish | None:
        """With the shape that the algorithm has on so many ranks; None: that is not the one asked for."""
        shape = {"row": (ranks, 1), "column": (1, ranks)}.get(self.algorithm, self.shape)
        return None if self.shape not in (None, shape) else self._replace(shape=shape)


class Cut(NamedTuple):
    """One family on one grid.

    box        : Pr x Pc x layers; of "stationary_a" Pr x 1 x Pc, for the columns of its grid share out k.
    inside     : what a layer does, "summa" or "cannon".
    transposed : it is a product C^T = B^T A^T, and the box is that one's.
    """

    box: Box
    family: str
    inside: str = ""
    transposed: bool = False


def cuts(mnk: tuple[int, int, int], ranks: int, wish: Wish, keep: int, room: float | None = None) -> Iterator[Cut]:
    """The best grids, `keep` of each kind.

    room : words that a rank has for blocks of C of its layer; then also the best grids that need no more.
    """
    (m, n, k), asked = mnk, wish.on(ranks)
    if asked is not None:
        yield from _cuts(mnk, ranks, asked, keep, room, False)
        yield from _cuts((n, m, k), ranks, asked.T, keep, room, True)


def _cuts(
    mnk: tuple[int, int, int], ranks: int, wish: Wish, keep: int, room: float | None, transposed: bool
) -> Iterator[Cut]:
    m, n, _ = mnk
    families, forced = wish.families, wish.algorithm != "auto"

    def best(layers: int | None, fits: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]) -> list[Box]:
        def small(pr: np.ndarray, pc: np.ndarray, c: np.ndarray) -> np.ndarray:
            return fits(pr, pc, c) & ((c == 1) | (-(-m // pr) * -(-n // pc).astype(float) * (1 + 1 / c) <= room))

        found = best_grids(*mnk, ranks, keep, layers=layers, shape=wish.shape, fits=fits, anyhow=forced)
        return found + (
            [] if room is None else best_grids(*mnk, ranks, keep, layers=layers, shape=wish.shape, fits=small)
        )

    def torus(pr: np.ndarray, pc: np.ndarray, c: np.ndarray) -> np.ndarray:
        return pc % pr == 0

    def layered(pr: np.ndarray, pc: np.ndarray, c: np.ndarray) -> np.ndarray:
        return (c > 1) & ((pr * pc > 1) | (wish.algorithm == "2.5d"))  # 1 x 1 x P is "inner"

    if "cannon" in families:
        for box in best(1, torus):
            if not transposed or box.pr != box.pc:
                yield Cut(box, "cannon", "", transposed)
    if ("stationary_b" if transposed else "stationary_a") in families:
        if wish.shape is None:
            boxes = best(None, lambda pr, pc, c: pc == 1)
        else:
            pr, pc = wish.shape
            boxes = [Box(*mnk, pr, 1, pc)] if pr * pc <= ranks else []
        yield from (Cut(box, "stationary_a", "", transposed) for box in boxes)
    if "2.5d" in families:
        for box in best(wish.layers, lambda pr, pc, c: layered(pr, pc, c) & torus(pr, pc, c)):
            if not transposed or box.pr != box.pc:
                yield Cut(box, "2.5d", "cannon", transposed)
    if transposed:  # the others are the same both ways
        return
    if "summa" in families:
        yield from (Cut(box, "summa") for box in best(1, lambda pr, pc, c: c == 1))
    if "2.5d" in families:
        yield from (Cut(box, "2.5d", "summa") for box in best(wish.layers, layered))
    if "inner" in families and wish.shape in (None, (1, 1)) and wish.layers in (None, ranks) and (ranks > 1 or forced):
        yield Cut(Box(*mnk, 1, 1, ranks), "inner")


def impossible(wish: Wish, ranks: int) -> str:
    """Why there is no grid for what was asked, and for what there is one."""
    algorithm, shape, layers = wish
    asked = algorithm + (f" on a {shape[0]} x {shape[1]} grid" if shape else "")
    asked += f" in {counted(layers, 'layer')}" if layers else ""
    reason = {
        "cannon": "one side of its grid divides the other, in 1 layer",
        "2.5d": f"it takes Pr x Pc x layers <= {ranks}, with layers >= 2",
        "inner": f"its grid is 1 x 1 in {counted(ranks, 'layer')}",
        "row": f"its grid is {ranks} x 1, in 1 layer",
        "column": f"its grid is 1 x {ranks}, in 1 layer",
        "auto": f"a grid has at most {counted(ranks, 'rank')}, layers included",
    }.get(algorithm, f"it takes Pr x Pc <= {ranks}, in 1 layer")
    text = f"{asked} is impossible on {counted(ranks, 'rank')}: {reason}"
    if algorithm not in ("cannon", "2.5d", "auto") or not shape:
        return text
    divisors = [d for d in range(1, ranks + 1) if ranks % d == 0]
    depths = [d for d in divisors if d > 1] if algorithm == "2.5d" else [1]
    grids = [(pr, ranks // c // pr, c) for c in depths for pr in divisors if ranks // c % pr == 0]
    if algorithm == "cannon":
        grids = [x for x in grids if max(x[:2]) % min(x[:2]) == 0]
    return f"{text}; grids of all ranks: {', '.join(sides(*x) for x in grids[:20])}" if grids else text
