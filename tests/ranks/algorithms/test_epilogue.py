"""Epilogues: values compared with NumPy's in double precision, on every grid, by every algorithm; words and memory."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fake_device import SCHEDULES, fake_device
from flips import changed_after_the_product, larger
from problems import accepted, grid_shapes
from scipy.special import erf
from tiers import every_grid, examples

from pdgemm import CorruptionError, DistMatrix, Plan, ProcessGrid, linalg, pdgemm, plan
from pdgemm.algorithms.epilogue import Epilogue
from pdgemm.errors import ArgumentError, DTypeError, LayoutError, PdgemmError

pytestmark = pytest.mark.mpi

PHI = lambda z: (1 + erf(z / np.sqrt(2))) / 2  # noqa: E731  # the normal distribution
TANH = lambda z: np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3))  # noqa: E731
VALUES: dict[str | None, Any] = {
    None: lambda z: z,
    "relu": lambda z: np.where(z > 0, z, 0),
    "gelu": lambda z: z * PHI(z),
    "gelu_tanh": lambda z: z / 2 * (1 + TANH(z)),
    "silu": lambda z: z / (1 + np.exp(-z)),
}
TYPES = ["float64", "float32", "float16", "bfloat16", "complex128", "complex64"]


def slope(activation: str, z: np.ndarray) -> np.ndarray:
    """Return the derivative of an activation by central differences of sixth order, to 1e-9; exactly for relu."""
    if activation == "relu":
        return np.where(z > 0, 1.0, 0.0)
    f, h = VALUES[activation], 1e-2
    weights = {1: 3 / 4, 2: -3 / 20, 3: 1 / 60}
    return np.asarray(sum(w * (f(z + j * h) - f(z - j * h)) for j, w in weights.items()) / h)


class Case:
    """A random product with an epilogue, its result in double precision, and a bound of the error."""

    def __init__(self, comm: Any, grids: list[Any], seed: int, device: str = "host", dtype: str = "") -> None:
        rng = self.rng = np.random.default_rng(seed)
        self.m, self.n, self.k = (int(x) for x in rng.integers(0, 30, 3))
        self.dtype = np.dtype(dtype or rng.choice(TYPES))
        self.grids, self.device, real = grids, device, self.dtype.kind != "c"
        m, n, k = self.m, self.n, self.k
        operand = self.dtype if self.dtype.itemsize > 2 or rng.random() < 0.5 else np.dtype("float32")
        A, a = self.matrix((m, k), operand)
        B, b = self.matrix((k, n), operand)
        guarded, whole = self.matrix((m + 2, n + 3))
        self.alpha, self.beta = float(rng.choice([1, -0.5])), float(rng.choice([0, 0, 1, 0.5]))
        C, c = guarded[1 : m + 1, 2 : n + 2], whole[1 : m + 1, 2 : n + 2]
        if not self.beta:
            nan = DistMatrix.from_global(np.full(c.shape, np.nan, self.dtype), grid=grids[0])
            (nan.to_device(device) if device != "host" else nan).redistribute(C)
        self.arguments: Any = (self.alpha, A, B, self.beta, C)
        self.activation = rng.choice(np.array([*VALUES], object)) if real else None
        self.gradient = self.activation is not None and bool(rng.random() < 0.4)
        scale, self.scale = self.vector(0.3)
        bias, self.bias = self.vector(0.0 if self.gradient else 0.6)
        residual, self.residual = self.matrix((m, n)) if rng.random() < 0.4 else (None, 0 * c.astype(complex))
        self.aux = None
        if self.gradient or rng.random() < 0.3:
            self.aux = (
                C.copy()
                if rng.random() < 0.5
                else C.astype(str(rng.choice(["float64"] if real else [dtype or "complex128"])))
            )
        if self.gradient:
            z = rng.normal(size=(m, n)).astype(self.aux.dtype)
            placed = DistMatrix.from_global(z, grid=grids[0])
            (placed.to_device(device) if device != "host" else placed).redistribute(self.aux)
            self.z = z.astype(float)
        self.epilogue = Epilogue(bias=bias, activation=self.activation, residual=residual, scale=scale, aux=self.aux,
                                 gradient=self.gradient)  # fmt: skip
        self.C, self.guarded, self.whole = C, guarded, whole
        self._expect(a.astype(complex), b.astype(complex), c.astype(complex))
        self.inputs = [(x, x.allgather()) for x in (A, B, scale, bias, residual) if isinstance(x, DistMatrix)]

    def matrix(self, shape: tuple[int, int], dtype: Any = None) -> tuple[Any, np.ndarray]:
        """Return a matrix in a random layout, and its elements."""
        rng, dtype = self.rng, np.dtype(dtype or self.dtype)
        x = rng.normal(size=shape) + (1j * rng.normal(size=shape) if dtype.kind == "c" else 0)
        x, turned = np.asarray(x).astype(dtype), rng.random() < 0.3
        grid, block = self.grids[rng.integers(len(self.grids))], tuple(int(b) for b in rng.integers(1, 9, 2))
        source = tuple(int(rng.integers(side)) for side in grid.shape)
        made = DistMatrix.from_global(x.T if turned else x, grid=grid, block=block, source=source)
        made = made.redistribute(grid=grid, block=block, source=source, order=str(rng.choice(["C", "F"])))
        made = made.to_device(self.device) if self.device != "host" else made
        return (made.T if turned else made), x

    def vector(self, share: float) -> tuple[Any, Any]:
        """Return None, a number, an array or a matrix of one row or column, at random, and its values."""
        rng, (m, n) = self.rng, (self.m, self.n)
        kind = (
            rng.choice(["number", "array", "row array", "column array", "row", "column"])
            if rng.random() < share
            else ""
        )
        if not kind:
            return None, None
        if kind == "number":
            number = float(rng.normal())
            return number, number
        if kind in ("row", "column"):
            return self.matrix((1, n) if kind == "row" else (m, 1))
        shape = {"array": (n,), "row array": (1, n), "column array": (m, 1)}[kind]
        x = rng.normal(size=shape).astype(rng.choice(["float32", "float64"]))
        return x, x

    def _expect(self, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> None:
        old = self.beta * c if self.beta else 0
        one = np.ones((self.m, self.n))
        scale, bias = (one * (default if x is None else np.asarray(x).astype(complex))
                       for x, default in ((self.scale, 1), (self.bias, 0)))  # fmt: skip
        z = scale * (self.alpha * a @ b + old) + bias
        size = np.abs(scale) * (abs(self.alpha) * np.abs(a) @ np.abs(b) + np.abs(old)) + np.abs(bias)
        residual = self.residual.astype(complex)
        self.before = z
        if self.gradient:
            value = z.real * slope(self.activation, self.z) + residual
        else:
            value = (VALUES[self.activation](z.real) if self.activation else z) + residual
        sums = ml_dtypes.finfo(np.result_type(self.dtype, np.float32) if self.dtype.itemsize < 8 else self.dtype).eps
        unit = float(ml_dtypes.finfo(self.dtype).eps)
        # gamma_(k+4) of the sums (Higham 2002, 3.5), |f'| <= 1.13, a few roundings of f, and one to the type of C
        self.value, self.size = value, size
        self.bound = 1.2 * (self.k + 30) * float(sums) * (size + np.abs(residual) + 1) + unit * np.abs(value) + 1e-8
        self.bound += 6e-8 if self.dtype == np.float16 else 0  # subnormal numbers

    def check(self, report: Any) -> None:
        result = self.guarded.allgather().astype(complex)
        inner = slice(1, self.m + 1), slice(2, self.n + 2)
        assert (np.abs(result[inner] - self.value) <= self.bound).all()
        outside = self.whole.astype(complex).copy()
        result[inner] = outside[inner] = 0
        assert np.array_equal(result, outside)
        for x, before in self.inputs:
            assert np.array_equal(x.allgather(), before, equal_nan=True)
        if self.aux is not None and not self.gradient:
            error = np.abs(self.aux.allgather().astype(complex) - self.before)
            assert (error <= self.bound + 2 * float(ml_dtypes.finfo(self.aux.dtype).eps) * (self.size + 1)).all()
        assert report.as_predicted, (report.counted, report.predicted, report.extra_bytes, report.predicted_extra_bytes)
        assert report.epilogue == self.epilogue.text and report.epilogue in str(report.summary())


@every_grid
def test_drawn_problems(comm: Any, grids: list[Any]) -> None:
    """Algorithms in turn, with random layouts, types and vectors; C holds NaN if it is not read; guards are unchanged.

    Also by saved plans, by prepared products, and within the least memory.
    """
    forced, number = [("auto", None, None), *accepted(comm.size)], examples({4: 45, 6: 24}.get(comm.size, 60))
    for seed in range(number):
        case = Case(comm, grids, 10**6 + seed, dtype=TYPES[seed % len(TYPES)])
        alpha, A, B, beta, C = case.arguments
        asked: Any = dict(zip(("algorithm", "shape", "layers"), forced[seed * len(forced) // number]))
        asked |= {"mover": str(case.rng.choice(["auto", "ring", "ibcast"])), "epilogue": case.epilogue}
        planned = plan(A, B, C, alpha=alpha, beta=beta, **asked)
        if seed % 3 == 0:
            assert Plan.from_json(planned.to_json()) == planned
            planned.execute(A, B, C, alpha=alpha, beta=beta, epilogue=case.epilogue)
        elif seed % 3 == 1:
            product = planned.prepare(A, B, C, alpha=alpha, epilogue=case.epilogue)
            for _ in range(1 if beta else 2):
                product(beta)
        else:
            least = planned.extra_bytes(None)
            pdgemm(*case.arguments, memory_limit=least, **asked)
            assert C.report.extra_bytes <= least
        case.check(C.report)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_on_a_device(comm: Any, schedule: str) -> None:
    for seed in range(examples(15)):
        with fake_device(schedule) as device, ExitStack() as stack:
            grids = [stack.enter_context(ProcessGrid(comm, shape)) for shape in grid_shapes(comm.size)]
            case = Case(comm, grids, 2 * 10**6 + seed, device="fake")
            pdgemm(*case.arguments, epilogue=case.epilogue)
            case.check(case.C.report)
            assert comm.allgather(device.races) == [[]] * comm.size


def test_a_prepared_product_reads_the_current_operands(comm: Any, grids: list[Any]) -> None:
    A, C, bias = DistMatrix.ones((4, 4), grid=grids[0]), DistMatrix.empty((4, 4), grid=grids[0]), np.zeros(4)
    row = DistMatrix.ones((1, 4), grid=grids[-1])
    epilogue = Epilogue(bias=bias, scale=row)
    product = plan(A, A, C, epilogue=epilogue).prepare(A, A, C, epilogue=epilogue)
    for number in range(3):
        bias[...], row.local[...] = number, number + 2
        assert (product().allgather() == 4 * (number + 2) + number).all()


def test_a_flip_is_repaired_before_the_epilogue(comm: Any, grids: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums are compared and repaired, also if C has a narrower type."""
    a = np.random.default_rng(0).normal(size=(24, 24)).astype(np.float32)
    for dtype, beta in itertools.product(("float32", "float16"), (0, 1)):
        A = DistMatrix.from_global(a, grid=grids[0], block=4)
        C = DistMatrix.from_global((a if beta else a * np.nan).astype(dtype), grid=grids[0], block=4)
        c, epilogue = C.allgather(), Epilogue(activation="relu", bias=a[0])
        for protect in ("detect", "repair"):
            with monkeypatch.context() as patch:
                changed_after_the_product(patch, larger)
                if protect == "detect":
                    with pytest.raises(CorruptionError):
                        pdgemm(1, A, A, beta, C.copy(), protect="detect", epilogue=epilogue)
                    continue
                pdgemm(1, A, A, beta, C, protect="repair", epilogue=epilogue)
        assert C.report.checks.repeats == 1
        sums = a @ a + (c if beta else 0) + a[0]
        assert np.allclose(C.allgather(), np.maximum(sums, 0), rtol=1e-2 if dtype == "float16" else 1e-4, atol=1e-3)


def test_bad_input_is_one_error_on_all_ranks(comm: Any, grids: list[Any]) -> None:
    """All ranks raise the error before elements are sent; C is unchanged."""
    grid = grids[0]
    A, C = DistMatrix.random((6, 6), grid=grid), DistMatrix.ones((6, 6), grid=grid)
    Z, whole = A.astype("complex128"), DistMatrix.ones((6, 6), grid=grid, dtype="int8")
    other = DistMatrix.ones((6, 6), grid=grid, block=1)
    cases: list[tuple[type[PdgemmError], str, dict[str, Any]]] = [
        (LayoutError, r"bias has the shape \(5,\), C is 6 x 6", {"bias": np.ones(5)}),
        (LayoutError, "bias is 2 x 6 on a .* grid, C is 6 x 6 .*: bias must be 1 x 6 or 6 x 1", {"bias": A[:2]}),
        (LayoutError, "residual is 6 x 5 .*: residual must be 6 x 6", {"residual": A[:, :5]}),
        (DTypeError, "bias is complex128, which a result of float64 cannot hold", {"bias": Z[:1]}),
        (DTypeError, "scale .* complex", {"scale": 1j}),
        (DTypeError, "bias is .*, which a result of float64 cannot hold", {"bias": np.zeros(6, [("x", "f4")])}),
        (DTypeError, "bias is datetime64", {"bias": np.zeros(6, "M8[s]")}),
        (DTypeError, "bias must be a number, array, .*; got list", {"bias": [1.0] * 6}),
        (DTypeError, "residual must be a DistMatrix, got ndarray", {"residual": np.ones((6, 6))}),
        (ArgumentError, "activation 'tanh' is not one of relu, gelu, gelu_tanh, silu", {"activation": "tanh"}),
        (ArgumentError, "gradient=True needs an activation and aux", {"gradient": True, "activation": "relu"}),
        (ArgumentError, "and no bias", {"gradient": True, "activation": "relu", "aux": A.copy(), "bias": 1}),
        (ArgumentError, "C shares memory with residual", {"residual": C}),
        (ArgumentError, "C shares memory with bias", {"bias": C[:1]}),
        (ArgumentError, "aux shares memory with A", {"aux": A}),
    ]
    if comm.size > 1:
        cases.append((LayoutError, "aux must have the layout of C", {"aux": other}))
    for error, message, epilogue in cases:
        with pytest.raises(error, match=message):
            pdgemm(1, A, A, 0, C, epilogue=Epilogue(**epilogue))
    with pytest.raises(ArgumentError, match="epilogue must be an Epilogue, got str"):
        pdgemm(1, A, A, 0, C, epilogue="relu")  # type: ignore[arg-type]
    with pytest.raises(DTypeError, match="'relu' is for real products; these sums are complex128"):
        pdgemm(1, Z, Z, epilogue=Epilogue(activation="relu"))
    with pytest.raises(DTypeError, match="for real and complex products; these sums are int32"):
        pdgemm(1, whole, whole, epilogue=Epilogue(bias=1))
    with pytest.raises(ArgumentError, match="the plan was made for: relu"):
        plan(A, A, C, epilogue=Epilogue(activation="relu")).execute(A, A, C, epilogue=Epilogue(activation="silu"))
    with pytest.raises(ArgumentError, match="unknown options: epilogue"):  # it would write both triangles
        linalg.syrk(1, A, epilogue=Epilogue(activation="relu"))  # type: ignore[call-arg]
    with pytest.raises(ArgumentError, match="backward"):
        Epilogue(activation="relu").backward()
    if comm.size > 1:  # one rank has another bias
        with pytest.raises(PdgemmError, match="differ"):
            pdgemm(1, A, A, 0, C, epilogue=Epilogue(bias=np.full(6, float(comm.rank))))
    assert (C.allgather() == 1).all()
