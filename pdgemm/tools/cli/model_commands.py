"""`pdgemm model`: how to divide a transformer among ranks, by formulas, before anything runs."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import click

from pdgemm.errors import ArgumentError
from pdgemm.planning.machines.known_machines import machine_of
from pdgemm.planning.machines.machine import Machine
from pdgemm.planning.models.model_layers import TrainingLayout
from pdgemm.planning.models.model_plan import LayoutSearch, ModelPlan
from pdgemm.planning.models.model_shape import PRESETS, ModelShape
from pdgemm.support.text import Table, counted, in_seconds, in_words
from pdgemm.tools.cli import options
from pdgemm.tools.cli.job import OfOneRank
from pdgemm.tools.cli.options import BYTES, WORDS

_TOKENS = 1 << 20  # tokens of a step, if --batch is not given

_shape = options.stacked_options(
    click.option("--preset", type=click.Choice([*PRESETS]), help="A model by name, whose sizes other options change."),
    click.option("--layers", type=options.COUNT),
    click.option("--hidden", type=options.COUNT, help="Features of a token between layers."),
    click.option("--heads", type=options.COUNT),
    click.option("--kv-heads", type=options.COUNT, help="Heads of keys and values.  [default: as many as heads]"),
    click.option("--ffn", type=options.COUNT, help="Features between linear layers.  [default: 4 hidden]"),
    click.option("--vocabulary", type=options.COUNT),
    click.option("--sequence", type=options.COUNT, help="Tokens of a sample."),
    click.option("--experts", type=options.COUNT, help="Experts of each layer."),
    click.option("--topk", type=options.COUNT, help="Experts that a token takes.  [default: 2]"),
    click.option("--gated/--no-gated", default=None, help="Three linear layers and no biases, as Llama."),
    click.option("--tied/--untied", default=None, help="The output layer shares the embedding table."),
)


@click.command(cls=OfOneRank, short_help="Plan how to divide a transformer.")
@_shape
@click.option(
    "--batch", type=options.COUNT,
    help="Samples of a step, on all ranks together.  [default: equally many on each rank, about 2^20 tokens in all]",
)  # fmt: skip
@click.option("--ranks", type=options.COUNT, help="Number of ranks, unless --layout tells it.")
@click.option("--ranks-per-node", type=options.COUNT, help="[default: that of the machine]")
@click.option(
    "--machine", "machine_name", default="a100-80", show_default=True,
    help="A name (`pdgemm info` lists them), or a file of `pdgemm calibrate`.",
)  # fmt: skip
@click.option("--memory", type=BYTES, help="Memory per rank, such as 40GB.  [default: that of the machine]")
@click.option("--dtype", type=click.Choice(("bfloat16", "float16", "float32")), default="bfloat16", show_default=True)
@click.option("--layout", "layout_text", help="Show only this layout: dp=4,tp=4,pp=8,recompute=selective.")
@click.option(
    "--optimizer", type=click.Choice(("adamw", "muon")), default="adamw", show_default=True,
    help="muon updates the matrices of layers, each whole on one rank, and AdamW all others.",
)  # fmt: skip
@click.option("--fused/--no-fused", default=True, help="Attention in one kernel, which keeps no weights.")
@click.option("--tokens", type=WORDS, help="Tokens of a training run, to show its days and rank-hours.")
@click.option("--price", type=click.FloatRange(0), help="Price of a rank-hour, to show the cost of a million tokens.")
@options.check(
    "pdgemm.planning.published.published_models.checked_models",
    "Compare predictions with published step times and sizes.",
)
@options.json_
@options.debug
def model(
    batch: int | None, ranks: int | None, ranks_per_node: int | None, machine_name: str, memory: int | None, dtype: str,
    layout_text: str | None, optimizer: Any, fused: bool, tokens: int | None, price: float | None,
    as_json: bool, **sizes: Any,
) -> int:  # fmt: skip
    """Show how to divide a transformer among ranks: bytes, words, seconds and MFU of the best layouts.  Needs no MPI.

    A layout is dp x tp x pp x cp x ep ranks: samples, matrices, layers, positions and experts are divided.  All layouts
    that fit the memory are compared by the predicted time of a step.
    """
    shape = _shape_of(**sizes, known=ranks or layout_text)
    machine, refused = _machine(machine_name, ranks_per_node, memory), []
    fixed = TrainingLayout(dtype=dtype, fused=fused, optimizer=optimizer)
    layout = TrainingLayout.parsed(layout_text, fixed) if layout_text else None
    if layout and ranks not in (None, layout.ranks):
        raise ArgumentError(f"the layout {layout_text} needs {counted(layout.ranks, 'rank')}, not {ranks}")
    ranks = layout.ranks if layout else ranks
    assert ranks
    batch = batch or ranks * max(1, round(_TOKENS / (shape.sequence * ranks)))
    if layout:
        plans = [ModelPlan(shape, layout, batch, machine)]
        if why := plans[0].refused:
            raise ArgumentError(f"{layout_text}: {why}")
    else:
        choice = LayoutSearch(shape, batch, ranks, machine, fixed=fixed).best()
        if not choice.best:
            assert choice.nearest
            raise ArgumentError(
                f"no layout of {counted(ranks, 'rank')} fits: {choice.nearest.layout} comes closest, but needs "
                f"{choice.nearest.refused}"
            )
        plans = choice.best
        refused = [f"{counted(choice.fitting, 'layout')} {'fits' if choice.fitting == 1 else 'fit'}."]
        if choice.nearest:
            nearest = f"{choice.nearest.layout} comes closest: {choice.nearest.refused}"
            refused[0] += f" Of {counted(choice.refused, 'other')}, {nearest}"
    facts = {"parameters": shape.parameters, "machine": machine.name, "batch": batch}
    facts["layouts"] = [{**x.as_dict(), **x.run(tokens, price)} for x in plans]
    node = f", {machine.ranks_per_node} on a node" if machine.ranks_per_node else ""
    title = f"{shape}\n{batch} samples, {batch * shape.sequence:,} tokens a step; machine: {machine.name}{node}\n"
    lines = [title, str(_table(plans)), *refused, "", *_in_detail(plans[0], tokens, price)]
    return options.show(as_json, facts, "\n".join(lines))


def _shape_of(preset: str | None, known: Any, **sizes: Any) -> ModelShape:
    """Return the model of the options; a preset has defaults of all sizes.   known : whether ranks are given."""
    members = dict(PRESETS[preset]) if preset else {}
    members |= {name: size for name, size in sizes.items() if size is not None}
    needed = [x.name for x in fields(ModelShape)][:5]
    missing = [f"--{name}" for name in needed if name not in members]
    whole = " (or --preset, which has all sizes)" * bool(missing)
    if missing or not known:
        listed = ", ".join(missing) + whole + ("" if known else f"{', ' * bool(missing)}--ranks (or --layout)")
        raise click.UsageError(f"missing options: {listed}")
    return ModelShape(**members)


def _machine(name: str, ranks_per_node: int | None, memory: int | None) -> Machine:
    machine = machine_of(name, ranks_per_node)
    return machine if memory is None else replace(machine, memory=float(memory))


def _table(plans: list[ModelPlan]) -> Any:
    rows = [
        (
            str(x.layout), f"{x.all_bytes / 1e9:.1f}", in_seconds(x.step_seconds), f"{x.mfu:.1%}", f"{x.hfu:.1%}",
            f"{x.tokens_per_second:,.0f}", f"{float(x.bubble):.1%}",
        )
        for x in plans
    ]  # fmt: skip
    columns = ("layout", "GB", "a step", "MFU", "HFU", "tokens/s", "bubble")
    return Table(columns, rows, words=("layout",))


def _in_detail(plan: ModelPlan, tokens: int | None, price: float | None) -> list[str]:
    """Return lines about one plan."""
    share = {part: time / plan.step_seconds for part, time in plan.seconds.items()}
    run = plan.run(tokens, price)
    lines = [
        f"{plan.layout}: {plan.microbatches} microbatch{'es' * (plan.microbatches > 1)} of {plan.layout.microbatch} "
        f"per rank, {plan.in_flight(0)} in flight",
        "GB of a rank: " + ", ".join(f"{kind} {size / 1e9:.1f}" for kind, size in plan.bytes.items()),
        "words received a step: "
        + (", ".join(f"{kind} {in_words(x)} ({plan.link(kind)})" for kind, x in plan.words.items()) or "none"),
        "seconds of a step: "
        + ", ".join(f"{part} {in_seconds(x)} ({share[part]:.1%})" for part, x in plan.seconds.items()),
        f"MFU {plan.mfu:.1%} by the model's flops, HFU {plan.hfu:.1%} with those that are computed again",
    ]
    if tokens:
        lines.append(f"{tokens:,} tokens: {run['days']:.1f} days, {run['rank_hours']:,.0f} rank-hours")
    if price is not None:
        lines.append(f"a million tokens cost {run['cost_of_a_million_tokens']:.3g}")
    return lines
