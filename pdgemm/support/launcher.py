"""What launchers and batch systems say in the environment of a process.  Loads no MPI.

mpiexec, srun and their like tell each rank its number before MPI starts.  A variable that holds no sensible number is
as good as none.  Slurm comes last: mpirun starts its own daemons by srun, one on each node, and their ranks inherit
what Slurm says of the daemons.
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
    """The variables in which a launcher tells a rank its number and their count, in the job and on the node."""

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
_RANK = ("OMPI_COMM_", "PMI_", "PMIX_", "PRTE_LAUNCHED")  # what tells a process that it is a rank
_USER = ("PMIX_MCA_",)  # what users tell launchers
_ANY = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDRA_", "MPI_LOCAL", "SLURM_", "PALS_")


# ------------------------------------------------------------------ this rank
def launched_rank(environment: Mapping[str, str] = os.environ) -> int:
    """The number of this rank in its job; 0 where no launcher says it."""
    numbers = (variable(names.rank, Size, environment=environment) for names in LAUNCHERS.values())
    return next((number for number in numbers if number is not None), 0)


def launched_size(environment: Mapping[str, str] = os.environ) -> int:
    """The number of ranks that the launcher started; 1 where none says it."""
    return said_size(environment)[0]


def said_size(environment: Mapping[str, str] = os.environ) -> tuple[int, str]:
    """The same with the variable that says it, or ""."""
    for names in LAUNCHERS.values():
        if number := variable(names.size, Count, environment=environment):
            return number, names.size
    return 1, ""


def local_rank(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """The number of this rank on its node, and the count of ranks there, 0 if that is not said; None: neither is."""
    for names in LAUNCHERS.values():
        number = variable(names.local_rank, Size, environment=environment)
        if number is not None:
            return number, variable(names.local_size, Size, environment=environment) or 0
    return None


def survives_ranks(environment: Mapping[str, str] = os.environ) -> bool:
    """Does the launcher let the other ranks go on when one fails, as Open MPI's does: mpirun --with-ft ulfm?"""
    return bool(variable("OMPI_MCA_mpi_ft_enable", Size, environment=environment))


@contextmanager
def without_networks(environment: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Initialise MPI in the block: on one node, Open MPI does without a component that costs a second.

    Its transport "ofi", by which nothing here is sent, sleeps for a second when it finds no network (`sleep(1)` in
    opal/mca/btl/ofi/btl_ofi_component.c), on each rank of each job.  Which transports the user names are taken.
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
    """The environment for a launcher that is started here: its ranks are no part of this process's job.

    The allocation of a batch system stays, and what users tell launchers.
    """
    return {x: y for x, y in environment.items() if not x.startswith(_RANK) or x.startswith(_USER)}


def outside_allocation(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment for a process without a launcher: it is in no job and in no allocation."""
    return {x: y for x, y in environment.items() if not x.startswith(_ANY)}


# ------------------------------------------------------------------ the allocation of a batch system
def in_slurm(environment: Mapping[str, str] = os.environ) -> bool:
    return bool(environment.get("SLURM_JOB_ID"))


def allocated_ranks(environment: Mapping[str, str] = os.environ) -> int | None:
    """How many ranks the allocation takes; None where there is none."""
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
    """How many nodes the allocation has; 1 where there is none."""
    number = variable("SLURM_JOB_NUM_NODES", Count, environment=environment) or len({*_pbs_nodes(environment)})
    return number or len(environment.get("LSB_MCPU_HOSTS", "").split()) // 2 or 1  # LSF: "node1 8 node2 8"


def cores_per_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """How many cores the batch system gives to a rank; None where it does not say."""
    number: int | None = variable("SLURM_CPUS_PER_TASK", Count, environment=environment)
    return number


def _pbs_nodes(environment: Mapping[str, str]) -> list[str]:
    """The nodes of an allocation by PBS, once for each rank."""
    nodefile = Path(environment.get("PBS_NODEFILE") or os.devnull)
    return read_file(nodefile, 1 << 26).decode(errors="replace").split() if nodefile.is_file() else []
