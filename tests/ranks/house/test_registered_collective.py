"""A user's collective algorithms: planned, simulated, carried out and counted like those of the package.

An all-gather through a hub: the first rank collects all parts, and broadcasts them in a tree.
An all-reduce along a chain: each rank adds its part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from collectives import check_by_messages, check_counts, check_parts
from tiers import every_grid

from pdgemm.planning.collective_plan import collective_costs, costs_table
from pdgemm.planning.machines.machine import Machine
from pdgemm.schedules.collectives import collective as registry
from pdgemm.schedules.collectives.collective import Collective, CollectiveAlgorithm, register_collective
from pdgemm.schedules.collectives.collective_steps import (
    CollectiveStep,
    CollectiveSteps,
    binomial_broadcast,
    binomial_gather,
)

pytestmark = pytest.mark.mpi


def by_hub(collective: Collective) -> CollectiveSteps:
    places, cuts = np.arange(len(collective.ranks)), np.arange(len(collective.ranks) + 1)
    yield from binomial_gather(places, cuts)
    yield from binomial_broadcast(places, cuts)


def by_chain(collective: Collective) -> CollectiveSteps:
    """Add up x_0 + x_1 + x_2 ... along the ranks, and send the sum back."""
    all_parts = np.array([0]), np.array([len(collective.ranks)])
    links = [(np.array([at]), np.array([at + 1])) for at in range(len(collective.ranks) - 1)]
    for here, there in links:
        yield CollectiveStep(here, there, *all_parts, adds=True)
    for here, there in reversed(links):
        yield CollectiveStep(there, here, *all_parts)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register_collective("all_gather", "hub", CollectiveAlgorithm(by_hub, lambda ranks: 4 * ranks.bit_length()))
    register_collective(
        "all_reduce", "chain", CollectiveAlgorithm(by_chain, lambda ranks: 2 * ranks, "(x0 + x1) + x2 + ...")
    )
    yield
    del registry.algorithms("all_gather")["hub"], registry.algorithms("all_reduce")["chain"]


@every_grid
@pytest.mark.parametrize(("operation", "name"), [("all_gather", "hub"), ("all_reduce", "chain")])
def test_they_run_through_the_same_checks(comm: Any, operation: str, name: str) -> None:
    p = comm.size
    for counts in ([at % 3 for at in range(p)], [2 * at + 1 for at in range(p)], [0] * p):
        for order in (range(p), range(p)[::-1]):
            collective = Collective(operation, name, tuple(order), tuple(counts), np.dtype("d"))
            check_parts(collective)
            check_counts(collective)
            check_by_messages(comm, collective)


def test_they_are_planned_beside_the_others(comm: Any) -> None:
    collective_costs.cache_clear()
    costs = collective_costs("all_reduce", (5,) * comm.size, np.dtype("d"), comm.size, Machine())
    assert "chain" in [x.collective.algorithm for x in costs]
    assert "sums of chain: (x0 + x1) + x2 + ..." in costs_table(costs)
    collective_costs.cache_clear()
