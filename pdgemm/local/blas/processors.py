"""The generation of processors for which a BLAS selects its kernels.

An OpenBLAS older than the processor may select kernels of 2004, which are three to four times as slow.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable
from pathlib import Path

from threadpoolctl import LibController, ThreadpoolController

# Generations of x86 processors, newest first: kernels of OpenBLAS and BLIS, OpenBLAS's most widely available one first.
GENERATIONS = {
    "AVX-512": ["SkylakeX", "Cooperlake", "SapphireRapids", "skx", "knl", "zen4", "zen5"],
    "AVX2": ["Haswell", "Zen", "zen2", "zen3"],
    "AVX": ["Sandybridge", "Bulldozer", "Piledriver", "Steamroller", "Excavator"],
    "SSE": [
        *("Nehalem", "Prescott", "Katmai", "Coppermine", "Northwood", "Banias", "Atom", "Core2", "Penryn"),
        *("Dunnington", "Athlon", "Opteron", "Opteron_SSE3", "Barcelona", "Nano", "Bobcat"),
    ],
}
FLAGS = {"AVX-512": "avx512vl", "AVX2": "avx2", "AVX": "avx", "SSE": "sse2"}  # in /proc/cpuinfo
GENERATION = {x.lower(): name for name, names in GENERATIONS.items() for x in (name, *names)}


def generation(kernel: str) -> str:
    """Return the generation of processors that a kernel is for; for an unknown kernel, the kernel's name."""
    return GENERATION.get(kernel.lower(), kernel)


def spellings(kernel: str) -> list[str]:
    """Return values for OPENBLAS_CORETYPE: the kernel, and another of its generation for older releases."""
    candidates = [kernel, *GENERATIONS.get(generation(kernel), [])[:1]]
    return [name for name in dict.fromkeys(candidates) if name and name not in GENERATIONS]


def processor_field(what: str) -> str:
    """Return a field of the first processor in /proc/cpuinfo, such as "model name"; "" if there is no such field."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((x.partition(":")[2].strip() for x in lines if x.startswith(what)), "")


def processor() -> str:
    """Return the newest generation whose instructions this processor supports; "" if the processor is unknown."""
    flags = processor_field("flags").split()
    return next((name for name, flag in FLAGS.items() if flag in flags), "")


def libraries() -> list[LibController]:
    """Return every BLAS in this process that threadpoolctl supports; a reference BLAS is not among them."""
    return ThreadpoolController().select(user_api="blas").lib_controllers


def loaded_libraries() -> list[str]:
    """Return the name, version and kernel of each BLAS in this process."""
    return sorted({f"{x.internal_api} {x.version} ({kernel(x) or 'unknown'})" for x in libraries()})


def behind(library: ctypes.CDLL, among: Iterable[LibController]) -> LibController | None:
    """Return the one of the BLAS libraries `among` that `library` is, or that it is linked to; None if there is none.

    They are recognised by a symbol that has the same address in both.
    """

    def address(where: ctypes.CDLL, symbol: str) -> int | None:
        return ctypes.cast(getattr(where, symbol), ctypes.c_void_p).value if hasattr(where, symbol) else None

    for each in among:
        addresses = [(address(library, symbol), address(each.dynlib, symbol)) for symbol in each.check_symbols]
        if any(here is not None and here == there for here, there in addresses):
            return each
    return None


def kernel(library: LibController | None) -> str:
    """Return the kernel that a BLAS uses in this process; "" if the BLAS does not report its kernel."""
    if library is not None and library.internal_api == "mkl":
        version = _Version()
        library.dynlib.MKL_Get_Version(ctypes.byref(version))
        return of_mkl(version.processor.decode())
    return getattr(library, "architecture", None) or ""


def of_mkl(version: str) -> str:
    """Return the generation that is named in MKL's text of its version; "" for the processors of other vendors."""
    match = re.search(r"AVX-512|AVX10|AVX2|AVX\b|SSE", version)
    return match[0].replace("AVX10", "AVX-512") if match else ""


def warnings() -> list[str]:
    """Return a warning, with a remedy, for each BLAS that uses kernels for older processors than this one."""
    return list(filter(None, map(_warning, libraries())))


def _warning(library: LibController) -> str:
    uses, here, order = kernel(library), processor(), list(GENERATIONS)
    used_generation, core_type = generation(uses), os.environ.get("OPENBLAS_CORETYPE", "")
    if used_generation not in order or here not in order or order.index(used_generation) <= order.index(here):
        return ""
    if library.internal_api != "openblas":
        remedy = "use another BLAS (PDGEMM_BLAS)"
    elif generation(core_type) == used_generation:
        remedy = "unset OPENBLAS_CORETYPE"
    else:
        remedy = f"export OPENBLAS_CORETYPE={GENERATIONS[here][0]} on all nodes, or use a newer OpenBLAS"
    return f"{library.filepath} uses kernels for {uses} ({used_generation}), but this processor has {here}: {remedy}"


class _Version(ctypes.Structure):
    """The structure MKLVersion of mkl_types.h."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("major", "minor", "update")),
        *((name, ctypes.c_char_p) for name in ("status", "build", "processor", "platform")),
    )
