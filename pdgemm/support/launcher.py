"""The environment variables that launchers and batch systems set for a process.  Loads no MPI.

mpiexec, srun and similar launchers pass each rank its number before MPI starts.  A variable without a valid number
counts as not set.  Slurm is last: mpirun starts its own daemons by srun, one on each node, and the ranks of the
daemons inherit the variables that Slurm sets for the daemons.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pdgemm.support.files import read_file
from pdgemm.support.json_input import Count, Size, variable


class Names(NamedTuple):
    """The variables that hold a rank's number and the number of ranks, in the job and on the node of the rank."""

    rank: str = ""
    size: str = ""
    local_rank: str = ""
    local_size: str = ""


LAUNCHERS = {
    "Open MPI": Names(
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"
    ),
    "MPICH, Intel MPI": Names("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "MVAPICH": Names(local_rank="MV2_COMM_WORLD_LOCAL_RANK", local_size="MV2_COMM_WORLD_LOCAL_SIZE"),
    "HPE PALS": Names(local_rank="PALS_LOCAL_RANKID", local_size="PALS_LOCAL_SIZE"),
    "Flux": Names(local_rank="FLUX_TASK_LOCAL_ID"),
    "Slurm": Names("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
}
_TRANSPORTS = "OMPI_MCA_btl"
_RANK = ("OMPI_COMM_", "PMI_", "PMIX_", "PRTE_LAUNCHED")  # prefixes of variables that make a process a rank
_USER = ("PMIX_MCA_",)  # prefixes of options that users set for launchers
_ANY = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDRA_", "MPI_LOCAL", "SLURM_", "PALS_")


# ------------------------------------------------------------------ this rank
def launched_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of this rank in its job; 0 where no launcher sets the number."""
    numbers = (variable(names.rank, Size, environment=environment) for names in LAUNCHERS.values())
    return next((number for number in numbers if number is not None), 0)


def launched_size(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks that the launcher started; 1 where no launcher sets the number."""
    return said_size(environment)[0]


def said_size(environment: Mapping[str, str] = os.environ) -> tuple[int, str]:
    """Return `launched_size` and the name of the variable that holds it; "" where no launcher sets one."""
    for names in LAUNCHERS.values():
        if number := variable(names.size, Count, environment=environment):
            return number, names.size
    return 1, ""


def local_rank(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """Return this rank's number on its node, and the number of ranks on the node (0 if this is unknown).

    Return None if no launcher sets the first number.
    """
    for names in LAUNCHERS.values():
        number = variable(names.local_rank, Size, environment=environment)
        if number is not None:
            return number, variable(names.local_size, Size, environment=environment) or 0
    return None


def survives_ranks(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the launcher lets other ranks continue when a rank fails: mpirun --with-ft ulfm of Open MPI."""
    return bool(variable("OMPI_MCA_mpi_ft_enable", Size, environment=environment))


@contextmanager
def without_networks(environment: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Run a block that initialises MPI: on one node, Open MPI does not load a component that costs a second.

    The transport "ofi", which sends nothing within a node, sleeps for a second when it finds no network (`sleep(1)` in
    opal/mca/btl/ofi/btl_ofi_component.c), on each rank of each job.  If the user selects transports, those are used.
    """
    local_size = variable(LAUNCHERS["Open MPI"].local_size, Count, environment=environment) or 1
    ours = _TRANSPORTS not in environment and launched_size(environment) == local_size
    if ours:
        environment[_TRANSPORTS] = "^ofi"
    try:
        yield
    finally:
        if ours:  # jobs that are started from here may have several nodes
            del environment[_TRANSPORTS]


# ------------------------------------------------------------------ the environments of child processes
def outside_job(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment for a launcher that this process starts: its ranks do not belong to this process's job.

    The variables of a batch system's allocation, and users' options for launchers, stay.
    """
    return {x: y for x, y in environment.items() if not x.startswith(_RANK) or x.startswith(_USER)}


def outside_allocation(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment without variables of launchers and allocations, for a process that belongs to neither."""
    return {x: y for x, y in environment.items() if not x.startswith(_ANY)}


# ------------------------------------------------------------------ the allocation of a batch system
def in_slurm(environment: Mapping[str, str] = os.environ) -> bool:
    return bool(environment.get("SLURM_JOB_ID"))


def allocated_ranks(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of ranks for which the allocation is made; None where there is no allocation."""
    if tasks := variable("SLURM_NTASKS", Size, environment=environment):
        return int(tasks)
    cores = 0
    for number, nodes in re.findall(r"(\d{1,9})(?:\(x(\d{1,9})\))?", environment.get("SLURM_JOB_CPUS_PER_NODE", "")):
        cores += int(number) * int(nodes or 1)
    if cores:
        return max(1, cores // (cores_per_rank(environment) or 1))
    lsf: int | None = variable("LSB_DJOB_NUMPROC", Count, environment=environment)
    return lsf or len(_pbs_nodes(environment)) or None


def allocated_nodes(environment: Mapping[str, str] = os.environ) -> int:
    """Return the number of nodes of the allocation; 1 where there is no allocation."""
    number = variable("SLURM_JOB_NUM_NODES", Count, environment=environment) or len({*_pbs_nodes(environment)})
    return number or len(environment.get("LSB_MCPU_HOSTS", "").split()) // 2 or 1  # LSF: "node1 8 node2 8"


def cores_per_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of cores that the batch system gives each rank; None where the number is not set."""
    number: int | None = variable("SLURM_CPUS_PER_TASK", Count, environment=environment)
    return number


def _pbs_nodes(environment: Mapping[str, str]) -> list[str]:
    """Return the nodes of an allocation by PBS, each node once for each of its ranks."""
    nodefile = Path(environment.get("PBS_NODEFILE") or os.devnull)
    return read_file(nodefile, 1 << 26).decode(errors="replace").split() if nodefile.is_file() else []
