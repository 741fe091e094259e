"""The run of a panel algorithm: the choice of the mover, working copies of matrices, buffers, and the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from time import perf_counter
from typing import Any, Generic, TypeVar

import numpy as np
from mpi4py import MPI

from pdgemm.algorithms.redistribution import redistribute
from pdgemm.devices.streams import recorder_of
from pdgemm.errors import DeviceError
from pdgemm.grids.layout import Layout, Order
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument import spans
from pdgemm.instrument.recorder import Recorder
from pdgemm.instrument.report import Report
from pdgemm.instrument.run_report import RunReport
from pdgemm.instrument.spans import HOST
from pdgemm.local.arrays import device as devices
from pdgemm.local.arrays.device import Array
from pdgemm.local.arrays.elementwise import CONJUGATE, CONVERT
from pdgemm.local.blas.threads import multiplier, threads
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import new_array, new_shared, shared_or_sent
from pdgemm.names import AnyName
from pdgemm.planning.machines.machine import machine_at_hand, on_nodes
from pdgemm.planning.machines.simulator import simulate
from pdgemm.schedules.mover_registry import RING, SHARED
from pdgemm.schedules.panels.panel_schedule import OneRankSchedule, PanelSchedule
from pdgemm.support.agreement import agree, together
from pdgemm.support.waits import Wait, poll_until
from pdgemm.transport.movers.arrivals import Transfers
from pdgemm.transport.movers.node_arrays import NodeArrays
from pdgemm.transport.packed_exchange import kept_if_it_fails
from pdgemm.transport.panels.in_place import InPlace
from pdgemm.transport.panels.task import Planned, Task

T = TypeVar("T")
_NEVER = 1 << 62  # larger than any row number
_LONG = 3e8  # flops of a routine on one rank from which the cores of other ranks make it faster


def can_read(*matrices: DistMatrix) -> str:
    """Return the mover of panels: "shared" if all ranks can read each other's local arrays in place, else "ring".

    Raises DeviceError on all ranks where panels can be neither read nor sent.
    """
    A, mover = matrices[0], RING.name
    if all(x.shared for x in matrices):
        mover = expected_mover(A)
    device = devices.of(A.stored)
    if device and mover == RING.name and A.grid.size > 1 and (reach := device.reach(A.grid)).staged:
        raise DeviceError(f"a matrix is on {device.name}, and {reach}: factor it on the host, A.to_host()")
    return mover


def expected_mover(A: DistMatrix) -> str:
    """Return the mover of panels for new matrices on A's grid and device, if node-shared memory can be allocated."""
    grid, device = A.grid, devices.of(A.stored)
    reads = device.reach(grid).reads == SHARED.name if device else grid.shares_memory
    return SHARED.name if reads and grid.size > 1 and grid.ranks_per_node is None else RING.name


def device_of(A: DistMatrix) -> str:
    """Return the device name of a matrix in the notation of schedules: "" for the host."""
    return "" if A.device == devices.HOST else A.device


class PanelAlgorithm(Generic[Planned]):
    """One rank's part of a panel algorithm; calling it carries out the schedule.

    The call of some algorithms returns a number, such as the order of a leading minor that is not positive definite; 0
    means that there is none.  Others return None.  `run_panels` returns the smallest nonzero number of all ranks.
    """

    def __init__(self, task: Task[Planned]) -> None:
        self._task, self._plan, self._A = task, task.schedule, task.arrays["A"]
        self._rows, self._cols = task.schedule.rows, task.schedule.cols


def run_panels(
    schedule: PanelSchedule,
    executor: Callable[[Task[Any]], Callable[[], int | None]],
    matrices: dict[str, DistMatrix],
    what: str,
    moves: Sequence[RunReport] = (),
    start: float | None = None,
    as_run: Callable[[Any], PanelSchedule] = lambda schedule: schedule,
) -> tuple[int, Callable[[], Report] | None]:
    """Run a panel algorithm on matrices in the layouts of its schedule.  Collective over their grid.

    executor : makes the callable, such as a `PanelAlgorithm`, that runs on each rank with a position in the grid.
    as_run : completes the schedule with results of the run, such as pivots, for the predictions in the report.
    Returns the smallest nonzero number that a call returned on any rank (0 if there is none), and a function that makes
    the report.  While a program is planned, returns 0 and None.
    Raises the same exception on all ranks if buffers cannot be allocated, GPU memory can be neither mapped nor sent, or
    a computation runs out of memory: cuSOLVER's workspace is not part of the schedule's buffers.
    """
    start, grid = perf_counter() if start is None else start, matrices["A"].grid
    if grid.draft:
        grid.draft.add("A", schedule)
        return 0, None
    if not grid.connected:  # that of a tensor's matrix
        grid = grid.work_grid(grid.shape, 1, grid.rank_map)
    comm, device, recorder = grid.comm, devices.of(matrices["A"].stored), recorder_of(matrices["A"].stored)

    def set_up(shared: bool) -> Task[Any]:
        return _task(schedule if shared else replace(schedule, mover=RING.name), matrices, grid, recorder, what)

    task = shared_or_sent(comm, set_up, required=device is not None and device.reach(grid).staged)
    schedule = task.schedule
    recorder.hold(sum(buffer.nbytes for buffer in task.workspace.values()))
    number: int | None = 0
    with kept_if_it_fails(task.workspace, *task.arrays.values()), np.errstate(all="ignore"):
        if not grid.idle or schedule.reaches_idle:
            number = executor(task)()
        recorder.finish()
        task.finish()
    with recorder.phase("sync"):
        first = comm.allreduce(-1 if task.error else number or _NEVER, MPI.MIN)
        if first < 0:
            agree(comm, task.error)
    end, trace = perf_counter(), spans.active()
    sharing = device.reach(grid).sharing if device else 1
    report = cache(partial(_report, as_run(schedule), grid, recorder, what, end - start, tuple(moves), sharing))
    if trace:
        trace.add((HOST, schedule.algorithm, start, end, 0, lambda: report().as_dict()))
    return first if first < _NEVER else 0, report


def run_on_one_rank(
    routine: str,
    A: DistMatrix,
    extents: tuple[float, float, float],
    compute: Callable[[], T],
    planned: T,
    what: str = "",
    passes: int = 0,
) -> tuple[T, Callable[[], Report] | None]:
    """Run a routine of LAPACK on the only rank of A's grid, and broadcast its result.  Collective over this grid.

    A long routine uses the cores of all ranks on the node, which sleep meanwhile.

    routine, extents, passes : for the report, as in `OneRankSchedule`.
    compute : called on this rank; its result is broadcast, and its exception raised on all ranks.
    planned : the result while a program is planned.

    Returns the result and a function that makes the report; while a program is planned, None in its place.
    """
    start, grid = perf_counter(), A.grid
    schedule = OneRankSchedule(A.layout_in(grid), 0, RING.name, algorithm=routine, extents=extents, passes=passes)
    schedule = replace(schedule, helpers=helpers(grid, schedule.flops))
    if grid.draft:
        grid.draft.add("A", schedule)
        return planned, None
    recorder, result = recorder_of(A.stored), planned
    with together(grid.comm), recorder.phase("compute"), cores_of_node(grid, schedule.helpers):
        if not grid.idle:
            result = compute()
    recorder.finish()
    if grid.comm.size > 1:
        result = grid.comm.bcast(result, root=grid.rank_map[0])
    return result, cache(partial(_report, schedule, grid, recorder, what, perf_counter() - start, (), 1))


def helpers(grid: ProcessGrid, flops: float) -> int:
    """Return the number of ranks whose cores a routine of a grid's first rank uses: 1 for a short routine.  Local."""
    return grid.nodes.count(grid.nodes[grid.rank_map[0]]) if flops >= _LONG else 1


@contextmanager
def cores_of_node(grid: ProcessGrid, ranks: int) -> Iterator[None]:
    """A block in which the rank of a 1 x 1 grid computes, on the cores of all ranks of its node; the others sleep.

    Collective over the communicator of the grid.   ranks : the result of `helpers`; 1 changes nothing.
    """
    try:
        with grid.cores.used() if ranks > 1 and not grid.idle else nullcontext():
            yield
    finally:
        if ranks > 1:
            with Wait(grid.comm):
                poll_until(grid.comm.Ibarrier().Test)


def working_copy(
    A: DistMatrix, block: int, fits: bool, overwrite: bool, order: Order | None = None, dtype: np.dtype | None = None
) -> tuple[DistMatrix, list[RunReport]]:
    """Return a matrix equal to A that may be overwritten, and a list of reports.  Collective.

    If A was redistributed, the list contains the report of the redistribution; otherwise it is empty.

    fits : the layout of A suits the algorithm; otherwise the copy has square blocks.
    overwrite : the result may be A itself.
    order, dtype : the memory order and the type of the result; None: those of A.
    """
    grid, order, dtype = A.grid if fits else A.grid.base, order or A.order, dtype or A.dtype
    if fits and overwrite and not A.conjugated and (A.order, A.dtype) == (order, dtype):
        return A, []
    if not fits:
        copy = redistribute(A, grid=grid, block=block, order=order, dtype=dtype)
        return copy, [copy.report] if copy.report else []

    def allocate(arguments: list[object]) -> Array:
        arguments += ["a copy", A.distribution, dtype]
        local = new_array(A.stored.shape, dtype, order, grid, devices.of(A.stored))
        (CONJUGATE if A.conjugated else CONVERT)(local, A.stored)
        return local

    local, shared = new_shared(grid, allocate)
    return type(A)(local, grid, A.distribution, order, shared=shared), []


def _task(
    schedule: PanelSchedule, matrices: dict[str, DistMatrix], grid: ProcessGrid, recorder: Recorder, what: str
) -> Task[Any]:
    """Return the task of a schedule on this rank, with buffers from which panels can be read or sent.  Collective."""
    stored = {name: x.stored for name, x in matrices.items()}
    workspace = _workspace(schedule, grid, stored["A"], what)
    transfers = Transfers(between_nodes=grid.ranks_per_node is not None).used(recorder)
    common = schedule, stored, grid, workspace, transfers, recorder
    if not schedule.shared:
        return Task(*common)
    exposed: dict[str, tuple[Array, Layout | None]]
    exposed = {name: (stored[name], matrices[name].layout_in(grid)) for name in schedule.orders}
    exposed |= {name: (workspace[name], None) for name in schedule.exposed_buffers}
    with recorder.phase("sync"):
        return InPlace(*common, NodeArrays(grid, **exposed))


def _workspace(schedule: PanelSchedule, grid: ProcessGrid, like: Array, what: str) -> dict[str, Array]:
    """Return the buffers of a schedule on this rank.  Collective; raises the same exception on all ranks."""
    device, exposed = devices.of(like), schedule.exposed_buffers if schedule.shared else ()
    own = devices.own_memory(device)
    shared = devices.shared_memory(device, grid) if exposed else own
    with together(grid.comm) as arguments:
        arguments += [what, schedule]
        return {
            name: (shared if name in exposed else own).empty((words,), dtype)
            for name, (words, dtype) in schedule.buffers(grid.comm.rank).items()
        }


def _report(
    schedule: PanelSchedule,
    grid: Any,
    recorder: Any,
    what: str,
    seconds: float,
    moves: tuple[RunReport, ...],
    sharing: int,
) -> Report:
    """Return the report of one run, with the seconds that are predicted for the machine at hand."""
    machine = on_nodes(machine_at_hand(bool(schedule.device)), grid.ranks_per_node)
    report = Report.of_work(
        recorder,
        [schedule],
        grid,
        seconds,
        algorithm=AnyName(schedule.algorithm),
        mover=schedule.mover,
        device=schedule.device,
        threads=threads(),
        blas=multiplier(),
        ranks_per_device=sharing,
        grid=schedule.grid.shape,
        dtype=str(schedule.A.dtype),
        panels=len(schedule.steps),
        panel_width=schedule.widest,
        lookahead=schedule.lookahead,
        coords=grid.coords,
        predicted_seconds=simulate(schedule, machine, grid.size).seconds,
        lower_bound_words=schedule.lower_bound_words(grid.size),
        what=what,
        rcond=None,
        steps=(),
    )
    return report.after(moves, moves=moves)
