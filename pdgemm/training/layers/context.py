"""Lines of a mesh that divide features and positions, and exchanges of activations along them, with their adjoints."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from pdgemm.errors import ArgumentError, DeviceError
from pdgemm.parallel.mesh import Line, Mesh, Work
from pdgemm.schedules.training.context_schedule import ContextSchedule
from pdgemm.schedules.training.row_collectives import rows_by_rank

State = Literal["sharded", "replicated", "partial"]


class ActivationState(NamedTuple):
    """The state of an activation on the ranks of a line, and that of its gradient.

    "sharded": each rank has its part of a dimension; "replicated": all ranks have the same elements; "partial": the
    sum over the ranks is the activation, or the gradient.
    """

    value: State
    gradient: State


SHARDED = ActivationState("sharded", "sharded")
REPLICATED = ActivationState("replicated", "replicated")
USED = ActivationState("replicated", "partial")  # each rank computes something else from the same elements
PARTIAL = ActivationState("partial", "replicated")


@dataclass(frozen=True)
class Cut:
    """How a dimension is divided among the ranks of a line.

    dim : the dimension.   counts : the elements of each rank along it.
    order : the elements along the dimension, rank by rank, or None for ascending ones.   kind : of the traffic.
    """

    line: Line
    dim: int
    counts: tuple[int, ...]
    kind: str
    order: torch.Tensor | None = None

    def exchange(self, x: torch.Tensor, source: ActivationState, target: ActivationState) -> torch.Tensor:
        """Return an activation in another placement.  Collective over the line, and so is the backward pass."""
        if self.line.size == 1:
            return x
        moved: torch.Tensor = _Exchange.apply(x, self, source, target)
        return moved

    def moved(self, x: torch.Tensor, source: State, target: State, meanwhile: Work | None = None) -> torch.Tensor:
        """Return the elements of x in another state, without a backward pass.

        meanwhile : a computation while partial sums move, see `Line.carry_out`.
        Raises ArgumentError, on this rank, where x does not have the rows of its state.
        """
        if source == target:
            return x
        expected = self.counts[self.line.rank] if source == "sharded" else sum(self.counts)
        if "sharded" in (source, target) and x.shape[self.dim] != expected:
            raise ArgumentError(
                f"an activation of shape {tuple(x.shape)} has {x.shape[self.dim]} rows on rank {self.line.rank} of "
                f"{self.line.size}, where {expected} of {sum(self.counts)} are expected: see Gathered and "
                "Sequence(gathered=True)"
            )
        if (source, target) == ("partial", "replicated"):
            total = x.contiguous() if x.requires_grad else x.clone(memory_format=torch.contiguous_format)
            self.line.sum(flat_array(total), self.kind, meanwhile=meanwhile)
            return total
        rows = x.movedim(self.dim, 0)
        if source != "sharded" and self.order is not None:
            rows = rows[self.order]
        if (source, target) == ("replicated", "sharded"):
            first = sum(self.counts[: self.line.rank])
            part = rows[first : first + self.counts[self.line.rank]]
        elif (source, target) == ("partial", "sharded"):
            part = self._by_rows(partial(self.line.reduce, meanwhile=meanwhile), rows)
        elif (source, target) == ("sharded", "replicated"):
            part = self._by_rows(self.line.gather, rows)
            if self.order is not None:
                part = torch.empty_like(part).index_copy_(0, self.order, part)
        else:
            raise AssertionError(f"{source} activations do not become {target}")
        return part.movedim(0, self.dim).contiguous()  # modules may use `view`

    def _by_rows(self, collective: Any, rows: torch.Tensor) -> torch.Tensor:
        """Return the result of a collective of rows, whose array it may overwrite."""
        rows = rows.clone(memory_format=torch.contiguous_format)
        result = collective(flat_array(rows).reshape(rows.shape), self.counts, self.kind)
        return as_tensor(result, rows.dtype)


class _Exchange(torch.autograd.Function):
    """An exchange forward, and that of the gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cut: Cut, source: ActivationState, target: ActivationState) -> torch.Tensor:
        ctx.cut, ctx.states = cut, (target.gradient, source.gradient)
        y = cut.moved(x, source.value, target.value)
        return x.view_as(x) if y is x else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.cut.moved(gradients[0], *ctx.states), None, None, None


def flat_array(x: torch.Tensor, resizable: bool = False) -> np.ndarray:
    """Return the elements of a contiguous tensor of the host as an array of one dimension, in the same memory.

    resizable : the storage of the tensor can be resized later; then the array does not keep the tensor alive.
    """
    if x.device.type != "cpu":
        raise DeviceError(f"a tensor is on {x.device}: models are trained in the memory of the host")
    x = x.detach().view(-1)
    if resizable:
        memory = (ctypes.c_byte * (x.numel() * x.itemsize)).from_address(x.data_ptr())
        dtype = np.dtype(ml_dtypes.bfloat16) if x.dtype is torch.bfloat16 else x.new_empty(0).numpy().dtype
        return np.frombuffer(memory, dtype)  # type: ignore[call-overload]
    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype is torch.bfloat16 else x.numpy()


def as_tensor(x: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Return the elements of an array as a tensor in the same memory."""
    if dtype is torch.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


MICROBATCH = "dp+cp+tp"  # the ranks that have the samples and positions of a microbatch
SPLIT = "tensor", "context"  # the kinds of traffic along tp and cp
_POLLS = 4  # the times that transfers are tested in the product of a gradient of a weight


class Context:
    """What the layers of a model share on a rank.

    sequence : between layers, activations are divided along tp by positions; otherwise they are replicated.
    share    : of the microbatch, with all replicas, in the loss of a step, times the loss scale.
    length   : the positions of a sequence of this step.   positions : of this rank along cp, ascending.
    delayed  : products of gradients of weights that a schedule computes later, or None where they are computed at once.
    add_gradient : a function of a parameter and of such a gradient, which is added to those of the step.
    check : a function of each function of torch that a pass calls, and of its arguments, which may refuse them.
    """

    def __init__(self, mesh: Mesh, sequence: bool, recompute_attention: bool = False) -> None:
        self.ep, self.microbatch, self.share = mesh.line("ep"), mesh.line(MICROBATCH), 1.0
        self.tp, self.cp, self.sequence = mesh.line("tp"), mesh.line("cp"), sequence and mesh.length("tp") > 1
        self.recompute_attention = recompute_attention
        self._gathered: torch.Tensor | None = None  # the inputs of the layers of a Gathered module
        self.has_attended = False  # whether the keys of all ranks along cp were used
        self.delayed: list[Callable[[], None]] | None = None
        self.add_gradient: Callable[[torch.Tensor, torch.Tensor], None]
        self.check: Callable[[Any, Any], None] | None = None
        self._divide(1)

    def begin(self, length: int) -> None:
        """Divide sequences of this length.   Raises ArgumentError where one rank along tp would have all positions."""
        self._divide(length)
        if self.sequence and max(self._rows) == len(self.positions):
            raise ArgumentError(f"{length} positions are too few for cp {self.cp.size} and tp {self.tp.size}")

    def _divide(self, length: int) -> None:
        schedule = ContextSchedule(length, tuple(range(self.cp.size)))
        self.length, self._counts = length, schedule.counts
        self.positions = torch.from_numpy(schedule.positions(self.cp.rank))
        self._order = torch.cat([torch.from_numpy(schedule.positions(rank)) for rank in range(self.cp.size)])
        self._rows = rows_by_rank(len(self.positions), self.tp.size)

    @property
    def own_rows(self) -> tuple[int, int]:
        """The first of the positions along cp that this rank along tp has, and their number."""
        if not self.sequence:
            return 0, len(self.positions)
        return sum(self._rows[: self.tp.rank]), self._rows[self.tp.rank]

    def rows(self, dim: int = 1) -> Cut:
        """Return how positions along a dimension are divided among the ranks along tp."""
        return Cut(self.tp, dim, self._rows, SPLIT[0])

    def context_cut(self, dim: int) -> Cut:
        """Return how positions along a dimension are divided among the ranks along cp."""
        return Cut(self.cp, dim, self._counts, SPLIT[1], self._order)

    @contextmanager
    def gathered(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        """Return the inputs of several layers, which do not gather them again in the block."""
        self._gathered = x = self.entered(x)
        try:
            yield x
        finally:
            self._gathered = None

    def entered(self, x: torch.Tensor) -> torch.Tensor:
        """Return the inputs of a layer whose outputs are divided: all positions on each rank along tp."""
        return cut.exchange(x, self._between, USED) if (cut := self._entry(x)) else x

    def _entry(self, x: torch.Tensor) -> Cut | None:
        """Return how the inputs of a layer whose outputs are divided enter it, or None where they have entered."""
        if self._gathered is not None and self.tp.size > 1:
            if x.untyped_storage().data_ptr() != self._gathered.untyped_storage().data_ptr():
                raise ArgumentError("inside of a Gathered module, a layer uses another tensor than the gathered inputs")
            return None
        has_all = self.tp.size == 1 or (self.sequence and x.shape[-2] == len(self.positions))
        return None if has_all else self.rows(x.dim() - 2)

    @property
    def _between(self) -> ActivationState:
        """The state of activations along tp between layers."""
        return SHARDED if self.sequence else REPLICATED

    def left(self, y: torch.Tensor) -> torch.Tensor:
        """Return the sums over the ranks along tp of partial outputs."""
        return self.rows(y.dim() - 2).exchange(y, PARTIAL, self._between)

    def linear(self, x: torch.Tensor, module: nn.Module, enters: bool = False, bias: bool = True) -> torch.Tensor:
        """Return x W^T + b of a linear layer.

        enters : x is that of `entered`, whose gradients are then summed along tp while those of the weight are
            computed.   bias : False for x W^T.
        Where a schedule delays gradients of weights, they are computed later.
        """
        weight: Any = module.weight
        added = getattr(module, "bias", None) if bias else None
        cut = self._entry(x) if enters else None
        if cut is None and (self.delayed is None or not weight.requires_grad):
            return F.linear(x, weight.T if is_transposed(module) else weight, added)
        y: torch.Tensor = _Linear.apply(x, weight, added, module, self, cut)
        return y

    @contextmanager
    def active(self) -> Iterator[None]:
        """Return a block for a pass: `scaled_dot_product_attention` sees the keys of all ranks along cp."""
        with _Functions(self) if self.cp.size > 1 or self.recompute_attention or self.check else nullcontext():
            yield


def is_transposed(module: nn.Module) -> bool:
    """Return whether the weight of a linear layer has a row for each input, as the Conv1D of Hugging Face."""
    return type(module).__name__ == "Conv1D"


def autocast_type(x: torch.Tensor) -> torch.dtype:
    """Return the type in which a linear layer computes with x: autocast leaves float64 as it is."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") and x.dtype != torch.double else x.dtype


class _Linear(torch.autograd.Function):
    """A linear layer whose weight gradient is computed while the gradients of its inputs are summed along tp, or later.

    A sum of n numbers on p ranks moves 2 (p - 1)/p n words, or (p - 1)/p n where positions are divided, beside
    2 n m flops of the product for m outputs of a rank.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any, module: nn.Module, context: Context, cut: Cut | None
    ) -> torch.Tensor:
        ctx.module, ctx.context, ctx.cut, ctx.state, ctx.dtype = module, context, cut, context._between, x.dtype
        if cut:
            x = cut.moved(x, ctx.state.value, USED.value)
        x, weight = (y.to(autocast_type(y)) for y in (x, weight))
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if ctx.needs_input_grad[0] else None)
        return F.linear(x, weight.T if is_transposed(module) else weight, None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (dy,), (x, weight), module, context = gradients, ctx.saved_tensors, ctx.module, ctx.context
        dx, dw, meanwhile, rows = None, None, None, torch.atleast_2d(dy).flatten(0, -2)
        if x is not None:
            inputs = torch.atleast_2d(x).flatten(0, -2)
            left, right = (inputs.T, rows) if is_transposed(module) else (rows.T, inputs)
            if context.delayed is None:
                dw = dy.new_empty((len(left), right.shape[1]))
                meanwhile = partial(_multiply, left, right, dw, context.tp.mesh.transfers.poll)
            else:
                context.delayed.append(torch.no_grad()(lambda: context.add_gradient(module.weight, left @ right)))
        if weight is not None:
            dx = dy @ (weight.T if is_transposed(module) else weight)
        if ctx.cut and dx is not None:
            dx = ctx.cut.moved(dx.to(ctx.dtype), USED.gradient, ctx.state.gradient, meanwhile)
        elif meanwhile:
            meanwhile()
        return dx, dw, rows.sum(0) if ctx.needs_input_grad[2] else None, None, None, None


def _multiply(left: torch.Tensor, right: torch.Tensor, product: torch.Tensor, poll: Work) -> None:
    """Compute a product by blocks of rows, and let transfers make progress after each of them."""
    for rows, block in zip(left.tensor_split(_POLLS), product.tensor_split(_POLLS)):
        torch.mm(rows, right, out=block)
        poll()


class _Functions(TorchFunctionMode):
    """Functions of torch in a pass: attention to the keys of all ranks along cp, or that is recomputed; and a check."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self._context = context

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options, context = options or {}, self._context
        if context.check:
            context.check(function, (*arguments, *options.values()))
        if function is not F.scaled_dot_product_attention:
            return function(*arguments, **options)
        with torch._C.DisableTorchFunction():
            if context.recompute_attention:
                return checkpoint(self._attention, *arguments, use_reentrant=False, **options)
            return self._attention(*arguments, **options)

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **others: Any,
    ) -> torch.Tensor:
        """Return the attention of this rank's queries to all keys."""
        context = self._context
        if context.cp.size > 1:
            context.has_attended = True
            cut, own = context.context_cut(key.dim() - 2), context.positions
            if query.shape[-2] != len(own) or key.shape[-2] != len(own):
                raise ArgumentError(
                    f"attention of {query.shape[-2]} queries to {key.shape[-2]} keys, but this rank along cp has "
                    f"{len(own)} of {context.length} positions: place embeddings by Vocabulary and Positions"
                )
            key, value = (cut.exchange(x, SHARDED, USED) for x in (key, value))
            if is_causal:
                attn_mask, is_causal = own[:, None] >= torch.arange(context.length)[None, :], False
            elif attn_mask is not None and attn_mask.shape[-2] == context.length:
                attn_mask = attn_mask.index_select(-2, own)
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **others)
