"""Calibration on nodes of unequal size, where a rank could miss a collective."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from tiers import third
from tree_mover import BY_MESSAGES

from pdgemm import Machine, ProcessGrid
from pdgemm.errors import OutOfMemoryError
from pdgemm.planning.machines.machine import is_possible
from pdgemm.tools.calibrate import calibrate
from pdgemm.tools.calibrate.links import link
from pdgemm.tools.calibrate.place import HOSTS, MeasuredPlace
from pdgemm.tools.cli.commands import cli

pytestmark = pytest.mark.mpi


@pytest.mark.on_ranks(3)
@pytest.mark.parametrize("per_node", third([2, 1, 100]))
def test_any_distribution_of_ranks_over_nodes(comm: Any, monkeypatch: pytest.MonkeyPatch, per_node: int) -> None:
    """Nodes of one, two or all ranks; a single rank on the last node has no link inside its node."""
    if comm.size > 4:
        pytest.skip("slow if ranks share cores, and tests nothing new")

    monkeypatch.setenv("PDGEMM_RANKS_PER_NODE", str(per_node))
    monkeypatch.setattr("platform.node", lambda: f"node{comm.rank // per_node}")
    own = comm.Dup()  # the nodes of `comm` are cached with its grids
    machine = calibrate(own)
    own.Free()
    assert len(set(comm.allgather(str(machine)))) == 1
    default = Machine()
    assert machine.ranks_per_node == (per_node if per_node < comm.size else None)
    together = comm.size > 1 and per_node > 1 and comm.size % per_node != 1
    assert (machine.intra["shift"] != default.intra["shift"]) == together
    assert (machine.inter["shift"] != default.inter["shift"]) == (per_node < comm.size)
    for kind in default.intra:
        assert machine.intra[kind].alpha > 0 < machine.inter[kind].beta


def test_an_impossible_link_is_measured_again(comm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link is measured until the large transfer takes longer than the small one, at most three times."""
    links, where = import_module("pdgemm.tools.calibrate.links"), MeasuredPlace(None, HOSTS, False, False)
    for seconds, times in (([(2e-3, 1e-3), (1e-4, 1e-2), (0, 0)], 2), ([(2e-3, 1e-3)] * 9, 3)):
        left = iter(seconds)
        monkeypatch.setattr(links, "in_turns", lambda comm, works, left=left: next(left))
        link = links.measured_link(comm, [], where, words=1 << 20)
        assert is_possible(link, "host") == (times == 2) and len([*left]) == len(seconds) - times


@pytest.mark.parametrize("command", ["calibrate", "scaling"])
def test_impossible_figures_are_not_written(
    comm: Any, monkeypatch: pytest.MonkeyPatch, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Impossible figures are not written, and not used by a study, whose predictions are then for a default cluster."""
    from pdgemm.planning.machines.machine import Link, Machine
    from pdgemm.tools import calibrate

    measured, calls = Machine(intra={**Machine().intra, "ring": Link(1e-3, 1e-13)}), []
    monkeypatch.setattr(calibrate, "calibrate", lambda *args, **how: calls.append(how) or measured)
    out = shared_tmp_path / "m.json"
    words = (
        ["calibrate", "-o"]
        if command == "calibrate"
        else ["scaling", "strong", "--shape", "9,9,9", "--ranks", "1", "--calibrate", "--out"]
    )
    assert cli.main([*words, str(out)], standalone_mode=False) == 1 and calls
    said = capsys.readouterr().err
    assert comm.rank or "ring inside a node: 10000 GB/s is more than any memory has (2000)" in said
    assert not out.exists() or "machine" not in out.read_text()


@pytest.mark.on_ranks(2)
def test_movers_that_the_test_registered_are_measured(comm: Any, tree_mover: None) -> None:
    if comm.size > 2:
        pytest.skip("slow if ranks share cores, and tests nothing new")
    machine = calibrate(comm)
    assert "rank" in machine.name and {*BY_MESSAGES} <= {*machine.intra} and "tree" in str(machine)
    assert machine.ranks_per_node is None and machine.intra["shift"] != Machine().intra["shift"]
    assert machine.links("tree")[0] is machine.intra["tree"]
    assert machine.links("tree")[1] is machine.inter["ring"]  # it was not measured


@pytest.mark.on_ranks(2)
@pytest.mark.parametrize("which", ["broadcast", "shift", "reduce", "rates", "overlap"])
def test_too_little_memory_on_one_rank_is_an_error_on_all(
    comm: Any, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """If one rank runs out of memory, as on a full GPU, all ranks raise the error, and none hangs."""
    calibrate, links, place = (import_module(f"pdgemm.tools.calibrate{x}") for x in ("", ".links", ".place"))
    here = place.MeasuredPlace(None, place.HOSTS._replace(side=8, widths=(2, 4), words=64, beside=(8, 8)))

    def full(*arguments: Any, **options: Any) -> Any:
        raise OutOfMemoryError("no room on the device")

    def act() -> None:
        with ProcessGrid(comm, (1, comm.size)) as grid:
            if which == "rates":
                calibrate._rates(grid.comm, here, "float64", 1e9)
            elif which == "overlap":
                calibrate._overlap(grid, here, link([1e-6, 1e-3], 1 << 17))
            else:
                links.links(grid.comm, grid.comm, here, 1)

    if comm.rank == comm.size - 1:
        names = {"broadcast": "_broadcaster", "shift": "shifter", "reduce": "_reducer"}
        if which in names:
            monkeypatch.setattr(links, names[which], full)
        else:
            monkeypatch.setattr(place.MeasuredPlace, "empty", full)
    with pytest.raises(OutOfMemoryError, match="no room on the device"):
        act()


def test_a_link_is_a_line_through_a_small_and_a_large_transfer() -> None:
    """A small and a large transfer determine alpha (seconds per message) and beta (seconds per byte)."""
    found = link([6e-6, 6e-6 + 3 * 1000 * 8 * 2e-10], words=3000, messages=3)
    assert (found.alpha, found.beta) == pytest.approx((2e-6, 2e-10))
