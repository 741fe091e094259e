"""Functions of matrices by products: powers, exponential, square root, Newton-Schulz iterations; Kronecker products."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, factorial, frexp, inf, isfinite, log2, sqrt
from time import perf_counter
from typing import Any, Literal

import numpy as np

from pdgemm.errors import ArgumentError, DeviceError, GridError, LayoutError, LinAlgError
from pdgemm.grids.distribution import Block, BlockCyclic, Distribution
from pdgemm.grids.process_grid import ProcessGrid
from pdgemm.instrument.recorder import Recorder
from pdgemm.instrument.run_report import report_of_move
from pdgemm.instrument.step_reports import Steps
from pdgemm.linalg.factors.cholesky import cholesky
from pdgemm.linalg.factors.operands import check_operand
from pdgemm.linalg.functions.polar import inverse, polar
from pdgemm.linalg.work import Work, add_to_diagonal, check_protection, near_one, started
from pdgemm.local.arrays import device as devices, dtypes
from pdgemm.local.arrays.arguments import as_count, as_real, as_whole, op_letter, shown
from pdgemm.local.arrays.device import Array, beside, to_host
from pdgemm.local.arrays.dtypes import common, element_type
from pdgemm.local.arrays.element_functions import slabs
from pdgemm.local.arrays.elementwise import CONVERT, supported
from pdgemm.local.arrays.folds import ON_DEVICE
from pdgemm.matrix.argument_checks import check_matrices, communicator, op, shape_of
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.matrix.local_arrays import empty_like
from pdgemm.names import Protection, Transpose
from pdgemm.schedules.collectives.vectors import gathering
from pdgemm.support.agreement import together


def matvec(A: DistMatrix, x: Any, *, trans: Transpose = "N") -> Any:
    """Return op(A) x.  Collective over the grid.

    A : DistMatrix (m, n) of any layout.
    x : a 1-D array, the same on every rank; then the result is such an array, too.  Or a DistMatrix of one column; then
        the result is a DistMatrix of one column.
    trans : "N" op(A) = A, "T" op(A) = A^T, "C" op(A) = A^H.

    Cost per rank for P ranks: 2 mn/P flops, and the words of the result to every rank.  If x is a DistMatrix, the cost
    is that of `pdgemm`.
    Raises LayoutError where the length of x is wrong, ArgumentError where x differs among the ranks, or DTypeError.
    """
    with together(communicator(A=A, x=x)) as arguments:
        check_matrices(A=A)
        M = op(A, letter := op_letter(trans, "trans"))
        arguments += ["matvec", A.distribution, A.dtype, letter, isinstance(x, DistMatrix)]
        if isinstance(x, DistMatrix) and x.shape != (M.shape[1], 1):
            raise LayoutError(f"op(A) is {shape_of(M)}, so x must be {M.shape[1]} x 1, but it is {shape_of(x)}")
        if conjugated := letter == "C" and not isinstance(x, DistMatrix):
            x = to_host(devices.adopted(x))
            element_type(x.dtype)  # raises if the elements are not numbers
            x = x.conj()  # conjugate x and not A: a conjugate of A would be a copy
    if isinstance(x, DistMatrix):
        return M @ x
    return A.T.matvec(x).conj() if conjugated else M.matvec(x)


def outer(a: Any, b: Any, *, grid: ProcessGrid | None = None, block: Block | None = None) -> DistMatrix:
    """Return the matrix a_i b_j.  Collective over the grid.

    a, b : 1-D arrays that are the same on every rank, or DistMatrices of one column or one row.
    grid, block : the grid and the block size of the result if both a and b are arrays; then nothing is sent.  Otherwise
        the rows of the result are distributed as a if a is a matrix, the columns as b if b is a matrix, and every rank
        receives the elements of a and b.

    Raises LayoutError, ArgumentError or GridError on all ranks.
    """
    matrices = [x for x in (a, b) if isinstance(x, DistMatrix)]
    if matrices:
        result: DistMatrix = np.outer(a, b)  # type: ignore[assignment]
        return result
    if not isinstance(grid, ProcessGrid):
        raise GridError("outer of two arrays takes the grid of the result: outer(a, b, grid=grid)")
    with together(grid.comm) as arguments:
        x, y = (np.asarray(v).reshape(-1) for v in (a, b))
        arguments += ["outer", x.tobytes(), y.tobytes(), x.dtype, y.dtype]
    product = lambda i, j: x[i] * y[j]  # noqa: E731
    return DistMatrix.from_function(product, (len(x), len(y)), grid=grid, block=block, dtype=np.result_type(x, y))


def kron(A: Any, B: Any) -> DistMatrix:
    """Return the Kronecker product, whose block (i, j) of p x q elements is a_ij B.  Collective over the grid.

    A : DistMatrix (m, n);  B : DistMatrix (p, q) of any layout over the same ranks, on the same device.  One of them
        may be an array that is the same on every rank.

    Returns a matrix (m p, n q) on the grid of A, in blocks that are p x q times as large as the blocks of A: the rank
    that owns a_ij owns the block a_ij B.  So A is not sent; every rank receives the elements of B that it does not own,
    at most pq words, which `report` counts.  Cost per rank for P ranks: mnpq/P multiplications.
    Raises LayoutError, GridError, DTypeError or DeviceError on all ranks.
    """
    comm = communicator(A=A, B=B)
    with together(comm) as arguments:
        check_matrices(A=A, B=B)
        B.layout_in(A.grid)  # raises for a grid over other ranks
        dtype = element_type(common(A.dtype, B.dtype))
        if A.device != B.device:
            raise DeviceError(f"kron of matrices on {A.device} and {B.device}: use to_device")
        arguments += ["kron", A.distribution, B.distribution, A.dtype, B.dtype]
        (p, q), (rows, cols) = B.shape, (A.distribution.rows, A.distribution.cols)
        layout = Distribution(_repeated(rows, p), _repeated(cols, q))
    steps, C = Steps(), empty_like(A, dtype, layout)
    b = B.allgather()
    with together(comm):
        if C.local.size:
            _multiply(A.local, beside(b, C.local), C.local)
    recorder, (gather, _) = Recorder(traffic=steps.vectors.counted), gathering(B.layout_in(B.grid), B.grid.size)
    recorder.hold(b.nbytes)
    others: dict[str, Any] = {"source": str(B.distribution), "target": "every rank", "vectors": steps.vectors}
    others["predicted_extra_bytes"] = p * q * B.dtype.itemsize
    C.report = report_of_move(recorder, [gather], B.grid, perf_counter() - steps.start, name="B", **others)
    return C


def _multiply(x: Array, y: Array, product: Array) -> None:
    """Set `product` to the Kronecker product of x and y; all are on the host, or on one device.  Local."""
    if product.strides[0] < product.strides[1]:
        x, y, product = x.T, y.T, product.T
    parts = product.reshape(len(x), len(y), x.shape[1], y.shape[1])
    if isinstance(product, np.ndarray):
        np.multiply(x[:, None, :, None], y[None, :, None, :], out=parts)
        return
    for slab in slabs(len(x), product.size // len(x), ON_DEVICE):
        CONVERT(parts[slab], supported(x[slab])[:, None, :, None] * supported(y)[None, :, None, :])


def _repeated(x: BlockCyclic, times: int) -> BlockCyclic:
    """Return the distribution in which `times` consecutive indices replace each index of x."""
    return BlockCyclic(x.n * times, max(1, x.block * times), x.parts, x.source, x.skip * times)


def newton_schulz(
    G: DistMatrix,
    steps: int = 5,
    *,
    coefficients: Sequence[float] | Sequence[Sequence[float]] = (3.4445, -4.7750, 2.0315),
    epsilon: float = 1e-7,
    protect: Protection | None = None,
) -> DistMatrix:
    """Return X after `steps` steps X := a X + b (X X^H) X + c (X X^H)^2 X from X = G / (|G|_F + epsilon).

    Collective over the grid.  All singular values approach 1: X approaches the orthogonal polar factor of G.

    G            : DistMatrix (m, n) of a real or complex type, 16-bit types included; G is not changed.
    coefficients : (a, b, c), by default those of Muon, which bring singular values to between 0.7 and 1.2; or one
                   triple for each step.  With (15/8, -10/8, 3/8) the steps converge to the polar factor.
    protect      : protection of the products, as for `pdgemm`.

    Returns X in the layout of G.  Cost of a step, with m <= n: 4 m^2 n + 2 m^3 flops in three products; for m > n, m
    and n change places.  Two matrices like G and two of min(m, n)^2 elements are allocated, and none in a step.
    Raises LayoutError, DTypeError, ArgumentError or DeviceError on all ranks; LinAlgError where G has NaN or infinite
    elements.
    Higham, Functions of Matrices, 2008, 8.3; Jordan et al., Muon, 2024.
    """
    with together(communicator(G=G)) as arguments:
        check_operand("G", G, supported=dtypes.FLOATS)
        steps, epsilon = as_count(steps, "steps", 0), as_real(epsilon, "epsilon")
        if epsilon < 0:
            raise ArgumentError(f"epsilon must be >= 0, got {epsilon}")
        each = _coefficients_of_steps(coefficients, steps)
        arguments += ["newton_schulz", G.distribution, G.dtype, each, epsilon, check_protection(protect, G)]
    work = Work("newton_schulz", protect)
    (near, far), wide = near_one("G", G), G.shape[0] <= G.shape[1]
    X, Y = empty_like(G), empty_like(G)
    work.add(X, near, G, beta=0)
    X *= far
    X *= 1 / (float(X.norm()) + epsilon * near * far or 1)
    S: Any = None
    T: Any = None
    for a, b, c in each:
        left, right = (X, X.H) if wide else (X.H, X)
        S = work.product(1, left, right, C=S)
        T = empty_like(S) if T is None else T
        work.product(c, S, S, b, work.add(T, 1, S, beta=0))  # T = b S + c S S
        left, right = (T, X) if wide else (X, T)
        work.product(1, left, right, a, work.add(Y, 1, X, beta=0))  # Y = a X + T X
        X, Y = Y, X
    return work.reported(X, steps)


def _coefficients_of_steps(coefficients: Any, steps: int) -> list[tuple[float, ...]]:
    """Return the three coefficients (a, b, c) of each step.  Raises ArgumentError.  Local."""
    try:
        triples = np.atleast_2d(np.asarray(coefficients, float))
    except (TypeError, ValueError):
        raise ArgumentError(f"coefficients are real numbers (a, b, c), got {shown(coefficients)}") from None
    triples = np.repeat(triples, steps, axis=0) if len(triples) == 1 else triples
    if triples.shape != (steps, 3) or not np.isfinite(triples).all():
        raise ArgumentError(
            f"coefficients are (a, b, c), or one triple for each of {steps} steps, got shape {triples.shape}"
        )
    return [tuple(map(float, row)) for row in triples]


def matrix_power(A: DistMatrix, n: int, *, protect: Protection | None = None) -> DistMatrix:
    """Return A^n by repeated squaring of A or, if n < 0, of A^-1.  Collective over the grid.

    A : DistMatrix (m, m) of type s, d, c or z; A is not changed.  Returns a matrix in the layout of A; A^0 = I.
    protect : protection of the products, as for `pdgemm`.

    Cost: at most 2 log2(n) products; two matrices like A are allocated.
    Raises LayoutError, DTypeError, ArgumentError or DeviceError on all ranks.
    Error: |A^n - X| <= gamma_(nm) |A|^n (Higham 2002, 3.5), where |A| has the absolute values of the elements of A.
    Knuth, The Art of Computer Programming 2, 1981, 4.6.3.
    """
    with together(communicator(A=A)) as arguments:
        check_operand("A", A, square=True)
        n = as_whole(n, "n")
        arguments += ["matrix_power", A.distribution, A.dtype, n, check_protection(protect, A)]
    work = Work("matrix_power", protect)
    if n < 0:
        A, n = work.did(inverse(A)), -n
    result, spare = empty_like(A), empty_like(A)
    if n == 0:
        result.fill(0)  # not as 0 A, because A may have NaN
        return work.reported(add_to_diagonal(result, 1), 0)
    work.add(result, 1, A, beta=0)
    for bit in f"{n:b}"[1:]:  # bits of n, from the left: X := X^2, then X := X A if the bit is 1
        for factor in ("X", "A") if bit == "1" else ("X",):
            work.product(1, result, result if factor == "X" else A, C=spare)
            result, spare = spare, result
    return work.reported(result, n.bit_length() - 1)


# Taylor's polynomials of degree 8 and 18 by 3 and 5 products.  _LARGEST: the largest norm for which the backward error
# is below eps, for 32-bit and for other types.  _EIGHT, _EIGHTEEN: for each factor, the coefficients of I, A, A^2, ...
_LARGEST = {8: (5.800524627688768e-01, 4.991228871115323e-02), 18: (3.010066362817634, 1.090863719290036)}
_R = 177**0.5
_EIGHT = (
    (0, (1 + _R) / 132, (1 + _R) / 528),
    ((-271 + 29 * _R) / 210, (-11 + 11 * _R) / 840, (-99 + 11 * _R) / 3360, (89 - _R) / 2240),
    (1, 1, (857 - 58 * _R) / 630),
)
_EIGHTEEN = (
    (0, -1.00365581030144618e-01, -8.02924648241156932e-03, -8.92138498045729985e-04, 0),
    (-9.04316832390810593e-02, -6.76404519071381882e-02, 6.75961301770459655e-02, 2.95552570429315521e-02,
     -1.39180257516060693e-05),
    (0, 0, -9.23364619367118555e-02, -1.69364939002081723e-02, -1.40086798182036094e-05),
    (-1.09676396052962062e01, 1.68015813878906206, 5.71779846478865511e-02, -6.98210122488052056e-03,
     3.34975017086070471e-05),
    (0, 3.97849749499645078e-01, 1.36783778460411720e00, 4.98289622525382669e-01, -6.37898194594723280e-04),
)  # fmt: skip


def expm(A: DistMatrix, *, protect: Protection | None = None) -> DistMatrix:
    """Return e^A = (e^(A / 2^s))^(2^s), by Taylor's polynomial of degree 8 or 18 and s squarings.  Collective.

    A : DistMatrix (n, n) of type s, d, c or z, of any structure; A is not changed.  Returns e^A in the layout of A.
    protect : protection of the products, as for `pdgemm`.

    All large operations are products: 3 for |A|_1 <= 0.05 (32-bit types: 0.58), else 5 + s.  2^s is about the larger of
    |A^2|^(1/2) and |A^3|^(1/3); both are far below |A| if A is far from normal.  The report has s as its steps.  Nine
    matrices like A and one of absolute values are allocated, and none in a squaring.
    Raises LayoutError, DTypeError, ArgumentError or DeviceError on all ranks; LinAlgError where A has NaN or infinite
    elements.
    Error: the result is e^(A + E) with |E| <= eps |A|, up to the rounding errors of the products.
    Bader, Blanes & Casas, Mathematics 7(12), 2019; Al-Mohy & Higham, SIAM J. Matrix Anal. Appl. 31(3), 2009.
    """
    work, size, halvings = started("expm", A, protect), A.norm(1), 0
    if not isfinite(size):  # an element is not finite, or a sum overflows
        near_one("A", A)
        halvings = len(A).bit_length() + 1
        A = A * 2.0**-halvings
        size = A.norm(1)
    single = np.finfo(A.dtype).bits == 32
    if size <= _LARGEST[8][not single]:
        return work.reported(_taylor_8(work, A), 0)
    X, squarings = _taylor_18(work, A, size, _LARGEST[18][not single], 10 if single else 40)
    spare, squarings = empty_like(A), squarings + halvings
    for _ in range(squarings):
        work.product(1, X, X, C=spare)
        X, spare = spare, X
    return work.reported(X, squarings)


def _taylor_8(work: Work, A: DistMatrix) -> DistMatrix:
    A2 = work.product(1, A, A, C=empty_like(A))
    sums = _combined(work, empty_like(A), _EIGHT[0], (A, A2))
    A4 = work.product(1, A2, sums, C=empty_like(A))
    _combined(work, sums, _EIGHT[1], (A, A2, A4))
    return work.product(1, work.add(A4, 2 / 3, A2), sums, 1, _combined(work, empty_like(A), _EIGHT[2], (A, A2)))


def _taylor_18(work: Work, A: DistMatrix, size: float, largest: float, most: int) -> tuple[DistMatrix, int]:
    """Return the polynomial of A / 2^s, and s.  Collective.

    size : |A|_1.   largest : the element of _LARGEST for A's type, a limit for norms of the powers of A / 2^s.
    most : log2 of the largest |A / 2^s|_1 to accept.
    """
    exponent = frexp(size)[1]  # X = A / 2^exponent has a norm below 1, so its powers do not overflow
    X = work.add(empty_like(A), 2.0**-exponent, A, beta=0)
    X2 = work.product(1, X, X, C=empty_like(A))
    X3 = work.product(1, X, X2, C=empty_like(A))
    X6 = work.product(1, X3, X3, C=empty_like(A))
    norm = min(frexp(size)[0], max(X2.norm(1) ** (1 / 2), X3.norm(1) ** (1 / 3)))
    s = max(0, exponent - most, exponent + ceil(log2(norm / largest)) if norm else 0)
    # |X| has the absolute values of the elements; rounding errors are those of |X|^19: Al-Mohy & Higham (2009), 5
    modulus: Any = np.abs(X)
    power = np.ones(A.shape[0])
    for _ in range(19):
        power = modulus.T.matvec(power)
    grown = log2(power.max() / frexp(size)[0] / factorial(19) / dtypes.eps(A.dtype)) if power.max() else -inf
    s += max(0, ceil(grown / 18 + exponent - s)) if isfinite(grown) else 0
    s = A.grid.expected(s, A.grid.iterations(60, 0))
    powers, scale = (X, X2, X3, X6), 2.0 ** (exponent - s)
    a, b, c, d, e = (_combined(work, empty_like(A), row, powers, scale) for row in _EIGHTEEN)
    work.product(1, a, c, 1, b)
    return work.product(1, work.add(d, 1, b), b, 1, e), s


def _combined(
    work: Work, Y: DistMatrix, row: Sequence[float], powers: Sequence[DistMatrix], scale: float = 1
) -> DistMatrix:
    """Compute Y := row[0] I + the sum of row[i] scale^k X^k over the powers X, X^2, X^3 and X^6."""
    work.add(Y, 0, powers[0], beta=0)
    for k, factor, power in zip((1, 2, 3, 6), row[1:], powers):
        if factor:
            work.add(Y, factor * scale**k, power)
    return add_to_diagonal(Y, row[0])


def sqrtm(A: DistMatrix, *, assume_a: Literal["gen", "pos"] = "gen", protect: Protection | None = None) -> DistMatrix:
    """Return the principal square root X, X X = A, whose eigenvalues have positive real parts.  Collective.

    A        : DistMatrix (n, n) of type s, d, c or z, without eigenvalues on the negative real axis; A is not changed.
    assume_a : "pos": A is Hermitian and positive definite, and X = H of the polar decomposition L^H = U H, where
               A = L L^H; "gen": Newton's iteration, in the product form of Denman and Beavers.
    protect  : protection of the products, as for `pdgemm`; factorisations, solves and redistributions are not
               protected.

    Returns X in the layout of A, Hermitian for "pos".  Cost: for "pos" a Cholesky factorisation and `polar`; for "gen"
    5 to 15 inverses, and as many products.  `X.report` has the steps and |X X - A|_F / |A|_F.
    Raises LayoutError, DTypeError, ArgumentError or DeviceError on all ranks; LinAlgError where A is not positive
    definite ("pos"), is singular, or has NaN or infinite elements, or the iteration does not converge in 60 steps.
    Higham, Functions of Matrices, 2008, algorithm 6.21 and (6.29).
    """
    work = started("sqrtm", A, protect, assume_a=(assume_a, ("gen", "pos")))
    near, far = near_one("A", A)
    W = A * near * far
    if assume_a == "pos":
        U, H = polar(work.did(cholesky(W)).H, protect=protect)
        work.did(U)
        X, steps = work.did(H.redistribute(empty_like(A))), vars(U.report)["steps"]
    else:
        X, steps = _denman_beavers(work, W)
    residual = work.product(1, X, X, -1, W.copy()).norm() / (W.norm() or 1)
    X *= 1 / sqrt(near)
    X *= 1 / sqrt(far)
    return work.reported(X, steps, residual=residual)


def _denman_beavers(work: Work, A: DistMatrix) -> tuple[DistMatrix, int]:
    """Return sqrt(A) and the number of steps, by Denman and Beavers' product form (Higham 2008, 6.3).  Collective."""
    X, M, spare, change = A.copy(), A.copy(), empty_like(A), inf
    for step in range(60):
        if change <= sqrt(len(A)) * dtypes.eps(A.dtype) or 0 in A.shape:
            return X, step
        N = work.did(inverse(M))
        square = sqrt(N.norm() / M.norm()) if change > 0.1 else 1.0  # mu^2 M and its inverse have the same norm
        scaled = add_to_diagonal(work.add(empty_like(A), 1 / square, N, beta=0), 1)
        work.product(sqrt(square) / 2, X, scaled, C=spare)  # X := mu X (I + (mu^2 M)^-1) / 2
        X, spare = spare, X
        add_to_diagonal(work.add(M, 0.25 / square, N, square / 4), 0.5)  # M := (2 I + mu^2 M + (mu^2 M)^-1) / 4
        last, change = change, add_to_diagonal(work.add(N, 1, M, 0), -1).norm()
        change = A.grid.expected(change, 0.0 if step + 1 >= A.grid.iterations(60, 8) else last / 4)
        if change >= last / 2 and change < dtypes.eps(A.dtype) ** 0.5:  # only rounding errors are left
            return X, step + 1
    raise LinAlgError(
        f"the square root of a matrix ({A.distribution}) did not converge; a real matrix with negative eigenvalues has "
        "no real principal square root"
    )
