"""Ranks and launchers are killed at any moment of any command: no process stays, and no file is lost."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress

import numpy as np
from problems import TOLERANCE, gemm_error

from attacks.trial import Finding, Job, Trial, attack, judge, ranks, tail
from pdgemm.planning.machines.machine import load_machine
from pdgemm.tools.studies import records

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
N = 700
SCALING = ("scaling", "strong", "--shape", "60,60,60", "--ranks", "1,2", "--repeats", "2", "--no-calibrate")
COMMANDS: dict[str, tuple[str, ...]] = {
    "generate": ("generate", "old.h5:/z", "--shape", f"{N}x{N}", "--kind", "eye", "--force"),
    "multiply": ("multiply", "a.h5:/x", "b.h5:/x", "-o", "old.h5:/z", "--trace", "old.json", "--force"),
    "slowly": ("multiply", "a.h5:/x", "b.h5:/x", "-o", "old.h5:/z", "--panel-width", "1", "--verify", "--force"),
    "verify": ("verify", "a.h5:/x", "b.h5:/x", "c.h5:/x"),
    "calibrate": ("calibrate", "-o", "old.json"),
    "scaling": (*SCALING, "--out", "old.jsonl"),
    "plan": ("plan", "--shape", "9000,8000,7000", "--ranks", "30000"),
    "simulate": ("simulate", "--shape", "9000,8000,7000", "--ranks", "96"),
    "plot": ("plot", "study.jsonl", "--out", "old.html"),
    "profile": ("profile", "trace.json"),
    "info": ("info",),
}
WITHOUT_MPI = ("scaling", "plan", "simulate", "plot", "profile")
END = 30  # seconds after a kill


@attack("kills.command")
def command(trial: Trial) -> None:
    """Some processes of a command are killed."""
    rng, work = trial.rng, trial.work
    name = rng.choice([*COMMANDS])
    size = 0 if name in WITHOUT_MPI else rng.randint(1, trial.size)
    a, b = trial.matrix((N, N)), trial.matrix((N, N))
    for path, matrix in (("a.h5", a), ("b.h5", b), ("c.h5", a @ b)):
        trial.store(f"{path}:/x", matrix)
    trial.store("old.h5:/z", trial.matrix((9, 7)))
    beside = trial.matrix((30, 20))
    trial.store("old.h5:/kept", beside)
    trial.store("c.h5:/kept", beside)
    (work / "old.json").write_text('{"old": true}')
    (work / "old.html").write_text("old</html>")
    line = {"format": records.FORMAT, "machine": json.loads(load_machine(None).as_json())}
    (work / "old.jsonl").write_text(json.dumps(line) + "\n")
    if name == "plot":
        judge(trial.start(0, *SCALING, "--out", "study.jsonl").finish(), codes=(0,))
    if name == "profile":
        judge(trial.pdgemm(2, "multiply", "a.h5:/x", "b.h5:/x", "-o", "t.h5:/z", "--trace", "trace.json"), codes=(0,))
    old = {x: (work / x).read_bytes() for x in ("old.h5", "old.json", "old.html", "old.jsonl")}
    kept = {*os.listdir(work)}

    job = trial.start(size, *COMMANDS[name])
    moment = rng.choice(("any", "it speaks", "it writes"))
    end = time.monotonic() + 10
    while moment != "any" and job.process.poll() is None and time.monotonic() < end:
        if job.said(0).out if moment == "it speaks" else [*work.glob(".*.partial")]:
            break
        time.sleep(0.002)
    time.sleep(rng.uniform(0, {"any": 1 if size == 0 else 3, "it speaks": 1, "it writes": 0.05}[moment]))
    number, whom = rng.choice(SIGNALS), rng.choice(("launcher", "rank", "ranks", "all"))
    trial.commands.append(f"# when {moment}: kill -{number.name} {whom}")
    kill(job, whom, number, trial)
    run = job.finish(END)

    if run.code == 0:
        judge(run)
    if name in ("slowly", "verify") and "WRONG" in run.out:
        raise Finding("wrong", tail(run))
    for path, before in old.items():
        if not (work / path).exists():
            raise Finding("lost", f"{path} is gone")
        if (work / path).read_bytes() != before:
            complete(trial, name, path, before)
        elif run.code == 0 and any(path == x.split(":")[0] for x in COMMANDS[name]):
            raise Finding("lost", f"exit code 0, but {path} is the old one")
    if litter := {x for x in os.listdir(work) if not (x.startswith(".") and run.code)} - kept:
        raise Finding("litter", f"it left {sorted(litter)}")
    trial.count("right" if run.code == 0 else "ended")


def kill(job: Job, whom: str, number: signal.Signals, trial: Trial) -> None:
    there = ranks()
    victims = {
        "launcher": [job.process.pid],
        "rank": trial.rng.sample(there, min(1, len(there))),
        "ranks": trial.rng.sample(there, trial.rng.randint(0, len(there))),
        "all": [job.process.pid, *there],
    }[whom]
    for pid in victims or [job.process.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def complete(trial: Trial, name: str, path: str, before: bytes) -> None:
    """A file that is not the old one is the new one, and complete."""
    work = trial.work
    if path == "old.h5":
        if not np.array_equal(trial.read("old.h5:/kept"), trial.read("c.h5:/kept")):
            raise Finding("lost", "old.h5:/kept is not what it was")
        new = trial.read("old.h5:/z")
        if name == "generate":
            right = new.shape == (N, N) and (new == np.eye(N)).all()
        else:
            right = gemm_error(new, 1, trial.read("a.h5:/x"), trial.read("b.h5:/x")) <= TOLERANCE
    elif path == "old.json":
        words = ("plan", "--shape", "9,9,9", "--ranks", "2", "--machine") if name == "calibrate" else ("profile",)
        right = judge(trial.alone(*words, path)) == "right"
    elif path == "old.html":
        right = (work / path).read_text().rstrip().endswith("</html>")
    else:  # a study is gone on with
        right = (work / path).read_bytes().startswith(before)
        right &= judge(trial.start(0, *COMMANDS["scaling"]).finish()) == "right"
    if not right:
        raise Finding("wrong", f"{path} is neither the old one nor a complete new one")
