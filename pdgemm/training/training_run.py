"""A model on a mesh: its steps, its optimizer, and its whole parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from pdgemm.errors import ArgumentError
from pdgemm.instrument.recorder import Traffic
from pdgemm.parallel.mesh import Mesh
from pdgemm.support.agreement import agree, together
from pdgemm.support.watchdog import ending_the_job
from pdgemm.training.parameters import Parameters, unit_of
from pdgemm.training.stages import Pipeline
from pdgemm.training.states.whole_states import RunStates
from pdgemm.training.updates import Rule, Updates

# begin the names of what freed parameters have, too
_DESCRIBING = "shape", "size", "dim", "ndim", "numel", "dtype", "device", "requires", "is_", "new_", "untyped", "data_"
Loss = Callable[..., torch.Tensor]
Weight = Callable[..., float]


@dataclass(frozen=True)
class StepReport:
    """The last step of a rank.

    loss, norm : the mean loss, and the norm of the gradients, the same numbers on all ranks.
    seconds    : of the step on this rank.   waited : those of them in which the rank waited for messages.
    traffic    : the words and messages that this rank sent and received, by kind.
    """

    loss: float
    norm: float
    seconds: float
    waited: float
    traffic: dict[str, Traffic]


class Run(RunStates):
    """A model on a mesh, and its steps; `distribute` makes it.

    parameters : of this rank, by name.   storages : their elements and gradients, by line and type.
    frozen     : the parameters that had no gradient when the model was distributed, and may not get one later.
    updates    : the rules, and the parts of parameters that this rank updates.   pipeline : the passes of a step.
    norm : of the gradients of the last step.   steps : their number, of this run and of the runs that it continues.
    report     : of the last step, after the first one.
    """

    report: StepReport

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        parameters: Parameters,
        updates: Updates,
        pipeline: Pipeline,
        loss: Loss | None,
        weight: Weight | None,
        lazy: bool,
    ) -> None:
        self.model, self.mesh, self.parameters, self.storages = model, mesh, parameters, updates.storages
        self.updates, self.pipeline, self.chain, self.schedule = updates, pipeline, pipeline.chain, pipeline.schedule
        self._context, self._loss, self._weight, self._lazy = pipeline.context, loss, weight, lazy
        self.norm, self.steps = 0.0, 0
        self.frozen, self._unfrozen = [x for x in parameters if not parameters[x].parameter.requires_grad], list[str]()
        self._names = {id(x.parameter): name for name, x in parameters.items()}
        mesh.line("pp+dp+cp+tp")  # for the sums of a step
        self._context.add_gradient = self._add_gradient
        for x in self.storages:
            x.delayed = self.schedule.split or any(len({*parameters[name].chunks}) > 1 for name in x.parameters)
        if lazy or any(x.layout.stage == 3 for x in self.storages):
            self._gather_in_passes()
            self._context.check = self._check_whole

    def optimizer(
        self, rule: Rule | Mapping[str, Rule], groups: Mapping[str, Mapping[str, Any]] | None = None, **options: Any
    ) -> Any:
        """Return a rule of torch for this rank's parts of the parameters, which `step` applies.  Collective.

        rule   : an optimizer, such as torch.optim.AdamW; or patterns of parameter names and optimizers, such as
            {"blocks.*.weight": partial(torch.optim.Muon, lr=0.02), "*": torch.optim.AdamW}, of which a list is
            returned.  The first pattern that matches counts, and each parameter needs one.
        groups : patterns of parameter names, and the options of the rule for these parameters; the first pattern that
            matches counts.   options : of the rules, for all parameters.

        Schedulers of torch can change the rate of a rule.  With zero > 0 a rule has the state of this rank's parts.
        One that does not update each element by itself needs whole=True in `distribute`, unless each rank has all
        elements.  A second call replaces the rules, and their state is lost.
        Raises ArgumentError on all ranks where no parameter matches a pattern, where a parameter has no rule, for
        LBFGS, and where Muon or Adafactor would get parts of matrices.
        """
        rules, groups = dict(rule) if isinstance(rule, Mapping) else {"*": rule}, dict(groups or {})
        with together(self.mesh.comm) as arguments:
            arguments += ["optimizer", *map(str, (*rules.items(), *groups.items(), *options.items()))]
            chosen = self.updates.choose(rules, groups, options)
        self.updates.use(*chosen)
        return self.updates.optimizers if isinstance(rule, Mapping) else self.updates.optimizers[0]

    def step(self, *batch: torch.Tensor, clip: float | None = None) -> float:
        """Carry out a step on a batch, and return its mean loss, the same number on all ranks.  Collective.

        batch : tensors of this replica's samples; all ranks along tp, cp and pp pass the same.
        clip  : the largest norm of the gradients; larger ones are scaled, as by torch.nn.utils.clip_grad_norm_.

        An exception of one rank ends the job, after this rank has printed its traceback.
        """
        with ending_the_job(self.mesh.comm):
            before = {kind: replace(x) for kind, x in self.mesh.traffic.items()}
            start, waited = perf_counter(), self.mesh.recorder.seconds.get("wait", 0.0)
            sums = self._reduced(batch)
            self._check(*sums[:6])
            used = {name for name, number in zip(self.updates.names, sums[7:]) if number}
            loss, self.norm = sums[0], self.updates.update(sums[6], clip, used)
            for storage in self.storages if not self._lazy else ():
                storage.complete()
            self.steps += 1
            seconds, waited = perf_counter() - start, self.mesh.recorder.seconds.get("wait", 0.0) - waited
            traffic = {kind: x - before.get(kind, Traffic()) for kind, x in self.mesh.traffic.items()}
            self.report = StepReport(loss, self.norm, seconds, waited, traffic)
        return loss

    def _reduced(self, batch: tuple[torch.Tensor, ...]) -> list[float]:
        """Compute the gradients of a step, and return sums over all ranks.

        The first six are the arguments of `_check`; then follow the sum of squared gradients, and for each parameter
        the number of ranks on which the loss depends on it.
        """
        mesh, passes, self._context.has_attended = self.mesh, _Step(self, batch), False
        for storage in self.storages:
            storage.begin_step()
        self.pipeline.run(passes)
        for storage in self.storages:
            storage.finish()
        of_first = passes.total if mesh.index("tp") == mesh.index("cp") == 0 else 0.0
        squares = sum(x.squares() / x.copies for x in self.storages)
        copied = sum(x.squares() for x in self.storages if x.copies > 1)
        of_copies = copied if mesh.index("tp") == 0 else 0.0
        self._unfrozen = [name for name in self.frozen if self.parameters[name].parameter.requires_grad]
        different = sum(x.difference(self._context.tp) for x in self.storages) + len(self._unfrozen)
        received = set[str]().union(*(x.received for x in self.storages))
        uses = [float(name in received) for name in self.updates.names]
        numbers = of_first, passes.total, of_copies, copied, self._context.has_attended, different, squares
        return mesh.sum(*numbers, *uses)

    def evaluate(self, *batch: torch.Tensor) -> float:
        """Return the mean loss of a batch, the same number on all ranks, without gradients.  Collective.

        batch : as of `step`.   Modules such as dropout compute as in training unless `run.model.eval()` was called.
        """
        with ending_the_job(self.mesh.comm):
            passes = _Step(self, batch)
            self.pipeline.evaluate(passes)
            (loss,) = self.mesh.sum(passes.total if self.mesh.index("tp") == self.mesh.index("cp") == 0 else 0.0)
        return loss

    def _check(
        self, loss: float, of_all: float, of_copies: float, copied: float, attended: float, different: float
    ) -> None:
        """Raise ArgumentError on all ranks where the loss is not that of the whole model, or copies differ.

        loss : of the first ranks along tp and cp.   of_all : the sum of the losses of all ranks along tp and cp.
        of_copies : the sum of squared gradients of parameters that all ranks along tp have, of the first ranks along
            tp.   copied : of all ranks.
        attended : the number of ranks that used the keys of all ranks along cp.
        different : the sum of `Storage.difference`, and of the numbers of parameters that may not have a gradient.
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
        elif self._unfrozen:
            error = f"{', '.join(self._unfrozen)} was frozen in distribute: unfreeze before it, and freeze afterwards"
        if error or different:
            agree(self.mesh.comm, ArgumentError(error) if error else None)

    def whole(self, name: str) -> torch.Tensor:
        """Return a copy of a whole parameter of this stage.  Collective over the ranks that have a part of it."""
        stored = self.parameters[name]
        self._gather([name])
        part = stored.parameter.detach().clone()
        for storage in self.storages:
            storage.free([name])
        if not stored.division.axis:
            return part
        return stored.division.joined(self.mesh.line(stored.division.axis).comm.allgather(part))

    def expected(self, *batch: torch.Tensor) -> dict[str, Traffic]:
        """Return the traffic of a step of this rank by kind, from the formulas of its exchanges.  Collective.

        batch : tensors of the sizes of a step's: this rank computes the passes of a step, in which nothing is moved and
            no parameter changes.  Without a batch only traffic of gradients, parameters and owners is returned.
        """
        total = {"gradients": Traffic(), "parameters": Traffic()}
        if batch:
            with ending_the_job(self.mesh.comm), self.mesh.counting() as counted, torch.random.fork_rng(devices=[]):
                self._reduced(batch)
            total = {**counted, **total}
        if owners := self.updates.owners:
            total["owners"] = sum((x.traffic() for x in owners), Traffic())
        for storage in self.storages:
            for kind, traffic in storage.traffic(self.schedule.microbatches).items():
                total[kind] += traffic
        return total

    def bytes(self, state_words: int = 2) -> dict[str, int]:
        """Return the bytes that this rank keeps between steps, from formulas: parameters, gradients, and optimizer.

        state_words : the numbers that the optimizer keeps for each element; 2 for Adam and AdamW.
        """
        at_owners, kinds = self.updates.whole_names, Counter[str]()
        for storage in self.storages:
            kept = 0 if at_owners.intersection(storage.parameters) else state_words
            kinds.update(storage.layout.bytes(storage.line.rank, kept))
        for owners in self.updates.owners:
            kinds.update(owners.bytes(state_words))
        kinds["parameters"] += sum(self.parameters[name].parameter.nbytes for name in self.frozen)
        return dict(kinds)

    def _add_gradient(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        name = self._names[id(parameter)]
        next(x for x in self.storages if name in x.parameters).add(name, gradient)

    def _check_whole(self, function: Any, arguments: Iterable[Any]) -> None:
        """Raise ArgumentError for a function that would read freed memory, or elements of the last step."""
        called = getattr(getattr(function, "__self__", function), "__name__", "")
        flat = [y for x in arguments for y in (x if isinstance(x, list | tuple) else [x])]
        for name in () if called.startswith(_DESCRIBING) else filter(None, map(self._names.get, map(id, flat))):
            if not all(storage.is_whole(name) for storage in self.storages):
                only = "with zero = 3 or lazy it is whole only in their calls: call an nn.Linear with the same weight"
                raise ArgumentError(f"{name!r} is used outside of its modules, and {only}")

    def _gather_in_passes(self) -> None:
        """Make the parameters of a unit whole before each pass through it, and free them afterwards."""
        units = dict[str, dict[str, None]]()
        for name, stored in self.parameters.items():
            for user in stored.modules:
                units.setdefault(unit_of(self.model, user), {})[name] = None
        for unit, names in units.items():
            module = self.model.get_submodule(unit)
            module.register_forward_pre_hook(partial(self._begin_forward, unit, [*names]))
            module.register_forward_hook(partial(self._end_forward, unit, [*names]), always_call=True)

    def _gather(self, names: list[str], *_: Any) -> None:
        for storage in self.storages:
            storage.gather(names)

    def _begin_forward(self, unit: str, names: list[str], *_: Any) -> None:
        if not self.chain or self.chain.computes(unit):
            self._gather(names)

    def _end_forward(self, unit: str, names: list[str], module: nn.Module, inputs: Any, output: Any) -> None:
        if self.chain and not self.chain.computes(unit):
            return
        for y in tree_leaves(getattr(output, "part", output)):
            if isinstance(y, torch.Tensor) and y.requires_grad:
                y.register_hook(partial(self._gather, names))
        if torch._C._current_graph_task_id() == -1:  # the forward pass is not recomputed in a backward pass
            for storage in self.storages:
                storage.free(names)


class _Step:
    """The passes of a step: see `pdgemm.training.stages.StepPasses`.

    total : the part of this rank's samples in the mean loss; 0 on all stages but the last.
    """

    def __init__(self, run: Run, batch: tuple[torch.Tensor, ...]) -> None:
        self._run, self.total = run, 0.0
        self._batches = [*zip(*(x.tensor_split(run.schedule.microbatches) for x in batch))]
        self._weights = [float(run._weight(*x)) if run._weight else float(len(x[0])) for x in self._batches]
        if not all(len(x[0]) for x in self._batches):
            raise ArgumentError(f"{len(batch[0])} samples are too few for {len(self._batches)} microbatches")
        self._totals = run.mesh.sum(*self._weights, axis="dp")
        self._weight = sum(self._totals)
        self._scale = run.updates.scale.value if run.updates.scale else 1.0
        if not self._weight > 0:
            raise ArgumentError(f"the weights of all samples add up to {self._weight}, which must be more than 0")
        if not all(self._weights):
            raise ArgumentError("a microbatch has the weight 0: give each replica samples with weights")

    def model(self, microbatch: int) -> Any:
        run, inputs = self._run, self._batches[microbatch]
        run._context.begin(inputs[0].shape[1] if inputs[0].dim() > 1 else 1)
        run._context.share = self._totals[microbatch] / self._weight * self._scale
        with run._context.active():
            return run.model(*(inputs[:1] if run._loss else inputs))

    def loss(self, microbatch: int, result: Any) -> torch.Tensor:
        run = self._run
        with run._context.active():
            loss = run._loss(result, *self._batches[microbatch][1:]) if run._loss else _loss_in(result)
        share = self._weights[microbatch] / self._weight
        self.total += float(loss.detach()) * share
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * (share * self._scale)

    def begin_gradients(self, microbatch: int) -> None:
        for storage in self._run.storages:
            storage.last = microbatch == len(self._batches) - 1

    def end_inputs(self, chunk: int) -> None:
        for storage in self._run.storages:
            storage.free([name for name in storage.parameters if self._run.parameters[name].chunks[0] == chunk])

    def end_gradients(self, chunk: int) -> None:
        for storage in self._run.storages:
            storage.end_pass([name for name in storage.parameters if self._run.parameters[name].chunks[0] == chunk])


def _loss_in(result: Any) -> torch.Tensor:
    """Return the loss in what a model returns."""
    if isinstance(result, torch.Tensor):
        return result
    if isinstance(result, tuple):
        return _loss_in(result[-1])
    loss: torch.Tensor = result["loss"] if isinstance(result, Mapping) else result.loss
    return loss
