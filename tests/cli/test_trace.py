"""Timelines: spans equal the figures of reports, and ranks have one clock; the format of viewers; profiles."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from fake_device import SCHEDULES, fake_device
from mpi4py import MPI
from problems import TOLERANCE, gemm_error
from tiers import in_turn
from timelines import GOOD, timeline

from pdgemm import Batch, DistMatrix, ProcessGrid, matmul_batched, pdgemm, redistribute, trace
from pdgemm.devices.streams import recorder_of
from pdgemm.errors import ArgumentError, FileError
from pdgemm.instrument import spans as tracing
from pdgemm.instrument.recorder import Recorder
from pdgemm.io import hdf5
from pdgemm.local.arrays.device import Reach
from pdgemm.support.text import in_seconds
from pdgemm.tools.profiling import profile
from pdgemm.tools.profiling.profile_tables import MEANING, tables
from pdgemm.tools.profiling.trace_file import clocks, laid_out, on_root_clock

WAYS = [("summa", mover) for mover in ("ring", "ibcast", "shared", "tree")]
WAYS += [("stationary_a", "ring"), ("stationary_b", "ibcast"), ("cannon", "mpi"), ("2.5d", "mpi"), ("inner", "mpi")]
# "Trace Event Format", Google 2016: JSON Object Format, complete events (X) and metadata events (M)
FIELDS = {"X": {"name", "cat", "ph", "ts", "dur", "pid", "tid"}, "M": {"name", "ph", "pid", "args"}}
METADATA = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}


def well_formed(timeline: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a timeline, after a check of its format."""
    assert timeline.keys() == {"traceEvents", "displayTimeUnit", "otherData"}
    assert timeline["displayTimeUnit"] in ("ms", "ns")
    events: list[dict[str, Any]] = timeline["traceEvents"]
    for x in events:
        fields = FIELDS[x["ph"]]
        assert fields <= x.keys() <= fields | {"tid", "args"}, x
        assert x["name"] in METADATA or (x["ph"] == "X" and x["name"] and x["cat"]), x
        assert isinstance(x.get("args", {}), dict), x
        assert all(type(x.get(name, 0)) is int and x.get(name, 0) >= 0 for name in ("pid", "tid")), x
        assert all(x.get(name, 0) >= 0 for name in ("ts", "dur")), x
    return events


def nested(events: list[dict[str, Any]]) -> bool:
    """Return whether in every row each two spans are disjoint or nested, to half a nanosecond."""
    rows = defaultdict(list)
    for x in events:
        if x["ph"] == "X":
            rows[x["pid"], x["tid"]].append((x["ts"], x["ts"] + x["dur"]))
    for spans in rows.values():
        open_: list[float] = []
        for start, end in sorted(spans, key=lambda x: (x[0], -x[1])):
            while open_ and open_[-1] <= start + 5e-4:
                open_.pop()
            if open_ and end > open_[-1] + 5e-4:
                return False
            open_.append(end)
    return True


def spans(events: list[dict[str, Any]], rank: int, cat: str) -> list[dict[str, Any]]:
    return [x for x in events if x["ph"] == "X" and x["pid"] == rank and x["cat"] == cat]


@pytest.mark.mpi
@pytest.mark.parametrize(("algorithm", "mover"), WAYS)
def test_sums_and_bytes_equal_the_reports(
    comm: Any, grid: Any, shared_tmp_path: Path, algorithm: str, mover: str, tree_mover: None
) -> None:
    path = shared_tmp_path / "t.json"
    A = DistMatrix.random((53, 47), grid=grid, block=5, seed=0)
    B = DistMatrix.random((47, 61), grid=grid, block=5, seed=1)
    options: dict[str, Any] = {"algorithm": algorithm, "mover": mover, "panel_width": 8}
    if algorithm == "cannon":
        options["shape"] = (1, comm.size)
    with trace(path, grid):
        products = [pdgemm(1, A, B, **options) for _ in range(2)]
    full = [X.allgather() for X in (products[0], A, B)]
    everyone = comm.allgather([C.report for C in products])
    events = well_formed(json.loads(path.read_text()))
    assert nested(events)
    if comm.rank == 0:
        assert gemm_error(full[0], 1, *full[1:]) < TOLERANCE
    assert {x["pid"] for x in events} == set(range(comm.size))
    counted = profile.load_profile(path)
    for rank, theirs in zip(counted.ranks, everyone):
        assert len(rank.reports) == 2
        for seconds, key in (
            (rank.phases["product"], "compute_seconds"), (rank.phases["pack"], "pack_seconds"),
            (rank.waiting, "wait_seconds"), (rank.moving, "move_seconds"), (rank.seconds, "seconds"),
        ):  # fmt: skip
            assert seconds == pytest.approx(sum(getattr(r, key) for r in theirs), rel=1e-6, abs=1e-8), key
        kind = {"summa": mover, "cannon": "shift", "inner": "reduce"}.get(algorithm)
        if kind and mover != "shared" and comm.size > 1:
            words = sum(r.counted.words_received - sum(m.counted.words_received for m in r.moves) for r in theirs)
            assert sum(size for _, size, _ in rank.transfers[kind]) == 8 * words
    assert f"rank {counted.critical.number} waits least" in tables(counted)


@pytest.mark.mpi
@pytest.mark.parametrize(("schedule", "way"), in_turn(SCHEDULES, ["staged", "ring"]))
def test_streams_of_a_device_have_rows(comm: Any, shared_tmp_path: Path, schedule: str, way: str) -> None:
    path = shared_tmp_path / "t.json"
    with fake_device(schedule, reach=Reach("", staged=way == "staged")) as device, ProcessGrid(comm) as grid:
        A, B = (DistMatrix.random((24, 24), grid=grid, block=3, seed=seed, device="fake") for seed in range(2))
        with trace(path, grid):
            C = pdgemm(1, A, B, algorithm="summa", panel_width=4)
        report = C.report
        assert comm.allgather(device.races) == [[]] * comm.size
        everyone = comm.allgather(report)
        expected, got = (X.allgather() for X in (pdgemm(1, A.to_host(), B.to_host()), C.to_host()))
    if comm.rank == 0:
        np.testing.assert_allclose(got, expected, rtol=1e-13)
    events = json.loads(path.read_text())["traceEvents"]
    assert nested(events)
    for rank, theirs in enumerate(everyone):
        products = spans(events, rank, "compute")
        assert {x["name"] for x in products} == {"product"}
        assert sum(x["dur"] for x in products) / 1e6 == pytest.approx(theirs.compute_seconds, rel=1e-6, abs=1e-9)
        copies = sum(x["dur"] for x in spans(events, rank, "transfer")) / 1e6
        assert copies == pytest.approx(theirs.pack_seconds, rel=1e-6, abs=1e-9)
        assert {x["name"] for x in spans(events, rank, "host")} >= {"pdgemm", "plan"}
        for stream in ("compute", "transfer"):  # spans of a stream do not overlap
            row = spans(events, rank, stream)
            assert all(a["ts"] + a["dur"] <= b["ts"] + 5e-4 for a, b in itertools.pairwise(row))


@pytest.mark.mpi
def test_files_and_redistributions_are_traced(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    path, file = shared_tmp_path / "t.json", shared_tmp_path / "a.h5"
    A, stack = DistMatrix.random((40, 30), grid=grid, seed=0), Batch.from_local(np.ones((3, 4, 4)), comm)
    with trace(path, grid):
        hdf5.save(file, "/x", A)
        B = hdf5.load(file, "/x", grid, block=3)
        C = redistribute(B, block=7)
        matmul_batched(stack, stack)
    sizes = comm.allgather((A.local.nbytes, B.local.nbytes, C.local.nbytes))
    events = json.loads(path.read_text())["traceEvents"]
    for rank, size in enumerate(sizes):
        found = [(x["name"], x.get("args", {"bytes": 0})["bytes"]) for x in spans(events, rank, "host")]
        named = [x for x in found if x[0] in ("write", "read", "redistribute")]
        assert named == list(zip(("write", "read", "redistribute"), size))
    counted = profile.load_profile(path)
    assert all(x.outside["moved"] > 0 and x.outside["batch"] > 0 for x in counted.ranks)
    text = tables(counted)
    assert "no product was traced" in text and re.search(r" moved .*batch", text)


@pytest.mark.mpi
def test_without_a_trace_nothing_is_recorded(grid: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> None:
        raise AssertionError("a span without a trace")

    for kind in (tracing.Traced, tracing.Phase, tracing.Trace, tracing.Span):
        monkeypatch.setattr(kind, "__init__" if kind is not tracing.Span else "_make", never)
    A = DistMatrix.random((20, 20), grid=grid, seed=0)
    assert type(recorder_of(A.stored)) is Recorder
    for algorithm in ("summa", "inner"):
        pdgemm(1, A, A, algorithm=algorithm)


@pytest.mark.mpi
def test_errors_are_raised_on_all_ranks_and_leave_no_file(comm: Any, grid: Any, shared_tmp_path: Path) -> None:
    folder = shared_tmp_path
    with pytest.raises(FileError, match="folder"), trace(folder / "missing" / "t.json", grid):
        raise AssertionError("the block began")
    with pytest.raises(ZeroDivisionError), trace(folder / "t.json", grid):
        _ = 1 / 0
    assert tracing.active() is None
    with trace(folder / "t.json", grid), pytest.raises(ArgumentError, match="already"), trace(folder / "u", grid):
        raise AssertionError("the block began")
    comm.Barrier()
    assert sorted(x.name for x in folder.iterdir()) == ["t.json"]
    if comm.size > 1:
        with pytest.raises(ArgumentError, match="different arguments"), trace(folder / f"{comm.rank}", grid):
            raise AssertionError("the block began")
    assert tracing.active() is None


@pytest.mark.mpi
def test_clocks_of_nodes_are_one(comm: Any) -> None:
    """Each rank acts as a node; its clock has another rate and another zero."""
    rate, ahead = 1 + 0.1 * comm.rank, 50.0 * comm.rank

    def clock() -> float:
        return perf_counter() * rate + ahead

    def some_time_later() -> None:
        start = perf_counter()
        while perf_counter() < start + 0.01:
            pass

    before = clocks(comm, MPI.COMM_SELF, clock)
    some_time_later()
    middle = clock(), perf_counter()
    some_time_later()
    after = clocks(comm, MPI.COMM_SELF, clock)
    align = on_root_clock(before, after)
    assert abs(align(middle[0]) - middle[1]) <= before.error + after.error + 1e-5
    assert (before.error == 0) == (comm.rank == 0)


@pytest.mark.mpi
def test_ranges_of_nvtx_have_the_same_names(grid: Any, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nvtx

    told: list[str] = []
    open_: list[str] = []

    class Domain:
        def get_event_attributes(self, message: str) -> str:
            return message

        def push_range(self, attributes: str) -> None:
            told.append(attributes)
            open_.append(attributes)

        def pop_range(self) -> None:
            open_.pop()

    monkeypatch.setattr(nvtx, "get_domain", lambda name: Domain())
    path = shared_tmp_path / "t.json"
    A = DistMatrix.random((20, 20), grid=grid, block=3, seed=0)
    for each in (path, None):
        with trace(each, grid, nvtx=True):
            pdgemm(1, A, A, algorithm="summa", mover="mpi", panel_width=4)
    mine = spans(json.loads(path.read_text())["traceEvents"], grid.comm.rank, "host")
    half = len(told) // 2
    assert open_ == [] and told[:half] == told[half:]
    assert sorted(told[:half]) == sorted(x["name"] for x in mine if x["name"] not in ("pdgemm", "plan"))
    monkeypatch.setitem(sys.modules, "nvtx", None)
    monkeypatch.setattr("pdgemm.tools.profiling.trace_file.find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match="pip install nvtx"), trace(None, grid, nvtx=True):
        raise AssertionError("the block began")


# ------------------------------------------------------------------ profiles of timelines made by hand


def test_figures_of_a_timeline(tmp_path: Path) -> None:
    moves = [("ring", 0.0, 0.9 + 0.01 * x, 1 << 20) for x in range(1, 3)] + [("ring", 0.9, 0.92, 1 << 20)]
    first = {"host": [("product", 0.6), ("pack", 0.3), ("wait", 0.02)], "moves": moves, "hidden": 0.06}
    second = {"host": [("product", 0.3), ("wait", 0.5), ("sync", 0.1)], "hidden": 0.5}
    found = profile.load_profile(timeline(tmp_path / "t.json", first, second))
    assert found.critical.number == 0
    assert found.imbalance == pytest.approx(0.6 / 0.45)
    assert found.ranks[0].overlap == pytest.approx(0.75)
    assert found.ranks[1].overlap == pytest.approx(0.5)
    assert found.overlap == pytest.approx(0.625)
    assert found.ranks[0].parts["other"] == pytest.approx(0.08)
    (ring,) = found.transfers()
    assert ring["count"] == 3
    assert ring["bytes"] == 3 << 20
    assert ring["p50_seconds"] == pytest.approx(0.91)
    assert ring["p99_seconds"] == pytest.approx(np.percentile([0.91, 0.92, 0.02], 99))
    # the bandwidth is that of transfers whose wait began soon after their start
    assert ring["waited_for"] == 1
    assert ring["gb_per_second"] == pytest.approx((1 << 20) / 0.02 / 1e9)
    assert ring["calibrated_inside_a_node"] == pytest.approx(5.0)
    assert ring["calibrated_between_nodes"] is None
    assert found.rate == pytest.approx(0.9 / 2 / 0.45)


def test_shares_of_the_time_are_a_table(tmp_path: Path) -> None:
    parts = {"plan": 0.01, "product": 0.5, "wait": 0.2, "sync": 0.1, "pack": 0.05, "post": 0.04, "other": 0.1}
    spent = {"host": [(name, seconds) for name, seconds in parts.items() if name != "other"]}
    found = profile.load_profile(timeline(tmp_path / "t.json", spent, spent))
    assert found.parts == pytest.approx(parts | {"redistribute": 0.0})
    assert found.as_dict()["mean_seconds"] == pytest.approx({"total": 1.0, **found.parts})
    assert not any(x.spans for x in found.ranks)
    found = profile.load_profile(tmp_path / "t.json", spans=True)
    for rank in found.ranks:
        assert {x.name: pytest.approx(x.seconds) for x in rank.spans if x.name in parts} == dict(spent["host"])
    lines = tables(found).splitlines()
    assert max(map(len, lines)) <= 80
    assert MEANING.keys() == found.parts.keys()
    for name, seconds in found.parts.items():
        (at,) = (number for number, x in enumerate(lines) if x.startswith(f"{name} ") and "%" in x)
        assert lines[at].split()[1:4] == [*in_seconds(seconds).split(), f"{seconds:.0%}"]
        below = next(number for number, x in enumerate(lines[at + 1 :], at + 1) if x[:1] != " ")
        assert " ".join(" ".join(x[20:].split()) for x in lines[at:below]).endswith(MEANING[name])
    every = next(number for number, x in enumerate(lines) if x == "Seconds of each rank; rank 0 is the bottleneck")
    assert [x.split() for x in lines[every + 1 : every + 3]] == [
        ["rank", "total", "plan", "product", "wait", "sync", "pack", "post", "other", "overlap"],
        ["0", "1.00", "0.010", "0.500", "0.200", "0.100", "0.050", "0.040", "0.100", "-"],
    ]


def test_clocks_of_one_node_are_not_compared(tmp_path: Path) -> None:
    found = profile.load_profile(timeline(tmp_path / "t.json", GOOD, GOOD))
    several = len({x.node for x in found.about}) > 1
    assert ("clocks of nodes agree" in tables(found)) == several
    found.about = [x for x in found.about if x.node == found.about[0].node] * 2
    assert "clocks" not in tables(found)


def test_figures_beside_the_tables(tmp_path: Path) -> None:
    for facts, said in (
        ({}, "longest product: summa on 1 x 2, 8 panels, lookahead 1, 100 words received, lower bound 100\n"),
        ({"cores": 1}, "more threads than cores: n1: 2 threads on 1 core"),
        ({"lookahead": 0, "panels": 1}, "1 panel, lookahead 0, "),
        ({}, "products at 50% of the calibrated rate of such products\n"),
        ({}, "load imbalance 1.00 (longest over mean time of products); rank 0 waits least\n"),
    ):
        text = tables(profile.load_profile(timeline(tmp_path / "t.json", GOOD, GOOD, **facts)))
        assert " ".join(said.split()) in " ".join(text.split()) and max(map(len, text.splitlines())) <= 80


def test_products_on_grids_of_some_of_the_ranks(tmp_path: Path) -> None:
    """Each rank computes another product, on a 1 x 1 grid: the rate is that of one rank."""
    path = timeline(tmp_path / "t.json", GOOD, GOOD, grid=[1, 1])
    assert profile.load_profile(path).rate == pytest.approx(1.0)


def test_the_figures_are_those_of_the_longest_product(tmp_path: Path) -> None:
    path = timeline(tmp_path / "t.json", {"host": [("product", 0.5), ("wait", 0.4)]})
    found = json.loads(path.read_text())
    (product,) = (x for x in found["traceEvents"] if x["name"] == "pdgemm")
    first = product | {"ts": -10.0, "dur": 5.0, "args": product["args"] | {"lookahead": 0, "seconds": 5e-6}}
    found["traceEvents"].insert(0, first)
    path.write_text(json.dumps(found))
    assert ", lookahead 1, " in tables(profile.load_profile(path))


def test_a_short_wait_after_a_redistribution_is_a_wait(tmp_path: Path) -> None:
    path = timeline(tmp_path / "t.json", {"host": [("redistribute", 0.1), ("wait", 1e-5), ("product", 0.5)]})
    (rank,) = profile.load_profile(path).ranks
    assert rank.moving == pytest.approx(0.1) and rank.waiting == pytest.approx(1e-5)


def test_invalid_timelines_are_refused(tmp_path: Path) -> None:
    """A file without timeline, and a missing file; tests/unit/test_reading.py damages and truncates files."""
    (tmp_path / "t.json").write_text('{"traceEvents": [], "otherData": {"ranks": [], "machine": {}}}')
    with pytest.raises(ArgumentError, match=r"t\.json is not a timeline"):
        profile.load_profile(tmp_path / "t.json")
    with pytest.raises(FileError, match="No such file"):
        profile.load_profile(tmp_path / "nothing.json")


def test_rows_of_transfers_never_cross() -> None:
    rng = np.random.default_rng(0)
    starts = rng.uniform(0, 10, 200)
    made = [tracing.Span(tracing.MOVING, "ring", s, s + d) for s, d in zip(starts, rng.uniform(0, 2, 200))]
    rows = defaultdict(list)
    for row, span in laid_out(made):
        rows[row].append(span)
    assert sum(map(len, rows.values())) == 200
    for each in rows.values():
        assert all(a.end <= b.start for a, b in itertools.pairwise(each))
    busiest = max(sum(x.start <= t < x.end for x in made) for t in starts)
    assert len(rows) == busiest  # no more rows than needed
