"""A GPT that learns to write Python's own documentation, byte by byte: the same losses on any mesh of ranks.

    mpirun -n 8 python -m pdgemm docs/examples/gpt/train.py --dp 2 --tp 2 --pp 2 --steps 100

The model in model.py is plain torch, and `table` says how its layers are divided.  The text is `pydoc_data.topics`,
what `help("topics")` shows: 466,000 bytes.
"""

import argparse
import math
import sys
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

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
    """Return the model on its mesh, and its optimizers.  Collective."""
    mesh = Mesh(comm, dp=options.dp, tp=options.tp, pp=options.pp, cp=options.cp)
    how = {name: getattr(options, name) for name in ("zero", "schedule", "microbatches", "chunks", "recompute")}
    muon, adamw = options.optimizer == "muon", partial(torch.optim.AdamW, betas=(0.9, 0.95))
    run = distribute(model_of(options), mesh, table(options.heads), blocks="blocks", whole=muon, **how)
    rules = {"*": adamw}
    if muon:  # it updates the matrices of blocks
        of_matrices = partial(torch.optim.Muon, adjust_lr_fn="match_rms_adamw")
        rules = {"*norm*": adamw, "blocks.*.weight": of_matrices, "*": adamw}
    decays = {pattern: {"weight_decay": 0.0} for pattern in ("*norm*", "*bias")}  # only matrices decay
    return run, run.optimizer(rules, decays, lr=options.rate, weight_decay=0.1)


def steps(options, run, optimizers):
    """Yield the number of each step, after it, and the batch of this replica.  Collective."""
    text = np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)
    samples = np.lib.stride_tricks.sliding_window_view(text, options.sequence + 1)  # of one byte more, for labels
    sampler, last = Sampler(len(samples), options.batch, options.seed), options.steps
    if options.state and options.state.exists():
        run.load(options.state, sampler=sampler)
    for step in range(run.steps, last):
        rows = np.array_split(sampler.rows(step), run.mesh.length("dp"))[run.mesh.index("dp")]
        own = torch.from_numpy(samples[rows].astype(np.int64))
        # the rate grows for a tenth of the steps, and then falls by a cosine
        for group in (x for rule in optimizers for x in rule.param_groups):
            group["lr"] = options.rate * min(10 * (step + 1) / last, (1 + math.cos(math.pi * step / last)) / 2)
        run.step(*(batch := (own[:, :-1], own[:, 1:])), clip=1.0)
        if options.state and ((step + 1) % options.every == 0 or step + 1 == last):
            run.save(options.state, sampler=sampler)
        yield step + 1, batch


def training(words, comm=None):
    """Yield the run after each step: what `pdgemm scaling --train` measures.  Collective over comm."""
    options = parsed(words)
    run, optimizers = begun(options, comm)
    for _ in steps(options, run, optimizers):
        yield run


def report(run, batch):
    """Return lines with the seconds of the last step, and with its words beside those of formulas.  Collective."""
    last, expected = run.report, run.expected(*batch)
    lines = [f"a step takes {last.seconds:.3f} s, of which rank 0 waits for {last.waited:.3f} s"]
    for kind in "gradients", "parameters", "tensor", "context", "pipeline":
        words = run.mesh.sum(*(x[kind].words_received if kind in x else 0 for x in (last.traffic, expected)))
        if any(words):
            lines.append("{}: {:,.0f} words received by all ranks, {:,.0f} by formula".format(kind, *words))
    return lines


def sample(options, run, count=200):
    """Return a text that the model writes, on rank 0, which receives all parameters.  Collective."""
    model, state = model_of(options), run.state_dict()
    if run.mesh.rank:
        return ""
    model.load_state_dict(state)
    return bytes(model.written(torch.tensor([*b"The "]), count).tolist()).decode(errors="replace")


def main(*words):
    options = parsed(words)
    run, optimizers = begun(options)
    for step, batch in steps(options, run, optimizers):
        if run.mesh.rank == 0 and step % options.show == 0:
            print(f"step {step}: loss {run.report.loss:.4f}, norm of the gradients {run.report.norm:.4f}")
        if options.report and step == options.steps:
            lines = [*report(run, batch), sample(options, run)]
            if run.mesh.rank == 0:
                print(*lines, sep="\n")


def parsed(words):
    add = (parser := argparse.ArgumentParser(description=__doc__.partition("\n")[0])).add_argument
    axes = {"dp": "samples", "tp": "the matrices of a layer", "pp": "blocks, in stages", "cp": "positions"}
    for axis, what in axes.items():
        add(f"--{axis}", type=int, default=-1 if axis == "dp" else 1, help=f"ranks that divide {what}")
    add("--zero", type=int, default=0, help="what ranks divide: 1 state, 2 gradients, 3 parameters")
    add("--schedule", default="1f1b", help="gpipe, 1f1b, interleaved or zero_bubble")
    add("--chunks", type=int, default=1, help="parts of a stage, for interleaved")
    add("--recompute", default="none", help="in the backward pass: none, attention or blocks")
    add("--optimizer", default="adamw", choices=["adamw", "muon"], help="of the matrices of blocks")
    add("--dtype", default="float32", choices=["bfloat16", "float32", "float64"], help="of parameters")
    sizes = {"layers": 4, "hidden": 128, "heads": 4, "sequence": 128, "vocabulary": 256, "batch": 16, "microbatches": 1}
    for name, default in {**sizes, "seed": 0, "steps": 100, "show": 10, "every": 100}.items():
        add(f"--{name}", type=int, default=default)
    add("--untied", dest="tied", action="store_false", help="a matrix of scores beside the embedding")
    add("--rate", type=float, default=3e-3, help="the largest learning rate")
    add("--state", type=Path, help="a file from which to go on, and to which the state is saved every --every steps")
    add("--no-report", dest="report", action="store_false", help="print neither words nor a text at the end")
    return parser.parse_args(words)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except PdgemmError as bad:  # raised on all ranks: one line, and exit code 2
        sys.exit(bad)
