"""A recorded run beside its reference, a module in one process, up to the first step that is wrong."""

from __future__ import annotations

import json
import re
import runpy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import safetensors.torch
import torch

from pdgemm.errors import ArgumentError, FileError
from pdgemm.support.files import naming, read_file
from pdgemm.tools.verification.training_record import Kind

TOLERANCE = 10  # times the largest difference that the reference has with other rounding
VARIANTS = 3  # trainings of the reference that round differently
Values = dict[str, torch.Tensor]
_WRAPPERS = re.compile(r"^module\.|(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


class Reference:
    """The functions of a reference file, and the batches of the first steps.

    ::

        def model(): ...               # returns the module with its first parameters
        def batches(): ...             # yields a tuple of tensors for each step: all samples of all ranks
        def loss(model, *batch): ...   # returns the mean loss of a batch
        def optimizer(model): ...      # returns an optimizer, or an optimizer and a scheduler
        clip = 1.0                     # the largest norm of the gradients; without it they are not clipped
        precision = torch.bfloat16     # of the arithmetic of the program, where it is not that of the parameters

    eps : of recorded tensors.
    Raises FileError or ArgumentError where the file or a function is missing, where there are too few batches, or where
    recorded tensors have a shorter type.
    """

    def __init__(self, path: Path, steps: int, eps: float) -> None:
        self._members = runpy.run_path(str(path)) if read_file(path) else {}
        if missing := [x for x in ("model", "batches", "loss", "optimizer") if not callable(self._members.get(x))]:
            raise ArgumentError(f"{path} has no function {missing[0]}")
        self._batches = [batch for _, batch in zip(range(steps), self._members["batches"]())]
        if len(self._batches) < steps:
            raise ArgumentError(f"{path} has {len(self._batches)} batches, and the run {steps} steps: see --steps")
        dtypes = {x.dtype for x in self._members["model"]().parameters()} | {self._members.get("precision")}
        self._eps = max(torch.finfo(x).eps for x in dtypes if x)
        if eps > self._eps:
            raise ArgumentError(f"the tensors of the run have a shorter type than the model of {path}: give it theirs")

    def states(self) -> Iterator[tuple[Values, dict[str, float]]]:
        """Yield the numbers of steps 0, 1, ..., and how far rounding has moved each one so far."""
        rounding = defaultdict[str, float](lambda: 1e-300)
        for exact, *runs in zip(*(self._training(variant) for variant in range(VARIANTS + 1))):
            for name, x in exact.items():
                rounding[name] = max(rounding[name], 2 * self._eps * largest(x), *(largest(y[name] - x) for y in runs))
            yield exact, rounding

    def _training(self, variant: int) -> Iterator[Values]:
        """Yield the parameters of step 0, and all numbers of steps 1, 2, ..., in the order of a step.

        variant : 0, or the number of a training that multiplies the parameters of a pass, and the gradients, by 1 + eps
            and 1 - eps at random.
        """
        torch.manual_seed(0)
        model = self._members["model"]()
        optimizer, named = self._members["optimizer"](model), dict(model.named_parameters())
        torch.manual_seed(variant)
        yield (kept := {name: copied(x) for name, x in named.items()})
        for batch in self._batches:
            self._round(named.values(), variant)
            model.zero_grad()
            loss = self._members["loss"](model, *batch)
            loss.backward()
            model.load_state_dict(kept, strict=False)
            self._round((x.grad for x in named.values() if x.grad is not None), variant)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), self._members.get("clip", torch.inf))
            for update in optimizer if isinstance(optimizer, tuple) else (optimizer,):
                update.step()
            kept = {name: copied(x) for name, x in named.items()}
            gradients = {f"{name}.grad": copied(x.grad) for name, x in reversed(named.items()) if x.grad is not None}
            yield {"loss": copied(loss), **gradients, "norm": copied(norm), **kept}

    def _round(self, tensors: Iterable[Any], variant: int) -> None:
        for x in tensors if variant else ():
            x.detach().mul_(1 + self._eps * torch.empty_like(x).bernoulli_().mul_(2).sub_(1))


def copied(x: torch.Tensor) -> torch.Tensor:
    return x.detach().to("cpu", torch.float64, copy=True)


def largest(x: torch.Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


class RecordedStep(msgspec.Struct):
    """What a rank has recorded of a step: a line of its log, and the file of its tensors.

    collectives : kind, ranks, words, and number of calls.
    """

    step: int
    loss: float | None = None
    norm: float | None = None
    collectives: list[tuple[Kind, Annotated[int, msgspec.Meta(ge=1)], int, int]] = []
    file: str = ""


class RecordedRun:
    """What the ranks of a run have recorded, as `record` writes it.

    folder : with logs, *.jsonl, and tensors, *step-S.safetensors; "rank-R" in the name of a file is the rank, else 0.
    names  : names of parameters in the run, and in the reference.
    steps  : by step and rank.   eps : the largest one of the types of the first tensors.
    Raises FileError or ArgumentError where the folder has no logs and no tensors, or where a line is wrong.
    """

    def __init__(self, folder: Path, names: Mapping[str, str]) -> None:
        self._names, self.steps = names, dict[tuple[int, int], RecordedStep]()
        for path in sorted(folder.glob("*")):  # a log is before its tensors
            with naming(path):
                step, rank = (int((re.search(rf"{x}-(\d+)", path.name) or "00")[1]) for x in ("step", "rank"))
                for text in path.read_text().splitlines() if path.suffix == ".jsonl" else ():
                    line = msgspec.convert(json.loads(text), RecordedStep)
                    if self.steps.setdefault((line.step, rank), line) is not line:
                        raise ArgumentError(f"{path} has step {line.step} twice: each run needs a new folder")
                if path.suffix == ".safetensors":
                    self.steps.setdefault((step, rank), RecordedStep(step)).file = str(path)
        if not self.steps:
            raise FileError(f"{folder}: no logs (*.jsonl) and no tensors (*step-S.safetensors) of a run")
        first = next((self.values(*at) for at, x in sorted(self.steps.items()) if x.file), {})
        self.eps = max([0.0, *(torch.finfo(x.dtype).eps for x in first.values() if x.is_floating_point())])

    def values(self, step: int, rank: int) -> Values:
        """Return loss, norm and tensors of a step by name, without names of wrappers such as DDP's."""
        log = self.steps[step, rank]
        named = {k: torch.tensor(x, dtype=torch.double) for k in ("loss", "norm") if (x := getattr(log, k)) is not None}
        try:
            tensors = safetensors.torch.load_file(log.file) if log.file else {}
        except (OSError, safetensors.SafetensorError) as bad:
            raise FileError(f"{log.file}: {bad}") from None
        for name, x in tensors.items():
            stem = _WRAPPERS.sub("", name.removesuffix(".grad"))
            named[self._names.get(stem, stem) + ".grad" * name.endswith(".grad")] = x
        return named


class Difference(NamedTuple):
    """A difference of a rank's number or tensor from the reference.

    ratio : to the largest difference by rounding.   known : what a wrong one looks like; None for a right one.
    """

    step: int
    rank: int
    name: str
    difference: float
    ratio: float
    known: str | None


class TrainingComparison:
    """The differences of a run from its reference, up to the first step with a wrong number.

    differences : in the order of the steps, and in a step loss, gradients from the last to the first, norm, parameters.
    wrong : those that are more than rounding.
    notes : names that are not recorded, or unknown to the reference, or whose rounding would hide an error of half of
        the gradient or change.   is_blind : the latter are most names.
    """

    def __init__(self, reference: Reference, run: RecordedRun) -> None:
        self.differences, clear = list[Difference](), set[str]()
        self.notes, kept = defaultdict[str, set[str]](set), defaultdict[int, Values](dict)
        before, initial = Values(), Values()
        for step, (exact, rounding) in enumerate(reference.states()):
            initial, bounds = initial or exact, {name: TOLERANCE * x for name, x in rounding.items()}
            for rank in sorted(rank for at, rank in run.steps if at == step):
                values, old = run.values(step, rank), {**before, **kept[rank]}
                self.notes["unknown to the reference"] |= values.keys() - exact.keys()
                for name in (x for x in exact if x in values):
                    x, y = copied(values[name]), exact[name]
                    error = largest(x - y) if x.shape == y.shape else torch.inf
                    olds = (old[name], before[name]) if step and name in initial else ()
                    known = None if error <= bounds[name] else _known(x, y, bounds[name], *olds)
                    self.differences.append(Difference(step, rank, name, error, error / rounding[name], known))
                    scale = (largest(y - initial[name]) if name in initial else 0.0) or largest(y)
                    clear |= {name} if step and bounds[name] <= scale / 2 else set()
                    kept[rank][name] = x
            self.wrong = [x for x in self.differences if x.known is not None]
            if self.wrong:
                break
            before = exact
        compared = {x.name for x in self.differences}
        self.is_blind = 2 * len(compared & clear) <= len(compared)
        self.notes["not recorded"] |= initial.keys() - compared
        self.notes["rounding hides mistakes in"] |= compared - clear if step else set()


def _known(x: Any, y: Any, bound: float, old_x: Any = None, old_y: Any = None) -> str:
    """Return what is known of a difference.   x, old_x : of the run, after and before the step.   y, old_y : exact."""
    if x.dim() == 2 and x.mT.shape == y.shape and largest(x.mT - y) <= bound:
        return "its transpose is right"
    if x.shape != y.shape or not x.isfinite().all():
        return "not finite" if x.shape == y.shape else f"shape {(*x.shape,)}, reference {(*y.shape,)}"
    what, change, true = ("", x, y) if old_x is None else ("change is ", x - old_x, y - old_y)
    if (r := _multiple(change, true, bound)) is not None:
        exact = Fraction(r).limit_denominator(16)
        near = f"1{r - 1:+.1g}" if abs(r - 1) < 0.1 else f"{r:.4g}"
        return f"{what}{exact if largest(change - float(exact) * true) <= bound else near} times the reference"
    if old_x is not None and (r := _multiple(change - true, old_x, bound)) is not None:
        return f"change is wrong by {r:.1g} times the parameter: weight decay?"
    ends = [(min(at), max(at), n) for at, n in zip(((x - y).abs() > bound).nonzero().mT.tolist(), x.shape)]
    axes = [f"{lo} to {hi} of {n} along axis {k}" for k, (lo, hi, n) in enumerate(ends) if hi - lo + 1 < n]
    return "only " * bool(axes) + ", ".join(axes)


def _multiple(x: Any, y: Any, bound: float) -> float | None:
    """Return r where x is r y to the bound, else None."""
    r = float((x * y).sum() / (y * y).sum())
    return r if largest(x - r * y) <= bound else None
