"""The facts that a maintainer needs to reproduce a problem, as one text without names of users, hosts and folders."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from contextlib import suppress
from getpass import getuser
from pathlib import Path
from shutil import disk_usage
from typing import Any

from pdgemm.local.blas.processors import processor_field
from pdgemm.support import launcher
from pdgemm.support.text import counted, in_bytes
from pdgemm.tools.profiling.environment import VARIABLES, fact_rows

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
    """Return the report in Markdown.  facts : the result of `environment.describe` on rank 0.  Local."""
    batch = "; in a Slurm job" if launcher.in_slurm() else ""
    size, variable = launcher.said_size()
    started = next((name for name, names in launcher.LAUNCHERS.items() if variable and names.size == variable), "")
    ranks = sum(node["ranks"] for node in facts["nodes"])
    rows = [
        *fact_rows(facts),
        ("system", f"{platform.platform()}, {processor_field('model name') or platform.machine()}"),
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
    try:
        total, _, free = disk_usage("/dev/shm")
    except OSError:
        return "none"
    return f"{in_bytes(free)} free of {in_bytes(total)}"


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
