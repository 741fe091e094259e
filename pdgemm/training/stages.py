"""The stages of a pipeline: a stage runs the whole forward pass of a model, in which only its own blocks compute.

A model has a chain of blocks, each of which takes the activations of the block before.  On a later stage the modules
before the chain return placeholders, which the first block of the stage replaces by the activations that it receives.
On an earlier stage the block after the last own one ends the forward pass.  So the model knows nothing of stages.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any, Protocol

import numpy as np
import torch
from mpi4py import MPI
from torch import nn
from torch.utils.checkpoint import checkpoint

from pdgemm.errors import ArgumentError
from pdgemm.parallel.mesh import Line
from pdgemm.schedules.training.pipeline_schedule import PipelineSchedule, layers_of
from pdgemm.schedules.training.pipeline_timeline import Handover
from pdgemm.training.layers.context import Context, autocast_type, flat_array
from pdgemm.transport.collectives import byte_requests
from pdgemm.transport.movers.arrivals import Arrival

Receive = Callable[[torch.Tensor], torch.Tensor]  # returns the received tensor, of the shape and type of its argument


class _StageEnd(Exception):
    """Ends the forward pass of a model behind the last block of a stage."""

    def __init__(self, output: torch.Tensor) -> None:
        self.output = output


class Chain:
    """The blocks of a model on a stage, and the modules before and after them.

    blocks : the name of the list or dictionary of blocks.   recompute : compute blocks again in the backward pass.
    own : the numbers of the blocks of each chunk of this stage.
    before, after : the names of the modules that are registered before and after the list.
    Raises ArgumentError where there are fewer blocks than chunks of all stages.
    """

    def __init__(
        self, model: nn.Module, blocks: str, schedule: PipelineSchedule, stage: int, context: Context, recompute: bool
    ) -> None:
        self.schedule, self.stage, self._context, self._recompute = schedule, stage, context, recompute
        self._prefix = f"{blocks}."
        chain = dict(model.get_submodule(blocks).named_children())
        if len(chain) < schedule.blocks:
            raise ArgumentError(f"{blocks!r} has {len(chain)} blocks, and the pipeline has {schedule.blocks} parts")
        stages, chunks = schedule.stages, schedule.chunks
        layers = {at: layers_of(len(chain), stages, chunks, *at) for at in product(range(stages), range(chunks))}
        self._modules, called = [*chain.values()], [*chain]
        self._places = {called[number]: at for at, numbers in layers.items() for number in numbers}
        self.own = [layers[stage, chunk] for chunk in range(chunks)]
        self._chunk = 0
        self._receive: Receive
        self._input: torch.Tensor | None = None
        self._seen = set[int]()  # the blocks that the model has used in this pass
        names = [name for name, _ in model.named_modules()]
        at, parents = names.index(blocks), {blocks.rpartition(".")[0], blocks, ""}
        parents |= {name for name in names if blocks.startswith(f"{name}.")}
        outside = [(k, name) for k, name in enumerate(names) if name not in parents]
        self.before = [name for k, name in outside if k < at]
        self.after = [name for k, name in outside if k > at and not name.startswith(self._prefix)]

    def replace_forwards(self, model: nn.Module) -> None:
        """Replace the forward passes of the blocks, and of the modules before and after them that have parameters."""
        for number, module in enumerate(self._modules):
            module.forward = self._block(number, module.forward)
        for name in (*self.before, *self.after) if self.schedule.stages > 1 else ():
            module = model.get_submodule(name)
            if [*module.parameters(recurse=False)]:
                module.forward = self._end(name, module, module.forward)

    def place(self, module: str) -> tuple[int, int]:
        """Return the stage and the chunk with a module."""
        if module.startswith(self._prefix):
            return self._places[module[len(self._prefix) :].partition(".")[0]]
        return (self.schedule.stages - 1, self.schedule.chunks - 1) if module in self.after else (0, 0)

    def contains(self, module: str) -> bool:
        """Return whether a module contains the list of blocks."""
        return not module or self._prefix.startswith(f"{module}.")

    def is_own(self, module: str) -> bool:
        """Return whether this stage has a module."""
        return self.place(module)[0] == self.stage

    def computes(self, module: str) -> bool:
        """Return whether a module of this stage computes in the present pass, which is of one chunk."""
        return self.place(module)[1] == self._chunk

    def forward(self, chunk: int, model: Callable[[], Any], receive: Receive) -> tuple[torch.Tensor | None, Any]:
        """Run a chunk: return its input, or None for the first chunk, and its output.

        The output of the last chunk is what the model returns.   receive : returns the input, like a tensor of zeros.
        """
        self._chunk, self._receive, self._input, self._seen = chunk, receive, None, set()
        try:
            result = model()
        except _StageEnd as end:
            result = end.output
        return self._input, result

    @property
    def _is_first(self) -> bool:
        return self.stage == 0 and self._chunk == 0

    @property
    def _is_last(self) -> bool:
        return self.stage == self.schedule.stages - 1 and self._chunk == self.schedule.chunks - 1

    def _block(self, number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward pass of a block: it computes only in the pass of its chunk."""

        def block(x: torch.Tensor, *others: Any, **options: Any) -> Any:
            own, several = self.own[self._chunk], self.schedule.blocks > 1
            if number in self._seen or (several and number < max(self._seen, default=0)):
                raise ArgumentError(f"the model uses block {number} twice in a pass, or after later blocks")
            self._seen.add(number)
            tensors = [y for y in (*others, *options.values()) if isinstance(y, torch.Tensor)]
            if several and self._is_first and any(y.requires_grad for y in tensors):
                raise ArgumentError(
                    f"block {number} takes a second tensor that depends on parameters, but stages hand over only the "
                    "first one"
                )
            if number >= own.stop and not self._is_last:
                raise _StageEnd(x)
            if number not in own:
                return x
            if number == own.start and not self._is_first:
                x = self._input = self._receive(x)
            y = compute(x, *others, **options)
            if several and (not isinstance(y, torch.Tensor) or (y.shape, y.dtype) != (x.shape, x.dtype)):
                raise ArgumentError(
                    f"block {number} must return one tensor of the shape and type of its input, {tuple(x.shape)} of "
                    f"{x.dtype}, as stages of a pipeline hand it over"
                )
            return y

        def compute(x: torch.Tensor, *others: Any, **options: Any) -> Any:
            if self._recompute and torch.is_grad_enabled():
                contexts = nullcontext(), self._context.active()  # of the pass, and of the one in the backward pass
                how: Any = {"use_reentrant": False, "context_fn": lambda: contexts}
                return checkpoint(forward, x, *others, **how, **options)
            return forward(x, *others, **options)

        return block

    def _end(self, name: str, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward pass of a module outside of the chain, which only the first or the last stage has."""
        before = name in self.before

        def end(*arguments: Any, **options: Any) -> Any:
            if before == bool(self._seen):
                place = "before" if before else "after"
                raise ArgumentError(f"{name!r} is registered {place} the blocks, but is not used {place} them")
            if before and not self._is_first:
                return self._placeholder(module, arguments[0])
            return forward(*arguments, **options)

        return end

    def _placeholder(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of the results of a module before the chain, in the memory of one element.

        Its elements are NaN, which a model shows that uses more of them than the input of the first block.
        """
        if isinstance(module, nn.Embedding):
            rows = self._context.own_rows[1] if x.shape[-1] == self._context.length else x.shape[-1]
            return module.weight.new_full((), torch.nan).expand(*x.shape[:-1], rows, module.embedding_dim)
        if isinstance(module, nn.Linear):
            return x.new_full((), torch.nan, dtype=autocast_type(x)).expand(*x.shape[:-1], module.out_features)
        return x


class StepPasses(Protocol):
    """What a pipeline calls for each microbatch of a step."""

    def model(self, microbatch: int) -> Any:
        """Return what the model returns for a microbatch."""

    def loss(self, microbatch: int, result: Any) -> torch.Tensor:
        """Return the loss in the result of the model, times the weight of the microbatch."""

    def begin_gradients(self, microbatch: int) -> object:
        """Prepare for gradients of a microbatch, which are computed next."""

    def end_inputs(self, chunk: int) -> object:
        """The gradient of the input of a chunk is computed, and gradients of weights are computed later."""

    def end_gradients(self, chunk: int) -> object:
        """All gradients of a microbatch in a chunk of this stage are computed."""


class Pipeline:
    """The passes of a step on a stage, and the messages to its neighbours.

    line : the stages.   chain : the blocks of this stage; None where one stage has the whole model.
    peak : the most microbatches, with their chunks, of which there are activations at one time.
    """

    def __init__(self, line: Line, chain: Chain | None, schedule: PipelineSchedule, context: Context) -> None:
        self._line, self.chain, self.schedule, self.context = line, chain, schedule, context
        self._local = dict[Handover, torch.Tensor]()  # results for the next block, on this stage
        self._sent = list[list[Arrival]]()
        self.peak = 0

    def evaluate(self, passes: StepPasses) -> None:
        """Carry out the forward passes of a step, without gradients.  Collective over the line."""
        with torch.no_grad():
            for (kind, microbatch, chunk), takes, gives in self.schedule.steps(self._line.rank):
                if kind == "F":
                    _, y = self._forward(microbatch, chunk, takes, passes)
                    if gives:
                        self._hand_over(gives, y)
                    else:
                        passes.loss(microbatch, y)
        self._end_sends()

    def run(self, passes: StepPasses) -> None:
        """Carry out all passes of a step.  Collective over the line."""
        live = dict[tuple[int, int], tuple[torch.Tensor | None, Any]]()
        delayed = dict[tuple[int, int], list[Callable[[], None]]]()
        self.peak = 0
        for (kind, microbatch, chunk), takes, gives in self.schedule.steps(self._line.rank):
            key, result = (microbatch, chunk), None
            products = self.context.delayed = list[Callable[[], None]]() if self.schedule.split else None
            if kind != "F":
                passes.begin_gradients(microbatch)
            if kind == "F":
                x, y = self._forward(microbatch, chunk, takes, passes)
                live[key] = x, (y if gives else passes.loss(microbatch, y))
                self.peak = max(self.peak, len(live))
                result = y
            elif kind == "B":
                x, y = live.pop(key)
                dy = self._taken(takes, y) if takes else None
                if y.requires_grad:  # else all parameters of the first stages are frozen
                    with torch.autocast("cpu", enabled=False):  # gradients have the types of the forward pass
                        torch.autograd.backward(y, dy)
                result = None if x is None else x.grad
                if products is not None:
                    delayed[key] = products
                    passes.end_inputs(chunk)
            else:
                with torch.autocast("cpu", enabled=False):
                    waiting = delayed.pop(key)
                    while waiting:  # each frees its arrays
                        waiting.pop(0)()
            if kind == ("W" if self.schedule.split else "B"):
                passes.end_gradients(chunk)
            if gives:
                assert result is not None
                self._hand_over(gives, result.detach())
        self._end_sends()

    def _forward(
        self, microbatch: int, chunk: int, takes: Handover | None, passes: StepPasses
    ) -> tuple[torch.Tensor | None, Any]:
        if self.chain is None:
            return None, passes.model(microbatch)

        def receive(like: torch.Tensor) -> torch.Tensor:
            assert takes
            return self._taken(takes, like).requires_grad_()

        return self.chain.forward(chunk, lambda: passes.model(microbatch), receive)

    # ---------------------------------------------------------------- messages
    def _end_sends(self) -> None:
        for group in self._sent:
            self._line.mesh.transfers.wait(group)
        self._sent.clear()

    def _taken(self, takes: Handover, like: torch.Tensor) -> torch.Tensor:
        """Return what another block hands over, of the shape and type of a tensor."""
        if not takes.travels:
            return self._local.pop(takes)
        x = torch.zeros(like.shape, dtype=like.dtype)
        group = self._requests(self._line.comm.Irecv, x, takes.source, takes)
        traffic = self._line.mesh.traffic["pipeline"]
        traffic.words_received += x.numel()
        traffic.messages_received += len(group)
        with self._line.mesh.recorder.phase("pipeline"):
            self._line.mesh.transfers.wait(group)
        return x

    def _hand_over(self, gives: Handover, x: torch.Tensor) -> None:
        """Begin to send a result to another stage, or store it for the next block of this stage."""
        if not gives.travels:
            self._local[gives] = x
            return
        group = self._requests(self._line.comm.Isend, x.contiguous(), gives.target, gives)
        traffic = self._line.mesh.traffic["pipeline"]
        traffic.words_sent += x.numel()
        traffic.messages_sent += len(group)
        self._line.mesh.transfers.expect(group)
        self._sent = [x for x in self._sent if x] + [group]

    def _requests(self, start: Callable[..., Any], x: torch.Tensor, rank: int, what: Handover) -> list[Arrival]:
        """Start to send or to receive a tensor, which the requests keep alive."""
        if self._line.mesh.is_counting:
            return [MPI.REQUEST_NULL] * bool(x.numel())
        return byte_requests(start, flat_array(x).view(np.uint8), rank, self.schedule.number(what))
