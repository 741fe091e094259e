"""Where contenders run: on this host, or on several hosts of this machine that scripts/hosts.sh makes."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import sleep
from typing import NamedTuple
from unittest import mock

import click

from peers.job import Job
from peers.results import MNK, SETTLE
from peers.worker import boxes

SCRIPTS = Path(__file__).resolve().parents[2]
DRIVERS = SCRIPTS.parent / ".venv-peers" / "bin"  # where setup_peers.sh puts them
ABSENT = "not installed (scripts/benchmarks/setup_peers.sh)"
LIMITS = ("product", "exchange")
TENSOR_PARALLEL = ("column-parallel", "row-parallel")  # layouts of tensor-parallel layers, see docs/tensor_parallel.md
BOTH = "both"  # product and exchange at the same time; neither waits for the other
LEAST_RATE = 1e6  # bit per second; scripts/hosts.sh takes multiples of it


class Contender(NamedTuple):
    """A command, in which {layout}, {ranks}, {m} and the like are replaced.   missing : why it is not available."""

    name: str
    command: str
    missing: str = ""


@dataclass(frozen=True)
class Place:
    """Some ranks on this host, or (hosts > 0) on several hosts that scripts/hosts.sh makes."""

    ranks: int
    hosts: int = 0

    @staticmethod
    def between(hosts: str) -> Place:
        """Return the place of a text such as "2x1", two hosts with a rank on each.  Raises BadParameter."""
        try:
            number, each = map(int, hosts.split("x"))
        except ValueError:
            number = each = 0
        if min(number, each) < 1:
            raise click.BadParameter(f"{hosts!r} is not HOSTSxRANKS", param_hint="--hosts")
        return Place(number * each, number)

    @property
    def name(self) -> str:
        if self.hosts:
            return f"{self.hosts} hosts with {self.ranks // self.hosts} ranks x 1 thread each"
        return f"{self.ranks} ranks x 1 thread"

    def launcher(self, debian: bool = False) -> str:
        """Return the command that starts ranks here; with `debian` by Debian's MPI, which compiled drivers need."""
        if self.hosts:  # Debian's Open MPI 4 has another name for the transport inside a host
            mpirun = "env OMPI_MCA_btl=self,vader,tcp mpirun.openmpi" if debian else "mpirun"
            return f"{mpirun} -n {self.ranks} --map-by ppr:{self.ranks // self.hosts}:node"
        return f"{'mpiexec.openmpi' if debian else 'mpiexec'} -n {self.ranks}"

    def python(self, module: str, variant: str, layout: str, dtype: str, order: str = "C", block: int = 0) -> str:
        """Return the command of a contender that is a module of `peers`."""
        program = SCRIPTS / "benchmarks" / "contender.py"
        words = f"{shlex.quote(sys.executable)} -m mpi4py {shlex.quote(str(program))} {module}"
        return f"{self.launcher()} {words} {variant or '-'} {layout} {dtype} {order} {block}"

    def driver(self, name: str, driver: str, arguments: str) -> Contender:
        """Return a contender that is a compiled program."""
        path = DRIVERS / driver
        missing = "" if shutil.which("mpiexec.openmpi") and path.exists() else ABSENT
        return Contender(name, f"{self.launcher(debian=True)} {shlex.quote(str(path))} {arguments}", missing)

    def enter(self) -> None:
        """Unless this process is on one of the hosts, run the command again on the first, and exit with its code."""
        if "--inside" not in sys.argv:
            words = [str(SCRIPTS / "hosts.sh"), "--rate", "10gbit", str(self.hosts), sys.executable, *sys.argv]
            sys.exit(subprocess.run([*words, "--inside"], check=False).returncode)


def bytes_into_a_host(mnk: MNK, hosts: int, layout: str = "", itemsize: int = 8) -> float:
    """Return the bytes that each host receives in SUMMA on the best grid of hosts, or in a tensor-parallel product."""
    m, n, k = mnk
    if layout in TENSOR_PARALLEL:
        return m * (k if layout == "column-parallel" else n) * (1 - 1 / hosts) * itemsize
    return min(m * k / pr * (1 - 1 / pc) + k * n / pc * (1 - 1 / pr) for pr, pc in boxes(hosts)) * itemsize


class Limit:
    """The limit of a contender between hosts: its time is at least max(product, transfer), in seconds.

    jobs : the jobs of LIMITS.   share : a factor for the measured seconds of the product.   nbytes : the bytes that the
    busiest host receives, for contenders that do not report theirs.   rate : the rate of the cables, bit/s.
    """

    def __init__(self, jobs: dict[str, Job], mnk: MNK, nbytes: float, rate: float, share: float = 1.0) -> None:
        self.jobs, self.mnk, self.nbytes, self.rate, self.share = jobs, mnk, nbytes, rate, share
        self.carried = 0.0  # bytes per second
        self.seconds()

    def seconds(self) -> float:
        sleep(SETTLE)
        product = self.share * self.jobs["product"].multiply(*self.mnk)[0]
        taken, note = self.jobs["exchange"].multiply(*self.mnk)
        self.carried = max(self.carried, float(note.split()[0]) * 1e6 / taken)
        sleep(SETTLE)
        self.note = (
            f"product {product:.4f} s, transfer {self.nbytes / self.carried:.4f} s of {self.nbytes / 1e6:.1f} MB at "
        )
        self.note += f"{self.carried * 8e-6:.0f} Mbit/s by plain messages, cables of {self.rate / 1e6:.0f} Mbit/s"
        return product

    def bound(self, seconds: float, note: str) -> float:
        number, _, rest = note.partition(" MB")
        return max(seconds, (float(number) * 1e6 if rest else self.nbytes) / self.carried)


@contextmanager
def cables(place: Place, product: Job, mnk: MNK, nbytes: float, ratio: float, share: float = 1.0) -> Iterator[float]:
    """Set all cables to one rate, and yield it, in bit/s: at this rate `nbytes` take ratio * share * T seconds.

    T are the seconds of the product, measured over fast cables.  The rate is at least LEAST_RATE.
    Programs that are started inside the `with` block use a machine file that was calibrated at this rate.
    """
    set_rate(place.hosts, 1e10)
    alone = min(product.multiply(*mnk)[0] for _ in range(3))
    rate = max(LEAST_RATE, nbytes * 8 / (ratio * share * alone))
    set_rate(place.hosts, rate)
    with TemporaryDirectory(dir="/var/tmp") as folder:
        machine = f"{folder}/machine.json"
        calibration = f"{place.launcher()} {shlex.quote(sys.executable)} -m pdgemm calibrate -o {machine}"
        subprocess.run(calibration, shell=True, check=True, capture_output=True)
        with mock.patch.dict("os.environ", PDGEMM_MACHINE=machine):
            yield rate


def set_rate(hosts: int, rate: float) -> None:
    for host in range(1, hosts + 1):
        subprocess.run(["/dev/shm/cable", f"h{host}", "rate", f"{rate / 1e6:.0f}mbit"], check=True)
