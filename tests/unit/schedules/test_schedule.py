"""Panels of SUMMA, steps of Cannon, and formulas for counts: one process, no MPI."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from allgather_3d import allgather_3d_registered
from drawn_problems import inner_pairs, widths
from hypothesis import given, settings, strategies as st
from tiers import examples
from tree_mover import tree_planned

from pdgemm.grids.distribution import BlockCyclic, Distribution
from pdgemm.grids.layout import Layout
from pdgemm.instrument.recorder import Traffic
from pdgemm.planning.problem import Problem
from pdgemm.planning.search.candidates import arrangements
from pdgemm.schedules.formulas import gemm_flops
from pdgemm.schedules.mover_registry import MOVERS, reads
from pdgemm.schedules.products import Cannon, Layered, Product, Stationary, Summa
from pdgemm.schedules.rounds import one_each
from pdgemm.schedules.steps import (
    cannon_neighbours,
    cannon_steps,
    panel_counts,
    skewed_rank_maps,
    summa_steps,
    widest_panel,
)


@given(inner_pairs(), widths)
def test_panels_of_any_layouts(pair: tuple[BlockCyclic, BlockCyclic], width: int) -> None:
    """Each inner index is in one panel; panels are few, nearly equal, and of maximal runs; counts by formula agree."""
    inner_a, inner_b = pair
    seen, by_owners = [], dict[tuple[int, int], list[int]]()
    for step in (steps := summa_steps(*pair, width)):
        in_a = inner_a.to_global(step.a.indices()[0], step.col)
        in_b = inner_b.to_global(step.b.indices()[0], step.row)
        assert in_a.tolist() == in_b.tolist()  # columns of A match rows of B
        assert (inner_a.owner(in_a) == step.col).all() and (inner_b.owner(in_b) == step.row).all()
        assert len(in_a) == step.width == step.a.size == step.b.size
        seen.extend(in_a.tolist())
        by_owners.setdefault((step.col, step.row), []).append(step.width)
        for runs in (step.a, step.b):
            assert (runs.lengths > 0).all() and (runs.source[1:] > runs.source[:-1] + runs.lengths[:-1]).all()
    assert sorted(seen) == list(range(inner_a.n))
    counts = np.zeros((inner_a.parts, inner_b.parts), int)
    for owners, panels in by_owners.items():
        assert max(panels) <= width and max(panels) - min(panels) <= 1
        assert len(panels) == -(-sum(panels) // width)
        counts[owners] = len(panels)
    assert np.array_equal(panel_counts(*pair, width), counts)  # counted by formula
    assert widest_panel(*pair, width) == max((step.width for step in steps), default=0)


def test_owners_take_turns() -> None:
    inner = BlockCyclic.even(4096, 2)
    assert [step.col for step in summa_steps(inner, inner, 512)] == [0, 1] * 4


@pytest.mark.parametrize("shape", [(1, 4), (2, 2), (2, 4), (4, 2), (3, 3), (2, 3), (4, 4), (1, 8)], ids=str)
@pytest.mark.parametrize("block", [None, 8])
def test_ranks_copy_from_different_owners_at_a_time(shape: tuple[int, int], block: int | None) -> None:
    """If panels are copied from owners' memory, no two ranks of a grid row or column read from one owner at a time.

    Except on 2 x 3 in whole blocks: panels of A and B have different borders, and no rotation separates three columns.
    """
    pr, pc = shape
    most = 2 if shape == (2, 3) and block is None else 1
    n, double = 8 * 3 * pr * pc, np.dtype("d")
    A, B, C = (Layout(Distribution.over(shape, (n, n), block), tuple(range(pr * pc)), double) for _ in "ABC")
    summa = Summa(A, B, C, accumulate=double, width=8, lookahead=1, mover="ipc")
    assert Summa(A, B, C, accumulate=double, width=8, lookahead=1, mover="shared").order(pr * pc - 1) == summa.bundles
    orders = [[(x.steps[0].col, x.steps[0].row) for x in summa.order(rank)] for rank in range(pr * pc)]
    for rank in range(pr * pc):
        assert sorted(summa.order(rank), key=id) == sorted(summa.bundles, key=id)
    for turn in range(len(summa.bundles)):
        for i in range(pr):
            assert max(Counter(orders[i * pc + j][turn][0] for j in range(pc)).values()) <= most
        for j in range(pc):
            assert max(Counter(orders[i * pc + j][turn][1] for i in range(pr)).values()) <= most
    if block is None:
        there = Layout(Distribution.over((pc, pr), (n, n)), tuple(np.arange(pr * pc).reshape(shape).T.ravel()), double)
        stationary = Stationary(A, there, C, accumulate=double, width=8, lookahead=1, mover="ipc")
        rows = [[step.row for step in stationary.order(i * pc)] for i in range(pr)]
        assert all(stationary.order(i * pc) == stationary.order(i * pc + pc - 1) for i in range(pr))
        assert [each[0] for each in rows] == [*range(pr)]


def test_flops() -> None:
    assert gemm_flops(2, 3, 4) == 48
    assert gemm_flops(2, 3, 4, complex_=True) == 192


# ------------------------------------------------------------------ Cannon
@pytest.mark.parametrize("shape", [(q, q * t) for q in range(1, 7) for t in range(1, 5)][::2])
def test_cannon_multiplies_every_part_once_and_receives_it_from_its_neighbour(
    shape: tuple[int, int],
) -> None:
    pr, pc = shape
    every = list(itertools.product(range(pr), range(pc)))
    steps = {at: cannon_steps(shape, at) for at in every}
    for at in every:
        assert sorted(step.a for step in steps[at]) == list(range(pc))
        assert all(step.b == step.a % pr for step in steps[at])
    t = pc // pr
    for number, (i, j) in itertools.product(range(pc - 1), every):
        to, source = cannon_neighbours(shape, j, number)
        assert steps[i, j][number + 1].a == steps[i, source][number].a  # j receives the part that `source` had
        assert cannon_neighbours(shape, source, number)[0] == j  # `source` sends it to j
        assert cannon_neighbours(shape, to, number)[1] == j
        if number % t == t - 1:
            assert steps[i, j][number + 1].b == steps[(i + 1) % pr, j][number].b
        else:
            assert steps[i, j][number + 1].b == steps[i, j][number].b
    # at each step, each part of A is on one rank of a row, and each part of B on t ranks of a column
    for number in range(pc):
        for i in range(pr):
            assert sorted(steps[i, j][number].a for j in range(pc)) == list(range(pc))
        for j in range(pc):
            assert sorted(steps[i, j][number].b for i in range(pr)) == list(range(pr))
    place = tuple(np.random.default_rng(1).permutation(pr * pc).tolist())
    place_a, place_b = skewed_rank_maps(place, shape)  # rank maps in which the first step needs no messages
    for (i, j), (first, *_) in steps.items():
        assert place_a[i * pc + first.a] == place_b[first.b * pc + j] == place[i * pc + j]


# ------------------------------------------------------------------ consistency of costs
@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, Layout, Layout, int]:
    """Draw layouts of A, B and C on any grids of up to 8 ranks."""
    size = draw(st.integers(1, 8))
    m, n, k = (draw(st.integers(0, 30)) for _ in "mnk")

    def one(shape: tuple[int, int]) -> Layout:
        pr = draw(st.integers(1, size))
        pc = draw(st.integers(1, size // pr))
        place = draw(st.permutations(range(size)))[: pr * pc]
        block = draw(st.tuples(*[st.integers(1, 9)] * 2))
        return Layout(Distribution.over((pr, pc), shape, block), tuple(place), np.dtype(draw(st.sampled_from("fd"))))

    return one((m, k)), one((k, n)), one((m, n)), size


@settings(max_examples=examples(60), deadline=None)
@given(layouts(), widths, st.sampled_from([*MOVERS, "tree"]), st.integers(0, 3), st.sampled_from([1, 3]), st.booleans())
def test_formulas_equal_sums_over_rounds(
    laid: tuple[Layout, Layout, Layout, int], width: int, mover: str, per_node: int, lookahead: int, gpus: bool
) -> None:
    """Words, messages and work by the formulas of each algorithm equal sums over its rounds, for all ranks."""
    *given_layouts, size = laid
    nodes = tuple(rank - rank % per_node for rank in range(size)) if mover == "shared" and 0 < per_node < size else ()
    with allgather_3d_registered(), tree_planned():
        asked = {"shared": reads(mover), "reads": mover, "nodes": nodes, "device": "cuda" * (gpus and mover != "tree")}
        problem = Problem(*given_layouts, size, True, np.dtype("d"), width, lookahead, mover, **asked)
        for way in arrangements(problem):
            check_product(way.product, size)


def check_product(product: Product, size: int) -> None:
    """Compare the formulas of a product with sums over its rounds."""
    plain = Product  # its methods add up rounds
    pieces = [piece for at in product.rounds() for piece in at.work]
    work = sum((np.prod([one_each(x, size) for x in piece.extents], axis=0) for piece in pieces), np.zeros(size))
    for rank in range(size):
        traffic = sum((x.traffic for x in plain.transfers(product, rank)), Traffic())
        assert product.traffic(rank) == traffic, (product, rank)
        shape = product.local_shape(rank)
        assert np.prod(shape) == work[rank], (product, rank)
        if isinstance(product, (Summa, Cannon, Layered)) and work[rank]:
            assert shape == plain.local_shape(product, rank)
    total, steps, widest = int(product.tally.counts[1].sum()), product.tally.steps, product.tally.widest
    assert product.total_words == total
    if type(product) is Summa and not product.nodes:
        A, B = product.A.distribution, product.B.distribution
        assert total == np.prod(A.shape) * (A.cols.parts - 1) + np.prod(B.shape) * (B.rows.parts - 1)
    figures = total, product.panels, product.widest, product.product_width, product.slots, product.turns
    assert {type(x) for x in figures} == {int}  # reports and plans write them as JSON
    if work[[*product.grid.ranks]].all():  # no rank is idle
        bundled = isinstance(product, (Summa, Layered))  # one step may multiply several panels
        assert steps <= product.panels if bundled else steps == product.panels
        if not isinstance(product, Stationary):  # which has panels of C
            assert product.product_width >= widest


@pytest.mark.parametrize("mover", ["ibcast", "ring"])
def test_words_by_direction_equal_the_rounds(mover: str) -> None:
    for size in (1, 2, 4, 6, 8, 12):
        laid = [Layout(Distribution.over((1, size), x, 5), tuple(range(size)), np.dtype("d")) for x in [(50, 50)] * 3]
        problems = [Problem(*laid, size, True, np.dtype("d"), 16, lookahead, mover) for lookahead in (1, 3)]
        for way in (way for problem in problems for way in arrangements(problem)):
            for rank in range(size):
                told = Product.transfers(way.product, rank)
                assert [x for x in way.product.transfers(rank) if x.traffic != Traffic()] == told
