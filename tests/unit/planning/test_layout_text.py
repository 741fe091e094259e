"""Texts of the layouts of A, B and C, for plans and simulations; one process, no MPI."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import in_process
import numpy as np
import pytest

from pdgemm.errors import ArgumentError
from pdgemm.grids.distribution import Distribution
from pdgemm.planning.machines.machine import Machine
from pdgemm.planning.machines.simulator import exchange_seconds
from pdgemm.planning.plan_simulation import simulate_plan
from pdgemm.planning.question import MOST_SIDE, Question, layouts_of

MATRICES = {"A": ((300, 100), np.dtype("d")), "B": ((100, 200), np.dtype("f")), "C": ((300, 200), np.dtype("d"))}
CYCLIC = "block=64x32 grid=2x3 source=1,2"


def distributions(text: str, ranks: int = 12) -> list[Distribution]:
    return [x.distribution for x in layouts_of(text, MATRICES, ranks).values()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("default", {"grid_shape": (3, 4)}),
        ("blocks", {"grid_shape": (3, 4)}),
        ("columns", {"grid_shape": (1, 12)}),
        (" rows ;", {"grid_shape": (12, 1)}),
        ("A = rows; B =rows; C= grid = 12x1", {"grid_shape": (12, 1)}),
        ("block=64", {"grid_shape": (3, 4), "block": (64, 64)}),
        ("grid=2,3", {"grid_shape": (2, 3)}),
        (CYCLIC, {"grid_shape": (2, 3), "block": (64, 32), "source": (1, 2)}),
    ],
)
def test_one_text_for_all_matrices(text: str, expected: dict[str, Any]) -> None:
    layouts = layouts_of(text, MATRICES, 12)
    for name, x in layouts.items():
        assert (x.distribution.shape, x.dtype) == MATRICES[name]
        assert x.distribution == Distribution.over(**{"shape": MATRICES[name][0], **expected})
        assert x.rank_map == tuple(range(np.prod(expected["grid_shape"])))


def test_a_text_for_each_matrix() -> None:
    a, b, c = distributions(f"C={CYCLIC}; A=columns")
    assert (a, b, c) == (distributions("columns")[0], distributions("default")[1], distributions(CYCLIC)[2])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *[(x, "^layouts are ideal, or default, columns, .*; got '") for x in (
            "", ";", "mine", "A=ideal", "A=", "D=rows", "a=rows", "A=rows; A=rows", "A=rows; rows", "rows; rows; rows",
            "block=1;grid=2x2", "grid=4", "source=1", "block=-1", "block=1x2x3", "block=1 block=1", "block=1e3",
            "rows 1", "A == rows", f"block={10**12}",
        )],
        ("grid=5x5", "^the layout of A is not possible: a grid of 5 x 5 does not fit 12 ranks$"),
        ("B=grid=0x5", "^the layout of B is not possible: a grid of 0 x 5 does not fit"),
        ("source=0x4", "^the layout of A is not possible: source 4 is not one of 4 owners"),
        ("C=block=0", "^the layout of C is not possible: a block size must be >= 1"),
    ],
)  # fmt: skip
def test_other_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Question(300, 200, 100, 12, layouts=text)


def test_layouts_that_would_take_too_long_are_refused() -> None:
    with pytest.raises(ArgumentError, match="more than 1,000,000 blocks"):
        Question(10**9, 5, 5, 12, layouts="block=64")
    with pytest.raises(ArgumentError, match="a grid of 1 x 16386 is longer than 16,384 ranks"):
        Question(10, 5, 5, MOST_SIDE + 2, layouts="columns")
    assert Question(10, 5, 5, 100_003).matrices["A"]["grid"] == (1, 100_003)  # a prime number: as of DistMatrix


# ------------------------------------------------------------------ plans
def test_all_candidates_lead_from_these_layouts_to_these_layouts() -> None:
    text = f"A=columns; B=rows; C={CYCLIC}"
    question = Question(700, 600, 500, 12, layouts=text, mover="mpi")
    plan = question.plan()
    given = dict(zip("ABC", (Distribution.over((1, 12), (700, 500)), Distribution.over((12, 1), (500, 600)),
                             Distribution.over((2, 3), (700, 600), (64, 32), (1, 2)))))  # fmt: skip
    assert {name: x.distribution for name, x in zip("ABC", plan.problem.layouts)} == given
    assert question.given_bytes == 8 * (700 * 42 + 42 * 600 + 380 * 216)
    for name, move in plan.moves:
        assert (move.target if name == "C" else move.source).distribution == given[name]
    assert {name for name, _ in plan.moves} == {*"ABC"}  # no algorithm takes all of these layouts


def test_the_algorithm_that_fits_the_layouts_moves_nothing() -> None:
    """With B in columns and A everywhere needed, `column` moves A only as panels; with rows, `row`."""
    for text, algorithm in (("columns", "column"), ("rows", "row")):
        plan = Question(600, 480, 720, 12, layouts=text, algorithm=algorithm).plan()
        assert not plan.moves


# ------------------------------------------------------------------ simulations
def uniform(layouts: str, ranks: int = 16) -> Any:
    """Return a plan in which all ranks do the same, and its machine."""
    machine = Machine(ranks_per_node=None)
    question = Question(1600, 1600, 1600, ranks, layouts=layouts, mover="ring", algorithm="cannon", machine=machine)
    return question.plan(), machine


def test_walked_redistributions_take_about_the_time_of_the_formula() -> None:
    plan, machine = uniform("columns")
    walked, formula = simulate_plan(plan, machine), simulate_plan(plan, machine, most=0)
    assert [*walked.walked] == [*formula.by_formula] == [name for name, _ in plan.moves] == [*"ABC"]
    assert not walked.by_formula and not formula.walked
    assert formula.moving_seconds == pytest.approx(plan.moving_seconds)
    assert walked.seconds == walked.product.seconds + walked.moving_seconds
    for name, move in plan.moves:
        run = walked.walked[name]
        new = [move.extra_bytes(rank) / machine.first_touch_bandwidth for rank in range(16)]
        slowest = max(exchange_seconds(move, machine, rank) + new[rank] for rank in range(16))
        copying = max(move.copied(rank) for rank in range(16)) / machine.copy_bandwidth
        assert slowest * 0.999 <= run.seconds <= (slowest + copying) * 1.001  # receivers wait while senders copy
        assert [run.traffic(rank) for rank in range(16)] == [move.traffic(rank) for rank in range(16)]


@pytest.mark.parametrize("layouts", ["columns", "block=250", "A=grid=1x1; B=grid=1x1; C=grid=1x1", "C=rows"])
@pytest.mark.parametrize("per_node", [4, 16, None])
def test_ranks_that_send_more_than_others_have_the_network_of_their_node(layouts: str, per_node: int | None) -> None:
    machine = Machine(ranks_per_node=per_node)
    plan = Question(500, 500, 500, 64, layouts=layouts, mover="ring", algorithm="cannon", machine=machine).plan()
    walked, formula = simulate_plan(plan, machine), simulate_plan(plan, machine, most=0)
    assert walked.walked and 0.8 <= formula.moving_seconds / walked.moving_seconds <= 1.25


def test_memory_of_copies_and_words_that_stay_take_time() -> None:
    plan, machine = uniform("columns")
    first = simulate_plan(plan, machine)
    slow = replace(machine, first_touch_bandwidth=machine.first_touch_bandwidth / 2)
    new = sum(x.local_bytes(0) for x in plan.arrangement.layouts)
    assert first.copying == pytest.approx(new / machine.first_touch_bandwidth)
    move = dict(plan.moves)["A"]
    more = simulate_plan(plan, slow).walked["A"].seconds - first.walked["A"].seconds
    assert more == pytest.approx(move.extra_bytes(0) / machine.first_touch_bandwidth)  # of its messages
    slow = replace(machine, copy_bandwidth=machine.copy_bandwidth / 2)
    more = simulate_plan(plan, slow).walked["A"].seconds - first.walked["A"].seconds
    assert more == pytest.approx(move.copied(0) / machine.copy_bandwidth) and more > 0
    slow = replace(machine, call_overhead=machine.call_overhead + 1)
    assert simulate_plan(plan, slow).walked["A"].seconds == pytest.approx(first.walked["A"].seconds + 1)


def test_a_rank_that_sends_all_is_as_busy_as_one_that_receives_all() -> None:
    """C is formed on 16 ranks: to bring A from one rank takes as long as to bring C to one rank."""
    machine = Machine()
    question = Question(1600, 1600, 1600, 16, layouts="A=grid=1x1; C=grid=1x1", mover="ring", algorithm="cannon")
    run = simulate_plan(question.plan(), machine)
    assert run.walked["A"].seconds == pytest.approx(run.walked["C"].seconds, rel=0.1)
    assert run.walked["A"].seconds > 15 / 16 * 1600**2 * 8 * machine.intra["exchange"].beta


def test_a_thousand_ranks_are_walked_from_one_dimension_to_two() -> None:
    question = Question(20_000, 20_000, 20_000, 1024, layouts="columns", machine=Machine(ranks_per_node=64))
    plan = question.plan()
    run = simulate_plan(plan, question.machine)
    assert plan.moves and [*run.walked] == [name for name, _ in plan.moves]
    for name, move in plan.moves:
        assert run.walked[name].words_received.sum() == sum(move.traffic(rank).words_received for rank in range(1024))


# ------------------------------------------------------------------ the command line
def run(*words: str, code: int = 0) -> str:
    """Return the output of a command; for another exit code than 0, that of its errors."""
    done: SimpleNamespace = in_process.run([*words], None)
    assert done.returncode == code, done.stderr
    return done.stderr if code == 2 else done.stdout


WORDS = ("--shape", "700,600,500", "--ranks", "12", "--layouts", f"A=columns; C={CYCLIC}", "--mover", "mpi")


def test_commands_take_layouts() -> None:
    text, facts = run("plan", *WORDS), json.loads(run("plan", *WORDS, "--json"))
    assert f"layouts: A=columns; C={CYCLIC}" in " ".join(text.split())
    assert facts["matrices"]["A"] == {"shape": [700, 500], "grid": [1, 12], "block": [700, 42], "source": [0, 0]}
    assert facts["matrices"]["C"] == {"shape": [700, 600], "grid": [2, 3], "block": [64, 32], "source": [1, 2]}
    assert json.loads(run("plan", *WORDS[:-4], "--layouts", "ideal", "--json"))["matrices"] == {}


def test_a_simulation_says_what_it_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    text, facts = run("simulate", *WORDS), json.loads(run("simulate", *WORDS, "--json"))
    moves = facts["redistribution"]
    assert {*moves["simulated"]} == {"A", "C"} and not moves["by_formula"] and moves["copies"]["seconds"] > 0
    parts = [x["seconds"] for x in (*moves["simulated"].values(), moves["copies"])]
    assert facts["redistribution_seconds"] == pytest.approx(sum(parts))
    assert moves["simulated"]["A"]["words_received"]["max"] > 0
    assert "(message by message); new memory for copies" in " ".join(text.split())
    assert "redistribution:" not in run("simulate", *WORDS[:-4], "--layouts", "ideal")


def test_commands_say_where_two_nodes_exchange_one_message() -> None:
    words = ("--shape", "1000,1000,1000", "--ranks", "480", "--ranks-per-node", "24", "--layouts", "rows")
    machine = replace(Machine(), ranks_per_node=24)
    moves = dict(Question(1000, 1000, 1000, 480, layouts="rows", machine=machine).plan().moves)
    names = "".join(name for name, move in moves.items() if move.nodes)
    assert names and len(names) < len(moves)
    facts, plans = (
        json.loads(run("simulate", *words, "--json")),
        json.loads(run("plan", *words, "--json"))["candidates"],
    )
    assert facts["node_to_node"] == names and facts["moves"] == "".join(moves)
    assert {x: plans[0][x] for x in facts.keys() & plans[0].keys() - {"seconds"}}.items() <= facts.items()
    for name in names:
        most = max(moves[name].traffic(rank).messages_received for rank in range(480))
        assert facts["redistribution"]["simulated"][name]["messages_received"]["max"] == most > 0
    for text in (run("plan", *words), run("simulate", *words)):
        assert f"({', '.join(names)} by one message from node to node): " in " ".join(text.split())


def test_remedies_of_a_shortage_keep_the_layouts() -> None:
    words = ("plan", "--shape", "7000,6000,5000", "--ranks", "12", "--memory", "60MB", "--layouts")
    facts = json.loads(run(*words, "columns", "--json", code=1))
    more = Question(7000, 6000, 5000, facts["on_more_ranks"]["ranks"], layouts="columns", memory=60_000_000)
    assert facts["on_more_ranks"]["bytes_per_rank"] == more.least_bytes <= 60_000_000
    assert facts["needed_bytes_per_rank"] > 60_000_000 and facts["matrices"]["B"]["grid"] == [1, 12]
    fixed = " ".join(run(*words, "grid=3x4", code=1).split())
    assert "on more ranks it does not fit either, if A, B and C are on the grids of --layouts" in fixed


@pytest.mark.parametrize("text", ["mine", "grid=5x5", "source=9,9", "A=ideal"])
def test_bad_layouts_are_one_line_and_exit_code_2(text: str) -> None:
    for command in ("plan", "simulate"):
        said = run(command, *WORDS[:4], "--layouts", text, code=2)
        assert said.startswith("pdgemm: error: ") and said.count("\n") == 1
