"""The report of a product that has run: what was counted beside what was planned."""

from __future__ import annotations

from functools import partial

from mpi4py import MPI

from pdgemm.instrument.recorder import Recorder
from pdgemm.instrument.report import MoveReport, Report, measured
from pdgemm.local.blas.threads import threads
from pdgemm.names import AnyName
from pdgemm.planning.product_plan import ProductPlan
from pdgemm.support.agreement import together


def report_of(
    plan: ProductPlan,
    comm: MPI.Intracomm,
    rank: int,
    coords: tuple[int, int],
    recorder: Recorder,
    seconds: float,
    moves: list[MoveReport],
    sharing: int,
) -> Report:
    product = plan.product
    report = Report(
        **measured(recorder, seconds),
        algorithm=AnyName(plan.algorithm),
        inside=plan.inside,
        mover=product.transport,
        device=product.device,
        ranks_per_device=sharing,
        compute=product.compute,
        grid=plan.shape[:2],
        layers=plan.shape[2],
        mnk=plan.mnk,
        dtype=str(product.accumulate),
        result_dtype="" if plan.problem.C.dtype == product.accumulate else str(plan.problem.C.dtype),
        panels=product.panels,
        panel_width=product.widest,
        lookahead=product.lookahead,
        threads=threads(),
        rank=rank,
        coords=coords,
        flops=product.flops,
        predicted=plan.traffic(rank),
        predicted_extra_bytes=plan.extra_bytes(rank),
        predicted_seconds=plan.seconds,
        lower_bound_words=plan.lower_bound_words,
        moves=tuple(moves),
    )
    return report.with_ranks(partial(of_all_ranks, comm))


def of_all_ranks(comm: MPI.Intracomm, report: Report) -> list[Report]:
    """Return the reports of one product by all ranks.  Collective."""
    with together(comm) as arguments:
        arguments += ["the summary of a report", report.mnk, report.algorithm, report.grid, report.dtype, report.flops]
    return comm.allgather(report)
