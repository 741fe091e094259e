"""For which processors each BLAS multiplies, and what is said where that is an older one."""

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


def cpuinfo(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.Path, "read_text", lambda self: f"processor\t: 0\nflags\t\t: {flags}\nbugs\t:\n")


@pytest.mark.parametrize(
    ("kernel", "generation", "spellings"),
    [
        ("SkylakeX", "AVX-512", ["SkylakeX"]),
        ("SKYLAKEX", "AVX-512", ["SKYLAKEX", "SkylakeX"]),
        ("SapphireRapids", "AVX-512", ["SapphireRapids", "SkylakeX"]),
        ("Zen", "AVX2", ["Zen", "Haswell"]),
        ("AVX2", "AVX2", ["Haswell"]),  # as MKL says it
        ("Sandybridge", "AVX", ["Sandybridge"]),
        ("Katmai", "SSE", ["Katmai", "Nehalem"]),
        ("neoversev1", "neoversev1", ["neoversev1"]),  # which is like itself alone
        ("", "", []),
    ],
)
def test_kernels_have_generations(kernel: str, generation: str, spellings: list[str]) -> None:
    assert kernels.generation(kernel) == generation
    assert kernels.spellings(kernel) == spellings


@pytest.mark.parametrize(
    ("said", "generation"),
    [
        (
            "Intel(R) Advanced Vector Extensions 512 (Intel(R) AVX-512) with INT8 enabled processors",
            "AVX-512",
        ),
        ("Intel(R) Advanced Vector Extensions 2 (Intel(R) AVX2) enabled processors", "AVX2"),
        ("Intel(R) Advanced Vector Extensions (Intel(R) AVX) enabled processors", "AVX"),
        ("Intel(R) Streaming SIMD Extensions 4.2 (Intel(R) SSE4.2) enabled processors", "SSE"),
        ("Intel(R) Architecture processors", ""),  # on AMD's
    ],
)
def test_what_mkl_says(said: str, generation: str) -> None:
    assert kernels.generation(kernels.of_mkl(said)) == generation


@pytest.mark.parametrize(
    ("kernel", "flags", "asked", "said"),
    [
        ("Prescott", AVX512, "", "export OPENBLAS_CORETYPE=SkylakeX"),
        ("Katmai", AVX2, "", "export OPENBLAS_CORETYPE=Haswell"),
        ("Haswell", AVX512, "HASWELL", "unset OPENBLAS_CORETYPE"),
        ("Prescott", AVX512, "SapphireRapids", "export OPENBLAS_CORETYPE=SkylakeX"),  # which it does not know
        ("Zen", AVX2, "", ""),
        ("Cooperlake", AVX512, "", ""),
        ("Haswell", f"{AVX2} avx512f", "", ""),  # Knights Landing has not all of SkylakeX
        (None, AVX512, "", ""),
        ("armv8", "", "", ""),
    ],
)
def test_a_kernel_for_older_processors_is_told(
    kernel: str | None, flags: str, asked: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo(flags, monkeypatch)
    monkeypatch.setenv("OPENBLAS_CORETYPE", asked)
    monkeypatch.setattr(kernels, "libraries", lambda: [library(kernel)])
    found = kernels.warnings()
    assert len(found) == bool(said)
    assert all(said in text and f"/lib/libopenblas.so.0 uses kernels for {kernel} (" in text for text in found)


def test_another_blas_is_not_told_a_variable_of_openblas(monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo(AVX512, monkeypatch)
    monkeypatch.setattr(kernels, "libraries", lambda: [library("haswell", "blis")])
    [found] = kernels.warnings()
    assert "OPENBLAS" not in found and found.endswith("use another BLAS (PDGEMM_BLAS)")


def test_a_blas_is_known_by_what_it_is_linked_to() -> None:
    found = kernels.behind(ctypes.CDLL(cython_blas.__file__), kernels.libraries())
    if found is None:
        pytest.skip("SciPy's BLAS is one that threadpoolctl does not know")
    assert kernels.behind(ctypes.CDLL(found.filepath), kernels.libraries()).filepath == found.filepath
    assert kernels.behind(ctypes.CDLL("libm.so.6"), kernels.libraries()) is None


@pytest.mark.skipif(kernels.processor() not in ("AVX-512", "AVX2", "AVX"), reason="has nothing newer than Nehalem")
def test_the_libraries_themselves_are_asked() -> None:
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
