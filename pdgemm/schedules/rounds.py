"""What all ranks do between two products, as values: the messages on their way, and the work that follows.

A product yields its rounds; the simulator walks them, and its traffic is what they say.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.layout import Layout
from pdgemm.schedules.node_relay import Line

READ = ("shared", "ipc")  # movers by which ranks read each other's memory


class Messages(NamedTuple):
    """Messages of one kind that travel at the same time: message x goes from source[x] to target[x]."""

    kind: str
    source: np.ndarray
    target: np.ndarray
    words: np.ndarray
    itemsize: int


@dataclass
class Round:
    """What all ranks do between two products.

    messages : arrive before the product.   work : (m, n, k) that ranks multiply, an array each.
    hidden   : the messages may travel while the product of the round before is computed.
    """

    messages: list[Messages] = field(default_factory=list)
    work: tuple[Any, Any, Any] = (0, 0, 0)
    hidden: bool = True


def grid_of(layout: Layout) -> np.ndarray:
    """The ranks of a layout by their grid positions."""
    return np.array(layout.place).reshape(layout.distribution.grid_shape)


def counts_of(dimension: BlockCyclic) -> np.ndarray:
    """Indices that each part of a dimension has."""
    return np.array([dimension.count(part) for part in range(dimension.parts)])


def broadcast(mover: str, grid: np.ndarray, root: int, words: np.ndarray, itemsize: int) -> list[Messages]:
    """From column `root` of the grid to the others of each row; words[i] in row i.  What is read in place stays."""
    if mover in READ:
        return []
    rows, cols = grid.shape
    others = np.arange(1, cols)
    target = grid[:, (root + others) % cols]
    source = grid[:, (root + others - 1) % cols] if mover == "ring" else np.broadcast_to(grid[:, [root]], target.shape)
    return messages(mover, source, target, np.broadcast_to(words[:, None], (rows, cols - 1)), itemsize)


def relay(
    lines: list[Line], grid: np.ndarray, root: int, turn: int, words: np.ndarray, itemsize: int
) -> list[Messages]:
    """From column `root` of the grid to one rank on each other node of each row, and on from there.

    lines : the nodes along each row.
    """
    chains = [row[line.chain(root, turn)] for row, line in zip(grid, lines)]
    hops = [len(chain) - 1 for chain in chains]
    source, target = (np.concatenate([chain[which] for chain in chains]) for which in (slice(-1), slice(1, None)))
    return messages("ring", source, target, np.repeat(words, hops), itemsize)


def reduce(grid: np.ndarray, root: int, words: np.ndarray, itemsize: int) -> list[Messages]:
    """From all other columns of each row to column `root`."""
    source = np.delete(grid, root, axis=1)
    target = np.broadcast_to(grid[:, [root]], source.shape)
    return messages("reduce", source, target, np.broadcast_to(words[:, None], source.shape), itemsize)


def messages(kind: str, source: np.ndarray, target: np.ndarray, words: np.ndarray, itemsize: int) -> list[Messages]:
    """An empty message is not sent."""
    sent = words.ravel() > 0
    return [Messages(kind, source.ravel()[sent], target.ravel()[sent], words.ravel()[sent], itemsize)]


def on_grid(grid: np.ndarray, m: Any, n: Any, k: Any) -> tuple[Any, Any, Any]:
    """Sizes by grid position as sizes by rank."""

    def by_rank(x: Any) -> np.ndarray:
        sizes = np.zeros(int(grid.max()) + 1, int)
        sizes[grid] = np.broadcast_to(x, grid.shape)
        return sizes

    return by_rank(m), by_rank(n), by_rank(k)


def one_each(sizes: Any, ranks: int) -> np.ndarray:
    """One size for all, or those of the first ranks, as one for each."""
    if np.ndim(sizes) == 0:
        return np.full(ranks, sizes)
    full = np.zeros(ranks, int)
    full[: len(sizes)] = sizes
    return full
