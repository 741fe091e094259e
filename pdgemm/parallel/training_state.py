"""TrainingState: parameters, the optimizer's state and the step in one file, by names and global indices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pdgemm.errors import ArgumentError, FileError, MeshError
from pdgemm.io import hdf5
from pdgemm.local.arrays.integers import as_count
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.parallel.parts import as_table
from pdgemm.parallel.updates.loss_scale import LossScale
from pdgemm.parallel.updates.sharded_optimizer import ShardedOptimizer
from pdgemm.schedules.collectives.collective import Collective
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

    The file can be continued with any stage, any number of ranks along dp and any size of buckets.
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
        self.path, self.optimizer, self.step = Path(path), optimizer, 0
        self._every, self._keep = as_count(every, "every", 1), keep
        own = {**(attrs or {})}
        self._attrs = {**own, _RULE: repr(optimizer.rule), _TYPE: str(optimizer.buckets.layout.wide)}
        mesh = optimizer.buckets.mesh
        with (agreed := together(mesh.comm)) as arguments:
            _check_names([*optimizer.buckets.layout.places], [*own])
            arguments += ["TrainingState", self.path, self._every, *self._attrs.items()]
            if mesh.shape.size != mesh.shape.dp:
                raise MeshError(f"a TrainingState has the parameters of a mesh along dp alone, got {mesh.shape.sizes}")
            agreed.flag = self.path.exists()
        if agreed.flag:
            self._load()

    def steps(self, last: int) -> Iterator[int]:
        """Yield the numbers of the steps that are left up to `last`, and save the state between them."""
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
        matrices = {
            f"{kind}/{name}": self._matrix(kind, name)
            for kind in optimizer.kinds
            for name in optimizer.buckets.layout.places
        }
        hdf5.save_all(self.path, matrices, attrs=attrs, keep=self._keep)

    def _matrix(self, kind: str, name: str) -> DistMatrix:
        """Return a parameter, or what is kept of it, as a matrix on the line: each rank has some columns of it."""
        buckets, layout = self.optimizer.buckets, self.optimizer.buckets.layout
        line, bucket, words = buckets.line, layout.bucket_of[name], int(np.prod(buckets.storage.shapes[name]))
        elements, place = layout.overlap(name, buckets.storage.span(bucket))
        whole = np.zeros(words, layout.wide)
        whole[elements] = self.optimizer.kept(kind, bucket)[place]
        if layout.stage:
            spans = [layout.overlap(name, layout.part(bucket, index))[0] for index in range(line.size)]
            counts = tuple(x.stop - x.start for x in spans)
            gather = Collective("all_gather", "ring", tuple(range(line.size)), counts, layout.wide)
            carry_out(gather, line.comm, [whole], buckets.mesh.traffic["state"])
        table = whole.reshape(as_table(buckets.storage.shapes[name]))
        width = max(1, -(-table.shape[1] // line.size))
        local = table[:, buckets.index * width : (buckets.index + 1) * width].copy()
        return DistMatrix.from_local(local, table.shape, grid=line, block=(table.shape[0], width))

    def _load(self) -> None:
        """Set parameters, the optimizer's state and the step to those of the file.  Collective."""
        optimizer, buckets = self.optimizer, self.optimizer.buckets
        saved = hdf5.load_all(self.path, buckets.line)
        kinds = optimizer.kinds
        wanted = {
            f"{kind}/{name}": as_table(buckets.storage.shapes[name]) for kind in kinds for name in buckets.layout.places
        }
        with together(buckets.mesh.comm):
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
        for kind in kinds:
            for name in buckets.layout.places:
                optimizer.restore(kind, name, saved.matrices[f"{kind}/{name}"].allgather().ravel())
        self.step, optimizer.updates = numbers[_STEP], numbers[_UPDATES]


def _check_names(parameters: list[str], attrs: list[str]) -> None:
    """Raise ArgumentError where a parameter cannot be a dataset, or an attribute is one of the state's."""
    for name in parameters:
        parts = name.split("/")
        if {"", "."} & {*parts} or name.encode(errors="ignore").decode() != name or "\0" in name:
            raise ArgumentError(f"the parameter {name!r} cannot be a dataset of a state: rename it")
        if groups := {"/".join(parts[:at]) for at in range(1, len(parts))} & {*parameters}:
            raise ArgumentError(f"parameters {min(groups)!r} and {name!r} cannot be datasets of one state: rename one")
    if taken := [name for name in attrs if name in (_STEP, _UPDATES, _SCALE, _GOOD, _RULE, _TYPE)]:
        raise ArgumentError(f"attrs of a state have names beside its own, got {taken[0]!r}")


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
