"""Scores of tokens, divided among ranks by tokens and positions, and their cross-entropy."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from pdgemm.errors import ArgumentError
from pdgemm.parallel.mesh import Line
from pdgemm.schedules.training.mesh_shape import block_of
from pdgemm.schedules.training.row_collectives import rows_by_rank
from pdgemm.training.layers.context import PARTIAL, REPLICATED, SHARDED, Cut, flat_array

if TYPE_CHECKING:
    from pdgemm.training.layers.context import Context


class Scores:
    """This rank's part of scores (samples, positions, tokens), which stands for the whole tensor.

    Shapes are those of the whole tensor.  Functions of torch and methods gather the whole tensor on all ranks, except
    `cross_entropy`, changes of the type, and `view` and `reshape` that leave the last dimension.
    """

    def __init__(self, part: torch.Tensor, shape: tuple[int, ...], context: Context) -> None:
        self.part, self.shape, self._context = part, torch.Size(shape), context

    @classmethod
    def of(cls, part: torch.Tensor, tokens: int, context: Context) -> Scores | torch.Tensor:
        """Return the scores with this rank's part; the part itself where it is the whole tensor.

        part : (samples, own positions, own tokens).   tokens : of all ranks.
        Raises ArgumentError where the part does not have this rank's positions.
        """
        if context.tp.size == context.cp.size == 1:
            return part
        if part.shape[-2] != len(context.positions):
            raise ArgumentError(
                f"scores of shape {tuple(part.shape)}, but this rank along cp has {len(context.positions)} of "
                f"{context.length} positions: the model changes the number of rows between embedding and scores"
            )
        return cls(part, (*part.shape[:-2], context.length, tokens), context)

    def whole(self) -> torch.Tensor:
        """Return the whole tensor, the same on all ranks along tp and cp.  Collective over them."""
        context, last = self._context, self.part.dim() - 1
        tokens = Cut(context.tp, last, rows_by_rank(self.shape[-1], context.tp.size), "tensor")
        x = tokens.exchange(self.part, SHARDED, REPLICATED)
        return context.context_cut(last - 1).exchange(x, SHARDED, REPLICATED).reshape(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def view(self, *shape: Any) -> Any:
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        known = prod(n for n in sizes if n != -1)
        sizes = tuple(prod(self.shape) // known if n == -1 else n for n in sizes)
        if sizes[-1] != self.shape[-1]:
            return self.whole().view(sizes)
        return Scores(self.part, sizes, self._context)

    reshape = view

    def float(self) -> Scores:
        return Scores(self.part.float(), self.shape, self._context)

    def contiguous(self) -> Scores:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole(), name)

    def __getitem__(self, key: Any) -> torch.Tensor:
        return self.whole()[key]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = dict(options or {})
        if function is F.cross_entropy:
            scores, *others = arguments or (options.pop("input"),)
            if isinstance(scores, Scores):
                loss = scores._cross_entropy(*others, **options)
                return function(scores.whole(), *others, **options) if loss is None else loss
        arguments = [x.whole() if isinstance(x, Scores) else x for x in arguments]
        return function(*arguments, **{key: x.whole() if isinstance(x, Scores) else x for key, x in options.items()})

    def _cross_entropy(
        self,
        target: torch.Tensor,
        weight: Any = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: Any = 0.0,
    ) -> torch.Tensor | None:
        """Return the mean or the sum of the cross-entropy over targets that are not ignored; None for other forms."""
        if any(x is not None for x in (weight, size_average, reduce)) or label_smoothing:
            return None
        if reduction not in ("mean", "sum") or target.is_floating_point() or target.shape != self.shape[:-1]:
            return None
        check_tokens(target[target != ignore_index], self.shape[-1], "a target")
        context = self._context
        own = target.reshape(-1, context.length).index_select(1, context.positions).reshape(-1)
        first = block_of(self.shape[-1], context.tp.size, context.tp.rank).start
        z = self.part.flatten(0, -2)
        wide = z.to(torch.promote_types(z.dtype, torch.float32))
        losses = _CrossEntropy.apply(wide, own - first, own == ignore_index, context.tp)
        total = context.context_cut(0).exchange(losses.sum().reshape(1), PARTIAL, REPLICATED).sum()
        mean = total if reduction == "sum" else total / (target != ignore_index).sum()
        return mean if torch.is_autocast_enabled("cpu") else mean.to(z.dtype)  # as torch's function


def _of_whole(name: str) -> Any:
    """Return a method that applies an operator to the whole tensor."""
    return lambda scores, *others: getattr(scores.whole(), name)(*others)


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "pow", "neg", "matmul", "len", "iter",
              "lt", "le", "gt", "ge", "eq", "ne"):  # fmt: skip
    setattr(Scores, f"__{_name}__", _of_whole(f"__{_name}__"))


def check_tokens(ids: torch.Tensor, tokens: int, what: str) -> None:
    """Raise ArgumentError where an id is not in 0, ..., tokens - 1."""
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < tokens:
        raise ArgumentError(f"{what} is outside of the {tokens} tokens: {int(ids.min())} to {int(ids.max())}")


class _CrossEntropy(torch.autograd.Function):
    """The cross-entropy of each row, whose scores are divided among the ranks of a line; 0 of ignored rows.

    Three words of each row are reduced: the largest score, the sum of the exponentials, and the score of the target.
    """

    @staticmethod
    def forward(ctx: Any, z: torch.Tensor, target: torch.Tensor, ignored: torch.Tensor, line: Line) -> torch.Tensor:
        most = z.amax(1) if z.shape[1] else z.new_full((len(z),), -torch.inf)
        line.largest(flat_array(most), "tensor")
        p = (z - most[:, None]).exp_()
        (rows,) = torch.nonzero((target >= 0) & (target < z.shape[1]) & ~ignored, as_tuple=True)
        sums = z.new_zeros((2, len(z)))
        sums[0] = p.sum(1)
        sums[1, rows] = z[rows, target[rows]] - most[rows]
        line.sum(flat_array(sums), "tensor")
        ctx.rows, ctx.columns = rows, target[rows]
        ctx.save_for_backward(p.div_(sums[0][:, None]), ignored)
        return (sums[0].log() - sums[1]).masked_fill(ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        p, ignored = ctx.saved_tensors
        dz = p.clone()
        dz[ctx.rows, ctx.columns] -= 1
        return dz * gradients[0].masked_fill(ignored, 0)[:, None], None, None, None
