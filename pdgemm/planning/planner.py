"""The choice of the algorithm, the grid and the redistributions of a product, before the product runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from heapq import heapify, heappop, heappush
from math import inf

import numpy as np

from pdgemm.errors import ArgumentError, MemoryLimitError
from pdgemm.local.arrays import dtypes
from pdgemm.local.arrays.emulation import EMULATIONS
from pdgemm.local.blas.local_gemm import EXACT_WIDTH, EXACT_WIDTH_ON_DEVICE
from pdgemm.planning.machines.machine import Machine
from pdgemm.planning.machines.simulator import product_seconds, sample
from pdgemm.planning.problem import Problem
from pdgemm.planning.product_plan import MOVES_WEIGH, ProductPlan, with_moves
from pdgemm.planning.search.candidate_table import Candidate, candidates_table, wrapped
from pdgemm.planning.search.candidates import Arrangement, arrangements, arrangements_in_place, impossible
from pdgemm.schedules.mover_registry import AUTO, MOVERS
from pdgemm.support.text import in_bytes, in_words

PANEL_WIDTH = 512  # wide enough for BLAS to reach its peak, narrow enough for transfers to overlap with BLAS
PANEL_WIDTH_BETWEEN_NODES = 256  # the first panels take longer to arrive, and BLAS is hardly slower at this width
LOOKAHEAD_BETWEEN_NODES = 4  # so that panels of several owners fill each cable in both directions
# bytes of a row of a panel on a device: wider panels than on the host, because a device multiplies a hundred times as
# fast (small types even faster), but reads C at most ten times as fast; the host's time per panel is the same
DEVICE_PANEL_BYTES = 1 << 14
WIDTHS = (2048, 1024, 512, 256, 128)  # panel widths that are compared if the caller requests none
TIE = 1.1  # ratio of costs up to which plans count as equal
_WORTH_TUNING = 0.99  # ratio of predicted times above which the default is kept
_MANY_PANELS = 1000  # with more panels, filling the pipeline takes little time, and narrower panels gain nothing
_NO_LIMIT = 1 << 62
ROWS = 5  # candidates in a table, unless all are requested
RULE = (  # MOVES_WEIGH and TIE in words
    "of the plans within 10% of the shortest predicted time, with redistribution counted twice, the one by which a "
    "rank receives and allocates the fewest words"
)


def plan_product(problem: Problem) -> ProductPlan:
    """Return the best plan by RULE among those that fit the memory limit on every rank.

    The model is not accurate to 10%, so words decide between plans that differ by less.  New grids are those on which a
    rank receives the fewest words (`grid_search`).  Redistribution, with its memory and time, is part of a plan.
    Raises ArgumentError where no grid of the ranks fits the algorithm, and MemoryLimitError where no plan fits; its
    message states the bytes required.
    """
    limit = problem.memory_limit
    plan, least = best_plan(problem)
    if plan is not None:
        return plan
    assert limit is not None
    raise MemoryLimitError(
        f"memory limit {limit} bytes per rank is too small for A ({problem.A}), B ({problem.B}) and C ({problem.C}): "
        f"at least {least} bytes are needed, {least - limit} more"
        + (f", with lookahead {problem.lookahead}" if problem.lookahead else "")
    )


@lru_cache(maxsize=256)
def best_plan(problem: Problem) -> tuple[ProductPlan | None, int]:
    """Return (plan, 0), the best plan that fits the memory limit, or (None, the fewest bytes that a plan needs)."""
    plan, least = _best(problem)
    if plan is None and problem.shared and problem.mover == "auto":  # sent panels need no copies in node-shared memory
        plan, other = _best(replace(problem, shared=False, outside_node_memory=(), nodes=()))
        least = min(least, other)
    return plan, least


def _best(problem: Problem) -> tuple[ProductPlan | None, int]:
    """Return the result of `best_plan` for one transport: panels read in place, or panels sent."""
    limit, least, best = problem.memory_limit, _NO_LIMIT, inf
    known = _unrivalled(problem)
    if known is not None:
        return tuned(known), 0
    fitting: list[ProductPlan] = []
    for plan in candidates(problem):
        if plan.cost > TIE * best:
            break
        fitted = fit(plan, limit)
        if fits_in_memory(fitted, limit):
            fitting.append(fitted)
            best = min(best, fitted.cost)
        else:
            least = min(least, fitted.extra_bytes(None))
    if fitting:
        best_of_all = min((x for x in fitting if x.cost <= TIE * best), key=lambda plan: plan.weight)
        return tuned(best_of_all), 0
    return None, least


def _unrivalled(problem: Problem) -> ProductPlan | None:
    """Return the best plan without redistribution if no plan can beat it by 10%; None: plans must be compared."""
    limit = problem.memory_limit
    still = [
        plan
        for plan in (with_moves(arrangement, problem) for arrangement in arrangements_in_place(problem))
        if fits_in_memory(plan, limit)
    ]
    if not still:
        return None
    best = min(still, key=lambda plan: plan.cost)
    least = problem.machine.least(best.product.panel_dtype, problem.mnk, problem.size)
    least *= best.product.blas_products * (0.5 if problem.triangle else 1)
    if problem.size > 1 and best.cost > TIE * (least + MOVES_WEIGH * problem.machine.call_overhead):
        return None
    return min((x for x in still if x.cost <= TIE * best.cost), key=lambda plan: plan.weight)


def tuned(plan: ProductPlan) -> ProductPlan:
    """Return the plan with the fastest mover and panel width, unless the caller chose them.

    Mover and width change neither the words nor the layouts.  The plan is returned unchanged if its panels were
    narrowed to fit the memory limit, if they contain all inner indices of a rank, or if no mover moves them.
    """
    problem, product = plan.problem, plan.product
    sent = not product.transport.shared
    if not (product.exposed or (product.mover in MOVERS and sent)) or product.width != problem.width:
        return plan
    open_mover = problem.mover == AUTO and sent and not product.nothing_travels
    movers = problem.broadcasts if open_mover else (product.mover,)
    widths = [problem.width] if problem.width_asked else [x for x in WIDTHS if x <= problem.width] or [problem.width]
    if product.panels > _MANY_PANELS:
        widths = [problem.width]
    limit, best = problem.memory_limit, plan
    widest = product.product_width  # all widths from this one on give the same product
    widths = [*dict.fromkeys(problem.width if width >= widest else width for width in widths)]
    for mover, width in itertools.product(movers, widths):
        if (mover, width) == (product.mover, product.width):
            continue
        tried = replace(plan, product=replace(product, mover=mover, width=width))
        if fits_in_memory(tried, limit) and tried.seconds < best.seconds * _WORTH_TUNING:
            best = tried
    return best


def panel_width(
    requested: int | None,
    accumulate: np.dtype,
    machine: Machine,
    itemsize: int = 0,
    triangle: bool = False,
    compute: str = "",
) -> int:
    """Return the width of the widest panel: the requested one or a default, limited so that integer sums stay exact.

    itemsize : bytes of an element of the operands on a device; 0: they are on the host.
    triangle : only one triangle of C is formed.  Its rectangles are smaller, so BLAS needs wider panels to be fast.
    compute : the type to which operands are rounded, or the name of an emulation.
    """
    on_host = PANEL_WIDTH if machine.ranks_per_node is None else PANEL_WIDTH_BETWEEN_NODES
    on_host *= 1 + triangle
    return min(
        requested or (DEVICE_PANEL_BYTES // itemsize if itemsize else on_host),
        EMULATIONS[compute].widest if compute in EMULATIONS else _NO_LIMIT,
        _NO_LIMIT if accumulate in dtypes.BLAS else EXACT_WIDTH_ON_DEVICE if itemsize else EXACT_WIDTH,
    )


def panels_ahead(requested: int | None, machine: Machine, on_device: bool = False) -> int:
    """Return the lookahead, as requested or a default: the number of panels in flight while an earlier one is used."""
    if requested is not None:
        return requested
    return 1 if machine.ranks_per_node is None or on_device else LOOKAHEAD_BETWEEN_NODES


def candidates(problem: Problem) -> Iterator[ProductPlan]:
    """Yield plans, the cheapest first; the exact cost of a plan is computed only when it may be the next one."""
    # costs on the heap are lower bounds at first: the product on one rank, and the call overhead of each redistribution
    heap: list[tuple[float, int, ProductPlan | Arrangement]] = []
    machine = problem.machine
    for number, arrangement in enumerate(dict.fromkeys(arrangements(problem))):
        moved = sum(not x.same_owners(to) for x, to in zip(problem.layouts, arrangement.layouts))
        seconds = product_seconds(arrangement.product, machine, sample(problem.size)[0])
        heap.append((seconds + MOVES_WEIGH * moved * machine.call_overhead, number, arrangement))
    if not heap:
        raise ArgumentError(impossible(problem.request, problem.size))
    heapify(heap)
    while heap:
        _, number, best = heappop(heap)
        if isinstance(best, ProductPlan):
            yield best
        else:
            plan = with_moves(best, problem)
            heappush(heap, (plan.cost, number, plan))


def fits_in_memory(plan: ProductPlan, limit: int | None) -> bool:
    return limit is None or plan.extra_bytes(None) <= limit


def fit(plan: ProductPlan, limit: int | None) -> ProductPlan:
    """Return the plan with as much workspace as the limit allows; if none fits the limit, with the least workspace."""
    if limit is None or plan.extra_bytes(None) <= limit:
        return plan

    def with_workspace(share: float, spare: int) -> ProductPlan:
        return with_moves(plan.arrangement._replace(product=plan.product.scaled(share)), plan.problem, spare)

    narrowest = with_workspace(0, 0)
    spare = limit - narrowest.extra_bytes(None)
    if spare < 0:
        return narrowest
    # half of the spare bytes is for the messages of redistributions, the rest for panels
    spare //= 2 * max(1, len(plan.moves))
    best, low, high = with_workspace(0, spare), 0.0, 1.0
    for _ in range(10):
        middle = (low + high) / 2
        tried = with_workspace(middle, spare)
        if tried.extra_bytes(None) <= limit:
            best, low = tried, middle
        else:
            high = middle
    return best


def considered(plan: ProductPlan) -> list[Candidate]:
    """Return this plan, then the other plans, the cheapest first, each with the reason why it was not chosen."""
    rows, limit = [plan.candidate("chosen", chosen=True)], plan.problem.memory_limit
    for other in candidates(plan.problem):
        fitted = tuned(fit(other, limit))
        within_limit = fits_in_memory(fitted, limit)
        verdict = _beside(plan, fitted) if within_limit else f"needs {in_bytes(fitted.extra_bytes(None))}"
        rows.append(replace(fitted.candidate(verdict), fits=within_limit))
    distinct: dict[Candidate, Candidate] = {}  # one row for an algorithm on a matrix's grid and on an equal new grid
    for row in rows:
        same = replace(row, seconds=0, cost=0, memory_bytes_per_rank=0, verdict="", chosen=False, fits=True)
        distinct.setdefault(same, row)
    return list(distinct.values())


def _beside(plan: ProductPlan, other: ProductPlan) -> str:
    """Return the reason why the other plan was not chosen."""
    if not plan.cost:
        return "as long"
    ratio = other.cost / plan.cost
    words = f", {other.weight / plan.weight:.2f} times the words" if ratio <= TIE and plan.weight else ""
    return f"{ratio:.2f} times the cost{words}"


def explain(plan: ProductPlan, whole: bool = False, more: str = "explain(all=True)") -> str:
    """Return the plan, a table of the candidates, and the rule of the choice, in lines of at most 80 characters."""
    lines = [wrapped(str(plan)), candidates_explained(considered(plan), whole, more)]
    if plan.protection:
        checks, share = plan.protection.cost(0), plan.protection.seconds / max(plan.seconds, 1e-9)
        lines.append(
            wrapped(
                f"checksums: {in_words(checks.words)} in {checks.allreduces} allreduces, {in_bytes(checks.bytes)}, and "
                f"A, B and C are read once more: about {share:.1%} of the time"
            )
        )
    return "\n".join(lines)


def candidates_explained(candidates: list[Candidate], whole: bool, more: str) -> str:
    """Return the candidates as a table, and the reason why the first one was chosen.

    whole : show all candidates, and not only the first ones.   more : the call or option that shows all of them.
    """
    shown = candidates if whole or len(candidates) <= ROWS + 1 else candidates[:ROWS]
    chosen = candidates[0]
    lines = [candidates_table(shown)]
    if len(shown) < len(candidates):
        lines.append(f"and {len(candidates) - len(shown)} more: {more}")
    lines.append(wrapped(f"rule: {RULE}"))
    fastest = min((x for x in candidates if x.fits), key=lambda x: x.seconds)
    if fastest.seconds < chosen.seconds:
        fewer = 1 - fastest.seconds / chosen.seconds
        why = (
            "but the words and the memory of the chosen plan are less, and the costs differ by less than 10%"
            if fastest.cost <= TIE * chosen.cost
            else "but costs more, because redistribution counts twice"
        )
        lines.append(wrapped(f"{fastest.name} on {fastest.grid_text} takes {fewer:.1%} less time, {why}"))
    return "\n".join(lines)
