"""Row checksums of a product: C x = alpha A (B x) + beta C0 x for x_j = +-1, by a hash of the column.

The right side is computed from A and B where their owners hold them, and the left side from C as it is at the end: so
whatever happens to panels and messages on their way, to sums, buffers of reductions and redistributed copies, is seen.
(Huang & Abraham, IEEE Trans. Comput. C-33(6), 1984; checksums of a panel that its receiver makes would not see that it
arrived with an error.)

Rounding errors of row i are of the size of tau_i = u sqrt(k + n) |alpha| |a_i| |B|_F + ..., by the statistical model of
Higham & Mary (SIAM J. Sci. Comput. 41(5), 2019).  They are +-1, so that their sums stay small for positive matrices.
A row is wrong if its residual is above CAP tau_i, or far above those of the other rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from platform import node
from time import perf_counter
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from mpi4py import MPI

from pdgemm.arrays import dtypes
from pdgemm.arrays.element_functions import hashed
from pdgemm.errors import CorruptionError
from pdgemm.instrument.check_report import CheckReport, Checks
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.protection.checksum import REPEATS
from pdgemm.support.files import say

CAP = 8.0  # times tau: clean residuals were up to 2.5, of constant matrices, and mostly below 0.4
SHARP = 32.0  # times what 95% of the rows keep to in residual / tau; of clean ones the largest was 11 times it
_MOST = 95.0  # percent; a median is not enough: rows of a sparse matrix, or of one with few large elements, differ
_ROWS = 64  # of which that says something
_SLAB = 1 << 19  # bytes of a matrix that are used several times while they are in the cache
_STREAM = 0x5EED


class Verdict(NamedTuple):
    """Whether C is wrong, the same on all ranks.   rows : that are.   certain : beyond CAP, not only unlike others."""

    wrong: bool
    certain: bool
    rows: np.ndarray


_OPERAND = {name: dtypes.element_type("float32" if name == "tf32" else name) for name in dtypes.COMPUTE}
_TINY = 1e-290  # of a residual: squares of smaller numbers are no longer numbers


def _least(dtype: np.dtype) -> float:
    return float(ml_dtypes.finfo(dtype).smallest_subnormal)  # type: ignore[no-untyped-call]


def _most(dtype: np.dtype) -> float:
    return np.inf if dtype.kind in "iu" else float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]


def _known(squares: np.ndarray, product: np.ndarray) -> np.ndarray:
    """Return sums of squares; infinity where they say nothing: numbers are too small, or the product is none."""
    tiny = (squares < _TINY) & (product != 0)
    return np.where(np.isfinite(product) & ~tiny, squares, np.inf)


class RowChecksums:
    """The checksums of one product.  All methods are collective over the grid, but for `parts`.

    room : the vectors of the plan ("B x", "own", "C x", "squares").   compute : the type that operands are rounded to.
    """

    def __init__(
        self,
        alpha: Any,
        matrices: tuple[DistMatrix, DistMatrix, DistMatrix],
        beta: Any,
        room: dict[str, np.ndarray],
        accumulate: np.dtype,
        compute: str,
    ) -> None:
        self._alpha, self._beta, (self._A, self._B, self._C) = alpha, beta, matrices
        self._comm, self._room, self._exact = matrices[0].grid.comm, room, accumulate.kind in "iu"
        self._dtype, k, n = room["C x"].dtype, matrices[0].shape[1], matrices[2].shape[1]
        self._reads = alpha != 0 and k > 0
        types = accumulate, self._C.dtype, *([_OPERAND[compute]] if compute else ())
        once = 0.0 if not compute else 2 * dtypes.COMPUTE[compute]
        once += dtypes.eps(self._C.dtype) if self._C.dtype != accumulate else 0.0
        wide = 8**0.5 if accumulate.kind == "c" else 1.0
        unit, least = dtypes.eps(accumulate) / 2, [0.0 if self._exact else _least(x) for x in types]
        self._of_product = wide * (unit * (k + n) ** 0.5 + once)
        self._of_entry = wide * (unit * n**0.5 + once)
        # what is lost where numbers become too small: of products and sums, and of operands that are rounded
        self._lost = 4 * (abs(alpha) * k + n) * least[0] + 4 * n * least[1] + _TINY
        self._lost_of_operands = 4 * abs(alpha) * n**0.5 * (least[2] if compute else 0.0)
        # from here on they may be too large for a type: then infinity is as it should be
        self._most = min(_most(x) for x in types[:2]) / (8 * max(1, n) ** 0.5) if not self._exact else np.inf
        self._most_of_operands = _most(types[2]) if compute else np.inf
        self.words = self.allreduces = self.unknown = 0
        self._own: list[np.ndarray] = []

    def begin(self) -> None:
        """Compute alpha A (B x) + beta C0 x, as far as this rank has rows of it, and how large rounding errors are."""
        (rows_a, cols_a), (rows_b, cols_b), (rows_c, cols_c) = (x.indices() for x in (self._A, self._B, self._C))
        whole, squares, m = self._room["B x"], self._room["squares"], self._C.shape[0]
        squares[:], whole[:] = 0, 0
        self._own = self.parts(self._room["own"])
        of_b, of_a, of_c = self._own
        with np.errstate(all="ignore"):
            if self._reads:
                of_b[:], each = self._times(self._B, _signs(cols_b), squares=True)
                squares[m] = _known(each, of_b).sum()
                whole[rows_b] = of_b
            if whole.size:
                self._allreduce(whole)
            if self._reads:
                product, each = self._times(self._A, whole[cols_a], squares=True)
                of_a[:] = self._alpha * product
                squares[:m][rows_a] += _known(each, of_a)
            if self._beta != 0:
                product, each = self._times(self._C, _signs(cols_c), squares=True)
                of_c[:] = self._beta * product
                squares[m + 1 :][rows_c] += _known(each, of_c)
        self._allreduce(squares)

    def parts(self, room: np.ndarray) -> list[np.ndarray]:
        """Return the parts of a vector for this rank's rows of B, A and C."""
        of_b, of_a, of_c = (x.stored.shape[0] for x in (self._B, self._A, self._C))
        ends = [of_b, of_b + of_a] if self._reads else [0, 0]
        return [*np.split(room, ends)[:2], room[room.size - of_c :] if self._beta != 0 else room[:0]]

    def end(self, sharp: bool) -> Verdict:
        """Compare C with what was expected.   sharp : rows that differ from the others are wrong, too."""
        (rows_a, _), _, (rows_c, cols_c) = (x.indices() for x in (self._A, self._B, self._C))
        found, (_, of_a, of_c), squares, m = self._room["C x"], self._own, self._room["squares"], self._C.shape[0]
        found[:] = 0
        with np.errstate(all="ignore"):
            found[rows_c] += self._times(self._C, _signs(cols_c))[0]
            if self._reads:
                found[rows_a] -= of_a
            if self._beta != 0:
                found[rows_c] -= of_c
            self._allreduce(found)
            rows, of_b = (np.sqrt(squares[:m]), np.sqrt(squares[m])) if self._reads else (np.zeros(m), 0.0)
            size = abs(self._alpha) * rows * of_b
            tau = self._of_product * size + self._lost_of_operands * (rows + of_b) + self._lost
            operands = np.maximum(rows, of_b)
            if self._beta != 0:
                entry = abs(self._beta) * np.sqrt(squares[m + 1 :])
                tau, size = tau + self._of_entry * entry, size + entry
            if self._exact:
                ratio = np.where(found.astype(np.int32) == 0, 0.0, np.inf)  # modulo 2^32, as the product is
            else:
                ratio = np.abs(found) / tau
                unknown = ~np.isfinite(tau)  # NaN or infinity in the operands, or numbers whose squares are none
                unknown |= ~np.isfinite(ratio) & ~((size < self._most) & (operands < self._most_of_operands))
                ratio = np.where(unknown, 0.0, np.where(np.isnan(ratio), np.inf, ratio))
                self.unknown = int(unknown.sum())
        limit, rounded = CAP, ratio[(ratio > 0) & (ratio < np.inf)]  # rows without rounding errors say nothing
        if sharp and rounded.size >= _ROWS:
            limit = min(CAP, SHARP * float(np.percentile(rounded, _MOST)))
        told = np.array([(ratio > limit).any(), (ratio > CAP).any()], np.int32)
        self._allreduce(told, MPI.MAX)  # all ranks do the same, whatever they have computed
        rows = self._comm.bcast(np.flatnonzero(ratio > limit)) if told[0] else np.empty(0, np.int64)
        return Verdict(bool(told[0]), bool(told[1]), rows)

    @property
    def residual(self) -> bytes:
        """The bits of C x - (alpha A (B x) + beta C0 x) as `end` has left it."""
        return self._room["C x"].tobytes()

    def where(self, rows: np.ndarray) -> str:
        """Name the ranks whose part of C may be wrong, and their nodes."""
        m, n = self._C.shape
        columns = np.zeros(n, self._dtype)
        weights = _signs(np.arange(m))
        (rows_c, cols_c), (rows_a, cols_a), (rows_b, cols_b) = (x.indices() for x in (self._C, self._A, self._B))
        columns[cols_c] += self._times(self._C.T, weights[rows_c])[0]
        if self._reads:
            whole = np.zeros(self._A.shape[1], self._dtype)
            whole[cols_a] += self._times(self._A.T, weights[rows_a])[0]
            self._comm.Allreduce(MPI.IN_PLACE, whole, MPI.SUM)
            columns[cols_b] -= self._alpha * self._times(self._B.T, whole[rows_b])[0]
        self._comm.Allreduce(MPI.IN_PLACE, columns, MPI.SUM)
        with np.errstate(all="ignore"):
            far = ~(np.abs(columns) <= SHARP * np.percentile(np.abs(columns), _MOST, method="lower"))
        if self._beta != 0 or not far.any():  # C on entry is gone, or all columns are wrong
            far[:] = True
        mine = np.isin(rows_c, rows).any() and far[cols_c].any()
        told = self._comm.allgather((bool(mine), node()))
        named = [f"rank {rank} on {host}" for rank, (wrong, host) in enumerate(told) if wrong]
        return " or ".join(named[:4]) + (f" or {len(named) - 4} others" if len(named) > 4 else "")

    def changed(self) -> str:
        """Name the ranks whose part of A or B is not what it was when the product began; nothing if there are none."""
        before = [x.copy() for x in self._own[:2]]
        if not self._reads:
            return ""
        (_, cols_a), (_, cols_b), whole = self._A.indices(), self._B.indices(), self._room["B x"]
        now_b = self._times(self._B, _signs(cols_b))[0]
        now_a = self._alpha * self._times(self._A, whole[cols_a])[0]  # with the same B x
        mine = [name for name, x, y in zip("BA", before, (now_b, now_a)) if x.tobytes() != y.astype(x.dtype).tobytes()]
        told = self._comm.allgather((mine, node()))
        found = [f"{' and '.join(x)} on rank {rank} on {host}" for rank, (x, host) in enumerate(told) if x]
        return ", ".join(found)

    def _times(self, X: DistMatrix, x: np.ndarray, squares: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return the product of this rank's part with x, and the sums of squares of its rows."""
        local, conjugated = X.stored, X.conjugated
        rows = local.shape[0]
        product, each = np.zeros(rows, self._dtype), np.zeros(rows)
        x = x.astype(self._dtype, copy=False)
        x = x.conj() if conjugated else x
        with np.errstate(all="ignore"):
            for along, across in _slabs(local):
                part = local[along, across].astype(self._dtype, copy=False)
                product[along] += part @ x[across]
                if squares:
                    for y in (part.real, part.imag) if part.dtype.kind == "c" else (part,):
                        y = y.astype(np.float64, copy=False)
                        each[along] += np.einsum("ij,ij->i", y, y)
        return (product.conj() if conjugated else product), each

    def _allreduce(self, x: np.ndarray, op: MPI.Op = MPI.SUM) -> None:
        self._comm.Allreduce(MPI.IN_PLACE, x, op)
        self.words += x.size
        self.allreduces += 1


def _signs(indices: np.ndarray) -> np.ndarray:
    """Return +1 or -1 for each global index."""
    bits = hashed(indices, np.zeros(1, np.int64), 0, _STREAM) >> np.uint64(63)
    return 1.0 - 2.0 * bits.astype(np.float64)


def _slabs(local: np.ndarray) -> Iterator[tuple[slice, slice]]:
    """Yield the array in slabs of contiguous lines."""
    (rows, cols), size = local.shape, max(1, local.itemsize)
    by_columns = local.strides[0] < local.strides[1]
    lines, length = (cols, rows) if by_columns else (rows, cols)
    step = max(1, _SLAB // (size * max(1, length)))
    for first in range(0, lines, step):
        slab = slice(first, min(lines, first + step))
        yield (slice(0, rows), slab) if by_columns else (slab, slice(0, cols))


def protected(
    run: Callable[[], object],
    C: DistMatrix,
    checks: RowChecksums,
    repair: bool,
    planned: Checks,
    entry: np.ndarray | None,
) -> CheckReport:
    """Run a product, and compare C with its checksums; repeat it if it is wrong.  Collective.

    repair : else a wrong product raises at once.   entry : room for a copy of C on entry; None: it is not read.

    Raises CorruptionError on all ranks.
    """
    start, comm, before = perf_counter(), C.grid.comm, b""
    if repair and entry is not None:
        entry[...] = C.stored
    checks.begin()
    seconds = perf_counter() - start
    for repeats in range(REPEATS + 1):
        run()
        start = perf_counter()
        found = checks.end(sharp=repair)
        seconds += perf_counter() - start
        if not found.wrong:
            break
        same = comm.allreduce(checks.residual == before, MPI.LAND)
        if not found.certain and (same or repeats == REPEATS):  # rounding errors that are larger than those of others
            break
        before = checks.residual
        rows = f"{found.rows.size} of {C.shape[0]} rows of C are wrong, row {min(found.rows, default=0)} first"
        if changed := checks.changed():
            raise CorruptionError(f"{changed} changed in memory while it was multiplied ({rows}): read it again")
        at = f"a bit has flipped on {checks.where(found.rows)} ({rows})"
        if not repair:
            raise CorruptionError(f"{at}; protect='repair' would have repeated the product")
        if same or repeats == REPEATS:
            how = "twice in the same way" if same else f"in {REPEATS + 1} runs"
            raise CorruptionError(f"{at}, {how}: take that node out of the job")
        if comm.rank == 0:
            say(f"{at}; the product is repeated")
        if entry is not None:
            C.stored[...] = entry
    counted = Checks(checks.words, checks.allreduces, planned.bytes)
    return CheckReport(counted, planned, seconds, repeats, checks.unknown)
