"""Training whose ranks fail: the job ends at once, with the traceback of the rank that failed."""

from __future__ import annotations

import json
import time
from typing import Any

from attacks.trial import Finding, Trial, tail

SECONDS = 2  # in which a job must end after an exception
MESHES: dict[int, tuple[dict[str, int], ...]] = {
    2: ({"dp": 2}, {"tp": 2}, {"pp": 2}, {"cp": 2}),
    3: ({"dp": 3}, {"pp": 3}, {"cp": 3}),
    4: ({"dp": 2, "tp": 2}, {"pp": 2, "tp": 2}, {"dp": 2, "pp": 2}, {"cp": 2, "dp": 2}, {"tp": 2, "cp": 2}),
}


def exceptions(trial: Trial) -> None:
    """An exception on one rank, at any call of a step of training, ends the job within 2 s, with its traceback."""
    rng = trial.rng
    size = rng.randint(2, max(2, min(trial.size, 4)))
    options: dict[str, Any] = {
        "mesh": rng.choice(MESHES[size]),
        "zero": rng.randint(0, 3),
        "schedule": rng.choice(("gpipe", "1f1b", "zero_bubble")),
        "microbatches": rng.randint(1, 3),
        "recompute": rng.choice(("none", "attention", "blocks")),
    }
    job = trial.program(size, "training", json.dumps(options), str(rng.randrange(size)), str(rng.random()))
    run = job.finish()
    ended, raised = time.time(), trial.work / "raised"
    if not raised.exists():
        raise Finding("code", f"the program did not fail as planned: {tail(run)}")
    if run.code == 0 or "a drawn failure" not in run.err or run.err.count("Traceback (most recent call last)") != 1:
        raise Finding("traceback", f"exit code {run.code}, without one traceback of the failure: {tail(run)}")
    if (seconds := ended - float(raised.read_text())) > SECONDS:
        raise Finding("hang", f"the job ended {seconds:.1f} s after the exception")
    trial.count("ended")
