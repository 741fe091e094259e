"""States of a run: any mesh continues what another has saved, with the numbers of a run that was not interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from plain_models import GPT, LLAMA_TABLE, Llama, gpt_table, in_one_process, own_samples, tokens  # noqa: E402
from test_meshes import float64  # noqa: E402
from tiers import everything  # noqa: E402

from pdgemm.training import Mesh, distribute  # noqa: E402

pytestmark = pytest.mark.mpi


@pytest.fixture(autouse=True)
def _types() -> Iterator[None]:
    with float64():
        yield


def ways(size: int) -> list[dict[str, Any]]:
    ways = [
        {"dp": size, "zero": 2},
        {"tp": size, "zero": 0},
        {"pp": size, "zero": 3, "schedule": "zero_bubble", "microbatches": 2},
        {"dp": size, "zero": 3},
        {"cp": size, "zero": 1},
        {"dp": size, "zero": 0}
    ]
    return ways


def run_of(comm: Any, how: dict[str, Any], make: Any = GPT, table: Any = None) -> Any:
    options = dict(how)
    mesh = Mesh(comm, **{axis: options.pop(axis) for axis in ("dp", "tp", "pp", "cp") if axis in options})
    run = distribute(make(), mesh, gpt_table() if table is None else table, blocks="blocks", **options)
    optimizer = run.optimizer(torch.optim.AdamW, {"*norm*": {"weight_decay": 0.0}}, lr=1e-2)
    return run, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def test_x(comm: Any, shared_tmp_path: Path) -> None:
    runs = ways(comm.size)
    def go(run, sched, lo, hi):
        out = []
        for s in range(lo, hi):
            out.append(run.step(*own_samples(run.mesh, tokens(s)), clip=1.0)); sched.step()
        return out
    whole, s = run_of(comm, runs[0])
    expected = go(whole, s, 0, 4)
    for fmt in ("h5", "safetensors"):
        for n, how in enumerate(runs):
            run, s = run_of(comm, how)
            go(run, s, 0, 2)
            path = shared_tmp_path / f"x{n}.{fmt}"
            run.save(path, extra={"s": s.state_dict()})
            for other in runs:
                run2, s2 = run_of(comm, other)
                s2.load_state_dict(run2.load(path)["s"])
                assert run2.steps == 2
                got = go(run2, s2, 2, 4)
                assert all(abs(x - y) <= 1e-12 * abs(y) for x, y in zip(got, expected[2:])), (fmt, how, other, got, expected)
