"""Launchers' variables, variables of child processes, streams, and proposed settings."""

from __future__ import annotations

import sys
from typing import Any

import click
import pytest

from pdgemm.support.launcher import (
    LAUNCHERS,
    launched_rank,
    launched_size,
    local_rank,
    outside_allocation,
    outside_job,
    said_size,
    without_networks,
)
from pdgemm.support.text import echo
from pdgemm.tools.profiling import environment


def test_rank_and_size_by_each_launcher() -> None:
    told = [names for names in LAUNCHERS.values() if names.rank]
    assert len(told) == 3
    for names in told:
        said = {names.rank: "2", names.size: "5"}
        assert (launched_rank(said), launched_size(said), said_size(said)) == (2, 5, (5, names.size))
    assert (launched_rank({}), said_size({})) == (0, (1, ""))
    for bad in ("x", "", "-1"):
        assert (launched_rank({"PMI_RANK": bad}), launched_size({"PMI_SIZE": bad})) == (0, 1)
    # of mpirun's ranks, not of its daemons, which Slurm counts
    assert said_size({"SLURM_STEP_NUM_TASKS": "4", "OMPI_COMM_WORLD_SIZE": "1"}) == (1, "OMPI_COMM_WORLD_SIZE")


def test_local_rank_by_each_launcher() -> None:
    for _, _, name, total in LAUNCHERS.values():
        assert local_rank({name: "3", total: "8"} if total else {name: "3"}) == (3, 8 if total else 0)
        assert local_rank({name: "3"}) == (3, 0)
    assert local_rank({}) is None
    assert local_rank({"OMPI_COMM_WORLD_LOCAL_RANK": "x"}) is None
    both = {"SLURM_LOCALID": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    assert local_rank(both) == (2, 4)  # from mpiexec, not from the batch step in which it runs


def test_mpi_starts_without_networks_on_one_node() -> None:
    one, two = ({f"OMPI_COMM_WORLD_{x}": y for x, y in (("SIZE", "4"), ("LOCAL_SIZE", here))} for here in ("4", "2"))
    of_user = {"OMPI_MCA_btl": "self,tcp"}
    alone = {"SLURM_STEP_NUM_TASKS": "4"}
    for said, transports in (({}, "^ofi"), (one, "^ofi"), (two, None), (alone, None), (of_user, "self,tcp")):
        variables = dict(said)
        with without_networks(variables):
            assert variables.get("OMPI_MCA_btl") == transports
        assert variables == said  # restored for child jobs


def test_a_child_job_inherits_the_allocation_and_user_variables() -> None:
    of_ranks = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "PRTE_LAUNCHED")
    of_users = ("OMPI_MCA_pml", "PMIX_MCA_gds", "PATH", "PDGEMM_MACHINE")
    of_batch = ("SLURM_JOB_ID", "SLURM_NTASKS")
    said = dict.fromkeys((*of_ranks, *of_users, *of_batch), "1")
    assert {*outside_job(said)} == {*of_users, *of_batch}
    assert {*outside_allocation(said)} == {"PATH", "PDGEMM_MACHINE"}


@pytest.mark.parametrize("err", [False, True])
def test_a_closed_stream_does_not_close_the_other(monkeypatch: pytest.MonkeyPatch, err: bool) -> None:
    def closed(*args: Any, **options: Any) -> None:
        raise BrokenPipeError

    before = sys.stdout, sys.stderr
    for name, stream in zip(("stdout", "stderr"), before):
        monkeypatch.setattr(sys, name, stream)  # and restored afterwards
    monkeypatch.setattr(click, "echo", closed)
    echo("a line", err=err)
    after = sys.stdout, sys.stderr
    assert [x is y for x, y in zip(before, after)] == [err, not err]
    after[err].close()


def test_only_settings_that_are_not_set_are_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [x for x in environment.os.environ if x.startswith("OMPI_MCA_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(environment.Path, "exists", lambda path: False)  # no InfiniBand
    (every,) = environment._tcp("Open MPI 5")
    names = [x.partition("=")[0] for x in every.split(" export ")[1].split()]
    monkeypatch.setenv(names[0], "mine")
    (rest,) = environment._tcp("Open MPI 5")
    assert names[0] not in rest and all(name in rest for name in names[1:])
    for name in names:
        monkeypatch.setenv(name, "mine")
    assert environment._tcp("Open MPI 5") == []
