"""The checksum of a matrix, the same for every distribution, and products that are repeated if row checksums differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from platform import node
from time import perf_counter

import numpy as np
from mpi4py import MPI

from pdgemm.algorithms.protection.row_checksums import RowChecksums, ranks_and_nodes
from pdgemm.errors import CorruptionError
from pdgemm.instrument.report import CheckReport, Checks
from pdgemm.local.arrays.device import Array, beside, of, to_host
from pdgemm.local.arrays.element_functions import hashed, slabs
from pdgemm.matrix.argument_checks import check_matrices, communicator
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.support.agreement import together
from pdgemm.support.files import say

REPEATS = 3
_KIND = "mixed64"
_MOST = 1 << 18  # rows or columns that are hashed at a time
_ON_DEVICE = 1 << 22  # elements that a device hashes at a time


def checksum(matrix: DistMatrix) -> str:
    """Return sum_ij u_i v_j b(a_ij) mod 2^64 as text, with odd hashes u_i, v_j of i and j.  Collective over the grid.

    b(a) = bits(a) xor bits(a) / 2^32 mixes the high bits into the low bits: otherwise the checksum would not detect an
    even number of changed signs, as 2 u v 2^63 = 0 mod 2^64.

    The checksum is the same for any layout on any number of ranks, also in a file that `io.hdf5.save` wrote.  A change
    of a single element is always detected (an odd factor has an inverse mod 2^64), an exchange of elements, rows or
    columns with probability 1 - 2^-64, approximately.  Elements are read once, on the host or on their device.
    """
    with together(communicator(matrix=matrix)) as description:
        check_matrices(matrix=matrix)
        description += ["checksum", matrix.shape, matrix.dtype]
    return text(matrix.grid.comm, local_sum(matrix))


def checksums(comm: MPI.Comm, matrices: Sequence[DistMatrix]) -> list[str]:
    """Return the `checksum` of each matrix, by one reduction.  Collective over `comm`, the ranks of all matrices."""
    with together(comm):
        totals = [local_sum(matrix) for matrix in matrices]
    return texts(comm, np.concatenate(totals))


def local_sum(matrix: DistMatrix) -> np.ndarray:
    """Return this rank's part of the checksum of a matrix."""
    local, (i, j), total = matrix.local, matrix.grid.coords, zero()
    for cols in slabs(local.shape[1], 1, _MOST):
        for rows in slabs(local.shape[0], 1, _MOST):
            row_numbers = matrix.distribution.rows.to_global(np.arange(rows.start, rows.stop), i)
            col_numbers = matrix.distribution.cols.to_global(np.arange(cols.start, cols.stop), j)
            total += bilinear(local[rows, cols], row_numbers, col_numbers)
    return total


def repaired(X: DistMatrix, Y: DistMatrix, expected: str, again: Callable[[], object] | None) -> None:
    """Compare the checksum of Y, a copy of X, with `expected`; if they differ, copy X `again`.  Collective.

    again : copies X to Y; None: raise at once.   Raises CorruptionError on all ranks.
    """
    for repeats in range(REPEATS + 1):
        if checksum(Y) == expected:
            return
        what = f"{X!r} was redistributed, and its elements have changed: a bit has flipped"
        if again is None or repeats == REPEATS or checksum(X) != expected:  # X may have changed, or X is Y
            raise CorruptionError(f"{what}{f', also in {repeats} repeats' if repeats else ''}; make the matrix again")
        if Y.grid.comm.rank == 0:
            say(f"{what}; the redistribution is repeated")
        again()


def bilinear(part: Array, rows: np.ndarray, cols: np.ndarray) -> np.ndarray:
    """Return sum_ij u_i v_j b(a_ij) over a submatrix.   rows, cols : the global indices of its rows and columns."""
    words = max(1, part.itemsize // 8)  # a complex128 is two words, all others one
    unsigned = np.dtype(f"u{part.itemsize // words}")
    u = _weights(rows, 0)  # row 0 has the weight 1; do not change weights: files hold these checksums
    v = _weights((cols[:, None] * words + np.arange(words)).ravel(), 1)
    total = zero()
    if part.size:
        device = of(part)
        v = beside(v, part)
        for slab in slabs(*part.shape, *[_ON_DEVICE] * (device is not None)):
            total += u[slab] @ (_row_sums if device else _row_sums_on_host)(part[slab], unsigned, v)
    return total


def _row_sums_on_host(part: np.ndarray, unsigned: np.dtype, v: np.ndarray) -> np.ndarray:
    """Return sum_j v_j b(a_ij) of each row."""
    bits = np.ascontiguousarray(part).view(unsigned).astype(np.uint64, copy=False)
    sums: np.ndarray = (bits ^ bits >> np.uint64(32)) @ v
    return sums


def _row_sums(part: Array, unsigned: np.dtype, v: Array) -> np.ndarray:
    """Return sum_j v_j b(a_ij) of each row on a device; only the sums are copied to the host."""
    words = [part.real, part.imag] if part.itemsize > unsigned.itemsize else [part]
    sums = []
    for number, word in enumerate(words):
        bits = word.view(unsigned).astype(np.uint64, copy=False)
        sums.append(np.sum((bits ^ bits >> np.uint64(32)) * v[number :: len(words)], axis=1))
    return to_host(sum(sums[1:], sums[0]))


def zero() -> np.ndarray:
    """Return the initial value of a sum: an array, because overflow in an array raises no warning."""
    return np.zeros(1, np.uint64)


def text(comm: MPI.Comm, total: np.ndarray) -> str:
    """Add up the sums of all ranks, and return the total as text.  Collective over `comm`."""
    return texts(comm, total)[0]


def texts(comm: MPI.Comm, totals: np.ndarray) -> list[str]:
    """Add up the sums of all ranks for each matrix, and return the totals as texts.  Collective over `comm`."""
    whole = totals.copy()
    comm.Allreduce(MPI.IN_PLACE, whole, MPI.SUM)
    return [as_text(total) for total in whole.tolist()]


def as_text(total: int) -> str:
    return f"{_KIND}:{total:016x}"


def is_comparable(recorded: str) -> bool:
    """Return whether a recorded checksum is of the kind that is computed here; earlier versions used another kind."""
    return recorded.startswith(f"{_KIND}:")


def _weights(indices: np.ndarray, stream: int) -> np.ndarray:
    return hashed(indices, np.zeros(1, np.int64), 0, stream) | np.uint64(1)


def protected(
    run: Callable[[], object], C: DistMatrix, checks: RowChecksums, repair: bool, planned: Checks
) -> CheckReport:
    """Run a product, and compare C with its checksums; repeat the product if C is wrong.  Collective.

    repair : repeat the product if C is wrong; False: raise at once.

    Raises CorruptionError on all ranks.
    """
    start, comm, bits, entry = perf_counter(), C.grid.comm, 0, checks.entry
    if entry is not None:
        entry[...] = C.stored
    checks.begin()
    seconds = perf_counter() - start
    for repeats in range(REPEATS + 1):
        run()
        start = perf_counter()
        verdict = checks.end(sharp=repair)
        seconds += perf_counter() - start
        if not (verdict.wrong or repeats):
            break
        rows = f"{verdict.rows.size} of {C.shape[0]} rows of C differ from their checksums"
        rows += f", row {verdict.rows[0]} first" if verdict.wrong else ""
        if verdict.wrong and (changed := checks.changed()):
            raise CorruptionError(f"{changed} changed in memory while it was multiplied ({rows}): read it again")
        if not repair:
            raise CorruptionError(
                f"{rows}, by more than rounding errors; protect='repair' would have repeated the product"
            )
        before, bits = bits, int(local_sum(C)[0])
        flipped = (
            ranks_and_nodes(comm.allgather((bits != before, node()))) if repeats else ""
        )  # the ranks whose part of C has other bits in the repetition
        if verdict.wrong and flipped and repeats == REPEATS:
            raise CorruptionError(
                f"a bit has flipped on {flipped}: {REPEATS + 1} products differ, and in the last one {rows}: "
                "take that node out of the job"
            )
        if verdict.certain and repeats and not flipped:
            raise CorruptionError(
                f"{rows}, by more than rounding errors, twice with the same bits: the error is reproducible"
            )
        again = verdict.wrong and (flipped or not repeats)
        if comm.rank == 0:
            say(_line(rows, repeats, flipped, bool(again)))
        if not again:
            break
        if entry is not None:
            C.stored[...] = entry
    if checks.unknown and comm.rank == 0:
        _say_unknown(checks.unknown, C.shape[0], str(C.dtype))
    counted = Checks(checks.words, checks.allreduces, planned.bytes)
    return CheckReport(counted, planned, seconds, repeats, checks.unknown)


def _line(rows: str, repeats: int, flipped: str, again: bool) -> str:
    """Return the message after a product whose rows differ from their checksums, or after a repetition."""
    if not repeats:
        return f"{rows}; the product is repeated"
    if not flipped:
        return "the repetition has the same bits: no bit has flipped, these rows have large rounding errors"
    what = f"{rows}; it is repeated once more" if again else "C is the result of the repetition"
    return f"the repetition has other bits: a bit has flipped on {flipped}; {what}"


@lru_cache(maxsize=64)  # a loop of such products writes the message once
def _say_unknown(rows: int, of: int, dtype: str) -> None:
    say(
        f"{rows} of {of} rows of C could not be compared with their checksums: they or their operands hold NaN, "
        f"infinity, or numbers near the largest of their type ({dtype})"
    )
