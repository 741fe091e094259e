"""verify() checks C = alpha A B + beta C0 with random vectors, without a second product (Freivalds 1979)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from pdgemm.errors import LayoutError
from pdgemm.instrument.spans import timed
from pdgemm.local.arrays import dtypes
from pdgemm.local.arrays.arguments import as_count, as_name, as_seed
from pdgemm.local.arrays.device import HOST, beside, to_host
from pdgemm.local.arrays.element_functions import element_function, slabs
from pdgemm.local.arrays.emulation import EMULATIONS
from pdgemm.local.arrays.folds import at_a_time
from pdgemm.matrix.argument_checks import as_scalar, check_matrices, communicator, shape_of
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.names import ComputeType, DType
from pdgemm.support.agreement import together

Images = tuple[np.ndarray, np.ndarray, np.ndarray]  # M X, |M| size, and the largest |element| of each row of M
_UNLIKELY = 8  # standard deviations, which a sum of errors with random signs hardly ever exceeds


@dataclass(frozen=True)
class Residual:
    """The outcome of `verify`, the same on every rank."""

    value: float  # max |C X - (alpha A (B X) + beta C0 X)| / (|alpha| |A| |B| |X| + |beta| |C0| |X|)
    bound: float  # largest value that rounding errors explain
    rows: int  # rows of C that were compared
    not_finite: int  # rows that hold NaN or infinity both in C X and in the expected result
    misplaced: int  # rows that hold NaN or infinity in only one of these
    of_zeros: float  # the value that zeros in place of C would have

    @property
    def wrong(self) -> bool:
        """Whether the residual is above the bound, or NaN and infinity are in other rows than expected."""
        return not self.value <= self.bound or self.misplaced > 0

    @property
    def passed(self) -> bool:
        """Whether C is right: nothing is wrong, and zeros in place of C would have been wrong."""
        tells = self.of_zeros > self.bound or (self.of_zeros == 0 and (self.rows > 0 or not self.not_finite))
        return not self.wrong and tells

    @classmethod
    def of(cls, result: Any, expected: Any, sizes: tuple[Any, Any], finite: tuple[Any, Any], bound: float) -> Residual:
        """Return the outcome of a comparison, whose arrays are the same on every rank.  Local.

        sizes : of the errors, and of the expected elements, to which these are relative.
        finite : whether the rows, or elements, of the result and of the expected one are compared.
        bound : for real numbers.
        """
        (here, there), both, (size, scale) = finite, finite[0] & finite[1], sizes

        def relative(errors: Any, sizes: Any) -> float:
            e, s = np.abs(errors)[both], sizes[both]
            return float(np.divide(e, s, out=np.where(e > 0, np.inf, 0.0), where=s > 0).max(initial=0.0))

        with np.errstate(invalid="ignore", over="ignore"):
            return cls(
                value=relative(result - expected, size),
                bound=bound * (8**0.5 if result.dtype.kind == "c" else 1),
                rows=int(both.sum()),
                not_finite=int((~here & ~there).sum()),
                misplaced=int((here != there).sum()),
                of_zeros=relative(expected, scale),
            )

    def __str__(self) -> str:
        text = f"residual {self.value:.1e} (tolerance {self.bound:.1e}): {verdict(self)}"
        if not (self.passed or self.wrong) and self.rows:
            text += f"; with zeros in place of C it is {self.of_zeros:.1e}"
        if self.not_finite:
            rows = f"{self.not_finite} of {self.rows + self.not_finite} rows"
            text += f"\nwarning: {rows} of C hold NaN or infinity, which come from A and B; they are not compared"
        if self.misplaced:
            text += f"\nrows of C where NaN or infinity is not expected, or is missing: {self.misplaced}"
        return text


def verdict(check: Any) -> str:
    """Return the verdict of a check as text."""
    return "ok" if check.passed else "WRONG" if check.wrong else "this check cannot tell"


class Claim(NamedTuple):
    """What `verify` checks, C = alpha A B + beta C0, and the types in which C was accumulated and multiplied."""

    C: Any
    alpha: complex
    A: Any
    B: Any
    beta: complex = 0.0
    C0: Any = None
    accumulate_dtype: Any = None
    compute_type: str | None = None


def verify(
    C: DistMatrix,
    alpha: complex,
    A: DistMatrix,
    B: DistMatrix,
    beta: complex = 0.0,
    C0: DistMatrix | None = None,
    *,
    seed: int = 0,
    vectors: int = 2,
    accumulate_dtype: DType | None = None,
    compute_type: ComputeType | None = None,
) -> Residual:
    """Compare C X with alpha A (B X) + beta C0 X for random X, row by row.  Collective over C.grid.

    A : (m, k);  B : (k, n);  C, C0 : (m, n), each of any type and layout on grids over the same ranks; views too.
    vectors : the number of columns of X, whose elements are in [-1, 1).  Apart from rounding, a wrong element of C is
              missed with probability zero: an error is detected above about sqrt(k) eps (|A||B||X|)_i.
              Here |B||X| is at most 8 times the 2-norm of a row of B scaled by X, because the elements of X have
              random signs: a sum of n errors is larger with a probability below 2 exp(-32) (Hoeffding 1963).

    accumulate_dtype : the type in which C was accumulated, where this type is less precise than C's own.
    compute_type     : the type to which the product rounded A and B, or the name of an emulation by slices ("ozaki").

    Returns a `Residual`, which is not `passed` where the bound is too large to distinguish C from zeros.

    Products are in double precision.  The bound is 3 sqrt(max(k, n) + 2) eps of the accumulation type (Higham 2002,
    3.6, and the tolerance of SLATE's test_gemm), which is by default C's type, or float32 for 16 bits.  Half an eps is
    added for each rounding of an operand to `compute_type`, and of C to 16 bits.  For complex numbers this bound is
    multiplied by 2 sqrt(2).  The errors of "ozaki" are relative to the largest elements of rows and columns: |A||B||X|
    gets a term for them.  The rounding of C is relative to |C||X|.
    Cost: 4 (mk + kn + mn) vectors / P flops; for each of A, B and C two allreduces of `vectors` words per row, and one
    of one word per row; where beta is not 0, the same for C0, and 4 mn vectors / P flops.
    Raises LayoutError on every rank when shapes do not fit.
    """
    claim, X = checked_claim(Claim(C, alpha, A, B, beta, C0, accumulate_dtype, compute_type), seed, vectors)
    return residual(_apply, claim, X)


def residual(apply: Callable[[Any, np.ndarray, np.ndarray], Images], claim: Claim, X: np.ndarray) -> Residual:
    """Return the outcome of `verify` for matrices of any kind that have a shape and a dtype.

    apply(M, X, size) : returns M X, |M| size, and the largest |element| of each row of M, whole on every rank.
    """
    C, alpha, A, B, beta, C0, accumulate_dtype, compute_type = claim
    m, k, n = A.shape[0], A.shape[1], B.shape[1]
    how = None if compute_type is None else EMULATIONS.get(compute_type)
    # integer products are exact, but this comparison is in double precision
    sums = accumulate_dtype or (how.sums if how else "f4" if compute_type else np.float64)
    unit = max(map(dtypes.eps, (dtypes.arithmetic(C.dtype), np.float64, sums)))
    of_largest, rounded = how is not None and how.scaled, 0.0 if compute_type is None else dtypes.COMPUTE[compute_type]
    stored = dtypes.eps(C.dtype) / 2 if C.dtype in dtypes.NARROW else 0.0
    bound = 3 * float(np.sqrt(max(k, n) + 2)) * unit + rounded + stored

    def times_x(M: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return M X, and |M||X| limited to 8 times the 2-norms of rows, as in `verify`."""
        image, size, most = apply(M, X, np.abs(X))
        return image, np.minimum(size, _UNLIKELY * np.sqrt(most)[:, None] * np.sqrt(size))

    with np.errstate(invalid="ignore", over="ignore"), timed("verify"):
        left, own = times_x(C)
        right: Any = np.zeros((m, X.shape[1]))
        scale: Any = np.zeros((m, X.shape[1]))
        if alpha != 0:  # else A and B are not read, whatever values they have
            image, size = times_x(B)
            if of_largest:  # errors are relative to the largest elements of rows of A and of columns of B
                size = size + k * rounded / bound * size.max(axis=0, initial=0, where=np.isfinite(size))
            right, scale, _ = apply(A, image, size)
            right, scale = alpha * right, abs(alpha) * scale
        if beta != 0 and C0 is not None:
            added, size = times_x(C0)
            right, scale = right + beta * added, scale + abs(beta) * size
        scale = scale * (1 - stored / bound)  # the rounding of C is added below, relative to its elements
        finite = tuple(np.isfinite(x).all(axis=1) for x in (left + own, right + scale))
        return Residual.of(left, right, (scale + own * (stored / bound), scale), finite, bound)


def checked_claim(claim: Claim, seed: int = 0, vectors: int = 2) -> tuple[Claim, np.ndarray]:
    """Check the arguments of `verify`; return the claim and X.  Collective over C.grid; no element is read."""
    C, alpha, A, B, beta, C0, accumulate_dtype, compute_type = claim
    with together(communicator(C=C, A=A, B=B)) as arguments:
        check_matrices(C=C, A=A, B=B, **({} if C0 is None else {"C0": C0}))
        m, k, n = A.shape[0], A.shape[1], B.shape[1]
        alpha, beta = as_scalar(alpha, C.dtype, "alpha"), as_scalar(beta, C.dtype, "beta")
        seed, vectors = as_seed(seed), as_count(vectors, "vectors", 1)
        if B.shape[0] != k or C.shape != (m, n) or (beta != 0 and (C0 is None or C0.shape != (m, n))):
            needed = {"op(A)": A, "op(B)": B, "C": C} | ({"C0": C0} if beta != 0 else {})
            sizes = ", ".join(f"{name} is {'missing' if x is None else shape_of(x)}" for name, x in needed.items())
            raise LayoutError(f"shapes do not fit: {sizes}")
        if compute_type is not None:
            as_name(compute_type, "compute_type", dtypes.COMPUTE)
        arguments += ["verify", (m, n, k), alpha, beta, seed, vectors, accumulate_dtype, compute_type]
        arguments += [A.dtype, B.dtype, C.dtype, None if C0 is None else C0.dtype]
        X = random_vectors(n, seed, vectors)
    return claim._replace(alpha=alpha, beta=beta), X


def random_vectors(n: int, seed: int, vectors: int = 2) -> np.ndarray:
    """Return random numbers in [-1, 1), (n, vectors), the same on all ranks."""
    f = element_function("uniform", seed, np.dtype(np.float64))
    X: np.ndarray = 2 * f(np.arange(n)[:, None], np.arange(vectors)) - 1
    return X


def _apply(M: DistMatrix, X: np.ndarray, size: np.ndarray) -> Images:
    """Return M X, |M| size and the largest elements of rows, whole on every rank, in double precision."""
    wide = np.result_type(M.dtype, X.dtype, np.float64)
    (rows, cols), (m, n) = M.indices(), M.stored.shape
    product: Any = np.zeros((M.shape[0], X.shape[1]), wide)
    bound, most = np.zeros(product.shape), np.zeros(len(product))
    here, there = beside(X[cols], M.stored), beside(size[cols], M.stored)
    with together(M.grid.comm, M.device != HOST):  # a device may lack memory on one rank
        for slab in slabs(m, n, at_a_time(M.stored, 1 << 20)) if m * n else ():
            part = M.stored[slab].astype(wide, copy=False)
            part = np.conj(part) if M.conjugated else part
            product[rows[slab]] = to_host(part @ here)
            part = np.abs(part)
            bound[rows[slab]], most[rows[slab]] = to_host(part @ there), to_host(np.max(part, axis=1))
    return added_images(M.grid.comm, product, bound, most)


def added_images(comm: MPI.Intracomm, product: np.ndarray, bound: np.ndarray, most: np.ndarray) -> Images:
    """Return the sums over all ranks of M X and of |M| size, and the largest elements of rows.  Collective."""
    comm.Allreduce(MPI.IN_PLACE, product, MPI.SUM)
    comm.Allreduce(MPI.IN_PLACE, bound, MPI.SUM)
    comm.Allreduce(MPI.IN_PLACE, most, MPI.MAX)
    return product, bound, most
