#!/usr/bin/env python3
"""How long does it take to plan for many ranks?

    python scripts/benchmarks/bench_planning.py [--ranks 99991,100000]

Milliseconds of processor time for `pdgemm plan`'s choice for the shapes of the COSMA paper on nodes of 64 ranks, with
nothing remembered from the run before: median of 9, with the least and the most.
"""

from __future__ import annotations

from statistics import median
from time import process_time

import click
from table_words import SHAPES

from pdgemm.planning.machines.machine import Machine
from pdgemm.planning.planner import best_plan
from pdgemm.planning.question import Question
from pdgemm.planning.search.grid_search import priced

NODES = Machine(ranks_per_node=64)


@click.command()
@click.option("--ranks", default="99991,100000", show_default=True)
def main(ranks: str) -> None:
    for count in map(int, ranks.split(",")):
        for name, mnk in SHAPES.items():
            for memory in (None, 4 << 30):
                taken = []
                for _ in range(9):
                    priced.cache_clear()
                    best_plan.cache_clear()
                    start = process_time()
                    Question(*mnk, count, memory=memory, machine=NODES).plan()
                    taken.append(1e3 * (process_time() - start))
                limit = "4 GiB per rank" if memory else "no limit"
                print(f"{count} ranks, {name}, {limit}: {median(taken):.0f} ms ({min(taken):.0f} to {max(taken):.0f})")


if __name__ == "__main__":
    main()
