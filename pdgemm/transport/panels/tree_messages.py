"""Messages up and down a binary tree of ranks, counted when they are sent and received."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from pdgemm.instrument.recorder import Recorder
from pdgemm.schedules.panels.tsqr_schedule import Tree, packed_words


def ascend(
    tree: Tree, comm: MPI.Comm, mine: np.ndarray, join: Callable[[np.ndarray, np.ndarray], np.ndarray],
    recorder: Recorder,
) -> np.ndarray:  # fmt: skip
    """Reduce up the tree: return the joined arrays of this rank and all ranks below it; the root returns the result.

    mine : one-dimensional, contiguous.   join : called with the array of this rank and that of its next child, in the
        order of their rows; returns the joined array, also one-dimensional and contiguous.
    """
    at = tree.ranks.index(comm.rank)
    for child in tree.children(at):
        if tree.up[child]:
            arriving = np.empty(tree.up[child], mine.dtype)
            with recorder.phase("wait"):
                comm.Recv(arriving, source=tree.ranks[child])
            recorder.traffic.received(arriving.size)
            mine = join(mine, arriving)
    if at and tree.up[at]:
        comm.Send(mine, dest=tree.ranks[tree.parent(at)])
        recorder.traffic.sent(mine.size)
    return mine


def descend(
    tree: Tree, comm: MPI.Comm, mine: np.ndarray, split: Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]],
    recorder: Recorder,
) -> np.ndarray:  # fmt: skip
    """Send down the tree: receive an array from the parent, send parts to the children, the last child first.

    Returns what remains of the array.

    mine : on the root, the array to send; on other ranks, any array of its dtype.
    split : called with the array and the place of a child in the tree; returns the part that stays, and the child's.
    """
    at = tree.ranks.index(comm.rank)
    if at:
        mine = np.empty(tree.down[at], mine.dtype)
        with recorder.phase("wait"):
            comm.Recv(mine, source=tree.ranks[tree.parent(at)])
        recorder.traffic.received(mine.size)
    for child in reversed(tree.children(at)):
        mine, other = split(mine, child)
        comm.Send(other, dest=tree.ranks[child])
        recorder.traffic.sent(other.size)
    return mine


def to_all(mine: np.ndarray, child: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the array twice: as the `split` of `descend`, this broadcasts the whole array down the tree."""
    return mine, mine


def unpacked(words: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """Return the upper triangle, or its first rows, from words packed row by row.   upper : its mask, (k, k)."""
    k = len(upper)
    height = next(h for h in range(k + 1) if packed_words(h, k) == words.size)
    R = np.zeros((height, k), words.dtype)
    R[upper[:height]] = words
    return R
