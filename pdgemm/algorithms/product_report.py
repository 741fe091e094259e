"""The report of a product that has run: counted values beside planned values."""

from __future__ import annotations

from collections.abc import Callable

from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.recorder import Recorder
from pdgemm.instrument.report import Report
from pdgemm.instrument.run_report import MoveReport
from pdgemm.names import AnyName
from pdgemm.planning.product_plan import ProductPlan


def report_of(
    plan: ProductPlan,
    grid: ProcessGrid,
    coords: tuple[int, int],
    recorder: Recorder,
    seconds: float,
    moves: list[Callable[[], MoveReport]],
    sharing: int,
    names: tuple[str, str],
) -> Report:
    """Return the report of a product.   moves : make the reports of its redistributions, which `recorder` counts.

    names : of op(A) and op(B).
    """
    product, ending = plan.product, plan.problem.ending
    result = ending.dtype if ending else plan.problem.C.dtype
    return Report.of_run(
        recorder,
        [plan],
        grid,
        seconds,
        algorithm=AnyName(plan.algorithm),
        inside=plan.inside,
        collective=plan.collective,
        mover=product.transport,
        device=product.device,
        ranks_per_device=sharing,
        compute=product.compute,
        grid=plan.shape[:2],
        layers=plan.shape[2],
        mnk=plan.mnk,
        operands=names,
        dtype=str(product.accumulate),
        epilogue=ending.text if ending else "",
        result_dtype="" if result == product.accumulate else str(result),
        panels=product.panels,
        panel_width=product.widest,
        lookahead=product.lookahead,
        coords=coords,
        predicted_seconds=plan.seconds,
        lower_bound_words=plan.lower_bound_words,
        moves=tuple(move() for move in moves),
    )
