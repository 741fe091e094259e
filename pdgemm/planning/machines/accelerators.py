"""Machines with eight GPUs in each node, for plans of the training of neural networks.

Peak, memory and network cards are the makers' numbers.  Five constants for each machine, and the share of a card's
rate that collectives reach, were chosen once by comparison with published step times (`pdgemm model --check`); they
are the same for all networks.
"""

from __future__ import annotations

from typing import NamedTuple

from pdgemm.planning.machines.machine import CUDA, KINDS, Link, Machine


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


# peak in flops per second, bytes of memory, bytes per second of a network card, and the fitted constants
ACCELERATORS = {
    "a100-40": (312e12, 40 * _GB, 25e9, _A100),
    "a100-80": (312e12, 80 * _GB, 25e9, _A100),
    "h100": (989e12, 80 * _GB, 50e9, _H100),
}


def accelerator(name: str) -> Machine:
    """Return a machine of `ACCELERATORS`: 8 GPUs a node, each with a network card."""
    peak, memory, card, its = ACCELERATORS[name]
    sizes = [1 << k for k in range(4, 18)]
    of_size = {n: n / (n + its.half) for n in sizes}
    rates = {"bfloat16": peak, "float16": peak, "float32": peak / 16, "float64": peak / 32}
    alpha, ranks = 1e-5, 8
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
