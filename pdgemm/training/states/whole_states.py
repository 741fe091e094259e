"""States of a run: whole parameters, buffers and what the optimizer keeps, in files and in mappings of torch.

A file has whole tensors by the names of the model, "optimizer/exp_avg/NAME" for what the optimizer keeps, and one text:
the number of steps, the options of the optimizer, and the position of the sampler.  It does not depend on the mesh.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from pdgemm.errors import ArgumentError
from pdgemm.io import hdf5
from pdgemm.io.atomic import on_root
from pdgemm.io.safetensors import matrices as safetensors
from pdgemm.io.safetensors.header import read_header
from pdgemm.local.arrays.dtypes import STORED
from pdgemm.matrix.distmatrix import DistMatrix
from pdgemm.schedules.collectives.collective import Collective
from pdgemm.support.agreement import together
from pdgemm.training.layers.exchanges import flat_array
from pdgemm.training.layers.placements import Division
from pdgemm.training.mesh import Line, Mesh
from pdgemm.training.states.name_tables import Match, Named, Names, matches
from pdgemm.training.storage import WIDE

if TYPE_CHECKING:
    from pdgemm.parallel.data.sampler import Sampler
    from pdgemm.training.training_run import Run

_OPTIMIZER, _RUN = "optimizer/", "pdgemm.training"  # before names of tensors; the name of the text
_SHOWN = 9  # tensors in each list of a message
_HDF5, _SAFETENSORS, _INDEX = (".h5", ".hdf5"), ".safetensors", ".safetensors.index.json"


class Owned(NamedTuple):
    """What a rank has of a tensor: some elements of its part.

    place : of the part along the axis of the division.   shape : of the part.   start, stop : of the elements.
    """

    division: Division
    dtype: torch.dtype
    place: int
    shape: tuple[int, ...]
    start: int
    stop: int


class WholeTensor(NamedTuple):
    """How the ranks of a mesh have a tensor.

    shapes : of its parts, by their place.   owners : by rank, each element once.
    """

    division: Division
    dtype: torch.dtype
    shapes: dict[int, tuple[int, ...]]
    owners: dict[int, Owned]

    @property
    def empty(self) -> torch.Tensor:
        """A tensor of this shape and type without elements."""
        return self.division.joined([torch.empty(x, dtype=self.dtype, device="meta") for x in self.shapes.values()])

    def gathered(self, own: torch.Tensor | None, line: Line, root: int) -> torch.Tensor:
        """Return the tensor on rank `root`, and `empty` on others.  Collective over the line of all ranks.

        own : the elements that this rank has.
        """
        ranks = (*range(root, line.size), *range(root))
        counts = tuple(self.owners[x].stop - self.owners[x].start if x in self.owners else 0 for x in ranks)
        starts = dict(zip(ranks, accumulate((0, *counts))))
        flat = torch.empty(sum(counts), dtype=self.dtype)
        pieces = {rank: flat[starts[rank] :][: x.stop - x.start] for rank, x in self.owners.items()}
        if own is not None and line.rank in pieces:
            pieces[line.rank].copy_(own)
        array = flat_array(flat)
        line.carry_out(Collective("gather", "flat", ranks, counts, array.dtype), array, "states")
        if line.rank != root:
            return self.empty
        parts = {place: torch.empty(x, dtype=self.dtype) for place, x in self.shapes.items()}
        for rank, x in self.owners.items():
            parts[x.place].view(-1)[x.start : x.stop] = pieces[rank]
        return self.division.joined([*parts.values()])


class WholeTensors:
    """The tensors of a run, by name: parameters and buffers as in the model, and "optimizer/exp_avg/NAME".  Collective.

    whole : how the ranks have each.   types : of parameters and buffers in the model, by all their names there.
    names : the parameter that a name of the model means, where modules share parameters.
    numbers : what the optimizer keeps once for each of its groups, such as the number of its steps.
    """

    def __init__(self, run: Run, optimizer: torch.optim.Optimizer | None) -> None:
        self._run, in_model = run, run.model.state_dict()
        first = {id(x): name for name, x in run.model.named_parameters()}
        self.names = {name: first[id(x)] for name, x in run.model.named_parameters(remove_duplicate=False)}
        self.types = {name: x.dtype for name, x in in_model.items()}
        self._buffers = {name: x for name, x in in_model.items() if name not in self.names}
        self._line, self._weights = run.mesh.line("pp+dp+cp+tp"), {id(x.weights): x.name for x in run.pieces}
        self._elements, self._owned = dict[str, torch.Tensor](), dict[str, Owned]()
        with together(run.mesh.comm):
            self._set_own()
            kept, numbers = self._kept(optimizer)
        everywhere = run.mesh.comm.allgather((self._owned, kept, numbers))
        self.numbers: list[dict[str, Any]] = [
            next(filter(None, of_ranks), {}) for of_ranks in zip(*(x for _, _, x in everywhere))
        ]
        self.whole = dict[str, WholeTensor]()
        for name in dict.fromkeys(self.names.get(name, name) for name in in_model):
            of_ranks = {rank: x[name] for rank, (x, _, _) in enumerate(everywhere) if name in x}
            lowest = {(x.place, x.start): rank for rank, x in reversed(of_ranks.items()) if x.start < x.stop}
            shapes = dict(sorted((x.place, x.shape) for x in of_ranks.values()))
            one, owners = next(iter(of_ranks.values())), {rank: of_ranks[rank] for rank in lowest.values()}
            self.whole[name] = WholeTensor(one.division, one.dtype, shapes, owners)
        for _, of_rank, _ in everywhere:
            for name, dtype in of_rank.items():
                self.whole[name] = self.whole[_parameter(name)]._replace(dtype=dtype)

    def _set_own(self) -> None:
        """Record what this rank has of parameters and buffers."""
        run, pieces = self._run, {piece.name: piece for piece in self._run.pieces}
        for name, stored in run.parameters.items():
            x, place = stored.parameter, run.mesh.index(stored.division.axis) if stored.division.axis else 0
            span, dtype = slice(0, 0), WIDE.get(x.dtype, torch.float32)
            if name in pieces:
                span, self._elements[name] = pieces[name].span, pieces[name].weights.detach().view(-1)
            elif not x.requires_grad:
                span, dtype, self._elements[name] = slice(0, x.numel()), x.dtype, x.data.view(-1)
            self._owned[name] = Owned(stored.division, dtype, place, tuple(x.shape), span.start, span.stop)
        for name, x in self._buffers.items():
            if not run.chain or run.chain.is_own(name.rpartition(".")[0]):
                self._elements[name] = x.reshape(-1)
                self._owned[name] = Owned(Division(), x.dtype, 0, tuple(x.shape), 0, x.numel())

    def _kept(self, optimizer: torch.optim.Optimizer | None) -> tuple[dict[str, torch.dtype], list[dict[str, Any]]]:
        """Return what the optimizer keeps on this rank: types of tensors by name, and numbers by group."""
        types, numbers = dict[str, torch.dtype](), list[dict[str, Any]]()
        if optimizer is None:
            return types, numbers
        for group in optimizer.param_groups:
            numbers.append({})
            for weights in group["params"]:
                for key, x in optimizer.state.get(weights, {}).items():
                    if isinstance(x, torch.Tensor) and x.shape == weights.shape:
                        name = f"{_OPTIMIZER}{key}/{self._weights[id(weights)]}"
                        types[name], self._elements[name] = x.dtype, x.view(-1)
                    elif isinstance(x, torch.Tensor) and not x.dim():
                        numbers[-1][key] = x.item(), str(x.dtype).removeprefix("torch.")
                    elif isinstance(x, (int, float)):
                        numbers[-1][key] = x
                    elif x is not None:
                        raise ArgumentError(f"{key!r} of the optimizer has no shape of a parameter, but is {x!r:.60}")
        return types, numbers

    def empty(self, name: str) -> torch.Tensor:
        """Return a tensor without elements, of the shape of a tensor of the run or of its optimizer."""
        return self.whole[_parameter(name)].empty

    def gathered(self, name: str, root: int) -> torch.Tensor:
        """Return a tensor on rank `root`, and one without elements on others.  Collective."""
        return self.whole[name].gathered(self._elements.get(name), self._line, root)

    def set(self, name: str, whole: torch.Tensor) -> None:
        """Set this rank's elements of a tensor.  Local."""
        if name in self._buffers:
            self._buffers[name].copy_(whole)
        elif name in self._elements:
            own = self._owned[_parameter(name)]
            ranks = self._run.mesh.length(own.division.axis) if own.division.axis else 1
            part = own.division.part(whole, ranks, own.place).reshape(-1)
            self._elements[name].copy_(part[own.start : own.stop])

    def restart(self, optimizer: torch.optim.Optimizer, kept: Iterable[str], numbers: list[dict[str, Any]]) -> None:
        """Let the optimizer keep zeros in these tensors, and these numbers.  Local."""
        optimizer.state.clear()
        names = dict[str, list[str]]()
        for name in kept:
            names.setdefault(_parameter(name), []).append(name)
        for group, of_group in zip(optimizer.param_groups, numbers):
            for weights in group["params"]:
                for name in names.get(self._weights.get(id(weights), ""), ()):
                    optimizer.state[weights][name.split("/")[1]] = x = torch.zeros_like(weights)
                    self._elements[name] = x.view(-1)
                for key, x in of_group.items() if weights in optimizer.state else ():
                    optimizer.state[weights][key] = (
                        torch.tensor(x[0], dtype=getattr(torch, x[1])) if isinstance(x, list) else x
                    )


class Stored(NamedTuple):
    """A tensor of a file.   shape : as the file has it.   matrix : its elements, divided among the ranks."""

    shape: tuple[int, ...]
    matrix: DistMatrix

    def __str__(self) -> str:
        return f"{self.shape} {self.matrix.dtype}"


def save_run(
    run: Run,
    optimizer: torch.optim.Optimizer | None,
    path: str | Path,
    sampler: Sampler | None,
    extra: Any,
    names: Names | None,
) -> None:
    """Write the file of `Run.save`.  Collective."""
    mesh, comm = run.mesh, run.mesh.comm
    with together(comm) as arguments:
        path = _checked(path, (*_HDF5, _SAFETENSORS))
        arguments += ["Run.save", path, str(names)]
        state: dict[str, Any] = {"steps": run.steps, "extra": extra, "rule": optimizer and type(optimizer).__name__}
        state["sampler"] = sampler and sampler.state(run.steps)
        groups = optimizer.param_groups if optimizer else []
        state["options"] = [{k: x for k, x in group.items() if k != "params"} for group in groups]
        json.dumps(state)
    tensors = WholeTensors(run, optimizer if names is None else None)
    with together(comm):
        found = matches(names, tensors.whole)[0] if names is not None else _alike(tensors.whole)
        stored = [name for match in found for name in match.tensors]
        if twice := sorted({name for name in stored if stored.count(name) > 1}):
            raise ArgumentError(f"the table of names stores several parameters as {', '.join(twice)}")
        for match in found:
            match.how.tensors([tensors.whole[name].empty for name in match.parameters])
    held, shapes, words = dict[str, DistMatrix](), dict[str, tuple[int, ...]](), [0] * comm.size
    for match in found:
        root = words.index(min(words))  # until all are written, each rank has about as many elements
        parameters = [tensors.gathered(name, root) for name in match.parameters]
        for name, x in zip(match.tensors, match.how.tensors(parameters)):
            shapes[name], words[root] = tuple(x.shape), words[root] + x.numel()
            x = x if names is None else x.to(tensors.types[match.parameters[0]])
            held[name] = _matrix(x, root, mesh, path.suffix in _HDF5)
    text = {_RUN: comm.bcast(json.dumps(state | {"numbers": tensors.numbers}))} if names is None else {}
    if path.suffix in _HDF5:
        hdf5.save_all(path, held, attrs=text)
    else:
        safetensors.save_all(path, held, shapes=shapes, metadata={"format": "pt"} | text)


def load_run(
    run: Run, optimizer: torch.optim.Optimizer | None, path: str | Path, sampler: Sampler | None, names: Names | None
) -> Any:
    """Set a run to the file of `Run.load`, and return `extra`.  Collective."""
    with together(run.mesh.comm) as arguments:
        path = _checked(path, (*_HDF5, _SAFETENSORS, _INDEX))
        arguments += ["Run.load", path, str(names)]
    there, text = _read(path, run.mesh)
    tensors, state = WholeTensors(run, None), json.loads(text or "{}")
    with together(run.mesh.comm):
        if names is None:
            found = _by_name(tensors, there, bool(optimizer))
            ignored = [*tensors.names, *([] if optimizer else [f"{_OPTIMIZER}*"])]
            _check_state(path, state, optimizer, sampler)
        else:
            found, ignored = matches(names, tensors.whole)
        tables = path.suffix in _HDF5  # without the shapes of vectors and of arrays with more dimensions
        _check(f"{path}", tensors, there, found, ignored, tables)
        if names is None:
            if optimizer:
                kept = [match.parameters[0] for match in found if match.parameters[0].startswith(_OPTIMIZER)]
                tensors.restart(optimizer, kept, state["numbers"])
                for group, options in zip(optimizer.param_groups, state["options"]):
                    group |= {k: tuple(x) if isinstance(x, list) else x for k, x in options.items()}
            run.steps = state.get("steps", run.steps)
            if sampler:
                sampler.start = state["sampler"]["taken"] - run.steps * sampler.batch
    _set(run, tensors, there, found)
    return state.get("extra")


def whole_state_dict(run: Run) -> dict[str, torch.Tensor]:
    """Return the mapping of `Run.state_dict`.  Collective."""
    tensors = WholeTensors(run, None)
    wholes = {name: tensors.gathered(name, 0) for name in tensors.whole}
    if run.mesh.rank:
        return {}
    return {name: wholes[tensors.names.get(name, name)].to(dtype) for name, dtype in tensors.types.items()}


def load_whole_state_dict(run: Run, mapping: Mapping[str, torch.Tensor]) -> None:
    """Set parameters and buffers to the mapping of rank 0, see `Run.load_state_dict`.  Collective."""
    tensors, comm = WholeTensors(run, None), run.mesh.comm
    with together(comm):
        values = {} if comm.rank else {name: x.detach() for name, x in mapping.items()}
    values = comm.bcast({name: torch.empty_like(x, device="meta") for name, x in values.items()}) | values
    there = {name: Stored(tuple(x.shape), _matrix(x, 0, run.mesh)) for name, x in values.items()}
    with together(comm):
        found = _by_name(tensors, there, False)
        _check("the mapping", tensors, there, found, tensors.names)
    _set(run, tensors, there, found)


def _parameter(name: str) -> str:
    """Return the parameter that a tensor of the optimizer belongs to, or the name itself."""
    return name.split("/", 2)[-1] if name.startswith(_OPTIMIZER) else name


def _checked(path: str | Path, endings: tuple[str, ...]) -> Path:
    """Return the path of a state.  Raises ArgumentError where the name has another ending."""
    if not str(path).endswith(endings):
        raise ArgumentError(f"the name of a state ends with {', '.join(endings)}, got {str(path)!r}")
    return Path(path)


def _alike(names: Iterable[str]) -> list[Match]:
    return [Match((name,), (name,), Named(name)) for name in names]


def _by_name(tensors: WholeTensors, there: Iterable[str], optimizer: bool) -> list[Match]:
    """Return the matches of equal names; the file may have a parameter by any of its names in the model."""
    called = {tensors.names.get(name, name): name for name in there}
    found = [match._replace(tensors=(called.get(*match.tensors, *match.tensors),)) for match in _alike(tensors.whole)]
    kept = (name for name in there if optimizer and name.startswith(_OPTIMIZER) and _parameter(name) in tensors.whole)
    return found + _alike(kept)


def _check_state(
    path: Path, state: Mapping[str, Any], optimizer: torch.optim.Optimizer | None, sampler: Sampler | None
) -> None:
    """Raise ArgumentError where a file has another optimizer or another sampler than the run."""
    rule, groups = type(optimizer).__name__, len(optimizer.param_groups) if optimizer else 0
    if optimizer and (state.get("rule"), len(state.get("options", ()))) != (rule, groups):
        raise ArgumentError(
            f"{path} has the optimizer {state.get('rule')} with {len(state.get('options', ()))} groups of parameters, "
            f"and here it is {rule} with {groups}: load parameters only before run.optimizer(...)"
        )
    if sampler and (saved := state.get("sampler")) != sampler.state(0) | {"taken": saved and saved["taken"]}:
        raise ArgumentError(f"{path} has the sampler {saved}, and here it is {sampler.state(0)}")


def _check(
    source: str,
    tensors: WholeTensors,
    there: Mapping[str, Stored],
    found: list[Match],
    ignored: Iterable[str],
    tables: bool = False,
) -> None:
    """Raise ArgumentError with all tensors that are missing in a file, or that are of no use or of another shape."""
    missing, other, used = list[str](), list[str](), {name for match in found for name in match.tensors}
    for match in found:
        for name, x in zip(match.tensors, match.how.tensors([tensors.empty(name) for name in match.parameters])):
            shape = _table(x.shape) if tables else tuple(x.shape)
            if name not in there:
                missing.append(f"{name} {shape}")
            elif there[name].shape != shape or there[name].matrix.dtype.kind == "c":
                other.append(f"{name} {there[name]} in place of {shape}")
    extra = [x for x in there if x not in used and not any(fnmatchcase(x, pattern) for pattern in ignored)]
    wrong = {"without": missing, "with other": other, "with more": [f"{name} {there[name]}" for name in extra]}
    more = {what: f" and {len(x) - _SHOWN} others" if len(x) > _SHOWN else "" for what, x in wrong.items()}
    lists = (f"{what} {', '.join(x[:_SHOWN])}{more[what]}" for what, x in wrong.items() if x)
    if missing or other or extra:
        raise ArgumentError(f"{source} is not of this model: {'; '.join(lists)}")


def _set(run: Run, tensors: WholeTensors, there: Mapping[str, Stored], found: list[Match]) -> None:
    """Set tensors to those of a file.  Collective."""
    with torch.no_grad():
        for match in found:
            empty = [tensors.empty(name) for name in match.parameters]
            stored = list[torch.Tensor]()
            for name, x in zip(match.tensors, match.how.tensors(empty)):
                array = there[name].matrix.allgather()
                array = array if array.dtype.kind in "fiub" else array.astype(np.float32)  # of bfloat16, for example
                stored.append(torch.from_numpy(array).reshape(x.shape))
            sizes = [x.shape[match.how.dim] for x in empty] if len(empty) > 1 else [0]
            for name, x in zip(match.parameters, match.how.parameters(stored, sizes)):
                tensors.set(name, x)
        for storage in run.storages:
            storage.updated()


def _matrix(x: torch.Tensor, root: int, mesh: Mesh, narrow: bool = False) -> DistMatrix:
    """Return a tensor that rank `root` has as a matrix on all ranks.  Collective.

    narrow : of a type that files of HDF5 can have.
    """
    shape, dtype = _table(x.shape), flat_array(torch.empty(0, dtype=x.dtype)).dtype
    kind = dtype if dtype in STORED or not narrow else np.dtype(np.float64 if dtype.kind in "biu" else np.float32)
    own = mesh.rank == root
    local = flat_array(x.contiguous()).reshape(shape).astype(kind, copy=False) if own else np.empty((shape[0], 0), kind)
    block = max(1, shape[0]), max(1, shape[1])
    return DistMatrix.from_local(local, shape, grid=mesh.grid, block=block, source=(0, root))


def _table(shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape of the matrix of a tensor: vectors are columns, and dimensions behind the first are one."""
    rows = shape[0] if shape else 1
    return rows, prod(shape[1:])


def _read(path: Path, mesh: Mesh) -> tuple[dict[str, Stored], str]:
    """Return the tensors of a file, and the text about its run.  Collective."""
    if path.suffix in _HDF5:
        saved = hdf5.load_all(path, mesh.grid)
        return {name: Stored(x.shape, x) for name, x in saved.matrices.items()}, saved.attrs.get(_RUN, "")
    files, there, text = [path.name], dict[str, Stored](), ""
    if path.name.endswith(_INDEX):
        files = on_root(mesh.comm, path, lambda: sorted({*json.loads(path.read_text())["weight_map"].values()}))
    for file in map(path.with_name, files):
        header = on_root(mesh.comm, file, partial(read_header, file))
        text = header.metadata.get(_RUN, "")
        loaded = safetensors.load_all(file, mesh.grid)
        there |= {name: Stored(header.tensors[name].shape, x) for name, x in loaded.items()}
    return there, text
