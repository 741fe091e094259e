"""Plans of m, n and k only: `pdgemm plan` has the plan of `pdgemm()`, for any number of ranks; one process, no MPI."""

from __future__ import annotations

import itertools
import json
import random
import re
from dataclasses import replace
from math import isqrt
from types import SimpleNamespace
from typing import Any

import in_process
import jobs
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tiers import examples

from pdgemm.algorithms.product_options import Operands, ProductOptions, problem_of
from pdgemm.errors import ArgumentError, MemoryLimitError
from pdgemm.grids.distribution import Distribution
from pdgemm.grids.layout import Layout
from pdgemm.local.arrays.dtypes import element_type
from pdgemm.planning.algorithm_registry import algorithm_choices
from pdgemm.planning.machines.machine import Machine, on_nodes
from pdgemm.planning.planner import (
    MOVES_WEIGH,
    RULE,
    TIE,
    candidates,
    candidates_explained,
    considered,
    explain,
    plan_product,
)
from pdgemm.planning.product_plan import ProductPlan
from pdgemm.planning.question import Question
from pdgemm.planning.search.candidate_table import Candidate, candidates_table

SHAPES = {
    "square": (16384, 16384, 16384),
    "large k": (17408, 17408, 3735552),
    "large m": (3735552, 17408, 17408),
    "flat": (131072, 131072, 512),
}


# ------------------------------------------------------------------ the plan of pdgemm()
class Matrix:
    """A matrix without elements and ranks: the attributes of a DistMatrix that planning reads."""

    def __init__(self, shape: tuple[int, int], dtype: np.dtype, grid: Any) -> None:
        self.shape, self.dtype, self.grid, self.device = shape, dtype, grid, "host"
        self.shared, self.stored = grid.size > 1, np.empty((0, 0), dtype)

    def layout_in(self, grid: Any) -> Layout:
        return Layout(Distribution.over(grid.shape, self.shape), tuple(range(grid.size)), self.dtype)


def ranks_on_nodes(ranks: int, per_node: int | None) -> Any:
    """Return the attributes of a ProcessGrid(comm) that planning reads, on nodes of `per_node` ranks."""
    rows = max(d for d in range(1, isqrt(ranks) + 1) if ranks % d == 0)
    most = min(ranks, per_node or ranks)
    return SimpleNamespace(
        size=ranks,
        shape=(rows, ranks // rows),
        nodes=tuple(rank - rank % most for rank in range(ranks)),
        ranks_per_node=most if most < ranks else None,
        shares_memory=most > 1,
        memory=SimpleNamespace(window=None),
    )


def asked_by_pdgemm(question: Question) -> Any:
    """Return the Problem of `pdgemm(1, A, B, 0, C)` for matrices in their default layouts."""
    grid = ranks_on_nodes(question.ranks, question.machine.ranks_per_node)
    m, n, k = question.mnk
    A, B, C = (Matrix(shape, question.dtype, grid) for shape in ((m, k), (k, n), (m, n)))
    limit = question.problem.memory_limit
    machine = on_nodes(question.machine, grid.ranks_per_node)
    options = ProductOptions(
        algorithm=question.algorithm, shape=question.shape, layers=question.layers, lookahead=question.lookahead,
        panel_width=question.width, memory_limit=limit, mover=question.mover, machine=machine,
    )  # fmt: skip
    return problem_of(Operands(A, B, C, True), options, 1, 0, shared=True)  # type: ignore[arg-type]


def drawn(seed: int) -> Question:
    """Return a random product on up to 512 ranks."""
    draw = random.Random(seed)
    ranks = draw.choice([1, 2, 3, 4, 6, 8, 12, 16, 31, 64, 96, 128, 250, 256, 512])
    m, n, k = (draw.choice([0, 1, 100, 4096, int(2 ** draw.uniform(0, 17))]) for _ in "mnk")
    question = Question(
        m, n, k, ranks, np.dtype(draw.choice(["float32", "float64", "complex128"])),
        algorithm=draw.choice(["auto", "auto", "auto", "summa", "inner", "stationary_a"]),
        mover=draw.choice(["auto", "auto", "shared", "mpi", "ibcast", "ring"]),
        width=draw.choice([None, None, 100]),
        lookahead=draw.choice([0, 1, 2]),
        machine=Machine(ranks_per_node=draw.choice([None, 2, 4, 64])),
    )  # fmt: skip
    if seed % 4:
        return question
    return replace(question, memory=question.given_bytes + question.plan().extra_bytes(None) * 3 // 4 + 1000)


def test_the_plan_by_extents_equals_that_of_pdgemm() -> None:
    plans = []
    for seed in (*range(examples(200)), 155):  # 155 is planned as 2.5D
        question = drawn(seed)
        try:
            plans.append(question.plan())
        except MemoryLimitError:
            with pytest.raises(MemoryLimitError):
                plan_product(asked_by_pdgemm(question))
        else:
            assert plans[-1] == plan_product(asked_by_pdgemm(question)), question
    # all kinds of plans are drawn
    assert {x.product.mover for x in plans} >= {"shared", "ibcast", "ring", "reduce_scatter"}
    assert {x.algorithm for x in plans} >= {"summa", "2.5d", "inner", "stationary_a"}
    assert any(x.moves for x in plans) and any(x.problem.nodes for x in plans)
    assert max(x.problem.size for x in plans) == 512


# ------------------------------------------------------------------ the rule
@pytest.mark.parametrize("layouts", ["default", "ideal"])
def test_the_choice_follows_the_rule(layouts: Any) -> None:
    assert f"within {TIE - 1:.0%}" in RULE and MOVES_WEIGH == 2 and "counted twice" in RULE
    for seed in range(0, 60, 4):
        question = replace(drawn(seed), layouts=layouts, memory=None)
        plan = question.plan()
        others = list(candidates(question.problem))
        least = min(x.cost for x in others)
        assert plan.cost <= TIE * least, question
        assert plan.weight <= min(x.weight for x in others if x.cost <= TIE * least) * 1.0001, question
        assert f"rule: {RULE}" in " ".join(explain(plan).split())


# ------------------------------------------------------------------ ideal layouts
@pytest.mark.parametrize("algorithm", algorithm_choices())
def test_ideal_layouts_need_no_redistribution(algorithm: str) -> None:
    for mnk, ranks in (((300, 200, 500), 8), ((1000, 70, 33), 12), ((5, 3, 4000), 6)):
        plan = Question(*mnk, ranks, layouts="ideal", algorithm=algorithm).plan()
        assert not plan.moves
        for rank in range(ranks):
            own = sum(x.local_bytes(rank) for x in plan.arrangement.layouts)
            assert plan.extra_bytes(rank) == plan.product.extra_bytes(rank) + own
        elements = sum(x.local_bytes(rank) // 8 for x in plan.arrangement.layouts for rank in range(ranks))
        m, n, k = mnk
        assert elements == m * k + k * n + m * n


def test_a_plan_on_ideal_layouts_is_not_carried_out() -> None:
    plan = Question(300, 200, 500, 6, layouts="ideal", algorithm="cannon").plan()
    with pytest.raises(ArgumentError, match="not a plan"):
        ProductPlan.from_json(plan.to_json())
    other = Question(300, 200, 500, 6, algorithm="cannon").plan()
    assert ProductPlan.from_json(other.to_json()) == other


@pytest.mark.parametrize(
    ("name", "ranks", "most"),
    [
        # the first four have the ideal grid
        *[("square", 512, 1.05), ("square", 4096, 1.05), ("large m", 128, 1.05), ("flat", 64, 1.05)],
        *[("square", 6, 1.25), ("square", 65, 1.25), ("flat", 128, 1.25), ("flat", 2198, 1.25)],
    ],
)
def test_no_candidate_sends_less_than_the_bound_and_some_are_near(name: str, ranks: int, most: float) -> None:
    plans = candidates(Question(*SHAPES[name], ranks, layouts="ideal").problem)
    assert 0.95 <= min(x.words / x.lower_bound_words for x in plans) <= most  # up to 5% of the ranks may be idle


@pytest.mark.parametrize(
    ("name", "ranks", "near"),
    [("square", 65, 64), ("large k", 127, 128), ("large m", 65, 64), ("flat", 127, 128), ("square", 2198, 2197)],
)
def test_no_cliff_beside_round_numbers_of_ranks(name: str, ranks: int, near: int) -> None:
    odd, even = (Question(*SHAPES[name], x, layouts="ideal").plan().cost for x in (ranks, near))
    assert 0.85 <= odd / even <= 1.15


@pytest.mark.parametrize("algorithm", ["cannon", "stationary_a", "2.5d", "row"])
def test_a_transposed_product_is_planned_as_the_mirror_image(algorithm: str) -> None:
    mirror = {"stationary_a": "stationary_b", "row": "column"}.get(algorithm, algorithm)
    here = Question(48_000, 2_400, 4_800, 24, algorithm=algorithm, layouts="ideal", mover="ring").candidates()[0]
    there = Question(2_400, 48_000, 4_800, 24, algorithm=mirror, layouts="ideal", mover="ring").candidates()[0]
    assert (here.grid, here.layers, here.inside) == (there.grid[::-1], there.layers, there.inside)
    assert here.words_per_rank == pytest.approx(there.words_per_rank)
    assert here.seconds == pytest.approx(there.seconds)


# ------------------------------------------------------------------ any number of ranks
def test_a_hundred_thousand_ranks() -> None:
    plan = Question(*SHAPES["square"], 100_000, machine=Machine(ranks_per_node=64)).plan()
    pr, pc, layers = plan.shape
    assert 90_000 < pr * pc * layers <= 100_000
    assert plan.words >= 0.95 * plan.lower_bound_words


@pytest.mark.parametrize("layouts", ["default", "ideal"])
def test_odd_shapes(layouts: Any) -> None:
    shapes = [(0, 5, 3), (4, 0, 3), (4, 5, 0), (0, 0, 0), (1, 1, 1), (1, 1, 10**7), (10**6, 3, 10**6)]
    for mnk, ranks in zip(shapes * 2, itertools.cycle((1, 7, 64))):
        plan = Question(*mnk, ranks, layouts=layouts).plan()
        found = considered(plan)
        assert [x.chosen for x in found] == [True] + [False] * (len(found) - 1)
        assert found[0].seconds == plan.seconds
        candidates_table(found)


def test_ranks_are_not_left_idle_for_the_sake_of_words() -> None:
    choice = Question(1, 1, 10**7, 1000).candidates()[0]
    assert choice.grid[0] * choice.grid[1] * choice.layers > 900


# ------------------------------------------------------------------ memory
@pytest.mark.parametrize("layouts", ["default", "ideal"])
def test_the_memory_limit_is_kept_and_what_is_missing_is_said(layouts: Any) -> None:
    question = Question(*SHAPES["square"], 64, layouts=layouts, mover="mpi")
    free = question.candidates()[0]
    tight = int(free.memory_bytes_per_rank * 0.95)
    found = replace(question, memory=tight).candidates()
    assert found[0].memory_bytes_per_rank <= tight
    assert any("needs" in x.verdict for x in found[1:])
    share = 3 * 16384**2 * 8 // 64
    with pytest.raises(
        MemoryLimitError, match=r"at least 9[67]\.\d MiB are needed on 64 ranks, of which 96\.0 MiB are A"
    ):
        replace(question, memory=share).plan()


@settings(max_examples=examples(40))
@given(
    st.tuples(*[st.integers(0, 3000)] * 3), st.integers(1, 200), st.sampled_from([0.6, 0.8, 1, 2]),
    st.sampled_from(["default", "ideal"]),
)  # fmt: skip
def test_plans_fit_the_memory_that_they_name(mnk: tuple[int, int, int], ranks: int, share: float, layouts: Any) -> None:
    question = Question(*mnk, ranks, layouts=layouts)
    free = question.plan()
    limit = int((free.extra_bytes(None) + question.given_bytes) * share)
    try:
        plan = replace(question, memory=limit).plan()
    except MemoryLimitError:
        return
    given = sum(x.local_bytes(None) for x in (plan.problem.layouts if layouts == "default" else ()))
    assert plan.extra_bytes(None) + given <= limit


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"ranks": 0}, "a product needs 1 to .* ranks, got 0"),
        ({"m": -1}, "dimensions are from 0"),
        ({"layouts": "mine"}, "layouts are ideal, or default, .*; got 'mine'"),
        ({"mover": "nccl"}, "mover 'nccl' is not one of auto, mpi, shared"),
        ({"mover": "shared", "machine": Machine(ranks_per_node=1)}, "is for ranks that share memory"),
        ({"ranks": 6, "algorithm": "cannon", "shape": (2, 3)}, "one side of its grid divides the other.*1 x 6, 6 x 1"),
        ({"ranks": 6, "algorithm": "2.5d", "layers": 7}, "layers >= 2"),
        ({"ranks": 6, "shape": (7, 1)}, "at most 6 ranks"),
        ({"ranks": 1, "algorithm": "2.5d"}, "impossible on 1 rank:"),
    ],
)
def test_impossible_options_are_refused_and_possible_ones_named(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Question(**{"m": 100, "n": 100, "k": 100, "ranks": 4, **asked}).plan()


# ------------------------------------------------------------------ the command line
def run(*words: str, code: int = 0) -> str:
    """Return the output of a command."""
    done = in_process.run([*words], None)
    assert done.returncode == code, done.stderr
    return done.stderr if code else done.stdout


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_the_commands_need_no_mpi(command: str) -> None:
    """The output is the same in an interpreter that cannot import mpi4py."""
    code = "import sys; sys.modules['mpi4py'] = None; from pdgemm.tools.cli.commands import main; main()"
    words = (command, "--shape", "512x512x512", "--ranks", "12", "--ranks-per-node", "4", "--mover", "ring")
    done = jobs.run(jobs.python(0, "-c", code, *words))
    assert (done.returncode, done.stdout) == (0, run(*words)), done.stderr
    if command == "simulate":
        assert "simulated on 3 nodes" in done.stdout
        facts = json.loads(run(*words, "--json"))
        assert facts["words_received"]["mean"] == pytest.approx(facts["formula_words_received"], rel=0.05)
        assert facts["mover"] == "ring"


def test_plan_speaks_json() -> None:
    words = ("--shape", "16384,16384,16384", "--ranks", "64", "--ranks-per-node", "8", "--memory", "16GiB")
    said = json.loads(run("plan", *words, "--json"))
    found = said["candidates"]
    keys = {"algorithm", "grid", "layers", "words_per_rank", "lower_bound_words", "messages_per_rank"}
    assert all(keys | {"memory_bytes_per_rank", "seconds", "chosen"} <= set(x) for x in found)
    assert [x["chosen"] for x in found] == [True] + [False] * (len(found) - 1)
    plan = Question(*SHAPES["square"], 64, memory=16 << 30, machine=Machine(ranks_per_node=8)).plan()
    assert (found[0]["algorithm"], *found[0]["grid"], found[0]["layers"]) == (plan.algorithm, *plan.shape)
    assert (said["layouts"], said["rule"]) == ("default", RULE)
    ideal = run("plan", *words, "--layouts", "ideal", "--mover", "ring")
    assert "layouts: ideal" in ideal and "lower bound" in ideal and f"rule: {RULE}" in " ".join(ideal.split())


@pytest.mark.parametrize("extents", [(1, 1, 1, 1), (15000, 1200, 900, 12), (0, 5, 9, 6)])
def test_output_fits_80_columns(extents: tuple[int, int, int, int]) -> None:
    question = Question(*extents, machine=Machine(ranks_per_node=48))
    found = question.candidates()
    texts = [candidates_explained(found, whole=True, more=""), explain(question.plan())]
    for text in texts:
        assert max(map(len, text.split("\n"))) <= 80
        assert re.search(r"\de[+-]?\d", text) is None  # no powers of ten
    for text, rows in zip(texts, (len(found), 5 if len(found) > 6 else len(found))):
        table = text.split(" cost\n")[1].split("\nand ")[0].split("\nrule: ")[0]
        assert len(table.split("\n")) == rows


@pytest.mark.parametrize(
    ("cost", "said"),
    [
        (56.0, "takes 1.8% less time, but the words and the memory of the chosen plan are less"),
        (90.0, "takes 1.8% less time, but costs more, because redistribution counts twice"),
    ],
)
def test_a_choice_that_is_not_the_fastest_is_explained(cost: float, said: str) -> None:
    chosen = Candidate("summa", (732, 3), 1, 2e8, 1e8, 810, 1 << 30, 28.5, chosen=True, verdict="chosen", cost=57.0)
    other = replace(chosen, grid=(549, 4), words_per_rank=3e8, seconds=28.0, cost=cost, chosen=False)
    slower = replace(other, seconds=30.0, cost=99.0)
    longest = {"words_per_rank": 9.99e11, "messages_per_rank": 1e9, "memory_bytes_per_rank": 1023 << 20}
    wide = replace(chosen, layers=100, seconds=100 * 86400, inside="cannon", moves="ABC", **longest)
    assert max(map(len, candidates_explained([wide, replace(wide, cost=2e5)], True, "").split("\n"))) <= 80
    small = replace(chosen, grid=(1, 1), seconds=1.0, fits=False, chosen=False)  # the candidate of a requested grid
    assert f"summa on 549 x 4 {said}" in " ".join(
        candidates_explained([chosen, other, slower, small], False, "").split()
    )
    assert "less time" not in candidates_explained([chosen, slower, small], False, "")


def test_all_candidates_are_shown_on_request() -> None:
    words = ("plan", "--shape", "1500,1200,900", "--ranks", "4")
    found = json.loads(run(*words, "--json"))["candidates"]
    few, whole = run(*words), run(*words, "--all")
    assert f"\nand {len(found) - 5} more: --all\n" in few
    assert len(whole.splitlines()) - len(few.splitlines()) == len(found) - 5 - 1
    assert found[0]["cost"] >= found[0]["seconds"] and len(f"{found[0]['seconds']}") > 6  # numbers are not rounded


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_narrow_types_are_planned(dtype: str) -> None:
    words = ("--shape", "900,800,700", "--ranks", "6", "--dtype", dtype, "--layouts", "ideal")
    found = json.loads(run("plan", *words, "--json"))["candidates"]
    plan = Question(900, 800, 700, 6, dtype=element_type(dtype), layouts="ideal").plan()
    assert (found[0]["algorithm"], found[0]["memory_bytes_per_rank"]) == (plan.algorithm, plan.extra_bytes(None))
    run("simulate", *words)


@pytest.mark.parametrize(
    "words",
    [
        "--ranks 0", "--shape 10,10", "--layers 0", "--product-grid 0x2", "--product-grid 3x3", "--ranks-per-node 0",
        "--ranks-per-node 1 --mover shared", "--ranks 8 --algorithm row --product-grid 4x2",
        "--ranks 99999999999999999999", "--shape 10,10,99999999999999999999", "--machine /nowhere.json",
    ],
)  # fmt: skip
def test_bad_questions_are_one_line_and_exit_code_2(words: str) -> None:
    said = run("plan", "--shape", "10,10,10", "--ranks", "4", *words.split(), code=2)
    assert said.startswith("pdgemm: error: ") and said.count("\n") == 1


def test_a_table_has_one_row_for_an_algorithm_on_a_grid() -> None:
    """SUMMA on the grid of the matrices, and on a new grid of the same shape, have one row."""
    found = Question(512, 512, 65536, 2).candidates()
    rows = {replace(x, seconds=0, memory_bytes_per_rank=0, verdict="", chosen=False, cost=0) for x in found}
    assert len(rows) == len(found) > 5
