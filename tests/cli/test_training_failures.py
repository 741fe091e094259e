"""An exception on one rank in a step of training ends the job, with its traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import needs_mpiexec, python, run

pytest.importorskip("torch")

PROGRAM = """
import torch
from pdgemm.training import Mesh, distribute

class Failing(torch.nn.Linear):
    def forward(self, x):
        if mesh.rank == 1 and len(losses) == 2:
            raise ValueError("a layer has failed")
        return super().forward(x)

mesh, losses = Mesh(dp=-1), []
torch.manual_seed(0)
run = distribute(Failing(3, 2), mesh, loss=torch.nn.functional.mse_loss)
run.optimizer(torch.optim.SGD, lr=0.1)
for step in range(9):
    losses.append(run.step(torch.ones(4, 3), torch.zeros(4, 2)))
"""


@needs_mpiexec
def test_an_exception_in_a_step_ends_the_job(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    done = run(python(3, "train.py"), cwd=tmp_path, timeout=60)
    assert done.returncode != 0
    assert done.stderr.count("ValueError: a layer has failed") == 1 and "rank 1 of 3" in done.stderr
