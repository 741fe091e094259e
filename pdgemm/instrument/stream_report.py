"""Measurements of a product in tiles, whose operands were read from files while the product ran."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdgemm.instrument.check_report import CheckReport
from pdgemm.instrument.ownership import InNotebook
from pdgemm.support.text import counted, in_bytes, in_rate, in_seconds


@dataclass(frozen=True)
class StreamReport(InNotebook):
    """A product from files to a file, with only a tile of C and panels in memory.  Bytes are those of all ranks.

    plan    : the planned reads and writes (`Tiling.as_dict`).
    bytes_read, bytes_written : the counted bytes.
    read_wait, write_wait : seconds in which the slowest rank waited for its files, and did not multiply.
    peak    : bytes of the largest resident set of a rank so far, which includes the interpreter and its libraries, and
              the memory of other ranks of the node that the rank has read in place.
    saves, save_seconds : number of saved checkpoints, and the seconds that saving took.
    checks  : the checksums of all products of panels on this rank; None: the products were not checked.
    """

    title: str
    plan: dict[str, Any]
    bytes_read: int
    bytes_written: int
    flops: int
    seconds: float
    read_wait: float
    write_wait: float
    peak: int
    saves: int = 0
    save_seconds: float = 0.0
    checks: CheckReport | None = None

    @property
    def as_predicted(self) -> bool:
        return (self.bytes_read, self.bytes_written) == (self.plan["bytes_read"], self.plan["bytes_written"])

    @property
    def gflops(self) -> float:
        return self.flops / self.seconds / 1e9 if self.seconds else 0.0

    def __str__(self) -> str:
        return (
            f"{self.title}: {in_seconds(self.seconds)} ({in_rate(1e9 * self.gflops)}), of which waits for reading "
            f"{in_seconds(self.read_wait)}, for writing {in_seconds(self.write_wait)}"
            + (f", {counted(self.saves, 'checkpoint')} {in_seconds(self.save_seconds)}" if self.saves else "")
            + "\n"
            f"read {in_bytes(self.bytes_read)} and wrote {in_bytes(self.bytes_written)}, "
            f"{'as' if self.as_predicted else 'NOT as'} planned; largest rank {in_bytes(self.peak)}"
            + (f"\n{self.checks}" if self.checks else "")
        )
