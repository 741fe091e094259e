"""The ranks and the machine on which tensors are contracted, and the cost of moves there.  No MPI, no data."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pdgemm.grids.tensor_layout import TensorLayout
from pdgemm.planning.machines.machine import CUDA, Machine
from pdgemm.planning.machines.simulator import consecutive, exchange_seconds, fastest_exchange, sample
from pdgemm.planning.program import Stage
from pdgemm.schedules.exchanges.exchange import Selection
from pdgemm.schedules.exchanges.tensor_exchange import NO_PAIRS, Pairs, matrix_to_read, plan_move, stays_in_place
from pdgemm.schedules.mover_registry import IPC, NCCL


class TensorValue(NamedTuple):
    """A tensor as a value.   free : its layout may be chosen, because the tensor does not exist yet."""

    layout: TensorLayout
    dtype: np.dtype
    free: bool = False


class Resources(NamedTuple):
    """The ranks and the machine of a contraction.

    memory_limit : bytes per rank beyond the given tensors; None: any number.
    fewest_words : the contraction with the fewest words is chosen, and not that with the least time.
    """

    size: int
    machine: Machine
    memory_limit: int | None = None
    rank_map: tuple[int, ...] = ()
    fewest_words: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.rank_map or tuple(range(self.size))

    def move(
        self, source: TensorLayout, target: TensorLayout, dtype: np.dtype, pairs: Pairs = NO_PAIRS
    ) -> Selection | None:
        """Return the exchange of a tensor's move as it would run; None if each rank keeps its elements."""
        if not pairs and stays_in_place(source, target):
            return None
        per_node = self.machine.ranks_per_node
        one_node = per_node is None or per_node >= self.size
        gpus, several, links = self.machine.device == CUDA, self.size > 1, self.machine.intra
        nccl = gpus and several and NCCL.name in (links if one_node else self.machine.inter)
        shared, staged = several and one_node and (not gpus or IPC.name in links), self.machine.staged and not nccl
        ways = shared, CUDA if gpus else "", staged, nccl
        direct = plan_move(source, target, (dtype, dtype), self.size, pairs, ways=ways)
        return direct if one_node else fastest_exchange(direct, consecutive(self.size, per_node), self.machine)


class Costs:
    """The stages of a plan, their predicted time, and the bytes that a rank needs for them, while they are added."""

    def __init__(self, resources: Resources) -> None:
        self.resources, self.stages, self.seconds, self.extra_bytes = resources, list[tuple[str, Stage]](), 0.0, 0

    def move(
        self, name: str, source: TensorLayout, target: TensorLayout, dtype: np.dtype, pairs: Pairs = NO_PAIRS
    ) -> None:
        """Add the move of a tensor: a local copy and, if ranks do not keep their elements, an exchange."""
        if not pairs and source.same_owners(target):
            return
        machine, nbytes = self.resources.machine, matrix_to_read(source, target, dtype).local_bytes(None)
        self.seconds += nbytes / machine.copy_bandwidth
        if move := self.resources.move(source, target, dtype, pairs):
            self.stages.append((name, move))
            self.seconds += max(exchange_seconds(move, machine, rank) for rank in sample(move.size))
            nbytes += move.target.local_bytes(None) + move.extra_bytes(None)
        self.extra_bytes += nbytes
