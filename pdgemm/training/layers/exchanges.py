"""Exchanges of activations between two placements on a line of a mesh, with their adjoints, for torch's autograd.

An activation is sharded, replicated or a partial sum, and so is its gradient.  The adjoint of the exchange from one
placement to another is the exchange of the gradient in the reverse direction: that of an all-gather is a
reduce-scatter, and that of an all-reduce does nothing.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import ml_dtypes
import numpy as np
import torch
from torch.autograd.function import once_differentiable

from pdgemm.errors import ArgumentError, DeviceError
from pdgemm.parallel.mesh import Line, Work

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
