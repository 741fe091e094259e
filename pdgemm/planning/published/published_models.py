"""Published step times and sizes of networks beside the predictions of `ModelPlan`: one set of constants a machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pdgemm.planning.machines.known_machines import accelerator
from pdgemm.planning.machines.machine import Machine
from pdgemm.planning.models.model_layers import TrainingLayout
from pdgemm.planning.models.model_plan import ModelPlan
from pdgemm.planning.models.model_shape import ModelShape
from pdgemm.planning.published.published_products import PublishedRow, published_table, read_table
from pdgemm.support.text import Table

SC21 = "Narayanan et al., SC 2021"
KORTHIKANTI = "Korthikanti et al., MLSys 2023"
MT_NLG = "Smith et al., 2022"
ZERO = "Rajbhandari et al., SC 2020"
MEGATRON_CORE = "Megatron-Core, 2024"
_EARLY: dict[str, Any] = {"fused": False, "dropout": True}  # layers of Megatron-LM in 2021 and 2022
# runs of 2021: all of a layer is computed again, nothing is divided along sequences, and gradients of microbatches are
# added after their products (`main_grad.add_` in Megatron-LM's distributed.py, autograd in DeepSpeed), later by them
_OF_2021: dict[str, Any] = {**_EARLY, "recompute": "full", "sequence": False, "apart": True}


def _shape(row: dict[str, str]) -> ModelShape:
    layers, hidden, heads, vocabulary, sequence = (int(row[x]) for x in ("layers", "hidden", "heads", "vocab", "seq"))
    return ModelShape(layers, hidden, heads, vocabulary, sequence)


def _layout(row: dict[str, str], chunks: int, **how: Any) -> TrainingLayout:
    tp, pp = int(row["tp"]), int(row["pp"])
    schedule = "interleaved" if chunks > 1 else "1f1b"
    return TrainingLayout(int(row["gpus"]) // tp // pp, tp, pp, chunks=chunks, schedule=schedule, **how)


def step_times() -> Iterator[PublishedRow]:
    """Yield steps: TFLOP/s of a GPU, or seconds."""
    a100, h100 = accelerator("a100-80"), accelerator("h100")
    for row in read_table("megatron_sc21_table1"):
        layout = _layout(row, int(row["virtual_stages"]), microbatch=int(row["microbatch"]), **_OF_2021)
        yield _rate(f"{SC21}, table 1", row, layout, a100, hardware=True)
    for row in (row for row in read_table("megatron_sc21_table2") if row["scheme"] != "zero3"):
        tp, pp = row["scheme"].removeprefix("tp").split("_pp")
        chunks = 2 if row["hidden"] == "12288" else 3  # those of the same models in table 1
        layout = _layout({**row, "tp": tp, "pp": pp}, chunks, **_OF_2021)
        yield _rate(f"{SC21}, table 2", row, layout, a100, hardware=True)
    for row in read_table("korthikanti2022"):
        for column, how in (
            ("seconds_full_recompute", {"recompute": "full", "sequence": False}),
            ("seconds_seqpar_selective", {"recompute": "selective", "sequence": True}),
        ):
            layout = _layout(row, int(row["virtual_stages"]), microbatch=int(row["microbatch"]), **how, **_EARLY)
            yield _seconds(f"{KORTHIKANTI}, table 5", row, column, layout, a100)
    for row in read_table("mt_nlg2022"):
        yield _seconds(MT_NLG, row, "seconds_per_step", _layout(row, 1, **_OF_2021), a100)
    for row in read_table("megatron_core_h100_2024"):
        yield _rate(MEGATRON_CORE, row, _fastest(row, h100), h100, hardware=False)


def _plan(row: dict[str, str], layout: TrainingLayout, machine: Machine) -> ModelPlan:
    return ModelPlan(_shape(row), layout, int(row["batch_sequences"]), machine)


def _seconds(source: str, row: dict[str, str], column: str, layout: TrainingLayout, machine: Machine) -> PublishedRow:
    predicted = _plan(row, layout, machine).step_seconds
    return PublishedRow(source, row["model"], str(layout), "s a step", float(row[column]), predicted)


def _rate(source: str, row: dict[str, str], layout: TrainingLayout, machine: Machine, hardware: bool) -> PublishedRow:
    plan = _plan(row, layout, machine)
    predicted = (plan.hfu if hardware else plan.mfu) * (machine.peak or 0.0) / 1e12
    published = float(row.get("tflops_per_gpu") or row["tflops_per_gpu_hardware"])
    name = row.get("model") or f"{row['params_billion']}B"
    return PublishedRow(source, name, str(layout), "TFLOP/s", published, predicted)


def _fastest(row: dict[str, str], machine: Machine) -> TrainingLayout:
    """Return the layout with the microbatch and the blocks a stage that are fastest, as these are not published."""
    layers, pp = int(row["layers"]), int(row["pp"])
    blocks = [x for x in range(1, layers // pp + 1) if not layers % (pp * x)] if pp > 1 else [1]
    layouts = [_layout(row, chunks, microbatch=size, zero=1) for size in (1, 2, 4) for chunks in blocks]
    plans = [_plan(row, x, machine) for x in layouts]
    return min((x for x in plans if not x.refused), key=lambda x: x.step_seconds).layout


def kept_bytes() -> Iterator[PublishedRow]:
    """Yield the activations of Korthikanti's figures 1 and 7: GiB, and percent of those of tensor parallelism."""
    a100, kinds = accelerator("a100-80"), {
        "activation_gib_tp_only": ("none", False), "activation_gib_seqpar_selective": ("selective", True),
        "act_percent_seqpar": ("none", True), "act_percent_selective": ("selective", False),
        "act_percent_seqpar_selective": ("selective", True), "act_percent_full_recompute": ("full", False),
    }  # fmt: skip
    for row in read_table("korthikanti2022"):
        how, kept = {"microbatch": int(row["microbatch"]), **_EARLY}, dict[tuple[str, bool], float]()
        for again, sequence in kinds.values():
            layout = _layout(row, int(row["virtual_stages"]), recompute=again, sequence=sequence, **how)
            kept[again, sequence] = _plan(row, layout, a100).bytes["activations"]
        for column, kind in kinds.items():
            percent = "percent" in column
            figure, unit, of = (7, "%", kept["none", False] / 100) if percent else (1, "GiB", 2.0**30)
            published = float(row[column])
            yield PublishedRow(
                f"{KORTHIKANTI}, figure {figure}", row["model"], column, unit, published, kept[kind] / of
            )


def zero_bytes() -> Iterator[PublishedRow]:
    """Yield table 1 of ZeRO: GB of a GPU, with 2 bytes for a parameter, 2 for its gradient and 12 of the optimizer."""
    sizes = {"optimizer": 12, "gradients": 2, "parameters": 2}  # in the order of the stages that divide them
    for row in read_table("zero2020_memory"):
        words, copies = float(row["params_billion"]), int(row["dp"])
        for zero, column in enumerate(("gb_stage1_optimizer", "gb_stage2_optimizer_gradients", "gb_stage3_all"), 1):
            size = sum(words * x / (copies if zero >= stage else 1) for stage, x in enumerate(sizes.values(), 1))
            name, layout = f"{row['params_billion']}B", f"dp={copies},zero={zero}"
            yield PublishedRow(f"{ZERO}, table 1", name, layout, "GB", float(row[column]), size)


def days() -> Iterator[PublishedRow]:
    """Yield the days of runs of table 2: the flops of 300 10^9 tokens, at the published rate of a GPU."""
    for row in read_table("megatron_sc21_table2"):
        rate = int(row["gpus"]) * float(row["tflops_per_gpu_hardware"]) * 1e12
        time = _shape(row).flops(300 * 10**9, "full") / rate / 86400
        name, layout = f"{row['params_billion']}B", f"{row['scheme']}, {row['gpus']} GPUs"
        yield PublishedRow(f"{SC21}, table 2", name, layout, "days", float(row["days_for_300e9_tokens"]), time)


def parameters() -> Iterator[PublishedRow]:
    """Yield the parameters of the models of table 1, in units of 10^9."""
    for row in read_table("megatron_sc21_table1"):
        number, name = _shape(row).parameters / 1e9, f"{row['params_billion']}B"
        yield PublishedRow(f"{SC21}, table 1", name, "", "parameters / 1e9", float(row["params_billion"]), number)


def checked_models() -> list[Table]:
    """Return all rows beside their predictions, with the largest and the mean difference of each source."""
    return [
        published_table(title, rows, "model", "layout")
        for title, rows in (
            ("Steps: TFLOP/s of a GPU with recomputed flops (Megatron-Core: without), or seconds", step_times()),
            ("Activations of the first stage", kept_bytes()),
            ("State of a GPU with ZeRO", zero_bytes()),
            ("Parameters", parameters()),
            ("Days of a run, from the published rates", days()),
        )
    ]
