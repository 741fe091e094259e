"""Hosts of this machine for benchmarks between them: how jobs are started there, and what their cables carry."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from peers.job import Job
from peers.worker import boxes

HOSTS = Path(__file__).resolve().parents[2] / "hosts.sh"
LIMITS = ("product", "exchange")
TENSOR_PARALLEL = ("column-parallel", "row-parallel")  # layouts of layers of docs/tensor_parallel.md
BOTH = "both"  # of them at once, and neither waits for the other
LEAST_RATE = 1e6  # bit per second, the least that scripts/hosts.sh takes a multiple of
# Debian's Open MPI 4 names the transport inside a host otherwise.
DEBIAN_MPIRUN = "env OMPI_MCA_btl=self,vader,tcp mpirun.openmpi"


def this_program(number: int, *arguments: str) -> list[str]:
    """The command that runs this program with other arguments on the first of so many hosts."""
    return [str(HOSTS), "--rate", "10gbit", str(number), sys.executable, sys.argv[0], *arguments]


def numbers(hosts: str) -> tuple[int, int]:
    """Of hosts, and of ranks on each, of "2x1".  Raises ValueError."""
    number, each = map(int, hosts.split("x"))
    if min(number, each) < 1:
        raise ValueError(f"{hosts!r} has no hosts or no ranks")
    return number, each


def placed(hosts: str) -> str:
    """What mpirun is told of the ranks on these hosts."""
    number, each = numbers(hosts)
    return f"-n {number * each} --map-by ppr:{each}:node"


def bytes_into_a_host(mnk: tuple[int, int, int], hosts: int, layout: str = "", itemsize: int = 8) -> float:
    """What SUMMA brings to each host, on the best grid of hosts, where C lies still, or a tensor-parallel product."""
    m, n, k = mnk
    if layout in TENSOR_PARALLEL:
        return m * (k if layout == "column-parallel" else n) * (1 - 1 / hosts) * itemsize
    return min(m * k / pr * (1 - 1 / pc) + k * n / pc * (1 - 1 / pr) for pr, pc in boxes(hosts)) * itemsize


@contextmanager
def cables(
    hosts: str, product: Job, mnk: tuple[int, int, int], nbytes: float, ratio: float, share: float = 1.0
) -> Iterator[float]:
    """The rate at which so many bytes take RATIO times as long as that share of the product alone, in bit/s.

    All cables have it, and programs that are started meanwhile use a machine that was calibrated at it.
    """
    number = numbers(hosts)[0]
    set_rate(number, 1e10)
    alone = min(product.multiply(*mnk)[0] for _ in range(3))
    rate = max(LEAST_RATE, nbytes * 8 / (ratio * share * alone))
    set_rate(number, rate)
    with TemporaryDirectory(dir="/var/tmp") as folder:
        machine = f"{folder}/machine.json"
        calibration = f"mpirun {placed(hosts)} {shlex.quote(sys.executable)} -m pdgemm calibrate -o {machine}"
        subprocess.run(calibration, shell=True, check=True, capture_output=True)
        with mock.patch.dict("os.environ", PDGEMM_MACHINE=machine):
            yield rate


def set_rate(number: int, rate: float) -> None:
    for host in range(1, number + 1):
        subprocess.run(["/dev/shm/cable", f"h{host}", "rate", f"{rate / 1e6:.0f}mbit"], check=True)
