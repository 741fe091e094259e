"""A description of the environment: installed software, its features, and missing packages with their installation.

`problem_report` is its text for the report of a problem, without names of users, hosts and folders.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from contextlib import suppress
from getpass import getuser
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from shutil import disk_usage
from typing import Any

from mpi4py import MPI

from pdgemm import __version__
from pdgemm.devices import gpu_aware_mpi as probe, gpu_binding
from pdgemm.errors import PdgemmError
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.local.arrays.dtypes import OPERANDS
from pdgemm.local.blas import processors
from pdgemm.local.blas.threads import blas_of_products, decided_by, multiplier, threads
from pdgemm.matrix.local_arrays import device_on
from pdgemm.planning.machines.known_machines import MACHINES
from pdgemm.schedules.mover_registry import mover_choices
from pdgemm.support import launcher
from pdgemm.support.text import counted, in_bytes

# prefixes of the environment variables that concern pdgemm and the libraries below it
VARIABLES = (
    *("OMP_", "MKL_", "OPENBLAS_", "PDGEMM_", "OMPI_MCA_", "PRTE_MCA_", "MPICH_", "UCX_", "NCCL_", "FI_", "SLURM_JOB"),
    *("MPI4PY_", "CUDA_VISIBLE_DEVICES", "HDF5_"),
)
_PML = "OMPI_MCA_pml"  # how Open MPI sends messages: "ob1" by shared memory and TCP, "ucx"


def describe(grid: ProcessGrid) -> dict[str, Any]:
    """Return facts about this job and installation.  Collective over the grid; complete on rank 0."""
    import h5py

    here = platform.node(), threads(), len(os.sched_getaffinity(0)), gpu_binding.visible(), _warnings()
    hosts = grid.comm.gather(here) or []
    facts: dict[str, Any] = {
        "pdgemm": __version__,
        "python": platform.python_version(),
        "mpi4py": version("mpi4py"),
        "mpi_library": " ".join(MPI.Get_library_version().split("\n")[0].split("\0")[0].split()),
        "mpi_standard": ".".join(map(str, MPI.Get_version())),
        "gpu_aware_mpi": probe.support_reported(),
        "numpy": version("numpy"),
        "scipy": version("scipy"),
        "multiplies": multiplier(),
        "blas": processors.loaded_libraries(),
        "h5py": version("h5py"),
        "hdf5": h5py.version.hdf5_version,
        "hdf5_mpi": bool(h5py.get_config().mpi),
        "cupy": _cupy(),
        "movers": list(mover_choices()),
        "machines": dict(MACHINES),
        "types": list(map(str, OPERANDS)),
    }
    facts["nodes"] = [
        {
            "host": host,
            "ranks": sum(h[0] == host for h in hosts),
            "threads_per_rank": sorted({h[1] for h in hosts if h[0] == host}),
            "cores_per_rank": sorted({h[2] for h in hosts if h[0] == host}),
            "gpus": max(h[3] for h in hosts if h[0] == host),
        }
        for host in sorted({h[0] for h in hosts})
    ]
    facts["gpu_memory"], facts["gpu_messages"] = _gpu_memory(grid)
    facts["threads_set_by"] = decided_by() or "share of the node's cores"
    facts["warnings"] = sorted({f"{host}: {text}" for host, *_, texts in hosts for text in texts})
    facts["missing"] = _missing(facts) + _tcp(facts["mpi_library"]) * (len(facts["nodes"]) > 1)
    return facts


def fact_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the facts as rows of a table, each with a name."""
    hdf5 = "built with MPI" if facts["hdf5_mpi"] else "built without MPI: contiguous datasets go through MPI-IO"
    versions = f"SciPy {facts['scipy']}, NumPy {facts['numpy']}"
    rows = [
        ("pdgemm", facts["pdgemm"]),
        ("Python", facts["python"]),
        ("MPI", f"{facts['mpi_library']} (MPI {facts['mpi_standard']}), mpi4py {facts['mpi4py']}"),
        ("GPU-aware MPI", facts["gpu_aware_mpi"]),
        ("BLAS", f"{facts['multiplies']} multiplies; loaded: {', '.join(facts['blas'])} ({versions})"),
        ("HDF5", f"h5py {facts['h5py']} with HDF5 {facts['hdf5']}, {hdf5}"),
        ("CuPy", facts["cupy"]),
        ("movers", ", ".join(facts["movers"])),
        ("types", ", ".join(facts["types"])),
        *(("machine", f"{name}: {what}") for name, what in facts["machines"].items()),
        ("GPU memory", facts["gpu_memory"]),
        ("GPU messages", facts["gpu_messages"] and f"between nodes {facts['gpu_messages']}"),
    ]
    for node in facts["nodes"]:
        threads, cores = ("-".join(map(str, node[name])) for name in ("threads_per_rank", "cores_per_rank"))
        ranks = f"{node['host']}: {counted(node['ranks'], 'rank')}, threads per rank {threads}"
        rows.append(("node", f"{ranks} ({facts['threads_set_by']}), cores per rank {cores}, GPUs {node['gpus']}"))
    rows += [("warning", text) for text in facts["warnings"]] + [("missing", text) for text in facts["missing"]]
    return [row for row in rows if row[1]]


def _gpu_memory(grid: ProcessGrid) -> tuple[str, str]:
    """Return two texts: how ranks access each other's GPU memory (this is tested), and how GPU messages leave a node.

    Collective over the grid.
    """
    able = find_spec("cupy") is not None and gpu_binding.visible() > 0
    if not grid.comm.allreduce(able, MPI.LAND):
        return "", ""
    try:
        device = device_on(grid, "cuda")
    except PdgemmError as bad:
        return str(bad), ""
    if not device:
        return "", ""
    reach = device.reach(grid)
    return str(reach), probe.path_between_nodes(not reach.staged)


def _warnings() -> list[str]:
    """Return warnings about the BLAS of local products, and about other loaded BLAS libraries."""
    unknown = f"local products use {multiplier()}, an unknown BLAS: a reference BLAS is ten times slower than OpenBLAS"
    return [unknown] * (blas_of_products() is None) + processors.warnings()


def _cupy() -> str:
    if find_spec("cupy") is None:
        return "not installed"
    for package in ("cupy-cuda13x", "cupy-cuda12x", "cupy"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "installed"


def _tcp(library: str) -> list[str]:
    """Return a line with the settings that Open MPI needs for messages by TCP, unless they are set (docs/hosts.md)."""
    settings = {"OMPI_MCA_btl_tcp_flags": "send,inplace", "OMPI_MCA_pml_ob1_send_pipeline_depth": "1000"}
    settings |= {f"OMPI_MCA_btl_tcp_{name}": "8388608" for name in ("eager_limit", "rndv_eager_limit", "max_send_size")}
    by_tcp = os.environ.get(_PML, "ob1") == "ob1" and not Path("/sys/class/infiniband").exists()
    if "Open MPI" not in library or not by_tcp or settings.keys() <= os.environ.keys():
        return []
    said = " ".join(f"{name}={value}" for name, value in settings.items() if name not in os.environ)
    return [f"settings for TCP, by which messages begin at once and arrive one by one: export {said}"]


def _missing(facts: dict[str, Any]) -> list[str]:
    """Return the packages that could be installed for these ranks, with the commands."""
    hints = []
    if not facts["hdf5_mpi"]:
        hints.append(
            "h5py with MPI, for writing chunked or compressed datasets: scripts/setup_parallel_hdf5.sh of the checkout "
            "on Debian or Ubuntu, else HDF5_MPI=ON CC=mpicc pip install --no-build-isolation --no-binary=h5py h5py"
        )
    gpus = any(node["gpus"] for node in facts["nodes"])
    if gpus and facts["cupy"] == "not installed":
        hints.append("CuPy, for the GPUs here: pip install 'cupy-cuda13x[ctk]' (or cupy-cuda12x)")
    if gpus and facts["gpu_aware_mpi"] != "yes":
        hints.append("an MPI library that takes device pointers (Open MPI built with --with-cuda)")
    return hints


# ------------------------------------------------------------------ the report of a problem
_OF_LAUNCHERS = ("OMPI_MCA_PREFIXES", "OMPI_MCA_cpu_type", "OMPI_MCA_initial_wdir", "OMPI_MCA_num_procs", "SLURM")
_NOT_PRIVATE = {"root", "localhost", "user"}
_PATH = re.compile(r"(?<![\w.~-])~?(?:/[^\s/:;,=\"']+)+/([^\s/:;,=\"']+)")
_ADDRESS = re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.])")
_BUILDER = re.compile(r"[\w.+-]+@[\w.-]+")
_SECRET = re.compile(r"TOKEN|SECRET|PASS|KEY|CRED", re.IGNORECASE)
# the parts of the values of variables that are safe to show, because they name nobody and nothing private
_NUMBER = re.compile(r"-?\d+(\.\d+)?([kmgt]i?b?|b|m?s|us)?|inf", re.IGNORECASE)
_INTERFACE = re.compile(r"(eth|ib|hsn|opa|lo|mlx[45]_|hfi1_|cxi|efa)\d{0,2}")
_WORDS = """
    yes no true false on off y n auto none all default always never any error warn warning info debug trace version
    ob1 cm ucx ofi self sm vader tcp smcuda psm2 psm3 cxi efa verbs shm sockets opx mtl btl pml rc rc_x rc_v ud
    ud_x ud_v dc dc_x posix sysv cma knem xpmem mm cuda cuda_copy cuda_ipc gdr_copy rocm hcoll tuned basic han
    libnbc adapt individual ompio romio321 romio341 sharedfp pmix pmi2 slurm rsh ssh core cores thread threads
    hwthread socket sockets numa node slot package close spread master primary oversubscribe overload-allowed
    if-supported static dynamic guided active passive intel gnu sequential tbb mkl openblas blis netlib sse4_2 avx
    avx2 avx512 avx2_e1 compatible cbwr haswell skylakex cooperlake sapphirerapids zen prescott nehalem sandybridge
    neoversen1 neoversev1 ring tree ib ll ll128 simple nvls eager_limit send inplace best_effort
"""


def problem_report(facts: dict[str, Any]) -> str:
    """Return the report in Markdown.  facts : the result of `describe` on rank 0.  Local."""
    batch = "; in a Slurm job" if launcher.in_slurm() else ""
    size, variable = launcher.said_size()
    started = next((name for name, names in launcher.LAUNCHERS.items() if variable and names.size == variable), "")
    ranks = sum(node["ranks"] for node in facts["nodes"])
    rows = [
        *fact_rows(facts),
        ("system", f"{platform.platform()}, {processors.processor_field('model name') or platform.machine()}"),
        ("launcher", (f"{started} started {counted(size, 'rank')}" if started else "none") + batch),
        ("ranks", f"{counted(ranks, 'rank')} on {counted(len(facts['nodes']), 'node')}"),
        ("/dev/shm", _shared_memory()),
        *(("variable", f"{name}={value if _public(name, value) else '(not shown)'}") for name, value in _variables()),
    ]
    hosts = [node["host"] for node in facts["nodes"]]
    return "\n".join(["```", *(f"{name:13s} {without_names(text, hosts)}" for name, text in rows), "```"])


def without_names(text: str, hosts: Iterable[str] = ()) -> str:
    """Return a text without names of users and hosts, addresses, and the folders of files."""
    text = _PATH.sub(r".../\1", text)
    text = _ADDRESS.sub("ADDRESS", _BUILDER.sub("USER@HOST", text))
    users = {os.environ.get("USER", ""), os.environ.get("LOGNAME", ""), Path.home().name}
    with suppress(KeyError, OSError):  # the user has no entry in the password database
        users.add(getuser())
    names = {(name, "USER") for name in users}
    for host in {platform.node(), *hosts}:
        names |= {(host, "HOST"), (host.partition(".")[0], "HOST")}
    for name, word in sorted(names, key=lambda x: -len(x[0])):
        if name and name not in _NOT_PRIVATE:
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", word, text)
    return text


def _shared_memory() -> str:
    with suppress(OSError):
        total, _, free = disk_usage("/dev/shm")
        return f"{in_bytes(free)} free of {in_bytes(total)}"
    return "none"


def _variables() -> list[tuple[str, str]]:
    """Return the environment variables that concern pdgemm and the libraries below it, without those of launchers."""
    variables = (x for x in os.environ.items() if x[0].startswith(VARIABLES))
    return sorted(x for x in variables if not x[0].startswith(_OF_LAUNCHERS))


def _public(name: str, value: str) -> bool:
    """Return whether a value holds only numbers and words of libraries; any other value may be a secret, or a name."""
    words, known = filter(None, re.split(r"[\s,:;^=|+]+", value)), _WORDS.split()
    return not _SECRET.search(name) and all(
        x.lower() in known or _NUMBER.fullmatch(x) or _INTERFACE.fullmatch(x) for x in words
    )
