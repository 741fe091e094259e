"""`pdgemm plan` and `simulate`: what would run, and how long it would take; `calibrate` measures machines for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pdgemm.cli import options
from pdgemm.cli.job import OfAllRanks, OfOneRank
from pdgemm.cli.param_types import BYTES, MNK

if TYPE_CHECKING:
    from pdgemm.planning.estimates import Question

_question = options.together(
    click.option("--shape", type=MNK, required=True, help="m,n,k of C (m x n) = A (m x k) B (k x n)."),
    click.option("--ranks", type=options.COUNT, required=True),
    click.option("--memory", type=BYTES, help="Per rank, for all: its parts of A, B and C, copies, panels, messages."),
    click.option(
        "--ranks-per-node", type=options.COUNT, help="Default: what the machine file says, else all on one node."
    ),
    options.machine,
    click.option("--dtype", type=click.Choice(options.BLAS_DTYPES), default="float64", show_default=True),
    options.algorithm,
    click.option("--mover", type=click.Choice(("ibcast", "ring")), default="ibcast", show_default=True),
)


@click.command(cls=OfOneRank)
@_question
@click.option(
    "--redistribute",
    "redistributed",
    is_flag=True,
    help="A, B and C lie otherwise than the algorithm wants them; words are then at most what is said.",
)
@options.json_
@options.debug
def plan(as_json: bool, **asked: Any) -> int:
    """What would run, how long it would take, and what the alternatives cost.  Needs no MPI."""
    from pdgemm.planning.candidate_table import table
    from pdgemm.planning.choice import estimates

    question = _asked(**asked)
    found = estimates(question)
    if as_json:
        facts = {"shape": question.mnk, "ranks": question.ranks, "machine": question.machine.name}
        click.echo(json.dumps({**facts, "candidates": [x.as_dict() for x in found]}))
    else:
        click.echo(found[0].summary(question.mnk, question.ranks))
        click.echo(f"machine: {question.machine.name}; lower bound {question.bound:.4g} words per rank")
        click.echo(table(found))
    return 0


@click.command(cls=OfOneRank)
@_question
@options.json_
@options.debug
def simulate(as_json: bool, **asked: Any) -> int:
    """Walk the schedule of all ranks, message by message, nodes sharing their way to the network.  Needs no MPI."""
    from pdgemm.planning.choice import chosen, product_of
    from pdgemm.planning.simulator import simulate as walk
    from pdgemm.support.text import counted, in_bytes

    question = _asked(**asked)
    estimate = chosen(question)[0]
    candidate, run = estimate.candidate(), walk(product_of(estimate), question.machine, question.ranks)
    facts = {
        "shape": question.mnk,
        "ranks": question.ranks,
        "algorithm": candidate.algorithm,
        "inside": candidate.inside,
        "grid": candidate.grid,
        "layers": candidate.layers,
        "seconds": run.seconds,
        "formula_seconds": candidate.seconds,
        "compute_seconds": {"mean": float(run.computed.mean()), "max": float(run.computed.max())},
        "node_bytes": {"mean": float(run.node_bytes.mean()), "max": float(run.node_bytes.max())},
        "formula_words_received": candidate.words_per_rank,
        **{
            name: {"min": int(x.min()), "mean": float(x.mean()), "max": int(x.max())}
            for name in ("words_received", "words_sent", "messages_received", "messages_sent")
            for x in (getattr(run, name),)
        },
    }
    if as_json:
        click.echo(json.dumps(facts))
        return 0
    nodes, busiest = len(run.node_bytes), run.computed.max()
    words, messages = run.words_received, run.messages_received
    by_formula = f"{candidate.words_per_rank:.0f} in {candidate.messages_per_rank:.0f}"
    click.echo(
        f"{candidate.summary(question.mnk, question.ranks)}\n"
        f"simulated on {counted(nodes, 'node')}: {run.seconds:.4g} s, of which the busiest rank computes "
        f"{busiest:.4g}; by formula {candidate.seconds:.4g} s\n"
        f"words received per rank: {words.min()} to {words.max()}, in {messages.min()} to {messages.max()} messages "
        f"(formula {by_formula})\n"
        f"into a node: {in_bytes(run.node_bytes.mean())} on average, {in_bytes(run.node_bytes.max())} at most"
    )
    return 0


def _asked(
    shape: tuple[int, int, int],
    product_grid: tuple[int, int] | None,
    dtype: str,
    machine_file: str | None,
    ranks_per_node: int | None,
    **others: Any,
) -> Question:
    """The options of `plan` and `simulate`; the others have the names that they have there."""
    import numpy as np

    from pdgemm.model.machine import load_machine, on_nodes
    from pdgemm.planning.estimates import Question

    machine = load_machine(machine_file)
    if ranks_per_node is not None:
        machine = on_nodes(machine, ranks_per_node)
    return Question(*shape, dtype=np.dtype(dtype), shape=product_grid, machine=machine, **others)


@click.command(cls=OfAllRanks)
@click.option("-o", "--output", type=click.Path(dir_okay=False), required=True, help="JSON file for --machine.")
@options.json_
@options.debug
def calibrate(output: str, as_json: bool) -> int:
    """Measure messages, copies and products on these ranks, for plans of this machine.

    Products use the file that PDGEMM_MACHINE names; `plan` and `simulate` the one of --machine.
    """
    from mpi4py import MPI

    from pdgemm.calibrate import calibrate as measure
    from pdgemm.cli.session import session
    from pdgemm.io.atomic import check_writable, on_root, replacing

    path = Path(output)
    with session(None, as_json) as say:
        comm = say.grid.comm
        check_writable(path, comm, 1 << 16)  # before the work, not after it
        with say.progress("calibrate") as progress:
            machine = measure(MPI.COMM_WORLD, progress)
        text = machine.as_json() + "\n"
        with replacing(path, comm, len(text)) as partial:
            on_root(comm, path, lambda: partial.write_text(text))
        say.report("machine", machine)
    return 0
