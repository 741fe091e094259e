"""The cases that a study measures: one for each number of ranks, shape, type and algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

from msgspec import Meta

from pdgemm.errors import ArgumentError
from pdgemm.schedules.formulas import gemm_flops
from pdgemm.support.json_input import Count, Size, converted
from pdgemm.support.text import counted, in_bytes

KINDS = ("strong", "weak", "shapes")
Side = Annotated[int, Meta(ge=1, le=1 << 53)]  # exact as a float, too
Name = Annotated[str, Meta(min_length=1, max_length=100)]
MNK = tuple[Side, Side, Side]
# m, n, k relative to the side of a cube of the same volume, as in Huang & Chow, CA3DMM, SC22: one side long or short
FAMILIES = {"square": (1, 1, 1), "large k": (0.25, 0.25, 16), "large m": (16, 0.25, 0.25), "flat": (4, 4, 1 / 16)}


@dataclass(frozen=True)
class Case:
    """One product to be measured.

    of : the origin of the shape: the shape on one rank (weak), or the name of its family (shapes); "" otherwise.
    """

    kind: Literal["strong", "weak", "shapes"]  # KINDS
    ranks: Count
    mnk: MNK
    dtype: Literal["float32", "float64", "complex64", "complex128"] = "float64"
    algorithm: Name = "auto"
    mover: Name = "auto"
    memory_limit: Size | None = None
    device: Name = "host"
    of: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, members: Any) -> Case:
        """Return the case of a dictionary that `as_dict` returned.  Raises ArgumentError for any other value."""
        return converted(members, cls, "not a case", exact=True)

    @property
    def flops(self) -> int:
        return gemm_flops(*self.mnk, self.dtype.startswith("complex"))

    @property
    def requested(self) -> str:
        """The shape as the user requested it."""
        shape = (self.of or ",".join(map(str, self.mnk))).replace(",", " x ")
        return f"{shape} on one rank" if self.kind == "weak" else shape

    @property
    def texts(self) -> dict[str, str]:
        """The texts that distinguish its curve from others; "" stands for the usual value."""
        return {
            "shape": self.requested,
            "algorithm": self.algorithm,
            "dtype": self.dtype,
            "mover": "" if self.mover == "auto" else f"mover {self.mover}",
            "memory": "" if self.memory_limit is None else f"{in_bytes(self.memory_limit)} of buffers",
            "device": "" if self.device == "host" else self.device,
        }

    def on(self, ranks: int) -> Case:
        """Return the case of the same curve on `ranks` ranks."""
        mnk = self.mnk
        if self.kind == "weak" and ranks != self.ranks:
            m, n, k = map(int, self.of.split(","))
            mnk = weak_shape((m, n, k), ranks)
        return replace(self, ranks=ranks, mnk=mnk)

    def __str__(self) -> str:
        m, n, k = self.mnk
        named = f" ({self.of})" if self.kind == "shapes" and self.of else ""
        limit = "" if self.memory_limit is None else f", {in_bytes(self.memory_limit)} of buffers"
        mover = "" if self.mover == "auto" else f", {self.mover}"
        where = "" if self.device == "host" else f", {self.device}"
        return (
            f"{counted(self.ranks, 'rank')}, {m} x {n} x {k}{named} {self.dtype}, {self.algorithm}{mover}{limit}{where}"
        )


def cases(
    kind: str,
    shapes: Sequence[MNK],
    ranks: Sequence[int],
    dtypes: Sequence[str] = ("float64",),
    algorithms: Sequence[str] = ("auto",),
    **options: Any,
) -> list[Case]:
    """Return all cases of a study, by growing numbers of ranks.

    strong : the shapes stay as they are on all numbers of ranks.
    weak   : the sides grow with sqrt(ranks), so that A, B and C take the same memory on each rank.
    shapes : several shapes stay as they are.  A single shape stands for four shapes with the same product m n k: see
             FAMILIES.
    """
    if kind not in KINDS:
        raise ArgumentError(f"a study is one of {', '.join(KINDS)}, got {kind!r}")
    if not shapes or not all(x > 0 for mnk in shapes for x in mnk):
        raise ArgumentError(f"a study needs shapes of m, n, k > 0, got {[*shapes]}")
    if not ranks or min(ranks) < 1:
        raise ArgumentError(f"a study needs numbers of ranks > 0, got {[*ranks]}")
    return [
        Case.from_dict(Case(kind, count, mnk, dtype, algorithm, **options, of=of).as_dict())  # type: ignore[arg-type]
        for count in sorted(set(ranks))
        for mnk, of in dict.fromkeys(_on(kind, shapes, count))
        for dtype in dict.fromkeys(dtypes)
        for algorithm in dict.fromkeys(algorithms)
    ]


def _on(kind: str, shapes: Sequence[MNK], ranks: int) -> list[tuple[MNK, str]]:
    """Return the shapes of a study on `ranks` ranks, each with the value of `Case.of`."""
    if kind == "weak":
        return [(weak_shape(mnk, ranks), ",".join(map(str, mnk))) for mnk in shapes]
    if kind == "strong" or len(shapes) > 1:
        return [(mnk, "") for mnk in shapes]
    m, n, k = shapes[0]
    side = (m * n * k) ** (1 / 3)
    return [(_rounded(*(side * x for x in share)), name) for name, share in FAMILIES.items()]


def weak_shape(mnk: MNK, ranks: int) -> MNK:
    """Return the shape that takes as much memory on each of `ranks` ranks as `mnk` takes on one rank."""
    return _rounded(*(side * ranks**0.5 for side in mnk))


def _rounded(m: float, n: float, k: float) -> MNK:
    return max(1, round(m)), max(1, round(n)), max(1, round(k))
