"""Row checksums of a product: C x = alpha A (B x) + beta C0 x, with weights x_j that are hashes of the columns.

The right side is computed from A and B where their owners hold them, and the left side from C as it is at the end: so
whatever happens to panels and messages on their way, to sums, buffers of reductions and redistributed copies, is seen.
(Huang & Abraham, IEEE Trans. Comput. C-33(6), 1984; checksums of a panel that its receiver makes would not see that it
arrived with an error.)

Weights have random signs, so that the sums of positive matrices stay small, and 24 random bits from 1 to 2.  Signs
alone would not do: an element of A that arrives wrong at a rank makes an error of delta sum_j b_kj x_j over this rank's
columns j, and where b_kj is the same for all of them, +1 and -1 cancel in one of about sqrt(columns) cases.  Integers
have odd weights of 32 bits: an error of one element, times an odd number, is never 0 modulo 2^32.

Rounding errors of row i are of the size of

    tau_i = u sqrt(k + n) sqrt(7/3) (|alpha| sum_k |a_ik| |b_k|_2 + |beta| |c0_i|_2) + what is lost in small numbers,

with the rows b_k of B and c0_i of C on entry.  For the errors of an inner product are u sqrt(k) sum_k |a_ik| |b_kj| by
the statistical model of Higham & Mary (SIAM J. Sci. Comput. 41(5), 2019), those of n columns with random weights, whose
root mean square is sqrt(7/3), add up to their 2-norm, and this is at most sum_k |a_ik| |b_k|_2 by the inequality of
Minkowski.  Those of B x, A (B x) and C x are u sqrt(n) |b_k|_2, u sqrt(k) sum_k |a_ik| |b_k|_2 and u sqrt(n) |c_i|_2.
Each row of B counts where A multiplies it, so that a tiny or a huge one has no part in the others' thresholds.
No square enters a sum before it is known that it is a number (Anderson, ACM Trans. Math. Softw. 44(1), 2017).
A row is wrong if its residual is above CAP tau_i, or far above those of the other rows.
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
from pdgemm.local.arrays.folds import vector_norm
from pdgemm.matrix.distmatrix import DistMatrix

CAP = 8.0  # times tau: clean residuals were up to 2.6, of constant matrices, and else below 1
SHARP = 32.0  # times what 95% of the rows keep to in residual / tau; of clean ones the largest was 9 times it
_MOST = 95.0  # percent; a median is not enough: rows of a sparse matrix, or of one with few large elements, differ
_ROWS = 64  # of which that says something
_EXACT = (
    2.0**-14
)  # times tau: rows below have hardly been rounded, as those of C on entry to which next to nothing is added
_ALWAYS = 2.0**-6  # times tau: no row below is wrong, whatever the others are
_SPREAD = (7 / 3) ** 0.5  # root mean square of the weights
_SLAB = 1 << 19  # bytes of a matrix that are used several times while they are in the cache
_STREAM = 0x5EED

Sizes = Callable[[np.ndarray, slice], np.ndarray]  # of some rows and columns, and the slice of these columns


class Verdict(NamedTuple):
    """Whether C is wrong, the same on all ranks.   rows : that are.   certain : beyond CAP, not only unlike others."""

    wrong: bool
    certain: bool
    rows: np.ndarray


_OPERAND = {name: dtypes.element_type("float32" if name == "tf32" else name) for name in dtypes.COMPUTE}
_SQUARES = 1e-280, 1e300  # a sum of squares between these has lost nothing to underflow, and none has overflown


def _least(dtype: np.dtype) -> float:
    return float(ml_dtypes.finfo(dtype).smallest_subnormal)  # type: ignore[no-untyped-call]


def _least_normal(dtype: np.dtype) -> float:
    return float(ml_dtypes.finfo(dtype).smallest_normal)  # type: ignore[no-untyped-call]


def _most(dtype: np.dtype) -> float:
    return float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]


def _absolute(part: np.ndarray) -> np.ndarray:
    """Return |a|, of complex numbers |Re a| + |Im a|, which is up to sqrt(2) times as much and costs less."""
    parts = (part.real, part.imag) if part.dtype.kind == "c" else (part,)
    first, *second = (np.abs(x).astype(np.float64, copy=False) for x in parts)
    return first + second[0] if second else first


def _row_norms(part: np.ndarray, _: slice) -> np.ndarray:
    """Return the 2-norms of rows; those whose squares are too large or too small for numbers are scaled first."""
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


_HYPOT = MPI.Op.Create(_joined, commute=True)  # of the 2-norms of parts of rows that ranks have


class RowChecksums:
    """The checksums of one product.  All methods are collective over the grid, but for `parts`.

    vectors : those of the plan ("B x", "own", "C x", "norms", "sizes").   compute : the type that operands are
    rounded to.
    unknown : rows of C that could not be compared, because nobody knows how large their rounding errors may be.
    """

    def __init__(
        self,
        alpha: Any,
        matrices: tuple[DistMatrix, DistMatrix, DistMatrix],
        beta: Any,
        vectors: dict[str, np.ndarray],
        accumulate: np.dtype,
        compute: str,
    ) -> None:
        self._alpha, self._beta, (self._A, self._B, self._C) = alpha, beta, matrices
        self._comm, self._vectors, self._exact = matrices[0].grid.comm, vectors, accumulate.kind in "iu"
        self._dtype, self._inner = vectors["C x"].dtype, vectors["B x"].size
        self._reads = alpha != 0 and self._inner > 0
        self.words = self.allreduces = self.unknown = 0
        self._own: list[np.ndarray] = []
        if not self._exact:
            self._bounds(accumulate, compute)

    def _bounds(self, accumulate: np.dtype, compute: str) -> None:
        """Set what rounding errors are relative to, and where numbers become too small or too large for their types."""
        stored, k, n = self._C.dtype, self._inner, max(1, self._C.shape[1])
        once = 0.0 if not compute else 2 * dtypes.COMPUTE[compute]
        once += dtypes.eps(stored) if stored != accumulate else 0.0
        wide = _SPREAD * (8**0.5 if accumulate.kind == "c" else 1.0)
        unit, size = dtypes.eps(accumulate) / 2, abs(self._alpha)
        self._of_product = wide * (unit * (k + n) ** 0.5 + once)
        self._of_entry = wide * (unit * n**0.5 + once)
        # What products, sums and elements of C lose where they are no normal numbers.
        least = _least(accumulate)
        self._lost = 2 * n**0.5 * ((size * k + 2) * least + _least(stored)) + n * least
        # Operands lose as much below the least normal number as there, also where alpha makes them so small.
        self._scaled = bool(compute) or size < 1
        self._least_operand = _least_normal(accumulate) / (min(1.0, size) or 1.0)
        if compute:
            self._least_operand = max(self._least_operand, _least_normal(_OPERAND[compute]))
        self._most_operand = _most(_OPERAND[compute]) if compute else np.inf
        self._most_row = _most(accumulate) / (2 * n**0.5)  # of B, whose checksum is a number of this type
        # Above this, C or its checksum may be too large for its type: then infinity is as it should be.
        self._most = min(map(_most, (accumulate, stored))) / (8 * n**0.5)

    def begin(self) -> None:
        """Compute alpha A (B x) + beta C0 x, as far as this rank has rows of it, and how large rounding errors are."""
        (_, (rows_b, cols_b), (rows_c, cols_c)) = (x.indices() for x in (self._A, self._B, self._C))
        whole, norms, sizes = (self._vectors[name] for name in ("B x", "norms", "sizes"))
        whole[:], norms[:], sizes[:] = 0, 0, 0
        self._own = self.parts(self._vectors["own"])
        of_b, of_a, of_c = self._own
        with np.errstate(all="ignore"):
            if self._reads:
                of_b[:], each = self._times(self._B, self._weights(cols_b), self._norms_of_operand, np.hypot)
                whole[rows_b] = of_b
                if norms.size:
                    norms[: self._inner][rows_b] = each
            if self._beta != 0:
                product, each = self._times(self._C, self._weights(cols_c), _row_norms, np.hypot)
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
        """Return the parts of a vector for this rank's rows of B, A and C."""
        of_b, of_a, of_c = (x.stored.shape[0] for x in (self._B, self._A, self._C))
        ends = [of_b, of_b + of_a] if self._reads else [0, 0]
        return [*np.split(vector, ends)[:2], vector[vector.size - of_c :] if self._beta != 0 else vector[:0]]

    def _of_a(self, whole: np.ndarray, norms: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Return A (B x) for this rank's part of A; set sizes[i] := sum_k |a_ik| |b_k|_2 over its columns."""
        rows, cols = self._A.indices()
        if not norms.size:
            return self._times(self._A, whole[cols])[0]
        least = self._least_operand
        of_rows = np.where(norms <= self._most_row, norms + self._C.shape[1] ** 0.5 * least, np.inf)
        of_cols = of_rows[cols]

        def weighed(part: np.ndarray, across: slice) -> np.ndarray:
            absolute = _absolute(part)
            if self._scaled:
                absolute[(absolute > 0) & (absolute < least)] = least
            return self._unless_too_large(absolute, absolute @ of_cols[across])

        product, each = self._times(self._A, whole[cols], weighed)
        sizes[rows] = each if np.isfinite(of_rows).all() else np.inf  # infinity times 0 is no number, either
        return product

    def _norms_of_operand(self, part: np.ndarray, _: slice) -> np.ndarray:
        return self._unless_too_large(part, _row_norms(part, _))

    def _unless_too_large(self, part: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Return the sizes of rows, infinity where an element may overflow when operands are rounded."""
        if self._most_operand == np.inf:
            return sizes
        return np.where(_absolute(part).max(axis=1) <= self._most_operand, sizes, np.inf)

    def end(self, sharp: bool) -> Verdict:
        """Compare C with what was expected.   sharp : rows that differ from the others are wrong, too."""
        (rows_a, _), _, (rows_c, cols_c) = (x.indices() for x in (self._A, self._B, self._C))
        found, (_, of_a, of_c) = self._vectors["C x"], self._own
        found[:] = 0
        with np.errstate(all="ignore"):
            found[rows_c] += self._times(self._C, self._weights(cols_c))[0]
            if self._reads:
                found[rows_a] -= of_a
            if self._beta != 0:
                found[rows_c] -= of_c
            self._allreduce(found)
            ratio = self._ratio(found)
        limit, rounded = CAP, ratio[(ratio > _EXACT) & (ratio < np.inf)]  # rows without rounding errors say nothing
        if sharp and rounded.size >= _ROWS:
            limit = min(CAP, max(_ALWAYS, SHARP * float(np.percentile(rounded, _MOST))))
        told = np.array([(ratio > limit).any(), (ratio > CAP).any()], np.int32)
        self._allreduce(told, MPI.MAX)  # all ranks do the same, whatever they have computed
        rows = self._comm.bcast(np.flatnonzero(ratio > limit)) if told[0] else np.empty(0, np.int64)
        return Verdict(bool(told[0]), bool(told[1]), rows)

    def _ratio(self, residuals: np.ndarray) -> np.ndarray:
        """Return the residual of each row of C over tau; 0 for rows that cannot be compared, which are counted."""
        if self._exact:
            return np.where(residuals.astype(np.int32) == 0, 0.0, np.inf)  # modulo 2^32, as the product is
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

    @property
    def residual(self) -> bytes:
        """The bits of C x - (alpha A (B x) + beta C0 x) as `end` has left it."""
        return self._vectors["C x"].tobytes()

    def where(self, rows: np.ndarray) -> str:
        """Name the ranks whose part of C may be wrong, and their nodes."""
        m, n = self._C.shape
        columns = np.zeros(n, self._dtype)
        of_rows = self._weights(np.arange(m))
        (rows_c, cols_c), (rows_a, cols_a), (rows_b, cols_b) = (x.indices() for x in (self._C, self._A, self._B))
        columns[cols_c] += self._times(self._C.T, of_rows[rows_c])[0]
        if self._reads:
            whole = np.zeros(self._A.shape[1], self._dtype)
            whole[cols_a] += self._times(self._A.T, of_rows[rows_a])[0]
            self._comm.Allreduce(MPI.IN_PLACE, whole, MPI.SUM)
            columns[cols_b] -= self._alpha * self._times(self._B.T, whole[rows_b])[0]
        self._comm.Allreduce(MPI.IN_PLACE, columns, MPI.SUM)
        with np.errstate(all="ignore"):
            far = ~(np.abs(columns) <= SHARP * np.percentile(np.abs(columns), _MOST, method="lower"))
        if self._beta != 0 or not far.any():  # C on entry is gone, or all columns are wrong
            far[:] = True
        mine = np.isin(rows_c, rows).any() and far[cols_c].any()
        return ranks_and_nodes(self._comm.allgather((bool(mine), node())))

    def changed(self) -> str:
        """Name the ranks whose part of A or B is not what it was when the product began; nothing if there are none."""
        before = [x.copy() for x in self._own[:2]]
        if not self._reads:
            return ""
        (_, cols_a), (_, cols_b), whole = self._A.indices(), self._B.indices(), self._vectors["B x"]
        now_b = self._times(self._B, self._weights(cols_b))[0]
        now_a = self._alpha * self._times(self._A, whole[cols_a])[0]  # with the same B x
        mine = [name for name, x, y in zip("BA", before, (now_b, now_a)) if x.tobytes() != y.astype(x.dtype).tobytes()]
        told = self._comm.allgather((mine, node()))
        found = [f"{' and '.join(x)} on rank {rank} on {host}" for rank, (x, host) in enumerate(told) if x]
        return ", ".join(found)

    def _weights(self, indices: np.ndarray) -> np.ndarray:
        return weights(indices, self._exact)

    def _times(
        self, X: DistMatrix, x: np.ndarray, sizes: Sizes | None = None, join: np.ufunc = np.add
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the product of this rank's part with x, and what `sizes` says of its rows, joined over slabs.

        sizes : is called with some rows and columns, and with the slice of these columns.
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
    """Return the ranks of which something is true, and their nodes, as text; the empty string if it is true of none."""
    names = [f"rank {rank} on {host}" for rank, (true, host) in enumerate(ranks) if true]
    return " or ".join(names[:4]) + (f" or {len(names) - 4} others" if len(names) > 4 else "")


def weights(indices: np.ndarray, exact: bool = False) -> np.ndarray:
    """Return x_j for global indices: +-1 to +-2 with 24 significant bits, which float32 has; or odd integers."""
    bits = hashed(indices, np.zeros(1, np.int64), 0, _STREAM)
    if exact:
        return (bits >> np.uint64(32) | np.uint64(1)).astype(np.int64)
    signs = 1.0 - 2.0 * (bits >> np.uint64(63)).astype(np.float64)
    return signs * (1.0 + (bits >> np.uint64(40) & np.uint64(2**23 - 1)).astype(np.float64) * 2.0**-23)


def _slabs(local: np.ndarray) -> Iterator[tuple[slice, slice]]:
    """Yield the array in slabs of contiguous lines."""
    (rows, cols), size = local.shape, max(1, local.itemsize)
    by_columns = local.strides[0] < local.strides[1]
    lines, length = (cols, rows) if by_columns else (rows, cols)
    step = max(1, _SLAB // (size * max(1, length)))
    for first in range(0, lines, step):
        slab = slice(first, min(lines, first + step))
        yield (slice(0, rows), slab) if by_columns else (slab, slice(0, cols))
