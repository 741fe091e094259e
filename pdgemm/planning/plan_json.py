"""Plans as JSON and back: what is read is of the right types, and its parts fit together."""

from __future__ import annotations

import json
from math import prod
from typing import Any, Literal, Union

import msgspec
import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.grids.index_map import overlap_counts
from pdgemm.planning.candidates import BROADCASTS, PRODUCTS, Problem
from pdgemm.schedules import Cannon, Inner, Layered, Product, Stationary
from pdgemm.schedules.exchange import Exchange
from pdgemm.schedules.product import READ
from pdgemm.schedules.steps import skewed_places
from pdgemm.support.json_input import decoded, plain

Moves = tuple[tuple[Literal["A", "B", "C"], Exchange], ...]
Parts = tuple[Product, bool, Moves, Problem]  # of a plan
_NOT_ONE = "not a plan that was saved"
_MOST_BLOCKS = 1 << 24  # of a dimension: figures of a plan take time and memory for each
_MOST_BYTES = 1 << 50
_MOVERS = (*BROADCASTS, *READ, "nccl", "shift", "reduce_scatter")
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
    """What does not fit together, or is larger than any matrix."""
    size, made = problem.size, (product.A, product.B, product.C)
    layouts = [*problem.given, *made, *(x for _, move in moves for x in (move.source, move.target))]
    if not all(_on_ranks(x.place, x.distribution.grid_shape, size) for x in layouts):
        return f"a layout has not one of {size} ranks for each place of its grid"
    sides = [side for x in layouts for side in (x.distribution.rows, x.distribution.cols)]
    if any(side.n + side.skip > _MOST_BLOCKS * side.block for side in sides):
        return f"a matrix has more than {_MOST_BLOCKS} blocks in a row or a column"
    if any(x.local_bytes(None) > _MOST_BYTES for x in layouts):
        return f"a rank has more than {_MOST_BYTES} bytes of a matrix"
    for A, B, C in (problem.given, made):
        (m, k), (inner, n) = A.distribution.shape, B.distribution.shape
        if C.distribution.shape != (m, n) or k != inner:
            return "the shapes of A, B and C do not make a product"
    if any(move.size != size or move.words < 1 for _, move in moves) or not _lies(product, size):
        return "its layouts are not those of its algorithm"
    if any(len(nodes) not in (0, size) for nodes in (problem.nodes, getattr(product, "nodes", ()))):
        return "not every rank has a node"
    if product.mover not in _MOVERS:
        return f"panels do not travel by {product.mover!r}"
    if min(product.width, product.lookahead + 1) < 1 or getattr(product, "rows", 1) < 1:
        return "its panels have no width"
    if isinstance(product, (Inner, Layered)) and product.reduction.turns(None) > _MOST_BLOCKS:
        return f"C is reduced in more than {_MOST_BLOCKS} pieces"
    return ""


def _on_ranks(place: tuple[int, ...], shape: tuple[int, ...], size: int) -> bool:
    """A different one of `size` ranks at each place?"""
    return len({*place}) == len(place) == prod(shape) and 0 <= min(place) <= max(place) < size


def _lies(product: Product, size: int) -> bool:
    """Do the layouts fit the algorithm, as its docstring says?"""
    A, B, C = product.A, product.B, product.C
    a, b, c = (x.distribution for x in (A, B, C))
    pr, pc = c.grid_shape
    rows, cols = a.rows.canonical == c.rows.canonical, b.cols.canonical == c.cols.canonical
    inner = a.cols.canonical == b.rows.canonical
    if isinstance(product, Layered):
        return _in_layers(product, size) and all(_lies(x, size) for x in product.each_layer)
    if isinstance(product, Inner):
        return inner and a.rows.parts == b.cols.parts == 1 and A.place == B.place and product.size == size
    if isinstance(product, Stationary):
        return rows and inner and A.grid == C.grid and B.grid == A.T.grid
    if isinstance(product, Cannon):
        dealt = inner if pr == pc else a.cols.block == b.rows.block and not pc % pr
        skewed = a.grid_shape == b.grid_shape == c.grid_shape and dealt
        return rows and cols and skewed and (A.place, B.place) == skewed_places(C.place, (pr, pc))
    return rows and cols and A.grid == B.grid == C.grid


def _in_layers(product: Layered, size: int) -> bool:
    """Are there ranks for all layers, and does C lie on those that have a part of it?"""
    C, a, b, c = product.C, *(x.distribution for x in (product.A, product.B, product.C))
    pr, pc, layers = a.rows.parts, b.cols.parts, product.layers
    dealt = (a.cols.parts, b.rows.parts) == (layers * pc, layers * pr) and a.cols.block == b.rows.block
    if layers < 1 or not dealt or not _on_ranks(product.place, (pr, pc, layers), size):
        return False
    depth = [{*product.place[at :: pr * pc]} for at in range(pr * pc)]
    rows, cols = (
        np.argwhere(overlap_counts(a.rows, c.rows)).tolist(),
        np.argwhere(overlap_counts(b.cols, c.cols)).tolist(),
    )
    return all(C.rank(to_i, to_j) in depth[i * pc + j] for i, to_i in rows for j, to_j in cols)
