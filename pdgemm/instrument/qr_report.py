"""Measurements of a QR factorisation of a tall matrix on one rank, beside the predictions of its schedules."""

from __future__ import annotations

from dataclasses import dataclass

from pdgemm.instrument.run_report import MoveReport, WorkReport
from pdgemm.support.text import counted, in_seconds, in_words


@dataclass(frozen=True, kw_only=True)
class QRReport(WorkReport):
    """How A = Q R was computed; the words of redistributions are part of the totals.

    method    : "cholesky" (CholeskyQR2, with a third pass where the first one was shifted or inaccurate), or "tsqr".
    passes    : passes of CholeskyQR over A, failed passes before TSQR included.
    departure : |Q^H Q - I|_F, measured before the last pass; NaN if Cholesky's factorisation failed or was not tried.
    shift     : the first pass added this multiple of the squared lengths of A's columns to the diagonal of A^H A.
    moves     : the redistributions of A to rows on all ranks, and of Q back.
    """

    method: str
    shape: tuple[int, int]
    dtype: str
    passes: int
    departure: float
    shift: float
    moves: tuple[MoveReport, ...] = ()

    def __str__(self) -> str:
        passes = f"{self.passes} {'pass' if self.passes == 1 else 'passes'} of CholeskyQR"
        shifted = f", the first shifted by {self.shift:.0e} |A|^2" if self.shift else ""
        how = {
            "cholesky": f"{passes}{shifted}, |Q^H Q - I| = {self.departure:.0e} before the last",
            "tsqr": f"TSQR{f' ({passes} failed{shifted})' if self.passes else ''}",
        }[self.method]
        traffic, moved = self.counted, "; A and Q redistributed" if self.moves else ""
        return (
            f"Q R of A ({self.shape[0]} x {self.shape[1]}), {self.dtype}, by {how}{moved}: rank {self.rank} received "
            f"{in_words(traffic.words_received)} and sent {in_words(traffic.words_sent)} in "
            f"{counted(traffic.messages_sent, 'message')}, {in_seconds(self.seconds)}"
        )
