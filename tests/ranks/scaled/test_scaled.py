"""Matrices of 8-bit values with scales: products, views and redistributions, compared with NumPy in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tiers
from fake_device import fake_device
from problems import accepted, op
from tiers import in_turn

from pdgemm import DistMatrix, ProcessGrid, Scaled, pdgemm, quantize
from pdgemm.algorithms.epilogue import Epilogue
from pdgemm.errors import ArgumentError, DeviceError, DTypeError, GridError, KeyIndexError, LayoutError
from pdgemm.schedules.mover_registry import host_movers

pytestmark = pytest.mark.mpi
SHARED: list[tuple[str, str, dict[str, Any]]] = [
    ("float8_e4m3fn", "block", {"block": (1, 8), "scale_dtype": "float8_e8m0fnu"}),
    ("float8_e5m2", "row", {}),
    ("int8", "block", {"block": (4, 16)}),
    ("float8_e4m3fn", "column", {}),
    ("int8", "tensor", {"scale_dtype": "float8_e8m0fnu"}),
    ("float8_e5m2", "block", {"block": (8, 4)}),
]
POWERS = {"scale_dtype": "float8_e8m0fnu"}


def decoded(S: Any) -> np.ndarray:
    """Return the values times scales of a Scaled in float64, by NumPy."""
    (m, n), (mb, nb) = S.shape, S.block
    values, scales = (x.allgather().astype(np.float64) for x in (S.values, S.scales))
    return values * scales[np.arange(m)[:, None] // mb, np.arange(n) // nb]


def bound(a: np.ndarray, b: np.ndarray, u: float = 2.0**-24) -> np.ndarray:
    """Return the bound of |C - C^|: gamma_(k+4) |A||B| (Higham 2002, 3.5); decoding rounds each element, too."""
    terms = (a.shape[1] + 4) * u
    return terms / (1 - terms) * (np.abs(a) @ np.abs(b)) + 1e-300


def test_products_of_every_algorithm(comm: Any, grids: list[Any]) -> None:
    m, n, k = 37, 29, 83
    turns = in_turn(grids, SHARED)
    for number, (grid, (dtype, scales, options)) in enumerate(turns):
        A = DistMatrix.random((m, k), grid=grid, block=(8, 16), seed=1, kind="normal")
        B = DistMatrix.random((n, k), grid=grid, block=(16, 16), seed=2, kind="normal")
        S, T = quantize(A, dtype, scales, **options), quantize(B, dtype, scales, **options).T
        a, b = decoded(S), decoded(T)
        C = DistMatrix.empty((m, n), grid=grid, block=5, dtype="float32")
        cases = accepted(comm.size)[0 if tiers.everything() else number % 4 :: 1 if tiers.everything() else 4]
        for case, mover in in_turn(cases, ["auto", *host_movers()], start=number):
            name, shape, layers = case
            C.local[...] = np.nan
            mover = "auto" if mover == "shared" and comm.size == 1 else mover
            pdgemm(1, S, T, 0, C, algorithm=name, shape=shape, layers=layers, mover=mover, panel_width=1 + 13 * number)
            assert (np.abs(C.allgather() - a @ b) <= bound(a, b)).all(), (case, mover, dtype, scales)
            assert C.report.counted == C.report.predicted
            assert C.report.extra_bytes == C.report.predicted_extra_bytes


@pytest.mark.on_ranks(2, 4)
def test_one_operand_with_scales(comm: Any, grid: Any) -> None:
    """The other operand is a DistMatrix of any type; C of any type and layout, all op(A), op(B), alpha and beta."""
    m, n, k = 21, 18, 50
    cases = in_turn(["float32", "bfloat16", "float64", "complex64", "int8", "float8_e5m2"], SHARED)
    cases = cases if comm.size < 4 else cases[:3]  # some cases are enough for this grid
    for (other, (dtype, scales, options)), transa, transb in zip(cases, "NTCNTN", "TNNCTN"):
        A = DistMatrix.random((m, k) if transa == "N" else (k, m), grid=grid, block=16, seed=1)
        S = quantize(A, dtype, scales, **options)
        b = np.random.default_rng(3).integers(-3, 4, (k, n) if transb == "N" else (n, k)).astype(other)
        B = DistMatrix.from_global(b, grid=grid, block=(3, 7), order="F")
        a, b = op(decoded(S), transa), op(b.astype("D" if other == "complex64" else "d"), transb)
        C = pdgemm(1, S, B, transa=transa, transb=transb)
        wide = {"float64": "float64", "complex64": "complex64"}.get(other, "float32")
        assert C.dtype == wide
        u = 2.0**-53 if other == "float64" else 2.0**-22 if other == "complex64" else 2.0**-24
        assert (np.abs(C.allgather() - a @ b) <= bound(a, b, u)).all()
        before = C.allgather().T.astype(wide)
        D = DistMatrix.from_global(before, grid=grid, block=(2, 3))
        flipped = {"N": "T", "T": "N", "C": "N"}
        pdgemm(-0.5, B, S, 2, D, transa=flipped[transb], transb=flipped[transa])  # (op(S) op(B))^T
        error = np.abs(D.allgather() - (2 * before - 0.5 * (a @ b).T))
        assert (error <= 3 * bound(np.abs(b).T, np.abs(a).T, u) + 8 * u * np.abs(before)).all()
        assert D.report.counted == D.report.predicted
    left, right = S if transa == "N" else S.T, B if transb == "N" else B.T
    assert ((left @ right).dtype, (right.T @ left.T).shape) == (wide, (n, m))


def test_views_and_other_layouts(comm: Any, grids: list[Any]) -> None:
    for grid, (dtype, scales, options) in in_turn(grids if tiers.everything() else grids[1:], SHARED):
        A = DistMatrix.random((45, 70), grid=grid, block=16, seed=1, kind="normal")
        S = quantize(A, dtype, scales, **options)
        mb, nb = S.block
        x = decoded(S)
        parts = [
            (S.T, x.T),
            (S[mb : 2 * mb + 3, nb:], x[mb : 2 * mb + 3, nb:]),
            (S[: mb + 1].T[nb : 4 * nb], x[: mb + 1].T[nb : 4 * nb]),
            (S[:, 0:0], x[:, 0:0]),
            (S[: min(3, mb), :].redistribute(block=(1, 9), order="F"), x[: min(3, mb)]),
            (S.T.redistribute(block=(7, 2), grid=grid).copy(), x.T),
        ]
        for part, y in parts:
            assert part.shape == y.shape and part.dtype == dtype
            assert np.array_equal(decoded(part), y)
            assert np.array_equal(part.decode("float64").allgather(), y)
            if y.shape[1]:
                b = np.random.default_rng(3).normal(size=(y.shape[1], 4)).astype("f4")
                C = part @ DistMatrix.from_global(b, grid=grid)
                assert (np.abs(C.allgather() - y @ b.astype(float)) <= bound(y, b)).all()
        narrow = x.astype(np.float32)
        assert np.allclose(S.decode("float32").allgather(), narrow, rtol=2.0**-23, atol=0)
        assert np.array_equal(S.decode("bfloat16").allgather(), S.decode().allgather().astype("bfloat16"))
        if comm.size > 1:
            with ProcessGrid(comm, (comm.size, 1)) as other:
                assert np.array_equal(decoded(S.redistribute(grid=other)), x)


def test_shapes_without_elements(comm: Any, grid: Any) -> None:
    shapes = [(0, 4, 5), (4, 0, 5), (4, 5, 0), (0, 0, 0), (1, 1, 1), (0, 0, 3)]
    for (m, n, k), (dtype, scales, options) in in_turn(shapes, SHARED):
        S, T = (quantize(DistMatrix.zeros(x, grid=grid, block=16), dtype, scales, **options) for x in ((m, k), (k, n)))
        C = DistMatrix.empty((m, n), grid=grid, dtype="float32")
        C.local[...] = np.nan
        assert np.array_equal(pdgemm(1, S, T, 0, C).allgather(), np.zeros((m, n)))
        assert S.decode().shape == (m, k)
    S = quantize(DistMatrix.random((9, 9), grid=grid), "int8")
    C = DistMatrix.eye(9, grid=grid, dtype="float32")
    assert np.array_equal(pdgemm(0, S, S, 2, C).allgather(), 2 * np.eye(9))


def test_narrow_panels_are_sent(comm: Any) -> None:
    """Panels are sent with one byte per element, and scales in addition."""
    with ProcessGrid(comm, (1, comm.size)) as grid:
        A = DistMatrix.random((64, 64), grid=grid, block=16, seed=1)
        S = quantize(A, "float8_e4m3fn", "block", **POWERS, block=(1, 16))
        C = pdgemm(1, S, S.T.redistribute(block=16, grid=grid), algorithm="summa", shape=(1, comm.size), mover="ring")
        scales = [move for move in C.report.moves if move.name == "scales of A"]
        assert len(scales) == 1 and scales[0].counted == scales[0].predicted
        assert scales[0].counted.words_received == 64 * 4 * (comm.size - 1) // comm.size
        assert C.report.counted == C.report.predicted


def test_bad_scales_are_refused_on_all_ranks(comm: Any, grid: Any) -> None:
    A = DistMatrix.random((40, 64), grid=grid, block=32)
    V, ones = A.astype("float8_e5m2"), DistMatrix.from_global(np.ones((40, 2), "f4"), grid=grid)
    S = Scaled(V, ones, (1, 32))
    last = ones.copy()
    if last.local.size:
        last.local[-1, -1] = -1 if comm.rank % 2 else np.nan
    C, plain = DistMatrix.zeros((40, 40), grid=grid, dtype="int32"), DistMatrix.zeros((64, 40), grid=grid)
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (DTypeError, "values of a Scaled must be", lambda: Scaled(A, ones, (1, 32))),
        (DTypeError, "scales of a Scaled must be", lambda: Scaled(V, V[:, :2], (1, 32))),
        (LayoutError, r"have \(40, 4\) scales, not \(40, 2\)", lambda: Scaled(V, ones, (1, 16))),
        (LayoutError, "need block", lambda: Scaled(V, ones)),
        (LayoutError, "one pair", lambda: Scaled(V, ones, 32)),  # type: ignore[arg-type]
        (ArgumentError, "positive and finite", lambda: Scaled(V, last, (1, 32))),
        (LayoutError, r"columns 5:40 .* next to 5 are 0 and 32", lambda: S[:, 5:40]),
        (KeyIndexError, "two dimensions", lambda: S[1:2, 1:2, 1:2]),
        (ArgumentError, "indexed only by slices", lambda: S[0]),
        (LayoutError, "must not cross ranks|$", lambda: quantize(A[:, 5:], "int8", "block")),
        (DTypeError, "values of a Scaled", lambda: quantize(A, "float16")),
        (DTypeError, "A must be real", lambda: quantize(A.astype("complex64"), "int8")),
        (DTypeError, "scale_dtype", lambda: quantize(A, "int8", scale_dtype="float64")),
        (ArgumentError, "one of tensor, row", lambda: quantize(A, "int8", "rows")),
        (ArgumentError, "larger than|> 0", lambda: quantize(A, "int8", -1.0)),
        (ArgumentError, "must be a power of two", lambda: quantize(A, "int8", 0.3, **POWERS)),
        (ArgumentError, "int8 has none", lambda: quantize(A, "int8", saturate=False)),
        (ArgumentError, "A has NaN", lambda: quantize(A * np.nan, "int8")),
        (DTypeError, "real or complex", lambda: pdgemm(1, S, S, 0, C, transb="T")),
        (LayoutError, "inner dimensions", lambda: S @ S),
        (ArgumentError, "protect", lambda: pdgemm(1, S, plain, protect="detect")),
        (
            ArgumentError,
            "does not take a Scaled operand",
            lambda: pdgemm(1, S, plain.astype("f4"), compute_type="bf16x9"),
        ),
        (DTypeError, "alpha must be a number", lambda: pdgemm(S, S, plain)),  # type: ignore[arg-type]
        (DTypeError, "must be a DistMatrix", lambda: S @ np.zeros((64, 3))),
        (DTypeError, "is decoded to", lambda: S.decode("int8")),
    ]
    for error, message, call in cases:
        if "cross ranks" in message and comm.size == 1:
            continue
        with pytest.raises(error, match=message):
            call()
        comm.Barrier()
    if comm.size > 1:
        with ProcessGrid(comm.Split(comm.rank == 0)) as other, pytest.raises(GridError, match="different ranks"):
            Scaled(V, DistMatrix.from_global(np.ones((40, 2), "f4"), grid=other), (1, 32))


def test_matrices_on_devices_are_refused(comm: Any) -> None:
    with fake_device("late"), ProcessGrid(comm) as grid:
        A = DistMatrix.random((8, 8), grid=grid, seed=1, dtype="float32").to_device("fake")
        S = quantize(A.to_host(), "int8")
        for call in (
            lambda: quantize(A, "int8"),
            lambda: Scaled(S.values.to_device("fake"), S.scales),
            lambda: S @ A,
            lambda: A @ S,
        ):
            with pytest.raises(DeviceError, match="fake"):
                call()


def test_an_epilogue_comes_after_the_scales(comm: Any, grid: Any) -> None:
    A = DistMatrix.random((20, 48), grid=grid, block=16, seed=1, kind="normal")
    S = quantize(A, "float8_e4m3fn", "block", block=(4, 16))
    bias = np.linspace(-9, 9, 20)
    C = pdgemm(1, S, S, transb="T", epilogue=Epilogue(bias=bias, activation="relu"))
    a = decoded(S)
    assert (np.abs(C.allgather() - np.maximum(a @ a.T + bias, 0)) <= bound(a, a.T) + 2.0**-20).all()
    assert C.report.counted == C.report.predicted


def test_an_algorithm_that_does_not_decode_is_not_chosen(comm: Any, grid: Any, allgather_3d: None) -> None:
    S = quantize(DistMatrix.random((9, 9), grid=grid), "int8")
    with pytest.raises(ArgumentError, match="does not multiply operands with scales"):
        pdgemm(1, S, S, algorithm="allgather_3d")
