"""Fixtures of tests of ScaLAPACK's interface: BLACS contexts, and the library ScaLAPACK."""

from __future__ import annotations

import ctypes
import ctypes.util
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from problems import grid_shapes

LOAD = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print(open('/proc/self/maps').read())"


@pytest.fixture(scope="module")
def contexts(comm: Any) -> Iterator[list[int]]:
    """Contexts of every grid shape, in row and column order, and one without the last process."""
    from pdgemm import scalapack

    made = [scalapack.blacs_gridinit(comm, *shape, order) for shape in grid_shapes(comm.size) for order in "RC"]
    if comm.size > 2:
        made.append(scalapack.blacs_gridinit(comm, 1, comm.size - 1))
    yield made
    for ictxt in made:
        scalapack.blacs_gridexit(ictxt)


def libmpi(maps: str) -> set[str]:
    return {line.split()[-1] for line in maps.splitlines() if "/libmpi.so" in line}


@pytest.fixture(scope="module")
def reference(comm: Any) -> ctypes.CDLL:
    """Load ScaLAPACK; skip if it is absent, or linked to another MPI than mpi4py's."""
    name = ctypes.util.find_library("scalapack-openmpi")
    if name is None:
        pytest.skip("Debian's ScaLAPACK is absent (package libscalapack-openmpi-dev)")
    # In this process it would use the libmpi.so.40 that is loaded already, or that mpiexec put on LD_LIBRARY_PATH.
    # A process without both shows the MPI library that it is linked to.
    environment = {key: value for key, value in os.environ.items() if key != "LD_LIBRARY_PATH"}
    alone = subprocess.run([sys.executable, "-c", LOAD, name], env=environment, capture_output=True, text=True)
    if alone.returncode:
        pytest.skip(f"ScaLAPACK does not load: {alone.stderr.strip().rpartition(chr(10))[2]}")
    theirs, ours = libmpi(alone.stdout), libmpi(Path("/proc/self/maps").read_text())
    if theirs != ours:
        pytest.skip(f"{name} is linked to {' '.join(theirs)}, mpi4py to {' '.join(ours) or 'another MPI'}")
    return ctypes.CDLL(name)


@pytest.fixture(scope="module")
def grids(comm: Any, reference: ctypes.CDLL) -> Iterator[list[tuple[int, int]]]:
    """Pairs (context of pdgemm, context of ScaLAPACK) for every grid shape, in row and column order."""
    from pdgemm import scalapack

    made = []
    for (pr, pc), order in itertools.product(grid_shapes(comm.size), "RC"):
        ictxt = ctypes.c_int()
        reference.Cblacs_get(-1, 0, ctypes.byref(ictxt))  # the system context: MPI_COMM_WORLD
        reference.Cblacs_gridinit(ctypes.byref(ictxt), order.encode(), pr, pc)
        made.append((scalapack.blacs_gridinit(comm, pr, pc, order), ictxt.value))
    yield made
    for ours, theirs in made:
        scalapack.blacs_gridexit(ours)
        reference.Cblacs_gridexit(theirs)
