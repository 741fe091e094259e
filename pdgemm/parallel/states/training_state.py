"""TrainingState: parameters, the optimizer's state and the step in one file, by names and global indices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from pdgemm.errors import ArgumentError, FileError
from pdgemm.io import hdf5
from pdgemm.local.arrays.arguments import as_count
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.parallel.line_buckets import LineBuckets
from pdgemm.parallel.mesh import Mesh
from pdgemm.parallel.parts import as_table
from pdgemm.parallel.updates.loss_scale import LossScale
from pdgemm.parallel.updates.sharded_optimizer import ShardedOptimizer
from pdgemm.parallel.updates.update_rules import described
from pdgemm.schedules.collectives.collective import Collective
from pdgemm.schedules.training.parameter_division import Division, extents
from pdgemm.support.agreement import together
from pdgemm.transport.collectives import carry_out

_STEP, _UPDATES, _SCALE, _GOOD, _RULE, _TYPE = "step", "updates", "loss_scale", "good_steps", "rule", "parameter_type"


class TrainingState:
    """The state of a training run in a file of `hdf5.save_all`, from which any number of ranks goes on.

    ::

        state = TrainingState("run.h5", optimizer, every=50)      # goes on where the file ends, or begins
        for step, batch in zip(state.steps(300), batches):        # steps first: the last one saves, too
            ...

    path  : the file.  Each parameter is a matrix "parameters/NAME" there, in float32 or float64, and what the optimizer
        keeps of it "m/NAME", "v/NAME"; vectors have one row, and further dimensions of arrays are columns.
    every : steps after which the file is written again; the last step of `steps` writes it, too.
    attrs : numbers and strings of the run, which must be those of the file: the seed and the batch, for example.  The
        state has attributes of its own, "step" and "rule" for example, which it does not take.
    keep  : generations that are kept, see `save_all`.

    The file can be continued with any stage, on any mesh and with any size of buckets.
    Each rank receives a whole parameter at a time, and keeps its part of it, which `mesh.traffic` counts as "state".
    Collective over the mesh.  Raises FileError on all ranks where the file is damaged, or of another model or run.
    """

    def __init__(
        self,
        path: str | Path,
        optimizer: ShardedOptimizer,
        *,
        every: int = 100,
        attrs: Mapping[str, Any] | None = None,
        keep: int = 1,
    ) -> None:
        self.optimizer, self.step, mesh = optimizer, 0, optimizer.buckets.mesh
        with (agreed := together(mesh.comm)) as arguments:
            self.path, own = Path(path), {**(attrs or {})}
            self._every, self._keep = as_count(every, "every", 1), as_count(keep, "keep", 1)
            if taken := [name for name in own if name in (_STEP, _UPDATES, _SCALE, _GOOD, _RULE, _TYPE)]:
                raise ArgumentError(f"attrs of a state have names beside its own, got {taken[0]!r}")
            self._attrs = {**own, _RULE: described(optimizer.rule), _TYPE: str(optimizer.buckets.layouts.whole.wide)}
            arguments += ["TrainingState", self.path, self._every, self._keep, *self._attrs.items()]
            agreed.flag = self.path.exists()
        self._model = model_of(mesh, optimizer.buckets.divisions)
        _check_names([*self._model])
        if agreed.flag:
            self._load()

    def steps(self, last: int) -> Iterator[int]:
        """Yield the numbers of the steps that are left up to `last`, and save the state between them.  Collective."""
        with together(self.optimizer.buckets.mesh.comm) as arguments:
            arguments += ["TrainingState.steps", f"from {self.step}", last := as_count(last, "last", 0)]
        while self.step < last:
            yield self.step
            self.step += 1
            if self.step % self._every == 0 or self.step == last:
                self.save()

    def save(self) -> None:
        """Write the file.  Collective over the mesh."""
        optimizer, scale = self.optimizer, self.optimizer.scale
        attrs = self._attrs | {_STEP: self.step, _UPDATES: optimizer.updates}
        attrs |= {_SCALE: scale.scale, _GOOD: scale.good} if scale else {}
        matrices = {f"{kind}/{name}": self._matrix(kind, name) for kind, name in self._kept()}
        hdf5.save_all(self.path, matrices, attrs=attrs, keep=self._keep)

    def _kept(self) -> Iterator[tuple[str, str]]:
        """Yield what the file has: each kind of numbers of each parameter, kind by kind."""
        kinds = {name: self.optimizer.kinds(name) for name in self._model}
        for kind in dict.fromkeys(kind for own in kinds.values() for kind in own):
            yield from ((kind, name) for name, own in kinds.items() if kind in own)

    def _matrix(self, kind: str, name: str) -> DistMatrix:
        """Return a parameter, or what is kept of it, as a matrix on the mesh: each rank has some columns of it."""
        buckets, mesh = self.optimizer.buckets, self.optimizer.buckets.mesh
        division, stages = self._model[name]
        line, wide = buckets.line_of(name), buckets.layouts.whole.wide
        own = self._gathered(kind, name, line) if line else np.zeros(0, wide)
        whole = own if division.everywhere(mesh.shape, stages) else self._joined(name, own)
        table = whole.reshape(as_table(division.shape))
        width = max(1, -(-table.shape[1] // mesh.shape.size))
        local = table[:, mesh.rank * width : (mesh.rank + 1) * width].copy()
        return DistMatrix.from_local(local, table.shape, grid=mesh.grid, block=(table.shape[0], width))

    def _gathered(self, kind: str, name: str, line: LineBuckets) -> np.ndarray:
        """Return this rank's flat part of a parameter, which the line has updated.  Collective over the line."""
        layout, bucket = line.layout, line.layout.bucket_of[name]
        elements, _ = layout.overlap(name, line.storage.span(bucket))
        part = np.zeros(layout.places[name].stop - layout.places[name].start, layout.wide)
        part[elements] = self.optimizer.kept(kind, name)
        if layout.stage:
            spans = [layout.overlap(name, layout.part(bucket, index))[0] for index in range(layout.shards)]
            self._gather(line.line.comm, part, [x.stop - x.start for x in spans])
        return part

    def _joined(self, name: str, own: np.ndarray) -> np.ndarray:
        """Return a whole parameter on all ranks, from its parts of the lowest ranks that have them.  Collective."""
        mesh, (division, stages) = self.optimizer.buckets.mesh, self._model[name]
        owners = division.owners(mesh.shape, stages)
        counts = [prod(extents(owners[rank])) if rank in owners else 0 for rank in range(mesh.shape.size)]
        ends = np.cumsum([0, *counts])
        parts = np.zeros(ends[-1], own.dtype)
        if mesh.rank in owners:
            parts[ends[mesh.rank] : ends[mesh.rank + 1]] = own
        self._gather(mesh.comm, parts, counts)
        whole = np.empty(division.shape, own.dtype)
        for rank, window in owners.items():
            whole[window] = parts[ends[rank] : ends[rank + 1]].reshape(extents(window))
        return whole

    def _gather(self, comm: MPI.Intracomm, parts: np.ndarray, counts: list[int]) -> None:
        """Gather the parts of all ranks of a communicator, which follow each other."""
        gather = Collective("all_gather", "ring", tuple(range(comm.size)), tuple(counts), parts.dtype)
        carry_out(gather, comm, [parts], self.optimizer.buckets.mesh.traffic["state"])

    def _load(self) -> None:
        """Set parameters, the optimizer's state and the step to those of the file.  Collective."""
        optimizer, mesh = self.optimizer, self.optimizer.buckets.mesh
        saved = hdf5.load_all(self.path, mesh.grid)
        wanted = {f"{kind}/{name}": as_table(self._model[name][0].shape) for kind, name in self._kept()}
        with together(mesh.comm):
            shapes = {name: x.shape for name, x in saved.matrices.items()}
            if shapes != wanted:
                different = sorted(x for x in {*shapes, *wanted} if shapes.get(x) != wanted.get(x))
                x = different[0]
                raise FileError(
                    f"{self.path} is the state of another model: {x} is {shapes.get(x, 'not there')}, "
                    f"and here {wanted.get(x, 'not there')}"
                )
            for name, value in self._attrs.items():
                if name not in saved.attrs or not np.array_equal(saved.attrs[name], value):
                    raise FileError(
                        f"{self.path} is the state of another run: {name} is {saved.attrs.get(name, 'not there')}, and "
                        f"here {value}"
                    )
            numbers = {name: _whole(saved.attrs.get(name), name, self.path) for name in (_STEP, _UPDATES)}
            optimizer.scale = _scale(optimizer.scale, saved.attrs, self.path)
        for kind, name in self._kept():
            whole, (division, _) = saved.matrices[f"{kind}/{name}"].allgather(), self._model[name]
            if name in optimizer.buckets.divisions:
                window = division.window(mesh.shape, mesh.rank)
                optimizer.restore(kind, name, whole.reshape(division.shape)[window].ravel())
        self.step, optimizer.updates = numbers[_STEP], numbers[_UPDATES]


def model_of(mesh: Mesh, divisions: dict[str, Division]) -> dict[str, tuple[Division, list[int]]]:
    """Return the divisions of the parameters of all pipeline stages, and the stages that have each.  Collective.

    Raises ArgumentError on all ranks where two stages have a parameter of one name that is not tied, or different ones.
    """
    model = dict[str, tuple[Division, list[int]]]()
    of_ranks = mesh.comm.allgather(divisions)
    for rank in range(0, mesh.shape.size, mesh.shape.size // mesh.shape.pp):
        stage = mesh.shape.index("pp", rank)
        for name, division in of_ranks[rank].items():
            if name not in model:
                model[name] = division, [stage]
            elif division.tied and division == model[name][0]:
                model[name][1].append(stage)
            else:
                stages = f"pipeline stages {model[name][1][0]} and {stage}"
                raise ArgumentError(f"a state has one parameter {name!r}, and {stages} have other ones: tie or rename")
    return model


def _check_names(parameters: list[str]) -> None:
    """Raise ArgumentError where a parameter cannot be a dataset."""
    for name in parameters:
        parts = name.split("/")
        if {"", "."} & {*parts} or name.encode(errors="ignore").decode() != name or "\0" in name:
            raise ArgumentError(f"the parameter {name!r} cannot be a dataset of a state: rename it")
        if groups := {"/".join(parts[:at]) for at in range(1, len(parts))} & {*parameters}:
            raise ArgumentError(f"parameters {min(groups)!r} and {name!r} cannot be datasets of one state: rename one")


def _whole(value: Any, name: str, path: Path) -> int:
    """Return an attribute as a number of steps.  Raises FileError."""
    if not isinstance(value, int | np.integer) or value < 0:
        raise FileError(f"{path} is no state of a training run: {name} is {'not there' if value is None else value}")
    return int(value)


def _scale(scale: LossScale | None, attrs: Mapping[str, Any], path: Path) -> LossScale | None:
    """Return the scale of the loss as a file has it; where it has none, `scale`.  Raises FileError."""
    if not scale or _SCALE not in attrs:
        return scale
    try:
        return replace(scale, scale=float(attrs[_SCALE]), good=int(attrs[_GOOD]))
    except (ArgumentError, KeyError, TypeError, ValueError) as bad:
        raise FileError(f"{path} is no state of a training run: its scale of the loss is none ({bad})") from None
