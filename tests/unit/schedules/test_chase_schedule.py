"""The bulge chase: tiles depend only on neighbours, and a rank changes only columns whose newest state it has."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest

from pdgemm.schedules.panels.chase_schedule import Chase

CASES = [(1, 1, 2), (2, 1, 2), (9, 2, 2), (41, 2, 4), (64, 8, 2), (65, 4, 6), (120, 4, 3), (7, 5, 9)]


def touched(chase: Chase, s: int, t: int) -> range:
    """Return the columns of the band that task t of sweep s changes."""
    first = s + 1 + (t - 1) * chase.b if t else s
    return range(first, min(chase.n, s + 1 + (t + 1) * chase.b))


@pytest.mark.parametrize(("n", "b", "ranks"), CASES)
def test_tasks_are_done_once_and_after_their_dependencies(n: int, b: int, ranks: int) -> None:
    """A simulation: each rank does its tiles in order when their messages have arrived; no deadlock, no old columns."""
    chase = Chase(n, b, ranks)
    newest, done = [0] * n, dict[tuple[int, int], int]()
    band = [[0] * n for _ in range(ranks)]  # for each rank and column: how many changes it contains
    mail: dict[tuple[int, int], deque[Any]] = {(p, q): deque() for p in range(ranks) for q in range(ranks)}
    walks = [chase.tiles(p) for p in range(ranks)]
    tiles = [next(walk, None) for walk in walks]
    while any(tiles):
        progress = False
        for p in range(ranks):
            while tiles[p] and _step(chase, p, *tiles[p], band[p], mail, newest, done):
                tiles[p], progress = next(walks[p], None), True
        assert progress, "the ranks wait for each other"
    assert not any(mail.values())
    assert len(done) == sum(chase.tasks(s) for s in range(n))
    assert band[0] == newest  # at the end, rank 0 has all columns
    counts = np.array([chase.counts(G) for G in range(chase.groups)]).reshape(-1, ranks)
    assert counts.sum() == len(done) and (chase.cuts[0], sorted(chase.cuts)) == (0, chase.cuts)


def _step(
    chase: Chase, p: int, G: int, x: int, mine: list[int], mail: Any, newest: list[int], done: dict[Any, int]
) -> bool:
    """Carry out a tile if its messages have arrived; return whether it was carried out."""
    before, behind = chase.neighbours(p, x)
    wanted = [(before, chase.down(G, x))] if before is not None else []
    if behind is not None and chase.count(G - 1, x + 1):
        wanted.append((behind, chase.up(G - 1, x + 1)))
    if not all(mail[rank, p] for rank, _ in wanted):
        return False
    for rank, columns in wanted:
        sent, values = mail[rank, p].popleft()
        assert sent == columns
        mine[columns] = values
    for s, tasks in chase.part(G, x):
        for t in tasks:
            assert t == 0 or (s, t - 1) in done
            assert s == 0 or t + 1 >= chase.tasks(s - 1) or (s - 1, t + 1) in done
            assert (s, t) not in done
            done[s, t] = p
            for j in touched(chase, s, t):
                assert mine[j] == newest[j], f"rank {p} changes column {j} of task {s}, {t}, which is not the newest"
                newest[j] += 1
                mine[j] = newest[j]
    if before is not None and chase.count(G + 1, x - 1):
        columns = chase.up(G, x)
        mail[p, before].append((columns, mine[columns]))
    if behind is not None and chase.count(G, x + 1):
        columns = chase.down(G, x + 1)
        mail[p, behind].append((columns, mine[columns]))
    return True


def test_ranks_share_the_tasks() -> None:
    """If each rank has several tiles, no rank has more than 5/4 of the mean, and messages are small."""
    for ranks in (3, 8):
        chase = Chase(4096, 16, ranks)
        shares = np.sum([chase.counts(G) for G in range(chase.groups)], axis=0)
        assert shares.max() <= 1.25 * shares.mean()
        widths = [y.stop - y.start for G in (0, 5) for x in (1, 3) for y in (chase.down(G, x), chase.up(G, x))]
        assert max(widths) <= (chase.group + 1) * chase.b
