"""Invented records of scaling studies, in the format of `pdgemm scaling`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdgemm.schedules.formulas import gemm_flops
from pdgemm.tools.studies import records
from pdgemm.tools.studies.cases import SIZES, Case, TrainingCase, cases, training_cases

SIDE = 1024


TIMES = {1: 8.0, 2: 4.4, 4: 2.5, 8: 2.0}  # efficiency 100%, 91%, 80%, 50%


def strong(algorithm: str = "auto", times: dict[int, float] = TIMES, **changes: Any) -> list[dict[str, Any]]:
    made = cases("strong", [(SIDE,) * 3], list(times), algorithms=[algorithm])
    return [record(case, times[case.ranks], **changes) for case in made]


def record(case: Case, seconds: float, **changes: Any) -> dict[str, Any]:
    """Return a record in the format of `pdgemm scaling`.   changes : to the setting."""
    ranks, flops = case.ranks, gemm_flops(*case.mnk, case.dtype.startswith("complex"))
    words = 1000 * ranks if ranks > 1 else 0
    each = {"seconds": 0.9, "compute_seconds": 0.6, "wait_seconds": 0.12, "sync_seconds": 0.02, "hidden_seconds": 0.3,
            "pack_seconds": 0.04, "move_seconds": 0.06}  # fmt: skip
    spread = {name: {"min": 0, "mean": seconds * share, "max": seconds} for name, share in each.items()}
    setting = {
        "pdgemm": "0.1.0", "python": "3.11.7", "mpi_library": "Open MPI v5", "mpi4py": "4.1", "numpy": "2.4",
        "multiplies": "OpenBLAS", "cupy": "not installed", "cpu": "Xeon", "threads_per_rank": [1],
        "ranks_per_node": ranks, "cores_per_node": 4, "oversubscribed": ranks > 4, "nodes": ["host<1>"],
        "kernel": "6.1", **changes,
    }  # fmt: skip
    return {
        "case": case.as_dict(),
        "status": "ok",
        "median_seconds": seconds,
        "confidence": [0.9 * seconds, 1.2 * seconds],
        "seconds": [seconds] * 7,
        "warmup": 1,
        "gflops": flops / seconds / 1e9,
        "peak_gflops": 1.0,
        "fraction_of_peak": 0.96 - 0.01 * ranks,
        "residual": 3e-16,
        "residual_bound": 1e-14,
        "product": {
            "algorithm": "summa", "inside": "", "grid": [1, ranks], "layers": 1, "overlap": 0.75,
            "predicted_seconds": seconds, "lower_bound_words": words / 1.25,
            "per_rank": {**spread, "words_received": {"min": 0, "mean": 1, "max": words}},
        },
        "cost": {"core_hours": seconds * ranks / 3600, "gpu_hours": 0.0},
        "setting": setting,
        "command": ["pdgemm", "scaling", "strong", "--ranks", "1,2"],
        "environment": {"OMP_NUM_THREADS": "1"},
        "date": "2026-01-02T03:04:05+00:00",
    }  # fmt: skip


def trained(
    kind: str, times: dict[int, float], layouts: Sequence[str] = ("auto",), batch: int = 8, **changes: Any
) -> list[dict[str, Any]]:
    """Return records like those of `pdgemm scaling --train`, by seconds and ranks.   changes : to `training`."""
    how: dict[str, Any] = {"program": "gpt", "steps": 7, "warmup": 1}
    every = training_cases(kind, [*times], layouts, batch, SIZES, ["float32"], **how)
    return [training_record(case, times[case.ranks], **changes) for case in every]


def training_record(case: TrainingCase, seconds: float, **changes: Any) -> dict[str, Any]:
    """Return a record in the format of `pdgemm scaling --train`.   changes : to `training`."""
    words = 1000.0 * (case.ranks - 1)
    kind = {"kind": "gradients", "counted": words, "formula": words, "differ": 0}
    product = record(Case("strong", case.ranks, (8, 8, 8)), seconds)
    return {
        **{name: product[name] for name in ("status", "median_seconds", "confidence", "seconds", "warmup", "cost",
                                            "setting", "command", "environment", "date")},
        "case": case.as_dict(),
        "training": {
            "layout": f"dp={case.ranks}", "waited": 0.2 * seconds, "planned": 0.75 * seconds,
            "words": [kind] * (case.ranks > 1), "losses": [5.5 - 0.1 * step for step in range(8)], "mfu": 0.4,
            **changes,
        },
    }  # fmt: skip


def study(path: Path, *lines: dict[str, Any] | str) -> Path:
    texts = [line if isinstance(line, str) else json.dumps({"format": records.FORMAT, **line}) for line in lines]
    path.write_text("\n".join(texts) + "\n")
    return path
