"""Measure the links of a machine: seconds per message and per byte, for each way of sending panels and sums."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mpi4py import MPI

from pdgemm.algorithms.redistribution import redistribute
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.recorder import Recorder
from pdgemm.local.arrays.elementwise import scale
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.planning.machines.machine import CUDA, HOST, Link, is_possible
from pdgemm.schedules.mover_registry import NCCL, RING, by_messages
from pdgemm.support.agreement import together
from pdgemm.support.waits import Wait
from pdgemm.tools.calibrate.place import MeasuredPlace, in_turns
from pdgemm.transport.movers import BROADCASTS
from pdgemm.transport.movers.arrivals import Arrival, Transfers
from pdgemm.transport.movers.pipeline import PanelRing, Slot
from pdgemm.transport.movers.reduce import reduce_scatter
from pdgemm.transport.movers.ring import receive, send
from pdgemm.transport.movers.staged import Staged, staged_receive, to_staging

_SMALL = 1  # words of the small message
_TRIES = 3  # the most measurements of a link
_ROUNDS = 4  # panels that each rank broadcasts, one after the other: the first ones fill the pipeline


def links(comm: MPI.Comm, all_: MPI.Comm, place: MeasuredPlace, ahead: int) -> dict[str, Link]:
    """Return the links among the ranks of comm.

    all_  : the ranks of all communicators that are measured at the same time as comm.
    ahead : the number of panels in flight besides the panel for which the rank waits.
    """
    measured, sizes = {}, (_SMALL, place.sizes.words)
    others = comm.size - 1
    received, large = _ROUNDS * others, place.sizes.words
    for name in place.broadcasts:
        with together(all_):  # one rank may lack device memory
            works = [_broadcaster(comm, place, name, words, ahead) for words in sizes]
        measured[name] = measured_link(all_, works, place, words=large * received, messages=received)
    if place.staged:  # staged panels are sent around a ring, whatever the mover
        measured |= dict.fromkeys(by_messages(), measured[RING.name])
    by_mpi = place._replace(nccl=False)
    with together(all_):
        works = [shifter(comm, by_mpi, words) for words in sizes]
    measured["shift"] = measured_link(all_, works, place, large)
    share = large // comm.size
    with together(all_):
        works = [_reducer(comm, place, words) for words in (comm.size, large)]
    measured["reduce"] = measured_link(all_, works, place, words=share * others, messages=others)
    return measured


def measured_link(
    comm: MPI.Comm, works: list[Callable[[], object]], place: MeasuredPlace, words: int, messages: int = 1
) -> Link:
    """Return the link fitted to a small and a large transfer; an impossible result is measured again."""
    for _ in range(_TRIES):  # all ranks have the same seconds, and decide alike
        measured = link(in_turns(comm, works), words, messages)
        if is_possible(measured, CUDA if place.device else HOST):
            break
    return measured


def link(seconds: list[float], words: int, messages: int = 1) -> Link:
    """Fit a link to the seconds of a small and a large transfer, in which a rank receives `words` in `messages`."""
    small, large = seconds
    return Link(max(1e-8, small / messages), max(1e-13, (large - small) / (words * 8)))


def _broadcaster(comm: MPI.Comm, place: MeasuredPlace, name: str, words: int, ahead: int) -> Callable[[], object]:
    """Return a function that broadcasts from all ranks in turn, with `ahead` more panels in flight, as in SUMMA."""
    buffers, slots = place.empty((ahead + 1) * words), ahead + 1
    staging = None if name == NCCL.name else place.pinned(slots * words)
    broadcasts = [Staged(part) for part in staging.shared_out(slots)] if staging else [BROADCASTS[name]] * slots

    def work(recorder: Recorder) -> None:
        transfers = Transfers(recorder, between_nodes=ahead > 1)
        with PanelRing(slots, buffers, place.empty(0), transfers).used(recorder) as ring:

            def post(root: int) -> Slot:
                slot = ring.take()
                broadcasts[slot.number](comm, slot.buffer_a, root, slot, recorder)
                return slot

            for _ in ring.prefetch([*range(comm.size)] * _ROUNDS, post, ahead):
                with recorder.phase("compute"):  # waits for the panels, and frees the slot at its end
                    pass

    return place.recorded(work)


class Shift:
    """Panels that each rank sends to the previous rank, while it receives other panels from the next rank."""

    def __init__(self, comm: MPI.Comm, place: MeasuredPlace, words: int, panels: int = 1) -> None:
        self._comm, self._place = comm, place
        self._held, self._coming = place.empty(panels, words // panels), place.empty(panels, words // panels)
        buffers = [place.pinned(words) for _ in range(2)]
        self._staging = [buffer.shared_out(panels) if buffer else None for buffer in buffers]

    def start(self, recorder: Recorder) -> tuple[list[list[Arrival]], list[Arrival]]:
        """Start the shift; return the receives in flight, by panel, and the sends in flight."""
        comm, (leaving, coming) = self._comm, self._staging
        to, source = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        arriving, left = list[list[Arrival]](), list[Arrival]()
        for tag, (mine, other) in enumerate(zip(self._held, self._coming)):
            if self._place.nccl and self._place.device:
                with recorder.phase("pack"):
                    self._place.device.exchange(comm, [(mine, to)], [(other, source)])
            elif leaving and coming:
                to_staging(leaving[tag], mine, recorder)
                arriving.append(staged_receive(comm, coming[tag], other, source, recorder, tag))
                left += send(comm, leaving[tag].host, to, recorder, tag)
            else:
                arriving.append(receive(comm, other, source, recorder, tag))
                left += send(comm, mine, to, recorder, tag)
        return arriving, left


def shifter(comm: MPI.Comm, place: MeasuredPlace, words: int) -> Callable[[], object]:
    """Return a function that shifts a panel of `words` words from each rank to the previous one."""
    shift = Shift(comm, place, words)

    def work(recorder: Recorder) -> None:
        arriving, leaving = shift.start(recorder)
        _wait(comm, [*(x for panel in arriving for x in panel), *leaving])

    return place.recorded(work)


def _wait(comm: MPI.Comm, arriving: list[Arrival]) -> None:
    with Wait(comm):
        for arrival in arriving:
            arrival.Wait()


def _reducer(comm: MPI.Comm, place: MeasuredPlace, words: int) -> Callable[[], object]:
    """Return a function that carries out one reduce-scatter of `words` words."""
    share = words // comm.size
    whole, part, another = place.empty(share * comm.size), place.empty(share), place.empty(share)
    buffers = place.pinned(share * comm.size), place.pinned(share)
    staged = (buffers[0], buffers[1]) if buffers[0] and buffers[1] else None
    place.work("compute", lambda: scale(0, whole.reshape(1, -1)))()

    def work(recorder: Recorder) -> None:
        _wait(comm, reduce_scatter(comm, whole, part, [share] * comm.size, recorder, another, staged))

    return place.recorded(work)


def redistribution_link(grid: ProcessGrid, place: MeasuredPlace, reads: bool) -> Link:
    """Return the link of a redistribution from block columns to block rows, with packing and unpacking.

    reads : ranks copy from each other's memory where it is shared, and send no messages.
    """
    works = list[Callable[[], DistMatrix]]()
    with ProcessGrid(grid.comm, (grid.size, 1)) as rows:
        for n in (grid.size, place.sizes.moved * grid.size):
            X, Y = place.zeros(n, n, grid), place.zeros(n, n, rows)
            X.shared = X.shared and reads
            works.append(partial(redistribute, X, Y, check=False))
        words = works[-1]().report.counted.words_received
        return measured_link(grid.comm, [*works], place, words, grid.size - 1)
