"""Batches of small independent products C_i := alpha op(A_i) op(B_i) + beta C_i, which need no communication.

A stack of small matrices is multiplied by one NumPy call.  If matrices are converted or scaled, one call multiplies a
chunk of the stack that stays in cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI
from numpy.lib.array_utils import byte_bounds

from pdgemm.algorithms.epilogue import BatchEpilogue, Epilogue
from pdgemm.errors import ArgumentError, DeviceError, DTypeError, GridError, LayoutError
from pdgemm.instrument.log import INFO, LOG
from pdgemm.instrument.run_report import RunReport
from pdgemm.instrument.spans import timed
from pdgemm.local.arrays import dtypes
from pdgemm.local.arrays.arguments import op_letter
from pdgemm.local.arrays.device import Array, empty, of, shadow, writeable
from pdgemm.local.arrays.element_functions import slabs
from pdgemm.local.arrays.elementwise import CONJUGATE, CONVERT, Combine, scale
from pdgemm.local.blas.local_gemm import BLAS_INT, EXACT_WIDTH, gemm_accumulate, largest_extent, multiply_stack
from pdgemm.matrix.argument_checks import accumulation, as_scalar, overlap
from pdgemm.matrix.batch import Batch, arrays, empty_items
from pdgemm.names import DType, Transpose
from pdgemm.schedules.formulas import gemm_flops
from pdgemm.support.agreement import together
from pdgemm.support.text import counted, in_rate, in_seconds

CHUNK_BYTES = 1 << 20  # temporaries of this size stay in cache
DEVICE_CHUNK_BYTES = 1 << 28  # larger on a device, where a call has more overhead
LARGE_BYTES = 1 << 17  # where the workspace of an item is larger, one BLAS call per item costs less than temporaries


def matmul_batched(
    A: Batch,
    B: Batch,
    C: Batch | None = None,
    *,
    alpha: complex = 1,
    beta: complex = 0,
    transa: Transpose = "N",
    transb: Transpose = "N",
    accumulate_dtype: DType | None = None,
    epilogue: Epilogue | None = None,
    check: bool = True,
) -> Batch:
    """Compute C_i := alpha op(A_i) op(B_i) + beta C_i for all items i.  Collective over A.comm: see `check`.

    A, B : Batch with op(A_i) (m_i, k_i) and op(B_i) (k_i, n_i), with the same owners of items.  float16, bfloat16,
        float32, float64, complex64, complex128, float8_e4m3fn, float8_e5m2, or integers of 8 to 64 bits; A and B may
        have different types.
    C : Batch (m_i, n_i) with the same owners of items, overwritten.  None: C is allocated.
    alpha, beta : scalars of C's type.  beta == 0: C is not read.  alpha == 0 or k_i == 0: A_i and B_i are not read.
    transa, transb : "N" op(A) = A, "T" op(A) = A^T, "C" op(A) = A^H.
    accumulate_dtype : as for `pdgemm`.  Operands are converted in chunks of the batch, never whole stacks.
    epilogue : C_i := f(scale (alpha op(A_i) op(B_i) + beta C_i) + bias) + residual_i, as for `pdgemm`.
    check : False skips the allreduce that makes all ranks raise the same exception.  Nothing else communicates.

    Returns C; `C.report` is a RunReport.

    Cost per rank: 2mnk flops for each of its items; extra memory about 1 MiB (256 MiB on a device), or the workspace of
    one item where this is larger.
    Raises LayoutError, GridError, DTypeError, DeviceError or ArgumentError, the same on every rank.
    Error: |C - C^| <= gamma_k |alpha||A||B| in the type of accumulation (Higham 2002, 3.5), and one rounding to C's
    type; integers exact modulo 2^32, of 64 bits modulo 2^64.
    """
    start = perf_counter()
    if not isinstance(A, Batch):  # without a Batch the ranks have no communicator to agree over
        raise DTypeError(f"A must be a Batch, got {type(A).__name__}")
    with together(A.comm, check) as description:
        product = BatchProduct(A, B, C, BatchForm(alpha, beta, transa, transb, accumulate_dtype, epilogue))
        description += ["matmul_batched", *product.description]
    return product(start)


class BatchForm(NamedTuple):
    """What is formed of each item, alpha op(A_i) op(B_i) + beta C_i and an epilogue: see `matmul_batched`."""

    alpha: Any
    beta: Any
    transa: str
    transb: str
    accumulate_dtype: Any
    epilogue: Epilogue | None


class BatchProduct:
    """A product of batches whose arguments are checked, and whose C and workspace are allocated.  Local.

    Arguments and errors are those of `matmul_batched`, but errors are raised only on this rank.
    description : values that must be equal on all ranks.
    """

    def __init__(self, A: Batch, B: Any, C: Any, form: BatchForm) -> None:
        alpha, beta, transa, transb, accumulate_dtype, epilogue = form
        for name, x in (("A", A), ("B", B), ("C", C)):
            if x is not None or name == "B":
                _check_batch(name, x, A)
        (left, conjugate_a), (right, conjugate_b) = _op(A, transa, "transa"), _op(B, transb, "transb")
        _check_shapes("inner dimensions do not agree", (left.shapes[:, 1], right.shapes[:, 0]), left, right)
        mnk = np.stack([left.shapes[:, 0], right.shapes[:, 1], left.shapes[:, 1]])
        own, shapes, new_result = A.owner == A.comm.rank, mnk[:2].T, C is None
        if C is None:
            beta, dtype = 0, dtypes.product(A.dtype, B.dtype)
            items = empty_items(shapes[own], shapes, dtype, A.device)
            C = Batch(items, shapes, A.owner, dtype, A.comm, A.device)
        else:
            _check_shapes("shape mismatch: C is not of the shape of op(A) op(B)", (shapes, C.shapes), left, right, C)
        accumulate, _ = accumulation(A.dtype, B.dtype, C.dtype, accumulate_dtype)
        alpha, beta = as_scalar(alpha, C.dtype, "alpha"), as_scalar(beta, C.dtype, "beta")
        flops = gemm_flops(1, 1, 1, accumulate.kind == "c") * mnk.prod(axis=0) * (alpha != 0)
        self._beta = beta
        self._end: BatchEpilogue | None = None
        if epilogue is not None:
            self._end = BatchEpilogue(epilogue, C, accumulate, lambda name, x: _check_batch(name, x, A))
        operands, written = {"A": A, "B": B, **(self._end.batches if self._end else {})}, {"C": C}
        if "aux" in operands and epilogue and not epilogue.gradient:
            written["aux"] = operands.pop("aux")
        if self._end or not new_result:
            _check_memory(written, operands)
        self.A, self.B, self.C, self.flops = left, right, C, flops
        self._sums = self._end.sums if self._end else C
        self.description: list[object] = [f"{len(C)} items, {flops.sum()} flops", transa.upper(), transb.upper()]
        self.description += [f"alpha={alpha}", f"beta={beta}", A.dtype, B.dtype, C.dtype, accumulate]
        self.description += [epilogue.described()] if epilogue else []
        conjugate = (conjugate_a, conjugate_b)
        self._multiply: Callable[[Any, Any, Any], None]
        if C.device:
            factors = _factors(accumulate, (A.dtype, B.dtype), mnk[2, own])
            self._multiply = _OnDevice(alpha, beta, factors, conjugate)
        else:
            self._multiply = _Multiply(
                alpha, beta, (A.dtype, B.dtype, self._sums.dtype), accumulate, conjugate, mnk[:, own]
            )

    def __call__(self, start: float) -> Batch:
        """Compute C, set its report, and return C.   start : the time at which the call began."""
        A, B, sums, C, multiply = self.A.items, self.B.items, self._sums.items, self.C, self._multiply
        with timed("batch"), np.errstate(all="ignore") if self._end else nullcontext():
            if self._end:
                self._end.begin(self._beta)
            if not any(isinstance(x, list) for x in (A, B, sums)):
                multiply(A, B, sums)
            elif isinstance(multiply, _OnDevice):
                multiply.each(A, B, sums)
            else:
                for a, b, s in zip(A, B, sums):
                    multiply(a[None], b[None], s[None])
            if self._end:
                self._end.end()
            if C.device:
                C.device.current_stream().synchronize()
        load = np.zeros(C.comm.size, np.int64)
        np.add.at(load, C.owner, self.flops)
        imbalance = float(load.max() / load.mean()) if load.any() else 1.0
        work = {"items": len(C), "flops": int(load.sum()), "local_flops": int(load[C.comm.rank])}
        C.report = RunReport(_text, **work, seconds=perf_counter() - start, imbalance=imbalance)
        if LOG.isEnabledFor(INFO) and not C.comm.rank:
            LOG.info("%s", C.report)
        return C


def _text(report: RunReport) -> str:
    rate = in_rate(report.local_flops / report.seconds if report.seconds else 0.0)
    return (
        f"{counted(report.items, 'product')} on all ranks; this rank multiplied for {in_seconds(report.seconds)} "
        f"at {rate}; the busiest rank had {report.imbalance:.2f} times the mean work"
    )


def _factors(accumulate: np.dtype, types: Sequence[np.dtype], k: np.ndarray) -> np.dtype:
    """Return the type in which operands of these types are multiplied.

    For integers of at most 16 bits this is a type of BLAS that sums k products exactly; for others int64, in which
    NumPy multiplies without BLAS.
    """
    if accumulate in dtypes.BLAS:
        return accumulate
    most, size = k.max(initial=0), max(x.itemsize for x in types)
    if most <= EXACT_WIDTH and {*types} == {np.dtype("i1")}:
        return np.dtype("f4")
    return np.dtype("f8" if size <= 2 and most <= 1 << (53 - 16 * size) else "i8")


@dataclass(frozen=True)
class _OnDevice:
    """The product of `_Multiply` for stacks or unequal matrices on a device, in chunks of about DEVICE_CHUNK_BYTES."""

    alpha: Any
    beta: Any
    factors: np.dtype
    conjugate: tuple[bool, bool]

    def __call__(self, A: Array, B: Array, C: Array) -> None:
        if self.alpha == 0 or A.shape[2] == 0 or not C.size:
            scale(self.beta, C)
            return
        device = of(C)
        assert device is not None
        (_, m, n), k = C.shape, A.shape[2]
        for part in slabs(len(C), (m * k + k * n + m * n) * self.factors.itemsize, DEVICE_CHUNK_BYTES):
            a, b = (self._ready(x[part], conjugate) for x, conjugate in zip((A, B), self.conjugate))
            if C.dtype == self.factors:
                device.multiply_stack(self.alpha, a, b, self.beta, C[part])
            else:
                product = device.empty((len(a), m, n), self.factors)
                device.multiply_stack(1, a, b, 0, product)
                Combine(self.alpha, self.beta)(C[part], product)

    def each(self, A: Iterable[Array], B: Iterable[Array], C: Iterable[Array]) -> None:
        """Multiply matrices of any shapes, many in one call."""
        chunk, nbytes = list[tuple[Array, Array, Array]](), 0
        for a, b, c in zip(A, B, C):
            if self.alpha == 0 or not a.shape[1] or not c.size:
                scale(self.beta, c)
                continue
            need = (a.size + b.size + c.size) * self.factors.itemsize
            if chunk and nbytes + need > DEVICE_CHUNK_BYTES:
                self._multiply_chunk(chunk)
                chunk, nbytes = [], 0
            chunk.append((a, b, c))
            nbytes += need
        if chunk:
            self._multiply_chunk(chunk)

    def _multiply_chunk(self, chunk: list[tuple[Array, Array, Array]]) -> None:
        device, in_c = of(chunk[0][2]), chunk[0][2].dtype == self.factors
        assert device is not None
        products = [
            (*map(self._ready, operands, self.conjugate), c if in_c else device.empty(c.shape, self.factors))
            for *operands, c in chunk
        ]
        device.multiply_each(self.alpha if in_c else 1, products, self.beta if in_c else 0)
        for (*_, c), (*_, product) in () if in_c else zip(chunk, products):
            Combine(self.alpha, self.beta)(c, product)

    def _ready(self, x: Array, conjugate: bool) -> Array:
        if x.dtype == self.factors and not conjugate:
            return x
        converted = empty(x.shape, self.factors, device=of(x))
        (CONJUGATE if conjugate else CONVERT)(converted, x)
        return converted


class _Multiply:
    """The product C := alpha op(A) op(B) + beta C for stacks of this rank, where op is the conjugate or the identity.

    types : element types of A, B and C;  conjugate : whether A and B are conjugated;  mnk : (3, items), m, n and k of
        this rank's products.
    """

    def __init__(
        self,
        alpha: Any,
        beta: Any,
        types: tuple[np.dtype, ...],
        accumulate: np.dtype,
        conjugate: tuple[bool, bool],
        mnk: np.ndarray,
    ) -> None:
        integers = types[2].kind in "iu"  # sums are modulo 2**64
        self.alpha, self.beta = alpha, beta
        self.sums = np.dtype(np.int64) if integers else dtypes.arithmetic(accumulate, types[2])
        self.factors = _factors(accumulate, types[:2], mnk[2])
        self.conjugate = conjugate
        self.alike = set(types) == {self.factors} and not integers and not any(conjugate)
        self.unscaled = (self.alpha, self.beta) == (1, 0) and not integers
        need = self._item_bytes(*mnk)
        # allocated before ranks agree, with room for any whole item; large items of one type need none
        self.workspace = np.empty(max(0 if self.alike else need.max(initial=0), min(CHUNK_BYTES, need.sum())), np.uint8)

    def _item_bytes(self, m: Any, n: Any, k: Any) -> Any:
        return 2 * self.sums.itemsize * m * n + self.factors.itemsize * (m * k + k * n + m * n)

    def __call__(self, A: np.ndarray, B: np.ndarray, C: np.ndarray) -> None:
        (_, m, n), k = C.shape, A.shape[2]
        item_bytes = self._item_bytes(m, n, k)
        if self.alpha == 0 or k == 0:
            self._scale(C)
        elif self.alike and self.unscaled:
            multiply_stack(A, B, C)
        elif self.alike and item_bytes > LARGE_BYTES:
            for a, b, c in zip(A, B, C):
                gemm_accumulate(self.alpha, a, b, self.beta, c)
        elif C.size:
            for part in slabs(len(C), item_bytes, len(self.workspace)):
                pair, workspace = _cut(self.workspace, (2, C[part].size), self.sums)
                product, workspace = _cut(workspace, C[part].shape, self.factors)
                a, workspace = self._ready(A[part], self.conjugate[0], workspace)
                b, workspace = self._ready(B[part], self.conjugate[1], workspace)
                np.matmul(a, b, out=product)
                Combine(self.alpha, self.beta, None if self.unscaled else pair)(C[part], product)

    def _scale(self, C: np.ndarray) -> None:
        if self.beta == 0 or self.alike:
            scale(self.beta, C)
        elif self.beta != 1 and C.size:
            for part in slabs(len(C), self._item_bytes(C.shape[1], C.shape[2], 0), len(self.workspace)):
                Combine(self.beta, 0, _cut(self.workspace, (2, C[part].size), self.sums)[0])(C[part], C[part])

    def _ready(self, x: np.ndarray, conjugate: bool, workspace: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return a stack, converted into `workspace` where necessary, and the rest of the workspace."""
        if x.dtype == self.factors and not conjugate:
            return x, workspace
        converted, workspace = _cut(workspace, x.shape, self.factors)
        (CONJUGATE if conjugate else CONVERT)(converted, x)
        return converted, workspace


def _cut(workspace: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return an array at the start of `workspace`, and the rest of the workspace."""
    nbytes = dtype.itemsize * prod(shape)
    return workspace[:nbytes].view(dtype).reshape(shape), workspace[nbytes:]


def _op(x: Batch, trans: str, name: str) -> tuple[Batch, bool]:
    """Return the batch, or a batch of the transposes, and whether the items have to be conjugated."""
    trans = op_letter(trans, name)
    if trans == "N":
        return x, False
    items = [item.T for item in x.items] if isinstance(x.items, list) else x.items.swapaxes(1, 2)
    return Batch(items, x.shapes[:, ::-1], x.owner, x.dtype, x.comm, x.device), trans == "C" and x.dtype.kind == "c"


def _check_batch(name: str, x: Any, A: Batch) -> None:
    """Raise on this rank where batch x cannot be an operand or the result of a product with A."""
    if not isinstance(x, Batch):
        raise DTypeError(f"{name} must be a Batch, got {type(x).__name__}")
    supported = dtypes.RESULTS if name == "C" else dtypes.OPERANDS
    if x.dtype not in supported:
        raise DTypeError(f"{name} has dtype {x.dtype}; supported: {dtypes.names(supported)}")
    if x.device and not dtypes.multiplies_on_device(x.dtype, name == "C"):
        raise DeviceError(f"{name} of {x.dtype} can only be multiplied on the host")
    extent = max(map(largest_extent, x.items), default=0)
    if max(extent, x.shapes.max(initial=0)) > BLAS_INT:
        raise LayoutError(
            f"{name} has an item whose dimension, or row stride in elements, is "
            f"{max(extent, x.shapes.max())}; BLAS takes up to {BLAS_INT}"
        )
    if MPI.Comm.Compare(x.comm, A.comm) not in (MPI.IDENT, MPI.CONGRUENT):
        raise GridError(f"A and {name} are batches over different ranks")
    if x.device is not A.device:
        raise DeviceError(f"A and {name} are on different devices")
    if len(x) != len(A):
        raise LayoutError(f"A has {len(A)} items, {name} has {len(x)}")
    for item in np.flatnonzero(x.owner != A.owner)[:1]:
        raise LayoutError(f"item {item} of A is on rank {A.owner[item]}, item {item} of {name} on rank {x.owner[item]}")


def _check_shapes(problem: str, equal: tuple[np.ndarray, np.ndarray], *batches: Batch) -> None:
    for item in np.argwhere(equal[0] != equal[1])[:1, 0]:
        sizes = (
            f"{name} is {x.shapes[item, 0]} x {x.shapes[item, 1]}" for name, x in zip(("op(A)", "op(B)", "C"), batches)
        )
        raise LayoutError(f"item {item}: {problem}: {', '.join(sizes)}")


def _check_memory(written: dict[str, Batch], operands: dict[str, Batch]) -> None:
    """Raise ArgumentError where a written batch is read-only, or its items share memory with others."""
    parts = {name: arrays(x) for name, x in (operands | written).items()}
    for name in written:
        if not all(writeable(x) for x in parts[name]):
            raise ArgumentError(f"{name} is read-only")
    named_arrays = [(name, shadow(x)) for name, part in parts.items() for x in part if x.size]
    before: list[tuple[int, str, np.ndarray]] = []  # arrays that may overlap the next one
    for start, end, number in sorted((*byte_bounds(x), number) for number, (_, x) in enumerate(named_arrays)):
        name, x = named_arrays[number]
        before = [other for other in before if other[0] > start]
        for _, other_name, y in before:
            pair = sorted((name, other_name), key=[*written, *operands].index)
            if pair[0] in written and overlap(x, y):
                raise ArgumentError(f"{pair[0]} shares memory with {pair[1] if pair[1] != pair[0] else 'itself'}")
        before.append((end, name, x))
