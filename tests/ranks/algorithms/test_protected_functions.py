"""Functions of matrices whose products are compared with checksums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flips import changed_after_the_product, larger
from tiers import square_grid

from pdgemm import DistMatrix, ProcessGrid, linalg
from pdgemm.errors import ArgumentError, CorruptionError

pytestmark = [pytest.mark.mpi, square_grid]
N = 36
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "svd": lambda la, A, **more: la.svd(A, 4, oversample=2, **more)[0],
    "eigh": lambda la, A, **more: la.eigh(A, k=2, tolerance=1e-9, **more)[1],
    "polar": lambda la, A, **more: la.polar(A, **more)[0],
    "matrix_sign": lambda la, A, **more: la.matrix_sign(A, **more),
    "sqrtm": lambda la, A, **more: la.sqrtm(A, **more),
    "sqrtm pos": lambda la, A, **more: la.sqrtm(A, assume_a="pos", **more),
    "expm": lambda la, A, **more: la.expm(A, **more),
    "matrix_power": lambda la, A, **more: la.matrix_power(A, 7, **more),
    "newton_schulz": lambda la, A, **more: la.newton_schulz(A, **more),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_products_inside_are_compared_and_repeated(comm: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The result is that of an undisturbed run, bit for bit; "detect" raises; the report says what was compared."""
    x = np.random.default_rng(3).normal(size=(N, N))
    a = x @ x.T / N + np.eye(N)
    with ProcessGrid(comm) as grid:
        A, function = DistMatrix.from_global(a, grid=grid), FUNCTIONS[name]

        def run(protect: Any) -> tuple[np.ndarray, Any]:
            result = function(linalg, A, protect=protect)
            return result.allgather(), result.report

        right, report = run(None)
        assert report.checks is None and "compared" not in str(report)
        found, report = run("repair")
        checks = report.checks
        assert np.array_equal(found, right) and checks.counted == checks.predicted and not checks.repeats
        assert checks.counted.allreduces >= 5 * report.products
        assert "factorisations, solves and redistributions were not compared" in str(report)
        with monkeypatch.context() as patch:
            changed_after_the_product(patch, larger, after=1)
            found, report = run("repair")
            assert np.array_equal(found, right) and report.checks.repeats == 1
            changed_after_the_product(patch, larger, after=1)
            with pytest.raises(CorruptionError, match="rows of C differ"):
                run("detect")
        with pytest.raises(ArgumentError, match="protect 'all' is not one of"):
            run("all")


def test_what_is_no_whole_product_is_not_compared(comm: Any) -> None:
    """A triangle of a product, and a factorisation: refused on all ranks, and not taken for wrong."""
    with ProcessGrid(comm) as grid:
        A: Any = DistMatrix.random((N, 8), grid=grid)
        more: Any = {"protect": "detect"}
        for call in (lambda: linalg.herk(1, A, **more), lambda: linalg.gram(A, **more), lambda: linalg.svd(A, **more)):
            with pytest.raises(ArgumentError, match="protect"):
                call()
