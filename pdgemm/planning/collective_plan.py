"""The cost of each algorithm of a collective operation on a machine, and the choice of the fastest algorithm."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.planning.machines.machine import Machine
from pdgemm.planning.machines.simulator import MOST_EVENTS, simulate
from pdgemm.schedules.collectives.collective import Collective, algorithms, even_parts
from pdgemm.support.text import Table, counted, in_seconds, in_words


@dataclass(frozen=True)
class CollectiveCost:
    """A collective and its cost: time of the slowest rank, most words and most messages sent or received by a rank."""

    collective: Collective
    seconds: float
    words: int
    messages: int

    def as_dict(self) -> dict[str, Any]:
        least = self.collective.lower_bounds()
        return {
            "algorithm": self.collective.algorithm,
            "seconds": self.seconds,
            "words": self.words,
            "messages": self.messages,
            "lower_bound_words": least[1],
            "lower_bound_rounds": least[0],
            "sums": algorithms(self.collective.operation)[self.collective.algorithm].sums,
        }


@lru_cache(maxsize=256)
def collective_costs(
    operation: str, counts: tuple[int, ...], dtype: np.dtype, ranks: int, machine: Machine
) -> tuple[CollectiveCost, ...]:
    """Return the simulated costs of all algorithms that run on this number of ranks and nodes, the fastest first.

    counts : words of each part, as in `Collective`.   ranks : number of ranks 0, 1, ...; nodes hold consecutive ranks.
    Raises ArgumentError for an unknown operation, and if the ranks send too many messages for a simulation.
    """
    per_node = machine.ranks_per_node or ranks
    node = tuple(rank // per_node for rank in range(ranks)) if per_node < ranks else ()
    costs = []
    for name, algorithm in algorithms(operation).items():
        if algorithm.takes(node):
            collective = Collective(operation, name, (*range(ranks),), counts, dtype, node)
            if collective.events * ranks > MOST_EVENTS:
                raise ArgumentError(f"{operation} on {ranks} ranks sends too many messages to simulate")
            run = simulate(collective, machine, ranks)
            words, messages = (run.words_sent, run.words_received), (run.messages_sent, run.messages_received)
            most = int(np.max(words)), int(np.max(messages))
            costs.append(CollectiveCost(collective, run.seconds, *most))
    return tuple(sorted(costs, key=lambda x: x.seconds))


def choose_collective(
    operation: str,
    counts: Iterable[int],
    dtype: np.dtype,
    ranks: int,
    machine: Machine,
    node: tuple[int, ...] | None = None,
) -> Collective:
    """Return the collective with the fastest algorithm.  Arguments as in `collective_costs`.

    node : the node of each rank, if it differs from the machine's; only algorithms that run on these nodes are chosen.
    """
    for cost in collective_costs(operation, tuple(counts), dtype, ranks, machine):
        x = cost.collective
        if node is None or algorithms(operation)[x.algorithm].takes(node):
            return x if node is None else replace(x, node=node)
    raise ArgumentError(f"no algorithm of {operation} runs on the nodes {node}")


def parts_of(operation: str, words: int, ranks: int) -> tuple[int, ...]:
    """Return the sizes of even parts of a vector of `words`; for "all_to_all", of the parts of every rank's vector."""
    return even_parts(words, ranks) * ranks if operation == "all_to_all" else even_parts(words, ranks)


def costs_table(costs: tuple[CollectiveCost, ...]) -> str:
    """Return the costs as a table, with the lower bounds, and the order in which each algorithm adds parts."""
    rounds, least = costs[0].collective.lower_bounds()
    rows = [
        (
            x.collective.algorithm,
            in_seconds(x.seconds),
            in_words(x.words),
            f"{x.words / least:.2f}" if least else "-",
            str(x.messages),
        )
        for x in costs
    ]
    table = Table(("algorithm", "time", "words", "of bound", "messages"), rows, words=("algorithm",))
    bound = f"any algorithm needs at least {in_words(round(least))} per rank, and at least {counted(rounds, 'round')}"
    orders = [f"sums of {x['algorithm']}: {x['sums']}" for x in (cost.as_dict() for cost in costs) if x["sums"]]
    return "\n".join([str(table), f"{bound}\n(Chan et al. 2007)", *orders])
