"""`pdgemm verify-training`: DDP, FSDP2 and tensor parallelism of torch are right, and planted mistakes are found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import in_process
import pytest
from processes import filled_once

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")
from pdgemm.tools.verification.training_record import record  # noqa: E402

REFERENCE = """
import torch
from torch import nn

torch.set_num_threads(1)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.up, self.down, self.square = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 8)
        self.shift = nn.Parameter(torch.zeros(5))  # its gradient is 0 but for rounding, so that AdamW moves it anywhere

    def forward(self, x):
        x = self.norm(self.embedding(x))
        return self.square(x + self.down(self.up(x).relu())) @ self.embedding.weight.T + self.shift[:, None]

def model():
    torch.manual_seed(3)
    return Model().double()

def batches():
    for step in range(9):
        x = torch.randint(0, 11, (8, 5), generator=torch.Generator().manual_seed(step))
        y = x.roll(1, 1)
        y[:3, :3] = -100
        yield x, y

def loss(model, x, y):
    return nn.functional.cross_entropy(model(x).transpose(1, 2), y)

def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
"""
PROGRAM = """
import os
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import reference
from pdgemm.tools.verification.training_record import TorchCollectives, record

other, folder = os.fork(), Path.cwd()  # after the imports, which take seconds
rank = 0 if other else 1
distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
line = init_device_mesh("cpu", (2,))

def train(kind, fault=""):
    model = reference.model()
    if kind == "fsdp":
        fully_shard(model, mesh=line)
    elif kind == "tp":
        parallelize_module(model, line, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    else:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = reference.optimizer(model)
    for group in optimizer.param_groups:
        group["lr"] *= 1.001 if fault == "rate" else 1
        group["weight_decay"] *= 2 if fault == "decay" else 1
    record(folder / (fault or kind), 0, tensors=model)
    for step, batch in zip(range(1, 4), reference.batches()):
        x, y = batch if kind == "tp" else (x.tensor_split(2)[rank] for x in batch)
        weight = (y != -100).sum().double() / (batch[1] != -100).sum()  # of the tokens of all ranks
        if fault == "tokens" and step == 2:
            weight = torch.tensor(0.5)
        optimizer.zero_grad()
        with TorchCollectives() as counted:
            share = reference.loss(model, x, y) * weight
            factor = 1 if kind == "tp" else 4 if fault == "scale" else 0 if fault == "lost" and rank else 2
            (share * factor).backward()
        if fault == "copy" and rank and step == 2:
            model.module.up.bias.grad *= 1.5
        if fault == "rows" and step == 3:
            model.module.up.weight.grad[3:5] *= 1.5
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9) if kind != "tp" else None
        optimizer.step()
        loss = share.detach().clone()
        if kind != "tp":
            distributed.all_reduce(loss)
        record(folder / (fault or kind), step, loss, norm=norm, tensors=model, collectives=counted.counts)

for kind in ("ddp", "fsdp", "tp"):
    train(kind)
with TorchCollectives() as counted:
    distributed.broadcast(torch.ones(7), 0)
    distributed.all_gather([torch.ones(3), torch.ones(3)], torch.ones(3))
    distributed.all_to_all_single(torch.ones(4), torch.ones(4))
    distributed.reduce_scatter_tensor(torch.ones(2), torch.ones(4))
    distributed.gather(torch.ones(3), [torch.ones(3), torch.ones(3)] if rank == 0 else None)
    distributed.barrier()
record(folder / "all", 1, collectives=counted.counts)
for fault in ("rate", "decay", "tokens", "scale", "lost", "copy", "rows"):
    train("ddp", fault)
distributed.destroy_process_group()
assert not other or os.waitpid(other, 0)[1] == 0
"""

WORDS = {  # rows: kind, ranks, calls, words, and words that a rank of pdgemm's collectives receives
    "ddp": [("all_reduce", "2", "1", "393", "393")],  # all gradients
    "fsdp": [("all_gather", "2", "1", "402", "201"), ("reduce_scatter", "2", "1", "402", "201")],  # padded
    "tp": [("all_reduce", "2", "2", "640", "640")],  # 8 features of 40 tokens, forwards and backwards
    "all": [
        ("broadcast", "2", "1", "7", "7"), ("all_gather", "2", "1", "6", "3"), ("all_to_all", "2", "1", "4", "2"),
        ("reduce_scatter", "2", "1", "4", "2"),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the reference, and with runs of two processes: three right ones, and one for each mistake."""
    return filled_once(tmp_path_factory, "runs", recorded)


def recorded(folder: Path) -> None:
    (folder / "reference.py").write_text(REFERENCE)
    (folder / "program.py").write_text(PROGRAM)
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "program.py"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr


def verify(reference: Path, run: Path, *options: str) -> tuple[int, dict[str, Any]]:
    done = in_process.run(["verify-training", str(reference), "--run", str(run), "--json", *options], None)
    assert done.returncode in (0, 1) and not done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tp"])
def test_right_runs(runs: Path, kind: str) -> None:
    done = in_process.run(["verify-training", str(runs / "reference.py"), "--run", str(runs / kind)], None)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    counts = [
        line.split()[:2] for line in lines[1:-1] if line.endswith(" ok")
    ]  # 10 parameters of 2 ranks, in steps 0 to 3
    norms = [["norm", "6"]] if kind != "tp" else []
    assert sorted(counts) == [["gradients", "60"], ["loss", "6"], *norms, ["parameters", "80"]]
    assert "rounding hides mistakes in: shift, shift.grad" in lines
    assert lines[-1] == "ok: no difference in 3 steps is larger than rounding explains"
    at = lines.index("collectives of rank 1 in step 3:")
    assert [tuple(line.split()) for line in lines[at + 2 : -1]] == WORDS[kind]


def test_words_of_collectives(runs: Path, tmp_path: Path) -> None:
    """Each kind has the words of its vector, gathers to one rank are not counted, and parts of pdgemm are uneven."""
    _, facts = verify(runs / "reference.py", runs / "all")
    at = facts["notes"].index("collectives of rank 1 in step 1:")
    assert [tuple(line.split()) for line in facts["notes"][at + 2 : -1]] == WORDS["all"]
    counts = {(kind, 3, 10): 2 for kind, *_ in WORDS["all"]} | {("all_reduce", 3, 10): 200}
    record(tmp_path, 1, 2.5, collectives=counts)
    _, facts = verify(runs / "reference.py", tmp_path)
    at = facts["notes"].index("collectives of rank 0 in step 1:")
    received = {(kind := line.split())[0]: kind[2:] for line in facts["notes"][at + 2 : -1]}
    assert received == {  # in parts of 4, 3 and 3 words
        "broadcast": ["2", "20", "20"], "all_gather": ["2", "20", "14"], "all_to_all": ["2", "20", "16"],
        "reduce_scatter": ["2", "20", "16"], "all_reduce": ["200", "2,000", "2,800"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "step", "name", "ranks", "known"),
    [
        ("rate", 1, "embedding.weight", [0, 1], "change is 1+0.001 times the reference"),
        ("decay", 1, "embedding.weight", [0, 1], "change is wrong by -0.001 times the parameter: weight decay?"),
        ("tokens", 2, "loss", [0, 1], None),
        ("scale", 1, "square.bias.grad", [0, 1], "2 times the reference"),
        ("lost", 1, "square.bias.grad", [0, 1], ""),
        ("copy", 2, "up.bias.grad", [1], "3/2 times the reference"),
        ("rows", 3, "up.weight.grad", [0, 1], "only 3 to 4 of 12 along axis 0"),
    ],
)
def test_mistakes(runs: Path, fault: str, step: int, name: str, ranks: list[int], known: str | None) -> None:
    """The first step and the first tensor are named, with the ranks, and what is known of the mistake."""
    code, facts = verify(runs / "reference.py", runs / fault)
    wrong = facts["wrong"]
    assert code == 1 and {x["step"] for x in wrong} == {step} and facts["notes"][-1] == f"WRONG from step {step} on"
    assert wrong[0]["name"] == name and sorted({x["rank"] for x in wrong}) == ranks
    assert known is None or wrong[0]["known"] == known
    if fault == "copy":
        assert {x["name"] for x in wrong} == {"up.bias.grad", "up.bias", "norm"}
    before = verify(runs / "reference.py", runs / fault, "--steps", str(step - 1)) if step > 1 else (0, {})
    assert before[0] == 0


def trained(folder: Path, members: dict[str, Any], dtype: Any, parts: int, change: Any = None) -> None:
    """Record three steps of one process that adds up gradients of parts of a batch."""
    model = members["model"]().to(dtype)
    optimizer = members["optimizer"](model)
    for step, batch in zip(range(1, 4), members["batches"]()):
        optimizer.zero_grad()
        total, loss = (batch[1] != -100).sum(), 0.0
        for k in range(parts):
            x, y = (x[k::parts] for x in batch)
            part = members["loss"](model, x, y) * (y != -100).sum() / total
            part.backward()
            loss += float(part.detach())
        optimizer.step()
        tensors = {name: x.detach() for name, x in model.named_parameters()}
        record(folder, step, loss, tensors=change(tensors) if change else tensors)


@pytest.fixture
def members(runs: Path) -> dict[str, Any]:
    made: dict[str, Any] = {}
    exec((runs / "reference.py").read_text(), made)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_orders_of_sums_are_rounding(runs: Path, tmp_path: Path, members: dict[str, Any], dtype: Any) -> None:
    """The rounding is that of the type, which has to be that of the reference."""
    trained(tmp_path / "run", members, dtype, 4)
    reference = tmp_path / "reference.py"
    reference.write_text(REFERENCE.replace(".double()", f".to({dtype})"))
    assert verify(reference, tmp_path / "run")[0] == 0
    if dtype == torch.float32:
        done = in_process.run(["verify-training", str(runs / "reference.py"), "--run", str(tmp_path / "run")], None)
        assert done.returncode == 2 and "a shorter type" in done.stderr


def test_names_and_transposed_matrices(runs: Path, tmp_path: Path, members: dict[str, Any]) -> None:
    def renamed(tensors: dict[str, Any]) -> dict[str, Any]:
        tensors["lift.weight"] = tensors.pop("up.weight")
        tensors["square.weight"] = tensors["square.weight"].T
        return tensors

    trained(tmp_path / "run", members, torch.float64, 2, renamed)
    _, facts = verify(runs / "reference.py", tmp_path / "run")
    assert [(x["name"], x["known"]) for x in facts["wrong"]] == [("square.weight", "its transpose is right")]
    assert {"not recorded: up.weight", "unknown to the reference: lift.weight"} <= {*facts["notes"]}
    (tmp_path / "names.json").write_text('{"lift.weight": "up.weight"}')
    _, facts = verify(runs / "reference.py", tmp_path / "run", "--names", str(tmp_path / "names.json"))
    assert not any("not recorded" in line or "unknown" in line for line in facts["notes"])


def test_noise_is_no_proof(runs: Path, tmp_path: Path, members: dict[str, Any]) -> None:
    """With dropout, other seeds change all numbers as mistakes would, and the check says so."""
    reference = tmp_path / "dropout.py"
    reference.write_text(REFERENCE.replace("self.up(x).relu()", "nn.functional.dropout(self.up(x).relu(), 0.5)"))
    trained(tmp_path / "run", members, torch.float64, 1)
    code, facts = verify(reference, tmp_path / "run")
    assert code == 1 and not facts["wrong"] and facts["notes"][-1].startswith("this check cannot tell")


@pytest.mark.parametrize(
    ("log", "reference", "message"),
    [
        (None, "", "no logs (*.jsonl) and no tensors"),
        ('{"step": 1}\n{"step": 1}', "", "has step 1 twice: each run needs a new folder"),
        ('{"step": "one"}', "", "step"),
        ("{", "", "rank-0.jsonl"),
        ('{"step": 1, "collectives": [["gather", 2, 3, 1]]}', "", "Invalid enum value 'gather'"),
        ('{"step": 1, "collectives": [["all_reduce", 0, 3, 1]]}', "", "Expected `int` >= 1"),
        ('{"step": 1, "loss": 1.0, "collectives": [["all_reduce", 2, -3, 1]]}', "", "2 ranks needs 2 counts >= 0"),
        ('{"step": 1, "loss": 1.0}', None, "reference.py: No such file"),
        ("tensors", "", "step-1.safetensors: "),
        ('{"step": 99, "loss": 1.0}', "", "has 9 batches, and the run 99 steps: see --steps"),
        ('{"step": 1, "loss": 1.0}', "model = None", "has no function model"),
    ],
)
def test_wrong_input(tmp_path: Path, log: str | None, reference: str | None, message: str) -> None:
    path, run = tmp_path / "reference.py", tmp_path / "run"
    if reference is not None:
        path.write_text(f"{REFERENCE}\n{reference}")
    run.mkdir()
    if log == "tensors":
        (run / "step-1.safetensors").write_text("no tensors")
    elif log:
        (run / "rank-0.jsonl").write_text(log)
    done = in_process.run(["verify-training", str(path), "--run", str(run)], None)
    assert done.returncode == 2 and message in done.stderr, done.stdout + done.stderr


def test_files_of_other_programs(runs: Path, tmp_path: Path, members: dict[str, Any]) -> None:
    """A log without tensors, and tensors of the last step only, written by other means."""
    trained(tmp_path / "run", members, torch.float64, 1)
    (tmp_path / "other").mkdir()
    lines = [json.loads(line) for line in (tmp_path / "run/rank-0.jsonl").read_text().splitlines()]
    log = tmp_path / "other/losses.jsonl"
    log.write_text("\n".join(json.dumps({"step": x["step"], "loss": x["loss"]}) for x in lines))
    assert verify(runs / "reference.py", tmp_path / "other")[0] == 0
    tensors = safetensors.load_file(tmp_path / "run/rank-0.step-3.safetensors")
    tensors["norm.weight"][2] = float("nan")
    safetensors.save_file(tensors, tmp_path / "other/model-step-3.safetensors")
    code, facts = verify(runs / "reference.py", tmp_path / "other")
    assert code == 1 and [(x["step"], x["name"], x["known"]) for x in facts["wrong"]] == [
        (3, "norm.weight", "not finite")
    ]
