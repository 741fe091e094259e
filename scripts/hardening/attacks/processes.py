"""Processes that end or stop at any moment: ranks and launchers are killed, ranks are stopped, others survive."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time

import numpy as np

from attacks.trial import TOLD, WATCHDOG, Finding, Job, Trial, judge, ranks, tail
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
END = 30  # seconds in which a job must end after a kill
ANSWER = 6  # seconds in which the other ranks answer the watchdog
ENDED = 3  # the exit code by which a scheduler knows that the job may be started again
SURVIVE = 75  # seconds: 60 in which survivors must recover (`patience`), and the job itself


def command(trial: Trial) -> None:
    """Kill some processes of a command: no process remains, and no file is lost."""
    rng, work = trial.rng, trial.work
    name = rng.choice([*COMMANDS])
    size = 0 if name in WITHOUT_MPI else rng.randint(1, trial.size)
    a, b = trial.operands(N, N, N)
    trial.store("c.h5:/x", a @ b)
    trial.store("old.h5:/z", trial.matrix((9, 7)))
    beside = trial.matrix((30, 20))
    trial.store("old.h5:/kept", beside)
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
    moments = {
        "any": lambda: True,
        "it speaks": lambda: job.said(0).out,
        "it writes": lambda: [*work.glob(".*.partial")],
    }
    moment = rng.choice([*moments])
    job.until(moments[moment], 10)
    time.sleep(rng.uniform(0, {"any": 1 if size == 0 else 3, "it speaks": 1, "it writes": 0.05}[moment]))
    trial.commands.append(f"# when {moment}:")
    job.kill(rng.choice(("launcher", "rank", "ranks", "all")), rng.choice(SIGNALS))
    run = job.finish(END)

    if run.code == 0:
        judge(run)
    if name in ("slowly", "verify") and "WRONG" in run.out:
        raise Finding("wrong", tail(run))
    for path, before in old.items():
        if not (work / path).exists():
            raise Finding("lost", f"{path} does not exist any more")
        if (work / path).read_bytes() != before:
            trial.unchanged("old.h5:/kept", beside)
            complete(trial, name, path, before)
        elif run.code == 0 and any(path == x.split(":")[0] for x in COMMANDS[name]):
            raise Finding("lost", f"exit code 0, but {path} is the old file")
    if litter := {x for x in os.listdir(work) if not (x.startswith(".") and run.code)} - kept:
        raise Finding("litter", f"it left {sorted(litter)}")
    trial.count("right" if run.code == 0 else "ended")


def complete(trial: Trial, name: str, path: str, before: bytes) -> None:
    """Check that a changed file is complete, and has the contents that the command writes."""
    work, right = trial.work, True
    if path == "old.h5" and name == "generate":
        right = np.array_equal(trial.read("old.h5:/z"), np.eye(N))
    elif path == "old.h5":
        trial.is_product("old.h5:/z", 1, trial.read("a.h5:/x"), trial.read("b.h5:/x"))
    elif path == "old.json":
        words = ("plan", "--shape", "9,9,9", "--ranks", "2", "--machine") if name == "calibrate" else ("profile",)
        right = judge(trial.pdgemm(0, *words, path)) == "right"
    elif path == "old.html":
        right = (work / path).read_text().rstrip().endswith("</html>")
    else:  # the study is continued
        right = (work / path).read_bytes().startswith(before)
        right &= judge(trial.pdgemm(0, *COMMANDS["scaling"])) == "right"
    if not right:
        raise Finding("wrong", f"{path} is neither the old file nor a complete new one")


def begun(trial: Trial, job: Job, size: int) -> list[int]:
    """Wait until each rank of a program has written its file `begun`, and return the ranks' process numbers."""
    job.until(lambda: len([*trial.work.glob("begun.*")]) == size)
    return ranks()


def stopped(trial: Trial) -> None:
    """Stop a rank in a product, factorisation, sum or file access; if it is continued in time, the job succeeds."""
    rng = trial.rng
    size = rng.randint(2, max(2, trial.size))
    mover, checked = rng.choice(("auto", "shared", "ring", "ibcast")), rng.choice(("checked", "unchecked"))
    job = trial.program(size, "stopping", mover, checked)
    if len(there := begun(trial, job, size)) < size:
        raise Finding("code", f"the job did not begin: {tail(job.finish())}")
    victim, goes_on = rng.choice(there), rng.random() < 0.5
    time.sleep(rng.uniform(0, 2))
    trial.commands.append(f"# kill -STOP {victim}")
    os.kill(victim, signal.SIGSTOP)
    if goes_on:
        time.sleep(rng.uniform(0, WATCHDOG / 2))
        os.kill(victim, signal.SIGCONT)
        time.sleep(rng.uniform(0, 1))
        (trial.work / "enough").touch()
        run = job.finish()
        if judge(run, codes=(0,)) != "right" or run.out.count("right") != size:
            raise Finding("wrong", tail(run))
        trial.count("right")
        return
    run = job.finish(WATCHDOG + ANSWER + 20)
    if TOLD not in run.err or f"is stopped (kill -CONT {victim} " not in run.err:
        raise Finding("hang", f"the watchdog does not name the stopped rank: {tail(run)}")
    trial.count("ended")


def able() -> bool:
    """Return whether the launcher lets the other ranks go on after a failure, as Open MPI 5's does."""
    said = subprocess.run(["mpiexec", "--version"], capture_output=True, text=True, check=False).stdout
    return bool(re.search(r"Open MPI\) ([5-9]|\d\d)\.", said))


def survivors(trial: Trial) -> None:
    """Kill one or two ranks, on one node or several, with and without shared memory: the others go on."""
    rng = trial.rng
    if not able():
        trial.count("refused")
        return
    size = rng.randint(2, max(2, trial.size))
    dtype, steps = rng.choice(("float64", "float32", "complex128")), rng.randint(5, 40)
    n, width = rng.randint(50, 700), rng.randint(1, 500)
    a, b = trial.matrix((n, n), dtype) / np.sqrt(n).astype(dtype), trial.matrix((n, width), dtype)
    trial.store("in.h5:a", a)
    trial.store("in.h5:b", b)
    nodes = [{"PDGEMM_RANKS_PER_NODE": "2"}, {"PDGEMM_RANKS_PER_NODE": "3"}, {"PDGEMM_NODE_MEMORY": "0"}]
    environment = rng.choice([{}, {}, *nodes])
    mover = rng.choice(("auto", "auto", "ibcast", "ring", *(["shared"] if not environment else [])))
    words = mover, str(steps), str(rng.choice((0, 0.01, 0.05))), str(rng.choice((1, steps, steps)))
    job = trial.program(size, "surviving", *words, launcher=("--with-ft", "ulfm"), **environment)
    begun(trial, job, size)  # if a rank is killed in MPI_Init, the others hang there
    kills = min(size - 1, rng.choice((1, 1, 2)))
    for _ in range(kills):
        job.until(lambda: False, rng.uniform(0, 2.5))
        if ranks():
            job.kill("rank")
    run = job.finish(SURVIVE)
    if run.code == ENDED and "another rank has failed" in run.err:
        trial.count("ended")
        return
    if run.code:
        raise Finding("code", f"exit code {run.code} after {kills} kills: {tail(run)}")
    x = b
    for _ in range(steps):
        x = a @ x + b
    made, eps = trial.read("out.h5:x"), np.finfo(dtype).eps
    if not np.linalg.norm(made - x) <= 50 * steps * n * eps * np.linalg.norm(x):
        raise Finding("wrong", f"after {kills} kills X is wrong: {tail(run)}")
    trial.count("right")
