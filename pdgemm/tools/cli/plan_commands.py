"""`pdgemm plan` and `simulate` predict the plan of a product and its time; `calibrate` measures machines for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from pdgemm.errors import ArgumentError
from pdgemm.io.streamed.tiling import Operand, Tiling
from pdgemm.io.streamed.tiling_choice import best_tiling
from pdgemm.local.arrays import dtypes
from pdgemm.planning.collective_plan import collective_costs, costs_table, parts_of
from pdgemm.planning.machines import simulator
from pdgemm.planning.machines.known_machines import machine_of
from pdgemm.planning.machines.machine import MACHINE, doubts, impossible_figures
from pdgemm.planning.machines.replay_files import REPLAY, write_replay
from pdgemm.planning.plan_simulation import PlanSimulation, simulate_plan
from pdgemm.planning.planner import RULE, candidates_explained
from pdgemm.planning.published.published_products import known_errors
from pdgemm.planning.question import DEFAULT, FORMS, MOST_TRIED, Question, movers
from pdgemm.planning.search.candidate_table import wrapped
from pdgemm.planning.search.grid_search import near_root
from pdgemm.schedules.collectives.collective import OPERATIONS
from pdgemm.support.text import counted, counted_short, in_bytes, in_seconds, in_words
from pdgemm.tools.cli import options
from pdgemm.tools.cli.job import OfAllRanks, OfOneRank
from pdgemm.tools.cli.options import BYTES, MNK, WORDS

_OF_PLAN = (  # members of the chosen candidate in the JSON of `simulate`
    "algorithm", "inside", "grid", "layers", "moves", "node_to_node", "words_per_rank", "messages_per_rank",
    "lower_bound_words", "memory_bytes_per_rank",
)  # fmt: skip
_question = options.stacked_options(
    click.option("--shape", "mnk", type=MNK, help="m,n,k of C (m x n) = A (m x k) B (k x n)."),
    click.option("--ranks", type=options.COUNT, required=True),
    click.option(
        "--memory", type=BYTES,
        help="Memory limit per rank, for A, B and C and all buffers.  Default: that of the machine, if it is known.",
    ),
    click.option(
        "--ranks-per-node", type=options.COUNT, help="Default: that of the machine file, else all on one node."
    ),
    options.machine,
    options.force,
    click.option("--dtype", type=click.Choice(options.OPERANDS), default="float64", show_default=True),
    options.algorithm,
    click.option("--mover", type=click.Choice(movers()), default="auto", show_default=True),
    click.option(
        "--layouts", default=DEFAULT, show_default=True,
        help=f"Layouts of A, B and C: {FORMS}.  Ideal ones fit each algorithm.",
    ),
)  # fmt: skip


@click.command(cls=OfOneRank, short_help="Predict how a product would run.")
@_question
@click.option("--all", "whole", is_flag=True, help="Show all candidates, and not only the first five.")
@options.picture("FILE.png or .svg: a picture of the candidates, with their time and memory.")
@click.option(
    "--collective", "operation", type=click.Choice(OPERATIONS),
    help="Show the algorithms of this collective operation on --words, in place of a product.",
)  # fmt: skip
@options.check(
    "pdgemm.planning.published.published_factorisations.checked_plans",
    "Compare predictions with published products and factorisations, and do nothing else.",
)
@click.option("--words", type=WORDS, help="Length of the whole vector; with all_to_all, of the vector of each rank.")
@options.json_
@options.debug
def plan(
    whole: bool, picture: Path | None, operation: str | None, words: int | None, force: bool, as_json: bool,
    **arguments: Any,
) -> int:  # fmt: skip
    """Show what `pdgemm()` would run, the predicted time, and the cost of the alternatives.  Needs no MPI.

    With --collective, show the algorithms of an operation such as an all-reduce, and the lower bounds.

    If nothing fits --memory, show the memory and the ranks that would suffice, and the bytes that a product of files in
    parts would read; the exit code then is 1.
    """
    if operation is not None or words is not None:
        return _collective(operation, words, as_json, **arguments)
    question, pictures = _question_of(**arguments), options.pictures_for(picture, force)
    machine = question.machine.name
    facts = {"shape": question.mnk, "ranks": question.ranks, "machine": machine}
    facts |= {"layouts": question.layouts, "matrices": question.matrices}
    if lacking := question.shortage():
        remedies, lines = _remedies(question)
        options.show(as_json, facts | remedies, "\n".join(map(wrapped, [lacking, *lines])))
        return 1
    candidates = question.candidates()
    if pictures:
        m, n, k = question.mnk
        title = f"Plans of C ({m} x {n}) := A ({m} x {k}) B on {counted(question.ranks, 'rank')}; machine: {machine}"
        pictures.draw_candidates(candidates, picture, title, question.memory)
    bound = f"lower bound {in_words(question.bound)} per rank"
    errors = known_errors(candidates[0], machine)
    checked = "predictions for this machine were not checked against published products"
    if errors:
        checked = f"error for published products (--check): {errors['mean']}% on average, {errors['max']}% at most"
    text = [
        wrapped(candidates[0].summary(question.mnk, question.ranks)),
        wrapped(f"machine: {machine}; {bound}; layouts: {question.layouts}; {checked}"),
        candidates_explained(candidates, whole, "--all"),
    ]
    facts |= {"rule": RULE, "error_percent": errors, "candidates": [x.as_dict() for x in candidates]}
    return options.show(as_json, facts, "\n".join(text), picture)


@click.command(cls=OfOneRank, short_help="Simulate a product message by message.")
@_question
@options.picture("FILE.png or .svg: the words of the product from rank to rank, as a heat map.")
@click.option(
    "--export", "export", type=click.Path(path_type=Path),
    help="Folder: a trace of each rank, and the machine, which SimGrid replays; redistribution included.",
)  # fmt: skip
@options.json_
@options.debug
def simulate(picture: Path | None, export: Path | None, force: bool, as_json: bool, **arguments: Any) -> int:
    """Simulate the schedule message by message; ranks of a node share its network bandwidth.  Needs no MPI.

    The plan is that of `pdgemm()`.  Redistributions are simulated before and after the product; those with too many
    messages are added by formula, which the output says.
    """
    question, pictures = _question_of(**arguments), options.pictures_for(picture, force)
    options.check_apart({"--plot": str(picture or ""), "--export": str(export or "")}, ())
    plan, candidate = question.plan(), question.chosen()
    simulation = simulate_plan(plan, question.machine)
    words_of_pairs = simulator.words_between(plan.product, question.ranks) if pictures else None
    if export:
        write_replay(plan.schedules, question.machine, question.ranks, export, force)
    if pictures:
        title = f"Words from rank to rank without redistribution:\n{candidate.name} on {candidate.grid_text}"
        pictures.draw_words(words_of_pairs, picture, title)
    run, moving = simulation.product, simulation.moving_seconds
    facts = {
        "shape": question.mnk,
        "ranks": question.ranks,
        "layouts": question.layouts,
        "matrices": question.matrices,
        "machine": question.machine.name,
        **{name: getattr(candidate, name) for name in _OF_PLAN},
        "mover": plan.product.mover,
        "seconds": simulation.seconds,
        "formula_seconds": plan.seconds,
        "redistribution_seconds": moving,
        "redistribution": {
            "simulated": {name: {"seconds": x.seconds} | _traffic(x) for name, x in simulation.walked.items()},
            "by_formula": {name: {"seconds": x} for name, x in simulation.by_formula.items()},
            "copies": {"seconds": simulation.copying},
            "formula_seconds": plan.moving_seconds,
        },
        "compute_seconds": {"mean": float(run.computed.mean()), "max": float(run.computed.max())},
        "node_bytes": {"mean": float(run.node_bytes.mean()), "max": float(run.node_bytes.max())},
        "formula_words_received": plan.product_words,
        **_traffic(run),
    }
    words = _range(run.words_received, in_words)
    messages = _range(run.messages_received, partial(counted_short, noun="message"))
    text = (
        f"{candidate.summary(question.mnk, question.ranks)}\n"
        f"simulated on {counted(len(run.node_bytes), 'node')}: {in_seconds(simulation.seconds)}, of which the busiest "
        f"rank computes {in_seconds(run.computed.max())} and redistribution takes {in_seconds(moving)}; all by "
        f"formula: {in_seconds(plan.seconds)}\n"
        f"{_moves(simulation)}"
        f"received per rank in the product: {words} in {messages}; by formula: {in_words(plan.product_words)}\n"
        f"received per node: {in_bytes(run.node_bytes.mean())} on average, {in_bytes(run.node_bytes.max())} at most"
    )
    text = wrapped(text)
    if export:
        facts["export"] = str(export)
        text += f"\nwrote {export}; in this folder SimGrid replays it by:\n{REPLAY}"
    return options.show(as_json, facts, text, picture)


def _traffic(run: simulator.Simulation) -> dict[str, dict[str, float]]:
    """Return the words and messages of a simulation for JSON: the least, the mean and the most of a rank."""
    names = "words_received", "words_sent", "messages_received", "messages_sent"
    return {
        name: {"min": int(x.min()), "mean": float(x.mean()), "max": int(x.max())}
        for name, x in ((name, getattr(run, name)) for name in names)
    }


def _moves(simulation: PlanSimulation) -> str:
    """Return a line that says which redistributions were simulated, and which were not; "" without redistributions."""
    walked = {name: x.seconds for name, x in simulation.walked.items()}
    parts = {"message by message": walked, "by formula, because of too many messages": simulation.by_formula}
    if not any(parts.values()):
        return ""
    parts["by formula"] = {"new memory for copies": simulation.copying} if simulation.copying >= 1e-9 else {}
    texts = (
        f"{', '.join(f'{name} {in_seconds(x)}' for name, x in seconds.items())} ({how})"
        for how, seconds in parts.items() if seconds
    )  # fmt: skip
    return f"redistribution: {'; '.join(texts)}\n"


def _remedies(question: Question) -> tuple[dict[str, Any], list[str]]:
    """Return the remedies of a shortage of memory, more ranks or a product in parts: facts for JSON, and lines."""
    more, memory, tiling, lines = question.on_more_ranks(), question.memory or 0, _in_parts(question), list[str]()
    if more is not None:
        lines.append(f"on {counted(more.ranks, 'rank')} it fits, with {in_bytes(more.least_bytes)} per rank")
    elif question.least_ranks > MOST_TRIED:
        ranks = counted(question.least_ranks, "rank")
        lines.append(f"A, B and C alone fill the memory of {ranks}: more ranks are needed")
    elif "grid=" in question.layouts:
        lines.append("on more ranks it does not fit either, if A, B and C are on the grids of --layouts")
    if isinstance(tiling, int):
        parts: dict[str, Any] = {"needed_bytes_per_rank": tiling}
        lines.append(f"products of files in parts, `pdgemm multiply --memory`, need {in_bytes(tiling)} per rank")
    else:
        parts = tiling.as_dict(memory)
        lines.append(f"`pdgemm multiply --memory` would multiply matrices in files in {tiling.explain(memory)}")
    facts: dict[str, Any] = {
        "fits": False,
        "memory": memory,
        "needed_bytes_per_rank": question.least_bytes,
        "least_ranks": question.least_ranks,
        "on_more_ranks": more and {"ranks": more.ranks, "bytes_per_rank": more.least_bytes},
        "in_parts": parts,
        "candidates": [],
    }
    return facts, lines


def _in_parts(question: Question) -> Tiling | int:
    """Return the tiling that `multiply --memory` would use; where no tiling fits, the bytes per rank that it needs."""
    rows, memory, size = near_root(question.ranks), question.memory or 0, question.dtype.itemsize
    stored = dtypes.product(question.dtype, question.dtype)
    of_c = dtypes.arithmetic(stored).itemsize, stored.itemsize, 0
    grid, operand = (rows, question.ranks // rows), Operand(size, size)
    return best_tiling(Tiling(question.mnk, grid, operand, operand, *of_c), memory)


def _range(numbers: Any, form: Callable[[float], str]) -> str:
    """Return the smallest and the largest number as text, with one noun; only one number if they are equal."""
    least, most = form(numbers.min()), form(numbers.max())
    return most if least == most else f"{least.rpartition(' ')[0]} to {most}"


def _collective(
    operation: str | None, words: int | None, as_json: bool, ranks: int, dtype: str, machine_file: str | None,
    ranks_per_node: int | None, **others: Any,
) -> int:  # fmt: skip
    """Show the algorithms of a collective operation."""
    typed = options.typed((*others, "whole", "picture"))
    if operation is None or words is None or typed:
        needed = "--collective OPERATION needs --words, and takes no option of a product"
        raise ArgumentError(f"{needed}{f', such as {typed[0]}' if typed else ''}")
    machine = machine_of(machine_file, ranks_per_node)
    costs = collective_costs(operation, parts_of(operation, words, ranks), dtypes.element_type(dtype), ranks, machine)
    facts = {"collective": operation, "words": words, "ranks": ranks, "machine": machine.name}
    facts["algorithms"] = [x.as_dict() for x in costs]
    nodes = f", {machine.ranks_per_node} per node" if machine.ranks_per_node else ""
    title = f"{operation} of {in_words(words)} of {dtype} on {counted(ranks, 'rank')}{nodes}; machine: {machine.name}"
    return options.show(as_json, facts, f"{title}\n{costs_table(costs)}")


def _question_of(
    mnk: tuple[int, int, int] | None, dtype: str, machine_file: str | None, ranks_per_node: int | None, **others: Any
) -> Question:
    """Return the `Question` to the planner from the options of `plan` and `simulate`; `others` are fields of it."""
    if mnk is None:
        raise click.MissingParameter(param_hint="'--shape'", param_type="option")
    machine = machine_of(machine_file, ranks_per_node)
    if others["memory"] is None and machine.memory:
        others["memory"] = int(machine.memory)
    return Question(*mnk, dtype=dtypes.element_type(dtype), machine=machine, **others)


@click.command(cls=OfAllRanks, short_help="Measure this machine, for plans.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), required=True, help="JSON file for --machine.")
@options.device
@options.force
@options.json_
@options.debug
def calibrate(output: str, device: str, force: bool, as_json: bool) -> int:
    """Measure messages, copies and products on these ranks, for plans on this machine; it takes some 10 seconds.

    Warns about implausible results, which mean that the machine was busy or has fewer cores than ranks.  Where a figure
    is impossible after three measurements, no file is written; the exit code then is 1.

    Products read the files that PDGEMM_MACHINE names: one for hosts, or one for GPUs, or both, separated by a colon.
    `plan` and `simulate` read the file that --machine names.
    """
    from mpi4py import MPI

    from pdgemm.io.atomic import check_writable_on_all, on_root, replacing
    from pdgemm.tools.calibrate import calibrate as measure
    from pdgemm.tools.cli.session import session

    path = Path(output)
    with session(None, as_json) as say:
        comm = say.grid.comm
        check_writable_on_all(path, comm, 1 << 16, force, MACHINE)  # before the measurements, not after them
        with say.progress("calibrate"):
            machine = measure(MPI.COMM_WORLD, device)
        wrong, text = impossible_figures(machine), machine.as_json() + "\n"
        say.report("machine", machine)
        if wrong:
            lines = [*wrong, f"{output} was not written: measure again when the machine is idle"]
            say.note("impossible", [f"pdgemm: error: {x}" for x in lines], wrong, err=True)
            return 1
        with replacing(path, comm, len(text), force, MACHINE) as partial:
            on_root(comm, path, lambda: partial.write_text(text))
        warnings = doubts(machine)
        if say.grid.memory.oversubscribed:
            warnings.insert(0, "there are more ranks than cores: they disturb each other, so every figure is too slow")
        say.note("warnings", [f"warning: {text}" for text in warnings], warnings, err=True)
        advice = f"plan --machine {output}; PDGEMM_MACHINE={output} for products"
        say.note("wrote", [f"wrote {output}; to use it: {advice}"], output)
    return 0
