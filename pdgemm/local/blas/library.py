"""The choice of the BLAS for local products: MKL where it is installed, else the BLAS that SciPy is linked to.

PDGEMM_BLAS is auto, scipy, mkl, or the path or name of a library with Fortran symbols (dgemm_) and 32-bit integers.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, files
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType

from pdgemm.errors import ArgumentError
from pdgemm.local.arrays.dtypes import TYPES

LETTER: dict[str, str] = {x.dtype.char: x.blas for x in TYPES if x.blas}
# all other routines are LAPACK's
BLAS_ROUTINES = ("gemm", "gemv", "symv", "hemv", "syrk", "herk", "syr2k", "her2k", "trsm", "trmm")
_LP64, _SEQUENTIAL = 0, 1  # layers of MKL


@cache
def library() -> ctypes.CDLL | None:
    """Return the library that replaces SciPy's BLAS, or None.  Raises ArgumentError if the library cannot be used."""
    wanted = os.environ.get("PDGEMM_BLAS") or "auto"
    path = mkl() if wanted in ("auto", "mkl") else wanted
    if wanted == "scipy" or (wanted == "auto" and not path):
        return None
    if not path:
        raise ArgumentError("PDGEMM_BLAS is mkl, but MKL is not installed: pip install mkl")
    try:
        if Path(path).exists():
            if not Path(path).is_file():  # opening a FIFO would block
                raise OSError(errno.EINVAL, "it is not a file")
            path = os.path.realpath(path)
        replacement = ctypes.CDLL(path)
        _ = replacement.dgemm_
    except (AttributeError, OSError) as bad:
        raise ArgumentError(f"PDGEMM_BLAS must be auto, scipy, mkl or a library, got {wanted}: {bad}") from None
    if _is_mkl(replacement):
        replacement.MKL_Set_Interface_Layer(_LP64)
    return replacement


@cache
def routine(name: str, char: str) -> Callable[..., None]:
    """Return a routine of BLAS or LAPACK for a dtype, from SciPy if the library lacks it.

    The routine takes only pointers as arguments, and releases the GIL.
    """
    replacement, symbol = library(), f"{LETTER[char]}{name}"
    if replacement is None or not hasattr(replacement, f"{symbol}_"):
        return ctypes.CFUNCTYPE(None)(_of_scipy(symbol, "cython_blas" if name in BLAS_ROUTINES else "cython_lapack"))
    called: Callable[..., None] = getattr(replacement, f"{symbol}_")
    called.restype = None  # type: ignore[attr-defined]
    return called


def caller() -> ctypes.CDLL:
    """Return the library of the gemm routines, or the module of SciPy that is linked to SciPy's BLAS."""
    used = library()
    if used is None:
        used = ctypes.CDLL(str(_scipy_linalg("cython_blas").__file__))
    return used


def settle(one_thread: bool) -> None:
    """Set MKL's threading before its first product: sequential for one thread, else as many threads as are set."""
    replacement = library()
    if replacement is None or not _is_mkl(replacement):
        return
    if one_thread and not os.environ.get("MKL_THREADING_LAYER"):
        replacement.MKL_Set_Threading_Layer(_SEQUENTIAL)
    elif not os.environ.get("MKL_DYNAMIC"):
        replacement.MKL_Set_Dynamic(0)  # otherwise MKL uses one thread in an MPI process


def mkl() -> str | None:
    """Return the path of MKL in the Python environment, or in MKL's wheel; None if MKL is not installed."""
    try:
        wheel = [file.locate() for file in files("mkl") or () if file.name.startswith("libmkl_rt.so")]
    except PackageNotFoundError:
        wheel = []
    here = sorted(Path(sys.prefix, "lib").glob("libmkl_rt.so*"))
    return next((str(path) for path in (*here, *wheel)), None)


def _is_mkl(library_: ctypes.CDLL) -> bool:
    return hasattr(library_, "MKL_Set_Interface_Layer")


def _of_scipy(symbol: str, module: str) -> int:
    """Return the address of a Fortran routine that SciPy exports to Cython."""
    capsule = _scipy_linalg(module).__pyx_capi__[symbol]
    name = ctypes.pythonapi.PyCapsule_GetName
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return pointer(capsule, name(capsule))


def _scipy_linalg(name: str) -> ModuleType:
    """Return an extension module of scipy.linalg without importing the whole package, which takes 0.2 s."""
    full, scipy = f"scipy.linalg.{name}", find_spec("scipy")
    if {full, "scipy.linalg"} & {*sys.modules} or scipy is None:
        return import_module(full)
    spec = PathFinder.find_spec(full, [f"{folder}/linalg" for folder in scipy.submodule_search_locations or ()])
    if spec is None or spec.loader is None:
        return import_module(full)
    module = sys.modules[full] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
