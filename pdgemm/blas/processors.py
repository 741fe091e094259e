"""For which generation of processors a BLAS multiplies.

An OpenBLAS that is older than a processor may take it for one of 2004, and multiplies three to four times as slowly.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable
from pathlib import Path

from threadpoolctl import LibController, ThreadpoolController

# Of x86 processors, the newest first: kernels of OpenBLAS and BLIS, first the one that most releases of OpenBLAS have.
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
GENERATION = {name.lower(): made for made, names in GENERATIONS.items() for name in (made, *names)}


def generation(kernel: str) -> str:
    """Of processors that a kernel is for; of one that is not known here, its own name: it is like itself alone."""
    return GENERATION.get(kernel.lower(), kernel)


def spellings(kernel: str) -> list[str]:
    """What to set OPENBLAS_CORETYPE to: that kernel, and where a release lacks it, the nearest of its generation."""
    found = [kernel, *GENERATIONS.get(generation(kernel), [])[:1]]
    return [name for name in dict.fromkeys(found) if name and name not in GENERATIONS]


def processor() -> str:
    """The newest generation whose instructions this processor has; "" where that is not known."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    return next((made for made, flag in FLAGS.items() if flag in flags), "")


def libraries() -> list[LibController]:
    """Every BLAS in this process that threadpoolctl knows, which a reference BLAS is not."""
    return ThreadpoolController().select(user_api="blas").lib_controllers


def loaded() -> list[str]:
    """These by name, version and kernel."""
    return sorted({f"{x.internal_api} {x.version} ({kernel(x) or 'unknown'})" for x in libraries()})


def behind(library: ctypes.CDLL, among: Iterable[LibController]) -> LibController | None:
    """The BLAS that a library is, or is linked to, under whatever name."""

    def address(place: ctypes.CDLL, symbol: str) -> int | None:
        return ctypes.cast(getattr(place, symbol), ctypes.c_void_p).value if hasattr(place, symbol) else None

    for each in among:
        addresses = [(address(library, symbol), address(each.dynlib, symbol)) for symbol in each.check_symbols]
        if any(here is not None and here == there for here, there in addresses):
            return each
    return None


def kernel(library: LibController | None) -> str:
    """The kernel that a BLAS uses in this process; "" where it does not say."""
    if library is not None and library.internal_api == "mkl":
        version = _Version()
        library.dynlib.MKL_Get_Version(ctypes.byref(version))
        return of_mkl(version.processor.decode())
    return getattr(library, "architecture", None) or ""


def of_mkl(said: str) -> str:
    """The generation that MKL names in its version, or with MKL_VERBOSE=1; "" where the processor is not Intel's."""
    found = re.search(r"AVX-512|AVX10|AVX2|AVX\b|SSE", said)
    return found[0].replace("AVX10", "AVX-512") if found else ""


def warnings() -> list[str]:
    """Of each BLAS that uses kernels for older processors than this one, and what to do."""
    return list(filter(None, map(_warning, libraries())))


def _warning(library: LibController) -> str:
    uses, here, order = kernel(library), processor(), list(GENERATIONS)
    made, asked = generation(uses), os.environ.get("OPENBLAS_CORETYPE", "")
    if made not in order or here not in order or order.index(made) <= order.index(here):
        return ""
    if library.internal_api != "openblas":
        remedy = "take another BLAS (PDGEMM_BLAS)"
    elif generation(asked) == made:
        remedy = "unset OPENBLAS_CORETYPE"
    else:
        remedy = f"export OPENBLAS_CORETYPE={GENERATIONS[here][0]} on all nodes, or take a newer OpenBLAS"
    return f"{library.filepath} uses kernels for {uses} ({made}), but this processor has {here}: {remedy}"


class _Version(ctypes.Structure):
    """MKLVersion of mkl_types.h."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("major", "minor", "update")),
        *((name, ctypes.c_char_p) for name in ("status", "build", "processor", "platform")),
    )
