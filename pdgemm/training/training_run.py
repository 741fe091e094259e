"""A model on a mesh: its steps, its optimizer, and its whole parameters."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from math import isfinite
from time import sleep
from typing import Any

import torch
from mpi4py import MPI
from torch import nn
from torch.utils._pytree import tree_leaves

from pdgemm.errors import ArgumentError
from pdgemm.instrument.recorder import Traffic
from pdgemm.schedules.collectives.collective import sum_of_numbers
from pdgemm.schedules.training.pipeline_schedule import PipelineSchedule
from pdgemm.support import watchdog
from pdgemm.support.agreement import agree, raised_on, together
from pdgemm.support.files import write_line
from pdgemm.training.layers.context import Context
from pdgemm.training.loss_scale import LossScale
from pdgemm.training.mesh import Mesh
from pdgemm.training.owners import Owners
from pdgemm.training.parameters import DividedParameter, storages_of, unit_of
from pdgemm.training.stages import Chain, Pipeline
from pdgemm.training.storage import Storage, UpdatedPart

_HEAD_START = 0.3  # seconds that rank 1 waits before it ends the job; ranks 2 and 3 wait twice as long, ...
WHOLE = {"Adafactor", "Muon"}  # rules of torch that depend on the shapes of parameters
Rule = Callable[..., torch.optim.Optimizer]
Loss = Callable[..., torch.Tensor]
Weight = Callable[..., float]


class Run:
    """A model on a mesh, and its steps; `distribute` makes it.

    parameters : of this rank, by name.   storages : their elements and gradients, by line and type.
    pipeline   : the passes of a step.   norm : of the gradients of the last step.   scale : of the loss, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        parameters: Mapping[str, DividedParameter],
        context: Context,
        chain: Chain | None,
        schedule: PipelineSchedule,
        zero: int,
        loss: Loss | None,
        weight: Weight | None,
        bucket_bytes: int,
        whole: bool = False,
        scale: LossScale | None = None,
    ) -> None:
        self.model, self.mesh, self.parameters, self.schedule = model, mesh, parameters, schedule
        self.norm, self._context, self._loss, self._weight = 0.0, context, loss, weight
        self.scale, self._whole = scale, whole
        self.storages = storages_of(parameters, model, mesh, zero, bucket_bytes, whole)
        self.pipeline = Pipeline(mesh.line("pp", "pipeline"), chain, schedule, context)
        self._names = [name for name, _ in model.named_parameters()]  # of all stages
        self._optimizers, self._pieces, self._owners = (
            list[torch.optim.Optimizer](),
            list[UpdatedPart](),
            list[Owners](),
        )
        mesh.line("pp+dp+cp+tp")  # for the sums of a step
        context.add_gradient = self._add_gradient
        for storage in self.storages:
            storage.delayed = schedule.split or any(len({*parameters[x].chunks}) > 1 for x in storage.parameters)
        if zero == 3:
            self._gather_in_passes()

    def optimizer(
        self, rule: Rule | Mapping[str, Rule], groups: Mapping[str, Mapping[str, Any]] | None = None, **options: Any
    ) -> Any:
        """Return a rule of torch for this rank's parts of the parameters, which `step` applies.  Collective.

        rule   : an optimizer, such as torch.optim.AdamW; or patterns of parameter names and optimizers, such as
            {"blocks.*.weight": partial(torch.optim.Muon, lr=0.02), "*": torch.optim.AdamW}, of which a list is
            returned.  The first pattern that matches counts, and each parameter needs one.
        groups : patterns of parameter names, and the options of the rule for these parameters; the first pattern that
            matches counts.   options : of the rules, for all parameters.

        Schedulers of torch can change its rate.  With zero > 0 its state is that of this rank's parts.  A rule that
        does not update each element by itself needs whole=True in `distribute`, unless each rank has all elements.
        A second call replaces the rules, and their state is lost.
        Raises ArgumentError on all ranks where no parameter matches a pattern, where a parameter has no rule, for
        LBFGS, and where Muon or Adafactor would get parts of matrices.
        """
        rules, patterns = dict(rule) if isinstance(rule, Mapping) else {"*": rule}, dict(groups or {})
        divided = [x for x in self.storages if self._whole and self._is_divided(x)]
        owners = [Owners(self._context.tp, x, self.parameters) for x in divided]
        pieces = [piece for x in self.storages if x not in divided for piece in x.pieces()]
        pieces += [piece for x in owners for piece in x.pieces]
        with together(self.mesh.comm) as arguments:
            arguments += [
                "optimizer",
                *map(str, rules.items()),
                *map(str, patterns.items()),
                *map(str, options.items()),
            ]
            for pattern in (*rules, *patterns):
                if not any(fnmatchcase(name, pattern) for name in self._names):
                    raise ArgumentError(f"no parameter matches {pattern!r}; parameters are {', '.join(self._names)}")
            by_rule: dict[str | None, list[UpdatedPart]] = {pattern: [] for pattern in rules}
            for piece in pieces:
                by_rule.setdefault(_first_match(piece.name, rules), []).append(piece)
            if None in by_rule:
                raise ArgumentError(f"no rule matches {by_rule[None][0].name!r}: add one, such as for the pattern '*'")
            optimizers = [self._ruled(rules[x], by_rule[x], patterns, options) for x in rules]
        self._optimizers, self._pieces, self._owners = optimizers, pieces, owners
        for x in owners:
            x.read()
        return optimizers if isinstance(rule, Mapping) else optimizers[0]

    def _ruled(
        self,
        rule: Rule,
        pieces: list[UpdatedPart],
        patterns: Mapping[str, Mapping[str, Any]],
        options: Mapping[str, Any],
    ) -> torch.optim.Optimizer:
        """Return a rule for parts of parameters.  Raises ArgumentError."""
        kind: Any = getattr(rule, "func", rule)  # of a partial function
        names = {getattr(x, "__name__", "") for x in getattr(kind, "__mro__", [kind])}
        if "LBFGS" in names:
            raise ArgumentError("LBFGS computes the loss several times for an update, and a step computes it once")
        for piece in pieces if names & WHOLE else ():
            if piece.weights.shape != self.parameters[piece.name].shape:
                why = "which ep divides" if self._whole else "unless distribute(..., whole=True) gives it all of it"
                raise ArgumentError(
                    f"{kind.__name__} updates whole matrices, and this rank has a part of {piece.name!r}, {why}"
                )
        by_pattern: dict[str | None, list[nn.Parameter]] = {pattern: [] for pattern in (*patterns, None)}
        for piece in pieces:
            by_pattern[_first_match(piece.name, patterns)].append(piece.weights)
        by_pattern[None] = by_pattern[None] or [nn.Parameter(torch.zeros(0, 0))]  # a rule needs a parameter
        listed = [{"params": x, **(patterns[k] if k else {})} for k, x in by_pattern.items()]  # alike on all ranks
        return rule(listed, **options)

    def _is_divided(self, storage: Storage) -> bool:
        """Return whether a storage has parts along tp of its parameters."""
        return self._context.tp.size > 1 and self.parameters[storage.layout.names[0]].division.axis == "tp"

    def step(self, *batch: torch.Tensor, clip: float | None = None) -> float:
        """Carry out a step on a batch, and return its mean loss, the same number on all ranks.  Collective.

        batch : tensors of this replica's samples; all ranks along tp, cp and pp pass the same.
        clip  : the largest norm of the gradients; larger ones are scaled, as by torch.nn.utils.clip_grad_norm_.

        An exception of one rank ends the job, after this rank has printed its traceback.
        """
        with _ending_the_job(self.mesh.comm):
            mesh, passes = self.mesh, _Step(self, batch)
            for storage in self.storages:
                storage.begin_step()
            self.pipeline.run(passes)
            for storage in self.storages:
                storage.finish()
            total = passes.total if mesh.index("pp") == self.schedule.stages - 1 else 0.0
            of_first = total if mesh.index("tp") == mesh.index("cp") == 0 else 0.0
            squares = sum(x.squares() / x.copies for x in self.storages)
            copied = sum(x.squares() for x in self.storages if x.copies > 1)
            of_copies = copied if mesh.index("tp") == 0 else 0.0
            different = sum(x.difference(self._context.tp) for x in self.storages)
            received = set[str]().union(*(x.received for x in self.storages))
            uses = [float(name in received) for name in self._names]
            numbers = of_first, total, of_copies, copied, self._context.has_attended, different, squares
            sums = mesh.sum(*numbers, *uses)
            self._check(*sums[:6])
            self._update(sums[6], clip, {name for name, n in zip(self._names, sums[7:]) if n})
        return sums[0]

    def _check(
        self, loss: float, of_all: float, of_copies: float, copied: float, attended: float, different: float
    ) -> None:
        """Raise ArgumentError on all ranks where the loss is not that of the whole model, or copies differ.

        loss : of the first ranks along tp and cp.   of_all : the sum of the losses of all ranks along tp and cp.
        of_copies : the sum of squared gradients of parameters that all ranks along tp have, of the first ranks along
            tp.   copied : of all ranks.
        attended : the number of ranks that used the keys of all ranks along cp.   different : of `Storage.difference`.
        """
        shape, error = self.mesh.shape, ""
        if shape.cp > 1 and not attended:
            error = (
                f"cp = {shape.cp}, but the model has not called scaled_dot_product_attention: other attention sees the "
                "positions of this rank only"
            )
        elif abs(of_all - shape.tp * shape.cp * loss) > 1e-6 * abs(of_all):
            error = (
                f"the loss differs along tp or cp: its mean is {of_all / shape.tp / shape.cp}, and it is {loss} on the "
                "first ranks; the ranks have different samples, or the loss is not that of whole activations"
            )
        elif abs(copied - shape.tp * of_copies) > 1e-6 * copied:
            error = "gradients of parameters that are whole on all ranks along tp differ between these ranks"
        elif different and (names := [x.layout.names[0] for x in self.storages if x.differs(self._context.tp)]):
            error = f"copies of parameters differ between ranks, in the storage that begins with {', '.join(names)}"
        if error or different:
            agree(self.mesh.comm, ArgumentError(error) if error else None)

    def _update(self, square: float, clip: float | None, used: set[str]) -> None:
        """Update this rank's parts of the parameters, and make the parameters whole.

        square : the sum of squared gradients.   used : the parameters on which the loss depends; others stay as they
            are, as in torch, where they have no gradient.
        """
        scale, is_finite = self.scale.value if self.scale else 1.0, isfinite(square)
        self.norm = square**0.5 / scale
        factor = (min(1.0, clip / (self.norm + 1e-6)) if clip is not None else 1.0) / scale
        for owners in self._owners:
            owners.begin_update()
        for piece in self._pieces:
            gradient = piece.gradient.mul_(factor) if factor != 1 else piece.gradient
            piece.weights.grad = gradient if piece.name in used else None
        with torch.autocast("cpu", enabled=False):
            for optimizer in self._optimizers if is_finite or not self.scale else ():
                optimizer.step()
        if self.scale:
            self.scale.update(is_finite)
        for owners in self._owners:
            owners.end_update()
        with torch.no_grad():
            for storage in self.storages:
                storage.updated()
        torch.clear_autocast_cache()  # of parameters before the update, where a block of autocast has several steps

    def whole(self, name: str) -> torch.Tensor:
        """Return a copy of a whole parameter of this stage.  Collective over the ranks that have a part of it."""
        stored = self.parameters[name]
        for storage in self.storages:
            storage.gather([name])
        part = stored.parameter.detach().clone()
        for storage in self.storages:
            storage.free([name])
        if not stored.division.axis:
            return part
        return stored.division.joined(self.mesh.line(stored.division.axis).comm.allgather(part))

    def expected(self) -> dict[str, Traffic]:
        """Return the traffic of a step of this rank, but for activations, by kind and by formula.

        "gradients" and "parameters" are those of `FlatShards.traffic`, "owners" those of `Owners`, and "decisions" the
        loss, the norm, checks, and a number for each parameter, by which ranks learn whether it has a gradient.
        """
        total, rank, shape = {"gradients": Traffic(), "parameters": Traffic()}, self.mesh.rank, self.mesh.shape
        total["decisions"] = sum_of_numbers(7 + len(self._names), shape.size).traffic(rank)
        total["decisions"] += sum_of_numbers(1, shape.dp).traffic(self.mesh.index("dp"))
        total["owners"] = sum((y.traffic(x.rank) for x in self._owners for y in (x.to_owners, x.to_parts)), Traffic())
        for storage in self.storages:
            for kind, traffic in storage.layout.traffic(storage.line.rank, self.schedule.microbatches).items():
                total[kind] += traffic
        return total

    def _add_gradient(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        name = next(name for name, x in self.parameters.items() if x.parameter is parameter)
        next(x for x in self.storages if name in x.parameters).add(name, gradient)

    def _gather_in_passes(self) -> None:
        """Make the parameters of a unit whole before each pass through it, and free them afterwards."""
        units = dict[str, dict[str, None]]()
        for name, stored in self.parameters.items():
            for user in stored.modules:
                units.setdefault(unit_of(self.model, user), {})[name] = None
        for unit, names in units.items():
            module = self.model.get_submodule(unit)
            module.register_forward_pre_hook(partial(self._gather, [*names]))
            module.register_forward_hook(partial(self._end_forward, [*names]), always_call=True)

    def _gather(self, names: list[str], *_: Any) -> None:
        for storage in self.storages:
            storage.gather(names)

    def _end_forward(self, names: list[str], module: nn.Module, inputs: Any, output: Any) -> None:
        for y in tree_leaves(getattr(output, "part", output)):
            if isinstance(y, torch.Tensor) and y.requires_grad:
                y.register_hook(partial(self._gather, names))
        if torch._C._current_graph_task_id() == -1:  # the forward pass is not recomputed in a backward pass
            for storage in self.storages:
                storage.free(names)


class _Step:
    """The passes of a step: see `pdgemm.training.stages.StepPasses`.   total : this rank's share of the mean loss."""

    def __init__(self, run: Run, batch: tuple[torch.Tensor, ...]) -> None:
        self._run, self.total = run, 0.0
        self._batches = [*zip(*(x.tensor_split(run.schedule.microbatches) for x in batch))]
        self._weights = [float(run._weight(*x)) if run._weight else float(len(x[0])) for x in self._batches]
        if not all(len(x[0]) for x in self._batches):
            raise ArgumentError(f"{len(batch[0])} samples are too few for {len(self._batches)} microbatches")
        (self._weight,) = run.mesh.sum(sum(self._weights), axis="dp")
        if not self._weight > 0:
            raise ArgumentError(f"the weights of all samples add up to {self._weight}, which must be more than 0")
        if not all(self._weights):
            raise ArgumentError("a microbatch has the weight 0: give each replica samples with weights")

    def model(self, microbatch: int) -> Any:
        run, inputs = self._run, self._batches[microbatch]
        run._context.begin(inputs[0].shape[1] if inputs[0].dim() > 1 else 1)
        with run._context.active():
            return run.model(*(inputs[:1] if run._loss else inputs))

    def loss(self, microbatch: int, result: Any) -> torch.Tensor:
        run = self._run
        with run._context.active():
            loss = run._loss(result, *self._batches[microbatch][1:]) if run._loss else _loss_in(result)
        share = self._weights[microbatch] / self._weight
        self.total += float(loss.detach()) * share
        scale = run.scale.value if run.scale else 1.0
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * (share * scale)

    def begin_gradients(self, microbatch: int) -> None:
        for storage in self._run.storages:
            storage.last = microbatch == len(self._batches) - 1

    def end_inputs(self, chunk: int) -> None:
        for storage in self._run.storages:
            storage.free([name for name in storage.parameters if self._run.parameters[name].chunks[0] == chunk])

    def end_gradients(self, chunk: int) -> None:
        for storage in self._run.storages:
            storage.end_pass([name for name in storage.parameters if self._run.parameters[name].chunks[0] == chunk])


@contextmanager
def _ending_the_job(comm: MPI.Comm) -> Iterator[None]:
    """Return a block in which an exception of one rank ends the job: other ranks would wait for its messages.

    Where several ranks fail, higher ranks wait a little, so that only the lowest one prints.
    """
    try:
        yield
    except Exception as error:
        if comm.size == 1 or raised_on(error):
            raise
        sleep(_HEAD_START * comm.rank.bit_length())
        write_line(f"rank {comm.rank} of {comm.size}: {''.join(traceback.format_exception(error))}")
        watchdog.end_job(1)


def _first_match(name: str, patterns: Iterable[str]) -> str | None:
    return next((x for x in patterns if fnmatchcase(name, x)), None)


def _loss_in(result: Any) -> torch.Tensor:
    """Return the loss in what a model returns."""
    if isinstance(result, torch.Tensor):
        return result
    if isinstance(result, tuple):
        return _loss_in(result[-1])
    loss: torch.Tensor = result["loss"] if isinstance(result, Mapping) else result.loss
    return loss
