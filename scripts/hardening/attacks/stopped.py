"""Ranks are stopped (SIGSTOP) at any moment: one that goes on in time costs nothing, else the job ends and says why."""

from __future__ import annotations

import os
import signal
import sys
import time

from attacks.trial import HERE, TOLD, WATCHDOG, Finding, Job, Trial, attack, judge, ranks, tail

ANSWER = 6  # seconds that the other ranks have to answer the watchdog
BEGIN = 60  # seconds


@attack("stopped.programs")
def programs(trial: Trial) -> None:
    """A rank is stopped in a product, a factorisation, a sum or a file."""
    rng = trial.rng
    size = rng.randint(2, max(2, trial.size))
    mover, checked = rng.choice(("auto", "shared", "ring", "ibcast")), rng.choice(("checked", "unchecked"))
    words = ["mpiexec", "-n", str(size), sys.executable, str(HERE / "stopping.py"), mover, checked]
    job = Job(trial, words, {})
    end = time.monotonic() + BEGIN
    while job.process.poll() is None and len([*trial.work.glob("begun.*")]) < size and time.monotonic() < end:
        time.sleep(0.002)
    if len(there := ranks()) < size:
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
        raise Finding("hang", f"the rank that is stopped is not named: {tail(run)}")
    trial.count("ended")
