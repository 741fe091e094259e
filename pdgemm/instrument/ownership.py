"""Pictures of ownership: the blocks of a matrix and the rank of each block, as text and as SVG; HTML for notebooks.

A picture is computed only from the layout, so any rank can draw it without communication.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from pdgemm.grids.distribution import BlockCyclic
from pdgemm.grids.layout import Layout
from pdgemm.support.text import Table

_MOST = 12  # blocks along a side that are drawn
_SIDE, _LEAST, _MARGIN = 300, 24, 44  # pixels: longer side, least height or width of a block, margin for numbers
_COLOURS = ("#f4a582", "#92c5de", "#a6d96a", "#ffd966", "#c2a5cf", "#e6a0c4", "#9ad0c2", "#d9c7a0", "#b8c0ff")
_TEXT = "#7d7d7d"  # a colour that is readable on light and on dark pages


@dataclass(frozen=True)
class Ownership:
    """A picture of a layout: `print` shows it as text, a notebook as SVG.

    rank : the blocks of this rank have a frame; -1: no blocks have one.
    """

    layout: Layout
    rank: int = -1

    def __str__(self) -> str:
        rows, more_rows = _blocks(self.layout.distribution.rows)
        cols, more_cols = _blocks(self.layout.distribution.cols)
        heads = [f"{start}:{stop}" for start, stop, _ in cols] + ["..."] * more_cols
        lines = list[list[str]]()
        for start, stop, i in rows:
            ranks = [self.layout.rank(i, j) for *_, j in cols]
            named = [f"[{rank}]" if rank == self.rank else f"{rank}" for rank in ranks]
            lines.append([f"{start}:{stop}", *named, *["..."] * more_cols])
        lines += [["..."] * (1 + len(heads))] * more_rows
        return str(Table(["", *heads], lines, title=f"{self.layout}: the rank of each block"))

    def __repr__(self) -> str:
        return str(self)

    @property
    def svg(self) -> str:
        """The picture as SVG."""
        rows, more_rows = _blocks(self.layout.distribution.rows)
        cols, more_cols = _blocks(self.layout.distribution.cols)
        longest = max([1, *(x[-1][1] for x in (rows, cols) if x)])
        tops, lefts = _places(rows, longest), _places(cols, longest)
        parts = list[str]()
        for (start, _, i), top, below in zip(rows, tops, tops[1:]):
            parts.append(_label(_MARGIN - 4, (top + below) / 2, str(start), "end"))
            for (_, _, j), left, right in zip(cols, lefts, lefts[1:]):
                rank = self.layout.rank(i, j)
                frame = 'stroke="#1a1a1a" stroke-width="2.5"' if rank == self.rank else 'stroke="white"'
                parts.append(
                    f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{below - top:.1f}" '
                    f'fill="{_COLOURS[rank % len(_COLOURS)]}" {frame}/>'
                )
                parts.append(_label((left + right) / 2, (top + below) / 2, str(rank), "middle", "#1a1a1a"))
        parts += [_label((x + y) / 2, _MARGIN - 10, str(c[0]), "middle") for c, x, y in zip(cols, lefts, lefts[1:])]
        if more_cols:
            parts.append(_label(lefts[-1] + 12, tops[0] + 12, "...", "start"))
        if more_rows:
            parts.append(_label(lefts[0], tops[-1] + 14, "...", "start"))
        width, height = lefts[-1] + _LEAST + 8, tops[-1] + _LEAST
        title = escape(f"{self.layout}: the rank of each block")
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" role="img" '
            f'font-family="sans-serif" font-size="11"><title>{title}</title>{"".join(parts)}</svg>'
        )

    def _repr_html_(self) -> str:
        return as_html(str(self.layout), self)


class InNotebook:
    """The base class of reports that a notebook shows as text in a monospaced font."""

    def _repr_html_(self) -> str:
        return as_html(str(self))


def as_html(text: str, *pictures: Ownership) -> str:
    """Return HTML for a notebook: the text, and below it the pictures side by side."""
    drawn = "".join(picture.svg for picture in pictures)
    return f"<div><pre>{escape(text)}</pre>{drawn}</div>"


def _blocks(dim: BlockCyclic) -> tuple[list[tuple[int, int, int]], bool]:
    """Return (start, stop, owner) of the first blocks of a dimension, and whether the dimension has more blocks."""
    starts = dim.starts[: _MOST + 1].tolist()
    ends = [*starts[1:], dim.n]
    blocks = [(start, stop, int(dim.owner(start))) for start, stop in zip(starts, ends)]
    return blocks[:_MOST], len(starts) > _MOST


def _places(blocks: list[tuple[int, int, int]], longest: int) -> list[float]:
    """Return the pixel positions at which the blocks begin, and the end of the last block."""
    places = [float(_MARGIN)]
    for start, stop, _ in blocks:
        places.append(places[-1] + max(_LEAST, _SIDE * (stop - start) / longest))
    return places


def _label(x: float, y: float, text: str, anchor: str, colour: str = _TEXT) -> str:
    return f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="{anchor}" fill="{colour}">{text}</text>'
