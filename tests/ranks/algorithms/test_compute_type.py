"""Operands that are rounded before they are multiplied: bounds, and that it happens, on the host and on a device."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fake_device import fake_device
from problems import accepted
from tiers import square_grid

from pdgemm import DistMatrix, ProcessGrid, pdgemm, plan
from pdgemm.errors import ArgumentError, DTypeError

pytestmark = [pytest.mark.mpi, square_grid]

UNIT = {"float32": 0.0, "tf32": 2.0**-11, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # of what operands are rounded to
SINGLE = 2.0**-24


@pytest.mark.parametrize("where", ["host", "fake"])
@pytest.mark.parametrize("compute", UNIT)
def test_error_bound(comm: Any, compute: str, where: str) -> None:
    """Element by element: (2u + u^2 + (1 + u)^2 gamma_k) |A||B|, and a rounding to C's type."""
    m, n, k = 19, 23, 70
    u, gamma = UNIT[compute], k * SINGLE / (1 - k * SINGLE)
    cases, types = accepted(comm.size), [("f4", "f4"), ("f8", "f4"), ("f4", "f8")]
    few = itertools.cycle(types)  # where there are many grids, one each
    for (name, shape, layers), dtypes in itertools.product(cases, types) if comm.size < 4 else zip(cases, few):
        with fake_device() if where == "fake" else nullcontext(), ProcessGrid(comm) as grid:
            made: dict[str, Any] = {"grid": grid, "block": 4, "device": where, "kind": "normal"}
            A, B = (DistMatrix.random(x, seed=s, dtype=dtypes[0], **made) for s, x in enumerate(((m, k), (k, n))))
            C = DistMatrix.empty((m, n), grid=grid, dtype=dtypes[1], device=where)
            options: dict[str, Any] = {"algorithm": name, "shape": shape, "layers": layers, "compute_type": compute}
            pdgemm(1, A, B, 0, C, panel_width=9, **options)
            a, b, c = (x.allgather().astype(float) for x in (A, B, C))
            assert C.report.counted == C.report.predicted
            assert C.report.extra_bytes == C.report.predicted_extra_bytes
        size = np.abs(a) @ np.abs(b)
        error = np.abs(c - a @ b)
        # operands in double precision are rounded to single precision anyway
        low = max(u, SINGLE)
        assert (error <= (2 * low + low**2 + (1 + low) ** 2 * gamma + SINGLE) * size).all()
        if compute in ("float16", "bfloat16"):
            rounded = (x.astype(compute).astype(float) for x in (a, b))
            assert (np.abs(c - next(rounded) @ next(rounded)) <= (gamma + SINGLE) * 2 * size).all()
            assert error.max() > 0.01 * u  # it was rounded
    assert UNIT["bfloat16"] == float(ml_dtypes.finfo("bfloat16").eps) / 2


def test_bad_input_is_the_same_on_all_ranks(comm: Any) -> None:
    with ProcessGrid(comm) as grid:
        A = DistMatrix.zeros((6, 6), grid=grid)
        with pytest.raises(ArgumentError, match="compute_type 'float8' is not one of float32, tf32, float16, bfloat16"):
            pdgemm(1, A, A, compute_type="float8")
        with pytest.raises(DTypeError, match="sums are float32, not float64"):
            pdgemm(1, A, A, compute_type="tf32", accumulate_dtype="float64")
        Z = A.astype("complex64")
        with pytest.raises(DTypeError, match="'bfloat16' is not for products of type complex64"):
            pdgemm(1, Z, Z, compute_type="bfloat16")
        whole = A.astype("int8")
        with pytest.raises(DTypeError, match="not for products of type int32"):
            plan(whole, whole, compute_type="tf32")
        assert pdgemm(1, Z, Z, compute_type="tf32").report.compute == "tf32"
        assert "float32 of bfloat16" in str(pdgemm(1, A, A, compute_type="bfloat16").report.summary())
