"""The cases of a study of training: one for each number of ranks and layout.  The module needs no MPI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
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
