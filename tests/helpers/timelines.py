"""Timelines made by hand, in the format of `pdgemm.trace`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pdgemm.planning.machines.machine import Machine


def timeline(path: Path, *ranks: dict[str, Any], machine: Machine | None = None, cores: int = 8, **facts: Any) -> Path:
    """Write the timeline of a product of 1 s; return its path.

    ranks : for each rank `host`, a list of (name, seconds), and `moves`, a list of (kind, start, end, bytes).
    """
    events, about = [], []
    for number, rank in enumerate(ranks):
        at, total = 0.0, {"wait": 0.0, "sync": 0.0}
        for name, seconds in rank["host"]:
            events.append({"name": name, "cat": "host", "ts": at * 1e6, "dur": seconds * 1e6, "tid": 0})
            at += seconds
            total[name] = total.get(name, 0.0) + seconds
        for kind, start, end, size in rank.get("moves", ()):
            span = {"name": kind, "cat": "transfers", "ts": start * 1e6, "dur": (end - start) * 1e6, "tid": 1}
            events.append(span | {"args": {"bytes": size}})
        report = {
            "algorithm": "summa", "grid": [1, len(ranks)], "mnk": [1024, 1024, 1024], "dtype": "float64", "device": "",
            "panels": 8, "panel_width": 128, "layers": 1, "lookahead": 1, "flops": 2 * 1024**3,
            "lower_bound_words": 100.0, "counted": {"words_received": 100}, "seconds": 1.0,
            "hidden_seconds": rank.get("hidden", 0.0),
            "overlap": 0.5 if "hidden" in rank else None,
            "wait_seconds": total["wait"] + total["sync"], "sync_seconds": total["sync"], **facts,
        }  # fmt: skip
        events.append({"name": "pdgemm", "cat": "host", "ts": 0.0, "dur": 1e6, "tid": 0, "args": report})
        events[-1 - len(rank["host"]) - len(rank.get("moves", ())) :] = [
            x | {"ph": "X", "pid": number} for x in events[-1 - len(rank["host"]) - len(rank.get("moves", ())) :]
        ]
        about.append({"host": "n1", "node": 0, "threads": 1, "cores": [*range(cores)], "clock_error_us": 0.0})
    machine = machine or Machine(name="measured", gamma={"float32": {512: 1e9}, "float64": {128: 2 * 1024**3 / 0.9}})
    other = {"ranks": about, "machine": json.loads(machine.as_json())}
    path.write_text(json.dumps({"traceEvents": events, "otherData": other}))
    return path


GOOD = {"host": [("product", 0.9), ("wait", 0.02), ("pack", 0.03)]}
