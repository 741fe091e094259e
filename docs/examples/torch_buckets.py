"""A PyTorch model on several ranks: `Buckets` reduces its gradients, without a copy, while the backward pass goes on.

Parameters and gradients of the model lie in flat storage of the package, which torch and NumPy share by DLPack.  When
the backward pass has completed a gradient, a hook of its parameter calls `buckets.ready`, and the last one of a bucket
starts its reduction.  `ShardedOptimizer` updates the parameters where they lie, and `--zero 1` divides its state among
the ranks.  With `--compare` torch's DistributedDataParallel on gloo trains the same network beside it.
"""

import argparse
import platform
import sys
from contextlib import contextmanager
from functools import partial

import numpy as np
from sklearn.datasets import load_digits

from pdgemm import PdgemmError, parallel
from pdgemm.errors import ArgumentError

try:
    import torch
    from torch import nn
except ImportError:
    torch = None


def shared_buckets(mesh, model, stage=0, **how):
    """Return buckets whose parameters and gradients are those of a model of torch, in the same memory.  Collective."""
    if stage not in (0, 1):
        raise ArgumentError(f"gradients have a place of their own with stages 0 and 1, got stage {stage!r}")
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}  # in the order of the forward pass
    buckets = parallel.Buckets(mesh, {x: np.from_dlpack(p.detach()) for x, p in trained.items()}, stage=stage, **how)
    for name, p in trained.items():
        p.data = torch.from_dlpack(buckets.parameters[name])
        p.grad = torch.from_dlpack(buckets.gradients[name])  # torch adds to it
        p.register_post_accumulate_grad_hook(partial(say_ready, buckets, name))
    return buckets


def say_ready(buckets, name, p):
    """Tell buckets that a gradient is complete.  `zero_grad()` has let torch take other memory: then it is added."""
    own = buckets.gradients[name]
    if p.grad.data_ptr() != own.ctypes.data:
        own += np.from_dlpack(p.grad)
        p.grad = torch.from_dlpack(own)
    buckets.ready(name)


def network(dtype):
    """Return a network for images of 8 x 8 pixels, the same on all ranks."""
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(192, 64), nn.ReLU()
    return nn.Sequential(*layers, nn.Linear(64, 10)).to(dtype)


def steps(options, mesh, x, labels):
    """Yield a function of a model for each step: this rank's addend of the mean loss of the batch of all ranks."""
    for microbatches in parallel.Sampler(len(x), options.batch).shares(mesh, range(options.steps)):
        rows = torch.from_numpy(np.concatenate(microbatches))
        yield (
            lambda model, rows=rows: (
                nn.functional.cross_entropy(model(x[rows]), labels[rows], reduction="sum") / options.batch
            )
        )


def by_buckets(options, mesh, x, labels):
    """Train; return the model, and the losses.  Collective."""
    model, losses = network(x.dtype), []
    buckets = shared_buckets(mesh, model, options.zero)
    optimizer = parallel.ShardedOptimizer(buckets, parallel.SGD(momentum=0.9))
    for loss_of in steps(options, mesh, x, labels):
        dict(buckets.parameters)  # waits for what other ranks have updated
        loss = loss_of(model)
        loss.backward()  # meanwhile the hooks reduce buckets
        optimizer.step(options.rate)
        losses.append(mesh.sum(loss.item())[0])
    dict(buckets.parameters)
    return model, losses


@contextmanager
def gloo(mesh):
    """Let torch send by gloo between the ranks of a mesh, in the block.  Collective."""
    host, store = platform.node(), None
    if mesh.rank == 0:
        store = torch.distributed.TCPStore(host, 0, mesh.shape.size, True, wait_for_workers=False)
    host, port = mesh.comm.bcast((host, store and store.port))
    store = store or torch.distributed.TCPStore(host, port, mesh.shape.size, False)
    torch.distributed.init_process_group("gloo", store=store, rank=mesh.rank, world_size=mesh.shape.size)
    yield
    torch.distributed.destroy_process_group()


def by_ddp(options, mesh, x, labels):
    """Train by torch alone; return the model, and the losses.  Collective."""
    with gloo(mesh):
        model, losses = nn.parallel.DistributedDataParallel(network(x.dtype)), []
        optimizer = torch.optim.SGD(model.parameters(), lr=options.rate, momentum=0.9)
        for loss_of in steps(options, mesh, x, labels):
            optimizer.zero_grad()
            loss = loss_of(model)
            (loss * mesh.shape.size).backward()  # the sum of the gradients is divided by the ranks
            optimizer.step()
            losses.append(mesh.sum(loss.item())[0])
    return model.module, losses


def main(*words):
    options = parsed(words)
    if torch is None:
        raise ArgumentError("torch is not installed: pip install torch")
    x, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(x))
    x = torch.from_numpy(x[order].reshape(-1, 1, 8, 8) / 16).to(getattr(torch, options.dtype))
    labels = torch.from_numpy(labels[order])
    with parallel.Mesh(dp=-1) as mesh:
        model, losses = by_buckets(options, mesh, x[:1500], labels[:1500])
        with torch.no_grad():
            right = (model(x[1500:]).argmax(1) == labels[1500:]).double().mean()
        if mesh.rank == 0:
            for step in range(50, options.steps + 1, 50):
                print(f"step {step}: loss {losses[step - 1]:.3f}")
            print(f"{right:.0%} of {len(x) - 1500} digits that were held out are read right")
        if options.compare:
            other, others = by_ddp(options, mesh, x[:1500], labels[:1500])
            pairs = zip(model.parameters(), other.parameters())
            apart = np.abs(np.subtract(losses, others)).max(), max((p - q).abs().max().item() for p, q in pairs)
            if mesh.rank == 0:
                print("by DistributedDataParallel: losses differ by {:.0e}, parameters by {:.0e}".format(*apart))


def parsed(words):
    add = (parser := argparse.ArgumentParser(description=__doc__.partition("\n")[0])).add_argument
    add("--steps", type=int, default=150)
    add("--batch", type=int, default=60, help="samples of a step, on all ranks together")
    add("--rate", type=float, default=0.1, help="the learning rate")
    add("--zero", type=int, default=0, help="1: ranks divide the state of the optimizer")
    add("--dtype", choices=["float32", "float64"], default="float32")
    add("--compare", action="store_true", help="train by DistributedDataParallel on gloo, too")
    return parser.parse_args(words)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except PdgemmError as bad:  # raised on all ranks: one line, and exit code 2
        sys.exit(bad)
