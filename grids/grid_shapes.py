"""The shape and the ranks of a process grid, checked.  No MPI."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

from pdgemm.errors import GridError


def grid_shape(size: int, shape: tuple[int, int] | None = None) -> tuple[int, int]:
    """Return (Pr, Pc) for `size` ranks: `shape` or, where it is None, the most nearly square shape.

    Raises GridError where `shape` does not fit.
    """
    if shape is None:
        pr = next(d for d in range(int(size**0.5), 0, -1) if size % d == 0)
        return pr, size // pr
    try:
        pr, pc = map(index, shape)
    except (TypeError, ValueError):
        raise GridError(f"a grid shape is a pair of numbers, got {shape!r}") from None
    if min(pr, pc) < 1:
        raise GridError(f"a grid shape is a pair of positive numbers, got {pr} x {pc}")
    if pr * pc != size:
        raise GridError(
            f"a {pr} x {pc} grid needs {pr * pc} ranks, but there {'is' if size == 1 else 'are'} {size}; "
            f"grids that fit: {', '.join(f'{d}x{size // d}' for d in range(1, size + 1) if size % d == 0)}"
        )
    return pr, pc


def listed_members(ranks: Sequence[int], size: int) -> list[int]:
    """Return the ranks of a grid.  Raises GridError where a rank is listed twice or is not in the communicator."""
    members = [index(rank) for rank in ranks]
    if len(set(members)) < len(members) or not members or not 0 <= min(members) <= max(members) < size:
        raise GridError(f"the ranks of a grid must be different numbers from 0 to {size - 1}, got {members}")
    return members
