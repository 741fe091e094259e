"""A mixture of experts: a torch module of one process, and its placement, which divides the experts among ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from pdgemm.errors import ArgumentError, MeshError
from pdgemm.parallel.mesh import Line
from pdgemm.schedules.collectives.collective import even_parts
from pdgemm.training.layers.context import MICROBATCH, REPLICATED, SHARDED, Context, as_tensor, flat_array
from pdgemm.training.layers.placements import Division, ModulePlacement

Apply = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class MixtureOfExperts(nn.Module):
    """A mixture of experts, a module of one process: each token uses a few of many small networks.

    ::

        y[t] = sum over the k experts e with the largest p[t, e] of g[t, e] f(x[t] w_in[e]) w_out[e]

        p = softmax(x router^T), in float32 or wider;  g = p divided by its sum over the k experts, or p where k = 1

    width   : the features of a token.   hidden : of an expert, between its matrices.   experts : their number.
    topk    : k.   gated : w_in has 2 hidden columns, of which f(a) * b is the result.   activation : f.
    balance : a factor of the loss balance * experts * sum over e of fraction_e mean_e: the fraction of the choices that
        are e, and the mean of p[:, e].  The backward pass adds its gradient to that of the model's loss, also on the
        stages of a pipeline.  The model's loss is without it.

    Parameters: router (experts, width), w_in (experts, width, hidden), w_out (experts, hidden, width), without biases.
    No token is dropped: an expert takes all tokens that choose it.

    loads, balance_loss : after a forward pass, the tokens that chose each expert, and the value of the balance loss.

    With the placement `Experts` both are of one microbatch on all ranks along dp, cp and tp.  So steps of one
    microbatch have the numbers of one process; with several, each has fractions and means of its own.
    Cost: 4 width hidden flops for each choice of a token in the forward pass, with gates 6, and twice that backward.
    Shazeer et al., arXiv:1701.06538, 2017; Fedus, Zoph & Shazeer, Switch transformers, Journal of Machine Learning
    Research 23, 2022.  Raises ArgumentError where topk is not 1, ..., experts.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        topk: int = 2,
        *,
        gated: bool = False,
        activation: Callable[[torch.Tensor], torch.Tensor] = F.gelu,
        balance: float = 0.0,
    ) -> None:
        super().__init__()
        if not 1 <= topk <= experts:
            raise ArgumentError(f"a token uses topk = {topk} of {experts} experts: possible are 1 to {experts}")
        self.experts, self.topk, self.gated, self.activation, self.balance = experts, topk, gated, activation, balance
        self.loads, self.balance_loss = torch.zeros(experts), 0.0
        self.router = nn.Parameter(torch.empty(experts, width))
        self.w_in = nn.Parameter(torch.empty(experts, width, hidden * (1 + gated)))
        self.w_out = nn.Parameter(torch.empty(experts, hidden, width))
        for x, inputs in ((self.router, width), (self.w_in, width), (self.w_out, hidden)):
            nn.init.uniform_(x, -(inputs**-0.5), inputs**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return y for tokens x (..., width)."""
        return self.mixed(x, lambda rows, own: (self.results(rows, own[0]), own))

    def mixed(self, x: torch.Tensor, apply: Apply, share: float = 1.0) -> torch.Tensor:
        """Return y for tokens whose experts may be on other ranks.

        apply : takes rows in the order of their experts, and the loads and the sums of p of these tokens, (2, experts);
            returns the results of the rows, and the loads and sums of all tokens of the microbatch.
        share : of the microbatch in the loss of a step.
        """
        rows, wide = x.flatten(0, -2), torch.promote_types(x.dtype, torch.float32)
        probabilities = F.linear(rows.to(wide), self.router.to(wide)).softmax(-1)
        gates, chosen = probabilities.topk(self.topk)
        if self.topk > 1:  # a quotient of 1 would leave the router without a gradient
            gates = gates / gates.sum(-1, keepdim=True)
        order, loads = chosen.flatten().argsort(stable=True), chosen.flatten().bincount(minlength=self.experts)
        own = torch.stack([loads.double(), probabilities.detach().double().sum(0)])
        results, total = apply(rows.index_select(0, order // self.topk), own)
        self.loads, choices = total[0], total[0].sum()
        slope = self.balance * self.experts * self.loads * self.topk / choices**2  # of the balance loss, by each p
        self.balance_loss = float(slope @ total[1])
        if self.balance and probabilities.requires_grad:
            probabilities.register_hook(lambda gradient: gradient + share * slope.to(wide))
        y = results.index_select(0, order.argsort()).view(*chosen.shape, x.shape[-1])
        return (y * gates.to(y.dtype)[..., None]).sum(1).view(x.shape)

    def results(self, rows: torch.Tensor, loads: torch.Tensor) -> torch.Tensor:
        """Return the results of rows in the order of their experts.   loads : the rows of each expert."""
        parts = rows.split([*map(int, loads)])
        hidden = [x @ w for x, w in zip(parts, self.w_in.unbind())]
        if self.gated:
            hidden = [self.activation(a) * b for a, b in (x.chunk(2, -1) for x in hidden)]
        else:
            hidden = [*map(self.activation, hidden)]
        return torch.cat([x @ w for x, w in zip(hidden, self.w_out.unbind())])


@dataclass(frozen=True)
class Experts(ModulePlacement):
    """A `MixtureOfExperts` whose experts are divided among the ranks along ep; all ranks have the router.

    A rank along tp and cp routes its own positions, and the rows of tokens are exchanged along ep: each choice of an
    expert of another rank sends `width` words there and `width` words back, in both passes ("experts" of
    `Mesh.traffic`).  Before that all ranks of a microbatch gather 2 experts words of each of them ("router").
    `Run.expected` counts experts that are chosen equally often.
    Raises ArgumentError for another module, and MeshError where ep does not divide the experts.
    """

    def divisions(self, module: nn.Module, context: Context) -> dict[str, Division]:
        if not isinstance(module, MixtureOfExperts):
            raise ArgumentError(f"Experts divides a MixtureOfExperts, and not a {type(module).__name__}")
        if module.experts % (ep := context.ep.size):
            possible = [n for n in range(1, module.experts + 1) if module.experts % n == 0]
            raise MeshError(f"ep {ep} does not divide {module.experts} experts; possible are {possible}")
        stacked = Division("ep", sums="tp")
        return {"router": Division(sums="tp"), "w_in": stacked, "w_out": stacked}

    def forward(self, module: nn.Module, context: Context) -> Callable[..., Any] | None:
        assert isinstance(module, MixtureOfExperts)

        def experts(x: torch.Tensor) -> torch.Tensor:
            cut, between = context.rows(x.dim() - 2), SHARDED if context.sequence else REPLICATED
            x = cut.exchange(x, between, SHARDED)
            y = module.mixed(x, lambda rows, own: _on_ranks(module, rows, own, context), context.share)
            return cut.exchange(y, SHARDED, between)

        return experts


def _on_ranks(
    module: MixtureOfExperts, rows: torch.Tensor, own: torch.Tensor, context: Context
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of rows whose experts are on the ranks along ep: see `MixtureOfExperts.mixed`."""
    line, everyone = context.ep, context.microbatch
    shape, ep = line.mesh.shape, line.size
    table = torch.from_numpy(everyone.gather(own.numpy()[None], (1,) * everyone.size, "router"))
    if line.mesh.is_counting:
        table[:, 0] = torch.tensor(even_parts(len(rows), module.experts))
    neighbours = [shape.index(MICROBATCH, rank) for rank in shape.line("ep", line.mesh.rank)]
    counts = table[neighbours, 0].long().view(ep, ep, -1)  # from, to, and expert there
    arriving = counts[:, line.rank]
    by_rank = torch.arange(arriving.shape[1]).repeat(ep).repeat_interleave(arriving.flatten())
    ways = _Ways(line, counts.sum(2).numpy(), by_rank.argsort(stable=True))
    results = module.results(_Moved.apply(rows, ways, False), arriving.sum(0))
    return _Moved.apply(results, ways, True), table.sum(0)


@dataclass(frozen=True)
class _Ways:
    """How rows are exchanged.

    counts : (from, to), the rows.   order : the place of each row of this rank's experts among the rows as they arrive.
    """

    line: Line
    counts: np.ndarray
    order: torch.Tensor

    def moved(self, x: torch.Tensor, back: bool) -> torch.Tensor:
        x = x.index_select(0, self.order.argsort()) if back else x.contiguous()
        counts = self.counts.T if back else self.counts
        y = as_tensor(self.line.exchange(flat_array(x).reshape(x.shape), counts, "experts"), x.dtype)
        return y if back else y.index_select(0, self.order)


class _Moved(torch.autograd.Function):
    """Rows on the ranks of their experts, or back; gradients are exchanged in the reverse direction."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ways: _Ways, back: bool) -> torch.Tensor:
        ctx.ways, ctx.back = ways, back
        return ways.moved(x, back)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.ways.moved(gradients[0], not ctx.back), None, None
