"""Plans as JSON and back: what is read is of the right types, and its parts fit together."""

from __future__ import annotations

import json
from typing import Any, Literal, Union

import msgspec

from pdgemm.candidates import PRODUCTS, Problem
from pdgemm.errors import ArgumentError
from pdgemm.exchange import Exchange
from pdgemm.grids.layout import Layout
from pdgemm.products import Product
from pdgemm.reading import decoded, plain

Moves = tuple[tuple[Literal["A", "B", "C"], Exchange], ...]
Parts = tuple[Product, bool, Moves, Problem]  # of a plan
_NOT_ONE = "not a plan that was saved"
_MOST_BLOCKS = 1 << 26  # of a dimension: figures of a plan take time and memory for each
_SAVED: dict[type[Product], Any] = {
    kind: msgspec.defstruct(
        kind.__name__,
        [("product", kind), ("transposed", bool), ("moves", Moves), ("problem", Problem)],
        tag_field="algorithm",
        tag=kind.__name__,
    )
    for kind in PRODUCTS
}


def pack(*parts: Any) -> str:
    """The parts of a plan as JSON."""
    return json.dumps(plain(_SAVED[type(parts[0])](*parts)))


def unpack(text: str) -> Parts:
    """What `pack` was given.  Raises ArgumentError for anything else."""
    found: Any = decoded(text, Union[tuple(_SAVED.values())], _NOT_ONE, exact=True)  # type: ignore[arg-type]  # noqa: UP007
    if fault := _fault(found.product, found.moves, found.problem):
        raise ArgumentError(f"{_NOT_ONE}: {fault}")
    return found.product, found.transposed, found.moves, found.problem


def _fault(product: Product, moves: Moves, problem: Problem) -> str:
    """What does not fit together."""
    size, made = problem.size, (product.A, product.B, product.C)
    layouts = [*problem.given, *made, *(x for _, move in moves for x in (move.source, move.target))]
    if not all(_fits(x, size) for x in layouts):
        return f"a layout has not one of {size} ranks for each place of its grid"
    sides = [side for x in layouts for side in (x.distribution.rows, x.distribution.cols)]
    if any(-(-side.n // side.block) > _MOST_BLOCKS for side in sides):
        return f"a matrix has more than {_MOST_BLOCKS} blocks in a row or a column"
    for A, B, C in (problem.given, made):
        (m, k), (inner, n) = A.distribution.shape, B.distribution.shape
        if C.distribution.shape != (m, n) or k != inner:
            return "the shapes of A, B and C do not make a product"
    if any(move.size != size or move.words < 1 for _, move in moves):
        return "its moves are among other ranks"
    if any(len(nodes) not in (0, size) for nodes in (problem.nodes, getattr(product, "nodes", ()))):
        return "not every rank has a node"
    return ""


def _fits(layout: Layout, size: int) -> bool:
    rows, cols = layout.distribution.rows, layout.distribution.cols
    return len(layout.place) == rows.parts * cols.parts and _ranks(layout.place, size)


def _ranks(place: tuple[int, ...], size: int) -> bool:
    """Different ones of `size`."""
    return len({*place}) == len(place) and 0 <= min(place) <= max(place) < size
