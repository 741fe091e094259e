"""Threads per rank: a rank uses its share of the node's cores.

Four ranks on a node of four cores, each with a BLAS that starts a thread per core, would run
16 threads.  OMP_NUM_THREADS, or the variable of a BLAS (OPENBLAS_NUM_THREADS, MKL_NUM_THREADS),
takes precedence where it is set.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from threadpoolctl import LibController

from pdgemm.local.blas import library as blas, processors

if TYPE_CHECKING:
    from mpi4py import MPI

NAMES = {"openblas": "OpenBLAS", "mkl": "MKL", "blis": "BLIS", "flexiblas": "FlexiBLAS"}


def share_cores(node: MPI.Comm) -> None:
    """Lower the number of threads of each BLAS of this process to the rank's share of the node's cores.

    Collective over `node`.  The ranks that may run on a core share it equally, and the share of a rank is the
    sum of its parts of all cores in its affinity, for bound and for unbound ranks.  The number is never raised:
    a later grid over fewer ranks does not restore threads that an earlier grid removed.
    """
    share = core_share(node.allgather(sorted(os.sched_getaffinity(0))), node.rank)
    variable = decided_by("mkl")
    blas.settle(one_thread=(os.environ[variable] if variable else str(share)) == "1")
    for library in _libraries():
        if share < library.num_threads and not decided_by(library.internal_api):
            library.set_num_threads(share)


def oversubscribed(node: MPI.Comm) -> bool:
    """Return whether the cores are oversubscribed: more ranks than cores.  Collective over `node`."""
    return node.size > len(set().union(*node.allgather(os.sched_getaffinity(0))))


class NodeCores(NamedTuple):
    """The cores on which the ranks of a node run, and the number of threads that these ranks use together."""

    cores: set[int]
    threads: int

    @classmethod
    def of(cls, node: MPI.Comm) -> NodeCores:
        """Return the cores of the ranks of `node`.  Collective over it."""
        cores = set[int]().union(*node.allgather(os.sched_getaffinity(0)))
        return cls(cores, min(len(cores), sum(node.allgather(threads()))))

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let BLAS use all of these cores in a block; the other ranks of the node compute nothing meanwhile.  Local."""
        own, before = os.sched_getaffinity(0), [(x, x.num_threads) for x in _libraries()]
        with suppress(OSError):  # a container may forbid it; the threads then share the cores of this rank
            os.sched_setaffinity(0, self.cores)  # threads that a library starts inherit it
        try:
            for library, number in before:
                library.set_num_threads(max(number, self.threads))
            yield
        finally:
            for library, number in before:
                library.set_num_threads(number)
            with suppress(OSError):
                os.sched_setaffinity(0, own)


def decided_by(api: str | None = None) -> str | None:
    """Return the variable by which the user has set the threads of a BLAS (by default of local products), or None."""
    if api is None:
        used = blas_of_products()
        api = used.internal_api if used else "none"
    return next((name for name in (f"{api.upper()}_NUM_THREADS", "OMP_NUM_THREADS") if os.environ.get(name)), None)


@cache
def blas_of_products() -> LibController | None:
    """Return the BLAS of local products, or None if threadpoolctl does not support it; NumPy may use another BLAS."""
    return processors.behind(blas.caller(), _libraries())


def threads() -> int:
    """Return the current number of threads of the BLAS of local products."""
    used = blas_of_products()
    return used.num_threads if used else 1


@cache
def multiplier() -> str:
    """Return the name, version and kernel of the BLAS of local products."""
    used, library = blas_of_products(), blas.library()
    name = Path(library._name).name if library else "BLAS"
    if used:
        name = " ".join(
            filter(None, (NAMES[used.internal_api], (used.version or "").split("-")[0], processors.kernel(used)))
        )
    return name if library else f"{name} (SciPy)"


def core_share(cores: list[list[int]], rank: int) -> int:
    """Return the number of whole cores for `rank`, >= 1, where the ranks that may run on a core share it equally."""
    ranks_on = Counter(core for allowed in cores for core in allowed)
    return max(1, int(sum(1 / ranks_on[core] for core in cores[rank]) + 1e-9))


@cache
def _libraries() -> list[LibController]:
    blas.routine("gemm", "d")  # threadpoolctl finds only loaded libraries
    return processors.libraries()
