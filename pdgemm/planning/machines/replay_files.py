"""Schedules as files for SimGrid: a time-independent trace of each rank, and a platform, for `smpirun -replay`.

SimGrid is a simulator by others, which finds out by itself which rank waits for which, and how messages share links, so
its seconds check those of `simulator`.  What its links cannot express is work of the trace: copies in memory, the
latency of all messages of a round but the first, messages inside a node while others come from the network, and the
part of a transfer that does not overlap with a product.

Casanova, Giersch, Legrand, Quinson & Suter, Versatile, Scalable, and Accurate Simulation of Distributed Applications
and Platforms, J. Parallel Distrib. Comput. 74(10), 2014.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from pdgemm.errors import ArgumentError
from pdgemm.planning.machines import simulator
from pdgemm.planning.machines.machine import Link, Machine
from pdgemm.schedules.formulas import LARGEST_MESSAGE_BYTES
from pdgemm.schedules.mover_registry import RING
from pdgemm.schedules.rounds import Messages
from pdgemm.schedules.schedule import Schedule
from pdgemm.support.files import MARK, check_writable, hidden_name, naming

PLATFORM, HOSTS, TRACES = "platform.xml", "hosts", "traces"  # the files of a folder, besides one for each rank
# the command, in the folder; `smpirun` itself sets a model with other latencies and bandwidths than the links have
REPLAY = f"smpirun -platform {PLATFORM} -hostfile {HOSTS} -replay {TRACES} --cfg=network/model:CM02"
_OWN = re.compile(rf"{re.escape(PLATFORM)}|{HOSTS}|{TRACES}|rank\d+\.txt")
_FLOPS = 1e9  # flops per second of a host: a flop of the trace is a nanosecond
_UNLIMITED = 1e18  # bytes per second
_LINES = 1 << 18  # actions that are kept in memory
_BYTES = 60  # of the two actions of a message, about
_SETTINGS = {
    "network/model": "CM02",  # links have exactly the stated bandwidths and latencies
    "network/TCP-gamma": 0,
    "smpi/host-speed": "1Gf",  # of no effect on traces, but SimGrid warns without it
    "smpi/async-small-thresh": 0,  # a message moves when both ranks have reached its round
    "smpi/send-is-detached-thresh": 2**31 - 1,  # its sender does not wait for it
}


def write_replay(
    schedules: Sequence[Schedule], machine: Machine, ranks: int, folder: str | Path, overwrite: bool = False
) -> None:
    """Write a folder with the traces of schedules that run one after the other, and the platform.  Local.

    folder : a new name, an empty folder, or a folder that this function wrote, which is replaced; not the current one.
    overwrite : a file of this name is replaced, too.
    Cost: some 60 bytes of disk for each message; the memory is that of one round, and of 2^18 actions.
    Raises ArgumentError for too many messages or another folder, and FileError where the folder cannot be written;
    then no file is changed.
    """
    simulator.check_events(schedules, ranks)
    path = Path(folder)
    with naming(path):
        is_folder = path.is_dir()
        names = [x.name for x in path.iterdir()] if is_folder else []
        if names and not (PLATFORM in names and all(map(_OWN.fullmatch, names))):
            raise ArgumentError(f"{path} is a folder with other files than traces: name another folder")
        if is_folder and path.samefile("."):  # else this shell would remain in a folder that is removed
            raise ArgumentError("the current folder cannot be replaced: name another folder")
        size = _BYTES * sum(x.events for x in schedules) * ranks
        target = check_writable(path / PLATFORM if is_folder else path, size, overwrite)
        target = target.parent if is_folder else target
        partial, old = (hidden_name(target, f".{uuid.uuid4().hex[:12]}.{x}") for x in ("partial", "old"))
        partial.mkdir()
        try:
            _write(schedules, machine, ranks, partial)
            if os.path.lexists(target):
                target.rename(old)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        if is_folder:
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.unlink(missing_ok=True)


def _write(schedules: Sequence[Schedule], machine: Machine, ranks: int, folder: Path) -> None:
    """Write the files, and append to those of ranks whenever there are many actions in memory."""
    network = with_two_links(schedules, machine)
    lines = [[f"{rank} init\n"] for rank in range(ranks)]
    waiting = 0

    def flush() -> None:
        for rank, some in enumerate(lines):
            if some:
                with (folder / f"rank{rank}.txt").open("a") as file:
                    file.writelines(some)
                some.clear()

    for schedule in schedules:
        for rank, action in actions(schedule, machine, network, ranks):
            lines[rank].append(f"{rank} {action}\n")
            waiting += 1
            if waiting % _LINES == 0:
                flush()
    for rank, some in enumerate(lines):
        some.append(f"{rank} finalize\n")
    flush()
    (folder / PLATFORM).write_text("".join(f"{x}\n" for x in platform(network, ranks)))
    (folder / HOSTS).write_text("".join(f"r{rank}\n" for rank in range(ranks)))
    (folder / TRACES).write_text("".join(f"rank{rank}.txt\n" for rank in range(ranks)))


def with_two_links(schedules: Sequence[Schedule], machine: Machine) -> Machine:
    """Return the machine with one link inside and one between nodes: the fastest that the schedules' messages use."""
    moves = (x for schedule in schedules for at in schedule.rounds() for x in at.transfers if not x.read)
    pairs = [machine.links(kind) for kind in sorted({x.kind for x in moves})] or [machine.links(RING.name)]
    near, far = (Link(min(x.alpha for x in links), min(x.beta for x in links)) for links in zip(*pairs))
    return replace(machine, intra=dict.fromkeys(machine.intra, near), inter=dict.fromkeys(machine.inter, far))


def actions(schedule: Schedule, machine: Machine, network: Machine, ranks: int) -> Iterator[tuple[int, str]]:
    """Yield pairs (rank, action): the messages and the work of each rank, in the order in which the rank begins them.

    The actions are `isend` and `irecv` with a rank, a tag and bytes, `waitall`, and `compute`, in nanoseconds of the
    machine.  Panels that are read in place are no actions, and panels that are copied from another rank's memory are
    work.  Where the schedule allows it, the messages of a round overlap with the work of the round before.
    network : the machine with the links of the platform, of `with_two_links`.
    """
    node = simulator.nodes_of(machine, ranks)
    seconds = simulator.starting_seconds(schedule, machine, ranks)
    before = np.zeros(ranks)
    for at in schedule.rounds():
        yield from _computed(seconds)
        if not (at.hidden and schedule.lookahead):
            yield from _computed(before)
            before = np.zeros(ranks)
        transfers = [simulator.passed_on(x) for x in at.transfers]
        sent, busy = [x for x in transfers if not x.read], set[int]()
        for tag, (source, target, size) in enumerate(_pieces(sent)):
            yield target, f"irecv {source} {tag} {max(size, 1)}"  # SimGrid has no receives of 0 bytes
            yield source, f"isend {target} {tag} {size}"
            busy |= {source, target}
        yield from _computed(before)
        yield from ((rank, "waitall") for rank in sorted(busy))
        moving, _ = simulator.transfer_seconds(transfers, machine, node)
        by_network = _network_seconds(sent, network, node)
        both = before + moving - machine.overlap * np.minimum(before, moving)
        seconds = both - np.maximum(before, by_network)
        before = simulator.working_seconds(at, machine, schedule, ranks)
        seconds += machine.panel_overhead * (before > 0)
    yield from _computed(seconds)
    yield from _computed(before)


def _computed(seconds: np.ndarray) -> Iterator[tuple[int, str]]:
    flops = np.rint(seconds * _FLOPS).astype(np.int64)
    yield from ((rank, f"compute {flops[rank]}") for rank in np.flatnonzero(flops > 0).tolist())


def _pieces(moves: list[Messages]) -> Iterator[tuple[int, int, int]]:
    """Yield (source, target, bytes) of each message; MPI sends a very large one in pieces, as `Tally` counts it."""
    for x in moves:
        most = LARGEST_MESSAGE_BYTES // x.itemsize * x.itemsize
        for source, target, words in zip(x.source.tolist(), x.target.tolist(), x.words.tolist()):
            size = words * x.itemsize
            for start in range(0, max(size, 1), most):
                yield source, target, min(size - start, most)


def _network_seconds(sent: list[Messages], network: Machine, node: np.ndarray) -> np.ndarray:
    """Return the seconds in which each rank receives the messages of a round on the platform, if all ranks are ready.

    Messages from the rank's node and from other nodes move at the same time, and so do the latencies of messages.
    """
    seconds, largest = simulator.moving_seconds(sent, network, node)[0], np.zeros((2, len(node)))
    for x in sent:
        away = (node[x.source] != node[x.target]).astype(int)
        alpha = np.array([link.alpha for link in network.links(x.kind)])[away]
        np.maximum.at(largest, (away, x.target), alpha)
        np.subtract.at(seconds, (away, x.target), alpha)
    return (seconds + largest).max(axis=0)


def platform(network: Machine, ranks: int) -> Iterator[str]:
    """Yield the lines of the platform: hosts r0, r1, ..., one for each rank.

    A host receives messages from its own node through a link of its own.  The hosts of a node share a link into the
    network and a link out of it.  As in the simulator, sending costs a host nothing.
    """
    node, (near, far) = simulator.nodes_of(network, ranks).tolist(), network.links(RING.name)

    def link(name: str, bandwidth: float, latency: float = 0, sharing: str = "SHARED") -> str:
        figures = f'bandwidth="{bandwidth:.9g}Bps" latency="{latency:.9g}s"'
        return f'<link id="{name}" {figures} sharing_policy="{sharing}"/>'

    def route(source: str, target: str, *links: str) -> str:
        by = "".join(f'<link_ctn id="{x}"/>' for x in links)
        return f'<route src="{source}" dst="{target}" symmetrical="NO">{by}</route>'

    yield "<?xml version='1.0'?>"
    yield '<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">'
    yield f"<!-- {MARK.decode()} -->"
    yield '<platform version="4.1">'
    yield "<config>"
    yield from (f'<prop id="{name}" value="{value}"/>' for name, value in _SETTINGS.items())
    yield "</config>"
    yield '<zone id="machine" routing="DijkstraCache">'  # a route has the fewest links: two in a node, three between
    yield from (f'<host id="r{rank}" speed="{_FLOPS:.0f}f"/>' for rank in range(ranks))
    yield '<router id="network"/>'
    yield from (f'<router id="n{n}"/>' for n in range(node[-1] + 1))
    yield from (link(f"own{rank}", 1 / near.beta) for rank in range(ranks))
    for n in range(node[-1] + 1):
        yield link(f"memory{n}", _UNLIMITED, near.alpha, "FATPIPE")
        yield link(f"wire{n}", _UNLIMITED, far.alpha, "FATPIPE")
        yield from (link(f"{way}{n}", 1 / far.beta) for way in ("out", "in"))
    for rank, n in enumerate(node):
        yield route(f"r{rank}", f"n{n}", f"memory{n}") + route(f"n{n}", f"r{rank}", f"own{rank}")
        yield route(f"r{rank}", "network", f"out{n}") + route("network", f"r{rank}", f"wire{n}", f"in{n}")
    yield "</zone>"
    yield "</platform>"
