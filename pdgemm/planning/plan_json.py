"""Write plans as JSON and read them back, with a check of the types and of the consistency of the parts."""

from __future__ import annotations

import json
from typing import Any, Literal, Union

import msgspec

from pdgemm.errors import ArgumentError
from pdgemm.planning.algorithm_registry import ALGORITHMS, algorithm_of
from pdgemm.planning.problem import Problem
from pdgemm.schedules.exchanges.block_messages import MOST_JOINED
from pdgemm.schedules.exchanges.exchange import Exchange
from pdgemm.schedules.mover_registry import MOVERS, STAGED
from pdgemm.schedules.products import Product
from pdgemm.schedules.products.product import on_ranks
from pdgemm.support.json_input import decoded, jsonable

Moves = tuple[tuple[Literal["A", "B", "C", "scale", "bias", "residual"], Exchange], ...]
Parts = tuple[Product, bool, Moves, Problem]  # the fields of a ProductPlan
_NOT_ONE = "not a plan that was saved"
_MOST_BLOCKS = 1 << 24  # blocks of a dimension: the figures of a plan take time and memory for each block
_MOST_BYTES = 1 << 50  # bytes of the local array of a rank


def _known() -> dict[type[Product], Any]:
    """Return, for each class of product, the msgspec struct as which a plan with such a product is saved."""
    return {
        kind: msgspec.defstruct(
            kind.__name__,
            [("product", kind), ("transposed", bool), ("moves", Moves), ("problem", Problem)],
            tag_field="algorithm",
            tag=kind.__name__,
        )
        for kind in {entry.product for entry in ALGORITHMS.values()}
    }


def pack(*parts: Any) -> str:
    """Return the parts of a plan as JSON."""
    return json.dumps(jsonable(_known()[type(parts[0])](*parts)))


def unpack(text: str) -> Parts:
    """Return the parts of the plan that `pack` wrote.  Raises ArgumentError for any other text."""
    saved: Any = decoded(text, Union[tuple(_known().values())], _NOT_ONE, exact=True)  # type: ignore[arg-type]  # noqa: UP007
    if fault := _fault(saved.product, saved.moves, saved.problem):
        raise ArgumentError(f"{_NOT_ONE}: {fault}")
    return saved.product, saved.transposed, saved.moves, saved.problem


def _fault(product: Product, moves: Moves, problem: Problem) -> str:
    """Return the first inconsistency of a plan, or a size beyond any real matrix, as text; "": the plan is sound."""
    size, product_layouts = problem.size, (product.A, product.B, product.C)
    layouts = [*problem.layouts, *product_layouts, *(x for _, move in moves for x in (move.source, move.target))]
    if not all(on_ranks(x.rank_map, x.distribution.grid_shape, size) for x in layouts):
        return f"a layout does not have a different rank from 0 to {size - 1} at each position of its grid"
    sides = [side for x in layouts for side in (x.distribution.rows, x.distribution.cols)]
    if any(side.n + side.skip > _MOST_BLOCKS * side.block for side in sides):
        return f"a matrix has more than {_MOST_BLOCKS} blocks in a row or a column"
    if any(x.local_bytes(None) > _MOST_BYTES for x in layouts):
        return f"a rank has more than {_MOST_BYTES} bytes of a matrix"
    for A, B, C in (problem.layouts, product_layouts):
        (m, k), (inner, n) = A.distribution.shape, B.distribution.shape
        if C.distribution.shape != (m, n) or k != inner:
            return "the shapes of A, B and C do not make a product"
    if product.triangle and (problem.mnk[0] != problem.mnk[1] or not algorithm_of(product).triangles):
        return "its algorithm cannot compute only a triangle of C"
    if any(move.size != size or move.words < 1 for _, move in moves) or not product.fits(size):
        return "its layouts do not fit its algorithm"
    if len(problem.nodes) not in (0, size * problem.shared) or product.nodes not in ((), problem.nodes):
        return "its lists of nodes differ, or do not have an entry for each rank that shares memory"
    if any(move.nodes and not _is_between_nodes(move, problem) for _, move in moves):
        return "a redistribution has other messages between nodes than those of the problem's nodes"
    if product.mover not in {*MOVERS, *algorithm_of(product).moves_by} - {STAGED.name}:
        return f"its mover {product.mover!r} cannot transfer its panels"
    if min(product.width, product.lookahead + 1) < 1 or getattr(product, "rows", 1) < 1:
        return "its panels or its lookahead are too small"
    if product.turns > _MOST_BLOCKS:
        return f"C is reduced in more than {_MOST_BLOCKS} pieces"
    return ""


def _is_between_nodes(move: Exchange, problem: Problem) -> bool:
    """Return whether the move has one message between two nodes of the problem, and buffers for all of its words."""
    if move.nodes != problem.nodes or move.shared or move.device or move.staged or move.nccl:
        return False
    return move == move.joined(problem.nodes) and move.words * move.wire.itemsize <= MOST_JOINED
