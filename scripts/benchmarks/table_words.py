#!/usr/bin/env python3
"""Words per rank for the shapes of the COSMA paper, compared with ScaLAPACK-style 2D, 2.5D and the lower bound.

    python scripts/benchmarks/table_words.py [--ranks 128,512,...] [--column]

The words are computed by formulas, without MPI.  "2D" is SUMMA on the squarest grid of all ranks; "2.5D" is q x q x c
of Solomonik & Demmel with the best c; "ours" is the candidate of `pdgemm plan --layouts ideal --mover mpi` that sends
the fewest words.  With --column, A, B and C of 1.2M x 6000 x 6000 have one block of columns per rank before and after:
then the table has the exact words of redistribution and product, of the busiest rank in a sample.
Kwasniewski et al., Red-blue pebbling revisited, SC 2019; Huang & Chow, CA3DMM, SC 2022.
"""

from __future__ import annotations

from math import ceil, isqrt

import click

from pdgemm.planning.machines.simulator import sample
from pdgemm.planning.planner import candidates, plan_product
from pdgemm.planning.product_plan import ProductPlan
from pdgemm.planning.question import Question

SHAPES = {  # the shapes of the COSMA paper
    "square": (16384, 16384, 16384),
    "large k": (17408, 17408, 3735552),
    "large m": (3735552, 17408, 17408),
    "flat": (131072, 131072, 512),
}
TALL = (1_200_000, 6000, 6000)  # the published weak spot of COSMA and CA3DMM, from 1D columns


def squarest(ranks: int) -> tuple[int, int]:
    rows = next(d for d in range(isqrt(ranks), 0, -1) if ranks % d == 0)
    return rows, ranks // rows


def words_2d(m: int, n: int, k: int, ranks: int) -> float:
    pr, pc = squarest(ranks)
    return ceil(m / pr) * k * (1 - 1 / pc) + k * ceil(n / pc) * (1 - 1 / pr)


def words_25d(m: int, n: int, k: int, ranks: int) -> float:
    """Return the published words on q x q x c with c <= q: A and B are replicated, and C is added up."""
    best = float("inf")
    for c in range(1, ranks + 1):
        q = isqrt(ranks // c)
        if q * q * c == ranks and c <= q:
            replicated = (m * k + k * n) / q**2 * (c > 1)
            panels = (m * k + k * n) / (q * c) * (1 - 1 / q)
            best = min(best, replicated + panels + m * n / q**2 * (c > 1))
    return best


@click.command()
@click.option("--ranks", default="128,512,1024,2048,2197,4096,9216,16384,18432", show_default=True)
@click.option("--column", is_flag=True)
def main(ranks: str, column: bool) -> None:
    counts = [int(x) for x in ranks.split(",")]
    print(*(from_columns(counts) if column else native(counts)), sep="\n")


def native(counts: list[int]) -> list[str]:
    lines = [
        "| shape | ranks | ours, grid | words | / bound | 2D / bound | 2.5D / bound |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, mnk in SHAPES.items():
        for ranks in counts:
            question = Question(*mnk, ranks, layouts="ideal", mover="mpi")
            ours = min((x.candidate() for x in candidates(question.problem)), key=lambda x: x.words_per_rank)
            bound = ours.lower_bound_words
            other = words_25d(*mnk, ranks) / bound
            lines.append(
                f"| {name} | {ranks} | {ours.name} {ours.grid_text} | {ours.words_per_rank:.4g} | {ours.ratio:.3f} "
                f"| {words_2d(*mnk, ranks) / bound:.2f} | {f'{other:.2f}' if other < float('inf') else '-'} |"
            )
    return lines


def from_columns(counts: list[int]) -> list[str]:
    """Return rows for the plan that `plan` chooses, and for the best one with a new grid, as in CA3DMM and COSMA."""
    lines = ["| ranks | plan | moves | words | native / bound | in all / bound |", "|---|---|---|---|---|---|"]
    for ranks in counts:
        problem = Question(*TALL, ranks, layouts="columns", mover="ibcast", width=512, lookahead=1).problem
        chosen = plan_product(problem)
        new = min((x for x in candidates(problem) if len(x.moves) == 3), key=received)
        for title, plan in (("ours", chosen), ("a new grid for all", new)):
            moved = "".join(name for name, _ in plan.moves) or "-"
            product = max(plan.product.traffic(rank).words_received for rank in sample(ranks))
            lines.append(
                f"| {ranks} | {title}: {plan.algorithm} {' x '.join(map(str, plan.shape))} | {moved} | "
                f"{received(plan):.4g} | {product / plan.lower_bound_words:.3f} | "
                f"{received(plan) / plan.lower_bound_words:.3f} |"
            )
    return lines


def received(plan: ProductPlan) -> int:
    return max(plan.traffic(rank).words_received for rank in sample(plan.problem.size))


if __name__ == "__main__":
    main()
