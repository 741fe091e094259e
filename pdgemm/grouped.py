"""Grouped products Y[i] := alpha X[i] op(W_g) + beta Y[i], where g is the group of row i: the experts of a mixture.

One exchange sends rows to the ranks that own their groups, the rows are multiplied as a batch, and a second exchange
returns the results.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import numpy as np

from pdgemm.algorithms.epilogue import Epilogue
from pdgemm.algorithms.indexing.routing import RoutedTransfer, Routing, checked_owners, plan_grouped
from pdgemm.batched import BatchForm, BatchProduct
from pdgemm.errors import ArgumentError, DeviceError, DTypeError, LayoutError
from pdgemm.instrument.log import INFO, LOG
from pdgemm.instrument.run_report import RunReport, traffic_of
from pdgemm.local.arrays import device as devices, dtypes
from pdgemm.local.arrays.arguments import op_letter
from pdgemm.local.arrays.device import Array
from pdgemm.matrix import argument_checks as checks
from pdgemm.matrix.batch import Batch
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import shared_or_sent
from pdgemm.names import DType, Transpose
from pdgemm.support.agreement import together
from pdgemm.support.text import counted, in_rate, in_seconds
from pdgemm.transport.packed_exchange import repeated_if_unmapped


def matmul_grouped(
    X: DistMatrix,
    W: Batch,
    groups: Any,
    Y: DistMatrix | None = None,
    *,
    alpha: complex = 1,
    beta: complex = 0,
    transb: Transpose = "N",
    accumulate_dtype: DType | None = None,
    epilogue: Epilogue | None = None,
    check: bool = True,
) -> DistMatrix:
    """Compute Y[i] := alpha X[i] op(W_g) + beta Y[i] for all rows i, where g is the group of row i.  Collective.

    X : DistMatrix (m, d) in any layout.   W : Batch with op(W_g) (d, n), whose owners may be any of the same ranks.
    groups : a `Routing` of `plan_grouped`; or integers, (local rows of X) or (local rows, k), from which it is made.
        For a row in no group (-1), Y[i] := beta Y[i].  With k > 1, Y has mk rows, of which row ik + j belongs to the
        j-th group of row i of X.  With a Routing, X may have mk rows as well, each with one group.
    Y : DistMatrix (mk, n) in any layout over the same ranks, overwritten; it may be X.  None: Y is allocated, and the k
        rows for row i are on the ranks of row i of the routed matrix.
    alpha, beta : scalars of Y's type.  beta == 0: Y is not read.  alpha == 0: W is not read.
    transb : "N" op(W) = W, "T" op(W) = W^T, "C" op(W) = W^H.
    accumulate_dtype, check : as for `matmul_batched`.
    epilogue : Y[i] := f(scale (alpha X[i] op(W_g)) + bias), as for `matmul_batched`; beta must be 0.  A vector is an
        array for all groups, or a Batch with one row (1, n) for each group.  Rows in no group are 0.

    Returns Y; `Y.report` is a RunReport.  Its `imbalance` is the work of the busiest rank / the mean work: each
    group is multiplied only by its owner.

    Cost per rank: 2dn flops for each row of its groups; each row is sent once to each of its groups on other ranks, d
    words, and its result back, n words; memory for the rows of its groups, d + n words each, and for messages of at
    most 1 MiB (on a device, or between two nodes, 32 MiB).
    Raises LayoutError, GridError, DTypeError, DeviceError or ArgumentError, the same on every rank.
    Error: as of `matmul_batched`, and one rounding more to Y's type if beta is not 0.
    """
    start, comm = perf_counter(), checks.communicator(X=X)
    with together(comm, check) as description:
        description.append("matmul_grouped")
        form = BatchForm(alpha, beta, "N", transb, accumulate_dtype, epilogue)
        _check(X, W, groups, Y, form)
        if epilogue is not None and Y is not None and beta != 0:
            raise ArgumentError(f"beta = {beta}: a grouped product with an epilogue overwrites Y")
    routing = groups if isinstance(groups, Routing) else plan_grouped(X, groups, W)
    return _multiplied(X, W, routing, Y, form, check, start)


@repeated_if_unmapped
def _multiplied(
    X: DistMatrix, W: Batch, routing: Routing, Y: DistMatrix | None, form: BatchForm, check: bool, start: float
) -> DistMatrix:
    """Carry out a grouped product whose arguments are checked."""
    comm, new_result = X.grid.comm, Y is None

    def set_up(by_nodes: bool) -> tuple[DistMatrix, Array, RoutedTransfer, BatchProduct]:
        with (agreement := together(comm, check)) as description:
            n = _width(W, form.transb, Y)
            new = routing.new_result(n, dtypes.product(X.dtype, W.dtype), W.device) if Y is None else Y
            rows, results = (routing.new_rows(width, x.dtype, W.device) for width, x in ((X.shape[1], X), (n, new)))
            inward = RoutedTransfer(routing, X, rows, True, X.shared, by_nodes, agreement)
            product = BatchProduct(routing.batch_of(rows), W, routing.batch_of(results), form._replace(beta=0))
            description += ["matmul_grouped", inward.plan.description, *product.description]
        return new, results, inward, product

    Y, results, inward, product = shared_or_sent(comm, set_up)
    outward = routing.transfer_to(Y, results, 0 if new_result else form.beta, new_result, check)
    counts = inward()
    work = product(perf_counter()).report
    back = outward()
    plans = [inward.plan, outward.plan]
    Y.report = RunReport.of_run(
        back,
        plans,
        routing.grid,
        perf_counter() - start,
        text=_text,
        counted=counts.traffic + back.traffic,
        extra_bytes=counts.peak_bytes + back.peak_bytes,
        predicted_extra_bytes=sum(x.extra_bytes(routing.grid.rank) for x in plans),
        groups=len(W),
        rows=sum(routing.counts),
        flops=work.flops,
        local_flops=work.local_flops,
        compute_seconds=work.seconds,
        imbalance=work.imbalance,
    )
    if LOG.isEnabledFor(INFO) and not comm.rank:
        LOG.info("%s", Y.report)
    return Y


def _text(report: RunReport) -> str:
    rate = report.local_flops / report.compute_seconds if report.compute_seconds else 0.0
    return (
        f"{counted(report.rows, 'row')} in {counted(report.groups, 'group')}: {traffic_of(report)}, and multiplied for "
        f"{in_seconds(report.compute_seconds)} of {in_seconds(report.seconds)} at {in_rate(rate)}; the busiest rank "
        f"had {report.imbalance:.2f} times the mean work"
    )


def _width(W: Batch, transb: str, Y: DistMatrix | None) -> int:
    """Return the number of columns of the result."""
    if len(W):
        return int(W.shapes[0, 1 if op_letter(transb, "transb") == "N" else 0])
    return 0 if Y is None else Y.shape[1]


def _check(X: Any, W: Any, groups: Any, Y: Any, form: BatchForm) -> None:
    """Raise on this rank where the arguments of a grouped product do not fit together."""
    checks.check_matrices(X=X, **({} if Y is None else {"Y": Y}))
    if not isinstance(W, Batch):
        raise DTypeError(f"W must be a Batch, got {type(W).__name__}")
    owners = checked_owners(W, X)
    checks.check_dtype("X", X, dtypes.OPERANDS)
    if W.dtype not in dtypes.OPERANDS:
        raise DTypeError(f"W has dtype {W.dtype}; supported: {dtypes.names(dtypes.OPERANDS)}")
    shapes = W.shapes if op_letter(form.transb, "transb") == "N" else W.shapes[:, ::-1]
    n = _width(W, form.transb, Y)
    for g in (shapes != (X.shape[1], n)).any(axis=1).nonzero()[0][:1]:
        rows, cols = shapes[g]
        raise LayoutError(
            f"op(W) of group {g} is {rows} x {cols}, not {X.shape[1]} x {n}: X is {X.distribution} on a {X.grid} grid"
        )
    if isinstance(groups, Routing) and not np.array_equal(groups.owner, owners):
        raise LayoutError(f"the groups of {groups!r} have other owners than the items of {W!r}")
    dtype = dtypes.product(X.dtype, W.dtype) if Y is None else Y.dtype
    if Y is not None:
        checks.check_dtype("Y", Y, dtypes.RESULTS)
        checks.check_result("Y", Y, {})
        choices = np.shape(groups)[1] if np.ndim(groups) == 2 else 1
        m = groups.rows * groups.choices if isinstance(groups, Routing) else X.shape[0] * choices
        if Y.shape != (m, n):
            raise LayoutError(f"Y is {Y.distribution}, on a {Y.grid} grid, but the result is {m} x {n}")
    for name, device in (("W", W.device), ("Y", W.device if Y is None else devices.of(Y.stored))):
        if device is not devices.of(X.stored):
            raise DeviceError(f"X and {name} are on different devices: copy one of them")
    checks.accumulation(X.dtype, W.dtype, dtype, form.accumulate_dtype)
    checks.as_scalar(form.alpha, dtype, "alpha"), checks.as_scalar(form.beta, dtype, "beta")
