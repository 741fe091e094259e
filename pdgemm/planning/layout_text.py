"""The layouts of A, B and C as a text, such as "A=columns; C=block=64x64 grid=8x8".  No MPI, no data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod

import numpy as np

from pdgemm.errors import ArgumentError, LayoutError
from pdgemm.grids.distribution import Distribution
from pdgemm.grids.layout import Layout
from pdgemm.planning.search.grid_search import near_root
from pdgemm.support.text import counted

DEFAULT, IDEAL = "default", "ideal"
FORMS = (
    f"{IDEAL}, or {DEFAULT}, columns, rows, blocks or such as 'block=64x64 grid=8x8 source=1,2', for all three or "
    "as in 'A=columns; B=rows'"
)
MOST_BLOCKS = 10**6  # blocks of a dimension of a matrix, which plans compare one by one
MOST_SIDE = 1 << 14  # ranks along a side of a grid: a plan for one that is longer would take minutes
_SHOWN = 100  # characters of an invalid text that a message shows


def layouts_of(
    text: str, matrices: Mapping[str, tuple[tuple[int, int], np.dtype]], ranks: int
) -> dict[str, Layout]:  # fmt: skip
    """Return the layout of each matrix on the first ranks of `ranks`.

    text     : a layout for all matrices, or NAME=layout for some, separated by semicolons; the others are "default".
               "=" may stand between spaces.  A layout is one of
               "default", "blocks" : one block per rank of the most nearly square grid Pr x Pc, Pr <= Pc;
               "columns", "rows"   : one block of consecutive columns (rows) per rank;
               "block=MBxNB grid=PrxPc source=I,J" : a block-cyclic layout whose first block is on grid position (I, J).
               Any of the three may be left out: the blocks are then one per rank, the grid as in "default", and
               the source 0,0.  "block=64" is "block=64x64".
    matrices : the shape and the element type of each matrix, by its name of one letter.

    Raises ArgumentError for any other text, and for grids that have more than `ranks` ranks.
    """
    parts = [x.strip() for x in re.sub(r"\s*=\s*", "=", text).split(";") if x.strip()]
    named = {x[0]: x[2:] for x in parts if x[1:2] == "="}
    everyone, layouts = tuple(range(ranks)), dict[str, Layout]()
    try:
        if len(parts) != max(1, len(named)) or not {*named} <= {*matrices}:
            raise ValueError
        for name, (shape, dtype) in matrices.items():
            distribution = _distribution(named.get(name, DEFAULT) if named else parts[0], shape, ranks)
            layouts[name] = Layout(distribution, everyone[: prod(distribution.grid_shape)], dtype)
    except LayoutError as error:
        raise ArgumentError(f"the layout of {name} is not possible: {error}") from None
    except ValueError:
        raise ArgumentError(f"layouts are {FORMS}; got {text[:_SHOWN]!r}") from None
    return layouts


def _distribution(text: str, shape: tuple[int, int], ranks: int) -> Distribution:
    """Return the distribution that the text describes.  Raises ValueError for another text."""
    square = near_root(ranks), ranks // near_root(ranks)
    grid = {DEFAULT: square, "blocks": square, "columns": (1, ranks), "rows": (ranks, 1)}.get(text)
    pairs = dict[str, tuple[int, int]]()
    for word in text.split() if grid is None else ():
        number = re.fullmatch(r"(block|grid|source)=(\d{1,12})(?:[x,](\d{1,12}))?", word)
        if number is None or number[1] in pairs or (number[3] is None and number[1] != "block"):
            raise ValueError
        pairs[number[1]] = int(number[2]), int(number[3] or number[2])
    if grid is None and not pairs:
        raise ValueError
    pr, pc = grid or pairs.get("grid", square)
    if not 1 <= pr * pc <= ranks:
        raise LayoutError(f"a grid of {pr} x {pc} does not fit {counted(ranks, 'rank')}")
    if max(pr, pc) > MOST_SIDE and (pr, pc) != square:
        raise LayoutError(f"a grid of {pr} x {pc} is longer than {MOST_SIDE:,} ranks")
    distribution = Distribution.over((pr, pc), shape, pairs.get("block"), pairs.get("source", (0, 0)))
    if any(x.n > MOST_BLOCKS * x.block for x in (distribution.rows, distribution.cols)) and "block" in pairs:
        raise LayoutError(f"there are more than {MOST_BLOCKS:,} blocks in a row or column of blocks")
    return distribution
