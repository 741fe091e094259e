"""Who takes part, and the command of each."""

from __future__ import annotations

import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from pdgemm.local.blas import library as blas

PYTHON = {  # the module in which each is looked for, and its variants
    "pdgemm": ("pdgemm", ("", "summa", "stationary_a", "stationary_b", "cannon", "2.5d", "inner", "mkl")),
    "pylops-mpi": ("pylops_mpi", ("block", "summa")),
    "heat": ("heat", ("",)),
    "dask": ("dask.array", ("",)),
}
SCALAPACK = {"": "scalapack_gemm", "256": "scalapack_gemm_256", "mkl": "scalapack_gemm_mkl"}
DRIVERS = Path(__file__).resolve().parents[3] / ".venv-peers" / "bin"  # where setup_peers.sh puts them
ABSENT = "not installed (scripts/benchmarks/setup_peers.sh)"


class Contender(NamedTuple):
    """command: {layout}, {ranks}, {m} and the like in it are replaced.  missing: why it cannot be had."""

    name: str
    command: str
    missing: str = ""


def contenders(ranks: int, dtype: str, options: str) -> list[Contender]:
    """All that can be compared, the missing ones too.  options: of the workers, as they are typed."""
    found = []
    for name, (module, variants) in PYTHON.items():
        for variant in variants:
            missing = "" if has(module) and (variant != "mkl" or blas.mkl()) else ABSENT
            processes, given = (1, str(ranks)) if name == "dask" else (ranks, variant)
            library = f"env PDGEMM_BLAS={'mkl' if variant == 'mkl' else 'scipy'} " if name == "pdgemm" else ""
            program = f"{library}{shlex.quote(sys.executable)} -m mpi4py {shlex.quote(sys.argv[0])}"
            worker = f"--worker {name}:{given} --layout {{layout}} --dtype {dtype} {options}".rstrip()
            found.append(Contender(title(name, variant), f"mpiexec -n {processes} {program} {worker}", missing))
    launcher = shutil.which("mpiexec.openmpi")
    for variant, driver in SCALAPACK.items():
        missing = "" if launcher and (DRIVERS / driver).exists() else ABSENT
        command = f"{launcher} -n {ranks} {shlex.quote(str(DRIVERS / driver))} {dtype} {{layout}}"
        found.append(Contender(title("scalapack", variant), command, missing))
    return found


def title(name: str, variant: str) -> str:
    return f"{name}:{variant}" if variant else name


def has(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its package
        return False
