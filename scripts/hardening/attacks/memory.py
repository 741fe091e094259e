"""Small /dev/shm, small limits, full disks: a right result or one line, never a signal."""

from __future__ import annotations

import math

from problems import TOLERANCE, gemm_error

from attacks.trial import Finding, Job, Told, Trial, attack, judge

NODE = ("0", "1", "4096", str(8 << 20), "1e9", "-5", "x", "", "9" * 5000, "nan")
PER_NODE = ("1", "2", "3", "0", "-1", "x", "9" * 5000, "1.5")


@attack("memory.scarce")
def scarce(trial: Trial) -> None:
    """Up to three jobs at once that share a /dev/shm; or limits, or a full disk."""
    rng = trial.rng
    size = rng.randint(1, trial.size)
    room = rng.choice((4096, int(math.exp(rng.uniform(math.log(1 << 20), math.log(300 << 20)))), 64 << 20, 128 << 20))
    trial.shared_memory(room)
    what = rng.choice(("jobs", "jobs", "address space", "file size", "disk", "environment"))
    # the matrices of all jobs are about as large as what there is
    n = max(50, min(1500, int(math.sqrt(room * rng.uniform(0.05, 0.6) / 8 / 3))))
    a, b = trial.matrix((n, n)), trial.matrix((n, n))
    trial.store("a.h5:/x", a)
    trial.store("b.h5:/x", b)
    environment: dict[str, str] = {}
    prefix: list[str] = []
    out = trial.work / "out"
    out.mkdir()
    if what == "address space":
        base = 600 << 20  # of a rank that has loaded its libraries
        prefix = ["prlimit", f"--as={base + rng.randrange(1 << 20, 500 << 20)}"]
    elif what == "file size":
        prefix = ["prlimit", f"--fsize={int(8 * n * n * rng.uniform(0.0, 1.5))}"]
    elif what == "disk":
        trial.mount(out, int(8 * n * n * rng.uniform(0, 1.3)))
    if what == "environment" or rng.random() < 0.3:
        environment["PDGEMM_NODE_MEMORY"] = rng.choice(NODE)
        environment["PDGEMM_RANKS_PER_NODE"] = rng.choice(PER_NODE)
    trial.commands.append(f"# {what}; /dev/shm of {room} bytes, n = {n}, {environment or ''}")
    jobs: list[tuple[Job, str]] = []
    for number in range(rng.randint(2, 3) if what == "jobs" else 1):
        target = f"out/c{number}.h5:/z"
        words: tuple[str, ...] = ("multiply", "a.h5:/x", "b.h5:/x", "-o", target)
        if rng.random() < 0.3:
            words = ("generate", target, "--shape", f"{n}x{n}", "--kind", "ones")
        jobs.append((trial.start(size, *words, prefix=prefix, **environment), target))
    for job, target in jobs:
        try:
            outcome = judge(job.finish(2 * trial.bound))
        except Told as bad:
            raise Finding("hang", "the watchdog ended it, though all ranks were called alike") from bad
        if outcome == "right":
            found = trial.read(target)
            right = (found == 1).all() if "generate" in job.command else gemm_error(found, 1, a, b) <= TOLERANCE
            if not right or found.shape != (n, n):
                raise Finding("wrong", f"{target} is not the product")
        elif any(out.glob(f".{target[4:9]}*")):
            raise Finding("litter", f"refused, but it left {[x.name for x in out.glob('.*')]}")
        trial.count(outcome)
