"""The reads of matrices that are stored in files, as a stage of a program: their bytes, and the memory of a rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pdgemm.schedules.rounds import Round
from pdgemm.schedules.schedule import Buffers, RankMap, Schedule
from pdgemm.support.text import in_bytes


@dataclass(frozen=True)
class FileReads(Schedule):
    """Reads that all ranks make while they compute; no message is sent, and no time is predicted for the file.

    size       : number of ranks.   reads : the reads as text, such as "2 passes over 8 panels".
    bytes_read : the bytes that all ranks together read.
    held_bytes : the most bytes of a rank for panels, staging buffers and results.
    """

    size: int
    reads: str
    bytes_read: int
    held_bytes: int
    algorithm: str = "read"
    lookahead: int = 0

    def rounds(self) -> Iterator[Round]:
        return iter(())

    def buffers(self, rank: int | None) -> Buffers:
        return {"panels": (self.held_bytes, self.panel_dtype)}

    @property
    def grid(self) -> RankMap:
        return RankMap.of_line(range(self.size))

    @property
    def panel_dtype(self) -> np.dtype:
        return np.dtype(np.uint8)

    @property
    def events(self) -> int:
        return 0

    def described(self, name: str) -> tuple[str, str]:
        return f"read {name}", f"{self.reads}, {in_bytes(self.bytes_read)}"
