"""Published step times and sizes beside the predictions of `ModelPlan`, with one set of constants a machine.

The numbers lie in `published`, one table a file, as their authors print them.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from pdgemm.planning.machines.accelerators import accelerator
from pdgemm.planning.machines.machine import Machine
from pdgemm.planning.models.model_plan import ModelPlan
from pdgemm.planning.models.model_shape import ModelShape
from pdgemm.planning.models.training_layout import TrainingLayout
from pdgemm.support.text import Table

SC21 = "Narayanan et al., SC 2021"
KORTHIKANTI = "Korthikanti et al., MLSys 2023"
MEGATRON_CORE = "Megatron-Core, 2024"
_EARLY: dict[str, Any] = {"fused": False, "dropout": True}  # layers of Megatron-LM in 2021 and 2022


class PublishedRow(NamedTuple):
    """A published number and its prediction.   what : it is, with its unit."""

    source: str
    model: str
    layout: str
    what: str
    published: float
    predicted: float

    @property
    def difference(self) -> float:
        return self.predicted / self.published - 1


def _rows(table: str) -> list[dict[str, str]]:
    with (Path(__file__).parent / "published" / f"{table}.csv").open() as file:
        return list(csv.DictReader(file))


def _shape(row: dict[str, str]) -> ModelShape:
    sizes = {name: int(row[key]) for name, key in (("vocabulary", "vocab"), ("sequence", "seq"))}
    return ModelShape(**{name: int(row[name]) for name in ("layers", "hidden", "heads")}, **sizes)


def _layout(row: dict[str, str], chunks: int, **how: Any) -> TrainingLayout:
    tp, pp = int(row["tp"]), int(row["pp"])
    schedule = "interleaved" if chunks > 1 else "1f1b"
    return TrainingLayout(int(row["gpus"]) // tp // pp, tp, pp, chunks=chunks, schedule=schedule, **how)


def step_times() -> Iterator[PublishedRow]:
    """Yield steps: TFLOP/s of a GPU, or seconds."""
    a100, h100 = accelerator("a100-80"), accelerator("h100")
    for row in _rows("megatron_sc21_table1"):
        layout = _layout(
            row,
            int(row["virtual_stages"]),
            microbatch=int(row["microbatch"]),
            recompute="full",
            sequence=False,
            **_EARLY,
        )
        yield _rate(f"{SC21}, table 1", row, layout, a100, hardware=True)
    for row in (row for row in _rows("megatron_sc21_table2") if row["scheme"] != "zero3"):
        tp, pp = row["scheme"].removeprefix("tp").split("_pp")
        chunks = 2 if row["hidden"] == "12288" else 3  # those of the same models in table 1
        layout = _layout({**row, "tp": tp, "pp": pp}, chunks, recompute="full", sequence=False, **_EARLY)
        yield _rate(f"{SC21}, table 2", row, layout, a100, hardware=True)
    for row in _rows("korthikanti2022"):
        for column, how in (
            ("seconds_full_recompute", {"recompute": "full", "sequence": False}),
            ("seconds_seqpar_selective", {"recompute": "selective", "sequence": True}),
        ):
            layout = _layout(row, int(row["virtual_stages"]), microbatch=int(row["microbatch"]), **how, **_EARLY)
            plan = ModelPlan(_shape(row), layout, int(row["batch_sequences"]), a100)
            yield PublishedRow(
                f"{KORTHIKANTI}, table 5", row["model"], str(layout), "s a step", float(row[column]), plan.step_seconds
            )
    for row in _rows("megatron_core_h100_2024"):
        yield _rate(MEGATRON_CORE, row, _fastest(row, h100), h100, hardware=False)


def _rate(source: str, row: dict[str, str], layout: TrainingLayout, machine: Machine, hardware: bool) -> PublishedRow:
    plan = ModelPlan(_shape(row), layout, int(row["batch_sequences"]), machine)
    share, peak = plan.hfu if hardware else plan.mfu, machine.peak or 0.0
    published = row.get("tflops_per_gpu") or row["tflops_per_gpu_hardware"]
    name = row.get("model") or f"{row['params_billion']}B"
    return PublishedRow(source, name, str(layout), "TFLOP/s", float(published), share * peak / 1e12)


def _fastest(row: dict[str, str], machine: Machine) -> TrainingLayout:
    """Return the layout with the microbatch and the blocks a stage that are fastest, as these are not published."""
    shape, batch, layers, pp = _shape(row), int(row["batch_sequences"]), int(row["layers"]), int(row["pp"])
    blocks = [x for x in range(1, layers // pp + 1) if not layers % (pp * x)] if pp > 1 else [1]
    layouts = [_layout(row, chunks, microbatch=size, zero=1) for size in (1, 2, 4) for chunks in blocks]
    plans = [ModelPlan(shape, x, batch, machine) for x in layouts]
    return min((x for x in plans if not x.refused), key=lambda x: x.step_seconds).layout


def kept_bytes() -> Iterator[PublishedRow]:
    """Yield the activations of Korthikanti's figures 1 and 7: GiB, and percent of those of tensor parallelism alone."""
    a100 = accelerator("a100-80")
    for row in _rows("korthikanti2022"):

        def kept(recompute: str, sequence: bool, row: dict[str, str] = row) -> float:
            chunks, how = int(row["virtual_stages"]), {"recompute": recompute, "sequence": sequence}
            layout = _layout(row, chunks, microbatch=int(row["microbatch"]), **how, **_EARLY)
            return ModelPlan(_shape(row), layout, int(row["batch_sequences"]), a100).bytes["activations"]

        alone = kept("none", False)
        for column, recompute, sequence in (
            ("activation_gib_tp_only", "none", False),
            ("activation_gib_seqpar_selective", "selective", True),
        ):
            size = kept(recompute, sequence) / 2**30
            yield PublishedRow(f"{KORTHIKANTI}, figure 1", row["model"], column, "GiB", float(row[column]), size)
        for column, recompute, sequence in (
            ("act_percent_seqpar", "none", True),
            ("act_percent_selective", "selective", False),
            ("act_percent_seqpar_selective", "selective", True),
            ("act_percent_full_recompute", "full", False),
        ):
            share = 100 * kept(recompute, sequence) / alone
            yield PublishedRow(f"{KORTHIKANTI}, figure 7", row["model"], column, "%", float(row[column]), share)


def checked_table() -> Table:
    """Return all rows beside their predictions, with the largest and the mean difference of each source."""
    rows = [*step_times(), *kept_bytes()]
    cells = [
        (x.source, x.model, x.layout, x.what, f"{x.published:g}", f"{x.predicted:.4g}", f"{100 * x.difference:+.1f}%")
        for x in rows
    ]
    for source in dict.fromkeys(x.source for x in rows):
        differences = [abs(x.difference) for x in rows if x.source == source]
        most, usual = f"{100 * max(differences):.1f}% at most", f"{100 * mean(differences):.1f}%"
        cells.append((source, f"{len(differences)} rows", "", "", "", most, usual))
    columns = ("source", "model", "layout", "", "published", "predicted", "difference")
    return Table(columns, cells, words=columns[:4])
