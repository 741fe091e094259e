"""Row checksums of a product: C x = alpha A (B x) + beta C0 x, with weights x_j that are hashes of the column indices.

The owners of A, B and C0 compute the right side before the product, and the owners of C the left side after it, so that
errors in panels, messages, sums, buffers of reductions and redistributed copies are detected.
(Huang & Abraham, IEEE Trans. Comput. C-33(6), 1984; if the receiver of a panel computed the checksum of this panel, an
error in the received panel would not be detected.)

Weights have random signs, so that the sums of positive matrices stay small, and absolute values from 1 to 2 of 24
significant bits.  Signs would not suffice: an element of A with an error delta on one rank changes the checksum by
delta sum_j b_kj x_j over this rank's columns j; if all b_kj are equal, weights of +1 and -1 cancel in one of about
sqrt(columns) cases.  Integers have odd weights of 32 bits: an error of one element, times an odd number, is never 0
modulo 2^32.

Rounding errors of row i are of the size of

    tau_i = u sqrt(k + n) sqrt(7/3) (|alpha| sum_k |a_ik| |b_k|_2 + |beta| |c0_i|_2) + underflow errors,

with the rows b_k of B and c0_i of C on entry.  The error of an inner product is u sqrt(k) sum_k |a_ik| |b_kj| by the
statistical model of Higham & Mary (SIAM J. Sci. Comput. 41(5), 2019).  The errors of n columns, times random weights of
root mean square sqrt(7/3), add up to their 2-norm, and sum_k |a_ik| |b_k|_2 bounds this norm by Minkowski's inequality.
The errors of B x, A (B x) and C x are u sqrt(n) |b_k|_2, u sqrt(k) sum_k |a_ik| |b_k|_2 and u sqrt(n) |c_i|_2.
A row of B enters tau_i only if row i of A multiplies it: a tiny or huge row of B does not change other thresholds.
A sum of squares that may have under- or overflown is computed again with scaling (Anderson, ACM Trans. Math. Softw.
44(1), 2017).  A row is wrong if its residual is above CAP tau_i, or far above the residuals of the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from platform import node
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from mpi4py import MPI

from pdgemm.local.arrays import dtypes
from pdgemm.local.arrays.element_functions import hashed
from pdgemm.local.arrays.emulation import EMULATIONS
from pdgemm.local.arrays.folds import vector_norm
from pdgemm.matrix.distmatrix import DistMatrix

CAP = 8.0  # times tau: residuals of correct rows were up to 2.6 for constant matrices, and below 1 for all others
SHARP = 32.0  # times the 95th percentile of residual / tau; the largest of correct rows was 9 times the percentile
_MOST = 95.0  # percent; a median is not enough: rows of sparse matrices, or with few large elements, differ
_ROWS = 64  # fewest rows for which the percentile is used
_EXACT = 2.0**-14  # times tau: rows with smaller residuals are hardly rounded, such as rows of C that hardly change
_ALWAYS = 2.0**-6  # times tau: no row with a smaller residual is wrong, whatever the residuals of the other rows
_SPREAD = (7 / 3) ** 0.5  # root mean square of the weights
_SLAB = 1 << 19  # bytes of a slab, which is read several times while it is in the cache
_STREAM = 0x5EED

Sizes = Callable[[np.ndarray, slice], np.ndarray]  # (slab, slice of its columns) -> sizes of the slab's rows


class Verdict(NamedTuple):
    """Whether C is wrong, the same on all ranks.   rows : the wrong rows.   certain : a residual is above CAP tau."""

    wrong: bool
    certain: bool
    rows: np.ndarray


_OPERAND = {name: np.dtype(name) for name in ("float32", *dtypes.HALF_NAMES)} | {
    "tf32": np.dtype(np.float32),
    **{name: how.sums_dtype for name, how in EMULATIONS.items()},
}
_SQUARES = 1e-280, 1e300  # a sum of squares between these limits has no error by underflow, and no overflow


def _limit(name: str, dtype: np.dtype) -> float:
    """Return a limit of a type: "smallest_subnormal", "smallest_normal" or "max"."""
    return float(getattr(ml_dtypes.finfo(dtype), name))  # type: ignore[no-untyped-call]


def _absolute(part: np.ndarray) -> np.ndarray:
    """Return |a|; for complex numbers |Re a| + |Im a|, which is cheaper and at most sqrt(2) times as large."""
    parts = (part.real, part.imag) if part.dtype.kind == "c" else (part,)
    first, *second = (np.abs(x).astype(np.float64, copy=False) for x in parts)
    return first + second[0] if second else first


def _row_norms(part: np.ndarray, _: slice) -> np.ndarray:
    """Return the 2-norms of rows; a row whose sum of squares may under- or overflow is scaled first."""
    squares = np.zeros(part.shape[0])
    for y in (part.real, part.imag) if part.dtype.kind == "c" else (part,):
        y = y.astype(np.float64, copy=False)
        squares += np.einsum("ij,ij->i", y, y)
    norms, (least, most) = np.sqrt(squares), _SQUARES
    scaled = ~((squares > least) & (squares < most))
    if scaled.any():
        fold = vector_norm(2)
        norms[scaled] = fold.result(fold.local(part[scaled], 1, scaled), 0)
    return norms


def _joined(x: Any, y: Any, _: MPI.Datatype) -> None:
    of_all = np.frombuffer(y)
    np.hypot(np.frombuffer(x), of_all, out=of_all)


_HYPOT = MPI.Op.Create(_joined, commute=True)  # joins the 2-norms of the parts of a row on several ranks


class RowChecksums:
    """The checksums of one product.  Collective over the grid: `begin`, `end` and `changed`.

    buffers : the plan's `ChecksumPlan.buffers`.   compute : the type that operands are rounded to.
    entry : the buffer for a copy of C on entry; None: no copy is made.
    unknown : number of rows of C that could not be compared, because the size of their rounding errors is not known.
    """

    def __init__(
        self,
        alpha: Any,
        matrices: tuple[DistMatrix, DistMatrix, DistMatrix],
        beta: Any,
        buffers: dict[str, np.ndarray],
        accumulate: np.dtype,
        compute: str,
    ) -> None:
        self._alpha, self._beta, (self._A, self._B, self._C) = alpha, beta, matrices
        self._comm, self._vectors, self._exact = matrices[0].grid.comm, buffers, accumulate.kind in "iu"
        entry, C = buffers.get("C on entry"), self._C
        self.entry = None if entry is None else entry.reshape(C.stored.shape, order=C.order)
        self._dtype, self._inner = buffers["C x"].dtype, buffers["B x"].size
        self._reads = alpha != 0 and self._inner > 0
        self.words = self.allreduces = self.unknown = 0
        self._own: list[np.ndarray] = []
        if not self._exact:
            self._bounds(accumulate, compute)

    def _bounds(self, accumulate: np.dtype, compute: str) -> None:
        """Set the factors of rounding errors, and the limits at which numbers may under- or overflow their types."""
        stored, k, n = self._C.dtype, self._inner, max(1, self._C.shape[1])
        of_largest = compute in EMULATIONS and EMULATIONS[compute].scaled
        once = 0.0 if not compute or of_largest else 2 * dtypes.COMPUTE[compute]
        once += dtypes.eps(stored) if stored != accumulate else 0.0
        wide = _SPREAD * (8**0.5 if accumulate.kind == "c" else 1.0)
        unit, size = dtypes.eps(accumulate) / 2, abs(self._alpha)
        self._of_product = wide * (unit * (k + n) ** 0.5 + once)
        # Errors relative to the largest elements of a row of A and a column of B, by the same statistical model.
        self._of_largest = dtypes.COMPUTE[compute] * k / self._of_product * wide if of_largest else 0.0
        self._of_entry = wide * (unit * n**0.5 + once)
        # The errors of products, sums and elements of C that are subnormal numbers.
        least = _limit("smallest_subnormal", accumulate)
        self._lost = 2 * n**0.5 * ((size * k + 2) * least + _limit("smallest_subnormal", stored)) + n * least
        # An operand below the smallest normal number, itself or times alpha, has an error of the size of that number.
        self._scaled = bool(compute) or size < 1
        self._least_operand = _limit("smallest_normal", accumulate) / (min(1.0, size) or 1.0)
        if compute:
            self._least_operand = max(self._least_operand, _limit("smallest_normal", _OPERAND[compute]))
        self._most_operand = _limit("max", _OPERAND[compute]) if compute else np.inf
        self._most_row = _limit("max", accumulate) / (2 * n**0.5)  # norm of a row of B whose checksum does not overflow
        # Above this limit, C or its checksum may overflow its type: then infinity is correct.
        self._most = min(_limit("max", x) for x in (accumulate, stored)) / (8 * n**0.5)

    def begin(self) -> None:
        """Compute this rank's contributions to alpha A (B x) + beta C0 x, and the sizes of rounding errors."""
        (_, (rows_b, cols_b), (rows_c, cols_c)) = (x.indices() for x in (self._A, self._B, self._C))
        whole, norms, sizes = (self._vectors[name] for name in ("B x", "norms", "sizes"))
        whole[:], norms[:], sizes[:] = 0, 0, 0
        self._own = self.parts(self._vectors["own"])
        of_b, of_a, of_c = self._own
        with np.errstate(all="ignore"):
            if self._reads:
                of_b[:], each = self._times(self._B, weights(cols_b, self._exact), self._norms_of_operand, np.hypot)
                whole[rows_b] = of_b
                if norms.size:
                    norms[: self._inner][rows_b] = each
            if self._beta != 0:
                product, each = self._times(self._C, weights(cols_c, self._exact), _row_norms, np.hypot)
                of_c[:] = self._beta * product
                if norms.size:
                    norms[self._inner :][rows_c] = each
            if whole.size:
                self._allreduce(whole)
            if norms.size:
                self._allreduce(norms, _HYPOT)
            if self._reads:
                of_a[:] = self._alpha * self._of_a(whole, norms[: self._inner], sizes)
            if sizes.size:
                self._allreduce(sizes)

    def parts(self, vector: np.ndarray) -> list[np.ndarray]:
        """Cut a vector of this rank's rows of B, of A and of C into these three parts, and return them."""
        of_b, of_a, of_c = (x.stored.shape[0] for x in (self._B, self._A, self._C))
        ends = [of_b, of_b + of_a] if self._reads else [0, 0]
        return [*np.split(vector, ends)[:2], vector[vector.size - of_c :] if self._beta != 0 else vector[:0]]

    def _of_a(self, whole: np.ndarray, norms: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Return A (B x) for this rank's part of A; set sizes[i] := sum_k |a_ik| |b_k|_2 over the part's columns k."""
        rows, cols = self._A.indices()
        if not norms.size:
            return self._times(self._A, whole[cols])[0]
        least = self._least_operand
        known = norms <= self._most_row
        norms = norms + self._of_largest * norms.max(initial=0.0, where=known)
        of_rows = np.where(known, norms + self._C.shape[1] ** 0.5 * least, np.inf)
        of_cols = of_rows[cols]

        def weighed(part: np.ndarray, across: slice) -> np.ndarray:
            absolute = _absolute(part)
            if self._scaled:
                absolute[(absolute > 0) & (absolute < least)] = least
            return self._unless_too_large(absolute, absolute @ of_cols[across])

        product, each = self._times(self._A, whole[cols], weighed)
        sizes[rows] = each if np.isfinite(of_rows).all() else np.inf  # infinity times 0 would be NaN
        return product

    def _norms_of_operand(self, part: np.ndarray, _: slice) -> np.ndarray:
        return self._unless_too_large(part, _row_norms(part, _))

    def _unless_too_large(self, part: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Return the sizes of rows; infinity for a row with an element that may overflow when operands are rounded."""
        if self._most_operand == np.inf:
            return sizes
        return np.where(_absolute(part).max(axis=1) <= self._most_operand, sizes, np.inf)

    def end(self, sharp: bool) -> Verdict:
        """Compare C with its checksums.   sharp : rows with residuals far above most residuals are wrong, too."""
        (rows_a, _), _, (rows_c, cols_c) = (x.indices() for x in (self._A, self._B, self._C))
        residuals, (_, of_a, of_c) = self._vectors["C x"], self._own
        residuals[:] = 0
        with np.errstate(all="ignore"):
            residuals[rows_c] += self._times(self._C, weights(cols_c, self._exact))[0]
            if self._reads:
                residuals[rows_a] -= of_a
            if self._beta != 0:
                residuals[rows_c] -= of_c
            self._allreduce(residuals)
            ratio = self._ratio(residuals)
        limit, rounded = CAP, ratio[(ratio > _EXACT) & (ratio < np.inf)]  # without rows that have no rounding errors
        if sharp and rounded.size >= _ROWS:
            limit = min(CAP, max(_ALWAYS, SHARP * float(np.percentile(rounded, _MOST))))
        flags = np.array([(ratio > limit).any(), (ratio > CAP).any()], np.int32)
        self._allreduce(flags, MPI.MAX)  # all ranks must act alike, even if their results differ
        rows = self._comm.bcast(np.flatnonzero(ratio > limit)) if flags[0] else np.empty(0, np.int64)
        return Verdict(bool(flags[0]), bool(flags[1]), rows)

    def _ratio(self, residuals: np.ndarray) -> np.ndarray:
        """Return |residual| / tau of each row of C; 0 for rows that cannot be compared, which `unknown` counts."""
        if self._exact:
            return np.where(residuals.astype(np.int32) == 0, 0.0, np.inf)  # modulo 2^32, like the product
        alpha, beta, tau, most = abs(self._alpha), abs(self._beta), self._lost, np.zeros(1)
        if self._reads:
            sizes = self._vectors["sizes"]
            tau, most = tau + self._of_product * alpha * sizes, most + max(1.0, alpha) * sizes
        if beta != 0:
            sizes = self._vectors["norms"][self._inner :]
            tau, most = tau + self._of_entry * beta * sizes, most + max(1.0, beta) * sizes
        ratio = np.abs(residuals) / tau
        unknown = ~np.isfinite(tau) | (~np.isfinite(ratio) & ~(most < self._most))
        self.unknown = int(unknown.sum())
        return np.where(unknown, 0.0, np.where(np.isnan(ratio), np.inf, ratio))

    def changed(self) -> str:
        """Return the ranks whose part of A or B has changed since `begin`, as text; the empty string if none has."""
        before = [x.copy() for x in self._own[:2]]
        if not self._reads:
            return ""
        (_, cols_a), (_, cols_b), whole = self._A.indices(), self._B.indices(), self._vectors["B x"]
        now_b = self._times(self._B, weights(cols_b, self._exact))[0]
        now_a = self._alpha * self._times(self._A, whole[cols_a])[0]  # with the same B x
        mine = [name for name, x, y in zip("BA", before, (now_b, now_a)) if x.tobytes() != y.astype(x.dtype).tobytes()]
        changes = self._comm.allgather((mine, node()))
        texts = [f"{' and '.join(x)} on rank {rank} on {host}" for rank, (x, host) in enumerate(changes) if x]
        return ", ".join(texts)

    def _times(
        self, X: DistMatrix, x: np.ndarray, sizes: Sizes | None = None, join: np.ufunc = np.add
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the product of this rank's part of X with x, and the sizes of the part's rows.

        sizes : is called with each slab of the part and the slice of its columns; returns the sizes of the slab's rows.
        join  : joins the sizes of a row in several slabs.
        """
        local, conjugated = X.stored, X.conjugated
        rows = local.shape[0]
        product, each = np.zeros(rows, self._dtype), np.zeros(rows)
        x = x.astype(self._dtype, copy=False)
        x = x.conj() if conjugated else x
        with np.errstate(all="ignore"):
            for along, across in _slabs(local):
                part = local[along, across].astype(self._dtype, copy=False)
                product[along] += part @ x[across]
                if sizes is not None and part.size and not self._exact:
                    each[along] = join(each[along], sizes(part, across))
        return (product.conj() if conjugated else product), each

    def _allreduce(self, x: np.ndarray, op: MPI.Op = MPI.SUM) -> None:
        self._comm.Allreduce(MPI.IN_PLACE, x, op)
        self.words += x.size
        self.allreduces += 1


def ranks_and_nodes(ranks: list[tuple[bool, str]]) -> str:
    """Return the ranks with a true flag, and their nodes, as text; the empty string if there are none."""
    names = [f"rank {rank} on {host}" for rank, (true, host) in enumerate(ranks) if true]
    return " or ".join(names[:4]) + (f" or {len(names) - 4} others" if len(names) > 4 else "")


def weights(indices: np.ndarray, exact: bool = False) -> np.ndarray:
    """Return the weights x_j for global indices j.   exact : the weights are odd integers.

    Otherwise they are numbers of random sign with 1 <= |x_j| < 2, and with 24 significant bits, which float32 has.
    """
    bits = hashed(indices, np.zeros(1, np.int64), 0, _STREAM)
    if exact:
        return (bits >> np.uint64(32) | np.uint64(1)).astype(np.int64)
    signs = 1.0 - 2.0 * (bits >> np.uint64(63)).astype(np.float64)
    return signs * (1.0 + (bits >> np.uint64(40) & np.uint64(2**23 - 1)).astype(np.float64) * 2.0**-23)


def _slabs(local: np.ndarray) -> Iterator[tuple[slice, slice]]:
    """Yield the row and column slices of slabs of contiguous rows or columns of an array."""
    (rows, cols), size = local.shape, max(1, local.itemsize)
    by_columns = local.strides[0] < local.strides[1]
    lines, length = (cols, rows) if by_columns else (rows, cols)
    step = max(1, _SLAB // (size * max(1, length)))
    for first in range(0, lines, step):
        slab = slice(first, min(lines, first + step))
        yield (slice(0, rows), slab) if by_columns else (slab, slice(0, cols))
