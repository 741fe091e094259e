"""The BLAS that multiplies: MKL where it is installed, else the one that SciPy is linked to.

PDGEMM_BLAS: auto, scipy, mkl, or a library with Fortran's names and 32-bit integers (dgemm_), by its path or name.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from pdgemm.errors import ArgumentError
from pdgemm.support.files import check_ordinary

LETTER = {"f": "s", "d": "d", "F": "c", "D": "z"}  # dtype.char -> BLAS prefix
_LP64, _SEQUENTIAL = 0, 1  # layers of MKL


@cache
def library() -> ctypes.CDLL | None:
    """The library that takes the place of SciPy's BLAS, if any.  Raises ArgumentError where it cannot be used."""
    wanted = os.environ.get("PDGEMM_BLAS") or "auto"
    path = mkl() if wanted in ("auto", "mkl") else wanted
    if wanted == "scipy" or (wanted == "auto" and not path):
        return None
    if not path:
        raise ArgumentError("PDGEMM_BLAS is mkl, but MKL is not installed: pip install 'pdgemm[mkl]'")
    try:
        if Path(path).exists():
            check_ordinary(Path(path).stat())  # the loader would wait for a FIFO
            path = os.path.realpath(path)
        found = ctypes.CDLL(path)
        _ = found.dgemm_
    except (AttributeError, OSError) as bad:
        raise ArgumentError(f"PDGEMM_BLAS is auto, scipy, mkl or a library, got {wanted}: {bad}") from None
    if _is_mkl(found):
        found.MKL_Set_Interface_Layer(_LP64)
    return found


@cache
def gemm(char: str) -> Callable[..., None]:
    """The product of a dtype, which takes pointers alone.  Releases the GIL while it runs."""
    found = library()
    if found is None:
        return ctypes.CFUNCTYPE(None)(_of_scipy(f"{LETTER[char]}gemm"))
    routine = getattr(found, f"{LETTER[char]}gemm_")
    routine.restype = None
    return routine


def caller() -> ctypes.CDLL:
    """What is asked for products: the library, or SciPy's module that is linked to its BLAS."""
    found = library()
    if found is None:
        from scipy.linalg import cython_blas

        found = ctypes.CDLL(cython_blas.__file__)
    return found


def settle(one_thread: bool) -> None:
    """Let MKL, before its first product, start no threads where there is to be one, and else those it is told to."""
    found = library()
    if found is None or not _is_mkl(found):
        return
    if one_thread and not os.environ.get("MKL_THREADING_LAYER"):
        found.MKL_Set_Threading_Layer(_SEQUENTIAL)
    elif not os.environ.get("MKL_DYNAMIC"):
        found.MKL_Set_Dynamic(0)  # in processes of MPI it would use one thread


def mkl() -> str | None:
    """Where MKL is: in the environment, or in whatever place its wheel was installed."""
    try:
        wheel = [file.locate() for file in files("mkl") or () if file.name.startswith("libmkl_rt.so")]
    except PackageNotFoundError:
        wheel = []
    here = sorted(Path(sys.prefix, "lib").glob("libmkl_rt.so*"))
    return next((str(path) for path in (*here, *wheel)), None)


def _is_mkl(found: ctypes.CDLL) -> bool:
    return hasattr(found, "MKL_Set_Interface_Layer")


def _of_scipy(routine: str) -> int:
    """The address of a Fortran routine that SciPy exports to Cython."""
    from scipy.linalg import cython_blas

    capsule = dict(cython_blas.__pyx_capi__)[routine]
    name = ctypes.pythonapi.PyCapsule_GetName
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return pointer(capsule, name(capsule))
