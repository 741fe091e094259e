"""A GPT that learns to write Python's own documentation, byte by byte: the same losses on any mesh of ranks.

    mpirun -n 8 python -m pdgemm docs/examples/gpt/train.py --dp 2 --tp 2 --pp 2 --steps 100

The model in model.py is plain torch, and `table` says how its layers are divided.  The text is `pydoc_data.topics`,
what `help("topics")` shows: 466,000 bytes.
"""

import argparse
import math
import sys
from pathlib import Path
from pydoc_data.topics import topics
from time import perf_counter

import numpy as np
import torch
from model import GPT

from pdgemm import PdgemmError
from pdgemm.parallel import Sampler
from pdgemm.training import Columns, Mesh, Positions, Rows, Sequence, Vocabulary, distribute


def table(heads):
    """Return how the layers of the model are divided along tp and cp."""
    return {
        "embedding": Vocabulary(), "position": Positions(), "*.qkv": Columns(parts=3, heads=heads), "*.out": Rows(),
        "*.up": Columns(), "*.down": Rows(), "*norm*": Sequence(), "head": Vocabulary(),
    }  # fmt: skip


def model_of(options):
    """Return the model in one process, with the same parameters on all ranks."""
    torch.manual_seed(options.seed)
    model = GPT(options.layers, options.hidden, options.heads, options.sequence, options.vocabulary, options.tied)
    return model.to(getattr(torch, options.dtype))


def begun(options, comm=None):
    """Return the model on its mesh, with its optimizer.  Collective."""
    mesh = Mesh(comm, dp=options.dp, tp=options.tp, pp=options.pp, cp=options.cp)
    how = {name: getattr(options, name) for name in ("zero", "schedule", "microbatches", "chunks", "recompute")}
    run = distribute(model_of(options), mesh, table(options.heads), blocks="blocks", **how)
    decays = {pattern: {"weight_decay": 0.0} for pattern in ("*norm*", "*bias")}  # only matrices decay
    return run, run.optimizer(torch.optim.AdamW, decays, lr=options.rate, betas=(0.9, 0.95), weight_decay=0.1)


def steps(options, run, optimizer):
    """Yield the number and the loss of each step.  Collective."""
    text = np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)
    samples = np.lib.stride_tricks.sliding_window_view(text, options.sequence + 1)  # of one byte more, for labels
    sampler, first, last = Sampler(len(samples), options.batch, options.seed), 0, options.steps
    if options.state and options.state.exists():
        first = run.load(options.state, sampler=sampler)
    for step, rows in enumerate(sampler.shares(run.mesh, range(first, last), options.microbatches), first + 1):
        own = torch.from_numpy(samples[np.concatenate(rows)].astype(np.int64))
        for group in optimizer.param_groups:  # the rate grows for a tenth of the steps, and then falls by a cosine
            group["lr"] = options.rate * min(10 * step / last, (1 + math.cos(math.pi * step / last)) / 2)
        loss = run.step(own[:, :-1], own[:, 1:], clip=1.0)
        if options.state and (step % options.every == 0 or step == last):
            run.save(options.state, sampler=sampler)
        yield step, loss


def training(words, comm=None):
    """Yield the run after each step: what `pdgemm scaling --train` measures.  Collective over comm."""
    options = parsed(words)
    run, optimizer = begun(options, comm)
    for _ in steps(options, run, optimizer):
        yield run


def sample(options, run, count=200):
    """Return a text that the model writes, on rank 0, which receives the whole parameters of all stages."""
    mesh, whole = run.mesh, {name: run.whole(name) for name in run.parameters}
    stages = mesh.comm.gather(whole if mesh.index("dp") == mesh.index("tp") == mesh.index("cp") == 0 else {})
    if mesh.rank:
        return ""
    model, trained = model_of(options), {name: x for stage in stages for name, x in stage.items()}
    for name, x in model.named_parameters():
        x.data = trained[name]
    return bytes(model.written(torch.tensor([*b"The "]), count).tolist()).decode(errors="replace")


def main(*words):
    options, losses, start = parsed(words), [], perf_counter()
    run, optimizer = begun(options)
    for step, loss in steps(options, run, optimizer):
        losses.append((step, loss, run.norm))
        if run.mesh.rank == 0 and step % options.show == 0:
            print(f"step {step}: loss {loss:.4f}, norm of the gradients {run.norm:.4f}")
    tokens = len(losses) * options.batch * options.sequence
    lines = [f"{tokens} tokens in {perf_counter() - start:.1f} s"]
    for kind, expected in run.expected().items():
        counted = run.mesh.traffic[kind].words_received
        numbers = run.mesh.sum(counted, len(losses) * expected.words_received)
        lines.append("{}: {:,.0f} words received by all ranks, {:,.0f} by formula".format(kind, *numbers))
    lines.append(sample(options, run))
    if run.mesh.rank == 0:
        print(*lines, sep="\n")
        if options.losses:
            np.savetxt(options.losses, losses)


def parsed(words):
    add = (parser := argparse.ArgumentParser(description=__doc__.partition("\n")[0])).add_argument
    add("--dp", type=int, default=-1, help="ranks that work on different samples")
    add("--tp", type=int, default=1, help="ranks that share the matrices of a layer")
    add("--pp", type=int, default=1, help="stages of the pipeline")
    add("--cp", type=int, default=1, help="ranks that work on different positions of a sample")
    add("--zero", type=int, default=0, help="what ranks divide: 1 state, 2 gradients, 3 parameters")
    add("--schedule", default="1f1b", help="gpipe, 1f1b, interleaved or zero_bubble")
    add("--chunks", type=int, default=1, help="parts of a stage, for interleaved")
    add("--recompute", default="none", help="in the backward pass: none, attention or blocks")
    add("--dtype", default="float32", choices=["bfloat16", "float32", "float64"], help="of parameters")
    sizes = {"layers": 4, "hidden": 128, "heads": 4, "sequence": 128, "vocabulary": 256, "batch": 16, "microbatches": 1}
    for name, default in {**sizes, "seed": 0, "steps": 100, "show": 10, "every": 100}.items():
        add(f"--{name}", type=int, default=default)
    add("--untied", dest="tied", action="store_false", help="a matrix of scores beside the embedding")
    add("--rate", type=float, default=3e-3, help="the largest learning rate")
    add("--state", type=Path, help="a file from which to go on, and to which the state is saved every --every steps")
    add("--losses", help="a text file for the losses and the norms")
    return parser.parse_args(words)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except PdgemmError as bad:  # raised on all ranks: one line, and exit code 2
        sys.exit(bad)
