"""Threads per rank: a rank uses its share of the node's cores.

Four ranks on a node of four cores, each with a BLAS that starts a thread per core, would run
16 threads.  Whoever sets one of the variables below has decided otherwise, and is obeyed.
"""

from __future__ import annotations

import os
from functools import cache

from mpi4py import MPI
from threadpoolctl import ThreadpoolController

DECIDED_BY = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


def share_cores(node: MPI.Comm) -> None:
    """Lower the number of BLAS threads of this process to its share of the node's cores.

    Collective over `node`.  The share counts each core that this rank may run on, divided by the
    ranks that may run there too: right for bound and for unbound ranks.  Never raises the number:
    a later grid over fewer ranks does not bring back the threads that an earlier one took away.
    """
    share = core_share(node.allgather(sorted(os.sched_getaffinity(0))), node.rank)
    blas = _blas()
    if share < threads() and not decided_by():
        blas.limit(limits=share)


def decided_by() -> str | None:
    """The variable by which the user has set the number of threads, if any."""
    return next((name for name in DECIDED_BY if os.environ.get(name)), None)


def threads() -> int:
    """BLAS threads of this process as they are set now."""
    return max((pool["num_threads"] for pool in _blas().info()), default=1)


def core_share(cores: list[list[int]], rank: int) -> int:
    """Whole cores for `rank` when each core is divided among the ranks allowed on it, >= 1."""
    ranks_on: dict[int, int] = {}
    for allowed in cores:
        for core in allowed:
            ranks_on[core] = ranks_on.get(core, 0) + 1
    return max(1, int(sum(1 / ranks_on[core] for core in cores[rank]) + 1e-9))


@cache
def _blas() -> ThreadpoolController:
    import scipy.linalg  # noqa: F401  the product is done by SciPy's BLAS: let it be found

    return ThreadpoolController().select(user_api="blas")
