#!/usr/bin/env python3
"""Steps of a transformer on two ranks by pdgemm.training, compared with torch's DistributedDataParallel on gloo.

\b
    mpiexec -n 2 python scripts/benchmarks/bench_torch.py modules
    scripts/hosts.sh 2 mpirun -n 2 --map-by ppr:1:node python scripts/benchmarks/bench_torch.py step
    scripts/hosts.sh 2 mpirun -n 2 --map-by ppr:1:node python scripts/benchmarks/bench_torch.py tensor

"one process" takes the same step with as many threads as there are ranks, while the other ranks sleep.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
from runner import Case, Work, main

HEADS = 4


def modules(comm: Any, hidden: int = 256, length: int = 128, samples: int = 8, layers: int = 4) -> Iterator[Case]:
    """A step of AdamW on all samples: DDP, pdgemm with dp and with tp, and one process with all threads."""
    import torch
    import torch.distributed as dist

    from pdgemm.training import Mesh, distribute

    torch.set_num_threads(1)
    port = comm.bcast(20000 + os.getpid() % 20000)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=comm.rank, world_size=comm.size)
    x = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (samples, length)))
    own = x.tensor_split(comm.size)[comm.rank]
    make = transformer(hidden, length, layers)
    replicas = distribute(make(), Mesh(comm, dp=-1))
    parts = distribute(make(), Mesh(comm, tp=-1), example("train").table(HEADS))
    for run in (replicas, parts):
        run.optimizer(torch.optim.AdamW, lr=1e-3)
    works = {
        "DistributedDataParallel": plain_step(torch.nn.parallel.DistributedDataParallel(make()), own),
        "dp": lambda: replicas.step(own, own),
        "tp": lambda: parts.step(x, x),
        "one process": alone(comm, plain_step(make(), x)),
    }
    yield Case(f"{layers} layers of {hidden}, {samples} samples of {length} tokens", works)
    dist.destroy_process_group()


def step(comm: Any, hidden: int = 256, length: int = 128, samples: str = "8,16,32", layers: int = 4) -> Iterator[Case]:
    """A step with dp on all hosts, with ZeRO 0 and 2, the step of one rank alone, and the exchange of as many bytes."""
    import torch

    from pdgemm.training import Mesh, distribute

    torch.set_num_threads(1)
    for number in map(int, samples.split(",")):
        x = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (number, length)))
        make, works = transformer(hidden, length, layers), dict[str, Work]()
        for name, zero, lazy in (("zero 0", 0, False), ("zero 2", 2, False), ("zero 2, lazy", 2, True)):
            run = distribute(make(), Mesh(comm, dp=-1), zero=zero, lazy=lazy)
            run.optimizer(torch.optim.AdamW, lr=1e-3)
            works[name] = partial(run.step, x, x)
        words = run.expected()["gradients"].words_received + run.expected()["parameters"].words_received
        works |= {"alone": plain_step(make(), x), "exchange": exchange(comm, words)}
        yield Case(f"{layers} layers of {hidden}, {number} samples of {length} tokens on each rank", works)


def tensor(comm: Any, hidden: int = 256, length: int = 128, samples: str = "2,4,8", layers: int = 4) -> Iterator[Case]:
    """A step with tp on all hosts, with products hidden behind sums along tp and after them, and the exchange alone."""
    import torch

    from pdgemm.parallel import Line
    from pdgemm.training import Mesh, distribute

    torch.set_num_threads(1)
    carry_out = Line.carry_out

    def after(line: Any, collective: Any, x: Any, kind: str, join: Any = None, meanwhile: Any = None) -> None:
        carry_out(line, collective, x, kind, join)
        if meanwhile:
            meanwhile()

    def step(run: Any, x: Any, method: Any) -> None:
        Line.carry_out = method  # type: ignore[method-assign]
        run.step(x, x)

    for number in map(int, samples.split(",")):
        x = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (number, length)))
        run = distribute(transformer(hidden, length, layers)(), Mesh(comm, tp=-1), example("train").table(HEADS))
        run.optimizer(torch.optim.AdamW, lr=1e-3)
        words = run.expected(x, x)["tensor"].words_received
        works = {"hidden": partial(step, run, x, carry_out), "after": partial(step, run, x, after)}
        yield Case(f"{number} samples of {length} tokens", {**works, "exchange": exchange(comm, words)})


def exchange(comm: Any, words: int) -> Work:
    """Return a function that sends words of 4 bytes to the next rank, and receives as many, by plain messages."""
    sent, received = np.zeros(words, np.float32), np.zeros(words, np.float32)
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    return lambda: comm.Sendrecv(sent, after, recvbuf=received, source=before)


def plain_step(model: Any, x: Any) -> Work:
    """Return a function that takes a step of a module by torch alone."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        model(x, x).backward()
        optimizer.step()

    return step


def alone(comm: Any, step: Work) -> Work:
    """Return a function in which rank 0 works with as many threads as there are ranks, and other ranks sleep."""
    import torch

    def work() -> None:
        if comm.rank == 0:
            torch.set_num_threads(comm.size)
            step()
            torch.set_num_threads(1)
        done = comm.Ibarrier()
        while not done.Test():
            sleep(1e-3)

    return work


def transformer(hidden: int, length: int, layers: int) -> Any:
    """Return a function that makes the GPT of the documentation, with the same parameters in each call."""
    import torch

    def make() -> Any:
        torch.manual_seed(0)
        return example("model").GPT(layers, hidden, HEADS, length, tied=False)

    return make


def example(module: str) -> Any:
    """Return a module of docs/examples/gpt."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs" / "examples" / "gpt"))
    return __import__(module)


if __name__ == "__main__":
    main(modules, step, tensor)
