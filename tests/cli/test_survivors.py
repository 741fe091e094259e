"""Jobs of which ranks are killed at chosen moments: the others continue, or the job ends with a message."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from jobs import MPIEXEC, Finished, needs_mpiexec, python, run
from processes import running, until

LAUNCHER = run([MPIEXEC, "--version"]).stdout if MPIEXEC else ""
pytestmark = [
    needs_mpiexec,
    pytest.mark.skipif(
        not re.search(r"Open MPI\) ([5-9]|\d\d)\.", LAUNCHER),
        reason="only Open MPI, from version 5.0 on, survives a failed rank",
    ),
]
ENDED = 3

# X := 0.1 A X + B four times.  `dies(moment)` kills this rank if (rank, moment) is one of `victims`.
PROGRAM = """
import os, signal, sys, time
import numpy as np
import pdgemm
from mpi4py import MPI
from pdgemm import DistMatrix, ProcessGrid, pdgemm as multiply
me, made = MPI.COMM_WORLD.rank, 0

def dies(moment):
    if (me, moment) in {victims}:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)

def make(grid):
    global made
    made += 1
    dies(f"make {{made}}")
    layout = dict(grid=grid, block=16)
    A = DistMatrix.random((90, 90), seed=1, **layout)
    return {{"A": A, "B": DistMatrix.random((90, 40), seed=2, order="F", **layout), "X": A[:, 3:43].copy(), "k": 0}}

def step(state):
    k = state["k"]
    dies(f"before {{k}}")
    X = multiply(0.1, state["A"], state["X"], 1, state["B"].copy(), mover="{mover}")
    dies(f"after {{k}}")
    return {{**state, "X": X, "k": k + 1}}

def done(state):
    dies(f"done {{state['k']}}")
    return state["k"] == 4

with pdgemm.resilient(patience=20) as r:
    state = r.run(make, step, done)
dies("later")
X = state["X"].allgather()
one = pdgemm.ProcessGrid(MPI.COMM_SELF)
expected = make(one)
for k in range(4):
    expected = step(expected)
assert np.allclose(X, expected["X"].local, rtol=1e-13, atol=0)
if r.comm.rank == 0:
    print("RIGHT", [(x.lost, x.ranks, x.memory, x.words > 0) for x in r.recoveries])
"""


def job(folder: Path, ranks: int, source: str, ft: bool = True, runner: bool = False, **environment: str) -> Finished:
    """Run a program on `ranks` ranks; check that none of its processes is left."""
    program = folder / "program.py"
    program.write_text(source)
    command = python(ranks, *["-m", "pdgemm"] * runner, program)
    command[1:1] = ["--with-ft", "ulfm"] * ft
    done = run(command, folder, 60, OMP_NUM_THREADS="1", **environment)
    assert until(lambda: not running(lambda words, _: str(program) in words), 10)
    return done


def steps(victims: Sequence[tuple[int, str]] = (), **instead: str) -> str:
    """Return PROGRAM with `victims`, (rank, moment) each, and with the named LINES replaced."""
    source = PROGRAM
    for place, text in instead.items():
        assert LINES[place] in source
        source = source.replace(LINES[place], text)
    return source.format(victims=[*victims], mover="auto")


# X := A X three times, on a simulated GPU for each rank.  Rank 1 is killed while the others wait for it
ON_GPUS = """
import os, signal, time
import numpy as np
import pdgemm
from fake_cupy import Nccl, fake_cupy
from mpi4py import MPI
from pdgemm import DistMatrix, pdgemm as multiply

movers = []

def make(grid):
    Nccl.stuck, Nccl.world = False, grid.comm
    A = DistMatrix.random((40, 40), seed=1, grid=grid, device="cuda")
    return {{"A": A, "X": A, "k": 0}}

def step(state):
    Nccl.stuck = state["k"] == 1 and state["A"].grid.size == 3
    if Nccl.stuck and MPI.COMM_WORLD.rank == 1:
        dies = lambda: (time.sleep(0.2), os.kill(os.getpid(), signal.SIGKILL))
        if {in_nccl}:
            Nccl._run = dies
        else:
            dies()
    X = multiply(1, state["A"], state["X"])
    movers.append(X.report.mover)
    return {{"A": state["A"], "X": X, "k": state["k"] + 1}}

with fake_cupy(3, aware="yes"):
    from pdgemm.devices import cuda_ipc
    cuda_ipc._maps = lambda memory, device: False
    with pdgemm.resilient(patience=20) as r:
        X = r.run(make, step, lambda state: state["k"] == 3)["X"]
        a = make(r.grid)["A"].allgather()
        assert np.allclose(X.allgather(), a @ a @ a @ a, rtol=1e-13, atol=0)
        r.grid.free()
        assert not Nccl.waiting and Nccl.aborted
        if r.comm.rank == 0:
            print("RIGHT", movers, [(x.lost, x.seconds < 5) for x in r.recoveries])
"""


MOMENTS: list[tuple[int, list[tuple[int, str]], str, dict[str, str], list[Any]]] = [
    (3, [(0, "after 2")], "ring", {}, [((0,), 2, True, True)]),
    (3, [(1, "done 2")], "ibcast", {}, [((1,), 2, True, True)]),
    (3, [(2, "done 4")], "auto", {}, [((2,), 2, True, True)]),
    (2, [(0, "before 0")], "auto", {}, [((0,), 1, True, False)]),
    (3, [(1, "make 1")], "auto", {}, [((1,), 2, False, False)]),
    (5, [(1, "before 1"), (4, "before 1")], "auto", {}, [((1, 4), 3, True, True)]),
    (4, [(1, "before 1"), (0, "after 3")], "auto", {}, [((1,), 3, True, True), ((0,), 2, True, True)]),
    (4, [(3, "before 2"), (0, "make 2")], "ring", {"PDGEMM_NODE_MEMORY": "0"}, [((3, 0), 2, False, False)]),
    (3, [(2, "before 2")], "auto", {"PDGEMM_RANKS_PER_NODE": "2"}, [((2,), 2, False, False)]),  # alone on its node
    (5, [(0, "before 2"), (3, "after 2")], "auto", {"PDGEMM_RANKS_PER_NODE": "2"}, [((0, 3), 3, True, True)]),
]


@pytest.mark.parametrize(("ranks", "victims", "mover", "environment", "expected"), MOMENTS)
def test_survivors_continue(
    tmp_path: Path, ranks: int, victims: Any, mover: str, environment: dict[str, str], expected: list[Any]
) -> None:
    done = job(tmp_path, ranks, PROGRAM.format(victims=victims, mover=mover), **environment)
    assert done.returncode == 0, done.stderr
    found = eval(re.findall(r"RIGHT (.*)", done.stdout)[0])
    # two failures are noticed together or in turn
    assert [x[1:] for x in found] == [x[1:] for x in expected] or len(victims) > 1
    assert sorted(rank for x in found for rank in x[0]) == sorted(rank for rank, _ in victims)
    assert found[-1][1] == ranks - len(victims)
    assert [x[2] for x in found] == [expected[0][2]] * len(found)
    assert done.stderr.count("going on after") == len(found)


def test_without_fault_tolerance_nothing_changes(tmp_path: Path) -> None:
    done = job(tmp_path, 2, steps(), ft=False)
    assert done.returncode == 0, done.stderr
    assert "RIGHT []" in done.stdout
    assert done.stderr.count("warning: a rank that is killed ends this job: the job was not started by") == 1
    done = job(tmp_path, 2, steps([(1, "after 1")]), ft=False)
    assert done.returncode not in (0, ENDED)
    assert "signal 9" in done.stderr + done.stdout


@pytest.mark.parametrize(
    ("end", "codes", "text"),
    [("", {0}, "RIGHT"), ("sys.exit(me)", {1, 3}, "left with"), ("1 / 0", {1}, "Rank 0 of 4 r")],
)
def test_a_script_that_pdgemm_runs(tmp_path: Path, end: str, codes: set[int], text: str) -> None:
    done = job(tmp_path, 4, steps([(2, "before 1")]) + end, runner=True)
    assert done.returncode in codes, done.stderr
    assert text in done.stdout + done.stderr


def test_outside_of_the_block_the_job_ends(tmp_path: Path) -> None:
    done = job(tmp_path, 3, steps([(1, "later")]))
    assert done.returncode == ENDED, done.stderr
    assert "ends, because another rank has failed\n" in done.stderr
    done = job(tmp_path, 3, steps([(1, "earlier")], block='dies("earlier")\nwith pdgemm.resilient('))
    assert done.returncode == ENDED, done.stderr


# Lines of PROGRAM that a test may replace.
LINES = {
    "step": '    dies(f"before {{k}}")\n',
    "done": "    dies(f\"done {{state['k']}}\")\n",
    "end": 'return state["k"] == 4',
    "run": "    state = r.run(make, step, done)",
    "block": "with pdgemm.resilient(",
    "patience": "patience=20",
}
# The place of a line that is added on rank 1, the line, and the error that all ranks raise.
ERRORS = [
    ("step", "open('not there')", r"FileNotFoundError: \[Errno 2\] No such file or directory: 'not there'"),
    ("step", "multiply(1, state['A'], state['A'][:3])", r"LayoutError: inner dimensions do not agree"),
    ("step", "return {{'x': 1}}", r"ArgumentError: the ranks were called with different arguments: .*the state"),
    ("done", "return True", r"ArgumentError: .*a state, the last: True"),
    *((place, "sys.exit(5)", "PdgemmError: a rank was ended by SystemExit: 5") for place in ("step", "done")),
]


@pytest.mark.parametrize(("place", "what", "text"), ERRORS)
def test_an_error_on_one_rank_is_raised_on_all(tmp_path: Path, place: str, what: str, text: str) -> None:
    caught = """    try:
        state = r.run(make, step, done)
    except Exception as bad:
        sys.exit(f"rank {{me}} {{type(bad).__name__}}: {{bad}}")"""
    done = job(tmp_path, 3, steps(run=caught, **{place: f"    if me == 1:\n        {what}\n"}))
    leaves = "exit" in what
    assert done.returncode in ((1, 5) if leaves else (1,)), done.stderr
    for rank in (0, 2) if leaves else range(3):
        assert re.search(rf"rank {rank} {text}", done.stderr), done.stderr


def test_values_changed_by_a_step_are_copied(tmp_path: Path) -> None:
    source = steps([(1, "after 1")], step='    state["v"] += 1\n    state["log"].append(k)\n')
    source = source.replace('"k": 0}', '"k": 0, "v": np.zeros(2), "log": []}')
    source += '    assert state["v"].tolist() == [4, 4] and state["log"] == [0, 1, 2, 3]\n'
    done = job(tmp_path, 3, source)
    assert done.returncode == 0, done.stderr
    assert "RIGHT [((1,), 2, True, True)]" in done.stdout


def test_a_grid_from_before_a_failure_is_named_in_the_error(tmp_path: Path) -> None:
    done = job(tmp_path, 3, steps([(1, "before 1")], patience="patience=20, grid=lambda comm: ProcessGrid()"))
    assert done.returncode == 1, done.stderr
    assert "Does it use MPI.COMM_WORLD, or a grid or a matrix from before a failure?" in done.stderr


def test_blocks_one_after_the_other(tmp_path: Path) -> None:
    """Each block survives a failure; a block in a block, or after a failure on the old communicator, is an error."""
    again = """
def raised(act):
    try:
        act()
    except pdgemm.PdgemmError as bad:
        print("RAISED", bad)

raised(pdgemm.resilient().__enter__)
raised(lambda: r.run(make, step, done))
with pdgemm.resilient(r.comm) as again:
    raised(pdgemm.resilient(r.comm).__enter__)
    state = again.run(make, step, done)
print("AGAIN", [x.lost for x in again.recoveries], state["X"].norm() > 0)
"""
    done = job(tmp_path, 4, steps([(1, "before 1"), (3, "make 2")]).split('dies("later")')[0] + again)
    assert done.returncode == 0, done.stderr
    for times, said in (
        (3, "RAISED ranks of this communicator have failed"),
        (3, "RAISED r.run(...) must be called inside the block"),
        (3, "RAISED blocks of pdgemm.resilient cannot be nested"),
        (2, "AGAIN [(2,)] True"),  # as numbered in r.comm
    ):
        assert done.stdout.count(said) == times, (said, done.stdout)


# Functions in which rank 2 is killed, during the recovery from the failure of rank 1.
PLACES = ["node_memory._Window.__init__", "kept_state.exchange", "kept_state.KeptState._moved", "survivors.abandon"]


@pytest.mark.parametrize("name", PLACES)
def test_a_failure_in_a_recovery(tmp_path: Path, name: str) -> None:
    room, _, last = name.rpartition(".")
    plant = f"""
from pdgemm.grids import node_memory
from pdgemm.resilience import kept_state, survivors
inside, times = {name}, {2 if name == PLACES[0] else 1}
def dying(*args, **options):
    global times
    times -= 1
    if me == 2 and times == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return inside(*args, **options)
{room}.{last} = dying

def make(grid)"""
    done = job(tmp_path, 4, steps([(1, "before 1")]).replace("def make(grid)", plant))
    assert done.returncode == 0, done.stderr
    assert re.search(r"RIGHT .*, 2, True, True\)\]", done.stdout)


def test_an_error_on_all_ranks_leaves_the_grid_as_it_is(tmp_path: Path) -> None:
    again = """    try:
        r.run(make, step, done)
    except pdgemm.errors.LayoutError:
        print("AGAIN", r.grid.comm.allreduce(1), made)
sys.exit()"""
    done = job(tmp_path, 3, steps(step="    multiply(1, state['A'], state['A'][:3])\n", run=again))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("AGAIN 3 1") == 3


@pytest.mark.parametrize(("hangs", "code", "rank", "seconds"), [("me == 2", 0, 2, 4), ("me != 1", ENDED, 0, 5)])
def test_a_hanging_rank_ends(tmp_path: Path, hangs: str, code: int, rank: int, seconds: int) -> None:
    """A rank that does not return from its step after rank 1 has failed ends; ranks that return continue."""
    hang = f"{LINES['step']}    while {hangs} and k == 1: time.sleep(1)\n"
    done = job(tmp_path, 3, steps([(1, "before 1")], patience="patience=6", step=hang))
    assert done.returncode == code, done.stderr
    late = f"rank {rank} ends, because another rank has failed, and this rank has not recovered within {seconds} s"
    assert late in done.stderr
    assert re.findall(r"\((\(.*?\)), 1, True", done.stdout) == ["(1, 2)"] * (code == 0)


@pytest.mark.parametrize("in_nccl", [True, False])
def test_ranks_that_use_nccl_go_on(tmp_path: Path, in_nccl: bool) -> None:
    """Operations of NCCL are aborted, and the survivors create communicators of NCCL anew."""
    path = os.pathsep.join([str(Path(__file__).parents[1] / "helpers"), os.environ.get("PYTHONPATH", "")])
    done = job(tmp_path, 3, ON_GPUS.format(in_nccl=in_nccl), PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert "RIGHT ['nccl', 'nccl', 'nccl', 'nccl'] [((1,), True)]" in done.stdout
