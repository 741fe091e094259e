"""The choice of the BLAS for local products: MKL where it is installed, else the one that SciPy is linked to.

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
BLAS_ROUTINES = ("gemm", "trsm", "trmm")  # the others are LAPACK's
_LP64, _SEQUENTIAL = 0, 1  # layers of MKL


@cache
def library() -> ctypes.CDLL | None:
    """Return the library that replaces SciPy's BLAS, if any.  Raises ArgumentError if it cannot be used."""
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
        found = ctypes.CDLL(path)
        _ = found.dgemm_
    except (AttributeError, OSError) as bad:
        raise ArgumentError(f"PDGEMM_BLAS must be auto, scipy, mkl or a library, got {wanted}: {bad}") from None
    if _is_mkl(found):
        found.MKL_Set_Interface_Layer(_LP64)
    return found


@cache
def gemm(char: str) -> Callable[..., None]:
    """Return the gemm routine of a dtype, whose arguments are all pointers; it releases the GIL while it runs."""
    return routine("gemm", char)


@cache
def routine(name: str, char: str) -> Callable[..., None]:
    """Return a routine of BLAS or LAPACK for a dtype; a library without LAPACK leaves that to SciPy's."""
    found, symbol = library(), f"{LETTER[char]}{name}"
    if found is None or not hasattr(found, f"{symbol}_"):
        return ctypes.CFUNCTYPE(None)(_of_scipy(symbol, "cython_blas" if name in BLAS_ROUTINES else "cython_lapack"))
    called: Callable[..., None] = getattr(found, f"{symbol}_")
    called.restype = None  # type: ignore[attr-defined]
    return called


def caller() -> ctypes.CDLL:
    """Return the library of the gemm routines, or SciPy's module that is linked to its BLAS."""
    found = library()
    if found is None:
        found = ctypes.CDLL(str(_scipy_linalg("cython_blas").__file__))
    return found


def settle(one_thread: bool) -> None:
    """Set MKL's threading before its first product: sequential for one thread, else as many as are set."""
    found = library()
    if found is None or not _is_mkl(found):
        return
    if one_thread and not os.environ.get("MKL_THREADING_LAYER"):
        found.MKL_Set_Threading_Layer(_SEQUENTIAL)
    elif not os.environ.get("MKL_DYNAMIC"):
        found.MKL_Set_Dynamic(0)  # in an MPI process it would use one thread


def mkl() -> str | None:
    """Return the path of MKL in the environment, or where its wheel was installed; None if there is none."""
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
    """Return an extension module of scipy.linalg, without the rest of that package, whose import takes 0.2 s."""
    full, scipy = f"scipy.linalg.{name}", find_spec("scipy")
    if {full, "scipy.linalg"} & {*sys.modules} or scipy is None:
        return import_module(full)
    found = PathFinder.find_spec(full, [f"{folder}/linalg" for folder in scipy.submodule_search_locations or ()])
    if found is None or found.loader is None:
        return import_module(full)
    module = sys.modules[full] = module_from_spec(found)
    found.loader.exec_module(module)
    return module
