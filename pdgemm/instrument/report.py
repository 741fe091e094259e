"""Measurements of a product on one rank, with the predictions of its plan, and their summary over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pdgemm.errors import ArgumentError
from pdgemm.instrument.ownership import InNotebook
from pdgemm.instrument.recorder import Traffic
from pdgemm.instrument.run_report import RunReport
from pdgemm.names import AlgorithmName
from pdgemm.support.agreement import together
from pdgemm.support.text import Table, algorithm_name, counted, in_bytes, in_rate, in_seconds, in_words, sides


@dataclass(frozen=True)
class Checks:
    """The cost of the checksums of one product on one rank, if the product is not repeated.

    words : elements in all all-reduces.   bytes : vectors, and the copy of C from which a product is repeated.
    """

    words: int
    allreduces: int
    bytes: int


@dataclass(frozen=True)
class CheckReport:
    """The checks of one product on one rank.

    counted : the cost of all runs.   repeats : number of times that products were repeated.
    unknown : rows of C that could not be compared: they hold NaN or infinity, or numbers near the limits of their type.
    """

    counted: Checks
    predicted: Checks
    seconds: float
    repeats: int
    unknown: int = 0

    def __str__(self) -> str:
        again = f"; the product was repeated {counted(self.repeats, 'time')}" if self.repeats else ""
        again += f"; {counted(self.unknown, 'row')} could not be compared" if self.unknown else ""
        return (
            f"checksums {in_seconds(self.seconds)}, {in_words(self.counted.words)} in "
            f"{counted(self.counted.allreduces, 'allreduce')}{again}"
        )


def all_checks(reports: Sequence[CheckReport]) -> CheckReport | None:
    """Return one report of products that ran in turn: sums, and the largest `bytes`; None if there are no products."""
    if not reports:
        return None
    all_counted, all_predicted = (
        Checks(sum(x.words for x in of), sum(x.allreduces for x in of), max(x.bytes for x in of))
        for of in zip(*((x.counted, x.predicted) for x in reports))
    )
    seconds, repeats, unknown = (sum(x) for x in zip(*((x.seconds, x.repeats, x.unknown) for x in reports)))
    return CheckReport(all_counted, all_predicted, seconds, int(repeats), int(unknown))


# the figures that only a product C := alpha A B + beta C has; another panel algorithm has `what`, `rcond` and `steps`
OF_PRODUCTS = ("inside", "layers", "mnk", "operands", "collective", "compute", "checks", "epilogue", "result_dtype")


class Report(RunReport):
    """Measurements of a product or of another panel algorithm on a grid, on one rank.

    Seconds are wall time; on a device they are the times of its streams, which overlap each other and the host's waits.
    `summary()` returns the figures of all ranks.  `str` is a line about this rank; on rank 0 a line that describes the
    computation stands above it, so that `print(C.report)` on all ranks prints the description once.

    mover : the name of the mover, or "shift" or "reduce_scatter".
    moves : redistributions to and from the algorithm's layouts.
    predicted_seconds : time of the slowest rank, by the model of the machine.
    lower_bound_words : words that the busiest rank must receive, by any algorithm, without redistribution.
    device : the name of the device; empty on the host.   ranks_per_device : ranks on the device with most ranks.

    Of one product C := alpha A B + beta C, whose `extra_bytes` counts memory beyond A, B and C:
    inside, layers, mnk : the algorithm of each layer, the number of layers, and (m, n, k).
    operands, epilogue : the names of op(A) and op(B), and the formula of the epilogue.
    collective : "allgather" or "reduce_scatter", if this is all that the ranks sent to each other.
    compute : the type to which operands were rounded, or the name of an emulation; else empty.
    result_dtype : the type of C, if products were accumulated in another type, `dtype`.
    checks : the checksums that the argument `protect` requests.

    Of a factorisation, a solution, or a function that works in steps:
    what : the computed formula, with shapes.
    rcond : for a solution, an estimate of 1 / (|A|_1 |A^-1|_1), where A is the matrix that was factored; `solve` may
        have scaled it before.  None for other computations.
    steps : the reports whose sum this report is, if several algorithms ran one after another.
    """

    algorithm: AlgorithmName
    mover: str
    grid: tuple[int, int]
    panels: int
    panel_width: int
    lookahead: int
    threads: int
    coords: tuple[int, int]
    predicted_seconds: float
    lower_bound_words: float
    blas: str
    device: str
    ranks_per_device: int
    inside: str
    layers: int
    mnk: tuple[int, int, int]
    operands: tuple[str, str]
    collective: str
    compute: str
    checks: CheckReport | None
    epilogue: str
    result_dtype: str
    what: str
    rcond: float | None
    steps: tuple[RunReport, ...]

    @property
    def move_seconds(self) -> float:
        """The seconds spent on redistributing A, B and C."""
        return sum(move.seconds for move in self.moves)

    @property
    def overlap(self) -> float | None:
        """The fraction of the transfer time that products hid; None if the product sent and received no messages.

        The fraction is an upper bound: a message that arrives during a product counts as in flight until this rank
        polls for it, which happens every few milliseconds between nodes, but after the product on one node.
        """
        transfer = self.hidden_seconds + self.wait_seconds - self.sync_seconds
        total = self.counted
        messages = total.messages_received + total.messages_sent
        moved = sum(x.counted.messages_received + x.counted.messages_sent for x in self.moves)
        return self.hidden_seconds / transfer if messages > moved and transfer > 0 else None

    def summary(self) -> Summary:
        """Return the figures of all ranks: minimum, mean and maximum of each.  Collective over the grid of the product.

        The figures are the same on every rank.  `str` of the summary is the text that `pdgemm multiply` prints;
        `print()` prints this text once, on rank 0, and `as_dict()` returns the numbers.
        Raises ArgumentError if the report has no communicator, because it is a copy or came from another process, or if
        the reports of the ranks are of different products; GridError if the grid was freed.
        """
        if self._comm is None:
            raise ArgumentError(
                "the report is a copy, or came from another process: use pdgemm.instrument.report.Summary(reports)"
            )
        with together(self._comm) as arguments:
            arguments += ["the summary of a report", self.formula, self.algorithm, self.grid, self.dtype, self.flops]
        return Summary(self._comm.allgather(self), self.rank)

    @property
    def as_predicted(self) -> bool:
        """Whether the words, the messages and the bytes of buffers equal the predictions of the plan."""
        checks = getattr(self, "checks", None)
        return super().as_predicted and (not checks or checks.repeats > 0 or checks.counted == checks.predicted)

    @property
    def formula(self) -> str:
        """The formula that was computed, with the shapes of the matrices."""
        if hasattr(self, "what"):
            return self.what
        (m, n, k), (left, right) = self.mnk, self.operands
        product = f"{left} ({m} x {k}) {right}"
        return f"C ({m} x {n}) := {f'{self.epilogue}, S = {product}' if self.epilogue else product}"

    @property
    def title(self) -> str:
        """The description of the computation: formula, types, algorithm, grid and `means`."""
        if hasattr(self, "what"):
            how = f" by {self.algorithm}" if self.steps else ""
            return f"{self.what}{how}, {self.dtype}, on a {sides(*self.grid, 1)} grid: {self.means}"
        computed = f" of {self.compute}" if self.compute else ""
        types = f"{self.result_dtype}, added up in {self.dtype}" if self.result_dtype else self.dtype
        name = algorithm_name(self.algorithm, self.inside or self.collective)
        return f"{self.formula}, {types}{computed}, by {name} on a {sides(*self.grid, self.layers)} grid: {self.means}"

    @property
    def means(self) -> str:
        """The panels, their mover, and the BLAS or the device that multiplied."""
        sharing = f", up to {self.ranks_per_device} ranks on one" if self.ranks_per_device > 1 else ""
        multiplier = (
            f"on {self.device}{sharing}" if self.device else f"{counted(self.threads, 'thread')} per rank, {self.blas}"
        )
        return (
            f"{counted(self.panels, 'panel')} of width <= {self.panel_width}, lookahead {self.lookahead}, "
            f"mover {self.mover}, {multiplier}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the report as numbers and strings, for JSON."""
        return super().as_dict() | {"gflops": self.gflops, "overlap": self.overlap}

    def __str__(self) -> str:
        line = f"rank {self.rank} at {self.coords}: {self._times()}; {self._traffic()}"
        line += f"; {self.checks}" if getattr(self, "checks", None) else ""
        if self.rank:
            return line
        expected = f"predicted {in_seconds(self.predicted_seconds)}, lower bound {in_words(self.lower_bound_words)}"
        return f"{self.title}; {expected}\n{line}"

    def _times(self) -> str:
        other = self.seconds - self.compute_seconds - self.wait_seconds - self.pack_seconds - self.move_seconds
        hidden = "" if self.overlap is None else f" ({self.overlap:.0%} of the transfers hidden)"
        names = ", ".join(move.name for move in self.moves)
        moved = f" + redistribute {names} {in_seconds(self.move_seconds)}" if self.moves else ""
        return (
            f"{in_seconds(self.seconds)} ({in_rate(1e9 * self.gflops)} on all ranks) = "
            f"compute {in_seconds(self.compute_seconds)} + wait {in_seconds(self.wait_seconds)}{hidden} "
            f"+ pack {in_seconds(self.pack_seconds)}{moved} + other {in_seconds(max(0.0, other))}"
        )

    def _traffic(self) -> str:
        """Return words, messages and memory as text, and the predicted figures if these differ."""

        def of(x: Traffic, extra: int) -> str:
            read = f", {in_words(x.words_read)} of them read in place" if x.words_read else ""
            return (
                f"received {in_words(x.words_received)} in {counted(x.messages_received, 'message')}{read}, "
                f"sent {in_words(x.words_sent)} in {x.messages_sent}; extra memory {in_bytes(extra)}"
            )

        if self.as_predicted:
            return f"{of(self.counted, self.extra_bytes)}, as predicted"
        # in full, because the figures may differ in the last digit
        return (
            f"{self.counted}, extra memory {self.extra_bytes} bytes, but predicted were {self.predicted}, "
            f"{self.predicted_extra_bytes} bytes"
        )


# figures of a report in a summary: first figures that are equal on all ranks, which a report may lack, then the others
_ALIKE = (
    "algorithm", "inside", "collective", "grid", "layers", "mnk", "dtype", "mover", "panels", "panel_width",
    "lookahead", "threads", "blas", "device", "ranks_per_device", "compute", "epilogue", "result_dtype",
    "predicted_seconds",
    "lower_bound_words",
)  # fmt: skip
_SECONDS = tuple(f"{name}seconds" for name in ("", "compute_", "wait_", "sync_", "hidden_", "pack_", "move_"))
_COUNTED = ("words_received", "words_read", "words_sent", "messages_received", "messages_sent")


@dataclass(frozen=True)
class Summary(InNotebook):
    """The reports of all ranks on one product, in the order of the ranks; `str` is a table of their figures.

    rank : the rank that holds this summary; `print()` prints on rank 0 only.
    """

    reports: Sequence[Report]
    rank: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the figures of the product; "per_rank" has minimum, mean and maximum where ranks differ."""
        reports, first = self.reports, self.reports[0]
        columns = {name: [getattr(r, name) for r in reports] for name in _SECONDS}
        columns |= {name: [getattr(r.counted, name) for r in reports] for name in _COUNTED}
        columns["extra_bytes"] = [r.extra_bytes for r in reports]
        overlaps = [r.overlap for r in reports if r.overlap is not None]
        return {
            "title": first.title,
            **{name: getattr(first, name) for name in _ALIKE if hasattr(first, name)},
            "redistributed": [move.name for move in first.moves],
            "overlap": sum(overlaps) / len(overlaps) if overlaps else None,  # the mean over ranks
            "gflops": self.gflops,
            "as_predicted": all(r.as_predicted for r in reports),
            "per_rank": {name: {"min": min(x), "mean": sum(x) / len(x), "max": max(x)} for name, x in columns.items()},
        }

    @property
    def seconds(self) -> float:
        """The time of the slowest rank."""
        return max(r.seconds for r in self.reports)

    @property
    def gflops(self) -> float:
        """The GFLOP/s of all ranks together, by the clock of the slowest rank."""
        return self.reports[0].flops / self.seconds / 1e9 if self.seconds else 0.0

    def print(self) -> None:
        """Print the summary once: on rank 0."""
        if not self.rank:
            print(self, flush=True)

    def __str__(self) -> str:
        facts = self.as_dict()
        rows = [
            (name, *(form(facts["per_rank"][key][which]) for which in ("min", "mean", "max")))
            for name, key, form in _ROWS
        ]
        hidden = "" if facts["overlap"] is None else f"; {facts['overlap']:.0%} of the transfers were hidden"
        moved = f"; {', '.join(dict.fromkeys(facts['redistributed']))} redistributed" if facts["redistributed"] else ""
        least = facts["lower_bound_words"]
        bound = f"; lower bound {in_words(least)}" if least or "mnk" in facts else ""
        return (
            f"{facts['title']}\n{Table(('on a rank', 'least', 'mean', 'most'), rows, words=('on a rank',))}\n"
            f"{in_rate(1e9 * self.gflops)}; predicted {in_seconds(facts['predicted_seconds'])}{hidden}{moved}; "
            f"words and messages {'as' if facts['as_predicted'] else 'NOT as'} predicted{bound}"
        )


# the rows of a summary
_ROWS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("time", "seconds", in_seconds),
    ("compute", "compute_seconds", in_seconds),
    ("wait", "wait_seconds", in_seconds),
    ("pack", "pack_seconds", in_seconds),
    ("redistribution", "move_seconds", in_seconds),
    ("received", "words_received", in_words),
    ("messages received", "messages_received", "{:.0f}".format),
    ("buffers", "extra_bytes", in_bytes),
)
