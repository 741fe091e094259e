"""Whose a line of a running program is: the user's, this package's, or that of what is installed beside it."""

from __future__ import annotations

import sysconfig
from functools import cache
from os import sep
from pathlib import Path

_PACKAGE = f"{Path(__file__).parents[1]}{sep}"


def of_package(filename: str) -> bool:
    return filename.startswith(_PACKAGE)


def of_user(filename: str) -> bool:
    """Is a file neither of this package, nor of an installed one, nor of the standard library?

    Lines of Cython, such as mpi4py's, are those of an installed package: the name of the file has no folder to tell.
    """
    return not filename.startswith((_PACKAGE, "<frozen", *_installed())) and not filename.endswith((".pyx", ".pxi"))


@cache
def _installed() -> tuple[str, ...]:
    return tuple({f"{sysconfig.get_path(name)}{sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
