"""Traces for SimGrid: their messages are those of the schedules, and every receive has its send."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import in_process
import numpy as np
import pytest
from tiers import pairs

from pdgemm.errors import FileError
from pdgemm.grids.distribution import Distribution
from pdgemm.grids.layout import Layout
from pdgemm.planning.machines.machine import Machine
from pdgemm.planning.machines.replay_files import REPLAY, actions, write_replay
from pdgemm.planning.machines.simulator import passed_on, simulate
from pdgemm.planning.program import Program
from pdgemm.planning.question import Question
from pdgemm.schedules import rounds
from pdgemm.schedules.exchanges.exchange import plan_exchange
from pdgemm.schedules.panels.factor_schedules import CholeskySchedule, LUSchedule
from pdgemm.schedules.rounds import LINE, Messages, Round, WorkPiece, broadcast
from pdgemm.schedules.schedule import Buffers, LineSchedule, Schedule

DOUBLE = np.dtype(np.float64)
ONE_NODE = Machine()


class Replay:
    """A small interpreter of the traces in a folder: it follows all ranks until each has finished.

    sizes : bytes of the messages by (source, target), in the order of the sends.
    seconds : the seconds of each rank, if all ranks are on a node, and messages move when both ranks have begun them.
    """

    def __init__(self, folder: Path, machine: Machine = ONE_NODE, kind: str = "shift") -> None:
        self.sizes: dict[tuple[int, int], list[int]] = defaultdict(list)
        names = (folder / "traces").read_text().split()
        self.hosts = (folder / "hosts").read_text().split()
        lines = [deque((folder / name).read_text().splitlines()) for name in names]
        self.seconds = [0.0] * len(names)
        self._link = machine.intra[kind]
        sent: dict[Any, deque[tuple[int, float]]] = defaultdict(deque)
        awaited: list[list[Any]] = [[] for _ in names]
        moving = True
        while moving:
            moving = False
            for rank, rest in enumerate(lines):
                while rest:
                    number, action, *words = rest[0].split()
                    assert int(number) == rank
                    if action == "waitall" and not all(sent[x[0]] for x in awaited[rank]):
                        break  # another rank has not sent yet
                    rest.popleft()
                    moving = True
                    self._act(rank, action, [int(x) for x in words], sent, awaited[rank])
        assert not any(lines), "a rank waits for ever"
        assert not any(sent.values()), "a message is not received"

    def _act(self, rank: int, action: str, words: list[int], sent: Any, awaited: list[Any]) -> None:
        if action == "compute":
            self.seconds[rank] += words[0] * 1e-9
        elif action == "isend":
            target, tag, size = words
            sent[rank, target, tag].append((size, self.seconds[rank]))
            self.sizes[rank, target].append(size)
        elif action == "irecv":
            source, tag, size = words
            awaited.append(((source, rank, tag), size, self.seconds[rank]))
        elif action == "waitall":
            arrived = [
                (size, most, max(begun, at)) for key, most, at in awaited for size, begun in [sent[key].popleft()]
            ]
            assert all(most == max(size, 1) for size, most, _ in arrived)
            if arrived:
                moved = sum(size for size, _, _ in arrived) * self._link.beta + self._link.alpha
                self.seconds[rank] = max(self.seconds[rank], max(begun for _, _, begun in arrived) + moved)
            awaited.clear()
        else:
            assert action in ("init", "finalize")


def replayed(folder: Path, schedules: Sequence[Schedule], machine: Machine, ranks: int, **how: Any) -> Replay:
    write_replay(schedules, machine, ranks, folder / "t")
    replay = Replay(folder / "t", machine, **how)
    assert replay.hosts == [f"r{rank}" for rank in range(ranks)]
    return replay


def check_messages(replay: Replay, schedules: Sequence[Schedule], ranks: int) -> None:
    """Compare the trace with the schedules: words and messages of each rank, reads left out."""
    of_library = False
    for rank in range(ranks):
        received = [size for (_, target), sizes in replay.sizes.items() if target == rank for size in sizes]
        sent = [size for (source, _), sizes in replay.sizes.items() if source == rank for size in sizes]
        parts = [x for schedule in schedules for x in schedule.transfers(rank)]
        of_library |= any(x.kind == "ibcast" for x in parts)
        there = sum((x.traffic.words_received - x.traffic.words_read) * x.itemsize for x in parts)
        assert (sum(received), len(received)) == (there, sum(x.traffic.messages_received for x in parts))
        if not of_library:  # an MPI library passes a panel on, and a schedule counts all sends at its owner
            away = sum(x.traffic.words_sent * x.itemsize for x in parts)
            assert (sum(sent), len(sent)) == (away, sum(x.traffic.messages_sent for x in parts))


@pytest.mark.parametrize(
    ("algorithm", "mover", "per_node"),
    pairs(("summa", "stationary_a", "cannon", "2.5d", "inner", "row"), ("ring", "ibcast", "shared"), (2, 3, None)),
)
def test_words_and_messages_of_products(tmp_path: Path, algorithm: str, mover: str, per_node: int | None) -> None:
    ranks, machine = 4 if algorithm == "cannon" else 12, Machine(ranks_per_node=per_node)
    how: Any = {"algorithm": algorithm, "mover": mover, "layers": 3 if algorithm == "2.5d" else None, "width": 5}
    plan = Question(31, 29, 37, ranks, machine=machine, **how).plan()
    replay = replayed(tmp_path, plan.schedules, machine, ranks)
    check_messages(replay, plan.schedules, ranks)
    assert replay.sizes or mover == "shared"


def blocks(n: int, grid: tuple[int, int], block: int) -> Layout:
    return Layout(Distribution.over(grid, (n, n), (block, block)), tuple(range(grid[0] * grid[1])), DOUBLE)


@pytest.mark.parametrize("kind", [CholeskySchedule, LUSchedule])
@pytest.mark.parametrize("mover", ["ring", "shared"])
def test_words_and_messages_of_factorisations(tmp_path: Path, kind: Any, mover: str) -> None:
    schedule = kind(blocks(40, (2, 3), 4), 4, mover)
    program = Program((("A", schedule),), 6, Machine(ranks_per_node=2))
    program.export(tmp_path / "t")
    check_messages(Replay(tmp_path / "t"), [schedule], 6)


def test_words_and_messages_of_an_exchange(tmp_path: Path) -> None:
    schedule = plan_exchange(blocks(40, (2, 3), 20), blocks(40, (3, 2), 3), 6)
    replay = replayed(tmp_path, [schedule], Machine(ranks_per_node=2), 6)
    check_messages(replay, [schedule], 6)
    assert replay.sizes


@pytest.mark.parametrize("overlap", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("bandwidth", [1e9, 1e5])
def test_seconds_are_those_of_the_simulator(tmp_path: Path, overlap: float, bandwidth: float) -> None:
    """For equal ranks on one node, whether a product takes longer than its messages or not."""
    links = {kind: replace(link, beta=1 / bandwidth) for kind, link in ONE_NODE.intra.items()}
    machine = Machine(overlap=overlap, intra=links)
    product = Question(48, 48, 48, 9, layouts="ideal", algorithm="cannon", mover="ring", machine=machine).plan().product
    replay = replayed(tmp_path, [product], machine, 9)
    assert max(replay.seconds) == pytest.approx(simulate(product, machine, 9).seconds, rel=1e-3)


class Late(LineSchedule):
    """Rank 1 works, and then sends its result to rank 0."""

    algorithm, lookahead, ranks, dtype, events = "late", 1, (0, 1), DOUBLE, 2

    def rounds(self) -> Any:
        yield Round([], [WorkPiece((np.array([0, 64]), 64, 64))])
        sent = Messages("reduce", np.array([1]), np.array([0]), np.array([1000]), 8, LINE)
        yield Round([sent], hidden=False)

    def buffers(self, rank: int | None) -> Buffers:
        return {}


def test_a_result_is_sent_after_the_work_on_its_sender(tmp_path: Path) -> None:
    schedule, link = Late(), ONE_NODE.intra["reduce"]
    worked = ONE_NODE.multiply(DOUBLE, (64, 64, 64), (64, 64, 64)) + ONE_NODE.panel_overhead
    expected = worked + link.alpha + 8000 * link.beta
    assert simulate(schedule, ONE_NODE, 2).seconds == pytest.approx(expected)
    assert replayed(tmp_path, [schedule], ONE_NODE, 2, kind="reduce").seconds[0] == pytest.approx(expected, abs=2e-9)


def test_an_mpi_library_passes_panels_on() -> None:
    grid = np.arange(8).reshape(2, 4)
    (sent,) = broadcast("ibcast", grid, 1, np.array([5, 7]), 8)
    (ring,) = broadcast("ring", grid, 1, np.array([5, 7]), 8)
    assert sent.source.tolist() == [1, 1, 1, 5, 5, 5]
    assert passed_on(sent).source.tolist() == ring.source.tolist() == [1, 2, 3, 5, 6, 7]


def test_messages_of_a_round_share_the_network_of_a_node() -> None:
    """Messages in separate lists share the link, too; a short one is complete before a long one."""
    machine = Machine(ranks_per_node=2)
    link = machine.inter["ring"]
    apart = [
        Messages("ring", np.array([s]), np.array([t]), np.array([w]), 8, LINE) for s, t, w in ((0, 2, 500), (1, 3, 900))
    ]

    class Two(Late):
        ranks = (0, 1, 2, 3)

        def rounds(self) -> Any:
            yield Round(apart)

    assert simulate(Two(), machine, 4).seconds == pytest.approx(link.alpha + 1400 * 8 * link.beta)
    apart.append(apart.pop()._replace(words=np.array([500])))
    assert simulate(Two(), machine, 4).seconds == pytest.approx(link.alpha + 1000 * 8 * link.beta)


def test_very_large_messages_are_sent_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `Tally` counts them."""
    for module in (rounds, "pdgemm.planning.machines.replay_files"):
        name = module if isinstance(module, str) else module.__name__
        monkeypatch.setattr(f"{name}.LARGEST_MESSAGE_BYTES", 3000)
    lines = [action for _, action in actions(Late(), ONE_NODE, ONE_NODE, 2)]
    sizes = [int(x.split()[3]) for x in lines if x.startswith("isend")]
    assert sizes == [3000, 3000, 2000] and Late().traffic(1).messages_sent == 3


def test_the_platform_has_the_links_of_the_machine(tmp_path: Path) -> None:
    machine = Machine(ranks_per_node=2)
    write_replay([CholeskySchedule(blocks(12, (1, 3), 4), 4, "ring")], machine, 3, tmp_path / "t")
    tree = ElementTree.parse(tmp_path / "t" / "platform.xml")
    links = {x.attrib["id"]: x.attrib for x in tree.iter("link")}
    ways = {
        (x.attrib["src"], x.attrib["dst"]): [links[y.attrib["id"]] for y in x.iter("link_ctn")]
        for x in tree.iter("route")
    }

    def figures(*way: tuple[str, str]) -> tuple[float, float]:
        parts = [x for pair in way for x in ways[pair]]
        latency = sum(float(x["latency"].rstrip("s")) for x in parts)
        return latency, 1 / min(float(x["bandwidth"].removesuffix("Bps")) for x in parts)

    near, far = machine.links("ring")
    assert figures(("r0", "n0"), ("n0", "r1")) == pytest.approx((near.alpha, near.beta))
    assert figures(("r0", "network"), ("network", "r2")) == pytest.approx((far.alpha, far.beta))
    shared = [x["id"] for x in ways["r0", "network"]]
    assert shared == [x["id"] for x in ways["r1", "network"]] != [x["id"] for x in ways["r2", "network"]]
    assert len(ways["r0", "n0"] + ways["n0", "r1"]) < len(ways["r0", "network"] + ways["network", "r1"])


def test_traces_are_the_same_in_each_export_and_replace_older_ones(tmp_path: Path) -> None:
    words = "simulate --shape 30,30,30 --ranks 4 --mover ring --export t"
    exports = []
    for count in (6, 4, 4):  # the second export replaces files of more ranks
        done = in_process.run(words.replace("4", str(count)).split(), tmp_path)
        assert done.returncode == 0 and f"wrote t; in this folder SimGrid replays it by:\n{REPLAY}\n" in done.stdout
        exports.append({x.name: x.read_text() for x in (tmp_path / "t").iterdir()})
        assert len(exports[-1]) == count + 3
    assert exports[1] == exports[2]
    assert [x.name for x in tmp_path.iterdir()] == ["t"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--export file", "file exists, and was not written by pdgemm: it is replaced only with --force"),
        ("--export folder --force", "folder is a folder with other files than traces: name another folder"),
        ("--export none/t", "/none does not exist"),
        ("--export file/t", "is not a folder"),
        ("--export hosts", "hosts is a folder with other files than traces: name another folder"),
        ("--export t.svg --plot t.svg", "t.svg is a file that is read or written here: name another one"),
        ("--export t --plot t.svg --ranks 2116", "send too many messages to show for each pair"),
        ("--export t --ranks 200000 --shape 900000,900000,900000", "are too many to simulate"),
    ],
)
def test_bad_exports_write_nothing(tmp_path: Path, options: str, message: str) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("mine")
    (tmp_path / "hosts").mkdir()
    (tmp_path / "hosts" / "hosts").write_text("mine")  # of another program, although traces have a file of this name
    before = sorted(tmp_path.rglob("*"))
    done = in_process.run(["simulate", "--shape", "9000,9000,9000", "--ranks", "4", *options.split()], tmp_path)
    assert done.returncode == 2 and done.stdout == "", done.stdout
    assert message in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "file").read_text() == "mine"


def test_the_current_folder_is_refused(tmp_path: Path) -> None:
    """Even if it is empty: the shell would remain in a folder that is removed."""
    done = in_process.run(["simulate", "--shape", "30,30,30", "--ranks", "4", "--export", "."], tmp_path)
    assert (done.returncode, done.stdout) == (2, "") and "the current folder cannot be replaced" in done.stderr
    assert [*tmp_path.iterdir()] == []


def test_a_file_is_replaced_on_request(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("mine")
    words = "simulate --shape 30,30,30 --ranks 4 --export t --force"
    assert in_process.run(words.split(), tmp_path).returncode == 0
    assert (tmp_path / "t" / "traces").exists() and [x.name for x in tmp_path.iterdir()] == ["t"]


def test_nothing_is_left_if_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t").mkdir()

    def full(*arguments: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pdgemm.planning.machines.replay_files.platform", full)
    with pytest.raises(FileError, match="t: No space left on device"):
        write_replay([Late()], ONE_NODE, 2, tmp_path / "t")
    assert [*tmp_path.rglob("*")] == [tmp_path / "t"]


@pytest.mark.skipif(shutil.which("smpirun") is None, reason="needs SimGrid")
@pytest.mark.parametrize("per_node", [1, 4])
def test_seconds_by_simgrid(tmp_path: Path, per_node: int) -> None:
    machine = Machine(ranks_per_node=per_node)
    product = (
        Question(512, 512, 512, 16, layouts="ideal", algorithm="summa", mover="ring", machine=machine).plan().product
    )
    write_replay([product], machine, 16, tmp_path / "t")
    done = subprocess.run(REPLAY.split(), cwd=tmp_path / "t", capture_output=True, text=True, check=True)
    match = re.search(r"Simulation time ([\d.]+)", done.stdout + done.stderr)
    assert match and float(match[1]) == pytest.approx(simulate(product, machine, 16).seconds, rel=0.15)
