"""The layouts of A, B and C for each algorithm: on the present grids of the matrices, and on a new grid."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.grids.layout import Layout, listed, transposed_rank_map
from pdgemm.planning.problem import Problem, brought, lay_out
from pdgemm.planning.search.grid_search import Partition
from pdgemm.schedules.mover_registry import reads
from pdgemm.schedules.products import Cannon, Inner, Layered, Product, Stationary, Summa
from pdgemm.schedules.steps import skewed, skewed_rank_maps

LEAST_BLOCK, MOST_BLOCK = 32, 128  # block sizes of a triangle: BLAS is slower on smaller blocks, not faster on larger


def summa_on_grid_of(problem: Problem, base: Layout) -> Iterator[Product]:
    """Yield SUMMA on the grid of one matrix; C has the row distribution of A and the column distribution of B."""
    pr, pc = base.distribution.grid_shape
    on_a, on_b, on_c = (x.grid == base.grid for x in (problem.A, problem.B, problem.C))
    a, b, c = (x.distribution for x in (problem.A, problem.B, problem.C))
    rows = [x.rows for x, here in ((c, on_c), (a, on_a)) if here] or [c.rows.over(pr)]
    cols = [x.cols for x, here in ((c, on_c), (b, on_b)) if here] or [c.cols.over(pc)]
    inner_a = a.cols if on_a else BlockCyclic.even(a.cols.n, pc)
    inner_b = b.rows if on_b else BlockCyclic.even(b.rows.n, pr)
    for r in {x.canonical: x for x in reversed(rows)}.values():
        for s in {x.canonical: x for x in reversed(cols)}.values():
            yield _summa(problem, r, s, inner_a, inner_b, base.rank_map)


def _summa(
    problem: Problem, r: BlockCyclic, s: BlockCyclic, inner_a: BlockCyclic, inner_b: BlockCyclic, ranks: tuple[int, ...]
) -> Summa:
    laid = lay_out(problem, (r, inner_a, ranks), (inner_b, s, ranks), (r, s, ranks))
    product = Summa(*laid, problem.lookahead, problem.broadcast, nodes=problem.relay_nodes, **problem.options)
    return product if problem.width_asked else product.whole()


def summa_on(problem: Problem, partition: Partition) -> Summa:
    """Return SUMMA on a new grid."""
    r, s, inner_a, inner_b = dims(partition, bool(problem.triangle))
    return _summa(problem, r, s, inner_a, inner_b, problem.rank_map[: partition.ranks])


def dims(partition: Partition, triangle: bool = False) -> tuple[BlockCyclic, BlockCyclic, BlockCyclic, BlockCyclic]:
    """Return the distributions of a partition: rows of C, columns of C, inner indices of A, inner indices of B."""
    most = triangle_block(partition.m, partition.pr, partition.pc) if triangle else max(partition.m, partition.n)
    return (
        BlockCyclic(partition.m, max(1, min(most, partition.row_block)), partition.pr),
        BlockCyclic(partition.n, max(1, min(most, partition.col_block)), partition.pc),
        BlockCyclic(partition.k, partition.block, partition.pc * partition.layers),
        BlockCyclic(partition.k, partition.block, partition.pr * partition.layers),
    )


def triangle_block(n: int, pr: int, pc: int) -> int:
    """Return the block size with which one triangle of an n x n matrix is spread evenly over the ranks of a grid.

    With 16 blocks or more per grid row and per grid column, a rank has at most a sixteenth more elements of the
    triangle than the mean of all ranks.
    """
    return max(LEAST_BLOCK, min(MOST_BLOCK, n // (16 * max(pr, pc))))


def stationary(problem: Problem, shape: tuple[int, int], rank_map: tuple[int, ...]) -> Stationary:
    """Return SUMMA with A stationary on a Pr x Pc grid; B is distributed over the transposed grid."""
    (pr, pc), (m, n, k) = shape, problem.mnk
    a, b, c = (x.distribution for x in (problem.A, problem.B, problem.C))
    grid = (shape, rank_map)
    here_a, here_c = problem.A.grid == grid, problem.C.grid == grid
    rows = a.rows if here_a else c.rows if here_c else BlockCyclic.even(m, pr)
    inner = a.cols if here_a else BlockCyclic.even(k, pc)
    cols_c = c.cols if here_c else BlockCyclic.even(n, pc)
    across = transposed_rank_map(rank_map, shape)
    cols_b = b.cols if problem.B.grid == ((pc, pr), across) else BlockCyclic.even(n, pr)
    laid = lay_out(problem, (rows, inner, rank_map), (inner, cols_b, across), (rows, cols_c, rank_map))
    return Stationary(*laid, problem.lookahead, problem.broadcast_by_message, **problem.options)


def cannon_on(problem: Problem, partition: Partition) -> Cannon:
    """Return Cannon's algorithm on the grid of C if this has the shape of the partition, else on a new grid."""
    a, b, c = (x.distribution for x in (problem.A, problem.B, problem.C))
    r, s, inner_a, inner_b = dims(partition, bool(problem.triangle))
    shape, rank_map = (partition.pr, partition.pc), problem.rank_map[: partition.ranks]
    if problem.C.grid == (shape, rank_map):
        r, s = c.rows, c.cols
    if partition.pr == partition.pc:  # on a square grid, inner blocks of any size fit
        if a.grid_shape == shape:
            inner_a = inner_b = a.cols
        elif b.grid_shape == shape:
            inner_a = inner_b = b.rows
    place_a, place_b = skewed_rank_maps(rank_map, shape)
    laid = lay_out(problem, (r, inner_a, place_a), (inner_b, s, place_b), (r, s, rank_map))
    return Cannon(*laid, max(1, problem.lookahead), problem.shift, **problem.options)


def layered_on(problem: Problem, partition: Partition, inside: str, on_layer_0: bool = False) -> Layered:
    """Return a product in layers, with C distributed over all layers, or on layer 0 in the user's layout."""
    c, shape = partition.layers, (partition.pr, partition.pc)
    (pr, pc), (down, across) = shape, (1, 1) if on_layer_0 else partition.shares
    grid = np.array(problem.rank_map[: partition.ranks]).reshape(c, *shape)
    if not on_layer_0 and problem.C.distribution.grid_shape == (pr * down, pc * across):  # C keeps its rank map
        grid = grid.reshape(pr, down, pc, across).transpose(1, 3, 0, 2).reshape(c, *shape)
    r, s, inner_a, inner_b = dims(partition)
    if on_layer_0:
        r, s = problem.C.distribution.rows, problem.C.distribution.cols
        of_c = (r, s, problem.C.rank_map)
    else:
        rows = BlockCyclic(partition.m, partition.row_block // down, pr * down)
        cols = BlockCyclic(partition.n, partition.col_block // across, pc * across)
        of_c = (rows, cols, listed(grid.reshape(down, across, *shape).transpose(2, 0, 3, 1)))
    at_a, at_b = skewed(grid) if inside == "cannon" else (grid, grid)
    place_a, place_b = listed(at_a.transpose(1, 2, 0)), listed(at_b.transpose(1, 0, 2))
    mover = problem.shift if inside == "cannon" else problem.broadcast
    laid = lay_out(problem, (r, inner_a, place_a), (inner_b, s, place_b), of_c)
    nodes = problem.relay_nodes if inside == "summa" else ()
    owners = BlockCyclic(r.largest, max(1, r.block // down), down)
    at_once = problem.reduced_rows(r.largest, s.largest, "" if nodes else mover, owners)
    product = Layered(
        *laid, problem.lookahead, mover, listed(grid), c, inside, at_once,
        nodes=nodes, **problem.options,
    )  # fmt: skip
    shifted = inside == "cannon" and not product.nothing_travels
    return product if problem.width_asked or shifted else product.whole()


def layered_here(problem: Problem) -> Iterator[Product]:
    """Yield a product in layers of the shape of C's grid, if there are ranks for more than one layer."""
    pr, pc = problem.C.distribution.grid_shape
    most = problem.size // (pr * pc)
    c = problem.layers or most
    if 1 < c <= most:
        yield layered_on(problem, Partition(*problem.mnk, pr, pc, c), "summa", on_layer_0=True)


def inner_on(problem: Problem, a: Layout, b: Layout) -> Inner:
    """Return the product by the algorithm "inner" on these layouts of A and B, with C in its present layout."""
    by = problem.broadcast_by_message
    mover = by if reads(by) else "reduce_scatter"
    rows = problem.reduced_rows(*problem.mnk[:2], mover, problem.C.distribution.rows, in_turn=not problem.device)
    return Inner(
        a, b, problem.C, problem.accumulate, problem.width, problem.lookahead, mover, rows, problem.size,
        **problem.options,
    )  # fmt: skip


def inner_layouts(problem: Problem) -> Iterator[tuple[Layout, Layout]]:
    """Yield pairs of layouts with equal distributions of the columns of A and the rows of B over the same ranks."""
    A, B, size = problem.A, problem.B, problem.size
    m, n, k = problem.mnk
    distributions: dict[object, tuple[BlockCyclic, tuple[int, ...]]] = {}
    if A.distribution.rows.parts == 1:
        distributions[A.distribution.cols.canonical, A.rank_map] = A.distribution.cols, A.rank_map
    if B.distribution.cols.parts == 1:
        distributions.setdefault((B.distribution.rows.canonical, B.rank_map), (B.distribution.rows, B.rank_map))
    distributions[None] = BlockCyclic.even(k, size), tuple(range(size))
    for inner, rank_map in distributions.values():
        yield (
            brought(A, Distribution(BlockCyclic.even(m, 1), inner), rank_map),
            brought(B, Distribution(inner, BlockCyclic.even(n, 1)), rank_map),
        )


def inner_on_new_grid(problem: Problem, partition: Partition) -> Product:
    """Return the product by the algorithm "inner" over all ranks of the communicator."""
    *_, (a, b) = inner_layouts(problem)
    C = problem.C
    if problem.ideal:  # C is distributed as evenly as possible
        problem = replace(problem, C=replace(C, distribution=Distribution.over(partition.shares, C.distribution.shape)))
    return inner_on(problem, a, b)
