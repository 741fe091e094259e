"""Placements of modules: how the parameters of a torch module are divided on a mesh, and what its forward pass moves.

A table of `distribute` maps patterns of module names to these placements.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

from pdgemm.errors import ArgumentError, MeshError
from pdgemm.schedules.training.mesh_shape import block_of
from pdgemm.training.layers.context import REPLICATED, SHARDED, Context, is_transposed
from pdgemm.training.layers.scores import Scores, check_tokens


@dataclass(frozen=True)
class Division:
    """How a parameter is divided along an axis of a mesh.

    axis  : "tp" or "ep"; "" for a parameter that all ranks have whole.
    dim   : the dimension that is cut into blocks; `parts` equal parts of it are each cut, as queries, keys and values.
    sums  : the axis over which gradients are summed, beside those of data and context: "tp" where each rank along tp
        computes the gradient of its own rows.
    """

    axis: str = ""
    dim: int = 0
    parts: int = 1
    sums: str = ""

    def part(self, x: torch.Tensor, ranks: int, index: int) -> torch.Tensor:
        """Return the part of a parameter that the rank at `index` has."""
        if not self.axis or ranks == 1:
            return x
        parted = x.movedim(self.dim, 0)
        parted = parted.reshape(self.parts, -1, *parted.shape[1:])
        own = parted[:, block_of(parted.shape[1], ranks, index)]
        return own.reshape(-1, *own.shape[2:]).movedim(0, self.dim)

    def joined(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return the whole parameter from the parts of all ranks."""
        if not self.axis or len(parts) == 1:
            return parts[0]
        rows = [x.movedim(self.dim, 0).reshape(self.parts, -1, *x.movedim(self.dim, 0).shape[1:]) for x in parts]
        whole = torch.cat(rows, dim=1)
        return whole.reshape(-1, *whole.shape[2:]).movedim(0, self.dim)


class ModulePlacement:
    """What a placement does: it divides the parameters of a module, and replaces its forward pass.

    `divisions` raises where a module cannot be divided, and changes nothing; `forward` may change the module.
    """

    def divisions(self, module: nn.Module, context: Context) -> dict[str, Division]:
        """Return the division of each parameter that the module itself has, by its name in the module."""
        return {name: Division() for name, _ in module.named_parameters(recurse=False)}

    def forward(self, module: nn.Module, context: Context) -> Callable[..., Any] | None:
        """Return the forward pass of the module on this rank; None for the module's own."""
        return None


@dataclass(frozen=True)
class Replicated(ModulePlacement):
    """All ranks along tp have the parameters, and compute the same from whole rows."""

    def forward(self, module: nn.Module, context: Context) -> Callable[..., Any] | None:
        if not context.sequence:
            return None
        forward = module.forward

        def replicated(x: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
            cut = context.rows()
            y = forward(cut.exchange(x, SHARDED, REPLICATED), *others, **options)
            return cut.exchange(y, REPLICATED, SHARDED)

        return replicated


@dataclass(frozen=True)
class Sequence(ModulePlacement):
    """All ranks along tp have the parameters, and each computes its own positions, as norms do.

    gathered : the results are gathered for the layers that follow, as where a model reshapes them by its inputs' shape.
    """

    gathered: bool = False

    def divisions(self, module: nn.Module, context: Context) -> dict[str, Division]:
        sums = "tp" if context.sequence else ""
        return {name: Division(sums=sums) for name, _ in module.named_parameters(recurse=False)}

    def forward(self, module: nn.Module, context: Context) -> Callable[..., Any] | None:
        forward = module.forward
        return (lambda x: context.entered(forward(x))) if self.gathered else None


@dataclass(frozen=True)
class Positions(ModulePlacement):
    """A module whose results have a row for each position of a sequence, in the second last dimension.

    heads : the results are used with queries and keys, as rotary embeddings, and not added to activations; they are
        divided only along cp.
    """

    heads: bool = False

    def divisions(self, module: nn.Module, context: Context) -> dict[str, Division]:
        sums = "tp" if context.sequence and not self.heads else ""
        return {name: Division(sums=sums) for name, _ in module.named_parameters(recurse=False)}

    def forward(self, module: nn.Module, context: Context) -> Callable[..., Any] | None:
        forward = module.forward

        def positions(*arguments: Any, **options: Any) -> Any:
            own = context.positions if self.heads else context.positions.narrow(0, *context.own_rows)
            local = context.own_rows[1]  # a model may number the rows of its activations from 0
            if local != context.length and any(_counts(x, local) for x in (*arguments, *options.values())):
                numbered = partial(tree_map, lambda x: own.expand(*x.shape[:-1], -1) if _counts(x, local) else x)
                return forward(*numbered(arguments), **numbered(options))
            return tree_map(lambda x: x.index_select(-2, own), forward(*arguments, **options))

        return positions


@dataclass(frozen=True)
class Columns(ModulePlacement):
    """A linear layer whose outputs are divided among the ranks along tp.

    parts : the outputs are `parts` equal parts, as [queries | keys | values], and each part is divided.
    heads : the number of heads, which are not divided further; 0: outputs are divided anywhere.
    Raises MeshError where the ranks along tp do not divide the heads.
    """

    parts: int = 1
    heads: int = 0

    def divisions(self, module: nn.Module, context: Context) -> dict[str, Division]:
        ranks = context.tp.size
        if self.heads and self.heads % ranks:
            possible = [t for t in range(1, self.heads + 1) if self.heads % t == 0]
            raise MeshError(f"tp {ranks} does not divide {self.heads} heads; possible are {possible}")
        _check_linear(module)
        weight = Division("tp", int(is_transposed(module)), self.parts)
        return {"weight": weight, "bias": Division("tp", 0, self.parts)}

    def forward(self, module: nn.Module, context: Context) -> Callable[..., Any] | None:
        return lambda x: context.linear(x, module, enters=True)


@dataclass(frozen=True)
class Rows(ModulePlacement):
    """A linear layer whose inputs are divided among the ranks along tp; its products are partial sums."""

    parts: int = 1

    def divisions(self, module: nn.Module, context: Context) -> dict[str, Division]:
        _check_linear(module)
        weight = Division("tp", 1 - int(is_transposed(module)), self.parts)
        return {"weight": weight, "bias": Division(sums="tp" if context.sequence else "")}

    def forward(self, module: nn.Module, context: Context) -> Callable[..., Any] | None:
        def rows(x: torch.Tensor) -> torch.Tensor:
            y = context.left(context.linear(x, module, bias=False))
            bias: Any = module.bias
            return y if bias is None else y + bias.to(y.dtype)

        return rows


@dataclass(frozen=True)
class Vocabulary(ModulePlacement):
    """A token embedding, or the linear layer of the scores of tokens; the tokens are divided among the ranks along tp.

    The scores are `Scores`: `torch.nn.functional.cross_entropy` of them uses each rank's part, and any other use of
    them gathers the whole scores first.
    """

    def divisions(self, module: nn.Module, context: Context) -> dict[str, Division]:
        if not isinstance(module, nn.Embedding):
            _check_linear(module, may_be_transposed=False)
        elif type(module).forward is not nn.Embedding.forward or module.max_norm or module.scale_grad_by_freq:
            raise ArgumentError(f"{module} is not a plain nn.Embedding, of which Vocabulary replaces the forward pass")
        return {"weight": Division("tp"), "bias": Division("tp")}

    def forward(self, module: nn.Module, context: Context) -> Callable[..., Any] | None:
        if isinstance(module, nn.Embedding):
            return lambda ids: self._embedded(module, ids, context)
        assert isinstance(module, nn.Linear)
        tokens = module.out_features
        return lambda x: Scores.of(context.linear(x, module, enters=True), tokens, context)

    def _embedded(self, module: nn.Embedding, ids: torch.Tensor, context: Context) -> torch.Tensor:
        """Return the rows of the table for this rank's positions; each rank along tp looks up its own tokens."""
        if ids.dim() != 2 or ids.shape[1] != context.length:
            raise ArgumentError(
                f"ids of shape {tuple(ids.shape)}, but the first tensor of the batch has {context.length} positions"
            )
        check_tokens(ids, module.num_embeddings, "an id")
        own = block_of(module.num_embeddings, context.tp.size, context.tp.rank)
        ids = ids.index_select(1, context.positions) - own.start
        outside = (ids < 0) | (ids >= own.stop - own.start)
        padding = module.padding_idx  # the token whose row has no gradient
        padding = padding - own.start if padding is not None and own.start <= padding < own.stop else None
        rows = F.embedding(ids.masked_fill(outside, 0), module.weight, padding)
        return context.left(rows.masked_fill(outside[..., None], 0))


@dataclass(frozen=True)
class Gathered(ModulePlacement):
    """A module, such as attention, whose linear layers use the same inputs: these are gathered once, for all of them.

    attributes : names of attributes that count heads or features, which are divided by the number of ranks along tp.
    Needed where the module derives the number of positions from its inputs.
    Raises MeshError where the ranks along tp do not divide such a number.
    """

    attributes: tuple[str, ...]

    def __init__(self, *attributes: str) -> None:
        object.__setattr__(self, "attributes", attributes)

    def divisions(self, module: nn.Module, context: Context) -> dict[str, Division]:
        for name in self.attributes:
            if (number := getattr(module, name)) % context.tp.size:
                raise MeshError(f"tp {context.tp.size} does not divide {name} = {number} of {type(module).__name__}")
        return super().divisions(module, context)

    def forward(self, module: nn.Module, context: Context) -> Callable[..., Any] | None:
        for name in self.attributes:
            setattr(module, name, getattr(module, name) // context.tp.size)
        forward = module.forward

        def gathered(*arguments: Any, **options: Any) -> Any:
            names = [k for k, x in options.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]
            with context.gathered(arguments[0] if arguments else options[names[0]]) as x:
                if arguments:
                    return forward(x, *arguments[1:], **options)
                return forward(**{**options, names[0]: x})

        return gathered


def _check_linear(module: nn.Module, may_be_transposed: bool = True) -> None:
    """Raise ArgumentError where a module is not a linear layer whose forward pass can be replaced."""
    is_plain = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
    if not is_plain and not (may_be_transposed and is_transposed(module)):
        raise ArgumentError(f"{module} is not a plain nn.Linear, of which the placement replaces the forward pass")


def _counts(x: Any, number: int) -> bool:
    """Return whether x is a tensor of the integers 0, 1, ..., number - 1, or several such rows."""
    return (
        isinstance(x, torch.Tensor)
        and x.dtype == torch.int64
        and bool(x.shape[-1:] == (number,))
        and bool((x == torch.arange(number)).all())
    )
