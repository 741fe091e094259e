"""Whole parameters at one rank along tp, for rules whose update of a matrix depends on all of its elements."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from pdgemm.instrument.recorder import Traffic
from pdgemm.schedules.training.flat_shards import owners_of
from pdgemm.training.layers.exchanges import flat_array
from pdgemm.training.parameters import Parameters
from pdgemm.training.storage import Storage, UpdatedPart


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
