"""The simulation of a plan of a product, with its redistributions.  No MPI, no data."""

from __future__ import annotations

from dataclasses import dataclass

from pdgemm.planning.machines.machine import Machine
from pdgemm.planning.machines.simulator import MOST_EVENTS, Simulation, exchange_seconds, sample, simulate
from pdgemm.planning.product_plan import ProductPlan

MOST_WALKED = MOST_EVENTS // 2  # messages of an exchange, all in one round: they take 1.2 GB of memory


@dataclass(frozen=True)
class PlanSimulation:
    """The simulation of a product, and of the redistributions before and after it, which run one after the other.

    walked     : the simulations of redistributions, by the name of the matrix.
    by_formula : the predicted seconds of redistributions that have too many messages, by the name of the matrix.
    copying    : the predicted seconds for the first touch of redistributed copies.
    """

    product: Simulation
    walked: dict[str, Simulation]
    by_formula: dict[str, float]
    copying: float

    @property
    def moving_seconds(self) -> float:
        """The seconds of all redistributions, with the first touch of the copies that they fill."""
        return self.copying + sum(x.seconds for x in self.walked.values()) + sum(self.by_formula.values())

    @property
    def seconds(self) -> float:
        return self.product.seconds + self.moving_seconds


def simulate_plan(plan: ProductPlan, machine: Machine, most: int = MOST_WALKED) -> PlanSimulation:
    """Return the simulation of a plan on its ranks, message by message; ranks of a node share its network.

    most : the most messages of a redistribution that is simulated, and not computed by the formula of the plan.

    Raises ArgumentError if the product has too many messages.
    """
    ranks, walked, by_formula = plan.problem.size, dict[str, Simulation](), dict[str, float]()
    product = simulate(plan.product, machine, ranks)
    for name, move in plan.moves:
        if move.events * ranks <= most:
            walked[name] = simulate(move, machine, ranks)
        else:
            by_formula[name] = max(
                exchange_seconds(move, machine, rank) + move.extra_bytes(rank) / machine.first_touch_bandwidth
                for rank in sample(ranks)
            )
    return PlanSimulation(product, walked, by_formula, plan.copying_seconds)
