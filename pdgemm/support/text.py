"""Numbers and names as people read them."""

from __future__ import annotations

from itertools import groupby


def named(algorithm: str, inside: str) -> str:
    """Return the name of an algorithm, with that of its layers in brackets."""
    return f"{algorithm} ({inside})" if inside else algorithm


def sides(pr: int, pc: int, layers: int) -> str:
    """Return the sides of a grid: '2 x 3', or '2 x 3 x 4' where it has several layers."""
    return " x ".join(map(str, (pr, pc, layers) if layers > 1 else (pr, pc)))


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: '1 rank', '3 ranks'."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def in_bytes(size: float) -> str:
    """Return a number of bytes in the unit that fits it: 1536 is '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def ranks_text(ranks: list[int]) -> str:
    """[0, 1, 2, 5] -> 'ranks 0-2, 5'."""
    # numbers that follow each other are as far from their positions
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), key=lambda x: x[1] - x[0])]
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
