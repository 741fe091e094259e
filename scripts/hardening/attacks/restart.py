"""Jobs that are killed by SIGKILL at any moment and started again: they continue, and the result is the usual one."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import h5py
import numpy as np
from problems import TOLERANCE, gemm_error

from attacks.trial import Finding, Job, Run, Trial, judge, ranks as there, tail

END = 60  # seconds in which a job must end after a kill
MOST = 3  # the most kills of one product
STEPS = 6  # the steps of the program that saves its state
AGAIN = "do not fit the memory: the product begins again"  # the message if there are fewer ranks, with less memory


def disturbed(trial: Trial, job: Job, longest: float) -> Run:
    """Kill one or all processes of a job after some seconds, and return its output."""
    job.until(lambda: False, trial.rng.uniform(0, longest))
    job.kill(trial.rng.choice(("launcher", "rank", "all")))
    run = job.finish(END)
    if run.code:
        trial.count("ended")
    return run


def sizes(trial: Trial) -> tuple[bool, list[int]]:
    """Return whether all jobs have the same number of ranks, and the number of ranks of each job."""
    same, first = trial.rng.random() < 0.4, trial.rng.randint(1, trial.size)
    return same, [first if same else trial.rng.randint(1, trial.size) for _ in range(MOST + 1)]


def share(path: Path) -> float:
    """Return the part of the product that a checkpoint has done; 0 if there is no checkpoint."""
    try:
        with h5py.File(path) as file:
            product = bytes(file.attrs["product"]).decode()
    except FileNotFoundError:
        return 0.0
    return float(product.split('"share": ')[1].split(",")[0].rstrip("}"))


def multiply(trial: Trial) -> None:
    """Kill a product with checkpoints several times, in memory or in parts, with or without C on entry."""
    rng, work = trial.rng, trial.work
    m, n, k = (rng.randint(300, 1200) for _ in range(3))
    dtype = rng.choice(("float64", "float64", "float32", "complex128"))
    (a, b), c0 = trial.operands(m, n, k, dtype), trial.matrix((m, n), dtype)
    beta = rng.choice((0, 0, -2))
    for path in ("c.h5", "undisturbed.h5"):
        trial.store(f"{path}:/z", c0)
        trial.store(f"{path}:/kept", c0[:5])
    same, ranks = sizes(trial)
    options = ["--alpha", "1.5", "--beta", str(beta), "--force", "--checkpoint", rng.choice(("0s", "0s", "0.1s"))]
    options += ["--memory", f"{rng.randint(3, 6)}MB"] if rng.random() < 0.6 else []
    words = "multiply", "a.h5:/x", "b.h5:/x", "-o"
    for number, size in enumerate(ranks):
        gone = beta != 0 or rng.random() < 0.5
        if gone:  # all ranks have ended; otherwise ranks of a killed launcher may still run, and finish the product
            while there():
                time.sleep(0.02)
            if number and not np.array_equal(trial.read("c.h5:/z"), c0):
                break
        before = share(work / "c.h5.z.checkpoint")
        job = trial.start(size, *words, "c.h5:/z", *options)
        run = job.finish() if number == MOST else disturbed(trial, job, 2.5)
        trial.unchanged("c.h5:/kept", c0[:5])
        if run.code == 0:
            judge(run)
            if gone and before and "goes on from" not in run.out and AGAIN not in run.out:
                raise Finding("lost", f"{before:.1%} were saved, but the next job began anew: {tail(run)}")
            break
        if number == MOST:
            judge(run)
        complete = not np.array_equal(trial.read("c.h5:/z"), c0)
        ending = (work / "c.h5.z.checkpoint-tiles").exists() and not (work / "c.h5.z.checkpoint").exists()
        if not complete and share(work / "c.h5.z.checkpoint") < before and not ending and AGAIN not in run.out:
            raise Finding("lost", f"{before:.1%} were saved, but the next job's checkpoint has less: {tail(run)}")
        if complete:
            trial.is_product("c.h5:/z", 1.5, a, b, beta, c0)
    found = trial.is_product("c.h5:/z", 1.5, a, b, beta, c0)
    if same:
        judge(trial.pdgemm(ranks[0], *words, "undisturbed.h5:/z", *options), codes=(0,))
        if not np.array_equal(found, trial.read("undisturbed.h5:/z")):
            raise Finding("wrong", f"after {number} kills C differs in some bit from that of an undisturbed job")
    # a job that is killed right after it has replaced c.h5 does not remove its lock
    if left := sorted(x.name for x in work.iterdir() if "checkpoint" in x.name and not x.name.endswith("-lock")):
        raise Finding("litter", f"the finished product left {left}")
    trial.count("right")


def inputs(trial: Trial) -> None:
    """Change A, B or C on entry while a product runs or after it was killed, and restore the times of its file.

    A running product may have read the old matrix; its result is then right for the old one.  A product that is
    continued refuses changed files.
    """
    rng, work = trial.rng, trial.work
    m, n, k = (rng.randint(300, 900) for _ in range(3))
    of = dict(zip("abc", (*trial.operands(m, n, k), trial.matrix((m, n)))))
    beta = rng.choice((0, 2))
    trial.store("c.h5:/x", of["c"])
    words = ["multiply", "a.h5:/x", "b.h5:/x", "-o", "z.h5:/z", "--alpha", "1.5", "--checkpoint", "0s"]
    words += ["--beta", "2", "--c", "c.h5:/x"] if beta else []
    words += ["--memory", f"{rng.randint(3, 6)}MB"] if rng.random() < 0.6 else []
    runs = rng.random() < 0.3  # change the file while the product runs
    job, checkpoint = trial.start(rng.randint(1, trial.size), *words), work / "z.h5.z.checkpoint"
    job.until(checkpoint.exists)
    time.sleep(rng.uniform(0, 0.3))
    if not runs:
        job.kill("all")
        job.finish(END)
    name, how = rng.choice("abc" if beta else "ab"), rng.choice(("in place", "another file", "nothing"))
    replace(work / f"{name}.h5", how, rng.randrange(of[name].shape[0]), rng.randrange(of[name].shape[1]))
    trial.commands.append(f"# {name}.h5 is changed ({how}), and gets its times back")
    both = of, of | {name: trial.read(f"{name}.h5:/x")}
    run = job.finish() if runs else trial.pdgemm(rng.randint(1, trial.size), *words)
    outcome = judge(run)
    if outcome == "right":
        z = trial.read("z.h5:/z")
        if min(gemm_error(z, 1.5, x["a"], x["b"], beta, x["c"]) for x in both[not runs :]) > TOLERANCE:
            raise Finding("wrong", f"z.h5 is the product of neither the old nor the new {name}.h5: {tail(run)}")
    if outcome == "refused" and how == "nothing" and runs:
        raise Finding("lost", f"refused, though only the times of {name}.h5 have changed: {tail(run)}")
    if outcome == "refused" and (work / "z.h5").exists():
        raise Finding("wrong", f"refused, but z.h5 exists: {tail(run)}")
    trial.count(outcome)


def replace(file: Path, how: str, row: int, col: int) -> None:
    """Change an element of a file in place or in a copy that replaces it, or only replace it; restore its times."""
    before, there = file.stat(), file
    if how != "in place":
        there = Path(shutil.copy2(file, file.with_name("copy.h5")))
    if how != "nothing":
        with h5py.File(there, "r+") as opened:
            opened["x"][row, col] += 1000
    os.utime(there, ns=(before.st_atime_ns, before.st_mtime_ns))
    there.replace(file)


def save_all(trial: Trial) -> None:
    """Kill a program that saves its state after each step, and start it again: it continues from the last state."""
    _, ranks = sizes(trial)
    state, keep, last = trial.work / "state.h5", trial.rng.choice(("1", "2", "3")), 0
    for number, size in enumerate(ranks):
        job = trial.program(size, "stepping", str(STEPS), keep)
        run = job.finish() if number == MOST else disturbed(trial, job, 2.5)
        step = 0
        if state.exists():
            with h5py.File(state) as file:  # a complete file, whenever the program was killed
                step = int(file.attrs["step"])
                if {*file} != {"w", "m"} or not (file["w"][()] == step).all():
                    raise Finding("wrong", f"the state of step {step} mixes two steps")
        if step < last:
            raise Finding("lost", f"step {last} was saved, but now the file has step {step}")
        last = step
        if run.code == 0:
            if "damaged" in run.err or "loaded in its place" in run.err:
                raise Finding("lost", tail(run))
            break
    judge(run, codes=(0,))
    if last != STEPS:
        raise Finding("lost", f"the program ended, and its state is of step {last}")
    trial.count("right")
