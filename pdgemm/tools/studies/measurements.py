"""What all measured cases of studies have: times, where they were taken, and rates relative to one another."""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from pdgemm.support.json_input import Count, Figure, Positive, Seconds
from pdgemm.support.text import in_rate, in_seconds
from pdgemm.tools.studies import records
from pdgemm.tools.studies.records import AnyCase, Record
from pdgemm.tools.studies.training.training_cases import TrainingCase


class Cost(Struct):
    """What a measurement cost."""

    core_hours: Figure
    gpu_hours: Figure
    joules: Figure | None = None
    energy: str | None = None


class Setting(Struct):
    """Where a case was measured."""

    nodes: list[str]
    threads_per_rank: Annotated[list[Count], Meta(min_length=1)]
    cores_per_node: Count
    oversubscribed: bool = False


class Measurement(Struct, kw_only=True):
    """A measured case: the part of its record that the figures need.

    case     : what was measured.   record : the record as it was read.   source : the file of the record.
    interval : the 95% confidence interval of the median; None for few repetitions.
    """

    case: Any
    record: Record
    source: str
    cost: Cost
    setting: Setting
    repetitions: list[Seconds] = msgspec.field(name="seconds")
    seconds: Positive = msgspec.field(name="median_seconds")
    interval: tuple[Positive, Positive] | None = msgspec.field(name="confidence")

    @property
    def ranks(self) -> int:
        return int(self.case.ranks)

    @property
    def oversubscribed(self) -> bool:
        """Whether the cores were oversubscribed: more ranks than cores."""
        return self.setting.oversubscribed

    @property
    def settings(self) -> dict[str, str]:
        """The settings, which are the same for all points of a curve."""
        return {name: _text(self.record["setting"].get(name)) for name in records.SETTING}


def relative(first: Any, other: Any) -> float:
    """Return the rate per rank relative to that of `first`; for the same work, this is T(p0) p0 / (T(p) p)."""
    return float((other.flops / (other.seconds * other.ranks)) / (first.flops / (first.seconds * first.ranks)))


def said(case: AnyCase, record: Record) -> str:
    """Return the record of a case as a line of text."""
    if record["status"] == "failed":
        return f"FAILED {case}: {record['error']}"
    if isinstance(case, TrainingCase):
        return _said_of_training(case, record)
    product = record["product"]
    wrong = "" if record["status"] == "ok" else f"; WRONG: residual {record['residual']}"
    return (
        f"{case}: {_median(record)}, {in_rate(1e9 * record['gflops'])}, "
        f"{record['fraction_of_peak']:.0%} of peak, by {product['algorithm']} on "
        f"{'x'.join(map(str, product['grid']))}{wrong}"
    )


def _said_of_training(case: TrainingCase, record: Record) -> str:
    """Return the record of a case of training as a line of text."""
    training = record["training"]
    differ = [x["kind"] for x in training["words"] if x["differ"]]
    parts = [
        f"{case}: {_median(record)} a step, {training['tokens_per_second']:,.0f} tokens/s, by {training['layout']}",
        f"words of {', '.join(differ)} DIFFER from their formulas" if differ else "words as by formulas",
        *([f"MFU {training['mfu']:.0%}"] if "mfu" in training else []),
        *(["WRONG: a loss is infinite or not a number"] if record["status"] == "wrong" else []),
    ]
    return "; ".join(parts)


def _median(record: Record) -> str:
    between = record["confidence"]
    spread = f" [{in_seconds(between[0])}, {in_seconds(between[1])}]" if between else ""
    return in_seconds(record["median_seconds"]) + spread


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "-".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)
