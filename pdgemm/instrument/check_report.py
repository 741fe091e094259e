"""The cost of checking a product by checksums on one rank, as planned and as counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdgemm.support.text import counted, in_seconds, in_words


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
