"""Names of BLAS kernels and their processors, and the warning about kernels for older processors."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from scipy.linalg import cython_blas

from pdgemm.local.blas import processors as kernels

OLD = "sse2 ssse3"
AVX2 = f"{OLD} avx avx2"
AVX512 = f"{AVX2} avx512f avx512vl"


def library(kernel: str | None, api: str = "openblas") -> SimpleNamespace:
    return SimpleNamespace(internal_api=api, architecture=kernel, version="0.3.21", filepath="/lib/libopenblas.so.0")


@pytest.mark.parametrize(
    ("kernel", "generation", "spellings"),
    [
        ("SkylakeX", "AVX-512", ["SkylakeX"]),
        ("SKYLAKEX", "AVX-512", ["SKYLAKEX", "SkylakeX"]),
        ("SapphireRapids", "AVX-512", ["SapphireRapids", "SkylakeX"]),
        ("Zen", "AVX2", ["Zen", "Haswell"]),
        ("AVX2", "AVX2", ["Haswell"]),  # MKL's name
        ("Sandybridge", "AVX", ["Sandybridge"]),
        ("Katmai", "SSE", ["Katmai", "Nehalem"]),
        ("neoversev1", "neoversev1", ["neoversev1"]),  # no similar kernel
        ("", "", []),
    ],
)
def test_kernels_have_generations(kernel: str, generation: str, spellings: list[str]) -> None:
    assert kernels.generation(kernel) == generation
    assert kernels.spellings(kernel) == spellings


def test_generations_of_mkls_messages() -> None:
    sets = {" 512 (Intel(R) AVX-512) with INT8": "AVX-512", " 2 (Intel(R) AVX2)": "AVX2", " (Intel(R) AVX)": "AVX"}
    said = {f"Intel(R) Advanced Vector Extensions{x} enabled processors": name for x, name in sets.items()}
    said["Intel(R) Streaming SIMD Extensions 4.2 (Intel(R) SSE4.2) enabled processors"] = "SSE"
    said["Intel(R) Architecture processors"] = ""  # on AMD's processors
    assert {x: kernels.generation(kernels.of_mkl(x)) for x in said} == said


@pytest.mark.parametrize(
    ("kernel", "flags", "asked", "said"),
    [
        ("Prescott", AVX512, "", "export OPENBLAS_CORETYPE=SkylakeX"),
        ("Katmai", AVX2, "", "export OPENBLAS_CORETYPE=Haswell"),
        ("Haswell", AVX512, "HASWELL", "unset OPENBLAS_CORETYPE"),
        ("Prescott", AVX512, "SapphireRapids", "export OPENBLAS_CORETYPE=SkylakeX"),  # OpenBLAS lacks this kernel
        ("Zen", AVX2, "", ""),
        ("Cooperlake", AVX512, "", ""),
        ("Haswell", f"{AVX2} avx512f", "", ""),  # Knights Landing cannot run SkylakeX
        (None, AVX512, "", ""),
        ("armv8", "", "", ""),
    ],
)
def test_a_kernel_for_older_processors_is_warned_of(
    kernel: str | None, flags: str, asked: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warning names a variable only for OpenBLAS."""
    cpuinfo = f"processor\t: 0\nflags\t\t: {flags}\nbugs\t:\n"
    monkeypatch.setattr(kernels.Path, "read_text", lambda self: cpuinfo)
    monkeypatch.setenv("OPENBLAS_CORETYPE", asked)
    for api in ("openblas", "blis"):
        monkeypatch.setattr(kernels, "libraries", lambda api=api: [library(kernel, api)])
        told = kernels.warnings()
        assert len(told) == bool(said)
        remedy = said if api == "openblas" else "use another BLAS (PDGEMM_BLAS)"
        assert all(remedy in x and f"/lib/libopenblas.so.0 uses kernels for {kernel} (" in x for x in told)
        assert api == "openblas" or not any("OPENBLAS" in x for x in told)


def test_a_blas_is_known_by_what_it_is_linked_to() -> None:
    found = kernels.behind(ctypes.CDLL(cython_blas.__file__), kernels.libraries())
    if found is None:
        pytest.skip("SciPy's BLAS is one that threadpoolctl does not know")
    assert kernels.behind(ctypes.CDLL(found.filepath), kernels.libraries()).filepath == found.filepath
    assert kernels.behind(ctypes.CDLL("libm.so.6"), kernels.libraries()) is None


@pytest.mark.skipif(kernels.processor() not in ("AVX-512", "AVX2", "AVX"), reason="has nothing newer than Nehalem")
def test_kernels_reported_by_the_libraries() -> None:
    ask = """
import numpy
from pdgemm.local.blas import processors, threads
print(threads.multiplier(), processors.warnings())
"""
    env = os.environ | {"OPENBLAS_CORETYPE": "Nehalem", "PDGEMM_BLAS": "scipy"}
    said = subprocess.run([sys.executable, "-c", ask], env=env, capture_output=True, text=True, timeout=100).stdout
    if not said.startswith("OpenBLAS"):
        pytest.skip("SciPy's BLAS is not OpenBLAS")
    assert said.partition(" [")[0].endswith("Nehalem (SciPy)")
    assert "uses kernels for Nehalem (SSE)" in said and "unset OPENBLAS_CORETYPE" in said
