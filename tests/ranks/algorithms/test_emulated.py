"""compute_type: products by slices (ozaki, bf16x9) of difficult data, infinity and NaN; and rounded operands."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fake_device import fake_device
from problems import NASTY, accepted, grid_shapes, nasty
from tiers import in_turn, third

from pdgemm import DistMatrix, Plan, ProcessGrid, pdgemm, plan, verify
from pdgemm.errors import ArgumentError, DeviceError, DTypeError
from pdgemm.local.arrays.emulation import EMULATIONS

pytestmark = pytest.mark.mpi

NAMES = ("ozaki", "ozaki-4", "ozaki-11", "bf16x9")
DATA = (*NASTY, "spread", "rows", "cancelled", "subnormal", "hidden", "zeros")


def operands(kind: str, m: int, n: int, k: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Return A and B for which slices, or their scales, lose many digits."""
    if kind in NASTY:
        return nasty(kind, (m, k), dtype, 1), nasty(kind, (k, n), dtype, 2)
    r, most = np.random.default_rng(3), {"f": 36, "d": 300, "F": 36, "D": 300}[np.dtype(dtype).char]
    a, b = r.normal(size=(m, k)), r.normal(size=(k, n))
    if kind == "spread":  # within rows of A and columns of B
        a, b = a * 10.0 ** r.uniform(-most / 2, most / 2, a.shape), b * 10.0 ** r.uniform(-most, 0, b.shape)
    if kind == "rows":
        a, b = a * 10.0 ** r.integers(-most, most // 2, (m, 1)), b * 10.0 ** r.integers(-most // 2, most // 3, (1, n))
    if kind == "cancelled":  # (A | -A) (B | B)
        a[:, k // 2 :], b[k // 2 :] = -a[:, : k - k // 2], b[: k - k // 2]
    if kind == "subnormal":
        a, b = a * float(np.finfo(dtype).tiny) / 8, b * 2.0 ** r.integers(0, 12, b.shape)
    if kind == "hidden":  # small elements beside large ones that B multiplies by 0
        a[:, :1], b[:1] = 1e9, 0
    if kind == "zeros":
        a[::2], b[:, 1::2] = 0, 0
    return (a * (1 - 0.3j), b * (1j - 2)) if np.dtype(dtype).kind == "c" else (a, b)


def bound(compute: str, alpha: complex, a: np.ndarray, b: np.ndarray, panels: int) -> np.ndarray:
    """Return the error bound of pdgemm/local/blas/slices.py for each element."""
    k, how = a.shape[1], EMULATIONS[compute]
    wide = 8**0.5 if a.dtype.kind == "c" else 1
    a, b = np.abs(a).astype(np.longdouble), np.abs(b).astype(np.longdouble)
    if not how.scaled:
        u = 2.0**-24
        return wide * abs(alpha) * (1.04 * (k + 4) * u / (1 - (k + 4) * u) * (a @ b) + 9 * k * 2.0**-149)
    largest = a.max(axis=1, keepdims=True, initial=0) * b.max(axis=0, keepdims=True, initial=0)
    gamma = (panels + 3) * 2.0**-53 * 1.001
    return wide * abs(alpha) * (k * (how.error + gamma) * largest + panels * 2.0**-1074)


@pytest.mark.parametrize("compute", NAMES)
def test_error_bound(comm: Any, grid: Any, compute: str) -> None:
    """Errors are within the bound for all data, by all algorithms in turn; counts and bytes equal the plan's."""
    wide = "float32" if compute == "bf16x9" else "float64"
    sizes, forced = (
        itertools.cycle([(19, 23, 70), (7, 5, 3), (1, 9, 1), (33, 2, 40)]),
        itertools.cycle(accepted(comm.size)),
    )
    for kind, (algorithm, shape, layers), (m, n, k) in zip(DATA, forced, sizes):
        complex_ = len(kind) % 3 == 0
        dtype = {"float32": "complex64", "float64": "complex128"}[wide] if complex_ else wide
        a, b = (x.astype(dtype) for x in operands(kind, m, n, k, dtype))
        alpha: Any = 1 - 2j if complex_ else -1.5
        A, B = (DistMatrix.from_global(x, grid=grid, block=4) for x in (a, b.conj().T))
        C = DistMatrix.from_function(lambda i, j: np.nan, (m, n), grid=grid, dtype=dtype)
        how: Any = {"algorithm": algorithm, "shape": shape, "layers": layers, "panel_width": 17, "transb": "C"}
        report = pdgemm(alpha, A, B, 0, C, compute_type=compute, **how).report
        assert report.counted == report.predicted
        assert report.extra_bytes == report.predicted_extra_bytes
        exact = np.clongdouble if complex_ else np.longdouble
        c, expected = C.allgather(), exact(alpha) * (a.astype(exact) @ b.astype(exact))
        panels = k // 17 + 3 * comm.size + 1
        rounding = np.abs(expected) * (2.0**-22 if compute == "bf16x9" else 0)
        assert (np.abs(c - expected) <= bound(compute, alpha, a, b, panels) + rounding).all(), (kind, algorithm)
        assert np.array_equal(A.allgather(), a)


@pytest.mark.parametrize("compute", NAMES)
def test_products_with_the_identity_are_exact(comm: Any, grid: Any, compute: str) -> None:
    """A I and I A have the bits of A if the elements of a row, or column, are of similar size; integers are exact."""
    dtype = "float32" if compute in ("bf16x9", "ozaki-4") else "float64"
    r = np.random.default_rng(5)
    a = (r.uniform(0.5, 1, (24, 24)) * r.choice([-1, 1], (24, 24))).astype(dtype)
    A, one = DistMatrix.from_global(a, grid=grid, block=5), DistMatrix.eye(24, grid=grid, dtype=dtype, block=5)
    for x, y in ((A, one), (one, A)):
        assert np.array_equal(pdgemm(1, x, y, compute_type=compute).allgather(), a)
    whole = r.integers(-60, 61, (9, 3000)).astype(dtype)  # float32 adds 4096 products without rounding
    W = DistMatrix.from_global(whole, grid=grid)
    product = pdgemm(1, W, W, transb="T", compute_type=compute, panel_width=10**6)
    assert np.array_equal(product.allgather(), whole.astype(float) @ whole.T)
    high = sum((63 - 2 * r.integers(0, 2, (3, 5000))) * 2.0 ** (-6 - 7 * at) for at in range(7))  # odd slices
    H = DistMatrix.from_global(high, grid=grid)
    product = pdgemm(1, H, H, transb="T", compute_type="ozaki", panel_width=10**6)
    assert np.abs(product.allgather() - high.astype(np.longdouble) @ high.T).max() < 5000 * 2.0**-50


@pytest.mark.parametrize("compute", ["ozaki", "bf16x9"])
def test_infinity_and_nan_equal_those_of_the_plain_product(comm: Any, compute: str) -> None:
    m, n, k = 9, 8, 40
    dtype = "float32" if compute == "bf16x9" else "float64"
    for seed, shape in enumerate(grid_shapes(comm.size)):
        with ProcessGrid(comm, shape) as grid, np.errstate(all="ignore"):
            r = np.random.default_rng(seed)
            a, b = r.integers(-3, 4, (m, k)).astype(dtype), r.integers(-3, 4, (k, n)).astype(dtype)
            for x, value in itertools.product((a, b), (np.inf, -np.inf, np.nan)):
                x[r.integers(x.shape[0]), r.integers(x.shape[1])] = value
            A, B = (DistMatrix.from_global(x, grid=grid, block=3) for x in (a, b))
            C = pdgemm(1, A, B, compute_type=compute, panel_width=8).allgather()
            assert np.array_equal(C, a.astype(float) @ b.astype(float), equal_nan=True)
            huge = DistMatrix.from_global(np.full((4, 4), 3e38 if dtype == "float32" else 1e308, dtype), grid=grid)
            assert (pdgemm(-1, huge, huge, compute_type=compute).allgather() == -np.inf).all()
            wide = DistMatrix.from_global(np.full((4, 4), 1e300), grid=grid)  # infinite in float32
            single = pdgemm(1, wide, wide, compute_type="bf16x9", C=DistMatrix.zeros((4, 4), grid=grid))
            assert (single.allgather() == np.inf).all()


@pytest.mark.parametrize("compute", ["ozaki", "ozaki-4", "bf16x9"])
def test_verify_and_protect(comm: Any, grid: Any, compute: str) -> None:
    """Correct products pass, also if slices lose the bits of small elements; wrong products do not pass."""
    dtype = "float32" if compute == "bf16x9" else "float64"
    for kind in ("normal", "graded", "huge and tiny", "cancelling", "rows", "hidden"):
        a, b = operands(kind, 80, 70, 90, dtype)
        A, B = (DistMatrix.from_global(x.astype(dtype), grid=grid, block=8) for x in (a, b))
        C = pdgemm(2, A, B, compute_type=compute, protect="detect", panel_width=24)
        assert C.report.counted == C.report.predicted
        residual = verify(C, 2, A, B, compute_type=compute)
        lost = (kind, compute) == ("hidden", "ozaki-4")  # even a right C has no correct digit
        assert residual.passed != lost and not residual.wrong, kind
        assert lost or not verify(C, 2.1, A, B, compute_type=compute).passed, kind
        if kind == "normal":
            if C.distribution.owner(39, 29) == grid.coords:
                C.local[-1, -1] += 0.1
            assert not verify(C, 2, A, B, compute_type=compute).passed


def test_plans_and_types(comm: Any, grid: Any) -> None:
    """A saved plan has the compute type; operands and C may have other types."""
    A, B = (DistMatrix.random(x, grid=grid, seed=1, dtype="float32") for x in ((20, 30), (30, 25)))
    C = DistMatrix.zeros((20, 25), grid=grid)
    exact = A.allgather().astype(float) @ B.allgather().astype(float)
    planned = plan(A, B, C, compute_type="ozaki-6")
    assert Plan.from_json(planned.to_json()) == planned
    assert planned.execute(A, B, C).report.compute == "ozaki-6"
    assert np.abs(C.allgather() - exact).max() < 1e-10
    single = pdgemm(1, A.astype("float16"), B, compute_type="ozaki", C=DistMatrix.zeros(C.shape, grid=grid, dtype="f4"))
    assert single.dtype == np.float32
    assert "float64 of ozaki" in str(single.report.summary())
    assert np.abs(single.allgather() - exact).max() < 0.1
    empty = pdgemm(1, A[:, :0], B[:0], compute_type="bf16x9")
    assert not empty.allgather().any()
    product = planned.prepare(A, B, C, alpha=2)
    product()
    product(beta=1)
    assert np.abs(C.allgather() - 4 * exact).max() < 1e-10


def test_bad_input_is_the_same_on_all_ranks(comm: Any) -> None:
    with ProcessGrid(comm) as grid:
        A = DistMatrix.zeros((6, 6), grid=grid)
        with pytest.raises(ArgumentError, match="compute_type 'ozaki-3' is not one of float32, .*ozaki-12"):
            pdgemm(1, A, A, compute_type="ozaki-3")  # type: ignore[arg-type]
        with pytest.raises(DTypeError, match="with compute_type 'ozaki' sums are float64, not float32"):
            pdgemm(1, A, A, compute_type="ozaki", accumulate_dtype="float32")
        Z = A.astype("complex128")
        with pytest.raises(DTypeError, match="with compute_type 'bf16x9' sums are complex64, not complex128"):
            pdgemm(1, Z, Z, compute_type="bf16x9", accumulate_dtype="complex128")
        with pytest.raises(DTypeError, match="'ozaki' is not for products of type int32"):
            pdgemm(1, A.astype("int8"), A.astype("int8"), compute_type="ozaki")
    with fake_device(), ProcessGrid(comm) as grid:
        A = DistMatrix.zeros((6, 6), grid=grid, device="fake")
        for compute in ("ozaki", "bf16x9"):
            with pytest.raises(DeviceError, match=f"'{compute}' is for matrices on the host, these are on fake"):
                pdgemm(1, A, A, compute_type=compute)  # type: ignore[arg-type]


# ------------------------------------------------------------------ operands that are rounded
UNIT = {"float32": 0.0, "tf32": 2.0**-11, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # unit roundoff of operands
SINGLE = 2.0**-24


@pytest.mark.parametrize("where", ["host", "fake"])
@pytest.mark.parametrize("compute", UNIT)
def test_rounded_operands_keep_their_bound(comm: Any, compute: str, where: str) -> None:
    """The error of each element is at most (2u + u^2 + (1 + u)^2 gamma_k) |A||B|, and one rounding to C's type."""
    m, n, k = 19, 23, 70
    u, gamma = UNIT[compute], k * SINGLE / (1 - k * SINGLE)
    types = [("f4", "f4"), ("f8", "f4"), ("f4", "f8")]
    for (name, shape, layers), dtypes in in_turn(third(accepted(comm.size)[len(compute) % 3 :]), types):
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
            assert error.max() > 0.01 * u  # operands were rounded
    assert UNIT["bfloat16"] == float(ml_dtypes.finfo("bfloat16").eps) / 2


def test_bad_types_of_rounded_operands(comm: Any, grid: Any) -> None:
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
