"""An exception on one rank in a step of training ends the job, with its traceback; misuse of a mesh is an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import needs_mpiexec, python, run

pytest.importorskip("torch")

FAILING = """
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
DIFFERENT = """
import torch
from pdgemm.training import Columns, Mesh, Rows, distribute

mesh = Mesh(tp=-1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
run = distribute(model, mesh, {"0": Columns(), "1": Rows()}, loss=torch.nn.functional.mse_loss)
run.step(torch.ones(4, 3), torch.full((4, 2), float(mesh.rank)))
"""
OTHER_ATTENTION = """
import torch
from pdgemm.training import Mesh, Vocabulary, distribute

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9)

    def forward(self, x, y):
        x = self.embedding(x)
        x = (x @ x.mT).softmax(-1) @ x
        return torch.nn.functional.cross_entropy(self.head(x).view(-1, 9), y.view(-1))

run = distribute(Model(), Mesh(cp=-1), {"*d*": Vocabulary()})
run.step(torch.ones(2, 8, dtype=int), torch.ones(2, 8, dtype=int))
"""

DIFFERENT_COPIES = """
import torch
from pdgemm.training import Columns, Mesh, Replicated, Rows, distribute

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = torch.nn.Linear(3, 12), torch.nn.LayerNorm(4), torch.nn.Linear(12, 2)

    def forward(self, x):
        return self.down(self.norm(self.up(x).unflatten(-1, (-1, 4))).flatten(-2))

table = {"up": Columns(heads=3), "norm": Replicated(), "down": Rows()}
run = distribute(Model(), Mesh(tp=-1), table, loss=torch.nn.functional.mse_loss)
run.step(torch.ones(4, 3), torch.zeros(4, 2))
"""
SECOND_TENSOR = """
import torch
from pdgemm.training import Mesh, distribute

class Block(torch.nn.Linear):
    def forward(self, x, second):
        return super().forward(x + second)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks = torch.nn.Linear(4, 4), torch.nn.ModuleList(Block(4, 4) for _ in range(3))

    def forward(self, x):
        x = second = self.first(x)
        for block in self.blocks:
            x = block(x, second)
        return x

run = distribute(Model(), Mesh(pp=-1), blocks="blocks", loss=torch.nn.functional.mse_loss)
run.step(torch.ones(2, 4), torch.zeros(2, 4))
"""


@needs_mpiexec
@pytest.mark.parametrize(
    ("program", "message"),
    [
        (FAILING, "rank 1 of 3: Traceback"),
        (DIFFERENT, "the loss differs along tp or cp"),
        (OTHER_ATTENTION, "cp = 3, but the model has not called scaled_dot_product_attention"),
        (DIFFERENT_COPIES, "gradients of parameters that are whole on all ranks along tp differ"),
        (SECOND_TENSOR, "block 0 takes a second tensor that depends on parameters"),
    ],
    ids=["one rank", "samples", "attention", "copies", "second tensor"],
)
def test_an_exception_in_a_step_ends_the_job(program: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(program)
    done = run(python(3, "-m", "pdgemm", "train.py"), cwd=tmp_path)
    assert done.returncode != 0
    assert message in done.stderr and done.stderr.count("Traceback (most recent call last)") == 1, done.stderr
