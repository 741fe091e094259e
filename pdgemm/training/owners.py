"""Whole parameters at one rank along tp, for rules whose update of a matrix depends on all of its elements."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import torch
from torch import nn

from pdgemm.instrument.recorder import Traffic
from pdgemm.parallel.mesh import Line
from pdgemm.schedules.collectives.collective import Collective
from pdgemm.schedules.training.flat_shards import owners_of
from pdgemm.training.layers.exchanges import flat_array
from pdgemm.training.parameters import DividedParameter
from pdgemm.training.storage import Storage, UpdatedPart
from pdgemm.transport.collectives import all_to_all


class Owners:
    """Parameters that the ranks along tp divide, each whole at its owner.  Collective over the line.

    line   : the ranks along tp.   storage : of the parts, in which whole parts belong to one rank of its own line.
    pieces : the whole parameters that belong to this rank, which a rule updates.
    to_owners, to_parts : the exchanges of a step, of gradients and of updated weights; `mesh.traffic` counts them under
        "owners".  Of N words of whole parameters, a rank of t receives about N (t - 1)/t^2 in each.
    """

    def __init__(self, line: Line, storage: Storage, parameters: Mapping[str, DividedParameter]) -> None:
        self.layout, ranks = storage.layout, range(line.size)
        layout = self.layout
        stored = {x: parameters[x] for x in layout.names if layout.owner.get(x, storage.line.rank) == storage.line.rank}
        owners = owners_of([x.shape.numel() for x in stored.values()], line.size)
        self._line, self._parts = line, {x.name: x for x in storage.pieces()}  # those with elements
        self._names = [[name for name, owner in zip(stored, owners) if owner == rank] for rank in ranks]
        self._divisions = {name: x.division for name, x in stored.items()}
        whole = {name: torch.empty(x.shape, device="meta") for name, x in stored.items()}
        self._shapes = {x: [self._divisions[x].part(whole[x], line.size, rank).shape for rank in ranks] for x in whole}
        words = [[sum(self._shapes[x][source].numel() for x in names) for names in self._names] for source in ranks]
        self.to_owners, self.to_parts = (
            Collective("all_to_all", "pairwise", (*ranks,), (*chain(*counts),), layout.wide)
            for counts in (words, zip(*words))
        )
        self.pieces = list[UpdatedPart]()
        for name in self._names[line.rank]:
            weights, gradient = torch.empty(2, *whole[name].shape, dtype=storage.wide)
            self.pieces.append(UpdatedPart(name, slice(0, weights.numel()), nn.Parameter(weights), gradient))

    def traffic(self) -> Traffic:
        """Return the traffic of a step of this rank, from formulas."""
        return self.to_owners.traffic(self._line.rank) + self.to_parts.traffic(self._line.rank)

    def bytes(self, state_words: int) -> dict[str, int]:
        """Return the bytes of the whole parameters of this rank, by kind: see `Run.bytes`."""
        nbytes = sum(x.weights.nbytes for x in self.pieces)
        return {"gradients": nbytes, "optimizer": nbytes * (1 + state_words)}

    def read(self) -> None:
        """Bring the weights to their owners, at the start and after they were loaded; no traffic is counted."""
        self._bring("weights", Traffic())

    def begin_update(self) -> None:
        """Bring the gradients to the owners."""
        self._bring("gradient", self._line.mesh.traffic["owners"])

    @torch.no_grad()
    def end_update(self) -> None:
        """Bring the updated weights back."""
        size = self._line.size
        sent = [[self._divisions[x.name].part(x.weights, size, rank) for x in self.pieces] for rank in range(size)]
        received = self._exchanged(self.to_parts, sent, self._line.mesh.traffic["owners"])
        for names, elements in zip(self._names, received):
            own = [self._parts[name].weights for name in names if name in self._parts]
            for part, x in zip(own, elements.split([part.numel() for part in own])):
                part.copy_(x.view_as(part))

    @torch.no_grad()
    def _bring(self, what: str, counted: Traffic) -> None:
        sent = [[getattr(self._parts[x], what) for x in names if x in self._parts] for names in self._names]
        received = self._exchanged(self.to_owners, sent, counted)
        shapes = [[self._shapes[piece.name][source] for piece in self.pieces] for source in range(self._line.size)]
        split = [elements.split([shape.numel() for shape in own]) for elements, own in zip(received, shapes)]
        for k, piece in enumerate(self.pieces):
            parts = [x[k].view(own[k]) for x, own in zip(split, shapes)]
            getattr(piece, what).copy_(self._divisions[piece.name].joined(parts))

    def _exchanged(
        self, collective: Collective, parts: list[list[torch.Tensor]], counted: Traffic
    ) -> list[torch.Tensor]:
        """Send tensors to each rank of the line, and return the elements from all ranks."""
        empty = torch.empty(0, dtype=getattr(torch, collective.dtype.name))
        sent = [flat_array(torch.cat([empty, *(x.reshape(-1) for x in row)])) for row in parts]
        received = all_to_all(collective, self._line.comm, sent, counted, self._line.mesh.transfers.wait)
        return [torch.from_numpy(x) for x in received]
