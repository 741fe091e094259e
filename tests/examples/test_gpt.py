"""docs/examples/gpt on meshes: losses, norms and texts are those of one process of torch; a run goes on elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import islice, product
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from example_programs import example  # noqa: E402
from tiers import everything, in_turn  # noqa: E402

from pdgemm.errors import PdgemmError  # noqa: E402
from pdgemm.instrument.recorder import Traffic  # noqa: E402
from pdgemm.parallel import Sampler  # noqa: E402
from pdgemm.training import Run  # noqa: E402

pytestmark = [pytest.mark.mpi, pytest.mark.on_ranks(*((1, 2, 4, 8) if everything() else (1, 2, 4)))]
SIZES = (
    *("--layers", "4", "--hidden", "16", "--heads", "4", "--sequence", "13", "--batch", "12", "--dtype", "float64"),
    *("--rate", "0.01", "--steps", "4"),
)
OPTIONS = [
    "--microbatches 2",
    "--zero 1 --recompute attention --untied",
    "--zero 2 --schedule zero_bubble --microbatches 3",
    "--zero 3 --schedule gpipe --microbatches 2 --recompute blocks",
]
INTERLEAVED = "--schedule interleaved --chunks 2 --microbatches 2 --zero 3"


def meshes(ranks: int) -> Iterator[list[str]]:
    """Yield the meshes of the ranks, as options of the program."""
    for sizes in product(range(1, ranks + 1), (1, 2, 4), (1, 2, 4), (1, 2, 4)):
        if np.prod(sizes) == ranks:
            yield [word for axis, n in zip(("--dp", "--tp", "--pp", "--cp"), sizes) for word in (axis, str(n))]


@cache
def alone(tied: bool = True) -> tuple[list[tuple[float, float]], Any]:
    """Return the losses and the norms of the gradients of plain torch, and the model after the last step."""
    options = example("gpt/train").parsed([*SIZES, *([] if tied else ["--untied"])])
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    model, results = example("gpt/train").model_of(options), []
    groups = [{"params": [x for x in model.parameters() if (x.dim() == 2) is matrices]} for matrices in (True, False)]
    groups[1] |= {"weight_decay": 0.0}
    optimizer = torch.optim.AdamW(groups, lr=options.rate, betas=(0.9, 0.95), weight_decay=0.1)
    for step, rate in enumerate(0.005 * (1 + np.cos(np.pi * np.arange(4) / 4))):
        batch = torch.tensor([[*text[row : row + 14]] for row in Sampler(len(text) - 13, 12).rows(step)])
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        results.append((loss.item(), norm.item()))
    return results, model


def trained(comm: Any, *words: str, steps: int = 4) -> tuple[Any, list[tuple[float, float]]]:
    """Return a run after some of its steps, and their losses and norms."""
    train = example("gpt/train")
    options = train.parsed([*SIZES, *words])
    run, optimizer = train.begun(options, comm)
    done = islice(train.steps(options, run, optimizer), steps)
    return run, [(run.report.loss, run.report.norm) for _ in done]


def test_losses_are_those_of_one_process(comm: Any) -> None:
    """On each mesh, and each rank sends and receives the words of the formulas."""
    ways = [[*mesh, *words.split()] for mesh, words in in_turn(meshes(comm.size), OPTIONS)]
    if comm.size % 2 == 0:
        ways.append(["--pp", "2", *INTERLEAVED.split()])
    for words in ways:
        run, results = trained(comm, *words)
        np.testing.assert_allclose(results, alone("--untied" not in words)[0], rtol=1e-12, err_msg=str(words))
        own = torch.zeros(12, 13, dtype=torch.int64).tensor_split(run.mesh.length("dp"))[run.mesh.index("dp")]
        expected = run.expected(own, own)
        moved = {kind: sum([x] * 4, Traffic()) for kind, x in expected.items()}
        assert {k: x for k, x in run.mesh.traffic.items() if x != Traffic()} == {
            k: x for k, x in moved.items() if x != Traffic()
        }, words
        run.mesh.free()


def test_the_command(comm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints losses, words and a text on one rank, and all but seconds are the same on any mesh."""
    axes = ["--dp", "1"] if comm.size == 1 else ["--pp", str(comm.size // 2), "--tp", "2"]
    example("gpt/train").main(*SIZES, *axes, "--zero", "3", "--show", "2")
    printed, (losses, trained_alone) = capsys.readouterr().out, alone()
    if comm.rank:
        assert printed == ""
        return
    shown = ["step {}: loss {:.4f}, norm of the gradients {:.4f}".format(step, *losses[step - 1]) for step in (2, 4)]
    assert printed.splitlines()[:2] == shown
    kinds = re.findall(r"^(\w+): ([\d,]+) words received by all ranks, ([\d,]+) by formula$", printed, re.MULTILINE)
    assert all(counted == expected for _, counted, expected in kinds)
    assert comm.size == 1 or {kind for kind, _, _ in kinds} >= {"tensor", "gradients"}
    model = example("gpt/train").model_of(example("gpt/train").parsed(SIZES))
    model.load_state_dict(trained_alone.state_dict())
    text = bytes(model.written(torch.tensor([*b"The "]), 200).tolist()).decode(errors="replace")
    assert printed.endswith(f"{text}\n")


def test_training_yields_the_run_after_each_step(comm: Any) -> None:
    runs = [*example("gpt/train").training([*SIZES, "--steps", "2"], comm)]
    assert len(runs) == 2 and isinstance(runs[0], Run) and runs[0] is runs[1]
    assert runs[0].mesh.shape.dp == comm.size
    runs[0].mesh.free()


@pytest.mark.skipif(not hasattr(Run, "save"), reason="runs are not saved yet")
def test_a_run_goes_on_on_another_mesh(comm: Any, shared_tmp_path: Path) -> None:
    """Two steps along dp, and two in stages or along tp: the losses of one process."""
    words = ["--state", str(shared_tmp_path / "run.h5"), "--every", "2", "--zero", "2"]
    results = [*trained(comm, *words, steps=3)[1][:2]]  # which are saved before the third one
    comm.Barrier()
    axis = ["--pp", str(comm.size)] if comm.size < 4 else ["--pp", "2", "--tp", "2"]
    results += trained(comm, *words, *axis, "--zero", "1")[1]
    np.testing.assert_allclose(results, alone()[0], rtol=1e-12)


ERRORS = {
    "--tp {n} --heads 1": "tp {n} does not divide 1 heads",
    "--pp {n} --layers 1": "'blocks' has 1 blocks, and the pipeline has {n}",
    "--schedule none": "got 'none'",
    "--dp {n} --tp 2": "is a mesh of",
}


@pytest.mark.on_ranks(2)
@pytest.mark.parametrize("words", ERRORS)
def test_errors(comm: Any, words: str) -> None:
    """Each is one exception of the package on all ranks, before a step."""
    with pytest.raises(PdgemmError, match=ERRORS[words].format(n=comm.size)):
        example("gpt/train").main(*SIZES, *words.format(n=comm.size).split())
