"""Grids, bounds, estimates and simulations: one process, no MPI, any number of ranks."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdgemm.errors import ArgumentError, FileError, MemoryLimitError
from pdgemm.model.formulas import bound_memory_dependent, bound_memory_independent, lower_bound
from pdgemm.model.machine import Link, Machine, load_machine
from pdgemm.planning.algorithm_grids import FAMILIES
from pdgemm.planning.candidate_table import table
from pdgemm.planning.choice import all_estimates, chosen, estimates, product_of
from pdgemm.planning.estimates import Question
from pdgemm.planning.grid_search import Box, best_grids, divisor_like, grids
from pdgemm.planning.simulator import simulate
from pdgemm.support.text import in_bytes

SHAPES = {
    "square": (16384, 16384, 16384),
    "large k": (17408, 17408, 3735552),
    "large m": (3735552, 17408, 17408),
    "flat": (131072, 131072, 512),
}
RANKS = [4, 6, 12, 16, 64, 65, 100, 127, 128, 512, 1000, 2198, 9217, 18432, 100_000]


# ------------------------------------------------------------------ lower bounds
def test_the_bound_in_its_three_regimes() -> None:
    m, n, k = 1000, 100, 10
    assert bound_memory_independent(m, n, k, 1) == 0
    for ranks in (1, 5, 10):  # one rank for each stripe of the longest side: the smallest matrix goes to all
        assert bound_memory_independent(m, n, k, ranks) == pytest.approx(n * k * (1 - 1 / ranks))
    ranks = 250  # 10 <= P <= 1000: the largest matrix stays
    assert bound_memory_independent(m, n, k, ranks) == pytest.approx(
        2 * math.sqrt(m * n * k * k / ranks) - (m * k + n * k) / ranks
    )
    n, ranks = 1000, 125  # a cube: every rank needs a side of each
    assert bound_memory_independent(n, n, n, ranks) == pytest.approx(3 * (n * n / 25) - 3 * n * n / ranks)


@given(st.tuples(*[st.integers(1, 5000)] * 3), st.integers(1, 10_000))
def test_the_bound_does_not_depend_on_the_order_of_sides_and_grows_with_the_box(
    mnk: tuple[int, int, int], ranks: int
) -> None:
    m, n, k = mnk
    bound = bound_memory_independent(m, n, k, ranks)
    assert bound == pytest.approx(bound_memory_independent(k, m, n, ranks))
    assert 0 <= bound <= m * k + k * n + m * n


def test_little_memory_raises_the_bound() -> None:
    n, ranks, words = 16384, 64, 3 * 16384**2 / 64
    dependent = bound_memory_dependent(n, n, n, ranks, words)
    assert dependent == pytest.approx(2 * n**3 / (ranks * math.sqrt(words)) - 2 * words)
    assert lower_bound(n, n, n, ranks, words) == max(dependent, bound_memory_independent(n, n, n, ranks))
    assert lower_bound(n, n, n, ranks, 100 * words) == bound_memory_independent(n, n, n, ranks)


# ------------------------------------------------------------------ grids
@given(st.integers(1, 3000))
def test_divisor_like_numbers_are_the_quotients(total: int) -> None:
    assert divisor_like(total, total).tolist() == sorted({total // x for x in range(1, total + 1)})


@settings(max_examples=60)
@given(st.tuples(*[st.integers(300, 3000)] * 3), st.integers(1, 40))
def test_no_grid_sends_fewer_words_than_the_best(mnk: tuple[int, int, int], ranks: int) -> None:
    """Against all Pr x Pc x c with as little idle, one by one."""
    best = best_grids(*mnk, ranks)[0]
    every = [
        Box(*mnk, a, b, ranks // (a * b)) for a in range(1, ranks + 1) for b in range(1, ranks // a + 1)
    ]  # fmt: skip
    work = lambda box: box.high * box.wide * box.deep  # noqa: E731
    least = min(map(work, every))
    busy = [box for box in every if work(box) * 0.95 <= least]
    assert sum(best.words) <= min(sum(box.words) for box in busy) * 1.01
    assert best.ranks <= ranks
    assert (grids(*mnk, ranks).prod(axis=1) <= ranks).all()


def test_sixty_five_ranks_are_used_as_a_cube() -> None:
    best = best_grids(*SHAPES["square"], 65)[0]
    assert (best.pr, best.pc, best.layers) == (4, 4, 4)


# ------------------------------------------------------------------ the choice
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("ranks", RANKS)
def test_the_choice_sends_no_more_than_any_alternative(name: str, ranks: int) -> None:
    words = {}
    for algorithm in (*FAMILIES, "row", "column"):
        try:
            words[algorithm] = estimates(Question(*SHAPES[name], ranks, algorithm=algorithm))[0].words_per_rank
        except ArgumentError:  # such as 2.5d on 1 rank
            continue
    choice = estimates(Question(*SHAPES[name], ranks))[0]
    assert choice.words_per_rank <= 1.01 * min(words.values())
    assert choice.words_per_rank >= choice.lower_bound_words * 0.95  # up to 5% of the ranks may be idle


@pytest.mark.parametrize(
    ("mnk", "ranks"),
    [
        ((16384, 16384, 16384), 64),
        ((16384, 16384, 16384), 512),
        ((16384, 16384, 16384), 4096),
        ((17408, 17408, 3735552), 128),
        ((3735552, 17408, 17408), 128),
        ((131072, 131072, 512), 64),
        ((131072, 131072, 512), 16384),
        ((65536, 65536, 65536), 32768),
    ],
)
def test_where_the_grid_divides_the_bound_is_reached(mnk: tuple[int, int, int], ranks: int) -> None:
    assert estimates(Question(*mnk, ranks))[0].ratio <= 1.05


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("ranks", "near"), [(65, 64), (127, 128), (2198, 2197), (9217, 9216)])
def test_no_cliff_beside_round_numbers_of_ranks(name: str, ranks: int, near: int) -> None:
    odd, even = (estimates(Question(*SHAPES[name], x))[0].words_per_rank for x in (ranks, near))
    assert 0.9 <= odd / even <= 1.1


def test_the_estimate_is_what_the_product_sends_where_the_grid_divides() -> None:
    for mnk, ranks in ((3 * (6144,), 64), ((9600, 4800, 19200), 12), ((65536, 512, 512), 8), ((512, 512, 65536), 16)):
        for question in (Question(*mnk, ranks), Question(*mnk, ranks, mover="ring", width=32)):
            seen = 0
            for estimate in all_estimates(question):
                box = estimate.box
                m, n, k = estimate.question.mnk
                if m % (box.pr * box.shares[0]) or n % (box.pc * box.shares[1]) or k % (box.block * box.layers):
                    continue
                product = product_of(estimate)
                traffic = [product.traffic(rank) for rank in range(box.ranks)]
                received = sum(x.words_received for x in traffic) / box.ranks
                assert received == pytest.approx(estimate.words), estimate
                assert sum(x.messages_received for x in traffic) / box.ranks == pytest.approx(
                    estimate.messages, rel=0.05
                )
                assert product.total_words == sum(x.words_sent for x in traffic) == box.total_words
                buffers = estimate.memory() - estimate.share_bytes
                assert product.extra_bytes(None) == pytest.approx(buffers, rel=1e-9), estimate
                copied = max(product.copied(rank) for rank in range(box.ranks))
                assert copied == pytest.approx(estimate.copied, rel=0.01), estimate
                slowest = max(product.seconds(question.machine, rank) for rank in range(box.ranks))
                assert slowest == pytest.approx(estimate.seconds, rel=0.2), estimate
                seen += 1
            assert seen >= 5


def test_planning_for_many_ranks_takes_no_time_that_depends_on_them() -> None:
    """No wall clock: the number of grids that are compared."""
    assert len(grids(*SHAPES["square"], 100_000)) < 30_000
    assert len(estimates(Question(*SHAPES["square"], 100_000))) < 50


def test_the_memory_limit_is_kept_and_what_is_missing_is_said() -> None:
    free = estimates(Question(*SHAPES["square"], 64))[0]
    tight = int(free.memory_bytes_per_rank * 0.7)
    found = estimates(Question(*SHAPES["square"], 64, memory=tight))
    assert found[0].memory_bytes_per_rank <= tight
    assert found[0].words_per_rank > free.words_per_rank
    assert any("needs" in x.verdict for x in found[1:])
    thin = [x for x in found if x.layers == 4 and x.inside == "summa" and x.memory_bytes_per_rank <= tight]
    assert thin[0].words_per_rank < found[0].words_per_rank  # fits with thin panels, and is no alternative
    assert thin[0].seconds > 1.6 * min(x.seconds for x in found)
    share = 3 * 16384**2 * 8 // 64
    with pytest.raises(MemoryLimitError, match=r"at least 96\.\d MiB are needed on 64 ranks, of which 96\.0 MiB are A"):
        estimates(Question(*SHAPES["square"], 64, memory=share))


@pytest.mark.parametrize("algorithm", ["cannon", "stationary_a", "2.5d", "row"])
def test_a_transposed_product_is_planned_as_the_mirror_image(algorithm: str) -> None:
    mirror = {"stationary_a": "stationary_b", "row": "column"}.get(algorithm, algorithm)
    here = estimates(Question(40_000, 3_000, 5_000, 24, algorithm=algorithm))[0]
    there = estimates(Question(3_000, 40_000, 5_000, 24, algorithm=mirror))[0]
    assert (here.grid, here.layers, here.inside) == (there.grid[::-1], there.layers, there.inside)
    assert here.words_per_rank == pytest.approx(there.words_per_rank)
    assert here.seconds == pytest.approx(there.seconds)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"ranks": 0}, "a product needs 1 to .* ranks, got 0"),
        ({"m": -1}, "dimensions are from 0"),
        ({"ranks": 6, "algorithm": "cannon", "shape": (2, 3)}, "one side of its grid divides the other.*1 x 6, 6 x 1"),
        ({"ranks": 6, "algorithm": "2.5d", "layers": 7}, "layers >= 2"),
        ({"ranks": 6, "shape": (7, 1)}, "at most 6 ranks"),
        ({"ranks": 1, "algorithm": "2.5d"}, "impossible on 1 rank:"),
    ],
)
def test_what_is_impossible_is_refused_and_what_is_possible_is_said(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        estimates(Question(**{"m": 100, "n": 100, "k": 100, "ranks": 4, **asked}))


def test_the_table_and_its_figures() -> None:
    found = estimates(Question(1000, 1000, 1000, 8, redistributed=True))
    text = table(found)
    assert "2.5d (" in text
    assert "chosen" in text
    assert all(x.moves == "ABC" for x in found)
    assert [in_bytes(x) for x in (0, 1023, 1536, 5 * 2**30, 2**50)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 GiB",
        "1024.0 TiB",
    ]


@settings(max_examples=150)
@given(st.tuples(*[st.integers(0, 3000)] * 3), st.integers(1, 200), st.integers(0, 3))
def test_what_is_said_to_fit_the_memory_does(mnk: tuple[int, int, int], ranks: int, tight: int) -> None:
    free = chosen(Question(*mnk, ranks))[0].memory()
    limit = int(free * (0.6, 0.8, 1, 2)[tight]) + 6 * (1 << 20)
    try:
        estimate = chosen(Question(*mnk, ranks, memory=limit))[0]
    except MemoryLimitError:
        return
    product = product_of(estimate)
    local = sum(x.local_bytes(None) for x in (product.A, product.B, product.C))
    needed = product.extra_bytes(None) + local
    assert needed <= 1.25 * limit + (3 << 20), estimate  # blocks are ragged, and there are SLABs to round in


@pytest.mark.parametrize(
    "mnk", [(0, 5, 3), (4, 0, 3), (4, 5, 0), (0, 0, 0), (1, 1, 1), (1, 1, 10**7), (10**7, 3, 10**7)]
)
def test_odd_shapes(mnk: tuple[int, int, int]) -> None:
    for ranks in (1, 2, 7, 64, 99_991):
        found = estimates(Question(*mnk, ranks))
        assert found[0].chosen
        table(found)


def test_ranks_are_not_left_idle_for_the_sake_of_words() -> None:
    choice = estimates(Question(1, 1, 10**7, 1000))[0]
    assert (choice.algorithm, choice.layers) == ("inner", 1000) or choice.grid[0] * choice.grid[1] * choice.layers > 900


# ------------------------------------------------------------------ simulation
PROBLEMS = [(96, 96, 96), (50, 70, 31), (7, 300, 40), (5, 4, 3)]


@pytest.mark.parametrize("algorithm", FAMILIES)
@pytest.mark.parametrize("mover", ["ibcast", "ring"])
def test_every_simulated_message_is_one_of_the_formula(algorithm: str, mover: str) -> None:
    for mnk in PROBLEMS:
        for ranks in (2, 6, 8, 12):
            question = Question(*mnk, ranks, algorithm=algorithm, mover=mover, width=16)
            for estimate in all_estimates(question):
                product = product_of(estimate)
                run = simulate(product, Machine(ranks_per_node=4), ranks)
                for rank in range(ranks):
                    assert run.traffic(rank) == product.traffic(rank), (estimate, rank)


@pytest.mark.parametrize("algorithm", ["summa", "2.5d"])
@pytest.mark.parametrize("per_node", [1, 2, 3, 4, 12])
def test_panels_that_are_read_on_nodes_are_simulated_on_their_way_between_them(algorithm: str, per_node: int) -> None:
    for mnk in PROBLEMS:
        for ranks in (2, 6, 8, 12):
            on = np.arange(ranks) // per_node
            nodes = tuple((on * per_node).tolist()) if on[-1] else ()
            for estimate in all_estimates(Question(*mnk, ranks, algorithm=algorithm, width=16)):
                product = replace(product_of(estimate), mover="shared", nodes=nodes)
                run = simulate(product, Machine(ranks_per_node=per_node), ranks)
                told = [product.traffic(rank) for rank in range(ranks)]
                by_message = [x.words_received - x.words_read for x in told]
                assert run.words_received.tolist() == by_message, estimate
                assert run.words_sent.tolist() == [x.words_sent for x in told], estimate
                if algorithm == "summa":  # which sends nothing else
                    assert run.node_bytes.tolist() == (8 * np.bincount(on, by_message)).tolist(), estimate


def test_simulated_time_is_that_of_the_formula_where_all_ranks_do_the_same() -> None:
    machine = Machine()
    for shape in ((4, 4), (4, 8)):
        product = product_of(chosen(Question(1024, 1024, 1024, 32, algorithm="cannon", shape=shape))[0])
        run = simulate(product, machine, shape[0] * shape[1])
        exact = 1e-9 if shape == (4, 4) else 0.02  # B moves in every second step only
        assert run.seconds == pytest.approx(product.seconds(machine, 0), rel=exact)
    assert simulate(product_of(chosen(Question(100, 100, 100, 1))[0]), machine, 1).seconds > 0


def test_ranks_of_a_node_share_its_way_to_the_network() -> None:
    product = product_of(chosen(Question(2048, 2048, 2048, 64, algorithm="cannon"))[0])
    slow = replace(Machine(), inter={**Machine().inter, "shift": Link(1e-6, 1e-8)}, overlap=0.0)
    alone, shared = (simulate(product, replace(slow, ranks_per_node=x), 64) for x in (1, 16))
    assert alone.node_bytes.sum() > shared.node_bytes.sum() > 0
    assert shared.seconds > 2 * alone.seconds  # 16 ranks in turn, though half of the words stay inside


def test_walks_that_would_take_too_long_are_refused_before_they_begin() -> None:
    question = Question(100, 100, 10**8, 20_000, algorithm="inner")
    with pytest.raises(ArgumentError, match="too many to walk through"):
        simulate(product_of(chosen(question)[0]), Machine(), 20_000)


def test_thousands_of_ranks() -> None:
    product = product_of(chosen(Question(8192, 8192, 8192, 2048))[0])
    run = simulate(product, Machine(ranks_per_node=64), 2048)
    assert run.words_received.sum() == run.words_sent.sum() == product.total_words


# ------------------------------------------------------------------ machines
def test_a_machine_survives_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gamma = {**Machine().gamma, "float64": {8: 1e9, 64: 5e9}}
    machine = replace(Machine(), name="x", ranks_per_node=7, gamma=gamma)
    path = tmp_path / "machine.json"
    path.write_text(machine.as_json())
    loaded = load_machine(path)
    assert (loaded.name, loaded.ranks_per_node, loaded.intra, loaded.inter) == ("x", 7, machine.intra, machine.inter)
    assert loaded.gamma["float64"] == {8: 1e9, 64: 5e9}
    assert loaded.gamma["float32"] == Machine().gamma["float32"]  # what is missing is as in the default
    monkeypatch.setenv("PDGEMM_MACHINE", str(path))
    assert load_machine() == loaded
    assert "GFLOP/s" in str(loaded)


def test_rates_between_measured_sizes() -> None:
    machine = replace(Machine(), gamma={"float64": {10: 1e9, 1000: 1e11}, "float32": {10: 1e9}})
    assert machine.rate("float64", 10, 50, 99) == pytest.approx(1e9)
    assert machine.rate("float64", 100, 5000, 200) == pytest.approx(1e10)
    assert machine.rate("float64", 9999, 9999) == pytest.approx(1e11)
    assert machine.rate("float64", 1, 9999) == pytest.approx(1e8)
    assert machine.rate("int8", 10) == machine.rate("float32", 10)


def test_a_local_product_goes_through_a_b_and_c_for_each_of_its_pieces() -> None:
    machine = replace(Machine(), gamma={"float64": {1: 1e9}, "float32": {1: 1e9}, "complex64": {1: 1e9}}, copy=1e8)
    double, flops = np.dtype("d"), 2e6 / 1e9
    assert machine.multiply(double, (100, 100, 100), (100, 100, 100)) == pytest.approx(flops + 3 * 8e4 / 1e8)
    assert machine.multiply(double, (100, 100, 100), (100, 100, 10)) == pytest.approx(flops + 12 * 8e4 / 1e8)
    assert machine.multiply(double, (100, 100, 100), (100, 10, 100)) == pytest.approx(flops + 12 * 8e4 / 1e8)
    assert machine.multiply(np.dtype("F"), (10, 10, 10), (10, 10, 10)) == pytest.approx(8e3 / 1e9 + 3 * 800 / 1e8)
    assert machine.multiply(double, (0, 10, 10), (1, 1, 1)) == 0


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"speed": 1}', '{"copy": -1}', '{"overlap": 2}', '{"intra": {"ring": 3}}']
)
def test_a_file_that_is_no_machine_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=r"machine"):
        load_machine(path)
    with pytest.raises(FileError, match="No such file"):
        load_machine(tmp_path / "missing.json")


# ------------------------------------------------------------------ the command line, without MPI
def run(*words: str) -> jobs.Finished:
    """The command in an interpreter that cannot import mpi4py."""
    code = "import sys; sys.modules['mpi4py'] = None; from pdgemm.cli.commands import main; main()"
    return jobs.run(jobs.python(0, "-c", code, *words))


def test_plan_needs_no_mpi_and_speaks_json() -> None:
    done = run("plan", "--shape", "16384,16384,16384", "--ranks", "64", "--memory", "16GiB", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["candidates"]
    keys = {"algorithm", "grid", "layers", "words_per_rank", "lower_bound_words", "messages_per_rank"}
    assert all(keys | {"memory_bytes_per_rank", "seconds", "chosen"} <= set(x) for x in found)
    assert [x["chosen"] for x in found] == [True] + [False] * (len(found) - 1)
    assert (found[0]["grid"], found[0]["layers"]) == ([4, 4], 4)
    text = run("plan", "--shape", "16384,16384,16384", "--ranks", "64", "--ranks-per-node", "8").stdout
    assert "2.5d" in text and "lower bound" in text


def test_simulate_needs_no_mpi() -> None:
    words = ("simulate", "--shape", "512x512x512", "--ranks", "12", "--ranks-per-node", "4")
    assert "simulated on 3 nodes" in run(*words).stdout
    facts = json.loads(run(*words, "--json").stdout)
    assert facts["words_received"]["mean"] == pytest.approx(facts["formula_words_received"], rel=0.05)


@pytest.mark.parametrize(
    "words",
    [
        ("--shape", "10,10,10", "--ranks", "0"),
        ("--shape", "10,10", "--ranks", "4"),
        ("--shape", "10,10,10", "--ranks", "4", "--layers", "0"),
        ("--shape", "10,10,10", "--ranks", "4", "--product-grid", "0x2"),
        ("--shape", "10,10,10", "--ranks", "4", "--product-grid", "3x3"),
        ("--shape", "10,10,10", "--ranks", "4", "--ranks-per-node", "0"),
        ("--shape", "10,10,10", "--ranks", "8", "--algorithm", "row", "--product-grid", "4x2"),
        ("--shape", "10,10,10", "--ranks", "99999999999999999999"),
        ("--shape", "10,10,99999999999999999999", "--ranks", "4"),
        ("--shape", "10,10,10", "--ranks", "4", "--machine", "/nowhere.json"),
        ("--shape", "10000,10000,10000", "--ranks", "4", "--memory", "1kB"),
    ],
)
def test_bad_questions_are_one_line_and_exit_code_2(words: tuple[str, ...]) -> None:
    done = run("plan", *words)
    assert done.returncode == 2
    assert done.stderr.startswith("pdgemm: error: ") and done.stderr.count("\n") == 1
