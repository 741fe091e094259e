"""The file of a study: a line of JSON for each measurement, appended as soon as it is finished."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated, Any, Literal, Self

import msgspec
from msgspec import Meta, Struct

from pdgemm.errors import ArgumentError, FileError
from pdgemm.support.file_states import ordinary
from pdgemm.support.files import lock, naming, read_file as read_file
from pdgemm.support.json_input import Count, Figure, Positive, Seconds, converted, decoded
from pdgemm.tools.studies.cases import Case, TrainingCase
from pdgemm.tools.studies.predictions import Prediction

FORMAT = 1
LARGEST_FILE = 1 << 28  # bytes: some ten thousand measurements
SETTING = ("pdgemm", "mpi_library", "multiplies", "cpu", "threads_per_rank")  # must not differ within a file
Record = dict[str, Any]
AnyCase = Case | TrainingCase
_BEGINNING = f'{{"format": {FORMAT}, '.encode()


class _Calibration(Struct):
    format: Literal[1]
    machine: dict[str, Any]


class _Attempt(Struct):
    format: Literal[1]
    status: Literal["ok", "wrong", "failed"]


class _Measured(Struct):
    median_seconds: Seconds
    setting: dict[str, Any]


@dataclass
class Study:
    """The contents of the file of a study.

    measured : the last record of each case.   attempts : the cases of all records, in order.
    machine  : the machine of the last calibration, as a dictionary for `Machine.from_dict`.
    unread   : number and fault of each line that is not a record.   torn : the last line was not finished.
    """

    measured: dict[AnyCase, Record] = field(default_factory=dict)
    attempts: list[AnyCase] = field(default_factory=list)
    machine: dict[str, Any] | None = None
    unread: list[tuple[int, str]] = field(default_factory=list)
    torn: bool = False

    @property
    def done(self) -> set[AnyCase]:
        """The cases that need not be measured again."""
        return {case for case, record in self.measured.items() if record["status"] == "ok"}


def read_study(path: Path) -> Study:
    """Return the study in a file, an empty study if there is no file.  Raises FileError if the file cannot be read."""
    study = Study()
    try:
        text = read_file(path, LARGEST_FILE)
    except FileError as bad:
        if isinstance(bad.__context__, FileNotFoundError):
            return study
        raise
    lines = text.split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            _take(study, line)
        except ArgumentError as bad:
            begun = line.startswith(_BEGINNING) or _BEGINNING.startswith(line)
            if number == len(lines) and begun:  # its writer was killed
                study.torn = True
            else:
                study.unread.append((number, str(bad)))
    return study


def _take(study: Study, line: bytes) -> None:
    record = decoded(line, dict[str, Any])
    if "machine" in record and "case" not in record:
        study.machine = converted(record, _Calibration).machine
        return
    attempt, case = converted(record, _Attempt), _case_of(record.get("case"))
    if attempt.status != "failed":
        converted(record, _Measured)
    study.attempts.append(case)
    # a later attempt that failed does not replace a measurement
    if attempt.status != "failed" or case not in study.done:
        study.measured[case] = record


def _case_of(members: Any) -> AnyCase:
    """Return the case of a record: a product, or training, which has a program."""
    return (TrainingCase if isinstance(members, dict) and "program" in members else Case).from_dict(members)


def open_study(path: Path) -> Study:
    """Return the study to be continued.  Raises FileError if a line of the file is not a record."""
    study = read_study(path)
    if study.unread:
        number, fault = study.unread[0]
        raise FileError(f"{path}: line {number} is not a measurement ({fault}); name another file, or mend this one")
    return study


def check_setting(path: Path, study: Study, now: dict[str, Any]) -> None:
    """Raise ArgumentError if the file has measurements with other software or on another kind of node."""
    for before in (x["setting"] for x in study.measured.values() if x["status"] != "failed"):
        for name in SETTING:
            if before.get(name) != now.get(name):
                raise ArgumentError(
                    f"{path} holds measurements with {name.replace('_', ' ')} {before.get(name)!r}, here it is "
                    f"{now.get(name)!r}: they do not belong in one study; name another file"
                )


def append(path: Path, record: Record) -> None:
    """Append a record and sync it to disk; an unfinished last line is removed.  Raises FileError."""
    text = json.dumps({"format": FORMAT, **record}, default=str, ensure_ascii=False)
    line = text.encode(errors="replace") + b"\n"  # names on the command line may be undecodable
    with naming(path), open(path, "ab+", opener=ordinary) as file:
        _end_last_line(file)
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def _end_last_line(file: IO[bytes]) -> None:
    """End a last line that lacks a newline if its JSON is complete, otherwise remove the line."""
    file.seek(0)
    text = file.read()
    last = text.rpartition(b"\n")[2]
    if not last:
        return
    try:
        json.loads(last)
        file.write(b"\n")
    except (ValueError, RecursionError):
        file.truncate(len(text) - len(last))


def failed_record(case: AnyCase, error: str, command: Sequence[str]) -> Record:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"case": case.as_dict(), "status": "failed", "error": error, "command": [*command], "date": now}


@contextmanager
def study_lock(path: Path) -> Iterator[None]:
    """Lock the file against other studies; a new file that stays empty is removed.  Raises FileError."""
    target = Path(os.path.realpath(path))
    new = not target.exists()
    with naming(path):
        held = lock(target)
    if held is None:
        raise FileError(f"{path}: another study is being written to it")
    try:
        yield
    finally:
        if new and target.exists() and not target.stat().st_size:
            target.unlink()
        os.close(held)


def number_done(path: Path, wanted: Sequence[AnyCase]) -> int:
    """Return how many of the cases need not be measured again."""
    return len(read_study(path).done & {*wanted})


def left(study: Study, wanted: Iterable[AnyCase]) -> list[AnyCase]:
    """Return the cases to be measured; those that failed or were wrong before are at the end."""
    return sorted((case for case in wanted if case not in study.done), key=lambda case: case in study.measured)


# ------------------------------------------------------------------ the part of a record that reports use
class Cost(Struct):
    """The cost of a measurement."""

    core_hours: Figure
    gpu_hours: Figure


class Setting(Struct):
    """Where a case was measured."""

    nodes: list[str]
    threads_per_rank: Annotated[list[Count], Meta(min_length=1)]
    cores_per_node: Count
    oversubscribed: bool = False


class Measurement(Struct, kw_only=True):
    """A measured case: the part of its record that the figures need.

    case     : the measured case.   record : the record as it was read.   source : the file of the record.
    interval : the 95% confidence interval of the median; None for few repetitions.
    """

    case: Any
    record: Record
    source: str
    cost: Cost
    setting: Setting
    repetitions: list[Seconds] = msgspec.field(name="seconds")
    seconds: Positive = msgspec.field(name="median_seconds")
    interval: tuple[Positive, Positive] | None = msgspec.field(name="confidence")

    @classmethod
    def of(cls, record: Record, source: Path) -> Self:
        """Return the measurement of a record.  Raises ArgumentError where the record is incomplete or invalid."""
        return converted({**record, "record": record, "source": str(source)}, cls)

    @property
    def ranks(self) -> int:
        return int(self.case.ranks)

    @property
    def flops(self) -> float:
        return float(self.case.flops)

    def ideal(self, ranks: int) -> Prediction:
        """Return the ideal time of the same curve on `ranks` ranks, if each rank computes as fast as at this point."""
        case = self.case.on(ranks)
        return Prediction(case, self.seconds * (case.flops / self.flops) * (self.ranks / ranks))

    @property
    def oversubscribed(self) -> bool:
        """Whether the cores were oversubscribed: more ranks than cores."""
        return self.setting.oversubscribed

    @property
    def settings(self) -> dict[str, str]:
        """The settings, which are the same for all points of a curve."""
        return {name: _text(self.record["setting"].get(name)) for name in SETTING}


def relative(first: Any, other: Any) -> float:
    """Return the rate per rank relative to that of `first`; for the same work, this is T(p0) p0 / (T(p) p)."""
    return float((other.flops / (other.seconds * other.ranks)) / (first.flops / (first.seconds * first.ranks)))


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "-".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)
