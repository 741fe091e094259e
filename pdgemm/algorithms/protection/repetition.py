"""Products that are compared with row checksums, and repeated if the checksums differ.

Only a repetition that gives other bits shows which ranks have wrong elements of C.  Before it, messages name no rank:
rows may also differ from their checksums because rounding errors are larger than estimated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from platform import node
from time import perf_counter

from pdgemm.algorithms.protection.checksum import REPEATS, local_sum
from pdgemm.algorithms.protection.row_checksums import RowChecksums, ranks_and_nodes
from pdgemm.errors import CorruptionError
from pdgemm.instrument.check_report import CheckReport, Checks
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.support.files import say


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
