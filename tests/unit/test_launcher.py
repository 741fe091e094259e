"""What launchers say in the environment, and what child processes are told."""

from __future__ import annotations

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


def test_each_launcher_tells_the_rank_and_their_number() -> None:
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


def test_each_launcher_tells_the_local_rank() -> None:
    for _, _, name, total in LAUNCHERS.values():
        assert local_rank({name: "3", total: "8"} if total else {name: "3"}) == (3, 8 if total else 0)
        assert local_rank({name: "3"}) == (3, 0)
    assert local_rank({}) is None
    assert local_rank({"OMPI_COMM_WORLD_LOCAL_RANK": "x"}) is None
    both = {"SLURM_LOCALID": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    assert local_rank(both) == (2, 4)  # of mpiexec, not of the batch step it runs in


def test_mpi_starts_without_networks_on_one_node() -> None:
    one, two = ({f"OMPI_COMM_WORLD_{x}": y for x, y in (("SIZE", "4"), ("LOCAL_SIZE", here))} for here in ("4", "2"))
    for said, transports in (({}, "^ofi"), (one, "^ofi"), (two, None), ({"SLURM_STEP_NUM_TASKS": "4"}, None)):
        environment = dict(said)
        with without_networks(environment):
            assert environment.get("OMPI_MCA_btl") == transports
        assert environment == said  # of jobs that are started from here
    of_user = {"OMPI_MCA_btl": "self,tcp"}
    with without_networks(of_user):
        assert of_user == {"OMPI_MCA_btl": "self,tcp"}


def test_a_job_of_its_own_keeps_the_allocation_and_what_users_say() -> None:
    of_ranks = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "PRTE_LAUNCHED")
    of_users = ("OMPI_MCA_pml", "PMIX_MCA_gds", "PATH", "PDGEMM_MACHINE")
    of_batch = ("SLURM_JOB_ID", "SLURM_NTASKS")
    said = dict.fromkeys((*of_ranks, *of_users, *of_batch), "1")
    assert {*outside_job(said)} == {*of_users, *of_batch}
    assert {*outside_allocation(said)} == {"PATH", "PDGEMM_MACHINE"}
