#!/usr/bin/env python3
"""Seconds by `pdgemm simulate` and by SimGrid, which replays the exported traces; and the words of both, exactly.

    python scripts/benchmarks/compare_simulators.py [--ranks 64,256,1024] [--ranks-per-node 8] [--smpirun PATH]

SUMMA, Cannon, 2.5D, Cholesky, LU and a redistribution on the built-in machine.  For each rank, the bytes of all
messages of its trace must be those of the schedule.  The exit code is 1 if words differ, or seconds by more than 15%.
SimGrid: `apt-get install libsimgrid-dev`, or https://simgrid.org.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import click
import numpy as np

from pdgemm.grids.distribution import Distribution
from pdgemm.grids.layout import Layout
from pdgemm.planning.machines.machine import Machine
from pdgemm.planning.machines.replay_files import REPLAY, write_replay
from pdgemm.planning.machines.simulator import Simulation, simulate
from pdgemm.planning.question import Question, layouts_of
from pdgemm.planning.search.grid_search import near_root
from pdgemm.schedules.exchanges.exchange import plan_exchange
from pdgemm.schedules.mover_registry import RING
from pdgemm.schedules.panels.factor_schedules import CholeskySchedule, LUSchedule
from pdgemm.schedules.schedule import Schedule

MOST = 0.15  # difference of the seconds
DOUBLE, BLOCK = np.dtype(np.float64), (128, 128)


def cases(ranks: int, machine: Machine) -> Iterator[tuple[str, Schedule]]:
    """Yield names and schedules whose communication takes about as long as their work."""
    n = 256 * near_root(ranks) if ranks < 1024 else 4096
    for algorithm, mover in (
        ("summa", "ring"),
        ("summa", "ibcast"),
        ("summa", "auto"),
        ("cannon", "auto"),
        ("2.5d", "auto"),
    ):
        how: Any = {"layouts": "ideal", "algorithm": algorithm, "mover": mover, "machine": machine}
        product = Question(n, n, n, ranks, **how, layers=4 if algorithm == "2.5d" else None).plan().product
        yield f"{algorithm}, {product.mover}", product
    pr = near_root(ranks)
    grid, place = (pr, ranks // pr), tuple(range(ranks))
    blocks = Layout(Distribution.over(grid, (n, n), BLOCK), place, DOUBLE)
    yield "cholesky", CholeskySchedule(blocks, BLOCK[0], RING.name)
    yield "lu", LUSchedule(blocks, BLOCK[0], RING.name)
    ends = layouts_of("X=blocks; Y=rows", dict.fromkeys("XY", ((n, n), DOUBLE)), ranks)
    yield "blocks to rows", plan_exchange(ends["X"], ends["Y"], ranks)


def words_of(folder: Path, ranks: int) -> np.ndarray:
    """Return the words that each rank sends and receives by its trace, in two rows; an empty message has no words."""
    words = np.zeros((2, ranks), np.int64)
    for rank in range(ranks):
        for line in (folder / f"rank{rank}.txt").read_text().splitlines():
            match line.split():
                case [_, "isend" | "irecv" as action, _, _, size]:
                    words[int(action == "irecv"), rank] += int(size) // DOUBLE.itemsize
    return words


def same_words(words: np.ndarray, run: Simulation, mover: str) -> bool:
    """Compare with the schedule; words of an MPI broadcast are counted at its root, and passed on in the trace."""
    sent, received = words
    equal = (sent.sum() == run.words_sent.sum()) if mover == "ibcast" else (sent == run.words_sent).all()
    return bool(equal and (received == run.words_received).all())


def replayed(folder: Path, smpirun: str) -> float:
    """Return the seconds by SimGrid."""
    done = subprocess.run([smpirun, *REPLAY.split()[1:]], cwd=folder, capture_output=True, text=True)
    match = re.search(r"Simulation time ([\d.e+-]+)", done.stdout + done.stderr)
    if match is None:
        raise click.ClickException(f"{smpirun} did not replay the traces:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return float(match[1])


@click.command()
@click.option("--ranks", default="64,256,1024", show_default=True)
@click.option("--ranks-per-node", default=8, show_default=True)
@click.option("--smpirun", default=shutil.which("smpirun"), help="SimGrid's launcher; default: that of PATH.")
def main(ranks: str, ranks_per_node: int, smpirun: str | None) -> None:
    if smpirun is None:
        raise click.UsageError("SimGrid's smpirun is not in PATH: --smpirun names it")
    machine, alike = Machine(ranks_per_node=ranks_per_node), True
    print("| ranks | schedule | pdgemm | SimGrid | ratio | words per rank | replayed in |", "|---" * 7 + "|", sep="\n")
    for count in map(int, ranks.split(",")):
        for name, schedule in cases(count, machine):
            run = simulate(schedule, machine, count)
            with TemporaryDirectory() as parent:
                folder = Path(parent, "traces")
                write_replay([schedule], machine, count, folder)
                start = perf_counter()
                seconds, words = replayed(folder, smpirun), words_of(folder, count)
            equal, ratio = same_words(words, run, name.split(", ")[-1]), seconds / run.seconds
            alike &= equal and abs(ratio - 1) <= MOST
            print(
                f"| {count} | {name} | {run.seconds * 1e3:.3f} ms | {seconds * 1e3:.3f} ms | {ratio:.3f} "
                f"| {'equal' if equal else 'differ'} | {perf_counter() - start:.1f} s |",
                flush=True,
            )
    sys.exit(0 if alike else 1)


if __name__ == "__main__":
    main()
