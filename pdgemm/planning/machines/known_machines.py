"""Known machines by name: clusters of processors, and nodes with eight GPUs for the training of neural networks.

Cores, peaks, memory and network cards are the makers' numbers.  At most three constants of a cluster were set by hand,
for some published products or factorisations (`pdgemm plan --check` marks them); they are the same for all others.
Five constants of an accelerator, and the share of a card's rate that collectives reach, were chosen once by comparison
with published step times (`pdgemm model --check`); they are the same for all networks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from pdgemm.errors import ArgumentError
from pdgemm.planning.machines.machine import CUDA, KINDS, Link, Machine, load_machine, on_nodes


class Cluster(NamedTuple):
    """A cluster of nodes: their cores, `makers` numbers, and constants that were set `by_hand`.

    Both map some of these names to their values; all else has the defaults of `Machine`.
    rate, copies : float64 flops of large products, and bytes copied, per second of a core.
    network : bytes per second of a node, in each direction.
    connected, crowding : `Machine.connected` and `Machine.crowding`.
    """

    what: str
    cores: int
    makers: dict[str, Any]
    by_hand: dict[str, Any]


CLUSTERS = {
    # CA3DMM's (Huang & Chow, SC 2022): 75 GFLOP/s of a core, InfiniBand HDR100.  1024 is a default of MVAPICH2
    # (MV2_HYBRID_ENABLE_THRESHOLD, 512 or 1024 by release), from which on it sends datagrams; no source says
    # which MPI ran.
    "xeon-24": Cluster(
        "two 12-core Xeons a node, 100 Gb/s (PACE Phoenix)", 24,
        {"network": 12.5e9, "connected": 1024}, {"rate": 72e9, "copies": 16e9, "crowding": 1e-10},
    ),
    # Cray XC40: two Xeon E5-2695 v4, 2.1 GHz x 16 flops = 33.6 GFLOP/s of a core
    "piz-daint-mc": Cluster(
        "two 18-core Xeons a node, Aries (Piz Daint's multicore part)", 36,
        {}, {"rate": 32e9, "copies": 8e9, "network": 7e9},
    ),
    # the same nodes: constants of a factorisation by ranks of 18 threads, of which one sends (--ranks-per-node 2)
    "piz-daint-omp": Cluster(
        "Piz Daint's multicore part for factorisations by ranks with threads", 36,
        {}, {"rate": 22e9, "copies": 2e9, "network": 1.2e9},
    ),
    # two EPYC 7763, 2.45 GHz x 16 flops = 39.2 GFLOP/s of a core; nothing published was compared
    "epyc-128": Cluster(
        "two 64-core EPYCs a node, 200 Gb/s", 128, {"network": 25e9}, {"rate": 35e9},
    ),
}  # fmt: skip


def cluster(name: str, ranks_per_node: int | None = None) -> Machine:
    """Return a machine of `CLUSTERS`.   ranks_per_node : ranks that share the cores; None: a rank on each core.

    Raises ArgumentError for more ranks than cores.
    """
    what, default = CLUSTERS[name], Machine()
    its = {"copies": default.copy_bandwidth, **what.makers, **what.by_hand}
    ranks = ranks_per_node or what.cores
    if ranks > what.cores:
        raise ArgumentError(f"a node of {name} has {what.cores} cores, and cannot hold {ranks} ranks")
    threads = what.cores / ranks
    faster = its["rate"] * threads / max(default.gamma["float64"].values())
    return Machine(
        name=name,
        ranks_per_node=ranks,
        inter={kind: Link(x.alpha, 1 / its["network"]) for kind, x in default.inter.items()},
        gamma={x: {n: rate * faster for n, rate in table.items()} for x, table in default.gamma.items()},
        copy_bandwidth=its["copies"] * threads,
        connected=its.get("connected"),
        crowding=its.get("crowding", 0.0),
    )


class Constants(NamedTuple):
    """The fitted constants of an accelerator, in addition to its maker's numbers.

    share : rate of a large product / peak rate.   half : the dimension of a product that reaches half of this rate.
    memory : bytes per second of elementwise functions.   link : bytes per second of a rank to others of its node.
    overlap : the fraction of tensor-parallel and data-parallel transfers that the software hides behind products.
    """

    share: float
    half: int
    memory: float
    link: float
    overlap: float


_A100 = Constants(share=0.88, half=80, memory=1.7e12, link=280e9, overlap=0.0)  # Megatron-LM in 2021 and 2022
_H100 = Constants(share=0.70, half=180, memory=2.4e12, link=380e9, overlap=0.8)  # Megatron-Core in 2024
_CARDS = 0.9  # the part of a network card's rate that collectives reach
_GB = 10**9


# what a node is; peak in flops per second, bytes of memory, bytes per second of a network card; the fitted constants
ACCELERATORS = {
    "a100-40": ("eight A100 of 40 GB a node, a card each (DGX A100)", 312e12, 40 * _GB, 25e9, _A100),
    "a100-80": ("eight A100 of 80 GB a node, a card each (DGX A100)", 312e12, 80 * _GB, 25e9, _A100),
    "h100": ("eight H100 a node, a card each (DGX H100)", 989e12, 80 * _GB, 50e9, _H100),
}


def accelerator(name: str, ranks_per_node: int | None = None) -> Machine:
    """Return a machine of `ACCELERATORS`: 8 GPUs a node, or `ranks_per_node`, each with a network card."""
    _, peak, memory, card, its = ACCELERATORS[name]
    sizes = [1 << k for k in range(4, 18)]
    of_size = {n: n / (n + its.half) for n in sizes}
    single, double = peak / 16, peak / 32
    rates = {"bfloat16": peak, "float16": peak, "float32": single, "float64": double}
    rates |= {"complex64": single, "complex128": double}
    alpha, ranks = 1e-5, ranks_per_node or 8
    return Machine(
        name=name,
        ranks_per_node=ranks,
        device=CUDA,
        intra=dict.fromkeys(KINDS, Link(alpha, 1 / its.link)),
        inter=dict.fromkeys(KINDS, Link(alpha, 1 / (_CARDS * card * ranks))),
        gamma={x: {n: its.share * rate * of_size[n] for n in sizes} for x, rate in rates.items()},
        copy_bandwidth=its.memory / 2,  # a copy reads and writes
        first_touch_bandwidth=1e18,  # a first touch costs nothing: allocators reuse mapped memory
        overlap=its.overlap,
        panel_overhead=0.0,
        call_overhead=0.0,
        peak=peak,
        memory=memory,
    )


# each machine's name, and what it is
MACHINES = {name: x.what for name, x in CLUSTERS.items()} | {name: x[0] for name, x in ACCELERATORS.items()}


def machine_of(name: str | None, ranks_per_node: int | None = None) -> Machine:
    """Return the machine of `--machine`: a name of `MACHINES`, or a file; None: that of PDGEMM_MACHINE or the default.

    ranks_per_node : None: that of the machine.  The ranks of a node of `CLUSTERS` share its cores; each rank of
        `ACCELERATORS` brings a network card.
    Raises ArgumentError, with the names, if `name` is neither, or for more ranks than a node has cores; FileError if
    the file cannot be read.
    """
    if name in CLUSTERS:
        return cluster(name, ranks_per_node)
    if name in ACCELERATORS:
        return accelerator(name, ranks_per_node)
    if name is not None and not (name and Path(name).exists()):
        raise ArgumentError(f"the machines are {', '.join(MACHINES)} and files of `pdgemm calibrate`, got {name!r}")
    machine = load_machine(name)
    return machine if ranks_per_node is None else on_nodes(machine, ranks_per_node)
