"""The cases that a study measures: products, or steps of training, one for each number of ranks and layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from pdgemm.errors import ArgumentError
from pdgemm.planning.machines.machine import Machine
from pdgemm.planning.models.model_layers import TrainingLayout
from pdgemm.planning.models.model_plan import LayoutSearch, ModelPlan
from pdgemm.planning.models.model_shape import ModelShape
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


EXAMPLE = "gpt"  # the program of a study that names none
_IN_CHECKOUT = Path("docs/examples/gpt/train.py")
AUTO = "auto"
AXES = ("dp", "tp", "pp")  # each may be a layout
SIZES = {"layers": 4, "hidden": 128, "heads": 4, "vocabulary": 256, "sequence": 128}  # those of the example
_OPTIONS = ("dp", "tp", "pp", "cp", "zero", "chunks", "schedule", "recompute")  # members of a layout, and of a program
_RECOMPUTE = {"none": "none", "selective": "attention", "full": "blocks"}  # names of a layout, and of a program
_ALL = 1 << 20  # more meshes than a search has


@dataclass(frozen=True)
class TrainingCase:
    """Steps of training to be measured.

    program : the path of a program with a function `training(words, comm)`, or EXAMPLE.
    layout  : "auto", the fastest by the plan; one of AXES, along which all ranks are; or as of `TrainingLayout.parsed`.
    batch   : samples of a step on all ranks together.   of : those of one rank in a weak study, 0 otherwise.
    steps   : steps that are measured; warmup : steps before them.
    """

    kind: Literal["strong", "weak"]
    ranks: Count
    program: Annotated[str, Meta(min_length=1, max_length=4096)]
    layout: Name
    batch: Count
    of: Size
    layers: Count
    hidden: Count
    heads: Count
    vocabulary: Count
    sequence: Count
    dtype: Literal["float32", "float64"]
    steps: Count
    warmup: Count
    device: ClassVar[str] = "host"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, members: Any) -> TrainingCase:
        """Return the case of a dictionary that `as_dict` returned.  Raises ArgumentError for any other value."""
        case = converted(members, cls, "not a case of training", exact=True)
        assert case.shape
        return case

    @property
    def shape(self) -> ModelShape:
        return ModelShape(**{name: getattr(self, name) for name in SIZES})

    @property
    def tokens(self) -> int:
        """The tokens of a step on all ranks together."""
        return self.batch * self.sequence

    @property
    def flops(self) -> float:
        """The flops of the model in a step: those that efficiency and MFU are about."""
        return self.shape.flops(self.tokens)

    @property
    def requested(self) -> str:
        """The model and the samples as the user requested them."""
        program = "" if self.program == EXAMPLE else f"{Path(self.program).name}, "
        model = f"{counted(self.layers, 'layer')} of {self.hidden} with {counted(self.heads, 'head')}"
        samples = f"{counted(self.of or self.batch, 'sample')} of {self.sequence} tokens"
        return f"{program}{model}, vocabulary {self.vocabulary}, {samples}{' on a rank' * (self.of > 0)}"

    @property
    def texts(self) -> dict[str, str]:
        """The texts that distinguish its curve from others, see `Case.texts`."""
        return {"shape": self.requested, "algorithm": self.layout, "dtype": self.dtype}

    def on(self, ranks: int) -> TrainingCase:
        """Return the case of the same curve on `ranks` ranks; on one rank all curves of a model have the same case."""
        layout = AUTO if ranks == 1 else self.layout
        return replace(self, ranks=ranks, batch=self.of * ranks or self.batch, layout=layout)

    def plan(self, machine: Machine) -> ModelPlan:
        """Return the plan of this case on a machine.  Raises ArgumentError where its layout is not possible."""
        layout = TrainingLayout(dtype=self.dtype, autograd=True)
        if self.layout == AUTO or self.layout in AXES:
            for plan in LayoutSearch(self.shape, self.batch, self.ranks, machine, fixed=layout).best(_ALL).best:
                if self.layout == AUTO or getattr(plan.layout, self.layout) == self.ranks:
                    return plan
            alone: Any = {"dp" if self.layout == AUTO else self.layout: self.ranks}
            layout = replace(layout, **alone)
        else:
            layout = TrainingLayout.parsed(self.layout, layout)
        plan = ModelPlan(self.shape, layout, self.batch, machine)
        if plan.refused:
            raise ArgumentError(f"{self}: {plan.refused}")
        return plan

    def words(self, layout: TrainingLayout) -> list[str]:
        """Return the options of the program: those of docs/examples/gpt/train.py."""
        values = {name: getattr(layout, name) for name in _OPTIONS} | {name: getattr(self, name) for name in SIZES}
        values |= {"batch": self.batch, "microbatches": layout.microbatches(self.batch), "dtype": self.dtype}
        values |= {"steps": self.warmup + self.steps, "recompute": _RECOMPUTE[layout.recompute]}
        return [word for name, value in values.items() for word in (f"--{name}", str(value))]

    def __str__(self) -> str:
        samples = f"{counted(self.batch, 'sample')} of {self.sequence} tokens"
        return f"{counted(self.ranks, 'rank')}, {samples}, {self.layout}"


def training_cases(
    kind: str,
    ranks: Sequence[int],
    layouts: Sequence[str],
    batch: int,
    sizes: dict[str, int],
    dtypes: Sequence[str],
    **options: Any,
) -> list[TrainingCase]:
    """Return all cases of a study of training, by growing numbers of ranks.

    kind    : strong, the samples of a step stay as they are; weak, `batch` is the number of samples of one rank.
    layouts : "auto", AXES, such as "dp,tp", or such as "dp=2,tp=2", which is measured on as many ranks as it has.  On
        one rank all axes are the same layout.

    Raises ArgumentError where a layout is not possible for the model, its samples and a number of ranks.
    """
    cases = dict[TrainingCase, None]()
    for text in layouts:
        written = _written(text) if "=" in text else None
        if written and written.ranks not in ranks:
            raise ArgumentError(f"{text} is a layout of {counted(written.ranks, 'rank')}, which --ranks does not have")
        names, numbers = ([text], [written.ranks]) if written else (text.split(","), ranks)
        for layout, number, dtype in product(names, numbers, dtypes):
            members = {"kind": kind, "ranks": number, "dtype": dtype, **sizes, **options}
            members["layout"] = AUTO if number == 1 and layout in AXES else layout
            members |= {"batch": batch * number, "of": batch} if kind == "weak" else {"batch": batch, "of": 0}
            cases[TrainingCase.from_dict(members)] = None
    for case in cases:
        case.plan(Machine())
    return sorted(cases, key=lambda case: case.ranks)


def _written(text: str) -> TrainingLayout:
    """Return the layout of a text.  Raises ArgumentError where it has members that a program has no options for."""
    layout, names = TrainingLayout.parsed(text, TrainingLayout()), (*_OPTIONS, "microbatch")
    if layout != TrainingLayout(**{name: getattr(layout, name) for name in names}):
        raise ArgumentError(f"{text}: the layouts of a study have {', '.join(names)}")
    return layout


def program_file(name: str) -> Path:
    """Return the file of a program to be measured.  Raises ArgumentError where there is none.

    The example belongs to the documentation, not to the package: it is looked for in the checkout of the package, and
    below the current folder.
    """
    places = [Path(name)]
    if name == EXAMPLE:
        places = [Path(__file__).resolve().parents[3] / _IN_CHECKOUT, _IN_CHECKOUT.absolute()]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        raise ArgumentError(f"--train {name}: there is no such program; looked for {' and '.join(map(str, places))}")
    if b"\ndef training(" not in b"\n" + file.read_bytes():
        raise ArgumentError(
            f"--train {name}: the program has no function training(words, comm), which yields the run after each step"
        )
    return file
