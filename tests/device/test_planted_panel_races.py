"""Remove each synchronisation of panel algorithms on a device in turn: the fake device has to report a race."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from device_ways import WAYS_OF_PANELS
from factored import norm, positive_definite, rng_matrix
from fake_device import fake_device
from mpi4py import MPI
from removed_synchronisations import Search, Site
from tiers import everything, square_grid

import pdgemm
from pdgemm import DistMatrix, ProcessGrid, linalg
from pdgemm.errors import LinAlgError

pytestmark = [pytest.mark.mpi, square_grid]

FILES = {x.name for x in Path(pdgemm.__file__).parent.glob("*/panels/*.py")}
SHARED = {"gathered_panel.py"}  # shared by LU and reflections, each of which needs its synchronisations
DEFINITE = ("lu without exchanges", "cholesky", "triangles")  # on definite matrices; on others LU exchanges rows


def divided(Q: Any, R: Any, B: Any) -> Any:
    return linalg.solve_triangular(R, Q.H @ B)


def multiplied(L: Any, B: Any) -> Any:
    """Return conj(L)^-1 (conj(L) B), which is B up to rounding."""
    return linalg.solve_triangular(L.H.T, linalg.trmm(L.H.T, B, lower=True), lower=True)


FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "lu": lambda A, B: linalg.lu_solve(linalg.lu_factor(A), B),
    "lu without exchanges": lambda A, B: linalg.lu_solve(linalg.lu_factor(A), B),
    "cholesky": lambda A, B: linalg.cho_solve(linalg.cholesky(A), B),
    "reflections": lambda A, B: divided(*linalg.householder_qr(A), B),
    "rows": lambda A, B: divided(*linalg.qr(A, method="cholesky"), B),
    "triangles": lambda A, B: multiplied(linalg.cholesky(A), B),
}
FEW = itertools.product(FUNCTIONS, ((1, 1), (2, 2), (4, 1)), ("read", "sent"), "C")
MORE = itertools.product(FUNCTIONS, ((1, 1), (1, 4), (2, 2), (4, 1)), WAYS_OF_PANELS, "F")
PROBLEMS = {f"{f}, {pr} x {pc}, {way}, {order}": (f, (pr, pc), way, order) for f, (pr, pc), way, order in (*FEW, *MORE)}


class OfPanels(Search):
    stored = Path(__file__).with_name("races_of_panels.json")

    def outcome(self, name: str, schedule: str) -> tuple[bool, bool]:
        function, shape, way, order = PROBLEMS[name]
        a, b = positive_definite(22, "complex64"), rng_matrix(22, 7, "complex64")
        a = a if function in DEFINITE else a[::-1].copy()
        with (
            fake_device(schedule, reach=WAYS_OF_PANELS[way]) as device,
            ProcessGrid(self.comm, shape, ranks=range(prod(shape))) as grid,
        ):
            A = DistMatrix.from_global(a, grid=grid, block=(3, 4), order=order, device="fake")
            B = DistMatrix.from_global(b, grid=grid, block=4, device="fake")
            try:
                x = FUNCTIONS[function](A, B).allgather()
            except LinAlgError:  # a matrix was factored before its elements were ready
                wrong = True
            else:
                expected = b if function == "triangles" else np.linalg.solve(a.astype(complex), b)
                wrong = not norm(x - expected) <= 1e-3 * norm(expected)
            told, wrong = np.any(self.comm.allgather((bool(device.races), wrong)), axis=0).tolist()
            return told, wrong

    def place(self, site: Site, name: str) -> str:
        file = site.split()[1]
        return "" if file not in FILES else f"{site} of {name.split()[0].strip(',')}" if file in SHARED else site

    def enough(self, site: Site, told: bool, wrong: bool) -> bool:
        return told or wrong


@pytest.mark.mpi(min_size=4)
@pytest.mark.timeout(600)
def test_each_synchronisation_of_panels_is_needed(comm: Any) -> None:
    """Without a synchronisation, some problem has a race.

    By default, a synchronisation is tried on the problems that `store` recorded for it; with --all, and for new source
    lines, on all problems.
    """
    if comm.size > 4:
        pytest.skip("4 ranks already need every synchronisation")
    search = OfPanels(comm, PROBLEMS, everything())
    assert len(search.needed_by) >= 25
    search.check()


if __name__ == "__main__":  # run like test_planted_races.py
    OfPanels(MPI.COMM_WORLD, PROBLEMS, every=True).store()
