"""Training of a module in jobs that are killed: another mesh continues, with the losses of one process."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import jobs
import pytest
from tiers import thorough

torch = pytest.importorskip("torch")
import plain_models  # noqa: E402

from pdgemm.support.launcher import outside_job  # noqa: E402

pytestmark = [jobs.needs_mpiexec, pytest.mark.timeout(900)]
PROGRAM = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch
from plain_models import GPT, gpt_table, own_samples, tokens
from pdgemm.training import Mesh, distribute

path, axis, zero, last = sys.argv[2:]
torch.set_num_threads(1)
mesh = Mesh(**{axis: -1})
processes = mesh.comm.gather(os.getpid())
if mesh.rank == 0:
    print(*processes, flush=True)
run = distribute(GPT().double(), mesh, gpt_table(), blocks="blocks", zero=int(zero))
run.optimizer(torch.optim.AdamW, lr=1e-2)
if mesh.comm.bcast(os.path.exists(path)):
    run.load(path)
for step in range(run.steps, int(last)):
    loss = run.step(*own_samples(mesh, tokens(step)), clip=1.0)
    run.save(path)
    if mesh.rank == 0:
        print(step, repr(loss), flush=True)
"""


@pytest.mark.parametrize(
    ("kills", "ending"),
    [(2, "h5"), *(pytest.param(20, x, marks=thorough) for x in ("h5", "safetensors"))],
)
def test_a_killed_job_continues_on_another_mesh(tmp_path: Path, kills: int, ending: str) -> None:
    """kill -9 of a rank at any moment, also while it saves or loads: no saved step is lost, and none differs."""
    path, program, rng = tmp_path / f"x.{ending}", tmp_path / "train.py", random.Random(kills)
    program.write_text(PROGRAM)
    printed = saved = 0  # steps that are printed, and the most that can be saved: a job may save one and not print it
    losses = dict[int, float]()
    for job in range(kills + 1):
        axis, zero, last = ("dp", "tp", "pp", "cp")[job % 4], (job + 1) % 4, 10_000 if job < kills else saved + 3
        command = jobs.python(2, program, Path(plain_models.__file__).parent, path, axis, str(zero), str(last))
        lines = killed(command, rng) if job < kills else jobs.run(command).stdout.splitlines()[1:]
        for number, line in enumerate(lines):
            step, loss = int(line.split()[0]), float(line.split()[1])
            losses[step] = loss
            assert step == printed if number else printed <= step <= saved
            printed = saved = step + 1
        saved += 1
    assert printed == last
    expected, _ = plain_models.in_one_process(plain_models.GPT, last)
    assert all(abs(loss - expected[step][0]) <= 1e-12 * loss for step, loss in losses.items())
    assert [x.name for x in tmp_path.iterdir() if "partial" in x.name] == []


def killed(command: list[str], rng: random.Random) -> list[str]:
    """Run a job that prints the numbers of its processes; kill one a moment later, and return the lines that follow."""
    job = subprocess.Popen(command, env=outside_job(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert job.stdout is not None
        ranks = job.stdout.readline().split()
        lines = [job.stdout.readline() for _ in range(rng.randrange(4))]
        time.sleep(rng.uniform(0, 0.25))
        os.kill(int(rng.choice(ranks)), signal.SIGKILL)
        lines += job.communicate(timeout=60)[0].splitlines()
    finally:
        job.kill()
        job.wait()
    assert job.returncode != 0
    end = time.monotonic() + 10
    while any(Path(f"/proc/{rank}").exists() for rank in ranks):
        assert time.monotonic() < end, "a rank goes on"
        time.sleep(0.01)
    return lines
