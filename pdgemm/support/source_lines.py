"""The origin of a line of a running program: the user's code, this package, or another installed package."""

from __future__ import annotations

import sysconfig
from functools import cache
from os import sep
from pathlib import Path

_PACKAGE = f"{Path(__file__).parents[1]}{sep}"


def of_package(filename: str) -> bool:
    return filename.startswith(_PACKAGE)


def of_user(filename: str) -> bool:
    """Return whether a file belongs neither to this package, nor to an installed one, nor to the standard library.

    Cython files, such as those of mpi4py, count as installed: their file names have no folder that shows their origin.
    """
    return not filename.startswith((_PACKAGE, "<frozen", *_installed())) and not filename.endswith((".pyx", ".pxi"))


@cache
def _installed() -> tuple[str, ...]:
    return tuple({f"{sysconfig.get_path(name)}{sep}" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
