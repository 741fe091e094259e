"""Updates of parameters: rules of torch on the parts that a rank updates or on whole matrices, and the loss scale."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import isfinite
from typing import Any

import numpy as np
import torch
from torch import nn

from pdgemm.errors import ArgumentError
from pdgemm.instrument.recorder import Traffic
from pdgemm.schedules.training.flat_shards import owners_of
from pdgemm.training.layers.context import flat_array
from pdgemm.training.parameters import Parameters
from pdgemm.training.storage import Storage, UpdatedPart


@dataclass
class LossScale:
    """A factor of the loss, which changes as that of torch.amp.GradScaler; powers of 2 cause no rounding.

    value : the factor.   growth, backoff : what it is multiplied by after `interval` steps with finite gradients, and
        after a step in which the gradient of any rank was not finite: all ranks skip the update of this step.
    steps : since the value has changed.   `vars(scale)` is its state.
    """

    value: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    steps: int = 0

    def update(self, is_finite: bool) -> None:
        """Change the factor after a step.   is_finite : whether the gradients of all ranks were finite."""
        self.steps += 1
        if not is_finite:
            self.value, self.steps = self.value * self.backoff, 0
        elif self.steps == self.interval:
            self.value, self.steps = min(self.value * self.growth, 2.0**127), 0


class Owners:
    """Parameters that the ranks along tp divide, each whole at its owner.  Collective over the ranks along tp.

    storage : of the parts, in which whole parts belong to one rank of its own line.
    pieces  : the whole parameters that belong to this rank, which a rule updates.

    In a step gradients are brought to the owners, and updated weights back; `mesh.traffic` counts both under "owners".
    Of N words of whole parameters, a rank of t receives about N (t - 1)/t^2 in each.
    """

    def __init__(self, storage: Storage, parameters: Parameters) -> None:
        line, own = storage.line.mesh.line("tp"), storage.line.rank
        self.storage, self._line, self._ranks = storage, line, range(line.size)
        self._parts = {x.name: x for x in storage.pieces()}  # those with elements
        stored = {x: parameters[x] for x in storage.layout.names if storage.layout.owner.get(x, own) == own}
        owners = owners_of([x.shape.numel() for x in stored.values()], line.size)
        self._names = [[name for name, owner in zip(stored, owners) if owner == rank] for rank in self._ranks]
        self._divisions = {name: x.division for name, x in stored.items()}
        whole = {name: torch.empty(x.shape, device="meta") for name, x in stored.items()}
        self._shapes = {
            x: [self._divisions[x].part(whole[x], line.size, at).shape for at in self._ranks] for x in whole
        }
        words = [[sum(self._shapes[x][at].numel() for x in names) for names in self._names] for at in self._ranks]
        self._words = np.array(words)  # from, to: of the parts of gradients
        self.pieces = list[UpdatedPart]()
        for name in self._names[line.rank]:
            weights, gradient = torch.empty(2, *whole[name].shape, dtype=storage.wide)
            self.pieces.append(UpdatedPart(name, slice(0, weights.numel()), nn.Parameter(weights), gradient))

    def traffic(self) -> Traffic:
        """Return the traffic of a step of this rank, from formulas."""
        ways = (self._line.of_pairs(x, self.storage.layout.wide) for x in (self._words, self._words.T))
        return sum((x.traffic(self._line.rank) for x in ways), Traffic())

    def bytes(self, state_words: int) -> dict[str, int]:
        """Return the bytes of the whole parameters of this rank, by kind: see `Run.bytes`."""
        nbytes = sum(x.weights.nbytes for x in self.pieces)
        return {"gradients": nbytes, "optimizer": nbytes * (1 + state_words)}

    def read(self) -> None:
        """Bring the weights to their owners, before the first step."""
        self._bring("weights", "states")

    def begin_update(self) -> None:
        """Bring the gradients to the owners."""
        self._bring("gradient", "owners")

    @torch.no_grad()
    def end_update(self) -> None:
        """Bring the updated weights back."""
        sent = [
            self._divisions[x.name].part(x.weights, len(self._ranks), at) for at in self._ranks for x in self.pieces
        ]
        own = [self._parts[x].weights for names in self._names for x in names if x in self._parts]
        received = self._exchanged(sent, self._words.T, "owners")
        for part, x in zip(own, received.split([part.numel() for part in own])):
            part.copy_(x.view_as(part))

    @torch.no_grad()
    def _bring(self, what: str, kind: str) -> None:
        sent = [getattr(self._parts[x], what) for names in self._names for x in names if x in self._parts]
        shapes = [self._shapes[piece.name][at] for at in self._ranks for piece in self.pieces]
        received = self._exchanged(sent, self._words, kind)
        parts = [x.view(shape) for x, shape in zip(received.split([x.numel() for x in shapes]), shapes)]
        for k, piece in enumerate(self.pieces):
            getattr(piece, what).copy_(self._divisions[piece.name].joined(parts[k :: len(self.pieces)]))

    def _exchanged(self, tensors: list[torch.Tensor], words: np.ndarray, kind: str) -> torch.Tensor:
        """Send the elements of tensors, in the order of the ranks, and return the elements from all ranks."""
        flat = torch.cat([torch.empty(0, dtype=self.storage.wide), *(x.reshape(-1) for x in tensors)])
        return torch.from_numpy(self._line.exchange(flat_array(flat), words, kind))


WHOLE = {"Adafactor", "Muon"}  # rules of torch that depend on the shapes of parameters
Rule = Callable[..., torch.optim.Optimizer]
Chosen = tuple[list[torch.optim.Optimizer], list[UpdatedPart], list[Owners]]
Groups = Mapping[str, Mapping[str, Any]]  # options for patterns of names


class Updates:
    """The rules of a run, and the parts of parameters that they update on this rank.

    storages, parameters : of the run.   names : of the parameters of all stages.
    whole : a rule updates whole parameters.   scale : of the loss, or None.
    optimizers : of torch; none before `use`.   parts : of parameters, that this rank updates.
    owners : with `whole`, those of the parameters that tp divides.
    """

    def __init__(
        self, storages: list[Storage], parameters: Parameters, names: list[str], whole: bool, scale: LossScale | None
    ) -> None:
        self.storages, self.names, self._parameters, self._whole, self.scale = storages, names, parameters, whole, scale
        self.optimizers, self.owners = list[torch.optim.Optimizer](), list[Owners]()
        self.parts = [part for storage in storages for part in storage.pieces()]

    def choose(self, rules: Mapping[str, Rule], groups: Groups, options: Mapping[str, Any]) -> Chosen:
        """Return optimizers for patterns of names, with what they update.  Raises ArgumentError, also on one rank."""
        axes = {x: self._parameters[x.layout.names[0]].division.axis for x in self.storages}  # one for all of a storage
        divided = [x for x in axes if self._whole and axes[x] == "tp" and x.line.mesh.shape.tp > 1]
        owners = [Owners(x, self._parameters) for x in divided]
        parts = [part for x in axes if x not in divided for part in x.pieces()]
        parts += [part for x in owners for part in x.pieces]
        for pattern in (*rules, *groups):
            if not any(fnmatchcase(name, pattern) for name in self.names):
                raise ArgumentError(f"no parameter matches {pattern!r}; parameters are {', '.join(self.names)}")
        by_rule: dict[str | None, list[UpdatedPart]] = {pattern: [] for pattern in rules}
        for part in parts:
            by_rule.setdefault(_first_match(part.name, rules), []).append(part)
        if None in by_rule:
            raise ArgumentError(f"no rule matches {by_rule[None][0].name!r}: add one, such as for the pattern '*'")
        return [self._ruled(rules[x], by_rule[x], groups, options) for x in rules], parts, owners

    def _ruled(self, rule: Rule, parts: list[UpdatedPart], groups: Groups, options: Mapping[str, Any]) -> Any:
        """Return a rule for parts of parameters.  Raises ArgumentError."""
        kind: Any = getattr(rule, "func", rule)  # of a partial function
        names = {getattr(x, "__name__", "") for x in getattr(kind, "__mro__", [kind])}
        if "LBFGS" in names:
            raise ArgumentError("LBFGS computes the loss several times for an update, and a step computes it once")
        for part in parts if names & WHOLE else ():
            if part.weights.shape != self._parameters[part.name].shape:
                why = "which ep divides" if self._whole else "unless distribute(..., whole=True) gives it all of it"
                raise ArgumentError(
                    f"{kind.__name__} updates whole matrices, and this rank has a part of {part.name!r}, {why}"
                )
        by_pattern: dict[str | None, list[nn.Parameter]] = {pattern: [] for pattern in (*groups, None)}
        for part in parts:
            by_pattern[_first_match(part.name, groups)].append(part.weights)
        by_pattern[None] = by_pattern[None] or [nn.Parameter(torch.zeros(0, 0))]  # a rule needs a parameter
        listed = [{"params": x, **(groups[k] if k else {})} for k, x in by_pattern.items()]  # alike on all ranks
        return rule(listed, **options)

    @property
    def whole_names(self) -> set[str]:
        """The parameters that owners along tp update whole."""
        return {name for x in self.owners for name in x.storage.parameters}

    def use(self, optimizers: list[torch.optim.Optimizer], parts: list[UpdatedPart], owners: list[Owners]) -> None:
        """Let these optimizers update, and bring weights to the owners of whole parameters.  Collective."""
        self.optimizers, self.parts, self.owners = optimizers, parts, owners
        for each in owners:
            each.read()

    def update(self, square: float, clip: float | None, used: set[str]) -> float:
        """Update the parts of this rank, and begin to make the parameters whole; return the norm of the gradients.

        square : the sum of the squares of all gradients, which the loss scale multiplies.   clip : see `Run.step`.
        used   : the parameters on which the loss depends; others stay as they are, as in torch.
        """
        scale, is_finite = self.scale.value if self.scale else 1.0, isfinite(square)
        norm = square**0.5 / scale
        factor = (min(1.0, clip / (norm + 1e-6)) if clip is not None else 1.0) / scale
        for owners in self.owners:
            owners.begin_update()
        for part in self.parts:
            gradient = part.gradient.mul_(factor) if factor != 1 else part.gradient
            part.weights.grad = gradient if part.name in used else None
        with torch.autocast("cpu", enabled=False):
            for optimizer in self.optimizers if is_finite or not self.scale else ():
                optimizer.step()
        if self.scale:
            self.scale.update(is_finite)
        self.updated()
        torch.clear_autocast_cache()  # of parameters before the update, where a block of autocast has several steps
        return norm

    @torch.no_grad()
    def updated(self) -> None:
        """Begin to make the parameters whole of which this rank has set its parts.  Collective."""
        for owners in self.owners:
            owners.end_update()
        for storage in self.storages:
            storage.updated()


def _first_match(name: str, patterns: Iterable[str]) -> str | None:
    return next((x for x in patterns if fnmatchcase(name, x)), None)
