"""Numbers and names as people read them."""

from __future__ import annotations


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
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
