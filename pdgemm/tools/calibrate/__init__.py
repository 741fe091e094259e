"""Measure the parameters of a `Machine` on the ranks of a communicator, for hosts or for GPUs."""

from __future__ import annotations

import platform
from collections.abc import Callable
from datetime import date
from functools import partial
from itertools import cycle

import numpy as np
from mpi4py import MPI

from pdgemm.gemm import pdgemm
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.recorder import Recorder, nothing
from pdgemm.local.arrays.device import Reach
from pdgemm.local.arrays.elementwise import CONVERT, scale
from pdgemm.local.blas.local_gemm import SLAB_ROWS, gemm_accumulate
from pdgemm.matrix.local_arrays import device_on
from pdgemm.planning.machines.machine import HOST, Link, Machine, gpu_cluster, touched
from pdgemm.planning.planner import LOOKAHEAD_BETWEEN_NODES
from pdgemm.schedules.formulas import gemm_flops
from pdgemm.schedules.mover_registry import IPC
from pdgemm.support import failures
from pdgemm.support.agreement import agree, together
from pdgemm.tools.calibrate.links import Shift, links, redistribution_link
from pdgemm.tools.calibrate.place import GPUS, HOSTS, REPEATS, MeasuredPlace, in_turns, timed
from pdgemm.transport.movers.arrivals import Transfers

_BETWEEN_NODES = (2048, 256)  # as `Sizes.beside` of hosts, but for each of several panels


def calibrate(comm: MPI.Intracomm, device: str = HOST) -> Machine:
    """Measure the machine of these ranks, and return the model of rank 0.  Collective; takes seconds.

    device : "host", or "cuda" for matrices on GPUs; raises DeviceError if there is none.

    All ranks compute and send at the same time, as they do in a product.  If there are several nodes, links between
    nodes are measured, by one rank of each node.  If each node has several ranks, links inside nodes are measured.
    Other links keep their defaults.  Messages between GPUs are sent as products send them: from device memory if MPI
    accepts device pointers, otherwise staged through the host.  NCCL and CUDA IPC are measured where products can use
    them.
    """
    with ProcessGrid(comm, (1, comm.size)) as grid:
        gpu = device_on(grid, device)
        reach = gpu.reach(grid) if gpu else Reach(staged=False)
        place = MeasuredPlace(gpu, GPUS if gpu else HOSTS, reach.staged, reach.nccl and comm.size > 1)
        default = gpu_cluster(reach.staged) if gpu else Machine()
        copy = _copy(grid.comm, place)
        fresh = _fresh(grid.comm, place)
        gamma = {dtype: _rates(grid.comm, place, dtype, copy) for dtype in place.dtypes}
        intra, inter = _links(grid, place, default, reach.reads == IPC.name)
        link = (intra if grid.ranks_per_node is None else inter)["shift"]
        overlap = _overlap(grid, place, link) if comm.size > 1 else default.overlap
        call = _call(grid, place)
        per_step = max(1e-6, _step(grid, place, call))
        machine = Machine(
            name=f"{platform.node()}, {comm.size} ranks, {date.today()}",
            device=default.device,
            staged=place.staged,
            ranks_per_node=grid.ranks_per_node,
            intra=intra,
            inter=inter,
            gamma=gamma,
            copy_bandwidth=copy,
            first_touch_bandwidth=fresh,
            overlap=overlap,
            panel_overhead=per_step,
            call_overhead=call,
        )
        of_root: Machine = grid.comm.bcast(machine, root=0)  # ranks differ in the name and size of their node
        return of_root


def _links(
    grid: ProcessGrid, place: MeasuredPlace, default: Machine, reads: bool
) -> tuple[dict[str, Link], dict[str, Link]]:
    """Return the links inside nodes and between nodes.   reads : ranks of a node can read each other's GPU memory."""
    intra, inter, several = dict(default.intra), dict(default.inter), grid.ranks_per_node is not None
    if grid.comm.allreduce(grid.node.size > 1, MPI.LAND):  # a rank that is alone on its node has no partner
        intra.update(links(grid.node, grid.comm, place, ahead=1))
    if several:
        inter.update(_between_nodes(grid, place))
    if grid.size > 1:
        table = inter if several else intra
        table["exchange"] = Link(table["shift"].alpha, redistribution_link(grid, place, reads=False).beta)
        if reads and not several:
            intra[IPC.name] = redistribution_link(grid, place, reads=True)
    return intra, inter


def _between_nodes(grid: ProcessGrid, place: MeasuredPlace) -> dict[str, Link]:
    """Return the links between nodes, which are measured by one rank of each node."""
    measured, failed = dict[str, Link](), None
    with failures.node_leaders(grid.comm, grid.node) as leaders:
        try:
            measured = links(leaders, leaders, place, LOOKAHEAD_BETWEEN_NODES) if leaders else measured
        except Exception as bad:  # all node leaders raise it together; the other ranks wait for them
            failed = bad
    agree(grid.comm, failed)
    return grid.comm.bcast(measured, root=0)


def _rates(comm: MPI.Comm, place: MeasuredPlace, dtype: str, copy: float) -> dict[int, float]:
    """Return, by panel width, the flops per second of a rank that adds panel products to a block, without copies."""
    side, widths, times = place.sizes.side, place.sizes.widths, place.sizes.times
    with together(comm):  # one rank may lack device memory
        A, B = place.random(side, widths[-1], dtype), place.random(widths[-1], side, dtype)
        C = place.random(side, side, dtype)

    def rate(width: int, seconds: float) -> float:
        work = side, side, width
        moving = touched(work, work) * C.itemsize / copy
        return gemm_flops(*work, C.dtype.kind == "c") / max(seconds - moving, 0.75 * seconds)  # caches speed up copies

    def product(width: int) -> Callable[[], object]:
        a = place.empty(side, width, dtype=dtype)
        place.work("pack", partial(CONVERT, a, A[:, :width]))()

        def act() -> None:
            for _ in range(times):
                gemm_accumulate(1, a, B[:width], 1, C)

        return place.work("compute", act)

    with together(comm):
        works = [product(width) for width in widths]
    seconds = in_turns(comm, works)
    return {width: rate(width, taken / times) for width, taken in zip(widths, seconds)}


def _copy(comm: MPI.Comm, place: MeasuredPlace) -> float:
    """Return the bytes per second at which rows are copied from a larger array."""
    side = place.sizes.copied
    with together(comm):
        x, y = place.random(side, side, "float64"), place.empty(side, side // 2)
    return y.nbytes / timed(comm, place.work("pack", lambda: CONVERT(y, x[:, : side // 2])))


def _fresh(comm: MPI.Comm, place: MeasuredPlace) -> float:
    """Return the first-touch bandwidth: bytes per second when newly allocated pages are written."""
    words = place.sizes.touched
    with together(comm):  # the allocation may fail on one rank
        place.empty(1, words)
    return 8 * words / timed(comm, place.work("compute", lambda: scale(0, place.empty(1, words))))


def _overlap(grid: ProcessGrid, place: MeasuredPlace, link: Link) -> float:
    """Return the fraction of a shift that is hidden behind a product of the same duration.   link : the link of shifts.

    Between nodes the product is cut into slabs on the host, and the shift into panels that are in flight together.
    """
    comm, between_nodes = grid.row, grid.ranks_per_node is not None
    sliced = between_nodes and not place.device
    (side, width), panels = (_BETWEEN_NODES, 8) if sliced else (place.sizes.beside, 1)
    with together(comm):
        A, B, C = (place.random(*shape, "float64") for shape in ((side, width), (width, side), (side, side)))
    transfers = Transfers(Recorder(), between_nodes)
    slab = SLAB_ROWS if sliced else side

    def compute() -> None:
        for _ in range(panels):
            for row in range(0, side, slab):
                gemm_accumulate(1, A[row : row + slab], B, 1, C[row : row + slab])
                if sliced:
                    transfers.poll()

    product = timed(comm, place.work("compute", compute), 3)
    # a shift of `words` takes as long as the product
    words = int(np.clip((product - panels * link.alpha) / (8 * link.beta), panels, 1 << 24))
    with together(comm):
        shift = Shift(comm, place, words, panels)

    def beside(act: Callable[[], object], recorder: Recorder) -> None:
        transfers.used(recorder)
        arriving, leaving = shift.start(recorder)
        for panel in arriving:
            transfers.expect(panel)
        with recorder.phase("compute"):
            act()
        for panel in (*arriving, leaving):
            transfers.wait(panel)

    moving, overlapped = (timed(comm, place.recorded(partial(beside, act))) for act in (nothing, compute))
    return float(np.clip((product + moving - overlapped) / min(product, moving), 0.0, 1.0))


def _call(grid: ProcessGrid, place: MeasuredPlace) -> float:
    A, B, C = (place.zeros(grid.size, grid.size, grid) for _ in range(3))
    alphas = cycle((1, 2))  # alpha alternates, so that no executor is reused
    return timed(grid.comm, lambda: pdgemm(next(alphas), A, B, 0, C, algorithm="summa"), 4 * REPEATS)


def _step(grid: ProcessGrid, place: MeasuredPlace, call: float) -> float:
    """Return the overhead of a panel, from products with panels of the least size."""
    panels = 64 * grid.size
    A, B = place.zeros(1, panels, grid, block=(1, 1)), place.zeros(panels, 1, grid, block=(1, 1))
    C, alphas = place.zeros(1, 1, grid), cycle((1, 2))
    thin = partial(pdgemm, B=B, beta=0, C=C, algorithm="summa", shape=grid.shape, panel_width=1)
    return (timed(grid.comm, lambda: thin(next(alphas), A)) - call) / panels
