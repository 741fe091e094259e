"""What checking a product by checksums costs a rank, as planned and as counted."""

from __future__ import annotations

from dataclasses import dataclass

from pdgemm.support.text import counted, in_seconds, in_words


@dataclass(frozen=True)
class Checks:
    """What the checksums of one product take of a rank, if it is not repeated.

    words : in the allreduces.   bytes : of vectors, and of the copy of C from which a product is repeated.
    """

    words: int
    allreduces: int
    bytes: int


@dataclass(frozen=True)
class CheckReport:
    """The checks of one product on one rank.

    counted : of all runs.   repeats : how often it was repeated.
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
