"""A transformer that learns to write Python's own documentation, byte by byte: the same losses on any mesh of ranks.

    mpirun -n 8 python -m pdgemm docs/examples/gpt/train.py --dp 2 --tp 2 --pp 2 --steps 100

Samples are divided along dp, layers along pp, the matrices of a layer along tp, positions along cp and experts along
ep.  The text is `pydoc_data.topics`, what `help("topics")` shows: 466,000 bytes.
"""

import argparse
import json
import sys
from pydoc_data.topics import topics
from typing import NamedTuple

import numpy as np
from accounting import expected_words, plan_of, words_of_experts
from model import Layer, Sizes, Transformer, check
from sharding import initial

from pdgemm import PdgemmError, parallel
from pdgemm.errors import ArgumentError

AXES = "dp", "tp", "pp", "cp", "ep"


def text():
    """Return the bytes of Python's documentation of its language."""
    return np.frombuffer("\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)


class Batch(NamedTuple):
    """A microbatch on one rank: samples x the positions of its cp index; its rows along tp are tokens of these.

    ids, labels : of each token.   positions, order : of each row of this rank, its position, and its number among the
        tokens of the step.
    divisor : the tokens of the step.   scale : of the loss.
    """

    samples: int
    ids: np.ndarray
    labels: np.ndarray
    positions: np.ndarray
    order: np.ndarray
    step: int
    divisor: float
    scale: float

    @property
    def tokens(self):
        return self.ids.size


class Run:
    """A training run on the ranks of a communicator; sizes and layout are options of the command line.  Collective."""

    def __init__(self, options, comm=None):
        check(options, steps=0, show=1)
        self.options, mesh = options, parallel.Mesh(comm, **{axis: getattr(options, axis) for axis in AXES})
        self.mesh, batches = mesh, options.microbatches
        self.sizes = Sizes(**{name: getattr(options, name) for name in Sizes.__dataclass_fields__})
        self.schedule = parallel.PipelineSchedule(options.schedule, mesh.shape.pp, batches, options.chunks)
        how, dtype = {"sequence": options.sequence_parallel, "seed": options.seed}, options.dtype
        kind = "float64" if dtype == "float64" else "float32"
        values = initial(self.sizes, mesh, self.schedule, dtype=kind, apart=options.same_bits, **how)
        layout = {"stage": options.zero, "microbatches": batches, "same_bits": options.same_bits}
        self.buckets = parallel.Buckets(mesh, values, dtype=dtype, **layout)
        rule, muon = parallel.AdamW(beta2=0.95, weight_decay=0.1), options.optimizer == "muon"
        self.optimizer = parallel.ShardedOptimizer(
            self.buckets,
            parallel.Muon(others=rule) if muon else rule,
            matrices=(lambda name: name.endswith(".weight")) if muon else None,  # those of layers
            scale=parallel.LossScale() if dtype == "float16" else None,
            decays=lambda name: name.endswith(("weight", "w1", "w2")),
        )
        self.model = Transformer(self.sizes, self.buckets, self.schedule, recompute=options.recompute, **how)
        self.pipeline, self.times, self.state = parallel.Pipeline(mesh, self.schedule), None, None

    def steps(self, data):
        """Yield the number of each step, the loss of a token before it, and the norm of the gradients."""
        options, mesh, last = self.options, self.mesh, self.options.steps
        if len(data) <= options.sequence:
            raise ArgumentError(
                f"a text of {len(data)} tokens has no window of {options.sequence + 1}: take a smaller --sequence"
            )
        if data.max() >= self.sizes.vocabulary:
            raise ArgumentError(
                f"the text has the token {data.max()}: --vocabulary is at least {data.max() + 1}, got "
                f"{self.sizes.vocabulary}"
            )
        numbers, first = range(last), 0
        if options.state:
            run = {"batch": options.batch, "steps": last, "seed": options.seed, **vars(self.sizes)}
            self.state = parallel.TrainingState(options.state, self.optimizer, every=options.every, attrs=run)
            numbers, first = self.state.steps(last), self.state.step
        windows = np.lib.stride_tricks.sliding_window_view(data, options.sequence + 1)
        order = "rank" if options.same_bits else "microbatch"
        sampler = parallel.Sampler(len(windows), options.batch, seed=options.seed)
        shares = sampler.shares(mesh, range(first, last), options.microbatches, order=order)
        plan, tokens = plan_of(self), options.batch * options.sequence
        model = plan.shape
        with parallel.Prefetch(mesh, (windows,), shares) as batches:
            self.times = parallel.StepTimes(
                self.optimizer,
                batches,
                expected=expected_words(self) | {"experts": lambda: words_of_experts(self.model)},
                flops=(model.flops(tokens), model.hardware_flops(tokens, options.recompute)),
                tokens=tokens,
                planned=plan.times.of_phases() if plan.microbatches else None,  # where microbatches are alike
            )
            for step, samples in zip(numbers, batches):
                with self.times.step(options.batch):
                    self.model.begin([*self.batches(step, samples)])
                    self.pipeline.run(self.model)
                    rate = parallel.warmup_cosine(step, options.rate, min(100, last // 10 + 1), last)
                    done = self.optimizer.step(rate, options.clip or None)
                loss = mesh.sum(self.model.loss, axis="pp+dp+cp")[0]
                yield step + 1, loss / (samples.divisor * options.sequence), done.norm

    def samples(self, rank=None):
        """Return the samples of each microbatch of this rank, or of another one: (first, last) of the step."""
        dp, batches = self.mesh.shape.dp, self.options.microbatches
        index, places = self.mesh.shape.index("dp", self.mesh.rank if rank is None else rank), range(batches)
        if self.options.same_bits:  # a rank has microbatches that are neighbours
            own = (index * batches + place for place in places)
        else:  # neighbouring ranks share a microbatch
            own = (place * dp + index for place in places)
        return [tuple(self.options.batch * x // (batches * dp) for x in (part, part + 1)) for part in own]

    def order(self, microbatch, rank):
        """Return the number among the tokens of the step of each row that a rank has of a microbatch."""
        shape, (first, last) = self.mesh.shape, self.samples(rank)[microbatch]
        places = self.model.context.schedule.positions(shape.index("cp", rank))
        rows = (np.arange(first, last)[:, None] * self.sizes.sequence + places).ravel()
        if not self.options.sequence_parallel:
            return rows
        return rows[parallel.block_of(len(rows), shape.tp, shape.index("tp", rank))]

    def batches(self, step, samples):
        """Yield the microbatches of this rank."""
        length, places = self.options.sequence, self.model.context.positions
        scale = self.optimizer.scale.scale if self.optimizer.scale else 1.0
        for number, (windows,) in enumerate(samples.arrays):
            tokens, order = windows.astype(np.int64), self.order(number, self.mesh.rank)
            yield Batch(
                len(tokens), tokens[:, places].ravel(), tokens[:, places + 1].ravel(), order % length, order,
                step, samples.divisor * length, scale,
            )  # fmt: skip

    def of_experts(self):
        """Return a line about the experts of all layers; empty where there are none.  Collective."""
        if not self.sizes.experts:
            return ""
        pieces = [piece for chunk in self.model.pieces for piece in chunk if isinstance(piece, Layer)]
        numbers = [(x.dropped, x.loads.sum(), x.imbalance, 1) for x in (piece.experts.statistics for piece in pieces)]
        dropped, choices, imbalance, layers = self.mesh.sum(np.sum(numbers, axis=0), axis="pp")[0]
        return (
            f"experts: {dropped / choices:.1%} of choices dropped; the most loaded one of a layer has "
            f"{imbalance / layers:.2f} times the mean"
        )


def training(words, comm):
    """Yield the times and the loss of each step: what `pdgemm scaling --train` measures.  Collective over comm."""
    run = Run(parsed(words), comm)
    for _, loss, _ in run.steps(text()):
        yield run.times, loss


def main(*words):
    options = parsed(words)
    run, losses = Run(options), {}
    if run.mesh.rank == 0 and options.draw:
        print(run.schedule.walk({"F": 1, "B": 1, "W": 1} if run.schedule.split else {"F": 1, "B": 2}))
    for step, loss, norm in run.steps(text()):
        losses[step] = loss, norm
        if run.mesh.rank == 0 and step % options.show == 0:
            print(f"step {step}: loss {loss:.4f}, norm of the gradients {norm:.4f}")
    lines = [str(run.times.report()), run.of_experts()] if options.report else []
    if run.mesh.rank == 0 and lines:
        print(*filter(None, lines), sep="\n")
    if options.losses and run.mesh.rank == 0:
        with open(options.losses, "w") as file:
            json.dump(losses, file)


def parsed(words):
    add = (parser := argparse.ArgumentParser(description=__doc__.partition("\n")[0])).add_argument
    add("--dp", type=int, default=-1, help="ranks that work on different samples")
    add("--tp", type=int, default=1, help="ranks that share the matrices of a layer")
    add("--pp", type=int, default=1, help="stages of the pipeline")
    add("--cp", type=int, default=1, help="ranks that work on different positions of a sample")
    add("--ep", type=int, default=1, help="ranks, neighbours along dp, that have different experts")
    add("--steps", type=int, default=100)
    add("--batch", type=int, default=16, help="samples of a step, on all ranks together")
    add("--microbatches", type=int, default=1, help="into which a step is divided")
    add("--schedule", default="1f1b", help="gpipe, 1f1b, interleaved or zero_bubble")
    add("--chunks", type=int, default=1, help="blocks of layers of a stage, for interleaved")
    add("--recompute", default="none", choices=["none", "selective", "full"], help="in the backward pass")
    add("--zero", type=int, default=0, help="what ranks divide: 1 state, 2 gradients, 3 parameters")
    add("--optimizer", default="adamw", choices=["adamw", "muon"], help="of the matrices of layers")
    add("--dtype", default="float32", help="of parameters: float16, bfloat16, float32, float64")
    add("--no-sequence-parallel", dest="sequence_parallel", action="store_false")
    add("--same-bits", action="store_true", help="as with dp 1, 2, 4, ...")
    sizes = Sizes.__dataclass_fields__.values()
    for field in sizes:
        if field.name == "tied":
            add("--untied", dest="tied", action="store_false", help="a matrix of scores beside the embedding")
        else:
            add("--" + field.name.replace("_", "-"), type=type(field.default), default=field.default)
    add("--rate", type=float, default=3e-3, help="the largest learning rate")
    add("--clip", type=float, default=1.0, help="the largest norm of the gradients; 0: any")
    add("--seed", type=int, default=0)
    add("--state", help="a file from which to go on")
    add("--every", type=int, default=100, help="steps after which the state is saved")
    add("--show", type=int, default=10, help="steps after which the loss is printed")
    add("--draw", action="store_true", help="draw the pipeline")
    add("--losses", help="a JSON file for losses and norms")
    add("--no-report", dest="report", action="store_false", help="print no step report")
    return parser.parse_args(words)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except PdgemmError as bad:  # raised on all ranks: one line, and exit code 2
        sys.exit(bad)
