"""The cases of a study of training: one for each number of ranks and layout.  The module needs no MPI."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from pdgemm.errors import ArgumentError
from pdgemm.planning.machines.machine import Machine
from pdgemm.planning.models.layout_search import LayoutSearch
from pdgemm.planning.models.model_plan import ModelPlan
from pdgemm.planning.models.model_shape import ModelShape
from pdgemm.planning.models.training_layout import TrainingLayout
from pdgemm.support.json_input import Count, Size, converted
from pdgemm.support.text import counted
from pdgemm.tools.studies.cases import Name

EXAMPLE = "gpt"  # the program of a study that names none
_IN_CHECKOUT = Path("docs/examples/gpt/train.py")
AUTO = "auto"
AXES = ("dp", "tp", "pp")  # each may be a layout of its own
SIZES = {"layers": 4, "hidden": 128, "heads": 4, "vocabulary": 256, "sequence": 128}  # those of the example
DTYPES_OF_TRAINING = ("float32", "float64")
_WORDS = ("dp", "tp", "pp", "cp", "ep", "zero", "chunks", "schedule", "recompute")  # of a layout, as options
_ALL = 1 << 20  # more layouts than a search has


@dataclass(frozen=True)
class TrainingCase:
    """Steps of training to be measured.

    program : the path of a program that has `training(words, comm)`, or EXAMPLE.
    layout  : "auto", the fastest by the planner; one of AXES, along which all ranks lie; or as `TrainingLayout.parsed`.
    batch   : samples of a step on all ranks together.   of : those of one rank in a weak study, 0 otherwise.
    steps   : that are measured; warmup : those before them.
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
    dtype: Literal["float32", "float64"]  # DTYPES_OF_TRAINING
    steps: Count
    warmup: Count
    device: ClassVar[str] = "host"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, members: Any) -> TrainingCase:
        """Return the case of a dictionary that `as_dict` returned.  Raises ArgumentError for any other value."""
        case = converted(members, cls, "not a case", exact=True)
        assert case.shape
        return case

    @property
    def shape(self) -> ModelShape:
        return ModelShape(**{name: getattr(self, name) for name in SIZES})

    @property
    def flops(self) -> int:
        """The model's flops of a step: the work that efficiency is about."""
        return self.shape.flops(self.tokens)

    @property
    def tokens(self) -> int:
        """The tokens of a step on all ranks together."""
        return self.batch * self.sequence

    @property
    def model(self) -> tuple[Any, ...]:
        """What all cases of a section have: the kind, the program, the model, the samples, and the steps."""
        sizes = (getattr(self, name) for name in SIZES)
        return (self.kind, self.program, *sizes, self.of or self.batch, self.dtype, self.steps, self.warmup)

    @property
    def trained(self) -> tuple[Any, ...]:
        """What cases have that have the same losses, in all layouts."""
        sizes = (getattr(self, name) for name in SIZES)
        return (self.program, *sizes, self.batch, self.dtype, self.steps + self.warmup)

    @property
    def requested(self) -> str:
        """The model and the samples as the user requested them."""
        samples = (
            f"{counted(self.of or self.batch, 'sample')} of {self.sequence} tokens{' on a rank' if self.of else ''}"
        )
        program = "" if self.program == EXAMPLE else f"{Path(self.program).name}, "
        sizes = f"{counted(self.layers, 'layer')} of {self.hidden} with {counted(self.heads, 'head')}"
        return f"{program}{sizes}, vocabulary {self.vocabulary}, {samples}, {self.dtype}"

    @property
    def path(self) -> Path:
        """The file of the program.   Raises ArgumentError where there is none that can be measured."""
        return program_file(self.program)

    def plan(self, machine: Machine) -> ModelPlan:
        """Return the plan of this case on a machine.  Raises ArgumentError where no layout fits it."""
        fixed = _fixed(self.dtype)
        if "=" in self.layout:
            plan = ModelPlan(self.shape, TrainingLayout.parsed(self.layout, fixed), self.batch, machine)
            if plan.refused:
                raise ArgumentError(f"{self.layout}: {plan.refused}")
            return plan
        choice = LayoutSearch(self.shape, self.batch, self.ranks, machine, fixed=fixed).best(_ALL)
        for plan in choice.best:
            if self.layout == AUTO or getattr(plan.layout, self.layout) == self.ranks:
                return plan
        nearest = f": the nearest one needs {choice.nearest.refused}" if choice.nearest else ""
        raise ArgumentError(f"no layout {self.layout} of {counted(self.ranks, 'rank')} fits{nearest}")

    def words(self, layout: TrainingLayout) -> list[str]:
        """Return the options of the program: those of docs/examples/gpt/train.py."""
        members = {name: getattr(layout, name) for name in _WORDS} | {name: getattr(self, name) for name in SIZES}
        members |= {"batch": self.batch, "microbatches": layout.microbatches(self.batch), "dtype": self.dtype}
        members["steps"] = self.warmup + self.steps
        return [word for name, value in members.items() for word in (f"--{name}", str(value))]

    def __str__(self) -> str:
        return (
            f"{counted(self.ranks, 'rank')}, {counted(self.batch, 'sample')} of {self.sequence} tokens, {self.layout}"
        )


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

    strong  : the samples of a step stay as they are.   weak : `batch` is that of one rank.
    layouts : of each number of ranks: "auto", AXES, and such as dp=2,tp=2, for the ranks that it takes.  On one rank
        all axes are the same layout.

    Raises ArgumentError where a number of ranks has no layout, with the nearest one that has.
    """
    if kind not in ("strong", "weak"):
        raise ArgumentError(f"a study of training is strong or weak, got {kind!r}")
    if not ranks or min(ranks) < 1:
        raise ArgumentError(f"a study needs numbers of ranks > 0, got {[*ranks]}")
    if wrong := [name for name in dtypes if name not in DTYPES_OF_TRAINING]:
        raise ArgumentError(f"--dtype of training is {' or '.join(DTYPES_OF_TRAINING)}, got {wrong[0]}")
    members: dict[str, Any] = {**sizes}
    shape, named = ModelShape(**members), [name for text in layouts for name in _named(text)]
    for text in named:
        if "=" in text and _explicit(text).ranks not in ranks:
            raise ArgumentError(
                f"{text} is a layout of {counted(_explicit(text).ranks, 'rank')}: --ranks has no such number, but "
                f"{', '.join(map(str, sorted({*ranks})))}"
            )
    result = list[TrainingCase]()
    for number in sorted({*ranks}):
        samples = batch * (number if kind == "weak" else 1)
        mine = [text for text in named if "=" not in text or _explicit(text).ranks == number]
        for layout in dict.fromkeys(AUTO if number == 1 and text in AXES else text for text in mine):
            if why := _lies(layout, shape, samples, number):
                raise ArgumentError(_nearest(why, layout, shape, batch, number, kind))
            for dtype in dict.fromkeys(dtypes):
                members = {"kind": kind, "ranks": number, "layout": layout, "batch": samples, "dtype": dtype, **sizes}
                members["of"] = batch if kind == "weak" else 0
                result.append(TrainingCase.from_dict(members | options))
    return result


def program_file(name: str) -> Path:
    """Return the file of a program to be measured.  Raises ArgumentError where there is none.

    The example belongs to the documentation, not to the package: it is looked for in the checkout of the package, and
    below the current folder.
    """
    if name == EXAMPLE:
        places = [Path(__file__).resolve().parents[4] / _IN_CHECKOUT, _IN_CHECKOUT.absolute()]
        file = next((place for place in places if place.is_file()), None)
        if file is None:
            raise ArgumentError(
                f"the program {_IN_CHECKOUT} is neither in this folder nor beside the package, which is installed "
                "without its documentation: fetch it, and name it, --train PATH/train.py"
            )
    else:
        file = Path(name)
        if not file.is_file():
            raise ArgumentError(f"--train {name}: there is no such program")
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (OSError, SyntaxError, ValueError) as bad:
        raise ArgumentError(f"--train {name}: not a program of Python ({bad})") from None
    if not any(isinstance(node, ast.FunctionDef) and node.name == "training" for node in tree.body):
        raise ArgumentError(
            f"--train {name}: the program has no function training(words, comm), which yields the StepTimes and the "
            "loss of each step"
        )
    return file


def _fixed(dtype: str) -> TrainingLayout:
    """Return the layout that all layouts of a study begin with."""
    return TrainingLayout(fused=False, dtype=dtype)


def _named(text: str) -> list[str]:
    """Return the layouts of a text: names such as "dp,tp", or one such as "dp=2,tp=2"."""
    if "=" in text:
        _explicit(text)
        return [text]
    names = [name.strip() for name in text.split(",")]
    if wrong := [name for name in names if name not in (AUTO, *AXES)]:
        raise ArgumentError(
            f"there is no layout {wrong[0]!r}: layouts are {', '.join((AUTO, *AXES))}, or such as dp=2,tp=2,zero=1"
        )
    return names


def _explicit(text: str) -> TrainingLayout:
    """Return the layout of a text.  Raises ArgumentError where it names what a program has no option for."""
    fixed = _fixed("float32")
    layout = TrainingLayout.parsed(text, fixed)
    names = {part.partition("=")[0] for part in text.split(",") if part}
    if wrong := sorted(names - {*_WORDS, "microbatch"}):
        raise ArgumentError(
            f"{wrong[0]} is no part of a study's layouts, which have {', '.join((*_WORDS, 'microbatch'))}"
        )
    return layout


def _lies(layout: str, shape: ModelShape, batch: int, ranks: int) -> str:
    """Return why a layout of so many ranks is none for a model and its samples, or an empty text."""
    if "=" in layout:
        return _explicit(layout).lies(shape, batch)
    meshes = [*LayoutSearch(shape, batch, ranks, Machine()).meshes()]
    if layout == AUTO:
        return "" if meshes else f"no mesh of {counted(ranks, 'rank')} divides the model and its samples"
    if any(getattr(mesh, layout) == ranks for mesh in meshes):
        return ""
    return {
        "dp": f"dp {ranks} does not divide the {batch} samples of a step",
        "tp": f"tp {ranks} does not divide {shape.heads} heads",
        "pp": f"{ranks} stages are more than {shape.layers} layers",
    }[layout]


def _nearest(why: str, layout: str, shape: ModelShape, batch: int, ranks: int, kind: str) -> str:
    """Return the message about a number of ranks that a layout does not fit, with the nearest one that it fits."""
    model = f"{counted(shape.layers, 'layer')} of {counted(shape.heads, 'head')} and --batch {batch}"
    said = f"--ranks {ranks}, layout {layout}: {why} ({model})"
    if "=" in layout:
        return said
    most = {AUTO: batch * shape.heads * shape.layers, "dp": batch, "tp": shape.heads, "pp": shape.layers}[layout]
    for away in range(most + 1):  # one rank fits
        near = {min(ranks, most) - away, ranks + away}
        fits = [x for x in sorted(near) if x >= 1 and not _lies(layout, shape, batch * (x if kind == "weak" else 1), x)]
        if fits:
            return f"{said}; the nearest that fits: {' and '.join(map(str, fits))}"
    return said
