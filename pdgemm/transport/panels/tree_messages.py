"""What travels along a binary tree of ranks, counted where it is sent."""

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
    """Return what this rank and those below it have, joined in the order of their rows; all is joined on the root.

    mine : one-dimensional, contiguous.   join : returns such an array, given this rank's and the next child's.
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
    """Return what comes to this rank from the root, less what it sends to its children, the last of them first.

    mine : on the root what all get, on the other ranks an array of that type.
    split : returns what stays and what a child gets, given what there is and the place of the child.
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
    """Split what comes down by sending all of it to each child."""
    return mine, mine


def unpacked(words: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """Return the upper triangle, or its first rows, that was packed row by row."""
    k = len(upper)
    height = next(h for h in range(k + 1) if packed_words(h, k) == words.size)
    R = np.zeros((height, k), words.dtype)
    R[upper[:height]] = words
    return R
