"""The report of a run: figures by name, as counted on one rank and as predicted by schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from pdgemm.grids.rectangles import Rectangle
from pdgemm.instrument.ownership import InNotebook
from pdgemm.instrument.recorder import Recorder, Traffic
from pdgemm.support.text import counted, in_bytes, in_seconds, in_words

if TYPE_CHECKING:
    from pdgemm.grids.process_grid import ProcessGrid

PHASES = ("compute_seconds", "wait_seconds", "pack_seconds", "sync_seconds", "hidden_seconds")


@dataclass(frozen=True)
class VectorTraffic:
    """The traffic of this rank in reductions and gathers, whose results are numbers and arrays on all ranks."""

    counted: Traffic = field(default_factory=Traffic)
    predicted: Traffic = field(default_factory=Traffic)

    def __add__(self, other: VectorTraffic) -> VectorTraffic:
        return VectorTraffic(self.counted + other.counted, self.predicted + other.predicted)

    def __sub__(self, other: VectorTraffic) -> VectorTraffic:
        return VectorTraffic(self.counted - other.counted, self.predicted - other.predicted)


_of_process = VectorTraffic()


def count_vectors(traffic: VectorTraffic) -> None:
    """Add the traffic of one reduction to the total of this process."""
    global _of_process
    _of_process += traffic


def vectors_so_far() -> VectorTraffic:
    """Return the traffic of all reductions of this process so far; that of a function is a difference of two totals."""
    return _of_process


class RunReport(InNotebook):
    """Measurements of a run on one rank.  Its figures are attributes; a report has the figures of its kind of run.

    seconds : wall time.   rank : the rank that measured.   dtype, shape : type and shape of the matrix.

    Of runs of schedules, where words are elements:
    counted, predicted : the traffic of this rank, as counted where messages are passed to MPI, and by formula.
    extra_bytes, predicted_extra_bytes : the memory of buffers beyond the matrices; for several steps, the maximum.
    vectors : the part of `counted` and `predicted` that belongs to reductions: norms, diagonals, sums of columns.

    Of a redistribution or a reduction: `name`, the name of the matrix or of the reduction; `source` and `target`, the
    layouts.

    Of a run that computes; the seconds of redistributions are not part of its phases:
    flops : operations of all ranks together.   compute_seconds, pack_seconds : times of this rank.
    wait_seconds : time of waits.   sync_seconds : the part that waits for ranks of the node, without any transfer.
    hidden_seconds : time with a transfer in flight and no wait; a transfer ends when this rank sees its end.
    moves : the reports of the redistributions; their words, bytes and seconds are part of the totals.

    Of a batched or grouped product, where groups, rows, items and flops are totals of all ranks:
    items, groups : the number of products.   rows : rows that were sent, counted once for each of their groups.
    local_flops, compute_seconds : figures of this rank.   imbalance : flops of the busiest rank / mean flops of ranks.

    Of a load or save, where bytes are the total of all ranks:
    action, path, name, method : "read" or "wrote"; the file; its dataset, empty for a .npy file; the method of access.
    shape : shape of the matrix in the file: one number for a vector.
    part : the rows and columns, or the range of each axis of a tensor, that were read; None: all of it.
    checksum : the checksum that is stored with the dataset; None: there is none.
    generation, names : only of `save_all`: the number of the saved generation, and the names of its matrices.

    Of A = Q R of a tall matrix, and of functions that use it:
    method    : "cholesky" (CholeskyQR2, with a third pass where the first one was shifted or inaccurate), or "tsqr".
    passes    : passes of CholeskyQR over A, failed passes before TSQR included.
    departure : |Q^H Q - I|_F, measured before the last pass; NaN if Cholesky's factorisation failed or was not tried.
    shift     : the first pass added this multiple of the squared lengths of A's columns to the diagonal of A^H A.

    Of a function of a matrix, the same on every rank:
    steps    : number of iterations, of passes over a file, or of the steps that the docstring of the function names.
    products : calls of `pdgemm`.   checks : checksums of all products, if `protect` is given; other steps have none.
    facts    : numbers, and lists of numbers, that the function has measured or estimated, by name.
    Flops, words and bytes are sums over products, factorisations, solves with matrices, and redistributions; the words
    include those of norms and diagonals.

    Of a product, or of singular values, of matrices in files:
    plan : the planned reads and writes, as a dictionary.   bytes_read, bytes_written : the counted bytes of all ranks.
    read_wait, write_wait : seconds in which the slowest rank waited for its files, and did not multiply.
    peak : bytes of the largest resident set of a rank so far, which includes the interpreter and its libraries, and the
        memory of other ranks of the node that the rank has read in place.
    saves, save_seconds : number of saved checkpoints, and the seconds that saving took.
    """

    rank: int
    seconds: float
    counted: Traffic
    predicted: Traffic
    extra_bytes: int
    predicted_extra_bytes: int
    vectors: VectorTraffic
    flops: int
    compute_seconds: float
    wait_seconds: float
    pack_seconds: float
    sync_seconds: float
    hidden_seconds: float
    moves: tuple[RunReport, ...]
    dtype: str
    name: str
    source: str
    target: str
    items: int
    groups: int
    rows: int
    local_flops: int
    imbalance: float
    action: str
    path: str
    method: str
    shape: tuple[int, ...]
    bytes: int
    checksum: str | None
    part: Rectangle | tuple[tuple[int, int], ...] | None
    generation: int
    names: tuple[str, ...]
    _text: Callable[[Any], str] | None
    _comm: Any

    def __init__(self, text: Callable[[Any], str] | None = None, comm: Any = None, **figures: Any) -> None:
        """Local.   text : function that returns a report as text, and can be pickled.   comm : the ranks of the run."""
        vars(self).update(figures, _text=text, _comm=comm)

    @classmethod
    def of_run(
        cls, recorder: Recorder, schedules: Sequence[Any], grid: ProcessGrid, seconds: float, /, **others: Any
    ) -> Self:
        """Return the report of a run: the counts of its recorder, and the predictions of its schedules or its plan.

        others : further figures, and the text.
        """
        rank = grid.rank  # not from the communicator of the grid, which may have been freed
        shared: dict[str, Any] = {
            "rank": rank,
            "seconds": seconds,
            "counted": recorder.traffic,
            "predicted": sum((x.traffic(rank) for x in schedules), Traffic()),
            "extra_bytes": recorder.peak_bytes,
            "predicted_extra_bytes": max((x.extra_bytes(rank) for x in schedules), default=0),
            "vectors": VectorTraffic(),
        }
        return cls(comm=grid.comm, **shared | others)

    @classmethod
    def of_work(
        cls, recorder: Recorder, schedules: Sequence[Any], grid: ProcessGrid, seconds: float, /, **others: Any
    ) -> Self:
        """Return the report of a run that computes, with its operations and the seconds of its phases."""
        phases = {name: recorder.seconds.get(name.removesuffix("_seconds"), 0.0) for name in PHASES}
        phases["wait_seconds"] += phases["sync_seconds"]
        flops = sum(x.flops for x in schedules)
        return cls.of_run(recorder, schedules, grid, seconds, flops=flops, **phases, **others)

    @property
    def figures(self) -> dict[str, Any]:
        """The figures by name."""
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def changed(self, **figures: Any) -> Self:
        """Return a copy with other values of some figures and the same communicator."""
        return type(self)(self._text, self._comm, **self.figures | figures)

    def after(self, others: Sequence[RunReport], vectors: VectorTraffic | None = None, **figures: Any) -> Self:
        """Return a copy of this report that also counts the work and traffic of `others`, as `summed` does.

        vectors : the traffic of all reductions, in these reports and outside of them; None: all are in the reports.
        figures : replace figures by name.
        """
        return self.changed(**summed([self, *others], vectors) | figures)

    @property
    def gflops(self) -> float:
        """The GFLOP/s of all ranks together, by this rank's clock."""
        return self.flops / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def as_predicted(self) -> bool:
        """Whether the words, the messages and the bytes of buffers and files equal their predictions."""
        get, plan = vars(self).get, vars(self).get("plan", {})
        files = all(get(name) == plan.get(name) for name in ("bytes_read", "bytes_written"))
        return files and (get("counted"), get("extra_bytes")) == (get("predicted"), get("predicted_extra_bytes"))

    def as_dict(self) -> dict[str, Any]:
        """Return the report as numbers and strings, for JSON."""
        return {name: _plain(value) for name, value in self.figures.items()}

    def __str__(self) -> str:
        return self._text(self) if self._text else repr(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.figures.items())})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunReport) and self.figures == other.figures

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_comm": None}  # a communicator cannot be sent


def report_of_move(
    recorder: Recorder, schedules: Sequence[Any], grid: ProcessGrid, seconds: float, /, **others: Any
) -> RunReport:
    """Return the report of a redistribution or a reduction.   others : `name`, `source` and `target`."""
    return RunReport.of_run(recorder, schedules, grid, seconds, text=_text_of_move, **others)


def _text_of_move(move: RunReport) -> str:
    return f"{move.name} redistributed from {move.source} to {move.target}: {sent_and_received(move)}"


def report_of_file(
    action: str,
    place: tuple[Path | str, str],
    method: str,
    array: tuple[tuple[int, ...], np.dtype],
    size: int,
    seconds: float,
    checksum: str | None = None,
    part: Rectangle | tuple[tuple[int, int], ...] | None = None,
) -> RunReport:
    """Return the report of a load or save.   place : file and dataset.   array : shape and type of the dataset."""
    (path, name), (shape, dtype) = place, array
    stored: dict[str, Any] = {"path": str(path), "name": name, "shape": shape, "dtype": str(dtype), "bytes": size}
    how: dict[str, Any] = {"action": action, "method": method, "seconds": seconds, "checksum": checksum, "part": part}
    return RunReport(_text_of_file, **stored, **how)


def _text_of_file(report: RunReport) -> str:
    name, which = f":{report.name}" if report.name else "", f"{report.part} of " if report.part else ""
    shape = " x ".join(map(str, report.shape))
    return (
        f"{report.action} {report.path}{name} ({which}{shape} {report.dtype}, {in_bytes(report.bytes)}) "
        f"by {report.method} in {in_seconds(report.seconds)}, {in_bytes(report.bytes / max(report.seconds, 1e-9))}/s"
    )


def sent_and_received(report: RunReport) -> str:
    """Return the words and messages of a rank, and its seconds, as the end of a text."""
    return f"{traffic_of(report)}, {in_seconds(report.seconds)}"


def traffic_of(report: RunReport) -> str:
    """Return the words and messages of a rank as text."""
    traffic = report.counted
    return (
        f"rank {report.rank} received {in_words(traffic.words_received)} and sent {in_words(traffic.words_sent)} "
        f"in {counted(traffic.messages_sent, 'message')}"
    )


def summed(reports: Sequence[RunReport], vectors: VectorTraffic | None = None) -> dict[str, Any]:
    """Return the figures of several reports together: their sums, but for the bytes of buffers their maximum.

    Reports of moves count in words, messages and bytes, but have no flops or phases.

    vectors : the traffic of all reductions, in these reports and outside of them; None: all are in the reports.
    """
    work = [x for x in reports if "sync_seconds" in x.figures]
    sums: dict[str, Any] = {name: sum(getattr(x, name) for x in work) for name in ("flops", *PHASES)}
    of_steps = sum((x.vectors for x in reports), VectorTraffic())
    others = VectorTraffic() if vectors is None else vectors - of_steps
    sums["vectors"] = of_steps + others
    for name in ("counted", "predicted"):
        sums[name] = sum((getattr(x, name) for x in reports), getattr(others, name))
    most = ("extra_bytes", "predicted_extra_bytes")
    return sums | {name: max((getattr(x, name) for x in reports), default=0) for name in most}


def _plain(value: Any) -> Any:
    if isinstance(value, RunReport):
        return value.as_dict()
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
