"""What a QR factorisation of a tall matrix did on one rank, beside what its schedules predict."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from pdgemm.instrument.ownership import InNotebook
from pdgemm.instrument.recorder import Traffic
from pdgemm.instrument.report import MoveReport
from pdgemm.support.text import counted, in_seconds, in_words


@dataclass(frozen=True)
class QRReport(InNotebook):
    """How A = Q R was computed; words are elements, and those of redistributions are part of them.

    method    : "cholesky" (CholeskyQR2, with a third pass where the first one was shifted or inaccurate), or "tsqr".
    passes    : passes of CholeskyQR over A, also those in vain before TSQR.
    departure : |Q^H Q - I|_F before the last of them, as measured; NaN where Cholesky's factorisation failed or was not
                tried.
    shift     : what the first pass added to A^H A, relative to |A|^2.
    flops     : of all ranks together.
    moves     : A was redistributed to rows on all ranks, and Q back.
    """

    method: str
    shape: tuple[int, int]
    dtype: str
    passes: int
    departure: float
    shift: float
    rank: int
    flops: int
    seconds: float
    compute_seconds: float
    wait_seconds: float
    counted: Traffic
    predicted: Traffic
    moves: tuple[MoveReport, ...] = ()

    @property
    def as_predicted(self) -> bool:
        """Are the words and messages what the schedules said?"""
        return self.counted == self.predicted

    def as_dict(self) -> dict[str, Any]:
        """Return the report as numbers and strings, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        passes = f"{self.passes} {'pass' if self.passes == 1 else 'passes'} of CholeskyQR"
        shifted = f", the first shifted by {self.shift:.0e} |A|^2" if self.shift else ""
        how = {
            "cholesky": f"{passes}{shifted}, |Q^H Q - I| = {self.departure:.0e} before the last",
            "tsqr": f"TSQR{f', after {passes} in vain{shifted}' if self.passes else ''}",
        }[self.method]
        traffic, moved = self.counted, "; A and Q redistributed" if self.moves else ""
        return (
            f"Q R of A ({self.shape[0]} x {self.shape[1]}), {self.dtype}, by {how}{moved}: rank {self.rank} received "
            f"{in_words(traffic.words_received)} and sent {in_words(traffic.words_sent)} in "
            f"{counted(traffic.messages_sent, 'message')}, {in_seconds(self.seconds)}"
        )
